"""A reproduction on Ray: every worker takes a share of the problems and saves its cells itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dfwlayer_bench.bench.plan import Group, Plan, identity_of
from dfwlayer_bench.bench.run import run_plan
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.report.machine import cores, describe, threads
from dfwlayer_bench.report.progress import Report
from dfwlayer_bench.reproduce.studies.base import Case, Study, cases_of, run_studies
from dfwlayer_bench.sweep import Cluster, claimed_cores

__all__ = ["machine_of", "run_shares"]


def machine_of(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The machine that the cells are run on, as a worker sees it."""
    found: dict[str, Any] = cluster.ask(_describe, plan, **_room(plan))
    return found


def run_shares(
    cluster: Cluster,
    plan: Plan,
    compares: bool,
    studies: Sequence[Study],
    store: Store,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Finish the studies, and the cells of the plan where systems are compared."""
    place = (plan, store.folder.absolute())
    shares: dict[str, tuple[Any, ...]] = {}
    sizes: dict[str, int] = {}
    if studies:
        for case in cases_of(plan):
            name = f"studies {case.family} n={case.n} trial {case.trial + 1}"
            shares[name] = (_study, *place, studies, case)
            sizes[name] = sum(len(study.variants) for study in studies)
    if compares:
        for name, groups in _groups(plan).items():
            shares[name] = (_compare, *place, groups)
            sizes[name] = len(groups) * len(plan.systems)
    report(f"{len(shares)} shares on Ray", 0)
    for name, _ in cluster.run(_share, shares, say=say, **_room(plan)):
        report(name, sizes[name])


def _room(plan: Plan) -> dict[str, Any]:
    """What a worker needs: cells are timed, and have the cores to themselves."""
    return {"cores": plan.threads or cores(), "gpus": int(plan.device == "cuda")}


def _groups(plan: Plan) -> dict[str, list[Group]]:
    """The problems of each share: one, or all trials where the first tells the memory of all."""
    found: dict[str, list[Group]] = {}
    for family, n, trial in plan.groups():
        name = f"{family} n={n}" + ("" if plan.memory else f" trial {trial + 1}")
        found.setdefault(name, []).append((family, n, trial))
    return found


# what workers do


def _describe(plan: Plan) -> dict[str, Any]:
    with _held(plan):
        return describe(plan.device)


def _share(run: Callable[..., None], plan: Plan, folder: Path, *rest: Any) -> None:
    with _held(plan):
        store = Store(folder)
        store.join(identity_of(plan, describe(plan.device)))  # times of machines that are alike
        run(plan, store, *rest)


def _study(plan: Plan, store: Store, studies: Sequence[Study], case: Case) -> None:
    run_studies(plan, studies, store, _quietly, [case])


def _compare(plan: Plan, store: Store, groups: Sequence[Group]) -> None:
    run_plan(plan, store, _quietly, groups)


def _quietly(_text: str, _finished: int) -> None:
    """The bar belongs to another process."""


@contextmanager
def _held(plan: Plan) -> Iterator[None]:
    with claimed_cores(plan.threads), threads(plan.threads):
        yield
