"""Start each solve of a training loop from the last solution of the same sample.

A network predicts returns r from features, the layer chooses the portfolio that maximises
rᵀx − ½ xᵀPx with ‖x‖_p ≤ t, and the network learns from portfolios that somebody chose. Samples
are shuffled, so a batch never meets its own last solution. What is kept is therefore one row per
sample, looked up by its index. For comparison every batch is also solved without it.
"""

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dfwlayer import DFWLayer, Solution

QUICK = "DFW_QUICK" in os.environ
EPOCHS, SAMPLES, ASSETS = (4, 40, 30) if QUICK else (20, 200, 60)
BATCH, FEATURES, LIMIT = 64, 20, {1: 1.5, 2: 0.5}


@dataclass
class Effort:
    """What solving took."""

    steps: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Effort") -> "Effort":
        return Effort(self.steps + other.steps, self.seconds + other.seconds)


def predictor() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, ASSETS))


def train(p: int) -> None:
    """Learn to predict, and tell what solving took with and without the last solutions."""
    torch.manual_seed(0)
    layer = DFWLayer(p=p)
    factors = torch.randn(ASSETS // 10, ASSETS)
    P = factors.mT @ factors + torch.diag(0.5 + torch.rand(ASSETS))  # a covariance

    def timed(q: Tensor, x0: Tensor | None) -> tuple[Solution, Effort]:
        start = time.perf_counter()
        sol = layer.solve(P, q, radius=LIMIT[p], x0=x0)
        return sol, Effort(int(sol.num_steps.sum()), time.perf_counter() - start)

    features = torch.randn(SAMPLES, FEATURES)
    with torch.no_grad():
        portfolios = layer(P, -predictor()(features), radius=LIMIT[p])
    model = predictor()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)

    # NaN stands for "no solution yet": such rows start afresh, whatever the others do
    last = torch.full((SAMPLES, ASSETS), torch.nan)
    before = model(features).detach()
    cold_later = warm_later = Effort()
    print(f"p = {p}\nepoch  change of q  loss      steps cold/warm   ms cold/warm")
    for epoch in range(EPOCHS):
        cold = warm = Effort()
        total = 0.0
        for index in torch.randperm(SAMPLES).split(BATCH):  # the last one is smaller
            q = -model(features[index])
            afresh, effort = timed(q, None)
            cold += effort
            sol, effort = timed(q, last[index])
            warm += effort
            last[index] = sol.x.detach()

            loss = (sol.x - portfolios[index]).square().sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(index)
            # both are within their gaps of the same minimum
            apart = (sol.value - afresh.value).abs()
            assert (apart <= sol.gap + afresh.gap + 1e-6 * sol.value.abs()).all()
        schedule.step()
        now = model(features).detach()
        change, before = ((now - before).norm() / now.norm()).item(), now
        if epoch:  # there was nothing to start from in the first one
            cold_later, warm_later = cold_later + cold, warm_later + warm
        if epoch % max(1, EPOCHS // 6) == 0 or epoch == EPOCHS - 1:
            steps = f"{cold.steps / SAMPLES:9.1f} /{warm.steps / SAMPLES:6.1f}"
            ms = f"{1e3 * cold.seconds:9.0f} /{1e3 * warm.seconds:5.0f}"
            print(f"{epoch:5d}  {change:11.1%}  {total / SAMPLES:.2e} {steps} {ms}")
    fewer = 1 - warm_later.steps / cold_later.steps
    faster = 1 - warm_later.seconds / cold_later.seconds
    print(f"after the first epoch: {fewer:.0%} of the steps saved, {faster:.0%} of the time\n")
    assert warm.steps < cold.steps  # in the last epoch, where little changes


for p in LIMIT:
    train(p)
