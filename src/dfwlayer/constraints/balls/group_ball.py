"""The ball of group norms, Σ_g w_g ‖x_g‖₂ ≤ t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.balls.ball import Ball
from dfwlayer.constraints.balls.groups import Groups
from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.base import Constraint, Face, measured
from dfwlayer.constraints.parameters import entries, number
from dfwlayer.constraints.plain import Plain, PlainFlat, PlainGroups
from dfwlayer.ops.rows import Scalar
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["GroupBall"]


@dataclass(frozen=True)
class GroupBall(Ball):
    """{x : Σ_g w_g ‖x_g‖₂ ≤ t}, which makes whole groups of coordinates zero (group lasso).

    Args:
        groups: The indices of each group, ``[[0, 1], [2, 3, 4]]``, or the label of every
            coordinate, ``[0, 0, 1, 1, 1]`` or an integer tensor. Indices count the entries of a
            matrix row by row; labels may have its shape. Every coordinate is in one group.
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        weight: w, (G,) or (B, G), None for ones. Only |w| matters; a zero weight leaves its
            group unconstrained.
        centre: c, of the variable's shape, with or without a batch; with it the set is
            Σ_g w_g ‖x_g − c_g‖₂ ≤ t, a `Shifted` ball.

    """

    groups: Sequence[Sequence[int]] | Sequence[int] | Tensor | Groups
    radius: float | Tensor = field(default=1.0, metadata=number(least=0, grows=True))
    weight: Tensor | None = field(default=None, metadata=entries(numbers=False))
    _: KW_ONLY
    centre: InitVar[float | Tensor | None] = None

    def __post_init__(self, centre: Value | None) -> None:
        object.__setattr__(self, "groups", Groups.of(self.groups))
        LpBall(1, self.radius)  # has the words for what is wrong with a number
        super().__post_init__()

    @property
    def _groups(self) -> Groups:
        assert isinstance(self.groups, Groups)
        return self.groups

    @measured
    def _ball(self) -> LpBall:
        """The ℓ1 ball of the group norms."""
        radius = tensor_of(self.radius)
        ball = LpBall(1, radius, self.weight)
        bound = ball.bind((self._groups.count,), radius.dtype, radius.device)
        assert isinstance(bound, LpBall)
        return bound

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A weight for each group."""
        return (self._groups.count,)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Check the groups against the variable, and the parameters against the groups."""
        self._groups.check_covers(torch.Size(shape).numel())
        return super().bind(shape, dtype, device)

    def unbounded(self) -> Tensor | None:
        """Coordinates of the groups of zero weight."""
        mask = self._ball.unbounded()
        return None if mask is None else self._groups.spread(mask)

    def vertex(self, g: Tensor) -> Tensor:
        """−(t/w_g) g_g/‖g_g‖ at the group with the largest ‖g_g‖/w_g, 0 elsewhere."""
        return self._along(g, self._ball.vertex(self._groups.norms(g)))

    def lowest(self, g: Tensor) -> Tensor:
        """−t max_g ‖g_g‖/w_g."""
        return self._ball.lowest(self._groups.norms(g))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """−(t/w_g) g_g/‖g_g‖ softmax(t‖g_g‖/(w_g τ)), the soft vertex of the ℓ1 ball by groups."""
        return self._along(g, self._ball.soft_vertex(self._groups.norms(g), temperature))

    def _along(self, g: Tensor, length: Tensor) -> Tensor:  # (..., n), (..., G) -> (..., n)
        return self._groups.spread(length) * self._groups.units(g)

    def bounded(self) -> Tensor | None:
        """Coordinates of the other groups."""
        unbounded = self.unbounded()
        return None if unbounded is None else ~unbounded

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """Each group shrinks to its part of the projection of the group norms."""
        norms = self._groups.norms(z)
        guess = None if near is None else self._groups.norms(near)
        shrunk = self._ball.project(norms, near=guess)
        if shrunk is norms:
            return z
        same = self._groups.spread(shrunk == norms)
        return torch.where(same, z, self._groups.spread(shrunk) * self._groups.units(z, norms))

    def diameter(self, n: int) -> Tensor:
        """2 max t/w."""
        return self._ball.diameter(self._groups.count)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> GroupFace:
        """The groups that are not zero, told like the support of a point of the ℓ1 ball."""
        groups = self._groups
        norms = groups.norms(x)
        along = groups.sums(g * groups.units(x, norms))
        pull = torch.where(norms > 0, along, groups.norms(g))
        if scale is not None:
            scale = Scale(*(groups.norms(part.expand_as(x)) for part in scale))
        outer = self._ball.face(norms, pull, scale)
        radius = tensor_of(self.radius)
        return GroupFace(groups, outer.weight, radius, x, outer.free, outer.multiplier)

    def plain(self, *, fixed: bool = True) -> Plain:
        """By the ℓ1 ball of the norms."""
        ball = LpBall(1, self.radius, self.weight).plain()
        assert isinstance(ball, PlainFlat)
        return PlainGroups(torch.nn.functional.one_hot(self._groups.label).float(), ball)

    def size(self, x: Tensor) -> Tensor:
        """Σ_g w_g ‖x_g‖₂ in double precision."""
        norms = self._groups.norms(x.double())
        if self.weight is not None:
            norms = norms * self.weight.detach().abs()
        return norms.sum(-1)


@dataclass(frozen=True)
class GroupFace(Face):
    """Free groups, bounded by h(x; w) = Σ_g w_g ‖x_g‖₂; see `dfwlayer.constraints.Face`.

    With u = x_g/‖x_g‖ in each group, ∇h = w_g u and ∇²h = w_g/‖x_g‖ (I − uuᵀ).
    """

    groups: Groups
    weight: Tensor  # |w|, (1,), (G,) or (B, G)
    radius: Tensor
    x: Tensor  # (..., n)
    free_groups: Tensor  # (..., G)
    multiplier: Scalar

    bends = True  # within groups

    @cached_property
    def free(self) -> Tensor:
        """Coordinates of free groups."""
        return self.groups.spread(self.free_groups)

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """∇h where the constraint is active."""
        slope = self._slope(self.weight.detach()) * self.free
        active = torch.as_tensor(self.multiplier > 0, device=slope.device)
        return (torch.where(active, slope, 0),)

    def curvature(self, v: Tensor) -> Tensor:
        """λ w_g/‖x_g‖ (v_g − u⟨u, v_g⟩) on the free groups."""
        units, bend = self._bend
        along = self.groups.spread(self.groups.sums(units * v))
        return bend * (v - units * along)

    @cached_property
    def _bend(self) -> tuple[Tensor, Tensor]:
        """u, and λw/‖x_g‖ for every coordinate."""
        norms = self.groups.norms(self.x)
        usable = self.free_groups & (norms > 0)
        over = torch.where(usable, self.weight.detach() / torch.where(usable, norms, 1), 0)
        return self.groups.units(self.x, norms), self.groups.spread(over) * self.multiplier

    def force(self) -> Tensor:
        """λ w_g x_g/‖x_g‖."""
        return self.multiplier * self._slope(self.weight)

    def excess(self) -> Tensor:
        """h(x; w) − t where the constraint is active, 0 elsewhere."""
        size = (self.weight * self.groups.norms(self.x)).sum(-1)
        active = torch.as_tensor(self.multiplier > 0, device=size.device)
        return torch.where(active, (size - self.radius).unsqueeze(-1), 0)

    def _slope(self, weight: Tensor) -> Tensor:
        """w_g x_g/‖x_g‖."""
        each = self.free_groups.to(self.x.dtype) * weight
        return self.groups.spread(each) * self.groups.units(self.x)
