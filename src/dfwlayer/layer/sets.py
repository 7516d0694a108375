"""The layer over any set, whose tensors it may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dfwlayer.arguments import refuse_proxy, shown
from dfwlayer.constraints.base import Constraint
from dfwlayer.deploy import DeployedSet
from dfwlayer.engines.seen import set_in_sight
from dfwlayer.layer.base import Layer, checked_x, projects, real
from dfwlayer.objectives import Quadratic
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.recorded import recordable
from dfwlayer.ops.tensors import fields_of, filled, tensors_in
from dfwlayer.solution import Solution
from dfwlayer.solve import again, outline

__all__ = ["SetLayer"]


class SetLayer(Layer):
    """x*(P, q) = argmin ½ xᵀPx + qᵀx over any set, as a layer.

    ``layer(q)`` is ``solve(Quadratic(None, q), constraint).x``, the point of the set nearest to −q,
    so it stands in an ``nn.Sequential``; q is what x costs, and ``layer(-z)`` projects z.
    ``layer(P, q)`` has a P, ``layer(objective)`` any objective. Tensors of the set belong to the
    layer: parameters are trained, all of them are saved and moved with it. A set that depends on
    the call is made by a function, or by a module with parameters of its own, from the keyword
    arguments of the call.

    Args:
        constraint: The set, or a function that returns it.
        shape: Of one problem's variable, as for `dfwlayer.solve`.
        settings: Those of `DFWLayer`, with its defaults, and ``on_infeasible`` of `dfwlayer.solve`.

    Examples:
        >>> decide = nn.Sequential(nn.Linear(8, 5), SetLayer(Simplex()))
        >>> ball = SetLayer(LpBall(1, radius=nn.Parameter(torch.ones(()))))  # learns its radius
        >>> made = SetLayer(lambda radius: LpBall(1, radius))
        >>> x = made(P, q, radius=radius)

    """

    def __init__(
        self,
        constraint: Constraint | Callable[..., Constraint],
        *,
        shape: tuple[int, ...] | int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if not isinstance(constraint, Constraint) and not callable(constraint):
            raise ValueError(
                "constraint: expected a set such as Simplex(), or a function that returns one, got "
                f"{shown(constraint)}"
            )
        self.constraint = _Held(constraint) if isinstance(constraint, Constraint) else constraint
        self.shape = shape

    def forward(self, *problem: Any, **parameters: Any) -> Tensor:
        """The solution for (q), (P, q) or (objective), over the set for these parameters."""
        if not isinstance(problem, tuple):  # all of them at once
            refuse_proxy(problem)
        constraint = self._set(parameters)
        return _over_set(self._itself(), _objective(problem), constraint, self.shape)

    def solve(self, *problem: Any, x0: Tensor | None = None, **parameters: Any) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        constraint = self._set(parameters)
        return self._solved(_objective(problem), constraint, x0=x0, shape=self.shape)

    def _set(self, parameters: dict[str, Any]) -> Constraint:
        """The set for these parameters."""
        constraint = self.constraint(**parameters)
        if not isinstance(constraint, Constraint):
            raise ValueError(
                "constraint: expected a function that returns a set such as LpBall, it returned "
                f"{shown(constraint)}"
            )
        return constraint

    def _deployed(self, steps: int) -> nn.Module:
        held = isinstance(self.constraint, _Held)
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        return DeployedSet(self.constraint() if held else self.constraint, steps, shape)

    def extra_repr(self) -> str:
        """The settings, and what the set is, unless it is a module."""
        told = [] if self.shape is None else [f"shape={self.shape}"]
        if not isinstance(self.constraint, nn.Module):
            told.append(f"constraint={shown(self.constraint)}")
        return ", ".join((*told, super().extra_repr()))


class _Held(nn.Module):
    """A set whose tensors are parameters and buffers, named after their fields."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        tensors = tensors_in(constraint, sparse=False)
        self.names = [name for name, _ in _named(constraint)]
        for name, tensor in zip(self.names, tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.form = filled(constraint, (torch.empty(0) for _ in tensors))

    def forward(self, **parameters: Any) -> Constraint:
        """The set with the tensors that are there now."""
        if parameters:
            names = ", ".join(parameters)
            raise ValueError(
                f"constraint: expected a function of {names}, got a set; "
                f"SetLayer(lambda {names}: …) makes the set in every call"
            )
        found: Constraint = self.form
        if self.names:
            found = filled(self.form, (getattr(self, name) for name in self.names))
        return found

    def _get_name(self) -> str:
        return type(self.form).__name__

    def extra_repr(self) -> str:
        """The fields of the set."""
        held = self.forward()
        told = ", ".join(f"{name}={shown(getattr(held, name))}" for name in fields_of(held))
        return " ".join(told.split())


def _named(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors in a set with names, in the order of `tensors_in`."""
    if isinstance(node, Tensor):
        if node.layout == torch.strided:
            yield "_".join(path), node
    elif isinstance(node, tuple | list | dict):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, part in pairs:
            yield from _named(part, (*path, str(key)))
    elif not isinstance(node, type):
        for name in fields_of(node):
            yield from _named(getattr(node, name), (*path, name))


def _objective(problem: tuple[Any, ...]) -> Objective:
    """That of (q), (P, q) or (objective)."""
    if len(problem) == 1 and isinstance(problem[0], Objective):
        return problem[0]
    if len(problem) not in (1, 2):
        raise ValueError(
            "q: expected one of the calls layer(q), layer(P, q) and layer(objective), with the "
            f"set's parameters by name, got {len(problem)} arguments"
        )
    return Quadratic(*problem) if len(problem) == 2 else Quadratic(None, *problem)


def _set_shapes(_: Any, objective: Any, constraint: Any, shape: Any) -> Any:
    return outline(objective, constraint, shape=shape)[:1]


def _set_again(found: Any, layer: Any, objective: Any, constraint: Any, shape: Any) -> Any:
    return again(found, objective, constraint, shape=shape, **real(layer)._options())


def _set_seen(layer: Any, objective: Any, constraint: Any, shape: Any) -> Any:
    own = layer.own  # while a graph is made, of which this is a part
    if type(objective) is not Quadratic or objective.P is not None or not projects(own):
        return None
    if shape is not None and shape not in (tuple(objective.q.shape[-1:]), objective.q.shape[-1]):
        return None
    seen = set_in_sight(constraint, objective.q)
    return None if seen is None else (seen[0], seen[1] if own["verify"] else None)


@recordable(shapes=_set_shapes, again=_set_again, seen=_set_seen)
def _over_set(
    layer: Any, objective: Objective, constraint: Constraint, shape: tuple[int, ...] | int | None
) -> Tensor:
    """The solution over any set."""
    own = real(layer)
    return checked_x(own, own._solved(objective, constraint, shape=shape))
