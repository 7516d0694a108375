"""From cells and records to rows: mean ± standard deviation over the trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dfwlayer_bench.bench.measure import cosine
from dfwlayer_bench.bench.report import Outcome, by_system, outcome_of, settings_text
from dfwlayer_bench.bench.store import Cell, Store, Vector
from dfwlayer_bench.report import text
from dfwlayer_bench.reproduce.studies.base import Record

__all__ = [
    "Answers",
    "Group",
    "Spread",
    "SystemRow",
    "cosine_text",
    "error_text",
    "groups_of_records",
    "load_answers",
    "spread_of",
    "system_rows",
]

PEERS = ("diffcp", "moreau")  # CvxpyLayer, in the order of preference as the paper's reference

Answers = Mapping[str, tuple[Vector, Vector]]  # key of a cell -> x, gradient


@dataclass(frozen=True)
class Spread:
    """Mean, population standard deviation (as in the paper) and extremes over the trials."""

    mean: float
    std: float
    least: float
    most: float

    def __str__(self) -> str:
        return text.spread(self.mean, self.std)


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are known; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.pstdev(known), min(known), max(known))


def cosine_text(spread: Spread | None) -> str:
    """Four decimals: what matters of a cosine is how far it is from 1."""
    return text.NOTHING if spread is None else f"{spread.mean:.4f} ± {spread.std:.4f}"


def error_text(spread: Spread | None) -> str:
    """Orders of magnitude."""
    return (
        text.NOTHING if spread is None else f"{text.small(spread.mean)} ± {text.small(spread.std)}"
    )


@dataclass(frozen=True)
class SystemRow(Outcome):
    """An outcome as the paper tells it, and against exact answers."""

    active_seeds: tuple[int, ...]  # of the problems whose constraint is active
    seconds: Spread | None  # the median call of each trial
    peer: str | None  # the CvxpyLayer compared with
    peer_cosine: Spread | None
    peer_distance: Spread | None  # Euclidean
    mean_violation: float | None  # max(0, ‖w∘x‖₁ − t), as the paper
    max_violation: float | None
    relative_violation: float | None  # largest, divided by t
    error: Spread | None  # against the exact reference, relative
    cosine: Spread | None
    gradient_error: Spread | None
    memory_mb: float | None
    settings: str
    versions: str


def load_answers(cells: Iterable[Cell], store: Store) -> Answers:
    """What the cells found, where it was kept."""
    found = {cell.key: store.answer(cell) for cell in cells if cell.status == "ok"}
    return {key: answer for key, answer in found.items() if answer is not None}


def system_rows(cells: Sequence[Cell], answers: Answers) -> list[SystemRow]:
    """One row for each family, size and system, in the order they were first met."""
    peer = next(
        (name for name in PEERS if any(c.system == name and c.key in answers for c in cells)), None
    )
    return [_row(group, peer, answers) for group in by_system(cells)]


def _row(cells: list[Cell], peer: str | None, answers: Answers) -> SystemRow:
    good, outcome = outcome_of(cells)
    pairs = [_against_peer(cell, peer, answers) for cell in good]
    violations = [c.violation * c.radius for c in good if c.violation is not None and c.radius]
    relative = [cell.violation for cell in good if cell.violation is not None]
    memory = [cell.memory_mb for cell in good if cell.memory_mb is not None]
    return SystemRow(
        **vars(outcome),
        active_seeds=tuple(cell.seed for cell in good if cell.constraint_active),
        seconds=spread_of(statistics.median(cell.seconds) for cell in good),
        peer=peer,
        peer_cosine=spread_of(pair[0] for pair in pairs),
        peer_distance=spread_of(pair[1] for pair in pairs),
        mean_violation=statistics.fmean(violations) if violations else None,
        max_violation=max(violations, default=None),
        relative_violation=max(relative, default=None),
        error=spread_of(cell.error for cell in good),
        cosine=spread_of(cell.cosine for cell in good),
        gradient_error=spread_of(cell.gradient_error for cell in good),
        memory_mb=max(memory, default=None),
        settings=settings_text([cell.settings for cell in good]),
        versions=", ".join(f"{name} {found}" for name, found in cells[0].versions.items()),
    )


def _against_peer(
    cell: Cell, peer: str | None, answers: Answers
) -> tuple[float | None, float | None]:
    """Cosine of the gradients and distance of the solutions, on the same problem."""
    if peer is None or peer == cell.system:
        return None, None
    other = answers.get(replace(cell, system=peer).key)
    own = answers.get(cell.key)
    if own is None or other is None:
        return None, None
    (x, gradient), (peer_x, peer_gradient) = (
        tuple(torch.from_numpy(vector) for vector in pair) for pair in (own, other)
    )
    return cosine(gradient, peer_gradient), float((x - peer_x).norm())


@dataclass(frozen=True)
class Group:
    """One variant of a study on one family, over all trials."""

    study: str
    family: str
    n: int
    variant: str
    label: str
    status: str
    detail: str
    settings: dict[str, Any]
    records: tuple[Record, ...]  # those that ended well

    def spread(self, name: str) -> Spread | None:
        """Of a number; a cosine that could not be formed, for want of a finite gradient, is 0."""
        found = [record.values.get(name) for record in self.records]
        return spread_of((value or 0.0) if _is_cosine(name) else value for value in found)

    def largest(self, name: str) -> float | None:
        """The largest over the trials."""
        found = [record.values.get(name) for record in self.records]
        return max((value for value in found if value is not None), default=None)

    def curve(self, name: str) -> tuple[list[float], list[Spread | None]]:
        """The steps, and the values at each of them over the trials."""
        if not self.records:
            return [], []
        steps = min((record.values["step"] for record in self.records), key=len)
        rows = [record.values[name] for record in self.records]
        empty = 0.0 if _is_cosine(name) else None
        columns = [
            [row[i] if row[i] is not None else empty for row in rows] for i in range(len(steps))
        ]
        return steps, [spread_of(column) for column in columns]


def _is_cosine(name: str) -> bool:
    return name.endswith("cosine")


def groups_of_records(records: Sequence[Record]) -> list[Group]:
    """One group for each study, family and variant, in the order they were first met."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.study, record.family, record.variant), []).append(record)
    groups = []
    for own in found.values():
        first = own[0]
        good = [record for record in own if record.status == "ok"]
        bad = [record for record in own if record.status != "ok"]
        status = "ok" if not bad else f"{bad[0].status} in {len(bad)} of {len(own)}"
        detail = "; ".join(dict.fromkeys(record.detail for record in bad))
        groups.append(
            Group(
                first.study,
                first.family,
                first.n,
                first.variant,
                first.label,
                status,
                detail,
                first.settings,
                tuple(good),
            )
        )
    return groups
