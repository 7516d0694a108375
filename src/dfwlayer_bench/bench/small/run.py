"""Running the cells of the small suite: the same problems, one process, the systems in turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dfwlayer_bench.bench.run import in_turns
from dfwlayer_bench.bench.small.passes import Passes
from dfwlayer_bench.bench.small.problems import (
    Problem,
    Reference,
    largest_error,
    make,
    reference_of,
)
from dfwlayer_bench.bench.small.systems import SYSTEMS
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.systems.base import timed

__all__ = ["SmallCell", "SmallPlan", "run_small", "saved_small"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SmallPlan:
    """What to run: every set with every size (problems, variables) by every system."""

    sets: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    systems: tuple[str, ...]
    repeats: int
    seed: int
    threads: int

    def groups(self) -> list[tuple[str, int, int]]:
        """(set, problems, variables)."""
        return [(name, count, n) for count, n in self.sizes for name in self.sets]

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.groups()) * len(self.systems)


@dataclass
class SmallCell:
    """One system on one set and size; ``status`` as of `bench.store.Cell`."""

    set: str
    count: int
    n: int
    system: str
    status: str = "pending"
    detail: str = ""
    forward_seconds: list[float] = field(default_factory=list)
    both_seconds: list[float] = field(default_factory=list)
    error: float | None = None  # the largest of x, see `largest_error`
    gradient_error: float | None = None
    violation: float | None = None
    residual: float | None = None  # of the reference
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.set}-{self.count}x{self.n}-{self.system}"


def run_small(plan: SmallPlan, store: Store, report: Report) -> list[SmallCell]:
    """Finish every cell of the plan, saving each as it grows; returns all of them."""
    cells: list[SmallCell] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rivals warn about their own settings
        for name, count, n in plan.groups():
            group = [_start(store, name, count, n, system) for system in plan.systems]
            cells += group
            unfinished = [cell for cell in group if not _done(cell, plan)]
            report(f"{name} {count}×{n}", len(group) - len(unfinished))
            if unfinished:
                _run_group(plan, store, unfinished, report)
    return cells


def saved_small(plan: SmallPlan, store: Store) -> list[SmallCell]:
    """The cells of the plan as they are on disk, those never begun left out."""
    cells = [_start(store, *group, system) for group in plan.groups() for system in plan.systems]
    return [cell for cell in cells if cell.status != "pending"]


def _start(store: Store, name: str, count: int, n: int, system: str) -> SmallCell:
    """The cell as saved where that still holds, otherwise a new one."""
    cell = SmallCell(name, count, n, system, versions=SYSTEMS[system].versions())
    found = store.read(cell.key)
    if found is None or set(found) != {item.name for item in fields(SmallCell)}:
        return cell
    saved = SmallCell(**found)
    return saved if saved.versions == cell.versions else cell


def _done(cell: SmallCell, plan: SmallPlan) -> bool:
    if cell.status == "ok":
        return len(cell.forward_seconds) >= plan.repeats
    return cell.status != "pending"


def _run_group(plan: SmallPlan, store: Store, cells: Sequence[SmallCell], report: Report) -> None:
    """All systems on one problem: prepare each, then take turns until all are done."""
    first = cells[0]
    problem = make(first.set, first.count, first.n, plan.seed)
    reference = reference_of(problem)
    running: list[tuple[SmallCell, Passes]] = []
    for cell in cells:
        report(_where(cell), 0)
        passes = _prepare(cell, problem, reference)
        store.write(cell.key, asdict(cell))
        if passes is None:
            report(_where(cell), 1)
        else:
            running.append((cell, passes))
    for cell, passes in in_turns(running, lambda item: _done(item[0], plan)):
        _one_turn(cell, passes)
        store.write(cell.key, asdict(cell))
        if _done(cell, plan):
            report(_where(cell), 1)


def _where(cell: SmallCell) -> str:
    return f"{cell.set} {cell.count}×{cell.n}: {cell.system}"


def _prepare(cell: SmallCell, problem: Problem, reference: Reference) -> Passes | None:
    """The passes of a system that can run, its answer measured; None, with the reason, if not."""
    system = SYSTEMS[cell.system]
    missing = system.missing()
    if cell.set not in system.sets:
        cell.status, cell.detail = "unsupported", "no such set"
    elif missing:
        cell.status, cell.detail = "missing", f"not installed: {', '.join(missing)}"
    if cell.status not in ("pending", "ok"):
        return None
    try:
        passes = system.prepare(problem)
        x, gradient = (passes.forward(), None) if passes.both is None else passes.both()
    except Exception as error:
        # whatever a rival raises is its result
        cell.status, cell.detail = "failed", f"{type(error).__name__}: {error}"[:300]
        return None
    _measure(cell, x, gradient, problem, reference)
    cell.settings = dict(passes.settings)
    return passes if cell.status == "ok" else None


def _measure(
    cell: SmallCell, x: Tensor, gradient: Tensor | None, problem: Problem, reference: Reference
) -> None:
    if not all(bool(part.isfinite().all()) for part in (x, gradient) if part is not None):
        cell.status, cell.detail = "failed", "x or the gradient is not finite"
        return
    cell.status = "ok"
    cell.residual = reference.residual
    cell.error = largest_error(x, reference.x)
    cell.violation = problem.set.violation(x)
    if gradient is not None:
        cell.gradient_error = largest_error(gradient, reference.gradient)


def _one_turn(cell: SmallCell, passes: Passes) -> None:
    """Each pass once, after an untimed one that wakes up caches and threads."""
    try:
        cell.forward_seconds.append(_seconds(passes.forward))
        if passes.both is not None:
            cell.both_seconds.append(_seconds(passes.both))
    except Exception as error:
        cell.status, cell.detail = "failed", f"{type(error).__name__}: {error}"[:300]


def _seconds(call: Callable[[], object]) -> float:
    call()
    return timed(call, CPU)[1]
