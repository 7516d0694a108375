"""What ``dfw bench --suite layers`` does."""

from __future__ import annotations

from dfwlayer_bench.bench.plan import Asked

__all__ = ["bench_layers"]


def bench_layers(asked: Asked) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from dfwlayer_bench.bench.layers.problems import PROBLEMS, QUICK
    from dfwlayer_bench.bench.layers.report import TABLES
    from dfwlayer_bench.bench.layers.run import ready
    from dfwlayer_bench.bench.suite import take_named

    return take_named(asked, TABLES, PROBLEMS, QUICK, ready)
