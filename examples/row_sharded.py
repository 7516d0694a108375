"""Solve one lasso whose rows one process has, or many, without a change.

    python examples/row_sharded.py
    torchrun --nproc-per-node 2 examples/row_sharded.py
    torchrun --nproc-per-node 4 examples/row_sharded.py --rows 200000 --columns 1000000

Every process reads its share of the measurements, a sparse A and b, which never leave it. A solve
sums one vector of the length of x over the processes in each step; all end with the same x and the
same certificate. The radius is learned: it is to predict measurements that were held back. Its
gradient is the same on all processes, and each has the gradient of its own rows.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dfwlayer import LeastSquares, LpBall, solve

QUICK = "DFW_QUICK" in os.environ
PIECES = 24  # measurements come in so many files, as it were


def piece(number: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """One of the files: some rows of A, with ten entries each, and their b."""
    draw = torch.Generator().manual_seed(number)
    x = torch.zeros(columns, dtype=torch.float64)
    x[:: max(columns // 20, 1)] = 1.0  # what is to be found
    row = torch.arange(rows).repeat_interleave(10)
    col = torch.randint(columns, (len(row),), generator=draw)
    entries = torch.randn(len(row), generator=draw, dtype=torch.float64)
    places = torch.stack((row, col))
    A = torch.sparse_coo_tensor(places, entries, (rows, columns), check_invariants=False).coalesce()
    noise = 0.1 * torch.randn(rows, generator=draw, dtype=torch.float64)
    return A, (A @ x.unsqueeze(-1)).squeeze(-1) + noise


def own(rank: int, size: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The files of one process, one below the other."""
    found = [piece(k, rows // PIECES, columns) for k in range(rank, PIECES, size)]
    return torch.cat([A for A, _ in found]).coalesce(), torch.cat([b for _, b in found])


def main() -> None:
    parser = argparse.ArgumentParser(description="One problem, in one process or in many.")
    parser.add_argument("--rows", type=int, default=2400 if QUICK else 24_000)
    parser.add_argument("--columns", type=int, default=4000 if QUICK else 40_000)
    parser.add_argument("--steps", type=int, default=3 if QUICK else 15)
    given = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        # one that does not come within the time ends the others with an error
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    A, b = own(rank, size, given.rows, given.columns)
    b.requires_grad_()
    held_A, held_b = piece(PIECES, 200, given.columns)  # all processes have these
    log_radius = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([log_radius], lr=0.2)
    solution = None
    for step in range(given.steps):
        start = None if solution is None else solution.x.detach()
        objective = LeastSquares(A, b, group=group)
        solution = solve(objective, LpBall(1, log_radius.exp()), x0=start)
        loss = ((held_A @ solution.x.unsqueeze(-1)).squeeze(-1) - held_b).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()  # the same step on all processes
        if rank == 0 and (step + 1) % 3 == 0:
            used = int((solution.x != 0).sum())
            print(f"step {step + 1}: loss {loss.item():.4f}, radius {log_radius.exp().item():.3f}")
            print(f"  {used} columns, relative gap {(solution.gap / solution.value).item():.1e}")
    assert b.grad is not None
    longest = b.grad.abs().max().item()
    print(
        f"process {rank} of {size}: {len(b)} rows, one of which counts {longest:.1e} for the loss"
    )
    if objective.shards is not None and rank == 0:
        seen = objective.shards.traffic
        print(f"the last solve: {seen.calls} sums of {seen.bytes / 1e6:.2f} MB in all")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
