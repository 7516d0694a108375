"""The temperature study: solution and gradient along the iterations, annealed and constant."""

from __future__ import annotations

from functools import partial

from dfwlayer import Anneal, Constant
from dfwlayer.temperature import Temperature
from dfwlayer_bench.reproduce.paper import STAGES
from dfwlayer_bench.reproduce.studies.base import Case, Study, Values, Variant
from dfwlayer_bench.reproduce.studies.trajectory import follow, marks

__all__ = ["ANNEALED", "temperature_study"]

ANNEALED = "annealed"


def temperature_study(steps: int) -> Study:
    """τ = 2^(−⌊k/30⌋) against the constants of the paper, over so many steps."""
    variants = [_variant(ANNEALED, "annealed", Anneal(), steps)]
    variants += [_variant(f"{tau:g}", f"τ = {tau:g}", Constant(tau), steps) for tau in STAGES]
    return Study("temperature", tuple(variants))


def _variant(name: str, label: str, schedule: Temperature, steps: int) -> Variant:
    settings = {"temperature": str(schedule), "steps": steps}
    return Variant(name, label, settings, partial(_along, schedule, steps))


def _along(schedule: Temperature, steps: int, case: Case) -> Values:
    trajectory = follow(case.problem, steps, temperature=schedule)
    at = marks(steps)
    found = [trajectory.at(k, case.reference) for k in at]
    return {
        "step": at,
        "distance": [values["distance"] for values in found],
        "error": [values["error"] for values in found],
        "cosine": [values["cosine"] for values in found],
        "stop": trajectory.stop,
        "norm": float(case.reference.x.norm()),
    }
