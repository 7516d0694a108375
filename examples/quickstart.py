"""The layer in ten lines: a batch of constrained decisions, and gradients in all they depend on."""

import torch

from dfwlayer import DFWLayer

torch.manual_seed(0)
layer = DFWLayer(p=1)  # x = argmin ½ xᵀPx + qᵀx subject to ‖w ∘ x‖₁ ≤ t

P = torch.eye(5)  # shared by the batch; (B, 5, 5) gives every problem its own
q = torch.randn(3, 5, requires_grad=True)
w = torch.ones(5, requires_grad=True)
t = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)

x = layer(P, q, w, t)
x[:, 0].sum().backward()

print("decisions, sparse and within their budgets:\n", x.detach())
print("spent:  ", (w * x).abs().sum(-1).detach(), "\nbudgets:", t.detach())
print("gradient in the budgets:", t.grad)

sol = layer.solve(P, q, w, t)  # the same with its certificate: f(x) − f* ≤ gap
print(sol)

assert ((w * x).abs().sum(-1) <= t * (1 + 1e-6)).all()
assert sol.converged.all()
assert all(v.grad is not None and v.grad.isfinite().all() for v in (q, w, t))
