"""cvxpylayers, with its DIFFCP and its Moreau backend.

P is a constant of the cvxpy problem and q, w, t its parameters: that makes the smallest
canonical form, and building it is not timed.
"""

from __future__ import annotations

from typing import Any

import torch

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready, Setting, load

__all__ = ["prepare_diffcp", "prepare_diffcp_lsmr", "prepare_moreau"]

SCS: dict[str, Setting] = {"solve_method": "SCS", "eps_abs": 1e-8, "eps_rel": 1e-8}


def prepare_diffcp(problem: Instance) -> Ready:
    """SCS to 1e-8, which costs little more than its default, and LSQR, the default adjoint."""
    return _prepare(problem, "DIFFCP", {**SCS, "mode": "lsqr"}, {})


def prepare_diffcp_lsmr(problem: Instance) -> Ready:
    """The same with LSMR: a better gradient in more time."""
    return _prepare(problem, "DIFFCP", {**SCS, "mode": "lsmr"}, {})


def prepare_moreau(problem: Instance) -> Ready:
    """Moreau's interior-point method to 1e-12 with exact differentiation.

    It does not scale the program before: where it does, its gradients through quad_form were wrong
    on the active family (cosine 0.7), and those through ½‖Lᵀx‖², in twice the time, right to two
    digits. "ipm" in place of "auto", whose active-set method returned a wrong solution at n = 200.
    """
    ipm: dict[str, Setting] = {
        "tol_gap_abs": 1e-12,
        "tol_gap_rel": 1e-12,
        "tol_feas": 1e-12,
        "diff_method": "exact",
        "equilibrate_enable": False,
    }
    device: dict[str, Setting] = {"solver": "ipm", "device": problem.device.type}
    return _prepare(problem, "MOREAU", device, ipm)


def _prepare(
    problem: Instance,
    solver: str,
    options: dict[str, Setting],
    ipm: dict[str, Setting],
) -> Ready:
    cp, layers = load("cvxpy"), load("cvxpylayers.torch")
    exact = problem.to(torch.float64)
    x, q = cp.Variable(problem.n), cp.Parameter(problem.n)
    w, t = cp.Parameter(problem.n, nonneg=True), cp.Parameter(nonneg=True)
    quadratic = cp.quad_form(x, cp.psd_wrap(exact.P.numpy()))
    task = cp.Problem(cp.Minimize(0.5 * quadratic + q @ x), [cp.norm1(cp.multiply(w, x)) <= t])
    arguments: dict[str, Any] = dict(options)
    if ipm:
        arguments["ipm_settings"] = load("moreau").IPMSettings(**ipm)
    layer = layers.CvxpyLayer(
        task, parameters=[q, w, t], variables=[x], solver=solver, solver_args=arguments
    )
    # its numbers are float64 inside whatever it is given
    values = problem.to(torch.float64, problem.device)

    def call() -> Answer:
        linear = values.q.detach().requires_grad_()
        (solution,) = layer(linear, values.w, values.t)
        (gradient,) = torch.autograd.grad(values.v @ solution, linear)
        return Answer(solution.detach(), gradient)

    settings: dict[str, Setting] = {
        "backend": solver,
        "P": "constant, quad_form",
        "dtype": "float64",
    }
    return Ready(call, {**settings, **options, **ipm})
