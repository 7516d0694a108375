"""Cells of a suite: the same problem for every system, one process, the systems in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dfwlayer_bench.bench.run import in_turns, told
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.systems.base import Packaged, Passes, quietly, timed

__all__ = [
    "NamedCell",
    "NamedPlan",
    "Passes",
    "TimedCell",
    "TimedPlan",
    "TimedSystem",
    "cells_of",
    "no_problem",
    "prepared",
    "run_groups",
]

CPU = torch.device("cpu")
LONG = 5.0  # seconds; a call that takes longer is timed once


Given = TypeVar("Given", contravariant=True)  # a problem


@dataclass(frozen=True)
class TimedSystem(Packaged, Generic[Given]):
    """One row of the registry of a suite.

    Attributes:
        name: What ``--systems`` accepts.
        label: What tables and figures print.
        prepare: Makes the passes ready; what it does (compiling, finding a step size, converting
            numbers) is not timed.
        packages: Distributions it needs beside torch.

    """

    name: str
    label: str
    prepare: Callable[[Given], Passes]
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TimedPlan(ABC):
    """What to run: every problem by every system."""

    systems: tuple[str, ...]
    repeats: int
    seed: int
    threads: int
    clock: str = "wall"  # or "cpu", see `dfwlayer_bench.systems.base.CLOCKS`

    @abstractmethod
    def groups(self) -> list[tuple[Any, ...]]:
        """What names each problem."""

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.groups()) * len(self.systems)

    def words(self) -> list[str]:
        """The plan as words of a command, but for its problems."""
        words = ["--systems", *self.systems, "--repeats", str(self.repeats)]
        return [*words, "--seed", str(self.seed), *self.timing()]

    def timing(self) -> list[str]:
        """How it is timed, as words of a command."""
        words = ["--threads", str(self.threads)]
        return words if self.clock == "wall" else [*words, "--clock", self.clock]


@dataclass(frozen=True, kw_only=True)
class NamedPlan(TimedPlan):
    """Problems that are known by a name alone."""

    problems: tuple[str, ...]

    def groups(self) -> list[tuple[Any, ...]]:
        """(problem,)."""
        return [(problem,) for problem in self.problems]


@dataclass(kw_only=True)
class TimedCell(ABC):
    """One system on one problem; ``status`` as of `bench.store.Cell`."""

    system: str
    status: str = "pending"
    detail: str = ""
    forward_seconds: list[float] = field(default_factory=list)
    both_seconds: list[float] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    @abstractmethod
    def given(self) -> str:
        """The name of its problem."""

    @property
    def where(self) -> str:
        """Its name for people."""
        return f"{self.given}: {self.system}"

    @property
    def key(self) -> str:
        """Its name on disk."""
        return f"{self.given}-{self.system}".replace(" ", "-").replace("×", "x")


@dataclass
class NamedCell(TimedCell):
    """One system on a problem that is known by a name alone."""

    problem: str

    @property
    def given(self) -> str:
        return self.problem


Own = TypeVar("Own", bound=TimedCell)


def cells_of(
    plan: TimedPlan, store: Store, kind: type[Own], known: Mapping[str, Packaged]
) -> list[list[Own]]:
    """Those of each problem of the plan, as saved where that still holds."""
    return [
        [
            _restored(store, kind(*group, system=name, versions=known[name].versions()))
            for name in plan.systems
        ]
        for group in plan.groups()
    ]


def _restored(store: Store, cell: Own) -> Own:
    """The cell as saved where that still holds, otherwise as it is."""
    found = store.read(cell.key)
    if found is None or set(found) != {item.name for item in fields(cell)}:
        return cell
    saved = type(cell)(**found)
    return saved if saved.versions == cell.versions else cell


def run_groups(
    plan: TimedPlan,
    groups: Sequence[Sequence[Own]],
    store: Store,
    report: Report,
    ready: Callable[[Own], Callable[[Own], Passes | None]],
) -> list[Own]:
    """Finish every cell, saving each as it grows; returns all of them.

    The cells of a group have one problem. ``ready`` makes it for the first of them that is not
    finished and returns what prepares a system for it, None for one that cannot run. The plan says
    how often a call is timed, and by which clock.
    """

    def done(cell: Own) -> bool:
        if cell.status != "ok":
            return cell.status != "pending"
        times = cell.forward_seconds
        return len(times) >= plan.repeats or (bool(times) and times[0] > LONG)

    with quietly():
        for group in groups:
            unfinished = [cell for cell in group if not done(cell)]
            report(group[0].where, len(group) - len(unfinished))
            if unfinished:
                prepare = ready(unfinished[0])
                _run_group(unfinished, store, report, prepare, done, plan.clock)
    return [cell for group in groups for cell in group]


def _run_group(
    cells: Sequence[Own],
    store: Store,
    report: Report,
    prepare: Callable[[Own], Passes | None],
    done: Callable[[Own], bool],
    clock: str,
) -> None:
    """Prepare each system, then let them take turns until all are done.

    Those that cannot run took no time, and are told when the others were prepared: so the time that
    is left is not guessed from them alone.
    """
    running: list[tuple[Own, Passes]] = []
    idle: list[Own] = []
    for cell in cells:
        report(cell.where, 0)
        passes = prepare(cell)
        _save(store, cell)
        if passes is None:
            idle.append(cell)
        else:
            running.append((cell, passes))
    for cell in idle:
        report(_ended(cell), 1)
    for cell, passes in in_turns(running, lambda item: done(item[0])):
        _one_turn(cell, passes, clock)
        _save(store, cell)
        if done(cell):
            report(_ended(cell), 1)


def _ended(cell: TimedCell) -> str:
    seconds = cell.both_seconds or cell.forward_seconds
    return f"{cell.where}, {told(cell.status, cell.detail, seconds)}"


def _save(store: Store, cell: TimedCell) -> None:
    store.write(cell.key, asdict(cell))


def no_problem(status: str, reason: str) -> Callable[[TimedCell], None]:
    """What prepares no system, as there is no problem, and says why."""

    def without(cell: TimedCell) -> None:
        cell.status, cell.detail = status, reason

    return without


def prepared(
    cell: TimedCell,
    system: Packaged,
    unsupported: str,  # why the system does not take the problem, empty if it does
    prepare: Callable[[], Passes],
    measure: Callable[[Tensor, Tensor | None], None],  # of x and the gradient, if all are finite
) -> Passes | None:
    """The passes of a system that can run, its answer measured; None, with the reason, if not."""
    missing = system.absent()
    if unsupported:
        cell.status, cell.detail = "unsupported", unsupported
    elif missing:
        cell.status, cell.detail = "missing", missing
    if cell.status not in ("pending", "ok"):
        return None
    try:
        passes = prepare()
        x, gradient = (passes.forward(), None) if passes.both is None else passes.both()
    except Exception as error:
        # whatever a rival raises is its result
        cell.status, cell.detail = "failed", _said(error)
        return None
    if not all(bool(part.isfinite().all()) for part in (x, gradient) if part is not None):
        cell.status, cell.detail = "failed", "x or the gradient is not finite"
        return None
    cell.status = "ok"
    cell.settings = dict(passes.settings)
    measure(x, gradient)
    return passes


def _one_turn(cell: TimedCell, passes: Passes, clock: str) -> None:
    """Each pass once, after an untimed one that wakes up caches and threads."""
    try:
        cell.forward_seconds.append(_seconds(passes.forward, clock))
        if passes.both is not None:
            cell.both_seconds.append(_seconds(passes.both, clock))
    except Exception as error:
        cell.status, cell.detail = "failed", _said(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _seconds(call: Callable[[], object], clock: str) -> float:
    _, first = timed(call, CPU, clock)
    return first if first > LONG else timed(call, CPU, clock)[1]
