"""QPLayer of proxsuite: the QP over (x, y) with |x| ≤ y and ⟨w, y⟩ ≤ t as 2n + 1 dense rows."""

from __future__ import annotations

import torch

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready, load

__all__ = ["prepare_qplayer"]

EPS, EPS_BACKWARD = 1e-9, 1e-6
MINUS_INFINITY = -1e20


def prepare_qplayer(problem: Instance) -> Ready:
    """The dense backend, the only one QPLayer has; y ≥ 0 follows from |x| ≤ y and is left out."""
    module = load("proxsuite.torch.qplayer")
    solve = module.QPFunction(eps=EPS, eps_backward=EPS_BACKWARD, maxIter=1000)
    exact = problem.to(torch.float64)
    n, eye = problem.n, torch.eye(problem.n, dtype=torch.float64)
    H = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    H[:n, :n] = exact.P
    top = torch.cat([eye, -eye], 1)
    middle = torch.cat([-eye, -eye], 1)
    bottom = torch.cat([torch.zeros(n, dtype=torch.float64), exact.w]).unsqueeze(0)
    G = torch.cat([top, middle, bottom])
    upper = torch.zeros(2 * n + 1, dtype=torch.float64)
    upper[-1] = exact.t
    lower = torch.full_like(upper, MINUS_INFINITY)
    none = torch.empty(0, dtype=torch.float64)

    def call() -> Answer:
        q = exact.q.detach().requires_grad_()
        linear = torch.cat([q, torch.zeros_like(q)])
        z, _, _ = solve(H, linear, none, none, G, lower, upper)
        x = z[0, :n]
        (gradient,) = torch.autograd.grad(exact.v @ x, q)
        return Answer(x.detach(), gradient)

    return Ready(
        call,
        {"eps": EPS, "eps_backward": EPS_BACKWARD, "rows": 2 * n + 1, "dtype": "float64"},
    )
