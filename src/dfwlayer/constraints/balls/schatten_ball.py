"""Balls of matrices by their singular values: ‖σ(X)‖_p ≤ t."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field

import torch
from torch import Tensor

from dfwlayer.arguments import as_sizes
from dfwlayer.constraints.balls.ball import Ball
from dfwlayer.constraints.balls.leading import LARGE, low_rank, norm_bound, shrunk, top_pair
from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.balls.schatten_face import SchattenFace, SpectralFace
from dfwlayer.constraints.balls.singular import Factors, factors, spectral_function
from dfwlayer.constraints.base import Constraint, measured
from dfwlayer.constraints.parameters import number, variable_of
from dfwlayer.constraints.plain import Plain, PlainSpectrum
from dfwlayer.constraints.retraction import scaled_into
from dfwlayer.ops.rows import or_one, scaled_norm
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["NuclearBall", "SchattenBall", "SpectralBall"]


def NuclearBall(  # noqa: N802
    radius: float | Tensor = 1.0,
    shape: tuple[int, int] | None = None,
    *,
    centre: float | Tensor | None = None,
) -> SchattenBall:
    """{X : Σ σ_i(X) ≤ t}, the trace norm: matrices of low rank. `SchattenBall` with p = 1."""
    return SchattenBall(1, radius, shape, centre=centre)


def SpectralBall(  # noqa: N802
    radius: float | Tensor = 1.0,
    shape: tuple[int, int] | None = None,
    *,
    centre: float | Tensor | None = None,
) -> SchattenBall:
    """{X : max σ_i(X) ≤ t}, the operator norm. `SchattenBall` with p = ∞."""
    return SchattenBall(torch.inf, radius, shape, centre=centre)


@dataclass(frozen=True)
class SchattenBall(Ball):
    """{X : ‖σ(X)‖_p ≤ t} over matrices X with singular values σ(X).

    p = 1 is the nuclear norm (`NuclearBall`), p = 2 the Frobenius norm and p = ∞ the operator
    norm (`SpectralBall`). Used on its own, outside of `solve`, it takes matrices (..., r, c).

    Args:
        p: Any number in [1, ∞] (``math.inf``).
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        shape: (rows, columns), needed where the variable is a vector of the entries row by row.
        centre: C, of the variable's shape, with or without a batch; with it the set is
            ‖σ(X − C)‖_p ≤ t, a `Shifted` ball.

    """

    p: float
    radius: float | Tensor = field(default=1.0, metadata=number(least=0, grows=True))
    shape: tuple[int, int] | None = None
    _: KW_ONLY
    centre: InitVar[float | Tensor | None] = None

    variable_dims = 2

    def __post_init__(self, centre: Value | None) -> None:
        object.__setattr__(self, "p", LpBall(self.p, self.radius).p)  # checks the two
        super().__post_init__()
        if self.shape is not None:
            shape = as_sizes("shape", self.shape, "(rows, columns)")
            if len(shape) != 2:
                raise ValueError(f"shape: expected (rows, columns), got {shape}")
            object.__setattr__(self, "shape", shape)

    @measured
    def _ball(self) -> LpBall:
        """The ball of the singular values."""
        radius = tensor_of(self.radius)
        bound = LpBall(self.p, radius).bind((min(self._shape),), radius.dtype, radius.device)
        assert isinstance(bound, LpBall)
        return bound

    @property
    def _shape(self) -> tuple[int, int]:
        assert self.shape is not None
        return self.shape

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Over flattened matrices of that shape."""
        own = self.shape
        if (own is None and len(shape) != 2) or (
            own is not None and shape not in (tuple(own), (own[0] * own[1],))
        ):
            found = "no shape was given" if own is None else f"its own are of shape {own}"
            raise ValueError(
                f"shape: a Schatten ball is a set of matrices, but the variable has shape {shape} "
                f"and {found}; give an objective with a variable (rows, columns), or say how its "
                "entries make a matrix with shape=(rows, columns)"
            )
        shaped = self.changed(shape=shape) if own is None else self
        return super(SchattenBall, shaped).bind(shape, dtype, device)

    def variable(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Matrices, unless they are given row by row."""
        if self.shape is None:
            return sizes[-2:] if len(sizes) > 1 else None
        return variable_of(self.shape, sizes)

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Constraint:
        """Over the entries row by row."""
        given = self.changed(shape=shape) if self.shape is None and len(shape) == 2 else self
        return super(SchattenBall, given).flattened(shape, lead)

    def vertex(self, g: Tensor) -> Tensor:
        """−U diag(s) Vᵀ for g = U diag(σ) Vᵀ, with −s the vertex of the ℓp ball for σ.

        p = 1: −t u₁v₁ᵀ, the top singular pair. p = ∞: −t UVᵀ.
        """
        matrix = self._matrix(g)
        if self._thin(matrix) and not g.requires_grad:
            top = top_pair(matrix)
            return self._flat(top.product(self._ball.vertex(top.values)))
        return self._flat(spectral_function(matrix, self._ball.vertex))

    def lowest(self, g: Tensor) -> Tensor:
        """−t ‖σ(g)‖_q with 1/p + 1/q = 1.

        For large matrices and p = 1 a lower bound, off by rounding, so that gaps are never too
        small: see `dfwlayer.constraints.balls.leading.norm_bound`.
        """
        matrix = self._matrix(g)
        if self._thin(matrix) and bool(torch.isfinite(g.sum())):
            largest = norm_bound(matrix, top_pair(matrix).values[..., 0])
            return -tensor_of(self.radius) * largest.to(g.dtype)
        return self._ball.lowest(factors(matrix).values)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """For p = 1 the mean of ±t u_i v_iᵀ with weights ∝ exp(∓t σ_i/τ); else the vertex.

        With both signs it is smooth in g also where singular values vanish.
        """
        if self.p != 1:
            return self.vertex(g)
        t = tensor_of(self.radius).unsqueeze(-1)

        def profile(values: Tensor) -> Tensor:
            finfo = torch.finfo(values.dtype)
            scores = t * values
            largest = scores.detach().amax(-1, keepdim=True)
            floor = (largest * finfo.eps).clamp_min(finfo.tiny / finfo.eps)
            scores = scores / floor.clamp_min(temperature)
            shares = torch.softmax(torch.cat((scores, -scores), -1), -1)
            towards, away = shares.chunk(2, -1)
            return t * (away - towards)

        return self._flat(spectral_function(self._matrix(g), profile))

    def retract(self, x: Tensor) -> Tensor:
        """x, scaled back where it is outside."""
        # rounding the entries of x changes all singular values, those that were zero too, and these
        # are found up to their own rounding in double precision
        spread = min(self._matrix(x).shape[-2:]) ** 0.5
        blur = 1 + spread * torch.finfo(torch.float64).eps
        for units in (2.0, 4 + 2 * spread):
            size = blur * self.size(x.detach())
            x = scaled_into(x, size, tensor_of(self.radius), units=units)
        return x

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """U diag(s) Vᵀ with s the projection of the singular values."""
        matrix = self._matrix(z)
        if self._thin(matrix):
            guess = None if near is None else self._matrix(near)
            found = shrunk(matrix, guess, self._ball.project)
            if found is not None:
                return self._flat(found.product(found.values))
        at = factors(matrix)
        values = self._ball.project(at.values)
        same = (values == at.values).all(-1, keepdim=True)
        return torch.where(same, z, self._flat(at.product(values)))

    def plain(self, *, fixed: bool = True) -> Plain:
        """By the singular values."""
        if self.shape is None:
            raise ValueError("its shape is not known; give shape=(rows, columns)")
        return PlainSpectrum(LpBall(self.p, self.radius).plain(), self.p, self.radius, self.shape)

    def diameter(self, n: int) -> Tensor:
        """2t for p ≤ 2, 2t k^(1/2 − 1/p) with k = min(r, c) beyond."""
        return self._ball.diameter(min(self._shape))

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> SchattenFace | SpectralFace:
        """The rank of x, or the singular values at the bound, told like a face of the ℓp ball.

        What a coordinate and its slope are there are here σ_i and ⟨u_i v_iᵀ, g⟩.
        """
        at = self._snapped(self._factors(self._matrix(x)))
        slope = self._matrix(g)
        if self.p == torch.inf:
            at = self._turned(at, slope)
        pull = (at.left * (slope @ at.right)).sum(-2)
        if scale is not None:
            scale = scale.whole()
            # rounding of the entries of x moves every singular value
            unit = torch.finfo(x.dtype).eps * (at.left.shape[-2] + at.right.shape[-2])
            scale = scale.noisier(scale.curvature * unit * at.values[..., :1])
        outer = self._ball.face(at.values, pull, scale)
        radius = tensor_of(self.radius)
        frozen = (radius.detach() == 0).unsqueeze(-1).expand_as(x[..., :1])
        if self.p == torch.inf:
            held = ~outer.free & ~frozen
            between = -at.left.mT @ slope @ at.right
            between = torch.where(held.unsqueeze(-1) & held.unsqueeze(-2), between, 0)
            strength, axes = torch.linalg.eigh(0.5 * (between + between.mT))
            inside = (axes * strength.clamp_min(0).unsqueeze(-2)) @ axes.mT
            return SpectralFace(radius, x, at, held, inside, frozen)
        multiplier = torch.as_tensor(outer.multiplier, dtype=x.dtype, device=x.device)
        multiplier = torch.where(frozen, 0, multiplier)
        size = torch.as_tensor(outer.size, dtype=x.dtype, device=x.device)
        size = or_one(size).expand_as(multiplier)
        alive = outer.free & (at.values > 0) & (multiplier > 0)
        if 1 < self.p < 2:
            # the ball's curvature across these is beyond what the dtype can hold beside the others
            least = torch.finfo(x.dtype).eps ** 0.5
            alive = alive & ((at.values / size) ** (2 - self.p) > least)
        mask = alive.unsqueeze(-2)
        at = Factors(at.left * mask, torch.where(alive, at.values, 1), at.right * mask)
        outside = self._outside(at, slope, alive, size, multiplier) if self.p < 2 else None
        return SchattenFace(self.p, radius, x, at, alive, size, multiplier, outside, frozen)

    def _outside(
        self, at: Factors, slope: Tensor, alive: Tensor, size: Tensor, multiplier: Tensor
    ) -> Tensor:
        """W, the part of −g beside the singular vectors, no larger than at a solution."""
        outside = at.left @ (at.left.mT @ slope) - slope
        outside = outside - (outside @ at.right) @ at.right.mT
        least = torch.where(alive, (at.values / size) ** (self.p - 1), 1).amin(-1, keepdim=True)
        most = (multiplier * least).unsqueeze(-1)
        top = top_pair(outside, most[..., 0, 0]) if self._thin(outside) else factors(outside)
        largest = top.values[..., :1].unsqueeze(-1)
        # away from a solution x may be of too low a rank, and W too large; then the curvature
        # would be negative, which is for f alone to be
        shrink = torch.where(largest > most, most / or_one(largest), 1)
        return outside * shrink

    def _thin(self, matrix: Tensor) -> bool:
        """Whether a few singular values are enough, and quicker than all."""
        return self.p == 1 and min(matrix.shape[-2:]) >= LARGE

    def _factors(self, matrix: Tensor) -> Factors:
        """All factors, or those of a large matrix of low rank."""
        found = low_rank(matrix) if self._thin(matrix) else None
        return factors(matrix) if found is None else found.at

    def _snapped(self, at: Factors) -> Factors:
        """Singular values without rounding: zeros are zero, and what is at the bound is on it."""
        values = at.values
        unit = torch.finfo(values.dtype).eps * (at.left.shape[-2] + at.right.shape[-2])
        values = torch.where(values > 4 * unit * values[..., :1], values, 0)
        t = tensor_of(self.radius).detach().unsqueeze(-1)
        size = values if self.p == torch.inf else scaled_norm(values, self.p).unsqueeze(-1)
        near = (size - t).abs() <= 16 * unit * t
        factor = torch.where(near & (size > 0), t / or_one(size), 1)
        return at._replace(values=values * factor)

    def _turned(self, at: Factors, slope: Tensor) -> Factors:
        """Among equal singular values at the bound, the vectors for which Λ is diagonal."""
        t = tensor_of(self.radius).detach().unsqueeze(-1)
        held = at.values >= t * (1 - torch.finfo(t.dtype).eps ** 0.5)
        both = held.unsqueeze(-1) & held.unsqueeze(-2)
        between = -at.left.mT @ slope @ at.right
        between = torch.where(both, 0.5 * (between + between.mT), 0)
        # held ones come first in both orders: their part ascends from −reach to reach
        reach = 1 + 2 * torch.linalg.matrix_norm(between)[..., None]
        order = torch.where(held, 0, reach)
        axes = torch.linalg.eigh(between + torch.diag_embed(order))[1]
        eye = torch.eye(axes.shape[-1], dtype=axes.dtype, device=axes.device)
        axes = torch.where(both, axes, eye)
        return at._replace(left=at.left @ axes, right=at.right @ axes)

    def size(self, x: Tensor) -> Tensor:
        """‖σ(x)‖_p in double precision."""
        matrix = self._matrix(x.double())
        found = low_rank(matrix) if self._thin(matrix) else None
        if found is None:
            return scaled_norm(factors(matrix).values, self.p)
        # all that is beside the factors, with the largest nuclear norm it can have
        rest: Tensor = min(matrix.shape[-2:]) ** 0.5 * found.remainder
        return found.at.values.sum(-1) + rest

    def _matrix(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], *self._shape)

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(-2)
