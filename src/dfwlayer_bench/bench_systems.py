"""Systems by name: those every benchmark offers, and those that only a reproduction needs."""

from __future__ import annotations

from dfwlayer_bench.baselines import SYSTEMS, System
from dfwlayer_bench.bench_figure import Look, look_of
from dfwlayer_bench.reproduce_systems import PAPER_SYSTEMS

__all__ = ["find", "label_of", "look_of_system"]


def find(name: str) -> System:
    """The system of that name."""
    return SYSTEMS[name] if name in SYSTEMS else PAPER_SYSTEMS[name]


def label_of(name: str) -> str:
    """What tables and figures print for it; the name itself if nothing is known of it."""
    return find(name).label if name in {**SYSTEMS, **PAPER_SYSTEMS} else name


def look_of_system(name: str) -> Look:
    """A system looks the same in every figure, whichever others are in it."""
    names = [*SYSTEMS, *PAPER_SYSTEMS]
    return look_of(names.index(name) if name in names else len(names))
