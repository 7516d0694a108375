"""A and b of which each process has some rows: how they come together, and a small twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.shards import Shards, is_distributed, own_rows

__all__ = ["condensed", "join"]


def join(
    A: Tensor, b: Tensor, group: Any, check: Callable[[Tensor, Tensor], Any]
) -> tuple[Tensor, Tensor, Shards]:
    """The rows of this process and what it shares with the others, once all have agreed on it.

    Where one process asks for a derivative in its A or b, all follow its way.
    """
    A, b, group = _taken_apart(A, b, group)
    fault: ValueError | None = None
    try:
        check(A, b)
    except ValueError as error:
        fault = error
    facts: dict[str, str] = {}
    rows, asks = 0, (False, False)
    if fault is None:
        kind = "dense" if A.layout == torch.strided else "sparse"
        facts = {
            "A": f"{A.shape[-1]} columns, {kind}, {A.dtype}, {A.device.type}",
            "batch of A": str(tuple(A.shape[:-2])),
            "batch of b": str(tuple(b.shape[:-1])),
        }
        rows, asks = A.shape[-2], (A.requires_grad, b.requires_grad)
    device = A.device if isinstance(A, Tensor) else None
    shards = Shards(group, rows, facts, asks, fault, device)
    of_matrix, of_vector = shards.asked
    if of_matrix and not A.requires_grad:
        A = A.detach().requires_grad_()
    if of_vector and not b.requires_grad:
        b = b.detach().requires_grad_()
    return A, b, shards


def _taken_apart(A: Tensor, b: Tensor, group: Any) -> tuple[Tensor, Tensor, Any]:
    """Rows in place of distributed tensors, and the group that has all of them."""
    if is_distributed(A) != is_distributed(b):
        whole, part = ("b", "A") if is_distributed(A) else ("A", "b")
        raise ValueError(
            f"{whole}: expected a DTensor with the rows of {part}, which is one; make one by "
            "torch.distributed.tensor.distribute_tensor, or pass the rows of each process "
            "(.to_local()) and group="
        )
    if is_distributed(A):
        if group is not None:
            raise ValueError("group: expected None, as the DTensors A and b know theirs")
        (A, group), (b, other) = own_rows("A", A, -2), own_rows("b", b, -1)
        if group is not other and group != other:
            raise ValueError("b: expected a DTensor on the same mesh of processes as A")
    elif not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            "group: expected a process group such as torch.distributed.group.WORLD, or None for "
            f"an A that this process has as a whole, got {type(group).__name__}"
        )
    return A, b, group


def condensed(A: Tensor, b: Tensor, shards: Shards, most: int) -> tuple[Tensor, Tensor] | None:
    """An A and b in double precision with the same ‖Ax − b‖, which every process has.

    [A b] = QR on each process gives ‖Ax − b‖ = ‖R (x, −1)‖, so that the rows of all R's will do;
    None where they are more than ``most`` entries.
    """
    A, b = A.detach(), b.detach()
    n, lead = A.shape[-1], A.shape[:-2]
    targets = b.expand(*lead, -1).unsqueeze(-1) if lead else b.reshape(-1, b.shape[-1]).mT
    wide, rows = n + targets.shape[-1], shards.rows
    kept = [min(m, wide) for m in rows]
    if max(max(rows), shards.size * max(kept)) * wide * lead.numel() > most:
        return None
    A = A if A.layout == torch.strided else A.to_dense()
    upper = torch.linalg.qr(torch.cat((A, targets), -1).double(), mode="r").R
    found = shards.stacked(upper.movedim(-2, 0), kept, "factors").movedim(0, -2)
    targets = found[..., n:]
    return found[..., :n], targets.squeeze(-1) if lead else targets.mT.reshape(*b.shape[:-1], -1)
