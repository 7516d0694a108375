"""solve(): check and broadcast once, run the method, attach the gradient, certify."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dfwlayer.arguments import as_flag, as_integer, as_number, check_tensor, shown
from dfwlayer.certificate import certified
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import merged
from dfwlayer.differentiate.implicit import MODES, attach
from dfwlayer.differentiate.mapped import Arguments, solve_transformed
from dfwlayer.differentiate.transforms import in_transform, refuse_capture, uncompiled
from dfwlayer.engines.careful import Solver, out_of_range, solve_again
from dfwlayer.engines.recorded import solve_recorded
from dfwlayer.linalg.rows import where_rows
from dfwlayer.methods import METHODS
from dfwlayer.methods.base import Method, Outcome, Problem, Settings, is_invariant
from dfwlayer.objectives.base import Objective, common_batch, objective_records
from dfwlayer.objectives.translated import Translated
from dfwlayer.solution import Solution, Status
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature, as_temperature

__all__ = ["check_settings", "solve"]

MISSED = 100.0  # times tol: beyond it a float32 problem at its rounding floor is solved in float64


@uncompiled
def solve(
    objective: Objective,
    constraint: Constraint,
    *,
    x0: Tensor | None = None,
    method: str | Method = "auto",
    differentiate: str = "auto",
    tol: float = 1e-5,
    max_steps: int = 1000,
    step_size: StepSize | None = None,
    temperature: float | Temperature | None = None,
    verify: bool = True,
) -> Solution:
    """Minimise f(x; θ) over a convex set, for a batch of problems, differentiably.

    Args:
        objective: ``Quadratic``, ``LeastSquares`` or ``Smooth``.
        constraint: ``LpBall``, or any other set.
        x0: Start, (*shape) or (B, *shape); a start outside is moved onto the set.
        method: "auto", "dfw" (the published method), "frank-wolfe", "projected-newton" (which
            "auto" means, unless the set prefers another one), "active-set", or a method object.
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

    Returns:
        The `Solution`; its ``x`` carries the gradient.

    Raises:
        ValueError: Naming the argument, what was found and what is expected.

    """
    refuse_capture()
    if isinstance(objective, type) or not hasattr(objective, "value_and_gradient"):
        raise ValueError(
            "objective: expected Quadratic, LeastSquares, Smooth or the like, got "
            f"{type(objective).__name__}"
        )
    if not isinstance(constraint, Constraint):
        raise ValueError(
            f"constraint: expected a set such as LpBall, got {type(constraint).__name__}"
        )
    unrolled = isinstance(differentiate, str) and differentiate == "unroll"
    if isinstance(method, str) and method == "auto" and not unrolled:
        method = constraint.preferred_method
    solver, mode, schedule = check_settings(
        method, differentiate, tol, max_steps, step_size, temperature
    )
    tol, max_steps, verify = float(tol), int(max_steps), as_flag("verify", verify)
    if x0 is not None:
        check_tensor("x0", x0)
    device = objective.device
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            x0 = None if x0 is None else x0.to(torch.promote_types(x0.dtype, torch.float32))
            return solve(
                objective.float32(),
                constraint.float32(),
                x0=x0,
                method=method,
                differentiate=differentiate,
                tol=tol,
                max_steps=max_steps,
                step_size=step_size,
                temperature=temperature,
                verify=verify,
            )
    arguments = Arguments(objective, constraint, x0, step_size)
    if in_transform(arguments):
        given = {"tol": tol, "max_steps": max_steps, "temperature": schedule, "verify": verify}
        given |= {"method": solver, "differentiate": mode}
        return solve_transformed(solve, arguments, given)
    shape, dtype = objective.shape, objective.dtype
    sizes = objective.batch_sizes | constraint.batch_sizes(shape)
    batch = common_batch(sizes | ({} if x0 is None else _check_start(x0, objective)))
    lead = () if batch is None else (batch,)
    objective = objective.bind(batch)
    constraint = constraint.bind(shape, dtype, device)
    settings = Settings(tol, max_steps, step_size, schedule, warm=x0 is not None)
    bad: Tensor | None = None  # (B,), the status of problems that cannot be solved, else 0
    outcome: Outcome | None = None
    if mode == "implicit" and device.type == "cuda":
        rows = None if x0 is None else _rows(x0, math.prod(shape), lead)
        outcome = _from_recording(solver, objective, constraint, rows, lead, settings, verify)
    if outcome is None:
        objective, constraint, bad = _verified(objective, constraint, lead, verify)
        start = _start(objective, constraint, x0, (*lead, math.prod(shape)), verify)
        outcome = _solved(solver, mode, objective, constraint, start, settings)
    x, value, gap, status = outcome.x, outcome.value, outcome.gap, outcome.status
    assert value is not None
    assert gap is not None
    if bad is not None:
        lost = bad != 0
        x = where_rows(~lost, x, torch.nan)
        value, gap = torch.where(lost, torch.nan, value), torch.where(lost, torch.nan, gap)
        status = torch.where(lost, bad, status)
    return Solution(x.reshape(*lead, *shape), value, gap, outcome.num_steps, status)


def _solved(
    method: Method,
    mode: str,
    objective: Objective,
    constraint: Constraint,
    start: Tensor,
    settings: Settings,
) -> Outcome:
    """Solve and certify; with care where the numbers or the digits of the dtype are not enough."""
    solver = partial(_outcome, method, mode)
    careful = mode == "implicit" and is_invariant(method) and settings.step_size is None
    if not careful or start.numel() == 0 or settings.max_steps == 0:
        return solver(objective, constraint, start, settings)
    far = out_of_range(objective, constraint, start)
    if bool(far.all()):
        return solve_again(solver, objective, constraint, start, settings, None, far)
    if not bool(far.any()):
        outcome = solver(objective, constraint, start, settings)
        return _refined(solver, objective, constraint, settings, outcome)
    # harmless problems stand in for those that would overflow
    ordinary = objective.replace_rows(far), constraint.replace_rows(far)
    outcome = solver(*ordinary, ordinary[1].retract(start), settings)
    outcome = _refined(solver, *ordinary, settings, outcome)
    return solve_again(solver, objective, constraint, start, settings, outcome, far)


def _refined(
    solver: Solver,
    objective: Objective,
    constraint: Constraint,
    settings: Settings,
    outcome: Outcome,
) -> Outcome:
    """The outcome, with what the digits of float32 did not suffice for found in float64.

    Each problem goes on with the steps it has left.
    """
    if outcome.x.dtype != torch.float32 or not outcome.refinable:
        return outcome
    assert outcome.gap is not None and outcome.value is not None  # noqa: PT018
    # a gap that misses tol by a little is rounding, and x has the digits of its dtype
    wide = ~(outcome.gap <= MISSED * settings.tol * outcome.value.abs())
    short = (outcome.status == Status.ROUNDING_FLOOR) & wide
    short = short | (outcome.status == Status.STALLED)
    again = short & (outcome.num_steps < settings.max_steps)
    if not bool(again.any()):
        return outcome
    more = replace(settings, warm=True, spent=outcome.num_steps)
    return solve_again(solver, objective, constraint, outcome.x.detach(), more, outcome, again)


def _outcome(
    method: Method,
    mode: str,
    objective: Objective,
    constraint: Constraint,
    start: Tensor,
    settings: Settings,
) -> Outcome:
    """Solve and certify."""
    if (seen := constraint.centred()) is not None:
        # seen from its centre, a set keeps the precision of its own size
        inner, centre = seen
        around = Translated(objective, centre)
        outcome = _outcome(method, mode, around, inner, start - centre, settings)
        return outcome._replace(x=constraint.placed(outcome.x))
    problem = Problem(objective, constraint, constraint.unbounded())
    return certified(problem, MODES[mode](method, problem, start, settings), settings.tol)


def _from_recording(
    method: Method,
    objective: Objective,
    constraint: Constraint,
    x0: Tensor | None,
    lead: tuple[int, ...],
    settings: Settings,
    verify: bool,
) -> Outcome | None:
    """The solution from a CUDA graph, its gradient attached while the GPU is at work."""
    found = solve_recorded(method, objective, constraint, x0, lead, settings, verify)
    if found is None:
        return None
    x = attach(found.problem, found.outcome.x, found.face) if torch.is_grad_enabled() else None
    checked = found.checked()
    if checked is None:
        return None
    outcome = checked.outcome
    if checked is not found:
        outcome = certified(checked.problem, outcome, settings.tol)
        if x is not None:
            x = attach(checked.problem, outcome.x, checked.face)
    outcome = outcome if x is None else outcome._replace(x=x)
    if settings.step_size is not None:
        return outcome
    solver = partial(_outcome, method, "implicit")
    return _refined(solver, objective, constraint, settings, outcome)


def _verified(
    objective: Objective, constraint: Constraint, lead: tuple[int, ...], verify: bool
) -> tuple[Objective, Constraint, Tensor | None]:
    """Raise for values no problem can have; put harmless ones in place of bad problems."""
    if not verify:
        return objective, constraint, None
    if objective_records(objective) and not bool(objective.suspect()):
        bad = None
    else:
        objective, bad = objective.verified()
    constraint, flagged = constraint.verified()
    bad = merged(bad, flagged)
    if bad is None:
        return objective, constraint, None
    bad = bad.expand(lead)
    lost = bad != 0
    return objective.replace_rows(lost), constraint.replace_rows(lost), bad


def check_settings(
    method: str | Method,
    differentiate: str,
    tol: float,
    max_steps: int,
    step_size: StepSize | None,
    temperature: float | Temperature | None,
) -> tuple[Method, str, Temperature]:
    """Raise ValueError for settings that make no sense; the method, mode and schedule meant."""
    if not isinstance(differentiate, str) or differentiate not in ("auto", *MODES):
        raise ValueError(
            f"differentiate: expected one of {['auto', *sorted(MODES)]}, got {shown(differentiate)}"
        )
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"method: expected one of {sorted(METHODS)}, got {method!r}")
        # the best method whose steps can be differentiated is the published one
        unrolled = method == "auto" and differentiate == "unroll"
        method = METHODS["dfw" if unrolled else method]
    elif isinstance(method, type) or not hasattr(method, "run"):
        raise ValueError(
            f"method: expected a name or a method object such as FrankWolfe(), got {shown(method)}"
        )
    as_number("tol", tol, "a finite number ≥ 0", least=0)
    as_integer("max_steps", max_steps, 0)
    if step_size is not None and (isinstance(step_size, type) or not hasattr(step_size, "start")):
        raise ValueError(
            f"step_size: expected a rule such as ShortStep() or None, got {shown(step_size)}"
        )
    if differentiate == "auto":
        differentiate = method.modes[0]
    if differentiate not in method.modes:
        raise ValueError(
            f"differentiate: {type(method).__name__} offers {list(method.modes)}, got "
            f"{differentiate!r}; to differentiate through the steps use method 'dfw'"
        )
    return method, differentiate, as_temperature(temperature)


def _check_start(x0: Tensor, objective: Objective) -> dict[str, int]:
    """Raise unless x0 is a variable of the objective's; its batch size, if it has one."""
    shape = objective.shape
    fits = tuple(x0.shape[-len(shape) :]) == shape
    if not fits or x0.dim() - len(shape) not in (0, 1):
        raise ValueError(f"x0: expected shape {shape} or (B, *{shape}), got {tuple(x0.shape)}")
    if x0.dtype != objective.dtype or x0.device != objective.device:
        raise ValueError(
            f"x0: expected {objective.dtype} on {objective.device} like the objective, got "
            f"{x0.dtype} on {x0.device}"
        )
    return {"x0": x0.shape[0]} if x0.dim() > len(shape) else {}


def _start(
    objective: Objective,
    constraint: Constraint,
    x0: Tensor | None,
    size: tuple[int, ...],  # (n,) or (B, n)
    verify: bool,
) -> Tensor:
    """The start as a point of the set, of that size."""
    blank = torch.zeros(size, dtype=objective.dtype, device=objective.device)
    if x0 is None:
        return constraint.start(blank)
    n = size[-1]
    shared = x0.numel() == n
    x0 = _rows(x0, n, size[:-1])
    # a last solution may hold the NaN rows of problems that were bad; those start afresh
    usable = torch.isfinite(x0).all(-1)
    if verify and shared and not bool(usable.all()):
        raise ValueError("x0: expected finite numbers, found NaN or infinity")
    return constraint.retract(where_rows(usable, x0, constraint.start(blank)).expand(size))


def _rows(x0: Tensor, n: int, lead: tuple[int, ...]) -> Tensor:
    """x0 as (B, n), or as (n,) without a batch."""
    return x0.detach().reshape(-1, n) if lead else x0.detach().reshape(n)
