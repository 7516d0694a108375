"""Gradients in the tensors of a batch from what Triton programs have found of each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.kernels.outcome import SOLVED
from dfwlayer.engines.programs.form import Form
from dfwlayer.ops.values import narrowed

__all__ = ["envelope", "is_own", "of_shared", "of_squares", "summed"]


def is_own(tensor: Tensor | None, rank: int, batch: int) -> bool:
    """Whether every problem has a part of a tensor for itself."""
    return tensor is not None and tensor.dim() > rank and len(tensor) == batch


def summed(like: Tensor, each: Tensor) -> Tensor:  # (B, ·)
    """One gradient for each problem, summed over what shares the tensor."""
    if each.dtype == like.dtype and each.numel() == like.numel():
        return each if each.shape == like.shape else each.view(like.shape)
    if like.dim() < each.dim():
        each = each.sum(0)
    elif like.dim() > each.dim():
        each = each.unsqueeze(-1)
    return narrowed(each.sum_to_size(like.shape), like.dtype)


def of_shared(matrix: Tensor, state: Tensor, u: Tensor, n: int, rows: slice | None) -> Tensor:
    """The gradient in a P, or in rows, that all problems share."""
    at = slice(n) if rows is None else rows
    total = -(u[:, at].mT @ state[:, :n] + state[:, at].mT @ u[:, :n])
    total = 0.5 * total if rows is None else total
    return narrowed(total.reshape(matrix.shape), matrix.dtype)


def of_squares(form: Form, asked: Sequence[bool], codes: Tensor, x: Tensor, u: Tensor) -> Gradients:
    """Of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b; the numbers of what was left may be any."""
    assert form.matrix is not None
    A, left = form.matrix.detach().double(), (codes[0] != SOLVED).unsqueeze(-1)
    moved = torch.where(left, 0, (A @ u.unsqueeze(-1)).squeeze(-1))
    of_matrix = None
    if asked[0]:
        residual = (A @ x.unsqueeze(-1)).squeeze(-1) - form.vector.detach().double()
        residual = torch.where(left, 0, residual)
        if is_own(form.matrix, 2, len(u)):
            of_matrix = -(moved.unsqueeze(-1) * x.unsqueeze(-2))
            of_matrix -= residual.unsqueeze(-1) * u.unsqueeze(-2)
        else:
            of_matrix = -(moved.mT @ x + residual.mT @ u)
        of_matrix = narrowed(of_matrix.reshape(form.matrix.shape), form.dtype)
    return [of_matrix, summed(form.vector, moved) if asked[1] else None]


def envelope(
    form: Form,
    tensors: Sequence[Tensor | None],
    rows: Mapping[int, slice],
    state: Tensor,
    solved: Tensor,
    w: Tensor,
) -> Gradients:
    """Gradients of f(x) over a polyhedron, of which x and its forces are the ``state`` (B, ·).

    That of a value is w (B, 1). x does not move: with forces λ of the rows these are those of
    f + Σ λ_j (⟨n_j, x⟩ − c_j), and x_i presses against a bound with its force. Where the ``rows``
    of each tensor of the set are is told by its place.
    """
    n = form.n
    x, forces = w * state[:, :n], state[:, : state.shape[1] - 1]
    held = -w * forces[:, forces.shape[1] - n :]

    def outer(matrix: Tensor, a: Tensor) -> Tensor:
        own = is_own(matrix, 2, len(x))
        total = a.unsqueeze(-1) * x.unsqueeze(-2) if own else a.mT @ x
        return narrowed(total.reshape(matrix.shape), matrix.dtype)

    matrix, vector = tensors[:2]
    assert vector is not None
    if form.squared:
        assert matrix is not None
        residual = (matrix.detach().double() @ state[:, :n].unsqueeze(-1)).squeeze(-1)
        residual = torch.where(solved, residual - vector.detach().double(), 0)
        out: Gradients = [outer(matrix, residual), summed(vector, -w * residual)]
    else:
        of_matrix = None if matrix is None else outer(matrix, 0.5 * state[:, :n])
        out = [of_matrix, summed(vector, x)]
    for place, at in sorted(rows.items()):
        matrix, side = tensors[2 + place], tensors[3 + place]
        force = forces[:, at]
        out.append(None if matrix is None else outer(matrix, force))
        out.append(None if side is None else summed(side, -w * force))
    below = forces[:, forces.shape[1] - n :] < 0
    for bound, at_it in zip(tensors[-2:], (below, ~below), strict=True):
        out.append(None if bound is None else summed(bound, torch.where(at_it, held, 0)))
    return out
