"""What ``dfw bench --suite small`` does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

from dfwlayer_bench.bench.plan import Asked
from dfwlayer_bench.options import check_names, split

__all__ = ["bench_small"]

SIZES = ((1, 10), (1, 100), (64, 10), (128, 10), (128, 50))
REPEATS, THREADS = 30, 2
QUICK_SETS, QUICK_SIZES, QUICK_REPEATS = ("l1", "box"), ((1, 10), (8, 10)), 2


def bench_small(asked: Asked) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from dfwlayer_bench.bench.small.problems import SETS
    from dfwlayer_bench.bench.small.report import TABLES
    from dfwlayer_bench.bench.small.run import SmallPlan, ready
    from dfwlayer_bench.bench.small.systems import SYSTEMS
    from dfwlayer_bench.bench.suite import take_turns

    chosen_sets, chosen = split(asked.family), split(asked.systems)
    if chosen_sets == ["all"]:
        chosen_sets = list(SETS)
    check_names("--family", chosen_sets, SETS)
    check_names("--systems", chosen, SYSTEMS)
    plan = SmallPlan(
        sets=tuple(chosen_sets) or (QUICK_SETS if asked.quick else tuple(SETS)),
        sizes=_check_sizes(split(asked.sizes)) or (QUICK_SIZES if asked.quick else SIZES),
        systems=tuple(chosen) or tuple(SYSTEMS),
        repeats=asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS),
        seed=asked.seed,
        threads=asked.threads or THREADS,
        clock=asked.clock,
    )
    words = ["--sizes", *(f"{count}x{n}" for count, n in plan.sizes), "--family", *plan.sets]
    return take_turns(asked, TABLES, plan, words, lambda cell: ready(plan.seed, cell))


def _check_sizes(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Sizes such as 64x10, or an error that names the option."""
    found = [re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", size) for size in texts]
    if not all(found):
        raise typer.BadParameter(
            f"--sizes: expected problems x variables such as 1x10 64x10, got {list(texts)}"
        )
    return tuple((int(match[1]), int(match[2])) for match in found if match)
