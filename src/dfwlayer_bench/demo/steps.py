"""What the demo measures, as numbers; `command` tells them, `figure` draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer import DFWLayer, LpBall, Progress, Quadratic, Solution, Status, solve
from dfwlayer_bench.demo.exact import Array, Exact, Problems, exact_solution, relative_violation

__all__ = [
    "FULL",
    "GRADIENT_TOLERANCE",
    "METHODS",
    "QUICK",
    "BatchResult",
    "GradientCheck",
    "Path",
    "Size",
    "Trajectory",
    "check_gradients",
    "solve_batch",
    "trace",
    "walk",
]

GRADIENT_TOLERANCE = 1e-5  # finite differences of an exact solution are good to about 1e-7

PAPER_TOLERANCE = 1e-4  # the relative change of f at which the published experiments stop


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    problems: int  # solved in one call
    variables: int
    checked_problems: int  # whose gradients are compared with finite differences
    checked_variables: int
    training_steps: int
    training_batch: int
    training_set: int
    trace_steps: int  # longest run of the convergence picture


FULL = Size(64, 50, 16, 20, 300, 256, 512, 1000)
QUICK = Size(8, 12, 4, 6, 12, 32, 64, 40)

METHODS = {"auto": "default", "dfw": "published (dfw)"}


# 1 and 2: a batch, measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class BatchResult:
    """One method on one batch in float32, measured in float64."""

    method: str
    statuses: dict[str, int]
    relative_gap: float  # worst certificate gap / |f|
    violation: float  # worst (‖w ∘ x‖₁ − t) / t
    nonzeros: float  # mean number of entries that are not 0
    relative_error: float  # worst ‖x − x*‖ / ‖x*‖
    suboptimality: float  # worst (f(x) − f*) / |f*|
    certified: bool  # f(x) − f* ≤ gap held for every problem
    seconds: float  # forward and backward
    x: Array  # (B, n)


def solve_batch(problems: Problems, exact: Exact, method: str) -> BatchResult:
    """Solve all problems in one call, with what the user of the layer would write."""
    layer = DFWLayer(method=method, tol=PAPER_TOLERANCE) if method == "dfw" else DFWLayer()
    P, q, weight, radius = (part.requires_grad_() for part in problems.tensors(torch.float32))
    # the numbers the layer sees are rounded to float32: measure against those
    seen = Problems(*(part.detach().double().numpy() for part in (P, q, weight, radius)))

    def forward_and_backward(rows: slice) -> Solution:
        solution = layer.solve(P[rows], q[rows], weight[rows], radius[rows])
        solution.x.square().sum().backward()  # type: ignore[no-untyped-call]
        return solution

    forward_and_backward(slice(1))  # the first call pays for PyTorch's own set-up
    start = time.perf_counter()
    solution = forward_and_backward(slice(None))
    seconds = time.perf_counter() - start

    x = solution.x.detach().double().numpy()
    gap, value = solution.gap.double().numpy(), seen.value(x)
    error = np.linalg.norm(x - exact.x, axis=-1) / np.linalg.norm(exact.x, axis=-1)
    # rounding P and q moves f by eps times the sizes of its terms, which are about those of f
    rounding = 64 * np.finfo(np.float32).eps * np.abs(value)
    codes, counts = np.unique(solution.status.numpy(), return_counts=True)
    return BatchResult(
        method=method,
        statuses={Status(int(c)).name: int(k) for c, k in zip(codes, counts, strict=True)},
        relative_gap=float((gap / np.abs(value)).max()),
        violation=relative_violation(x, seen.weight, seen.radius),
        nonzeros=float((x != 0).sum(-1).mean()),
        relative_error=float(error.max()),
        suboptimality=float(((problems.value(x) - exact.value) / np.abs(exact.value)).max()),
        certified=bool((problems.value(x) - exact.value <= gap + rounding).all()),
        seconds=seconds,
        x=x,
    )


# 3: gradients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientCheck:
    """Directional derivatives of the solution in one parameter, over a batch of problems."""

    parameter: str
    relative_error: dict[str, float]  # of each method, against finite differences
    compared: int  # problems; at a kink of the solution there is no derivative to compare

    @property
    def passed(self) -> bool:
        """Whether the default method's gradient is right; the published one is for comparison."""
        return self.compared > 0 and self.relative_error["auto"] <= GRADIENT_TOLERANCE


def check_gradients(problems: Problems, rng: np.random.Generator) -> list[GradientCheck]:
    """Gradients of ⟨v, x*⟩ for a random v against central differences of the exact solution."""
    cotangent = rng.standard_normal(problems.q.shape)
    directions = {
        name: rng.standard_normal(getattr(problems, name).shape) * np.abs(getattr(problems, name))
        for name in ("q", "P", "weight", "radius")
    }
    directions["P"] = 0.5 * (directions["P"] + directions["P"].transpose(0, 2, 1))
    gradients = {
        "auto": _gradients(problems, cotangent, DFWLayer(tol=1e-12, max_steps=100_000)),
        # what its steps lead to is compared here, however far they come
        "dfw": _gradients(
            problems,
            cotangent,
            DFWLayer(method="dfw", tol=PAPER_TOLERANCE, on_failure="ignore"),
        ),
    }
    return [
        _compare(problems, cotangent, name, direction, gradients)
        for name, direction in directions.items()
    ]


def _gradients(problems: Problems, cotangent: Array, layer: DFWLayer) -> dict[str, Array]:
    tensors = [part.requires_grad_() for part in problems.tensors(torch.float64)]
    x = layer(*tensors)
    found = torch.autograd.grad(x, tensors, torch.tensor(cotangent))
    return dict(zip(("P", "q", "weight", "radius"), (g.numpy() for g in found), strict=True))


def _compare(
    problems: Problems,
    cotangent: Array,
    name: str,
    direction: Array,
    gradients: dict[str, dict[str, Array]],
    h: float = 1e-6,
) -> GradientCheck:
    ahead = exact_solution(problems.moved(name, h * direction)).x
    behind = exact_solution(problems.moved(name, -h * direction)).x
    smooth = (np.sign(ahead) == np.sign(behind)).all(-1)
    slope = (cotangent * (ahead - behind)).sum(-1)[smooth] / (2 * h)

    def error(gradient: Array) -> float:
        product = (gradient * direction).reshape(len(direction), -1).sum(-1)[smooth]
        return float(np.linalg.norm(product - slope) / np.linalg.norm(slope))

    errors = {method: error(found[name]) for method, found in gradients.items()}
    return GradientCheck(name, errors, int(smooth.sum()))


# 4: what the picture shows ------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The way of each method to the solution of one problem in the plane."""

    problem: Problems  # one
    solution: Array  # (2,)
    points: dict[str, Array]  # method -> (k, 2)


def walk() -> Path:
    """A problem in the plane, the same for every seed: it is drawn to show how methods move."""
    problem = Problems(
        np.array([[[6.0, 2.0], [2.0, 9.0]]]),
        np.array([[-4.6, -5.4]]),
        np.array([[1.0, 1.3]]),
        np.array([1.0]),
    )
    start = torch.tensor([-0.72, 0.12], dtype=torch.float64)
    points = {
        "auto": _points_by_rerunning(problem, range(20), start),
        "dfw": _points_by_recording(problem, "dfw", 60, start),
    }
    return Path(problem, exact_solution(problem).x[0], points)


@dataclass(frozen=True)
class Trajectory:
    """f(x_k) − f* of one problem along the steps of each method, relative to |f*|."""

    steps: dict[str, NDArray[np.int64]]  # method -> k
    error: dict[str, Array]  # method -> one per k
    bound_steps: NDArray[np.int64]
    bound: dict[str, Array]  # method -> one per bound step


def trace(
    problems: Problems,
    exact: Exact,
    longest: int,
    progress: Callable[[list[int]], Iterable[int]],
) -> Trajectory:
    """Follow the first problem.

    The bounds are Theorem 1's, with M = 2t / min w the diameter of the ball and τ log n the most
    by which a soft vertex falls short of the hard one.
    """
    problem = problems.first()
    scale = float(np.abs(exact.value[0]))
    grid = np.unique(np.geomspace(1, longest, 30).round().astype(np.int64))
    few = [int(k) for k in grid if k <= 60]

    def error(points: Array) -> Array:
        value = np.array([problem.value(x[None])[0] for x in points])
        return np.asarray((value - exact.value[0]) / scale)

    points = {
        method: _points_by_recording(problem, method, longest) for method in ("dfw", "frank-wolfe")
    }
    steps = {method: np.arange(len(p)) for method, p in points.items()}
    points["auto"] = _points_by_rerunning(problem, progress(few))
    steps["auto"] = np.array(few)
    reach = float(problem.lipschitz()[0]) * (2 * problem.radius[0] / problem.weight.min()) ** 2
    softness = np.log(problem.q.shape[-1]) * 0.5 ** (grid // 30)
    return Trajectory(
        steps,
        {method: error(p) for method, p in points.items()},
        grid,
        {
            "dfw": (softness + 5 * reach / (2 * grid + 4)) / scale,
            "frank-wolfe": 2 * reach / (grid + 3) / scale,
        },
    )


def _points_by_recording(
    problem: Problems, method: str, steps: int, start: Tensor | None = None
) -> Array:  # (steps + 1 or fewer, n)
    """x_0, x_1, … of a method that goes step by step."""
    points: list[Array] = []
    _run(problem, method, steps, start, lambda at: points.append(at.x[0].numpy().copy()))
    return np.array(points)


def _points_by_rerunning(
    problem: Problems, steps: Iterable[int], start: Tensor | None = None
) -> Array:  # (len(steps), n)
    """The default method's x after each of these numbers of steps; it need not be opened up."""
    return np.array([_run(problem, "auto", k, start).x[0].numpy() for k in steps])


def _run(
    problem: Problems,
    method: str,
    steps: int,
    start: Tensor | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> Solution:
    """Go on until nothing is left to gain, or so many steps are done."""
    P, q, weight, radius = problem.tensors(torch.float64)
    with torch.no_grad():
        return solve(
            Quadratic(P, q),
            LpBall(1, radius, weight),
            x0=start,
            method=method,
            tol=0.0,
            max_steps=steps,
            callback=callback,
        )
