"""Why problems have no solution: what proves it, asked for later."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dfwlayer.constraints.polyhedra.proofs import direction_down, proof_of_empty
from dfwlayer.engines.base import Task
from dfwlayer.objectives.base import Objective
from dfwlayer.solution import Status

if TYPE_CHECKING:
    from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron

__all__ = ["proof_of"]


def proof_of(task: Task, status: Tensor) -> dict[str, Tensor]:
    """See `dfwlayer.Solution.proof`, for problems that ended with these statuses."""
    n = math.prod(task.shape)
    like = torch.zeros(*task.lead, n, dtype=task.objective.dtype, device=task.objective.device)
    _, b, _, h = _rows_of(task, like).rows_of(like)
    sizes: dict[str, tuple[int, ...]] = {"h": h.shape[-1:], "b": b.shape[-1:]}
    sizes |= dict.fromkeys(("lower", "upper", "direction"), task.shape)
    out = {name: like.new_full((*task.lead, *size), torch.nan) for name, size in sizes.items()}
    status = status.reshape(task.lead)
    for code in (Status.INFEASIBLE, Status.UNBOUNDED):
        mask = status == code
        if not bool(mask.any()):
            continue
        part = _part(task, mask)
        some = like[mask].reshape(-1, n)
        rows = _rows_of(part, some)
        if code == Status.INFEASIBLE:
            found = proof_of_empty(rows, some)
        elif (model := _quadratic(part.objective, some)) is not None:
            found = {"direction": direction_down(rows, *model, some)}
        else:
            continue
        for name, value in found.items():
            out[name][mask] = value.to(like.dtype).reshape(out[name][mask].shape)
    return out


def _rows_of(task: Task, like: Tensor) -> Polyhedron:
    found = task.constraint.as_polyhedron(like)
    if found is None:
        raise ValueError(
            "constraint: a proof is to be had for sets of linear rows, such as Polyhedron and Box, "
            f"got {type(task.constraint).__name__}"
        )
    return found


def _part(task: Task, mask: Tensor) -> Task:
    """The problems of a mask; values were not checked, so that nothing stands in for them."""
    if not mask.dim():
        return task
    index = mask.nonzero().squeeze(-1)
    objective, constraint = task.objective.rows(index), task.constraint.rows(index)
    assert objective is not None and constraint is not None  # noqa: PT018
    return replace(task, objective=objective, constraint=constraint, lead=(len(index),))


def _quadratic(objective: Objective, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """P and q in double precision, None for an f that is not quadratic."""
    if not objective.quadratic:
        return None
    q = objective.gradient(torch.zeros_like(like)).double()
    if objective.isotropic:
        return torch.eye(like.shape[-1], dtype=q.dtype, device=q.device), q
    model = objective.model(like)
    return None if model is None else (model.dense().matrix, q)
