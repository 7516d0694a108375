"""An adversarial budget: attack a classifier of digits within ‖x' − x‖_p ≤ ε, and train against it.

A step of the attack moves along the gradient of the loss and comes back to the ball around the
image, which is the layer with the image as its centre:

    x' ← layer(None, −(x' + step · direction), radius=ε, centre=x)

The digits are those of scikit-learn (pip install "dfwlayer[examples]").

    python examples/adversarial.py [FOLDER]      writes FOLDER/adversarial.png (out/examples)
"""

import math
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from dfwlayer import DFWLayer

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit('this example needs scikit-learn: pip install "dfwlayer[examples]"')

QUICK = "DFW_QUICK" in os.environ
EPOCHS, SHOWN = (6, 200) if QUICK else (25, 400)
BUDGETS = {math.inf: 0.15, 2.0: 0.8, 1.0: 3.0}  # pixels are in [0, 1]
NAMES = {math.inf: "ℓ∞", 2.0: "ℓ2", 1.0: "ℓ1"}


def attack(net: nn.Module, x: Tensor, y: Tensor, p: float, budget: float, steps: int) -> Tensor:
    """x' (B, 64) with a high loss and ‖x' − x‖_p ≤ budget."""
    layer, at = DFWLayer(p), x
    for _ in range(steps):
        at = at.detach().requires_grad_()
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(net(at), y), at)
        slope = slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        at = layer(None, -(at.detach() + 0.5 * slope), radius=budget, centre=x)
    return at


def train(adversarial: bool) -> nn.Module:
    """A small network, trained on images or on attacks on them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
    net.append(nn.Linear(96, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(100):
            x, y = images[batch], labels[batch]
            if adversarial:
                x = attack(net, x, y, 2.0, BUDGETS[2.0], steps=3)
            loss = nn.functional.cross_entropy(net(x), y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net


def accuracy(net: nn.Module, x: Tensor) -> float:
    """The share of test images it gets right."""
    with torch.no_grad():
        return (net(x).argmax(-1) == test_labels).double().mean().item()


digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
targets = torch.tensor(digits.target)
images, labels = pixels[:1200], targets[:1200]
test_images, test_labels = pixels[1200 : 1200 + SHOWN], targets[1200 : 1200 + SHOWN]

results, attacked = {}, {}
for name, adversarial in (("plain", False), ("trained against ℓ2", True)):
    net = train(adversarial)
    results[name] = {"no attack": accuracy(net, test_images)}
    for p, budget in BUDGETS.items():
        x = attack(net, test_images, test_labels, p, budget, steps=10)
        size = torch.linalg.vector_norm(x - test_images, p, dim=-1)
        assert (size <= budget * (1 + 1e-6)).all(), "beyond the budget"
        results[name][f"{NAMES[p]} ≤ {budget:g}"] = accuracy(net, x)
        attacked.setdefault(p, x)  # those of the plain network
    print(f"{name}: " + ", ".join(f"{k} {v:.0%}" for k, v in results[name].items()))
plain, hardened = results.values()
assert plain["no attack"] > 0.8
assert hardened["ℓ2 ≤ 0.8"] > plain["ℓ2 ≤ 0.8"] + 0.05

figure = plt.figure(figsize=(9, 3), layout="tight")
grid = figure.add_gridspec(4, 9)
for row, (title, x) in enumerate({"image": test_images, **attacked}.items()):
    for column in range(5):
        axis = figure.add_subplot(grid[row, column])
        axis.imshow(x[column].reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axis.set_xticks([])
        axis.set_yticks([])
        if column == 0:
            axis.set_ylabel(NAMES.get(title, title), fontsize=9)
axis = figure.add_subplot(grid[:, 5:])
for i, (name, scores) in enumerate(results.items()):
    axis.bar([k + 0.4 * i for k in range(4)], scores.values(), 0.38, label=name)
axis.set_xticks([k + 0.2 for k in range(4)], list(plain), fontsize=8)
axis.set_title("right", fontsize=10)
axis.legend(fontsize=8, frameon=False)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "adversarial.png", dpi=80)
print(f"wrote {folder / 'adversarial.png'}")
