"""Modules that take the place of layers: fixed steps, no question asked, feasible at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dfwlayer.constraints import LpBall, Polyhedron
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import table
from dfwlayer.constraints.plain import Plain
from dfwlayer.deploy.steps import descended
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.ops.tracing import recorded

__all__ = ["DeployedBall", "DeployedProgram", "DeployedSet", "deployed"]


class _Deployed(nn.Module):
    """What they have in common: a number of steps, and the way from q to x."""

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.eval()

    def _answer(self, plain: Plain, P: Tensor | None, q: Tensor) -> Tensor:
        """argmin ½ xᵀPx + qᵀx, in the set, of q's dtype; a row of q that is not finite makes NaN.

        P is (n, n) or (..., n, n), and q (..., n).
        """
        z = -q.double()
        if P is None:
            x = plain.nearest(z, self.max_steps)
        elif plain.short:
            x = descended(plain, P, z, self.max_steps)
        else:
            raise ValueError(
                "P: expected None, as the projection onto this set takes steps itself and a P that "
                "comes with the call would repeat them in every step of its own; a constant P over "
                "linear rows is QPLayer().deploy(Q=P, G=G, h=h)"
            )
        return plain.inside(x.to(q.dtype)) + (0.0 * q).sum(-1, keepdim=True)

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script."""
        raise RuntimeError(
            "dfwlayer: torch.jit.script cannot read a deployed layer; torch.jit.trace(model, "
            "inputs) of the model with its layers deployed makes TorchScript of it, for batches of "
            "any size, and may be a part of what is scripted"
        )

    def extra_repr(self) -> str:
        """The number of steps."""
        return f"max_steps={self.max_steps}"


class DeployedBall(_Deployed):
    """A `DFWLayer` without what needs Python; its call is the layer's."""

    def __init__(self, p: float, max_steps: int) -> None:
        super().__init__(max_steps)
        self.p = p
        _warm_up()

    def forward(
        self,
        P: Tensor | None,  # (n, n), (*batch, n, n), or None for the identity
        q: Tensor,  # (n,) or (*batch, n)
        weight: Tensor | None = None,  # (n,) or (*batch, n), None for ones
        radius: float | Tensor = 1.0,  # number, () or (*batch)
        *,
        centre: Tensor | None = None,  # (n,) or (*batch, n), None for zero
    ) -> Tensor:
        """The solution, of q's shape and dtype."""
        with recorded():
            ball = LpBall(self.p, radius, weight, centre=centre)
        return self._answer(plain_of(ball, fixed=False), P, q)

    def extra_repr(self) -> str:
        """p, and the number of steps."""
        return f"p={self.p:g}, {super().extra_repr()}"


class _Kept(_Deployed):
    """A module with the tensors of a `Plain` as buffers, which are saved and moved with it."""

    def _keep(self, plain: Plain) -> None:
        tensors = tensors_in(plain)
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"part{i}", tensor.detach().clone())
        self.form = filled(plain, iter([torch.empty(0)] * len(tensors)))
        self.count = len(tensors)

    @property
    def _plain(self) -> Plain:
        found: Plain = filled(
            self.form, iter([getattr(self, f"part{i}") for i in range(self.count)])
        )
        return found


class DeployedSet(_Kept):
    """A `SetLayer` without what needs Python; its calls are ``(q)`` and ``(P, q)``.

    The set is as it is now, with what it has learnt; or it is made in the call, from keywords.
    """

    positional = ("P", "q")  # what the arguments are called in files

    def __init__(
        self,
        constraint: Constraint | Callable[..., Constraint],
        max_steps: int,
        shape: tuple[int, ...] | None,
    ) -> None:
        super().__init__(max_steps)
        self.shape = shape
        self.fixed = isinstance(constraint, Constraint)
        if isinstance(constraint, Constraint):
            self.variable = constraint.variable
            self._keep(plain_of(self._flat(constraint), fixed=True))
        else:
            _warm_up()
            self.make = constraint
            if isinstance(constraint, nn.Module):
                self.make = copy.deepcopy(constraint).eval()

    def forward(self, *problem: Tensor | None, **parameters: Any) -> Tensor:
        """The solution for (q) or (P, q), over the set for these parameters."""
        if len(problem) not in (1, 2) or not isinstance(q := problem[-1], Tensor):
            raise ValueError(
                "q: expected one of the calls (q) and (P, q) with tensors, and the set's "
                "parameters by name; objectives of other kinds cannot be deployed"
            )
        P = problem[0] if len(problem) == 2 else None
        if self.fixed:
            if parameters:
                names = ", ".join(parameters)
                raise ValueError(
                    f"constraint: expected a function of {names}, got a set; "
                    f"SetLayer(lambda {names}: …) makes the set in every call"
                )
            plain, variable = self._plain, self.variable(tuple(q.shape))
        else:
            with recorded():
                made = self.make(**parameters)
            variable = made.variable(tuple(q.shape))
            lead = tuple(q.shape[: q.dim() - len(self.shape or (0,))])
            plain = plain_of(self._flat(made, lead), fixed=False)
        shape = self.shape or variable or tuple(q.shape[-1:])
        dims = len(shape)
        x = self._answer(plain, P, q.flatten(-dims))
        return x.reshape(*x.shape[:-1], *shape)

    def _flat(self, constraint: Constraint, lead: tuple[int, ...] = ()) -> Constraint:
        """Over vectors; ``lead`` are the batch dimensions of what all parameters go with."""
        if self.shape is None or len(self.shape) == 1:
            return constraint
        return constraint.flattened(self.shape, lead)


class DeployedProgram(_Kept):
    """A `QPLayer` whose rows, and Q, are constants; its call is ``(p)``."""

    def __init__(self, constraint: Polyhedron, Q: Tensor | None, max_steps: int) -> None:
        super().__init__(max_steps)
        self._keep(plain_of(constraint, fixed=True, Q=Q))

    def forward(self, p: Tensor) -> Tensor:  # (n,) or (*batch, n)
        """The solution, of p's shape and dtype."""
        return self._answer(self._plain, None, p)


def plain_of(constraint: Constraint, *, fixed: bool, **program: Tensor | None) -> Plain:
    """What a set is in tensor operations; a ValueError that names it where it is nothing."""
    name = type(constraint).__name__
    try:
        with recorded():
            if program:
                assert isinstance(constraint, Polyhedron)
                return constraint.plain_program(program["Q"], fixed=fixed)
            found = constraint.plain(fixed=fixed)
    except ValueError as error:
        raise ValueError(f"constraint: {name} cannot be deployed: {error}") from None
    if found is None:
        raise ValueError(
            f"constraint: {name} cannot be deployed: its projection is not known as a fixed number "
            "of tensor operations; a set has one by writing `Constraint.plain`"
        )
    return found


def _warm_up() -> None:
    """Look through the parameters of all sets, which cannot be done while one is recorded."""
    kinds = [Constraint]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if is_dataclass(kind):
            table(kind)


def deployed(model: nn.Module, *, max_steps: int = 50) -> nn.Module:
    """A copy of a model, in evaluation mode, with every layer of this library deployed."""
    made = nn.ModuleList([copy.deepcopy(model)]).eval()
    found: Any
    for path, found in list(made.named_modules()):
        if hasattr(found, "_deployed"):
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, found.deploy(max_steps=max_steps))
    return made[0]
