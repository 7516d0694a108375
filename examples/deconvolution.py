"""Sparse deconvolution with a lasso layer: spikes from a blurred, noisy signal.

    x = argmin ½‖K x − b‖²  subject to  ‖x‖₁ ≤ t(b)

The blur K is not known. Its kernel and the rule for the budget t are learned through the layer,
from pairs of signals b and spikes, so that what the layer finds are the spikes.

    python examples/deconvolution.py [FOLDER]      writes FOLDER/deconvolution.png (out/examples)
"""

import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dfwlayer import LpBall, Quadratic, solve

QUICK = "DFW_QUICK" in os.environ
STEPS, SIGNALS = (20, 16) if QUICK else (60, 24)
N, WIDTH = 60, 9  # length of a signal and of the kernel
NOISE = 0.02


def blur(kernel: Tensor) -> Tensor:
    """K (N, N), the convolution with a kernel (WIDTH,)."""
    offset = torch.arange(N).unsqueeze(-1) - torch.arange(N) + WIDTH // 2
    inside = (offset >= 0) & (offset < WIDTH)
    return torch.where(inside, kernel[offset.clamp(0, WIDTH - 1)], 0)


def draw(kernel: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Spikes (count, N), four each, and the signals they make."""
    places = torch.rand(count, N).argsort(-1)[:, :4]
    heights = (0.5 + torch.rand(count, 4)) * torch.sign(torch.randn(count, 4))
    spikes = torch.zeros(count, N).scatter(-1, places, heights)
    return spikes, spikes @ blur(kernel).mT + NOISE * torch.randn(count, N)


torch.manual_seed(0)
grid = torch.arange(WIDTH) - WIDTH // 2
hidden = torch.exp(-0.5 * ((grid + 0.7) / 1.3) ** 2) * (1 + 0.25 * grid)  # lopsided
hidden = hidden / hidden.norm()
spikes, signals = draw(hidden, SIGNALS)
test_spikes, test_signals = draw(hidden, 50)

kernel = torch.exp(-0.5 * (grid / 2.5) ** 2)  # a first guess
kernel = (kernel / kernel.norm()).requires_grad_()
rule = torch.tensor([0.1, 0.0], requires_grad=True)  # t = |a ‖b‖₁ + c|


def find(signals: Tensor) -> Tensor:
    """The spikes the layer sees in signals."""
    budget = (rule[0] * signals.abs().sum(-1) + rule[1]).abs()
    K = blur(kernel)
    # for a matrix this small, and as badly conditioned as a blur is, KᵀK is worth forming
    return solve(Quadratic(K.mT @ K, -signals @ K), LpBall(1, budget)).x


def error(found: Tensor, spikes: Tensor) -> Tensor:
    """Relative to the size of the spikes."""
    return (found - spikes).square().sum() / spikes.square().sum()


with torch.no_grad():
    before = find(test_signals)
    start = error(before, test_spikes).item()

optimiser = torch.optim.Adam([kernel, rule], lr=0.03)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
losses = []
for step in range(STEPS):
    loss = error(find(signals), spikes)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
    losses.append(loss.item())
    if step % (STEPS // 4) == 0:
        print(f"step {step:3d}   squared error on the training signals {loss.item():.3f}")

with torch.no_grad():
    after = find(test_signals)
    end = error(after, test_spikes).item()
likeness = torch.cosine_similarity(kernel.detach(), hidden, 0).item()
print(f"squared error on new signals: {start:.3f} before training, {end:.3f} after")
print(f"cosine of the learned and the hidden kernel: {likeness:.4f}")
assert end < (0.5 if QUICK else 0.15) * start
assert likeness > 0.9

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=(2.2, 1), layout="tight")
left.plot(test_signals[0], color="0.7", label="signal")
left.plot(before[0], ":", color="tab:orange", label="found, before training")
left.plot(after[0], color="tab:blue", label="found, after")
left.plot(test_spikes[0].where(test_spikes[0] != 0, torch.nan), "kx", label="spikes")
left.legend(fontsize=8, frameon=False)
left.set_title("a new signal", fontsize=10)
right.plot(grid, hidden, "k--", label="hidden kernel")
right.plot(grid, kernel.detach(), color="tab:blue", label="learned")
right.legend(fontsize=8, frameon=False)
right.set_title(f"cosine {likeness:.3f}", fontsize=10)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "deconvolution.png", dpi=80)
print(f"wrote {folder / 'deconvolution.png'}")
