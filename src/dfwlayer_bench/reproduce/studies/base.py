"""Studies of the method itself: variants on the same problems, each saved as it is finished."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from dfwlayer_bench.bench.plan import Plan
from dfwlayer_bench.bench.store import Attempt, Store
from dfwlayer_bench.problems.families import Instance, make
from dfwlayer_bench.problems.reference import Reference, solve_reference
from dfwlayer_bench.report import text
from dfwlayer_bench.report.progress import Report

__all__ = ["Case", "Record", "Study", "Variant", "cases_of", "run_studies", "saved_records"]

Values = Mapping[str, float | Sequence[float | None] | None]


@dataclass(frozen=True)
class Case:
    """One problem and its exact answer, made when first asked for."""

    family: str
    n: int
    trial: int
    seed: int
    dtype: str
    device: str

    @cached_property
    def problem(self) -> Instance:
        """In the dtype and on the device of the run."""
        dtype = getattr(torch, self.dtype)
        return make(self.family, self.n, self.seed, dtype=dtype, device=self.device)

    @cached_property
    def exact(self) -> Instance:
        """The same numbers in float64 on the CPU."""
        return self.problem.to(torch.float64)

    @cached_property
    def reference(self) -> Reference:
        """The exact answer for p = 1."""
        return solve_reference(self.problem)


@dataclass(frozen=True)
class Variant:
    """One setting of a study.

    ``settings`` are all that the values depend on: a record saved with others is run again.
    """

    name: str
    label: str
    settings: dict[str, Any]
    run: Callable[[Case], Values]


@dataclass(frozen=True)
class Study:
    """A question, and the variants whose comparison answers it."""

    name: str
    variants: tuple[Variant, ...]


@dataclass
class Record(Attempt):
    """One variant on one problem."""

    study: str
    family: str
    n: int
    trial: int
    seed: int
    variant: str
    label: str
    active: bool | None = None  # whether the ℓ1 constraint is
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.study}-{self.family}-{self.n}-{self.trial}-{self.variant}"


def cases_of(plan: Plan) -> list[Case]:
    """One for each family and trial at the middle size, seeds as in the benchmark."""
    n = plan.sizes[len(plan.sizes) // 2]
    return [
        Case(family, n, trial, plan.seed + 100 * trial, plan.dtype, plan.device)
        for family in plan.families
        for trial in range(plan.trials)
    ]


def run_studies(
    plan: Plan,
    studies: Sequence[Study],
    store: Store,
    report: Report,
    cases: Sequence[Case] | None = None,
) -> list[Record]:
    """Finish every record, or those of these cases, saving each at once; returns them."""
    records = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rule that is not meant for a problem may warn
        for case in cases_of(plan) if cases is None else cases:
            for study in studies:
                for variant in study.variants:
                    record = _load(plan, study, variant, case, store)
                    where = f"{study.name} {case.family} n={case.n} trial {case.trial + 1}"
                    report(f"{where}: {variant.label}", 0)
                    ended = "from before"
                    if record.status == "pending":
                        start = time.perf_counter()
                        _run(record, variant, case)
                        store.write(record.key, asdict(record))
                        ended = f"{text.status(record.status, record.detail)} in "
                        ended += text.time(time.perf_counter() - start)
                    records.append(record)
                    report(f"{where}: {variant.label}, {ended}", 1)
    return records


def saved_records(plan: Plan, studies: Sequence[Study], store: Store) -> list[Record]:
    """The records as they are on disk, those never begun left out."""
    records = [
        _load(plan, study, variant, case, store)
        for case in cases_of(plan)
        for study in studies
        for variant in study.variants
    ]
    return [record for record in records if record.status != "pending"]


def _load(plan: Plan, study: Study, variant: Variant, case: Case, store: Store) -> Record:
    """The record as saved where that still holds, otherwise a new one."""
    record = Record(
        study.name,
        case.family,
        case.n,
        case.trial,
        case.seed,
        variant.name,
        variant.label,
        settings=variant.settings,
        time_limit=plan.time_limit,
    )
    found = store.read(record.key)
    if found is None or not set(found) <= {item.name for item in fields(Record)}:
        return record
    saved = Record(**found)
    if saved.seed != record.seed or saved.settings != record.settings:
        return record
    if saved.cut_short(plan.time_limit):
        return record
    return saved


def _run(record: Record, variant: Variant, case: Case) -> None:
    try:
        record.active = case.reference.active
        with deadline(record.time_limit or math.inf):
            values = variant.run(case)
    except TimeoutError:
        record.status, record.detail = "time limit", f"over {record.time_limit:g} s"
        return
    except Exception as error:
        # one variant that fails is a result, and no reason to lose the others
        record.status, record.detail = "failed", f"{type(error).__name__}: {error}"[:300]
        return
    record.status = "ok"
    record.values = {name: _finite(value) for name, value in values.items()}


def _finite(value: float | Sequence[float | None] | None) -> Any:
    """What JSON can hold: None in place of NaN and infinity."""
    if value is None or isinstance(value, int | float):
        return value if value is not None and math.isfinite(value) else None
    return [_finite(item) for item in value]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, where the system has timers and this is possible.

    Steps are short, so Python looks at the alarm soon; rivals' native code is stopped otherwise.
    """
    possible = hasattr(signal, "setitimer") and math.isfinite(seconds)
    if not possible or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
