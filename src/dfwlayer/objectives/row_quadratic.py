"""½ xᵀPx + qᵀx with a P of which each process has some rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dfwlayer.arguments import flag_nonfinite
from dfwlayer.objectives.base import Curvature
from dfwlayer.objectives.factors import on_faces
from dfwlayer.objectives.model import LARGEST, Model
from dfwlayer.objectives.products import ProductQuadratic
from dfwlayer.objectives.spectrum import lanczos_spectrum
from dfwlayer.ops.matrices import cholesky_factor, substitute
from dfwlayer.ops.rows import where_rows
from dfwlayer.ops.scale import Scale, scale_of_terms
from dfwlayer.ops.shards import Shards, own_rows

__all__ = ["RowQuadratic"]

_ROUNDING = 8  # in units of eps · √n · the largest entry


@dataclass(frozen=True)
class RowQuadratic(ProductQuadratic):
    """What `Quadratic` is for a DTensor P once it is bound; q is the same on all processes.

    A product with P is one of its rows here, and those of the others are asked for. The gradient
    in P is symmetric, and each process gets that of its rows.
    """

    P: Tensor  # (n_k, n), the rows that are here
    q: Tensor  # (n,) or (B, n)
    group: Shards

    ranks: ClassVar[Mapping[str, int]] = {"q": 1, "P": 2}
    quadratic = True

    @classmethod
    def of(cls, P: Tensor, q: Tensor) -> RowQuadratic:
        """From a distributed P."""
        rows, group = own_rows("P", P, -2)
        kind = f"{P.shape[-1]} columns, {P.dtype}, {P.device.type}"
        facts = {"P": kind, "q": f"{tuple(q.shape)}, {q.dtype}"}
        asks = P.requires_grad, q.requires_grad
        shards = Shards(group, len(rows), facts, asks, device=rows.device)
        if shards.asked[0] and not rows.requires_grad:
            rows = rows.detach().requires_grad_()
        if shards.asked[1] and not q.requires_grad:
            q = q.detach().requires_grad_()
        return cls(rows, q, shards)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.P.shape[-1],)

    @property
    def shards(self) -> Shards:
        return self.group

    @property
    def first(self) -> int:
        """The number of this process's first row."""
        return sum(self.group.rows[: self.group.rank])

    def _own(self, v: Tensor) -> Tensor:  # (..., n) -> (..., n_k)
        """The entries of a vector for the rows that are here."""
        return v[..., self.first : self.first + len(self.P)]

    def product(self, x: Tensor) -> Tensor:  # (..., n) -> (..., n)
        """P x."""
        out: Tensor = _Product.apply(self.P, x, self)  # type: ignore[no-untyped-call]
        return out

    def gathered(self, own: Tensor, what: str, at: Tensor | None = None) -> Tensor:
        """A vector (..., n) of which each process has the entries for its rows (..., n_k)."""
        found = self.group.stacked(own.movedim(-1, 0), self.group.rows, what, at)
        return found.movedim(0, -1).contiguous()

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """P v, whatever x."""
        return self.product(v)

    def tracked_value(self, x: Tensor) -> None:
        """None: P and q are all."""

    def suspect(self) -> Tensor:
        """Whether values are not finite, or P v and Pᵀv differ by more than rounding."""
        total = self.q.detach().sum() + self.P.detach().sum()
        lost = self.group.any(~torch.isfinite(total))
        n = self.P.shape[-1]
        probe = torch.linspace(0.5, 1.5, n, dtype=self.P.dtype, device=self.P.device)
        right = self.gathered(self.P.detach() @ probe, "checks")
        left = self.group.summed(self._own(probe) @ self.P.detach(), "checks")
        rounding = _ROUNDING * torch.finfo(self.P.dtype).eps * n**0.5 * self._diagonal.abs().amax()
        skew: Tensor = (right - left).abs().amax() > rounding
        return lost | skew

    def verified(self) -> tuple[RowQuadratic, Tensor | None]:
        """Finite data; a P that is not symmetric to rounding is refused."""
        bad, fault = None, None
        try:
            flag_nonfinite("P", self.P, 2)
            bad = flag_nonfinite("q", self.q, 1)
        except ValueError as error:
            fault = error
        self.group.agree(fault)
        sound = self if bad is None else self.replace_rows(bad)
        if bool(sound.suspect()):
            raise ValueError(
                "P: expected a symmetric matrix, found P v and Pᵀv that differ by more than "
                "rounding; pass (P + P.mT) / 2"
            )
        return self, bad

    def replace_rows(self, bad: Tensor) -> RowQuadratic:
        """Flagged problems become ½ xᵀPx."""
        return replace(self, q=where_rows(~bad, self.q.expand(len(bad), -1), 0))

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """Cholesky of the rows and columns of P that are free, where every process can have it."""
        if int(free.sum(-1).square().sum()) > LARGEST:
            return None

        def inverse(
            mask: Tensor, index: Tensor, own: Tensor | None
        ) -> Callable[[Tensor], Tensor] | None:
            here = self._own(mask).nonzero().squeeze(-1)
            counts = [int(part.sum()) for part in torch.split(mask, self.group.rows)]
            block = self.P.detach()[here][:, index]
            matrix = self.group.stacked(block, counts, "free rows")
            if own is not None:
                matrix.diagonal().add_(own)
            factor = cholesky_factor(matrix)
            if factor is None:
                return None
            return lambda v: substitute(factor, v.unsqueeze(-1)).squeeze(-1)

        return on_faces(free, bend, inverse)

    def model(self, x: Tensor) -> Model | None:
        """f itself, in double precision, where every process can have all of P."""
        if x.shape[-1] ** 2 > LARGEST:
            return None
        q = self.q.detach().double().expand(x.shape).reshape(-1, x.shape[-1])
        return Model(self._whole, q, factored=False)

    @cached_property
    def _whole(self) -> Tensor:  # (n, n)
        return self.group.stacked(self.P.detach(), self.group.rows, "rows").double()

    def rescaled(self, unit: Tensor, factor: Tensor) -> RowQuadratic:
        """P k and q k/u."""
        q = self.q * (factor / unit).unsqueeze(-1)
        return replace(self, P=self.P * factor.reshape(-1)[0], q=q)

    @cached_property
    def _diagonal(self) -> Tensor:  # (n,)
        own = self.P.detach().diagonal(self.first)[: len(self.P)]
        return self.gathered(own, "diagonal")

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """From the diagonal of P, and |q|."""
        return scale_of_terms(self._diagonal, x, self.q.detach().abs())

    def curvature(self) -> Curvature:
        """Lanczos and the norms of P."""
        n = self.P.shape[-1]
        low, high = lanczos_spectrum(self.product, self.q.new_empty(1, n))
        sums = self.gathered(torch.linalg.vector_norm(self.P.detach(), 1, dim=-1), "row sums")
        bound = sums.amax() * (1 + n * torch.finfo(self.dtype).eps)
        return Curvature(low[0], torch.minimum(high[0], bound))


class _Product(torch.autograd.Function):
    """P x for P = Pᵀ; the derivative in the rows that are here is ½ (g xᵀ + x gᵀ) there."""

    @staticmethod
    def forward(ctx: Any, P: Tensor, x: Tensor, of: RowQuadratic) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(P, x)
        own = P @ x if x.dim() == 1 else x @ P.mT
        return of.gathered(own, "product", x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        P, x = ctx.saved_tensors
        of: RowQuadratic = ctx.of
        in_P = in_x = None
        if ctx.needs_input_grad[0]:
            one, other = (part.reshape(-1, part.shape[-1]) for part in (0.5 * grad, x))
            in_P = of._own(one).mT @ other + of._own(other).mT @ one
        if ctx.needs_input_grad[1]:
            in_x = replace(of, P=P).product(grad)
        return in_P, in_x, None
