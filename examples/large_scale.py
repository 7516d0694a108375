"""Large in three ways: a big dense matrix, a million variables, 100,000 problems.

Each part solves and differentiates on the CPU in one call, and prints the time, the memory taken
beyond what was in use before, and the certificate. All need 3 GB; DFW_QUICK=1 needs little. Names
of parts as arguments (dense, lasso, many) run only those.
"""

import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer import LeastSquares, LpBall, Quadratic, Solution, Status, solve, warm_up

QUICK = "DFW_QUICK" in os.environ
MB = 2**20


class Cost(NamedTuple):
    """What a pass forwards and one backwards took."""

    forward: float  # seconds
    backward: float
    work: tuple[float, float]  # of the processor, in either: on a busy machine these tell more
    memory: float | None  # peak in bytes beyond what was in use, None where it cannot be told


def resident(key: str) -> int:
    """Bytes in memory now (VmRSS) or at most so far (VmHWM)."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
    return int(line.split()[1]) * 1024


def measured(
    call: Callable[[], Solution], loss: Callable[[Tensor], Tensor]
) -> tuple[Solution, Cost]:
    """Solve, differentiate the loss, and tell what that took."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = resident("VmRSS")
    except OSError:  # not on Linux, or not allowed
        before = None
    times = [(time.perf_counter(), time.process_time())]
    sol = call()
    times.append((time.perf_counter(), time.process_time()))
    loss(sol.x).backward()
    times.append((time.perf_counter(), time.process_time()))
    memory = None if before is None else max(0, resident("VmHWM") - before)
    (forward, backward), work = (
        [after - before for before, after in pairwise(clock)] for clock in zip(*times, strict=True)
    )
    return sol, Cost(forward, backward, (work[0], work[1]), memory)


def report(what: str, data: int, sol: Solution, ball: LpBall, cost: Cost) -> None:
    """The same lines for each part; data is the size of P or A in bytes."""
    gap = (sol.gap / sol.value.abs()).max().item()
    outside = (ball.violation(sol.x.detach()) / torch.as_tensor(ball.radius).detach()).max().item()
    codes, counts = sol.status.unique(return_counts=True)
    named = ", ".join(f"{c} {Status(s).name}" for s, c in zip(codes.tolist(), counts, strict=True))
    print(f"{what}")
    print(
        f"  forward {cost.forward:.2f} s, backward {cost.backward:.2f} s, data {data / MB:.0f} MB"
    )
    print(f"  work    {cost.work[0]:.2f} + {cost.work[1]:.2f} s of processor time")
    if cost.memory is not None:
        share = 100 * cost.memory / data
        print(f"  memory  {cost.memory / MB:.1f} MB more at the peak, {share:.1f}% of the data")
    print(f"  status  {named}; at most {sol.num_steps.max().item()} steps")
    print(f"  gap     {gap:.1e} of f, violation {outside:.1e} of t")
    assert outside <= 1e-6
    assert gap <= 1e-4


def dense(n: int) -> None:
    """One dense P: only products with it are needed, so nothing else of its size is made."""
    R = torch.randn(n // 10, n) / (n // 10) ** 0.5
    P = torch.empty(n, n)
    torch.mm(R.mT, R, out=P)
    P.diagonal().add_(1.0)
    del R
    q = torch.randn(n, requires_grad=True)
    weight = (torch.rand(n) + 0.5).requires_grad_()
    radius = torch.tensor(50.0, requires_grad=True)
    ball = LpBall(1, radius, weight)

    sol, cost = measured(lambda: solve(Quadratic(P, q), ball), lambda x: x.square().sum())
    size = P.numel() * P.element_size()
    report(f"dense, n = {n:,}, gradients in q, w and t", size, sol, ball, cost)
    assert cost.memory is None or cost.memory < 0.1 * size
    assert all(v.grad is not None and v.grad.isfinite().all() for v in (q, weight, radius))


def lasso(n: int, per_row: int = 50) -> None:
    """A sparse A with 10 entries a column, both A and b learnable; AᵀA is never formed."""
    m, used, stride = n // 5, n // 1_000, n // per_row
    columns = torch.arange(per_row) * stride + torch.randint(stride, (m, per_row))
    indices = torch.stack((torch.arange(m).repeat_interleave(per_row), columns.flatten()))
    entries = (torch.randn(m * per_row) / 10**0.5).requires_grad_()
    # the indices are sorted by construction, and saying so saves sorting them
    A = torch.sparse_coo_tensor(indices, entries, (m, n), is_coalesced=True, check_invariants=False)
    truth = torch.zeros(n)
    truth[torch.randperm(n)[:used]] = torch.randn(used)
    clean = A.detach() @ truth
    b = (clean + 0.1 * clean.std() * torch.randn(m)).requires_grad_()
    ball = LpBall(1, 0.8 * truth.abs().sum().item())

    sol, cost = measured(
        lambda: solve(LeastSquares(A, b), ball), lambda x: 0.5 * (x - truth).square().sum()
    )
    size = sum(t.numel() * t.element_size() for t in (indices, entries))
    what = f"lasso, A {m:,} × {n:,} with {len(entries):,} entries, gradients in b and the entries"
    report(what, size, sol, ball, cost)
    support = int((sol.x.detach() != 0).sum())
    print(f"  support {support} coordinates, {used} in the hidden solution")
    assert support <= 10 * used
    assert all(v.grad is not None and v.grad.isfinite().all() for v in (b, entries))


def many(count: int, n: int = 10) -> None:
    """Small problems, each with its own P; the radius is 0.3 of what would not bind."""
    R = torch.randn(count, n, n)
    P = (R.mT @ R + n * torch.eye(n)).requires_grad_()
    q = torch.randn(count, n, requires_grad=True)
    weight = (torch.rand(count, n) + 0.5).requires_grad_()
    with torch.no_grad():
        radius = 0.3 * (weight * torch.linalg.solve(P, q)).abs().sum(-1)
    radius.requires_grad_()
    ball = LpBall(1, radius, weight)

    sol, cost = measured(lambda: solve(Quadratic(P, q), ball), lambda x: x.square().sum())
    what = f"{count:,} problems, n = {n}, gradients in P, q, w and t"
    report(what, P.numel() * P.element_size(), sol, ball, cost)
    assert sol.converged.all()
    assert all(v.grad is not None and v.grad.isfinite().all() for v in (P, q, weight, radius))


PARTS: dict[str, Callable[[], None]] = {
    "dense": lambda: dense(5_000 if QUICK else 20_000),
    "lasso": lambda: lasso(10_000 if QUICK else 1_000_000),
    "many": lambda: many(2_000 if QUICK else 100_000),
}
chosen = sys.argv[1:] or list(PARTS)
if unknown := set(chosen) - set(PARTS):
    sys.exit(f"parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")

# what libraries set up in their first calls is not counted
warm_up()
first = torch.randn(1_100, requires_grad=True)  # more than compiled code takes
solve(Quadratic(torch.eye(1_100), first), LpBall(1)).x.sum().backward()

for part in chosen:
    torch.manual_seed(0)  # the same problems, whatever ran before
    PARTS[part]()
