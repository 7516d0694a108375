"""Transport plans: matrices with given sums of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import entries, fault
from dfwlayer.constraints.plain import Plain, PlainSums
from dfwlayer.constraints.polyhedra.birkhoff_projection import project_sums
from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
from dfwlayer.ops.rows import common_shape, or_one
from dfwlayer.solution import Status

__all__ = ["Transport"]

AGREE = 64  # units in the last place by which the totals of rows and columns may differ


@dataclass(frozen=True)
class Transport(LinearSet):
    """{X ≥ 0 : X 1 = r, Xᵀ1 = c}; the variable is (m, k), or (m·k,), row after row.

    Both sums have the same total. Totals that differ by rounding are allowed, and the largest
    entry of c then makes up for it, so that the gradient in that entry is zero: with that, the
    derivative along r and c whose totals agree is the right one. Where they do not agree the set is
    empty: a ValueError where all problems share the sums, else status INFEASIBLE.

    Args:
        row_sums: r ≥ 0, (m,) or (B, m).
        column_sums: c ≥ 0, (k,) or (B, k).

    """

    row_sums: Tensor = field(
        metadata=entries(least=0, harmless=0.0, grows=True, apart=True, numbers=False)
    )
    column_sums: Tensor = field(
        metadata=entries(least=0, harmless=0.0, grows=True, apart=True, numbers=False)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("row_sums", "column_sums"):
            value = getattr(self, name)
            if value.dim() not in (1, 2) or value.shape[-1] == 0:
                raise ValueError(f"{name}: expected shape (m,) or (B, m), got {tuple(value.shape)}")

    @property
    def _size(self) -> tuple[int, int]:
        return self.row_sums.shape[-1], self.column_sums.shape[-1]

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Check that the variable is a matrix of this size."""
        m, k = self._size
        if shape not in ((m, k), (m * k,)):
            raise ValueError(
                f"row_sums, column_sums: {m} and {k} of them go with variables of shape {(m, k)} "
                f"or {(m * k,)}, got {shape}"
            )
        return super().bind(shape, dtype, device)

    def check_values(self) -> Tensor | None:
        """Sums of the same total."""
        rows, columns = (part.detach().double().sum(-1) for part in self._sums())
        apart = (rows - columns).abs() - AGREE * torch.finfo(self.row_sums.dtype).eps * rows
        return fault(
            apart > 0,
            Status.INFEASIBLE,
            lambda: (
                f"column_sums: expected the total {float(rows):.9g} of row_sums, found "
                f"{float(columns):.9g}; divide both by their totals"
            ),
        )

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums of all rows, and of all columns but that of the largest, which follows."""
        _, _, G, h = super().rows_of(like)
        m, k = self._size
        eye = torch.eye(max(m, k), dtype=like.dtype, device=like.device)
        r, c = self._sums()
        kept = torch.ones_like(c).scatter(-1, c.detach().argmax(-1, keepdim=True), 0)
        rows = eye[:m, :m].repeat_interleave(k, 1)
        columns = eye[:k, :k].repeat(1, m) * kept.unsqueeze(-1)
        lead = common_shape(r.shape[:-1], c.shape[:-1])
        A = torch.cat((rows.expand(*c.shape[:-1], m, m * k), columns), -2)
        return A, torch.cat((r.expand(*lead, m), (c * kept).expand(*lead, k)), -1), G, h

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """0 and ∞."""
        return like.new_zeros(()), like.new_full((), torch.inf)

    def start(self, like: Tensor) -> Tensor:
        """r cᵀ / Σr."""
        r, c = (part.detach() for part in self._sums())
        total = or_one(r.sum(-1))[..., None, None]
        return (r.unsqueeze(-1) * (c.unsqueeze(-2) / total)).flatten(-2).expand_as(like)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `dfwlayer.constraints.polyhedra.birkhoff_projection.project_sums`."""
        r, c = (part.detach().double().reshape(-1, part.shape[-1]) for part in self._sums())
        # the totals agree to the last digits, and the sums are of size one
        c = c * (r.sum(-1, keepdim=True) / or_one(c.sum(-1, keepdim=True)))
        unit = or_one(torch.maximum(r.amax(-1, keepdim=True), c.amax(-1, keepdim=True)))
        m, k = self._size
        square = z.detach().double().reshape(-1, m, k) / unit.unsqueeze(-1)
        x = project_sums(square, r / unit, c / unit) * unit.unsqueeze(-1)
        return self.settled(x.to(z.dtype).reshape(z.shape), z)

    def plain(self, *, fixed: bool = True) -> Plain:
        """Turns of thresholds for rows and columns."""
        return PlainSums(*self._sums(), self._size)

    def _sums(self) -> tuple[Tensor, Tensor]:
        return self.row_sums, self.column_sums
