"""The floor: two conjugate gradient solves with P, what any method that uses products must pay."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready

__all__ = ["conjugate_gradient", "prepare_floor"]

TOL = 1e-6


def prepare_floor(problem: Instance) -> Ready:
    """The unconstrained solution P x = −q and its gradient −P⁻¹v, each to a residual of 1e-6."""

    def call() -> Answer:
        x, steps = conjugate_gradient(problem.P, -problem.q, TOL)
        gradient, more = conjugate_gradient(problem.P, -problem.v, TOL)
        return Answer(x, gradient, f"{steps}+{more} products")

    return Ready(call, {"tol": TOL, "dtype": str(problem.dtype).removeprefix("torch.")})


def conjugate_gradient(P: Tensor, b: Tensor, tol: float) -> tuple[Tensor, int]:
    """P⁻¹b to ‖residual‖ ≤ tol · ‖b‖, and the number of products with P."""
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = residual.clone()
    rho = torch.dot(residual, residual)
    target = tol * tol * float(rho)
    for step in range(10 * len(b)):
        if float(rho) <= target:
            return x, step
        product = torch.mv(P, direction)
        alpha = rho / torch.dot(direction, product)
        x.add_(alpha * direction)
        residual.sub_(alpha * product)
        following = torch.dot(residual, residual)
        direction.mul_(following / rho).add_(residual)
        rho = following
    return x, 10 * len(b)
