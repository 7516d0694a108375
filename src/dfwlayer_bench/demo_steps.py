"""What the demo computes, as numbers; :mod:`demo` tells them, :mod:`demo_figure` draws them.

The yardstick is :func:`exact_solution`, written in numpy without the library: a demo that
measures the library with itself would show nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dfwlayer import DFWLayer, LpBall, Quadratic, ShortStep, Solution, Status, solve
from dfwlayer.objectives.base import Objective
from dfwlayer.step_size import Query, Rule, StepSize

__all__ = [
    "FULL",
    "GRADIENT_TOLERANCE",
    "METHODS",
    "QUICK",
    "BatchResult",
    "Exact",
    "GradientCheck",
    "Path",
    "Problems",
    "Size",
    "Training",
    "Trajectory",
    "check_gradients",
    "exact_solution",
    "random_problems",
    "relative_violation",
    "solve_batch",
    "trace",
    "train",
    "walk",
]

Array = NDArray[np.float64]

GRADIENT_TOLERANCE = 1e-5  # finite differences of an exact solution are good to about 1e-7

PAPER_TOLERANCE = 1e-4  # the relative change of f at which the published experiments stop

METHODS = {"auto": "default", "dfw": "published (dfw)"}


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


@dataclass(frozen=True)
class Problems:
    """B problems min ½ xᵀPx + qᵀx subject to ‖w ∘ x‖₁ ≤ t, in float64."""

    P: Array  # (B, n, n)
    q: Array  # (B, n)
    weight: Array  # (B, n)
    radius: Array  # (B,)

    def value(self, x: Array) -> Array:
        """f(x): (B, n) -> (B,)."""
        curved = 0.5 * np.einsum("bi,bij,bj->b", x, self.P, x)
        return np.asarray(curved + (self.q * x).sum(-1))

    def gradient(self, x: Array) -> Array:
        """P x + q: (B, n) -> (B, n)."""
        return np.asarray(np.einsum("bij,bj->bi", self.P, x) + self.q)

    def lipschitz(self) -> Array:
        """L, the largest eigenvalue of each P."""
        return np.asarray(np.linalg.eigvalsh(self.P)[:, -1])

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P, q, weight and radius as new tensors."""
        parts = (self.P, self.q, self.weight, self.radius)
        p, q, weight, radius = (torch.tensor(part, dtype=dtype) for part in parts)
        return p, q, weight, radius

    def moved(self, name: str, by: Array) -> Problems:
        """The problems with one of their parameters changed."""
        return replace(self, **{name: getattr(self, name) + by})

    def first(self) -> Problems:
        """The first problem alone."""
        return Problems(self.P[:1], self.q[:1], self.weight[:1], self.radius[:1])


def random_problems(rng: np.random.Generator, count: int, n: int) -> Problems:
    """Problems whose constraint binds: t is 0.3 times what the unconstrained minimum would need."""
    factor = rng.standard_normal((count, n, n))
    P = factor.transpose(0, 2, 1) @ factor + n * np.eye(n)
    q = rng.standard_normal((count, n))
    weight = rng.uniform(0.5, 1.5, (count, n))
    unconstrained = np.linalg.solve(P, -q[..., None])[..., 0]
    return Problems(P, q, weight, 0.3 * np.abs(weight * unconstrained).sum(-1))


# The yardstick ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """Solutions that owe nothing to the library."""

    x: Array  # (B, n)
    value: Array  # (B,)
    kkt: Array  # (B,), see :func:`kkt_residual`


def exact_solution(problems: Problems, max_steps: int = 100_000) -> Exact:
    """Projected gradient steps in float64 until they stand still, then the KKT conditions.

    Raises:
        RuntimeError: If the KKT conditions do not hold to 1e-9: what follows would be worthless.

    """
    x = np.zeros_like(problems.q)
    step = 1 / problems.lipschitz()[:, None]
    for _ in range(max_steps):
        moved = project(x - step * problems.gradient(x), problems.weight, problems.radius)
        change = np.abs(moved - x).max()
        x = moved
        if change <= 1e-15 * np.abs(x).max():
            break
    residual = kkt_residual(problems, x)
    if not residual.max() <= 1e-9:
        raise RuntimeError(f"the reference solution has a KKT residual of {residual.max():.1e}")
    return Exact(x, problems.value(x), residual)


def project(v: Array, weight: Array, radius: Array) -> Array:
    """The nearest points to v (B, n) with Σ w|x| ≤ t, by sorting.

    x = sign(v) max(|v| − λw, 0), where λ solves Σ w max(|v| − λw, 0) = t; as a function of λ the
    sum is piecewise linear and breaks at |v|/w.
    """
    size = np.abs(v)
    order = np.argsort(-size / weight, axis=-1)
    w = np.take_along_axis(weight, order, -1)
    a = np.take_along_axis(size, order, -1)
    candidates = (np.cumsum(w * a, -1) - radius[:, None]) / np.cumsum(w * w, -1)
    count = (a > candidates * w).sum(-1, keepdims=True).clip(min=1)
    multiplier = np.take_along_axis(candidates, count - 1, -1).clip(min=0)
    return np.sign(v) * np.maximum(size - multiplier * weight, 0)


def kkt_residual(problems: Problems, x: Array) -> Array:
    """How far x (B, n) is from the KKT conditions, relative to the data.

    With a multiplier λ ≥ 0: ∇f_i = −λ w_i sign(x_i) where x_i ≠ 0 and |∇f_i| ≤ λ w_i elsewhere,
    ‖w ∘ x‖₁ ≤ t, and equality if λ > 0. Forces are measured against the largest |q_i| / w_i.
    """
    scale = np.abs(problems.q / problems.weight).max(-1)
    pull = problems.gradient(x) / problems.weight / scale[:, None]
    multiplier = np.abs(pull).max(-1, keepdims=True)
    stationary = np.where(x != 0, np.abs(pull + multiplier * np.sign(x)), 0).max(-1)
    spent = np.abs(problems.weight * x).sum(-1) / problems.radius
    slack = multiplier[:, 0] * np.maximum(1 - spent, 0)
    return np.asarray(np.max([stationary, slack, spent - 1, np.zeros_like(spent)], axis=0))


def relative_violation(x: Array, weight: Array, radius: Array) -> float:
    """The worst (‖w ∘ x‖₁ − t) / t of rows (B, n), at least 0."""
    return float((np.abs(weight * x).sum(-1) / radius - 1).max().clip(min=0))


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
        "dfw": _gradients(problems, cotangent, DFWLayer(method="dfw", tol=PAPER_TOLERANCE)),
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


# 4: training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The history of the training, one entry per step, and what is left to say at the end."""

    loss: list[float]  # ‖x − decision‖² relative to ‖decision‖², over the batch
    radius: list[float]
    hidden_radius: float
    price_error: float  # ‖w − hidden w‖ / ‖hidden w‖ at the end
    test_loss: float  # as loss, on decisions that were not trained on
    decisions: int  # made in training
    violations: int  # of those, how many left the budget of the moment beyond rounding
    worst_violation: float


class BudgetedPlanner(nn.Module):
    """Features -> wishes -> the best decision that prices and budget allow; all of it is learned.

    Decisions depend on w/t only, so prices are scaled to have mean one.
    """

    def __init__(self, features: int, P: Tensor) -> None:
        super().__init__()
        n = len(P)
        self.wishes = nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, n))
        self.price_logits = nn.Parameter(torch.zeros(n))
        # A small start: a budget too large to bind has no influence, and so no gradient.
        self.log_radius = nn.Parameter(torch.zeros(()))
        self.register_buffer("P", P)
        self.layer = DFWLayer(p=1)

    @property
    def weight(self) -> Tensor:  # (n,)
        return torch.softmax(self.price_logits, -1) * len(self.price_logits)

    @property
    def radius(self) -> Tensor:  # ()
        return self.log_radius.exp()

    def forward(self, features: Tensor) -> Tensor:  # (B, features) -> (B, n)
        """The decisions."""
        out: Tensor = self.layer(self.P, self.wishes(features), self.weight, self.radius)
        return out


def train(seed: int, size: Size, on_step: Callable[[float, float], None]) -> Training:
    """Recover a hidden budget t and hidden prices w from decisions made under them.

    Args:
        seed: Of the data, the initial network and the order of the batches.
        size: Steps, batch and number of decisions.
        on_step: Told the loss and the radius after each step.

    """
    rng = np.random.default_rng(seed)
    features, decisions, P, hidden_weight, hidden_radius = _hidden_decisions(rng, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        planner = BudgetedPlanner(features.shape[-1], torch.tensor(P, dtype=torch.float32))
    inputs = torch.tensor(features, dtype=torch.float32)
    targets = torch.tensor(decisions, dtype=torch.float32)
    optimiser = torch.optim.Adam(planner.parameters(), lr=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, size.training_steps)

    losses: list[float] = []
    radii: list[float] = []
    violations, worst = 0, 0.0
    for _ in range(size.training_steps):
        batch = torch.as_tensor(rng.choice(size.training_set, size.training_batch, replace=False))
        x = planner(inputs[batch])
        loss = (x - targets[batch]).square().sum() / targets[batch].square().sum()
        weight, radius = planner.weight.detach(), float(planner.radius.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()

        spent = np.abs(x.detach().double().numpy() * weight.double().numpy()).sum(-1)
        worst = max(worst, float(spent.max() / radius - 1))
        violations += int((spent > radius * (1 + 4 * np.finfo(np.float32).eps)).sum())
        losses.append(float(loss.detach()))
        radii.append(radius)
        on_step(losses[-1], radius)

    with torch.no_grad():
        held_out = slice(size.training_set, None)
        error = planner(inputs[held_out]) - targets[held_out]
        test_loss = float(error.square().sum() / targets[held_out].square().sum())
        off = planner.weight.double().numpy() - hidden_weight
    return Training(
        loss=losses,
        radius=radii,
        hidden_radius=hidden_radius,
        price_error=float(np.linalg.norm(off) / np.linalg.norm(hidden_weight)),
        test_loss=test_loss,
        decisions=size.training_steps * size.training_batch,
        violations=violations,
        worst_violation=max(worst, 0.0),
    )


def _hidden_decisions(
    rng: np.random.Generator, size: Size, features: int = 4, n: int = 8
) -> tuple[Array, Array, Array, Array, float]:
    """Features, exact decisions, P, and the prices and budget that are to be found.

    A quarter more than the training set is made, to test on.
    """
    count = size.training_set + max(size.training_set // 4, 1)
    z = rng.standard_normal((count, features))
    factor = rng.standard_normal((n, n))
    P = factor.T @ factor / n + np.eye(n)
    q = 3 * np.tanh(z @ rng.standard_normal((features, n)) / np.sqrt(features))
    weight = rng.uniform(0.5, 1.5, n)
    weight = weight / weight.mean()
    demand = np.abs(weight * np.linalg.solve(P, -q.T).T).sum(-1)
    radius = 0.3 * float(np.median(demand))  # binds for most decisions
    exact = exact_solution(
        Problems(
            np.broadcast_to(P, (count, n, n)),
            q,
            np.broadcast_to(weight, (count, n)),
            np.full(count, radius),
        )
    )
    return z, exact.x, P, weight, radius


# 5: what the picture shows ------------------------------------------------------------------------


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


@dataclass
class Recorder:
    """The short step, with the points it was asked about written down."""

    points: list[Array]

    def start(self, objective: Objective, x: Tensor) -> Rule:
        """See :class:`dfwlayer.step_size.StepSize`."""
        return _Recording(ShortStep().start(objective, x), self.points)


@dataclass
class _Recording:
    rule: Rule
    points: list[Array]

    @property
    def lipschitz(self) -> Tensor:
        return self.rule.lipschitz

    @property
    def bent_down(self) -> Tensor | None:
        return self.rule.bent_down

    def __call__(self, query: Query) -> Tensor:
        if query.step == len(self.points):  # Frank-Wolfe asks twice in a step
            self.points.append(query.x[0].detach().numpy().copy())
        return self.rule(query)


def _points_by_recording(
    problem: Problems, method: str, steps: int, start: Tensor | None = None
) -> Array:  # (steps + 1 or fewer, n)
    """x_0, x_1, … of a method that asks a step-size rule at every step."""
    recorder = Recorder([])
    end = _run(problem, method, steps, start, recorder)
    return np.array([*recorder.points, end.x[0].numpy()])


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
    step_size: StepSize | None = None,
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
            step_size=step_size,
        )
