"""What ``dfw bench --suite lasso`` does."""

from __future__ import annotations

from dfwlayer_bench.bench.plan import Asked
from dfwlayer_bench.options import check_names, split

__all__ = ["bench_lasso"]

REPEATS, QUICK_REPEATS, THREADS = 7, 2, 2


def bench_lasso(asked: Asked, *, problems: list[str] | None) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from dfwlayer_bench.bench.lasso.problems import PROBLEMS, QUICK
    from dfwlayer_bench.bench.lasso.report import TABLES
    from dfwlayer_bench.bench.lasso.run import LassoPlan, ready
    from dfwlayer_bench.bench.lasso.systems import SYSTEMS
    from dfwlayer_bench.bench.suite import take_turns

    chosen, own = split(problems), split(asked.systems)
    full = tuple(name for name in PROBLEMS if name not in QUICK)
    if chosen == ["all"]:
        chosen = list(full)
    check_names("--family", chosen, PROBLEMS)
    check_names("--systems", own, SYSTEMS)
    plan = LassoPlan(
        problems=tuple(chosen) or (QUICK if asked.quick else full),
        systems=tuple(own) or tuple(SYSTEMS),
        repeats=asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS),
        seed=asked.seed,
        threads=asked.threads or THREADS,
    )
    words = ["--family", *plan.problems]
    return take_turns(asked, TABLES, plan, words, lambda cell: ready(plan.seed, cell))
