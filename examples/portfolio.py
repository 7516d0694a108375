"""A leverage-limited portfolio, trained end to end on the quality of its decisions.

Every day a small model predicts returns μ from what is known, and the portfolio is

    x = argmax ⟨μ, x⟩ − γ/2 ⟨x, Σx⟩  subject to  Σ x_i = 1 and ‖x‖₁ ≤ leverage.

The model is too small for all that can be known: it may use one combination of four signals.
Fitted to returns (two stages), it spends that on what moves most, the whole market, which no
portfolio can use. Trained through the layer, it spends it on what decides.

    python examples/portfolio.py [FOLDER]      writes FOLDER/portfolio.png (out/examples)
"""

import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dfwlayer import LpBall, PlaneCut, Quadratic, solve

QUICK = "DFW_QUICK" in os.environ
STEPS, DAYS, NEW = (10, 100, 300) if QUICK else (60, 300, 500)
ASSETS, KNOWN, RANK, LEVERAGE, RISK = 8, 4, 1, 1.6, 1.0


def draw(days: int) -> tuple[Tensor, Tensor]:
    """What is known (days, KNOWN), and the returns (days, ASSETS)."""
    known = torch.randn(days, KNOWN)
    market = known[:, :2] @ torch.tensor([[1.0], [0.7]])  # all assets alike
    returns = market + 0.3 * torch.tanh(known @ mixing)
    return known, returns + torch.randn(days, ASSETS) @ factor.mT


def decide(predicted: Tensor) -> Tensor:
    """The portfolios for predicted returns (days, ASSETS)."""
    limits = PlaneCut(LpBall(1, LEVERAGE), normal=1.0, level=1.0)
    return solve(Quadratic(RISK * covariance, -predicted), limits).x


def quality(x: Tensor, returns: Tensor) -> Tensor:
    """Mean of the return minus the price of risk, of what really happened."""
    risk = 0.5 * RISK * (x * (x @ covariance)).sum(-1)
    return ((x * returns).sum(-1) - risk).mean()


def predict(known: Tensor, model: tuple[Tensor, Tensor]) -> Tensor:
    """Returns from RANK combinations of what is known."""
    return known @ model[0] @ model[1]


torch.manual_seed(0)
mixing = torch.randn(KNOWN, ASSETS)
factor = 0.3 * torch.eye(ASSETS) + 0.1 * torch.randn(ASSETS, ASSETS)
covariance = factor @ factor.mT
known, returns = draw(DAYS)
test_known, test_returns = draw(NEW)

# two stages: the least-squares fit of that rank, then decide
full = torch.linalg.lstsq(known, returns).solution
_, _, directions = torch.linalg.svd(known @ full, full_matrices=False)
fitted = full @ directions[:RANK].mT, directions[:RANK]
with torch.no_grad():
    before = decide(predict(test_known, fitted))

# end to end: from there through the layer
model = tuple(part.clone().requires_grad_() for part in fitted)
optimiser = torch.optim.Adam(model, lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
history = []
for step in range(STEPS):
    x = decide(predict(known, model))
    loss = -quality(x, returns)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
    assert (x.sum(-1) - 1).abs().max() <= 1e-5, "not a portfolio"
    assert x.abs().sum(-1).max() <= LEVERAGE * (1 + 1e-6), "beyond the leverage"
    if step % 5 == 4 or step == 0:
        with torch.no_grad():
            after = decide(predict(test_known, model))
        history.append((step + 1, quality(after, test_returns).item()))
        print(f"step {step + 1:3d}   quality on new days {history[-1][1]:.4f}")

base, end = quality(before, test_returns).item(), history[-1][1]
errors = [
    (predict(test_known, parts).detach() - test_returns).square().mean()
    for parts in (fitted, model)
]
print(f"two stages: quality on new days {base:.4f}, squared error of returns {errors[0]:.3f}")
print(f"end to end: quality on new days {end:.4f}, squared error of returns {errors[1]:.3f}")
assert end > base + (0.0 if QUICK else 0.02)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="tight")
left.plot(*zip(*history, strict=True), color="tab:blue", label="end to end")
left.axhline(base, color="0.5", linestyle="--", label="two stages")
left.set_title("quality of decisions on new days", fontsize=10)
left.set_xlabel("step", fontsize=9)
left.legend(fontsize=8, frameon=False)
assets = torch.arange(ASSETS)
right.bar(assets - 0.2, before[0].tolist(), 0.38, color="0.7", label="two stages")
right.bar(assets + 0.2, after[0].tolist(), 0.38, color="tab:blue", label="end to end")
right.plot(assets, test_returns[0], "kx", label="return")
right.axhline(0, color="k", lw=0.6)
right.set_title("one new day, asset by asset", fontsize=10)
right.legend(fontsize=8, frameon=False)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "portfolio.png", dpi=80)
print(f"wrote {folder / 'portfolio.png'}")
