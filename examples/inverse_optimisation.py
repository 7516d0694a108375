"""Recover a hidden constraint from decisions that were made under it.

Each decision is the point of an unknown set that is nearest to a known wish. Gradient descent on
the set's own parameters finds the set: a budget ‖w ∘ (x − c)‖₁ ≤ t with its prices, centre and
size, the bounds of a box, and the caps of a budget Σx = 1.

    python examples/inverse_optimisation.py [FOLDER]   writes FOLDER/inverse_optimisation.png
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dfwlayer import Box, CappedSimplex, LpBall, Quadratic, solve

QUICK = "DFW_QUICK" in os.environ
STEPS, DECISIONS = (150, 100) if QUICK else (300, 200)
N = 6


@dataclass(frozen=True)
class Task:
    """A family of sets, the hidden member, and where to begin."""

    title: str
    build: Callable[..., object]  # the set from its parameters
    hidden: dict[str, Tensor]
    start: dict[str, Tensor]
    wish: float  # size of the wishes


def budget(price: Tensor, centre: Tensor, size: Tensor) -> LpBall:
    """Prices are positive with mean one: only the ratio of prices to the size matters."""
    return LpBall(1, size, torch.softmax(price, -1) * N, centre=centre)


def box(middle: Tensor, width: Tensor) -> Box:
    """Bounds around a middle; a width cannot be negative."""
    return Box(middle - width.exp(), middle + width.exp())


torch.manual_seed(0)
tasks = [
    Task(
        "budget around a centre",
        budget,
        {"price": 0.4 * torch.randn(N), "centre": torch.randn(N), "size": torch.tensor(2.5)},
        {"price": torch.zeros(N), "centre": torch.zeros(N), "size": torch.tensor(1.0)},
        wish=3.0,
    ),
    Task(
        "bounds",
        box,
        {"middle": 0.5 * torch.randn(N), "width": 0.3 * torch.randn(N)},
        {"middle": torch.zeros(N), "width": torch.zeros(N)},
        wish=2.0,
    ),
    Task(
        "caps of a budget",
        lambda cap: CappedSimplex(1.0, cap),
        {"cap": 0.2 + 0.3 * torch.rand(N)},
        {"cap": torch.full((N,), 0.25)},
        wish=1.0,
    ),
]


def learn(task: Task) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters that explain the decisions, and the errors on the way."""
    wishes = task.wish * torch.randn(DECISIONS, N)
    objective = Quadratic(None, -wishes)
    decisions = solve(objective, task.build(**task.hidden)).x
    learned = {k: v.clone().requires_grad_() for k, v in task.start.items()}
    optimiser = torch.optim.Adam(learned.values(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    errors = []
    for _ in range(STEPS):
        error = (solve(objective, task.build(**learned)).x - decisions).square().mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
        schedule.step()
        errors.append(error.item())
    return {k: v.detach() for k, v in learned.items()}, errors


figure, axes = plt.subplots(1, 4, figsize=(10, 2.7), layout="tight")
for axis, task in zip(axes[1:], tasks, strict=True):
    learned, errors = learn(task)
    print(
        f"{task.title}: error of the decisions {errors[0]:.1e} at first, {errors[-1]:.1e} at last"
    )
    for name, value in learned.items():
        found, want = value, task.hidden[name]
        if name == "price":
            found, want = (torch.softmax(v, -1) * N for v in (found, want))
        off = (found - want).abs().max().item()
        print(f"    {name}: off by at most {off:.4f}")
        assert off <= (0.15 if QUICK else 0.02), f"{name} was not recovered"
        axis.plot(want.reshape(-1), found.reshape(-1), "o", ms=4, label=name)
    low, high = axis.get_xlim()
    axis.plot([low, high], [low, high], color="0.8", zorder=0)
    axis.set_title(task.title, fontsize=10)
    axis.set_xlabel("hidden", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    axes[0].semilogy(errors, label=task.title)
axes[1].set_ylabel("learned", fontsize=9)
axes[0].set_title("error of the decisions", fontsize=10)
axes[0].set_xlabel("step", fontsize=9)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "inverse_optimisation.png", dpi=80)
print(f"wrote {folder / 'inverse_optimisation.png'}")
