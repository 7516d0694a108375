"""What ``dfw bench --suite lasso`` does."""

from __future__ import annotations

from dfwlayer_bench.bench.plan import Asked

__all__ = ["bench_lasso"]


def bench_lasso(asked: Asked) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from dfwlayer_bench.bench.lasso.problems import PROBLEMS, QUICK
    from dfwlayer_bench.bench.lasso.report import TABLES
    from dfwlayer_bench.bench.lasso.run import ready
    from dfwlayer_bench.bench.suite import take_named

    return take_named(asked, TABLES, PROBLEMS, QUICK, ready)
