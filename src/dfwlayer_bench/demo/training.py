"""The demo's training: recover a hidden budget and hidden prices from decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dfwlayer import DFWLayer
from dfwlayer_bench.demo.exact import Array, Problems, exact_solution
from dfwlayer_bench.demo.steps import Size

__all__ = ["BudgetedPlanner", "Training", "train"]


@dataclass(frozen=True)
class Training:
    """The history of the training, one entry per step, and what is left to say at the end."""

    loss: list[float]  # ‖x − decision‖² relative to ‖decision‖², over the batch
    radius: list[float]
    hidden_radius: float
    price_error: float  # ‖w − hidden w‖ / ‖hidden w‖ at the end
    test_loss: float  # as loss, on decisions that were not trained on
    decisions: int  # made in training
    violations: int  # of those, how many left the budget of the moment beyond rounding
    worst_violation: float


class BudgetedPlanner(nn.Module):
    """Features -> wishes -> the best decision that prices and budget allow; all of it is learned.

    Decisions depend on w/t only, so prices are scaled to have mean one.
    """

    def __init__(self, features: int, P: Tensor) -> None:
        super().__init__()
        n = len(P)
        self.wishes = nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, n))
        self.price_logits = nn.Parameter(torch.zeros(n))
        # A small start: a budget too large to bind has no influence, and so no gradient.
        self.log_radius = nn.Parameter(torch.zeros(()))
        self.register_buffer("P", P)
        self.layer = DFWLayer(p=1)

    @property
    def weight(self) -> Tensor:  # (n,)
        return torch.softmax(self.price_logits, -1) * len(self.price_logits)

    @property
    def radius(self) -> Tensor:  # ()
        return self.log_radius.exp()

    def forward(self, features: Tensor) -> Tensor:  # (B, features) -> (B, n)
        """The decisions."""
        out: Tensor = self.layer(self.P, self.wishes(features), self.weight, self.radius)
        return out


def train(seed: int, size: Size, on_step: Callable[[float, float], None]) -> Training:
    """Recover a hidden budget t and hidden prices w from decisions made under them.

    Args:
        seed: Of the data, the initial network and the order of the batches.
        size: Steps, batch and number of decisions.
        on_step: Told the loss and the radius after each step.

    """
    rng = np.random.default_rng(seed)
    features, decisions, P, hidden_weight, hidden_radius = _hidden_decisions(rng, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        planner = BudgetedPlanner(features.shape[-1], torch.tensor(P, dtype=torch.float32))
    inputs = torch.tensor(features, dtype=torch.float32)
    targets = torch.tensor(decisions, dtype=torch.float32)
    optimiser = torch.optim.Adam(planner.parameters(), lr=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, size.training_steps)

    losses: list[float] = []
    radii: list[float] = []
    violations, worst = 0, 0.0
    for _ in range(size.training_steps):
        batch = torch.as_tensor(rng.choice(size.training_set, size.training_batch, replace=False))
        x = planner(inputs[batch])
        loss = (x - targets[batch]).square().sum() / targets[batch].square().sum()
        weight, radius = planner.weight.detach(), float(planner.radius.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()

        spent = np.abs(x.detach().double().numpy() * weight.double().numpy()).sum(-1)
        worst = max(worst, float(spent.max() / radius - 1))
        violations += int((spent > radius * (1 + 4 * np.finfo(np.float32).eps)).sum())
        losses.append(float(loss.detach()))
        radii.append(radius)
        on_step(losses[-1], radius)

    with torch.no_grad():
        held_out = slice(size.training_set, None)
        error = planner(inputs[held_out]) - targets[held_out]
        test_loss = float(error.square().sum() / targets[held_out].square().sum())
        off = planner.weight.double().numpy() - hidden_weight
    return Training(
        loss=losses,
        radius=radii,
        hidden_radius=hidden_radius,
        price_error=float(np.linalg.norm(off) / np.linalg.norm(hidden_weight)),
        test_loss=test_loss,
        decisions=size.training_steps * size.training_batch,
        violations=violations,
        worst_violation=max(worst, 0.0),
    )


def _hidden_decisions(
    rng: np.random.Generator, size: Size, features: int = 4, n: int = 8
) -> tuple[Array, Array, Array, Array, float]:
    """Features, exact decisions, P, and the prices and budget that are to be found.

    A quarter more than the training set is made, to test on.
    """
    count = size.training_set + max(size.training_set // 4, 1)
    z = rng.standard_normal((count, features))
    factor = rng.standard_normal((n, n))
    P = factor.T @ factor / n + np.eye(n)
    q = 3 * np.tanh(z @ rng.standard_normal((features, n)) / np.sqrt(features))
    weight = rng.uniform(0.5, 1.5, n)
    weight = weight / weight.mean()
    demand = np.abs(weight * np.linalg.solve(P, -q.T).T).sum(-1)
    radius = 0.3 * float(np.median(demand))  # binds for most decisions
    exact = exact_solution(
        Problems(
            np.broadcast_to(P, (count, n, n)),
            q,
            np.broadcast_to(weight, (count, n)),
            np.full(count, radius),
        )
    )
    return z, exact.x, P, weight, radius
