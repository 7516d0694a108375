"""Learn who goes with whom: assignments over doubly stochastic matrices.

Workers and jobs have features; somebody has assigned them, one to one, by scores nobody wrote
down. A network learns the scores from the assignments, through the layer

    X = argmin ½ τ‖X‖² − ⟨scores, X⟩  over the doubly stochastic matrices,

whose solution is a soft assignment with an exact gradient. The hard one is the best permutation.

    python examples/assignment.py [FOLDER]      writes FOLDER/assignment.png (out/examples)
"""

import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from dfwlayer import Birkhoff, Quadratic, solve

QUICK = "DFW_QUICK" in os.environ
STEPS, TRAIN = (24, 32) if QUICK else (100, 96)
N, FEATURES = 6, 4  # workers, and features of a worker and of a job
birkhoff = Birkhoff(N)


def hidden_scores(workers: Tensor, jobs: Tensor) -> Tensor:  # (B, N, FEATURES) each
    """What decides, and is not known: skills that match, and closeness in the first feature."""
    skills = torch.einsum("bif,bjf->bij", workers[..., 1:].tanh(), jobs[..., 1:])
    return skills - 2 * (workers[..., None, 0] - jobs[..., None, :, 0]).abs()


def draw(count: int) -> tuple[Tensor, Tensor]:
    """All features of all pairs (count, N, N, 2·FEATURES), and the assignments (count, N·N)."""
    workers, jobs = torch.randn(2, count, N, FEATURES)
    pairs = torch.cat(
        (
            workers.unsqueeze(2).expand(-1, -1, N, -1),
            jobs.unsqueeze(1).expand(-1, N, -1, -1),
        ),
        -1,
    )
    return pairs, birkhoff.vertex(-hidden_scores(workers, jobs).flatten(1))


def accuracy(scores: Tensor, assigned: Tensor) -> float:
    """The share of workers whose job the best permutation gets right."""
    return (birkhoff.vertex(-scores) * assigned).sum().item() / (N * len(assigned))


torch.manual_seed(0)
pairs, assigned = draw(TRAIN)
test_pairs, test_assigned = draw(64)
net = nn.Sequential(
    nn.Linear(2 * FEATURES, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
)

optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
history = []
for step in range(STEPS):
    scores = net(pairs).flatten(1)  # (B, N·N)
    X = solve(Quadratic(None, -scores), birkhoff).x  # τ = 1
    loss = (X - assigned).square().sum(-1).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
    if step % 10 == 0 or step == STEPS - 1:
        with torch.no_grad():
            right = accuracy(net(test_pairs).flatten(1), test_assigned)
        history.append((step, right))
        if step % (STEPS // 4) == 0:
            print(f"step {step:3d}   loss {loss.item():.3f}   right on new ones {right:.0%}")

chance, end = 1 / N, history[-1][1]
print(f"right on new assignments: {end:.0%} (by chance {chance:.0%})")
assert end > (0.4 if QUICK else 0.6)

with torch.no_grad():
    scores = net(test_pairs[:1]).flatten(1)
    soft = solve(Quadratic(None, -scores), birkhoff).x
assert (birkhoff.violation(soft) <= 1e-6).all()

figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), width_ratios=(1, 1, 1, 1.4), layout="tight")
titles = ("assigned", "soft assignment", "best permutation")
for axis, matrix, title in zip(
    axes, (test_assigned[0], soft[0], birkhoff.vertex(-scores)[0]), titles, strict=False
):
    axis.imshow(matrix.reshape(N, N).numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(title, fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
axes[0].set_ylabel("workers", fontsize=9)
axes[0].set_xlabel("jobs", fontsize=9)
axes[3].plot(*zip(*history, strict=True), color="tab:blue")
axes[3].axhline(chance, color="0.6", linestyle=":")
axes[3].set_ylim(0, 1)
axes[3].set_xlabel("step", fontsize=9)
axes[3].set_title("right on new ones", fontsize=10)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "assignment.png", dpi=80)
print(f"wrote {folder / 'assignment.png'}")
