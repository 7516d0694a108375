"""Cells of a suite: the same problem for every system, one process, the systems in turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dfwlayer_bench.bench.run import in_turns
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.systems.base import Packaged, Setting, timed

__all__ = ["Passes", "TimedCell", "prepared", "restored", "run_groups"]

CPU = torch.device("cpu")
LONG = 5.0  # seconds; a call that takes longer is timed once


@dataclass(frozen=True)
class Passes:
    """A system made ready for one problem.

    Attributes:
        forward: Finds x, (..., n).
        both: Finds x and a gradient as well; None for a system that has none.
        settings: What it was told, for the record.

    """

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, Tensor]] | None
    settings: dict[str, Setting]


class TimedCell(Protocol):
    """One system on one problem, a dataclass; ``status`` as of `bench.store.Cell`."""

    system: str
    status: str
    detail: str
    forward_seconds: list[float]
    both_seconds: list[float]
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def key(self) -> str:
        """Its name on disk."""

    @property
    def where(self) -> str:
        """Its name for people."""


Own = TypeVar("Own", bound=TimedCell)


def restored(store: Store, cell: Own) -> Own:
    """The cell as saved where that still holds, otherwise as it is."""
    found = store.read(cell.key)
    if found is None or set(found) != {item.name for item in fields(cell)}:  # type: ignore[arg-type]
        return cell
    saved = type(cell)(**found)
    return saved if saved.versions == cell.versions else cell


def run_groups(
    groups: Iterable[Sequence[Own]],
    repeats: int,
    store: Store,
    report: Report,
    ready: Callable[[Own], Callable[[Own], Passes | None]],
) -> None:
    """Finish every cell, saving each as it grows.

    The cells of a group have one problem. ``ready`` makes it for the first of them that is not
    finished and returns what prepares a system for it, None for one that cannot run.
    """

    def done(cell: Own) -> bool:
        if cell.status != "ok":
            return cell.status != "pending"
        times = cell.forward_seconds
        return len(times) >= repeats or (bool(times) and times[0] > LONG)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rivals warn about their own settings
        for group in groups:
            unfinished = [cell for cell in group if not done(cell)]
            report(group[0].where, len(group) - len(unfinished))
            if unfinished:
                _run_group(unfinished, store, report, ready(unfinished[0]), done)


def _run_group(
    cells: Sequence[Own],
    store: Store,
    report: Report,
    prepare: Callable[[Own], Passes | None],
    done: Callable[[Own], bool],
) -> None:
    """Prepare each system, then let them take turns until all are done."""
    running: list[tuple[Own, Passes]] = []
    for cell in cells:
        report(cell.where, 0)
        passes = prepare(cell)
        _save(store, cell)
        if passes is None:
            report(cell.where, 1)
        else:
            running.append((cell, passes))
    for cell, passes in in_turns(running, lambda item: done(item[0])):
        _one_turn(cell, passes)
        _save(store, cell)
        if done(cell):
            report(cell.where, 1)


def _save(store: Store, cell: TimedCell) -> None:
    store.write(cell.key, asdict(cell))  # type: ignore[call-overload]


def prepared(
    cell: TimedCell,
    system: Packaged,
    unsupported: str,  # why the system does not take the problem, empty if it does
    prepare: Callable[[], Passes],
    measure: Callable[[Tensor, Tensor | None], None],  # of x and the gradient, if all are finite
) -> Passes | None:
    """The passes of a system that can run, its answer measured; None, with the reason, if not."""
    missing = system.missing()
    if unsupported:
        cell.status, cell.detail = "unsupported", unsupported
    elif missing:
        cell.status, cell.detail = "missing", f"not installed: {', '.join(missing)}"
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


def _one_turn(cell: TimedCell, passes: Passes) -> None:
    """Each pass once, after an untimed one that wakes up caches and threads."""
    try:
        cell.forward_seconds.append(_seconds(passes.forward))
        if passes.both is not None:
            cell.both_seconds.append(_seconds(passes.both))
    except Exception as error:
        cell.status, cell.detail = "failed", _said(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _seconds(call: Callable[[], object]) -> float:
    _, first = timed(call, CPU)
    return first if first > LONG else timed(call, CPU)[1]
