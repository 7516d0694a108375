"""solve(): check and bind, let an engine locate the solution, attach the gradient, certify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor
from dfwlayer.certificate import certified
from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines import ENGINES, compiled, host
from dfwlayer.engines.base import (
    Arguments,
    Attempt,
    Located,
    Task,
    bind,
    merged_outcome,
    part_of,
    spread_out,
)
from dfwlayer.engines.careful import with_care
from dfwlayer.engines.elastic import relaxed
from dfwlayer.engines.mapped import carried, through_transforms
from dfwlayer.engines.prices import Origin
from dfwlayer.engines.shapes import flattened, sizes_of
from dfwlayer.methods.base import Callback, Method, Outcome, Settings
from dfwlayer.methods.settings import check_wish, settings_of
from dfwlayer.objectives.base import Objective
from dfwlayer.objectives.least_squares import LeastSquares
from dfwlayer.objectives.quadratic import Quadratic
from dfwlayer.ops.recorded import recordable
from dfwlayer.ops.recorded.text import with_checks
from dfwlayer.ops.signature import Known, Signature, signature_of
from dfwlayer.ops.tensors import versions_in
from dfwlayer.ops.tracing import refuse_capture
from dfwlayer.solution import Solution
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature

__all__ = ["again", "compile_all", "outline", "solve", "warm_up"]


def outline(
    objective: Objective,
    constraint: Constraint,
    *,
    x0: Tensor | None = None,
    shape: tuple[int, ...] | int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """The shapes of a solution, from tensors without values."""
    arguments = _checked(Arguments(objective, constraint, x0, None))
    lead, variable = sizes_of(arguments, shape)
    x = torch.empty((*lead, *variable), dtype=objective.dtype, device=objective.device)
    value, gap = (x.new_empty(lead) for _ in range(2))
    steps, status = (x.new_empty(lead, dtype=torch.int64) for _ in range(2))
    return x, value, gap, steps, status


def again(found: Sequence[Tensor], *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """x, and if it is known f there, of such a solve, differentiably and without solving."""
    given = _bound_arguments(*args, **options)
    objective, constraint, x0, shape = (
        given.pop(name) for name in ("objective", "constraint", "x0", "shape")
    )
    if given.pop("on_infeasible") != "nan":
        solution = solve(*args, **options)
        return (solution.x, solution.value)[: len(found)]
    arguments = Arguments(objective, constraint, x0, given["step_size"])
    settings = settings_of(tuple(given.values()), constraint.preferred_method)
    x, value = found[0], found[1] if len(found) > 1 else None
    flat = flattened(arguments, shape)
    if flat is None:
        moved, worth = carried(_solution, arguments, settings, x, value)
    else:
        x, value = flat.vectors(x), None if value is None else value.reshape(-1)
        moved, worth = carried(_solution, flat.arguments, flat.changed(settings), x, value)
        moved, worth = (
            moved.reshape(found[0].shape),
            None if worth is None else worth.reshape(flat.lead),
        )
    return (moved, worth)[: len(found)]


def parts(solution: Solution) -> tuple[Tensor, ...]:
    """Those of a solution, x and the value first, which have gradients."""
    return solution.x, solution.value, solution.gap, solution.num_steps, solution.status


@recordable(shapes=outline, again=again, parts=parts, whole=Solution, smooth=2)
def solve(
    objective: Objective,
    constraint: Constraint,
    *,
    x0: Tensor | None = None,
    shape: tuple[int, ...] | int | None = None,
    method: str | Method = "auto",
    differentiate: str = "auto",
    tol: float = 1e-5,
    max_steps: int = 1000,
    step_size: StepSize | None = None,
    temperature: float | Temperature | None = None,
    verify: bool = True,
    callback: Callback | None = None,
    on_infeasible: str = "nan",
) -> Solution:
    """Minimise f(x; θ) over a convex set, for a batch of problems, differentiably.

    Args:
        objective: ``Quadratic``, ``LeastSquares`` or ``Smooth``.
        constraint: ``LpBall``, or any other set.
        x0: Start, (*shape) or (*batch, *shape); a start outside is moved onto the set.
        shape: Of one problem's variable, such as (height, width) for images: q, x0 and the set's
            entries are then (*batch, height, width), and P and A have a column for each entry, row
            by row. None for vectors, for what ``Smooth`` says, and for sets of matrices, which
            know it.
        method: "auto", "dfw" (the published method), "frank-wolfe", "projected-newton" (which
            "auto" means, unless the set prefers another one), "active-set", "sqp" (which "auto"
            means for `Polyhedron` and `Intersection`), or a method object.
        differentiate: "implicit" (gradient of the exact solution), "unroll" (of the steps
            taken; method "auto" then means "dfw"), or "auto": unroll for "dfw", otherwise
            implicit.
        tol: For "dfw" on the relative change of f in a step; otherwise on the gap relative to
            |f(x)|.
        max_steps: Most steps; 0 returns the start.
        step_size: For "dfw" and "frank-wolfe": ``ShortStep``, ``ExactStep``, ``OpenLoop`` or
            ``Backtracking``; by default the short step, or backtracking where L is unknown.
        temperature: For the soft vertex of "dfw": a number, ``Anneal``, or a function of the
            step; by default ``Anneal()``.
        verify: False skips the checks that read the values of tensors: that all are finite (bad
            problems are then not isolated), that P is symmetric, that radii are not negative.
            Shapes, dtypes, devices and settings are always checked.
        callback: Called with a `Progress` at the start and after every step, or, by methods whose
            steps come in rounds, after every round. If it returns True the solve ends there, with
            status STOPPED for the problems that had not ended by themselves. It does not see
            the problems that are solved again in other units or more digits.
        on_infeasible: What x is for a `Polyhedron` without a point: "nan", or "least-violation" for
            the best of the points that violate its rows least, with status RELAXED.

    Returns:
        The `Solution`; its ``x`` and ``value`` carry gradients.

    Raises:
        ValueError: Naming the argument, what was found and what is expected.

    """
    refuse_capture()
    given = (method, differentiate, tol, max_steps, step_size, temperature, verify, callback)
    signature = signature_of(objective, constraint, (*given, x0, shape, on_infeasible))
    if signature is not None:
        plan = _plans.get(signature.key)
        if plan is not None and not torch.is_autocast_enabled(plan.device):
            signature.kept = plan.kept
            arguments = Arguments(objective, constraint, None, None)
            return _dispatched(arguments, plan.settings, signature)
    arguments = _checked(Arguments(objective, constraint, x0, step_size))
    settings = settings_of(given, constraint.preferred_method)
    check_wish(on_infeasible)
    flat = flattened(arguments, shape)
    if flat is not None:
        return flat.restored(_cast(flat.arguments, flat.changed(settings), on_infeasible))
    if signature is not None and on_infeasible == "nan" and _is_usual(objective, signature):
        _plans.keep(signature.key, _Plan(settings, objective.device.type, {}))
    return _cast(arguments, settings, on_infeasible)


def _is_usual(objective: Objective, signature: Signature) -> bool:
    """Whether an objective is what this process has, and on the device of its first tensor."""
    first, here = signature.tensors[:1], objective.device
    alone = objective.joined() is objective and objective.shards is None
    return alone and len(first) == 1 and first[0].device == here


class _Plan(NamedTuple):
    """What the checks of a call have found that needs no other form, for those that are like it."""

    settings: Settings
    device: str
    kept: dict[str, Any]  # see `dfwlayer.ops.signature.Signature`


_plans: Known[_Plan] = Known()


def _bound_arguments(*args: Any, **options: Any) -> dict[str, Any]:
    """All arguments of `solve` by name."""
    given = signature(solve).bind(*args, **options)
    given.apply_defaults()
    return given.arguments


def warm_up() -> bool:
    """Compile now what the first solves on the CPU would have to do without.

    Small problems, and those of which few coordinates are free, are solved by compiled code as soon
    as there is some, and by tensor operations before. Compiling takes up to a minute, in the
    background or here; afterwards it is on disk, and a new process loads it in about a second. Call
    this where a wait does no harm: when an image is built, before workers are forked, at the start
    of a program.

    Returns:
        Whether there is compiled code; without Numba tensor operations solve everything.

    """
    return compile_all()


def compile_all(first: str = "") -> bool:
    """See `warm_up`; with a module of `dfwlayer.engines.compiled.kernels` to begin with."""
    with compiled.using("wait"), torch.enable_grad():
        eye, q = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        q.requires_grad_()
        wide = 4 * torch.eye(2, 9, dtype=q.dtype) + 1  # few of its columns will do
        by_columns = LeastSquares(wide.to_sparse(), 9 * q)
        single = Quadratic(eye.float().to_sparse(), q.float())
        examples = (
            ("search", Quadratic(eye, q), LpBall(1)),  # flat sets, also those only projected onto
            ("nearest", Quadratic(None, q), LpBall(1)),
            ("ball", Quadratic(eye, q), LpBall(2)),
            ("power", Quadratic(eye, q), LpBall(3)),
            ("linear", Quadratic(eye, q), Polyhedron(eye, 0.0)),
            ("outside exchange", by_columns, LpBall(1)),
            ("thin", Quadratic(eye.to_sparse(), q), Polyhedron(eye, 0.0)),
            ("barrier", single, Polyhedron(eye.float(), 0.0)),
        )
        kinks = compiled.with_kinks()
        if kinks is not None and first == "pieces":
            kinks.try_out()
        for _, objective, body in sorted(examples, key=lambda each: first not in each[0].split()):
            torch.autograd.grad(solve(objective, body).x.sum(), q)
        if kinks is not None:
            kinks.try_out()
    return compiled.available()


def _cast(arguments: Arguments, settings: Settings, on_infeasible: str) -> Solution:
    """With half precision under autocast as float32, and rows in place of distributed tensors."""
    joined = arguments.objective.joined()
    if joined is not arguments.objective:
        arguments = arguments._replace(objective=joined)
    kind = joined.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _feasible(arguments.float32(), settings, on_infeasible)
    return _feasible(arguments, settings, on_infeasible)


def _feasible(arguments: Arguments, settings: Settings, on_infeasible: str) -> Solution:
    """The solution, where problems without a feasible point have what was asked for instead."""
    found = _dispatched(arguments, settings)
    if on_infeasible == "nan":
        return found

    def run(objective: Objective, constraint: Constraint) -> Solution:
        return _dispatched(Arguments(objective, constraint, None, None), settings)

    return relaxed(run, arguments, settings, found)


def _dispatched(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Solution:
    """Outside of transforms at once, inside through them."""
    mapped = in_transform(arguments)
    if mapped:
        shards = arguments.objective.shards
        if shards is not None:
            shards.refuse_transforms()
        solution = through_transforms(_solution, arguments, settings)
    else:
        solution = _solution(arguments, settings, signature)
        shards = None if signature is not None else arguments.objective.shards
    if shards is not None:
        x, value = shards.common(solution.x, solution.value)
        solution = replace(solution, x=x, value=value)
    versions = versions_in(arguments[:2]) if signature is None else signature.versions
    solution.__dict__["_origin"] = Origin(arguments, settings, mapped, versions)
    return solution


def _solution(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Solution:
    """Bind, run, and hand back, for arguments that are plain tensors."""
    found = compiled.attempt(arguments, settings, signature)
    if found is not None and found.left is None:
        return found.solution
    objective, constraint, x0, _ = arguments
    if found is None and host.takes(objective, constraint, x0, settings):
        solution = host.answered(_solution, arguments, settings)
        if solution is not None:
            return solution
    task = bind(arguments, settings)
    if found is not None:
        return _completed(task, found)
    task, outcome = _run(task)
    return task.solution(outcome)


def _completed(task: Task, found: Attempt) -> Solution:
    """With the problems that compiled code has left."""
    task = task.checked()
    outcome = _joined(task, found)
    if outcome is None:
        task, outcome = _run(task)
    return task.solution(outcome)


def _joined(task: Task, found: Attempt) -> Outcome | None:
    """What compiled code has found and what others find of the rest; None if these take it all."""
    old, left = found.solution, found.left
    done = Outcome(old.x, old.num_steps, old.status, old.value, gap=old.gap)
    if left is None:
        return done
    part = None if left.dim() == 0 else part_of(task, left)
    if part is None:
        return None
    rest = host.outcome_of(lambda task: _run(task)[1], _run_anew, part)
    rest = spread_out(rest, left.nonzero().squeeze(-1), len(left))
    return merged_outcome(done, rest, left)


def _run_anew(task: Task) -> Outcome:
    """The outcome of a task in another place or in other units, where compiled code may take it."""
    x0 = task.start if task.settings.warm else None
    arguments = Arguments(task.objective, task.constraint, x0, None)
    found = compiled.attempt(arguments, task.settings)
    outcome = None if found is None else _joined(task, found)
    return _run(task)[1] if outcome is None else outcome


def _run(task: Task) -> tuple[Task, Outcome]:
    """The outcome by the first engine that takes the task, and the task as it was looked at."""
    for engine in ENGINES:
        found = engine.locate(task)
        outcome = None if found is None else _answer(found)
        if found is not None and outcome is not None:
            return found.task, with_care(lambda task: _run(task)[1], _run_anew, found, outcome)
    raise AssertionError("the last engine takes every task")


def _answer(found: Located) -> Outcome | None:
    """Attach the gradients and certify; None where the engine finds it should not have tried."""
    x, value = _with_gradient(found)  # while a GPU may still be at work
    settled = found.settled()
    if settled is None:
        return None
    if settled is not found:
        x, value = _with_gradient(settled)
    outcome = certified(settled.problem, settled.outcome, settled.task.settings.tol)
    return outcome._replace(x=settled.place(x), value=outcome.value if value is None else value)


def _with_gradient(found: Located) -> tuple[Tensor, Tensor | None]:
    """x, and f there if known, carrying their gradients if one may be asked for."""
    if found.face is None or not torch.is_grad_enabled():
        return found.outcome.x, found.outcome.value
    return attach(found.problem, found.outcome.x, found.face, found.outcome.value)


def _checked(arguments: Arguments) -> Arguments:
    """Raise unless the arguments are what they should be."""
    objective, constraint, x0, _ = arguments
    if not isinstance(objective, Objective):
        hint = "; a tensor q alone is Quadratic(None, q)" if isinstance(objective, Tensor) else ""
        raise ValueError(
            "objective: expected Quadratic, LeastSquares, Smooth or the like, got "
            f"{type(objective).__name__}{hint}"
        )
    if not isinstance(constraint, Constraint):
        raise ValueError(
            f"constraint: expected a set such as LpBall, got {type(constraint).__name__}"
        )
    if x0 is not None:
        check_tensor("x0", x0)
    if objective.unchecked or constraint.unchecked:
        return arguments._replace(
            objective=with_checks(objective), constraint=with_checks(constraint)
        )
    return arguments
