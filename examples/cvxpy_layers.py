"""Problems written in cvxpy, solved and differentiated by dfwlayer and by cvxpylayers, timed.

    OMP_NUM_THREADS=1 python examples/cvxpy_layers.py                  # all, one problem and 32
    OMP_NUM_THREADS=1 python examples/cvxpy_layers.py --only nnls mpc --batch 128

The problems are those that cvxpylayers shows (a model predictive controller, portfolios, denoising,
monotone regression, …), with 50 coordinates or more. Times are medians of the processor time of a
forward and a backward pass with one thread, after some that are not counted. Both have their own
default settings; errors are the largest of an entry of x in the first problem, against Clarabel
with a tolerance of 1e-11. Needs ``pip install dfwlayer[cvxpy] cvxpylayers``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import dfwlayer as dfw

try:
    from cvxpylayers.torch import CvxpyLayer as Theirs

    from dfwlayer.integrations.cvxpy import CvxpyLayer
except ImportError as missing:
    print(f"nothing to compare: {missing}")
    sys.exit()

QUICK = "DFW_QUICK" in os.environ
Lead = tuple[int, ...]  # () or (B,)
Draw = Callable[[Lead], tuple[Tensor, ...]]  # the values of the parameters
Case = tuple[cp.Problem, list[cp.Parameter], list[cp.Variable], Draw]


def number(value: float) -> Tensor:
    return torch.tensor(value)


def nnls(n: int = 50) -> Case:
    """Least squares with x ≥ 0."""
    x, A, b = cp.Variable(n), cp.Parameter((2 * n, n)), cp.Parameter(2 * n)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)), [x >= 0])
    return problem, [A, b], [x], lambda B: (torch.randn(*B, 2 * n, n), torch.randn(*B, 2 * n))


def lasso(n: int = 50) -> Case:
    """Least squares and λ‖x‖₁."""
    x, A, b = cp.Variable(n), cp.Parameter((2 * n, n)), cp.Parameter(2 * n)
    weight = cp.Parameter(nonneg=True)
    cost = cp.sum_squares(A @ x - b) + weight * cp.norm1(x)
    draw = lambda B: (torch.randn(*B, 2 * n, n), torch.randn(*B, 2 * n), number(3.0))  # noqa: E731
    return cp.Problem(cp.Minimize(cost)), [A, b, weight], [x], draw


def l1_ball(n: int = 50) -> Case:
    """Least squares with ‖x − c‖₁ ≤ t."""
    x, A, b = cp.Variable(n), cp.Parameter((2 * n, n)), cp.Parameter(2 * n)
    c, t = cp.Parameter(n), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)), [cp.norm1(x - c) <= t])
    return (
        problem,
        [A, b, c, t],
        [x],
        lambda B: (
            torch.randn(*B, 2 * n, n),
            torch.randn(*B, 2 * n),
            0.01 * torch.randn(n),
            number(0.5),
        ),
    )


def optnet(n: int = 50) -> Case:
    """A quadratic program with n rows."""
    x, S, q = cp.Variable(n), cp.Parameter((n, n)), cp.Parameter(n)
    G, h = cp.Parameter((n, n)), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [G @ x <= h])
    return (
        problem,
        [S, q, G, h],
        [x],
        lambda B: (
            torch.randn(*B, n, n),
            torch.randn(*B, n),
            torch.randn(*B, n, n),
            torch.rand(*B, n),
        ),
    )


def simplex(n: int = 50) -> Case:
    """The point of the simplex next to c."""
    x, c = cp.Variable(n), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x >= 0, cp.sum(x) == 1])
    return problem, [c], [x], lambda B: (torch.randn(*B, n),)


def portfolio(n: int = 50) -> Case:
    """Risk, and costs of trading and of going short; leverage and positions are limited."""
    w, u, f = cp.Variable(n), cp.Variable(n), cp.Variable(n)
    held, returns, S = cp.Parameter(n), cp.Parameter(n), cp.Parameter((n, n))
    short, trade = cp.Parameter(nonneg=True), cp.Parameter(nonneg=True)
    gain = returns @ w - 5 * cp.sum_squares(f)
    cost = short * cp.sum(cp.neg(w)) + trade * cp.sum(cp.abs(u))
    limits = [cp.sum(w) == 1, cp.norm(w, 1) <= 1.5, cp.norm(w, "inf") <= 0.5]
    problem = cp.Problem(cp.Maximize(gain - cost), [*limits, f == S @ w, u == w - held])
    root = torch.eye(n) + torch.randn(n, n) / n**0.5
    return (
        problem,
        [held, returns, S, short, trade],
        [w],
        lambda B: (
            torch.full((*B, n), 1 / n),
            0.1 * torch.randn(*B, n),
            root,
            number(0.01),
            number(0.01),
        ),
    )


def markowitz(n: int = 50) -> Case:
    """Trades that pay for their own costs."""
    held, S, returns = cp.Parameter(n), cp.Parameter((n, n)), cp.Parameter(n)
    u, w = cp.Variable(n), cp.Variable(n)
    rate = np.full(n, 0.01)
    paid = cp.sum(u) + rate @ cp.abs(u) + rate @ cp.neg(w) <= 0
    gain = returns @ w - cp.sum_squares(S @ w)
    problem = cp.Problem(cp.Maximize(gain), [paid, w == held + u])
    root = torch.eye(n) + torch.randn(n, n) / n**0.5
    return (
        problem,
        [held, S, returns],
        [u],
        lambda B: (
            torch.full((*B, n), 1 / n),
            root,
            0.1 * torch.randn(*B, n),
        ),
    )


def mpc(steps: int = 15, n: int = 8, m: int = 4) -> Case:
    """A model predictive controller with learned costs of the states."""
    gen = np.random.default_rng(0)
    A, B = np.eye(n) + 0.1 * gen.standard_normal((n, n)), 0.3 * gen.standard_normal((n, m))
    start, weight = cp.Parameter(n), cp.Parameter(n, nonneg=True)
    states = [cp.Variable(n) for _ in range(steps)]
    controls = [cp.Variable(m) for _ in range(steps)]
    rows = [states[0] == start]
    rows += [states[t] == A @ states[t - 1] + B @ controls[t - 1] for t in range(1, steps)]
    rows += [cp.norm(u, "inf") <= 0.5 for u in controls]
    cost = sum(cp.sum(cp.multiply(weight, cp.square(x))) for x in states)
    cost += sum(cp.sum_squares(u) for u in controls)
    problem = cp.Problem(cp.Minimize(cost), rows)
    draw = lambda lead: (2 * torch.randn(*lead, n), torch.rand(n) + 0.5)  # noqa: E731
    return problem, [start, weight], [controls[0]], draw


def denoising(n: int = 100) -> Case:
    """A signal that is smooth and near to what was seen, in a learned metric."""
    y, apart = cp.Variable(n), cp.Variable(n)
    seen, metric, weight = cp.Parameter(n), cp.Parameter((n, n)), cp.Parameter(pos=True)
    cost = cp.sum_squares(metric @ apart) + weight * cp.sum_squares(cp.diff(y))
    problem = cp.Problem(cp.Minimize(cost), [apart == seen - y])
    return (
        problem,
        [seen, metric, weight],
        [y],
        lambda B: (
            torch.randn(*B, n),
            torch.eye(n) + 0.1 * torch.randn(n, n),
            number(0.5),
        ),
    )


def monotone(n: int = 50) -> Case:
    """The monotone vector next to a prediction."""
    y, predicted = cp.Variable(n), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(cp.norm2(y - predicted)), [cp.diff(y) >= 0])
    return problem, [predicted], [y], lambda B: (torch.randn(*B, n),)


def relu(n: int = 50, m: int = 20) -> Case:
    """max(Wx + b, 0) as a projection."""
    z, copy = cp.Variable(n), cp.Variable((n, m))
    W, b, x = cp.Parameter((n, m)), cp.Parameter(n), cp.Parameter(m)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - copy @ x - b)), [z >= 0, copy == W])
    draw = lambda B: (torch.randn(*B, n, m), torch.randn(*B, n), torch.randn(*B, m))  # noqa: E731
    return problem, [W, b, x], [z], draw


def control(n: int = 50) -> Case:
    """Approximate dynamic programming, with ‖u‖₂ ≤ 1."""
    u, y = cp.Variable((n, 1)), cp.Variable((n, 1))
    x, root, cross = cp.Parameter((n, 1)), cp.Parameter((n, n)), cp.Parameter((n, n))
    q = cp.Parameter((n, 1))
    cost = 0.5 * cp.sum_squares(root @ u) + x.T @ y + q.T @ u
    problem = cp.Problem(cp.Minimize(cost), [cp.norm(u) <= 1, y == cross @ u])
    return (
        problem,
        [x, root, cross, q],
        [u],
        lambda B: (
            torch.randn(*B, n, 1),
            torch.randn(n, n),
            torch.randn(n, n),
            torch.randn(*B, n, 1),
        ),
    )


def springs(n: int = 60) -> Case:
    """Where springs of learned stiffness put n bodies of some width."""
    stiffness, x = cp.Parameter(n + 1, nonneg=True), cp.Variable(n + 2)
    energy = cp.sum(cp.multiply(stiffness, 0.5 * cp.square(cp.diff(x))))
    rows = [x[i] - x[i - 1] >= 0.5 / n for i in range(1, n + 2)]
    problem = cp.Problem(cp.Minimize(energy), [x[0] == 0, x[-1] == 1, *rows])
    return problem, [stiffness], [x], lambda B: (torch.rand(*B, n + 1) + 0.1,)


def ellipsoid(n: int = 50) -> Case:
    """Least squares with ‖W x − c‖₂ ≤ t."""
    x, A, b = cp.Variable(n), cp.Parameter((2 * n, n)), cp.Parameter(2 * n)
    W, c = cp.Parameter((n, n)), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)), [cp.norm(W @ x - c) <= 1])
    return (
        problem,
        [A, b, W, c],
        [x],
        lambda B: (
            torch.randn(*B, 2 * n, n),
            torch.randn(*B, 2 * n),
            torch.eye(n) + torch.randn(n, n) / n,
            0.1 * torch.randn(n),
        ),
    )


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (
        nnls,
        lasso,
        l1_ball,
        optnet,
        simplex,
        portfolio,
        markowitz,
        mpc,
        denoising,
        monotone,
        relu,
        control,
        springs,
        ellipsoid,
    )
}


def timed(layer: Any, values: list[Tensor], before: int, repeats: int) -> tuple[float, Tensor]:
    """Milliseconds of processor time for both passes, and the first variable."""
    times = []
    for _ in range(before + repeats):
        for value in values:
            value.grad = None
        start = time.process_time()
        x = layer(*values)[0]
        (x * torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape)).sum().backward()
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times[before:]), x.detach()


def exact(problem: cp.Problem, parameters: list[cp.Parameter], values: list[Tensor]) -> None:
    """Solve the first problem, for reference."""
    for parameter, value in zip(parameters, values, strict=True):
        first = value[0] if value.dim() > len(parameter.shape) else value
        parameter.value = first.detach().numpy()
    tight = {"tol_gap_rel": 1e-11, "tol_gap_abs": 1e-11, "tol_feas": 1e-11}
    with warnings.catch_warnings():  # where rounding does not let it get there
        warnings.simplefilter("ignore", UserWarning)
        problem.solve(solver=cp.CLARABEL, **tight)


def compare(name: str, lead: Lead, repeats: int) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    problem, parameters, variables, draw = CASES[name]()
    ours = CvxpyLayer(problem, parameters, variables, engine="dfwlayer")
    values = [value.requires_grad_() for value in draw(lead)]
    fast, x = timed(ours, values, 10, repeats)
    slow, y = timed(Theirs(problem, parameters, variables), values, 1, min(repeats, 3))
    exact(problem, parameters, values)
    first = [abs((z[0] if lead else z).numpy() - variables[0].value).max() for z in (x, y)]
    told = ours.explain().split("over: ")[1]
    size, cell = lead[0] if lead else 1, f"{slow:.1f} | {slow / fast:.0f}×"
    return f"| `{name}` | {told} | {size} | {fast:.1f} | {cell} | {first[0]:.0e} | {first[1]:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(CASES)[:1] if QUICK else list(CASES)
    parser.add_argument("--only", nargs="*", default=names, choices=list(CASES))
    parser.add_argument("--batch", type=int, nargs="*", default=[1] if QUICK else [1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    # cvxpylayers and NumPy 2
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    dfw.warm_up()
    print("| problem | set | B | dfwlayer, ms | cvxpylayers, ms | ratio | error | theirs |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only:
        for size in given.batch:
            print(compare(name, (size,) if size > 1 else (), given.repeats), flush=True)


if __name__ == "__main__":
    main()
