"""The systems compared, one file a rival; a name in ``SYSTEMS`` is what ``--systems`` accepts."""

from __future__ import annotations

from dfwlayer_bench.baselines import (
    altdiff_peer,
    cvxpylayers_peer,
    floor,
    jaxopt_peer,
    optnet_peer,
    ours,
    qplayer,
)
from dfwlayer_bench.baselines.base import Answer, Ready, Result, System, run
from dfwlayer_bench.baselines.reference import Reference, solve_reference

__all__ = [
    "FLOOR",
    "SYSTEMS",
    "Answer",
    "Ready",
    "Reference",
    "Result",
    "System",
    "run",
    "solve_reference",
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
        System("alt-diff", "Alt-Diff", altdiff_peer.prepare_jacobian, devices=_BOTH),
        System(
            "alt-diff-reverse",
            "Alt-Diff, reverse mode",
            altdiff_peer.prepare_reverse,
            devices=_BOTH,
        ),
        System("optnet", "OptNet", optnet_peer.prepare_optnet, devices=_BOTH),
        System("jaxopt", "jaxopt", jaxopt_peer.prepare_jaxopt, ("jaxopt", "jax")),
        System("qplayer", "QPLayer (proxsuite)", qplayer.prepare_qplayer, ("proxsuite",)),
        System("diffcp", "cvxpylayers, DIFFCP", cvxpylayers_peer.prepare_diffcp, _CVXPY),
        System(
            "diffcp-lsmr",
            "cvxpylayers, DIFFCP, LSMR",
            cvxpylayers_peer.prepare_diffcp_lsmr,
            _CVXPY,
        ),
        System(
            "moreau",
            "cvxpylayers, Moreau",
            cvxpylayers_peer.prepare_moreau,
            ("cvxpylayers", "cvxpy", "moreau"),
            devices=_BOTH,
        ),
    )
}
