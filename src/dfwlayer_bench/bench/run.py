"""Running the cells: the same problems, one process, the systems taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dfwlayer_bench.bench.measure import cosine, relative
from dfwlayer_bench.bench.plan import Group, Plan
from dfwlayer_bench.bench.probe import Prober
from dfwlayer_bench.bench.store import Cell, Store
from dfwlayer_bench.problems.families import Instance, make
from dfwlayer_bench.problems.reference import Reference, solve_reference
from dfwlayer_bench.report import text
from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.systems import find
from dfwlayer_bench.systems.base import Ready, quietly, timed

__all__ = ["in_turns", "run_plan", "saved_cells", "told"]

WARM_CALLS, WARM_SECONDS = 3, 1.0
SHORT = 0.2  # seconds; a call shorter than this is preceded by an untimed one, to be warm
Item = TypeVar("Item")

FINAL = ("missing", "unsupported", "failed", "time limit")


def run_plan(
    plan: Plan, store: Store, report: Report, groups: Sequence[Group] | None = None
) -> list[Cell]:
    """Finish every cell of the plan, or of these groups, saving each as it grows; returns them."""
    cells: list[Cell] = []
    with quietly(), Prober() as prober:
        for family, n, trial in plan.groups() if groups is None else groups:
            group = [_start(plan, store, family, n, trial, name) for name in plan.systems]
            cells += group
            open_cells = [cell for cell in group if not _done(cell, plan)]
            report(f"{family} n={n} trial {trial + 1}", len(group) - len(open_cells))
            if open_cells:
                _run_group(plan, store, open_cells, prober, report)
    return cells


def saved_cells(plan: Plan, store: Store) -> list[Cell]:
    """The cells of the plan as they are on disk, those never begun left out."""
    cells = [
        _start(plan, store, family, n, trial, name)
        for family, n, trial in plan.groups()
        for name in plan.systems
    ]
    return [cell for cell in cells if cell.status != "pending"]


def _start(plan: Plan, store: Store, family: str, n: int, trial: int, name: str) -> Cell:
    """The cell as saved where that still holds, otherwise a new one."""
    seed = plan.seed + 100 * trial
    system = find(name)
    cell = Cell(family, n, trial, seed, name, versions=system.versions())
    cell.time_limit = plan.time_limit
    saved = store.load(cell)
    if saved is None or saved.versions != cell.versions:  # what was missing may be there now
        return cell
    if plan.answers and saved.status == "ok" and store.answer(saved) is None:
        return cell
    if saved.cut_short(plan.time_limit):
        return cell
    return saved


def _done(cell: Cell, plan: Plan) -> bool:
    if cell.status != "ok":
        return cell.status in FINAL
    return len(cell.seconds) >= plan.repeats or _spent(cell, plan)


def _spent(cell: Cell, plan: Plan) -> bool:
    """A slow system is timed until it has used the time limit, and at least once."""
    return bool(cell.seconds) and sum(cell.seconds) >= plan.time_limit


def _run_group(
    plan: Plan,
    store: Store,
    cells: Sequence[Cell],
    prober: Prober,
    report: Report,
) -> None:
    """All systems on one problem: prepare each, then take turns until all are done."""
    posed: tuple[Instance, Reference] | None = None
    unsolved = ""  # why there is no reference to measure against
    running: list[tuple[Cell, Ready]] = []
    for cell in cells:
        where = f"{cell.family} n={cell.n} trial {cell.trial + 1}: {cell.system}"
        report(f"{where}, first call", 0)
        ready: Ready | None = None
        if _admit(plan, cell, prober):
            if posed is None and not unsolved:
                try:
                    posed = _problem(plan, cell)
                except RuntimeError as error:
                    unsolved = f"{error}"[:300]
            if posed is None:
                cell.status, cell.detail = "failed", unsolved
            else:
                ready = _first_call(plan, store, cell, *posed)
        store.save(cell)
        if ready is None:
            report(f"{where}, {told(cell.status, cell.detail, ())}", 1)
        else:
            running.append((cell, ready))
    if posed is None:
        return
    for cell, ready in in_turns(running, lambda item: _done(item[0], plan)):
        where = f"{cell.family} n={cell.n} trial {cell.trial + 1}: {cell.system}"
        report(f"{where}, {len(cell.seconds) + 1} of {plan.repeats}", 0)
        _one_turn(plan, cell, ready, posed[0])
        store.save(cell)
        if _done(cell, plan):
            report(f"{where}, {told(cell.status, cell.detail, cell.seconds)}", 1)


def told(status: str, detail: str, seconds: Sequence[float]) -> str:
    """How a cell ended: the median time of a call, or why there is none."""
    if status != "ok" or not seconds:
        return text.status(status, detail)
    return f"{text.time(statistics.median(seconds))} a call"


def in_turns(running: Sequence[Item], done: Callable[[Item], bool]) -> Iterator[Item]:
    """Each in its turn, round after round, until it is done.

    Every round starts with another one, so that none always follows the same one.
    """
    turn = 0
    while running:
        shift = turn % len(running)
        yield from [*running[shift:], *running[:shift]]
        running = [item for item in running if not done(item)]
        turn += 1


def _problem(plan: Plan, cell: Cell) -> tuple[Instance, Reference]:
    problem = make(
        cell.family,
        cell.n,
        cell.seed,
        dtype=getattr(torch, plan.dtype),
        device=plan.device,
        functional=plan.functional,
    )
    return problem, solve_reference(problem)


def _admit(plan: Plan, cell: Cell, prober: Prober) -> bool:
    """Whether the system can run here at all; writes the reason into the cell if not."""
    system = find(cell.system)
    missing = system.absent()
    if missing:
        cell.status, cell.detail = "missing", missing
        return False
    if plan.device not in system.devices:
        cell.status, cell.detail = "unsupported", f"does not run on {plan.device}"
        return False
    if not plan.memory:
        return True
    task = {
        "system": cell.system,
        "family": cell.family,
        "n": cell.n,
        "seed": cell.seed,
        "dtype": plan.dtype,
        "device": plan.device,
        "functional": plan.functional,
        "threads": plan.threads,
    }
    found = prober.first(task, plan.time_limit)
    cell.memory_mb = found.memory_mb
    if found.status != "ok":
        cell.status, cell.detail = found.status, found.detail
        return False
    return True


def _first_call(
    plan: Plan, store: Store, cell: Cell, problem: Instance, reference: Reference
) -> Ready | None:
    """Prepare, call until warm, and measure the answer; None if that did not work out."""
    try:
        start = time.perf_counter()
        ready = find(cell.system).prepare(problem)
        cell.build_seconds = time.perf_counter() - start
        cell.settings = dict(ready.settings)
        answer, seconds = timed(ready.call, problem.device, plan.clock)
        if seconds > plan.time_limit:
            cell.status, cell.detail = "time limit", f"a call took {seconds:.3g} s"
            return None
        spent = seconds
        for _ in range(WARM_CALLS - 1):
            if spent >= WARM_SECONDS:
                break
            spent += timed(ready.call, problem.device, plan.clock)[1]
    except Exception as error:
        # whatever a rival raises is its result
        cell.status, cell.detail = "failed", f"{type(error).__name__}: {error}"[:300]
        return None
    x, gradient = (
        tensor.detach().to(device="cpu", dtype=torch.float64)
        for tensor in (answer.x, answer.gradient)
    )
    cell.detail = answer.note
    _measure(cell, x, gradient, problem, reference)
    if cell.status != "ok":
        return None
    if plan.answers:
        store.save_answer(cell, x.numpy(), gradient.numpy())
    return ready


def _one_turn(plan: Plan, cell: Cell, ready: Ready, problem: Instance) -> None:
    try:
        seconds = timed(ready.call, problem.device, plan.clock)[1]
        if seconds < SHORT:
            seconds = timed(ready.call, problem.device, plan.clock)[1]
    except Exception as error:
        cell.status, cell.detail = "failed", f"{type(error).__name__}: {error}"[:300]
        return
    cell.seconds.append(seconds)


def _measure(
    cell: Cell, x: Tensor, gradient: Tensor, problem: Instance, reference: Reference
) -> None:
    """Compare with the reference, in float64 on the CPU."""
    cell.constraint_active = reference.active
    cell.radius = float(problem.t)
    if not bool(torch.isfinite(x).all() and torch.isfinite(gradient).all()):
        cell.status, cell.detail = "failed", "x or the gradient is not finite"
        return
    cell.status = "ok"
    if not find(cell.system).solves:
        return
    exact = problem.to(torch.float64)
    cell.error = relative(x, reference.x)
    cell.gradient_error = relative(gradient, reference.gradient)
    cell.cosine = cosine(gradient, reference.gradient)
    radius = float(exact.t)
    cell.violation = max(0.0, float((exact.w * x).abs().sum()) - radius) / radius
