"""Systems by name: those every benchmark offers, and those that only a reproduction needs."""

from __future__ import annotations

from dfwlayer_bench.baselines import SYSTEMS, System
from dfwlayer_bench.reproduce_systems import PAPER_SYSTEMS

__all__ = ["find", "label_of"]


def find(name: str) -> System:
    """The system of that name."""
    return SYSTEMS[name] if name in SYSTEMS else PAPER_SYSTEMS[name]


def label_of(name: str) -> str:
    """What tables and figures print for it; the name itself if nothing is known of it."""
    known = name in SYSTEMS or name in PAPER_SYSTEMS
    return find(name).label if known else name
