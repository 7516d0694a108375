"""Sparse logistic regression in an ℓ1 ball, for any smooth loss written in torch.

The intercept is not penalised: its weight in the ball is zero. The certificate proves how close
the fit is to the best one, and the fit is differentiable in the radius.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dfwlayer import LpBall, Smooth, solve

SAMPLES, FEATURES = 400, 40

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# a few features matter, and the classes are not balanced
truth = torch.zeros(FEATURES)
truth[:3] = torch.tensor([2.0, -1.5, 1.0])
X = torch.randn(SAMPLES, FEATURES)
y = torch.where(torch.rand(SAMPLES) < torch.sigmoid(X @ truth + 1.0), 1.0, -1.0)


def loss(beta: Tensor, X: Tensor, y: Tensor) -> Tensor:  # beta: features, then the intercept
    return softplus(-y * (X @ beta[:-1] + beta[-1])).mean()


weight = torch.ones(FEATURES + 1)
weight[-1] = 0.0
radius = torch.tensor(2.0, requires_grad=True)

objective = Smooth(loss, X, y, shape=(FEATURES + 1,))
fit = solve(objective, LpBall(1, radius, weight), tol=1e-8)
beta = fit.x.detach()
print(fit)
print(f"loss {fit.value.item():.6f}, at most {fit.gap.item():.1e} above the best")
print(f"features in use: {int((beta[:-1] != 0).sum())} of {FEATURES}; intercept {beta[-1]:.3f}")

# what holds at the optimum: no slope along the intercept, the same steepest slope on the support
at = beta.clone().requires_grad_()
(slope,) = torch.autograd.grad(loss(at, X, y), at)
steepest = slope[:-1].abs().max()
used = beta[:-1] != 0
print(f"slope along the intercept {slope[-1]:.1e}, on the support {steepest:.4f}")

assert fit.converged
assert beta[:-1].abs().sum() <= radius * (1 + 1e-12)
assert slope[-1].abs() <= 1e-6 * steepest
assert ((slope[:-1] + steepest * beta[:-1].sign())[used].abs() <= 1e-6 * steepest).all()
assert used[:3].all()
assert used.sum() < FEATURES

# a wider ball lowers the loss at the rate of the steepest slope: d loss / dt = −λ
(rate,) = torch.autograd.grad(loss(fit.x, X, y), radius)
print(f"d loss / d radius {rate.item():.4f}")
assert abs(rate + steepest) <= 1e-6 * steepest
