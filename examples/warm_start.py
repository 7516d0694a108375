"""Start each solve of a training loop from the last solution of the same sample.

Portfolios of n assets: a network predicts returns r from features, the layer maximises
rᵀx − ½ xᵀPx under a leverage limit ‖x‖₁ ≤ t, and the network learns from portfolios that somebody
chose. Samples are shuffled, so a batch never meets its own last solution; what is kept is one row
per sample, looked up by its index. Every batch is solved twice, with and without that start.
"""

import os
import time

import torch
from torch import Tensor, nn

from dfwlayer import DFWLayer, Solution

QUICK = "DFW_QUICK" in os.environ
EPOCHS, SAMPLES, ASSETS = (6, 60, 30) if QUICK else (40, 500, 200)
BATCH, FEATURES, LIMIT = 64, 20, 1.5

torch.manual_seed(0)
layer = DFWLayer(p=1)

# a covariance with a few common factors, features, and the portfolios to learn from
factors = torch.randn(ASSETS // 10, ASSETS)
P = factors.mT @ factors + torch.diag(0.5 + torch.rand(ASSETS))
features = torch.randn(SAMPLES, FEATURES)
hidden = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, ASSETS))
with torch.no_grad():
    portfolios = layer(P, -hidden(features), radius=LIMIT)

# NaN stands for "no solution yet": such rows start afresh, whatever the others do
last = torch.full((SAMPLES, ASSETS), torch.nan)
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, ASSETS))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)


def timed(q: Tensor, x0: Tensor | None) -> tuple[Solution, float]:
    start = time.perf_counter()
    sol = layer.solve(P, q, radius=LIMIT, x0=x0)
    return sol, time.perf_counter() - start


print("epoch  change of q     loss   steps cold/warm   ms cold/warm")
total = {"cold": 0.0, "warm": 0.0}
seconds = {"cold": 0.0, "warm": 0.0}
before = model(features).detach()
for epoch in range(EPOCHS):
    steps, spent, losses = {"cold": 0, "warm": 0}, {"cold": 0.0, "warm": 0.0}, 0.0
    # the last batch is smaller than the others; an index does not mind
    for index in torch.randperm(SAMPLES).split(BATCH):
        q = -model(features[index])
        cold, spent_cold = timed(q, None)
        sol, spent_warm = timed(q, last[index])
        last[index] = sol.x.detach()

        loss = (sol.x - portfolios[index]).square().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

        # both are within their gap of the same minimum
        between = (sol.value - cold.value).abs()
        assert (between <= sol.gap + cold.gap + 1e-6 * cold.value.abs()).all()
        steps["cold"] += int(cold.num_steps.sum())
        steps["warm"] += int(sol.num_steps.sum())
        spent["cold"] += spent_cold
        spent["warm"] += spent_warm
        losses += loss.item() * len(index)
    schedule.step()
    now = model(features).detach()
    change = ((now - before).norm() / now.norm()).item()
    before = now
    for way in total:
        total[way] += steps[way] if epoch else 0  # in the first epoch both are cold
        seconds[way] += spent[way] if epoch else 0
    if epoch % max(1, EPOCHS // 10) == 0 or epoch == EPOCHS - 1:
        each = [f"{steps[way] / SAMPLES:5.1f}" for way in steps]
        ms = [f"{1e3 * spent[way]:6.1f}" for way in spent]
        row = f"{losses / SAMPLES:9.2e}   {each[0]} / {each[1]}   {ms[0]} / {ms[1]}"
        print(f"{epoch:5d}      {change:7.1%} {row}")

fewer, faster = (1 - each["warm"] / each["cold"] for each in (total, seconds))
print(f"after the first epoch: {fewer:.0%} of the steps saved, {faster:.0%} of the time")
assert fewer > 0
