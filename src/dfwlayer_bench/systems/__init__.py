"""The systems compared, one file a rival and one signature for all.

A name in ``SYSTEMS`` is what ``dfw bench --systems`` accepts; ``PAPER_SYSTEMS`` are rivals as the
paper ran them, which only a reproduction needs.
"""

from __future__ import annotations

from dfwlayer_bench.systems import (
    altdiff,
    altdiff_paper,
    cvxpylayers,
    dc3,
    floor,
    jaxopt,
    lifted,
    optnet,
    ours,
    qplayer,
)
from dfwlayer_bench.systems.base import Answer, Ready, Result, System, run

__all__ = [
    "FLOOR",
    "PAPER_SYSTEMS",
    "SYSTEMS",
    "Answer",
    "Ready",
    "Result",
    "System",
    "find",
    "label_of",
    "run",
]

FLOOR = "floor"
_BOTH = ("cpu", "cuda")
_CVXPY = ("cvxpylayers", "cvxpy", "diffcp")

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(FLOOR, "floor: 2 CG solves", floor.prepare_floor, devices=_BOTH, solves=False),
        System("dfwlayer", "dfwlayer (auto)", ours.prepare_default, devices=_BOTH),
        System("dfw", "DFW as published", ours.prepare_published, devices=_BOTH),
        System("alt-diff", "Alt-Diff", altdiff.prepare_jacobian, devices=_BOTH),
        System(
            "alt-diff-reverse",
            "Alt-Diff, reverse mode",
            altdiff.prepare_reverse,
            devices=_BOTH,
        ),
        System("optnet", "OptNet", optnet.prepare_optnet, devices=_BOTH),
        System("dc3", "DC3", dc3.prepare_dc3, devices=_BOTH),
        System("jaxopt", "jaxopt", jaxopt.prepare_jaxopt, ("jaxopt", "jax")),
        System("qplayer", "QPLayer (proxsuite)", qplayer.prepare_qplayer, ("proxsuite",)),
        System("qpax", "qpax", lifted.prepare_qpax, ("qpax", "jax")),
        System("dqp", "dQP over PIQP", lifted.prepare_dqp, ("libdqp", "qpsolvers", "piqp")),
        System("diffcp", "cvxpylayers, DIFFCP", cvxpylayers.prepare_diffcp, _CVXPY),
        System(
            "diffcp-lsmr",
            "cvxpylayers, DIFFCP, LSMR",
            cvxpylayers.prepare_diffcp_lsmr,
            _CVXPY,
        ),
        System(
            "moreau",
            "cvxpylayers, Moreau",
            cvxpylayers.prepare_moreau,
            ("cvxpylayers", "cvxpy", "moreau"),
            devices=_BOTH,
        ),
        System("moreau-own", "Moreau, its own API", lifted.prepare_moreau, ("moreau",)),
    )
}

PAPER_SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "alt-diff-paper",
            "Alt-Diff, stopped as in the paper",
            altdiff_paper.prepare_alt_diff,
            devices=_BOTH,
        ),
    )
}


def find(name: str) -> System:
    """The system of that name."""
    return SYSTEMS[name] if name in SYSTEMS else PAPER_SYSTEMS[name]


def label_of(name: str) -> str:
    """What tables and figures print for it; the name itself if nothing is known of it."""
    return find(name).label if name in {**SYSTEMS, **PAPER_SYSTEMS} else name
