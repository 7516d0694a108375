"""Learn the prices w and the budget t somebody decides under, from what they decided.

Each decision is x = argmin ½‖x‖² + qᵀx subject to ‖w ∘ x‖₁ ≤ t, for a known wish −q. Only w/t
matters, so prices are scaled to have mean one.
"""

import os

import torch

from dfwlayer import DFWLayer

QUICK = "DFW_QUICK" in os.environ
STEPS, DECISIONS = (60, 32) if QUICK else (300, 128)

torch.manual_seed(0)
layer = DFWLayer(p=1)

# what is hidden, and the decisions it leads to
n = 6
hidden_w = torch.rand(n) + 0.5
hidden_w = hidden_w / hidden_w.mean()
hidden_t = torch.tensor(3.0)
q = 2 * torch.randn(DECISIONS, n)
decisions = layer(None, q, hidden_w, hidden_t)

# The budget starts small: one too large to bind would have no influence, and so no gradient.
log_w = torch.zeros(n, requires_grad=True)
log_t = torch.zeros((), requires_grad=True)
optimiser = torch.optim.Adam([log_w, log_t], lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)

for step in range(STEPS):
    w, t = torch.softmax(log_w, -1) * n, log_t.exp()
    x = layer(None, q, w, t)
    loss = (x - decisions).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
    assert ((w * x).abs().sum(-1) <= t * (1 + 1e-6)).all(), "the layer left its ball"
    if step % (STEPS // 6) == 0:
        print(f"step {step:3d}   loss {loss.item():.2e}   t {t.item():.4f}")

w, t = (torch.softmax(log_w, -1) * n).detach(), log_t.exp().item()
print(f"budget: learned {t:.4f}, hidden {hidden_t.item():.4f}")
print("prices: learned", [round(v, 3) for v in w.tolist()])
print("         hidden", [round(v, 3) for v in hidden_w.tolist()])

tolerance = 5e-2 if QUICK else 1e-2
assert abs(t - hidden_t.item()) <= tolerance * hidden_t.item()
assert (w - hidden_w).abs().max() <= tolerance
