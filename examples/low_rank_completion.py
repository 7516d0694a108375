"""Matrix completion: a large matrix of low rank from a fifth of its entries, noise on top.

The nuclear ball keeps the rank low. A solve looks at leading singular pairs only, and its gradient
in the data comes from the matrices of that rank. Projected gradient steps with a full singular
value decomposition each solve the same problem beside it. With DFW_QUICK=1 the matrix is small.

    python examples/low_rank_completion.py [FOLDER]   writes FOLDER/low_rank_completion.png
                                                      (out/examples)
"""

import os
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dfwlayer import LeastSquares, LpBall, NuclearBall, ProjectedNewton, solve

QUICK = "DFW_QUICK" in os.environ
SIZE, RANK = (220, 3) if QUICK else (1000, 10)
TOL = 1e-3  # on the gap, relative to f

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

truth = torch.randn(SIZE, RANK) @ torch.randn(RANK, SIZE) / RANK**0.5
seen = torch.randperm(SIZE**2)[: SIZE**2 // 5].sort().values
data = truth.flatten()[seen] + 0.1 * torch.randn(len(seen))
radius = 0.8 * torch.linalg.matrix_norm(truth, "nuc")
place = torch.stack((torch.arange(len(seen)), seen))
sampling = torch.sparse_coo_tensor(
    place, torch.ones(len(seen)), (len(seen), SIZE**2), is_coalesced=True, check_invariants=True
)


def leading_pairs() -> tuple[Tensor, float, float]:
    """The solve of the library: the matrix, its relative gap, and seconds."""
    begin = time.process_time()
    ball = NuclearBall(radius, shape=(SIZE, SIZE))
    # few steps of conjugate gradients on a face: at this tolerance more are not needed
    found = solve(LeastSquares(sampling, data), ball, tol=TOL, method=ProjectedNewton(inner=2))
    seconds = time.process_time() - begin
    assert found.converged
    print(f"solve: {found.num_steps.item()} steps, {seconds:.2f} s")
    return found.x, (found.gap / found.value).item(), seconds


def full_decompositions() -> tuple[Tensor, float, float]:
    """Projected gradient steps of length 1/L = 1; the clock stands still for their gap."""
    ball = LpBall(1, radius)
    x, seconds, steps = torch.zeros(SIZE**2), 0.0, 0
    for _ in range(1000):
        begin = time.process_time()
        residual = x[seen] - data
        gradient = torch.zeros(SIZE**2).index_put((seen,), residual)
        seconds += time.process_time() - begin
        value = 0.5 * residual.dot(residual)
        lowest = NuclearBall(radius).lowest(gradient.reshape(SIZE, SIZE))
        gap = ((gradient.dot(x) - lowest) / value).item()
        if gap <= TOL:
            break
        begin = time.process_time()
        left, values, right = torch.linalg.svd(
            (x - gradient).reshape(SIZE, SIZE), full_matrices=False
        )
        x = ((left * ball.project(values)) @ right).flatten()
        steps += 1
        seconds += time.process_time() - begin
    print(f"projected gradient with full decompositions: {steps} steps, {seconds:.2f} s")
    return x, gap, seconds


ours, gap, fast = leading_pairs()
plain, plain_gap, slow = full_decompositions()
matrix = ours.reshape(SIZE, SIZE)
values = torch.linalg.svdvals(matrix)
rank = int((values > 1e-9 * values[0]).sum())
away = ((ours - plain).norm() / plain.norm()).item()
print(f"relative gap {gap:.1e} and {plain_gap:.1e}; the two differ by {away:.1e}")
print(f"{SIZE} x {SIZE}, rank {rank}, nuclear norm {values.sum() / radius:.12f} of the radius")
print(f"{slow / fast:.1f} times faster")
assert max(gap, plain_gap) <= TOL
assert values.sum() <= radius * (1 + 1e-12)
assert away <= 0.1

# which entries of the data decide about one that was not seen: the gradient of its estimate
small = SIZE if QUICK else 300  # a corner of the matrix
corner = (seen // SIZE < small) & (seen % SIZE < small)
rows, columns = seen[corner] // SIZE, seen[corner] % SIZE
entries = data[corner].clone().requires_grad_()
at = torch.stack((torch.arange(len(entries)), rows * small + columns))
part = torch.sparse_coo_tensor(
    at, torch.ones(len(entries)), (len(entries), small**2), is_coalesced=True, check_invariants=True
)
share = radius * small / SIZE
estimate = solve(LeastSquares(part, entries), NuclearBall(share, shape=(small, small)), tol=1e-8)
unseen = torch.ones(small**2, dtype=torch.bool)
unseen[rows * small + columns] = False
target = int(unseen.nonzero()[0])
(influence,) = torch.autograd.grad(estimate.x[target], entries)
step = 1e-4 * influence / influence.norm()
ends = [
    solve(
        LeastSquares(part, entries.detach() + sign * step),
        NuclearBall(share, shape=(small, small)),
        tol=1e-8,
    ).x[target]
    for sign in (1, -1)
]
difference = ((ends[0] - ends[1]) / 2e-4).item()
print(f"influence on an unseen entry: {influence.norm():.6f}, by differences {difference:.6f}")
assert abs(difference - influence.norm().item()) <= 1e-4 * influence.norm().item()

figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
shown = min(SIZE, 120)
limit = 2.5 * truth.std().item()
observed = torch.full((SIZE**2,), torch.nan)
observed[seen] = data
pictures = {"truth": truth, "seen": observed.reshape(SIZE, SIZE), "completed": matrix}
for axis, (title, picture) in zip(axes, pictures.items(), strict=False):
    axis.imshow(picture[:shown, :shown].numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(f"{title} (a corner)")
    axis.set_xticks([])
    axis.set_yticks([])
axes[3].bar(["leading pairs", "full decompositions"], [fast, slow], color=["C0", "C7"])
axes[3].set_ylabel("seconds to a relative gap of 1e-3")
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "low_rank_completion.png", dpi=80)
print(f"wrote {folder / 'low_rank_completion.png'}")
