"""Batches of small problems on a GPU: one program a problem, and tensor operations, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import dfwlayer as dfw
from dfwlayer.constraints.base import Constraint
from dfwlayer.engines import compiled
from dfwlayer.ops.tensors import filled, tensors_in

__all__ = ["CASES", "SETS", "GpuRow", "as_markdown", "floor_seconds", "measured"]


def polyhedra(count: int, n: int, seed: int) -> dfw.Polyhedron:
    """n inequalities and n / 5 equations around a point, another set for each problem."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=make, dtype=torch.float64)

    inside, G, A = normal(n, 1), normal(n, n), normal(n // 5, n)
    room = torch.rand(count, n, generator=make, dtype=torch.float64)
    return dfw.Polyhedron(G, (G @ inside).squeeze(-1) + room, A, (A @ inside).squeeze(-1))


# by name, with a size that holds some coordinates of the problems below and leaves others free; or
# how they are made for so many problems with n coordinates and a seed
SETS: dict[str, Constraint | Callable[[int, int, int], Constraint]] = {
    "l1": dfw.LpBall(1, 1.0),
    "linf": dfw.LpBall(math.inf, 0.3),
    "l2": dfw.LpBall(2, 1.0),
    "l3": dfw.LpBall(3, 1.0),
    "box": dfw.Box(-0.21, 0.32),
    "simplex": dfw.Simplex(1.0),
    "capped": dfw.CappedSimplex(1.0, 0.137),
    "l1box": dfw.L1Box(1.0, None, -0.237, 0.311),
    "ksparse": dfw.KSparse(3.3, 0.27),
    "polyhedra": polyhedra,
}
CASES: tuple[tuple[str, int, int], ...] = (
    ("l1", 1024, 10),
    ("l1", 1024, 100),
    ("l1", 4096, 32),
    ("l2", 128, 50),
    ("l3", 128, 50),
    ("simplex", 128, 50),
    ("capped", 128, 50),
    ("polyhedra", 1024, 50),
    *((name, 256, 20) for name in SETS),
)
STEADY = 3  # calls before the timed ones: compiling, recording


@dataclass(frozen=True)
class GpuRow:
    """One set and size; times are medians of forward + backward, in seconds."""

    set: str
    count: int
    n: int
    programs: float
    tensors: float  # what tensor operations, recorded where they can be, take for it
    left: float  # the share of the problems that programs leave to them
    error: float  # the largest difference of x from float64 on the CPU, relative
    gradient_error: float  # likewise


def problem(count: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """P = RᵀR/n + 0.1 I, q, and a gradient that arrives, in float64 on the CPU."""
    make = torch.Generator().manual_seed(seed)
    root, q, v = (
        torch.randn(*shape, generator=make, dtype=torch.float64)
        for shape in ((count, n, n), (count, n), (count, n))
    )
    return root.mT @ root / n + 0.1 * torch.eye(n, dtype=torch.float64), q, v


def both_passes(P: Tensor, q: Tensor, v: Tensor, body: Constraint) -> tuple[Tensor, ...]:
    """x and the gradients in P, q and what the set has of tensors."""
    x = dfw.solve(dfw.Quadratic(P, q), body).x
    return x.detach(), *torch.autograd.grad(x, (P, q, *tensors_in(body)), v)


def moved(body: Constraint, device: str, dtype: torch.dtype) -> Constraint:
    """A copy there, whose tensors ask for a gradient."""
    copies = (t.detach().to(device, dtype).requires_grad_() for t in tensors_in(body))
    copy: Constraint = filled(body, copies)
    return copy


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call, to the end of what the GPU does for it."""
    for _ in range(STEADY):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def floor_seconds(repeats: int) -> float:
    """What 2 q and its gradient take, for 1024 × 10 entries."""
    q = torch.randn(1024, 10, device="cuda", requires_grad=True)
    v = torch.ones_like(q)
    return seconds(lambda: torch.autograd.grad(2 * q, q, v), repeats)


def measured(
    cases: Sequence[tuple[str, int, int]], dtype: torch.dtype, repeats: int, seed: int
) -> Iterator[GpuRow]:
    """Row after row."""
    for name, count, n in cases:
        exact = problem(count, n, seed)
        P, q, v = (part.to("cuda", dtype) for part in exact)
        P.requires_grad_()
        q.requires_grad_()
        made = SETS[name]
        body = moved(made if isinstance(made, Constraint) else made(count, n, seed), "cuda", dtype)

        def call(P: Tensor = P, q: Tensor = q, v: Tensor = v, body: Constraint = body) -> object:
            return both_passes(P, q, v, body)

        with compiled.using(True):
            programs = seconds(call, repeats)
            found = both_passes(P, q, v, body)
            left = _share_left(P, q, body)
        with compiled.using(False):
            tensors = seconds(call, max(3, repeats // 10))
            exactly = [part.detach().double().cpu().requires_grad_() for part in (P, q)]
            there = moved(body, "cpu", torch.float64)
            expected = both_passes(exactly[0], exactly[1], v.double().cpu(), there)
        errors = [
            float((a.double().cpu() - b).abs().max() / b.abs().max())
            for a, b in zip(found, expected, strict=True)
        ]
        yield GpuRow(name, count, n, programs, tensors, left, errors[0], max(errors[1:]))


def _share_left(P: Tensor, q: Tensor, body: Constraint) -> float:
    """Of the problems that programs leave to tensor operations, 1 for a set they do not take."""
    from dfwlayer.engines.base import Arguments
    from dfwlayer.methods.settings import check_settings

    settings = check_settings("auto", "auto", 1e-5, 1000, None, None, True)
    found = compiled.attempt(Arguments(dfw.Quadratic(P, q), body, None, None), settings)
    if found is None:
        return 1.0
    return 0.0 if found.left is None else float(found.left.double().mean())


def as_markdown(rows: Sequence[GpuRow], floor: float) -> str:
    """A table for the documentation."""
    lines = [
        "| set | B × n | programs | without | left | error of x | of gradients |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = asdict(row)
        times = " | ".join(f"{1e3 * cells[name]:.2f} ms" for name in ("programs", "tensors"))
        lines.append(
            f"| {row.set} | {row.count} × {row.n} | {times} | {row.left:.1%} | {row.error:.0e} | "
            f"{row.gradient_error:.0e} |"
        )
    lines.append(f"| 2 q and its gradient | 1024 × 10 | {1e3 * floor:.2f} ms | | | | |")
    return "\n".join(lines) + "\n"
