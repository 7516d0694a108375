"""The cosine study: what of the published set-up decides how good the unrolled gradient is.

The accuracy table has the paper's distances, but not its cosine. What differs between a run here
and the authors' public script is changed one at a time, and then together:

- L by a random power iteration that ends when two Rayleigh quotients differ by less than 0.01, or
  after 100 products: these grow, so that L is too small
- weights shifted by 1e-8
- the temperature halved before the 30th, 60th, … step, one step sooner than in 2^(−⌊k/30⌋)
- float32, or float64

Further variants move what the outcome may hang on: L itself, the tolerance, the period T, the least
temperature, and the number of steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dfwlayer import Anneal, Quadratic, ShortStep
from dfwlayer_bench.problems.families import Instance, make
from dfwlayer_bench.reproduce.studies.base import Case, Study, Values, Variant
from dfwlayer_bench.reproduce.studies.trajectory import PAPER_TOL, follow

__all__ = ["AUTHORS", "HERE", "SENSITIVE", "Setup", "cosine_study", "power_iteration"]

HERE, AUTHORS = "here", "authors"


@dataclass(frozen=True)
class Setup:
    """How the published method is run; the defaults are those of the accuracy table.

    Attributes:
        lipschitz: "bound" for the library's certified one, "power" for the authors' estimate, or
            a factor of the largest eigenvalue.
        shift: Added to the weights.
        early: Steps by which every change of the temperature comes sooner.
        period: T of τ = 2^(−⌊k/T⌋).
        least: The temperature is not lowered below this.
        dtype: Precision of the run; None for that of the study.
        tol: Of the published stopping rule.
        cap: Most steps; None for those of the study.

    """

    lipschitz: str | float = "bound"
    shift: float = 0.0
    early: int = 0
    period: int = 30
    least: float = 0.0
    dtype: str | None = None
    tol: float = PAPER_TOL
    cap: int | None = None

    def temperature(self, step: int) -> float:
        """τ of step 0, 1, …"""
        return max(Anneal(period=self.period)(step + self.early), self.least)


SETUPS: dict[str, tuple[str, Setup]] = {
    HERE: ("as in the accuracy table", Setup()),
    "power": ("L by power iteration", Setup(lipschitz="power")),
    "shift": ("weights + 1e-8", Setup(shift=1e-8)),
    "early": ("τ halved one step sooner", Setup(early=1)),
    "float64": ("float64", Setup(dtype="float64")),
    AUTHORS: ("the authors' combination", Setup("power", shift=1e-8, early=1, dtype="float32")),
    "eigenvalue": ("L the largest eigenvalue", Setup(lipschitz=1.0)),
    "lower": ("L 1 % below it", Setup(lipschitz=0.99)),
    "higher": ("L 1 % above it", Setup(lipschitz=1.01)),
    "tol-2e-4": ("tolerance 2e-4", Setup(tol=2e-4)),
    "T40": ("T = 40", Setup(period=40)),
    "T50": ("T = 50", Setup(period=50)),
    "least-0.125": ("τ at least 1/8", Setup(least=0.125)),
    "cap-120": ("at most 120 steps", Setup(cap=120)),
}
SENSITIVE = ("eigenvalue", "lower", "higher", "power")  # that differ in L alone


def cosine_study(steps: int) -> Study:
    """All of them, each stopped by the published rule or after so many steps."""
    return Study("cosine", tuple(_variant(name, steps) for name in SETUPS))


def _variant(name: str, steps: int) -> Variant:
    label, setup = SETUPS[name]
    settings: dict[str, Any] = {**asdict(setup), "steps": steps}
    return Variant(name, label, settings, partial(_stopped, setup, steps))


def _stopped(setup: Setup, steps: int, case: Case) -> Values:
    dtype = case.problem.dtype if setup.dtype is None else getattr(torch, setup.dtype)
    problem = case.problem.to(dtype, case.device)
    problem = replace(problem, w=problem.w + setup.shift)
    rule, size = _short_step(setup.lipschitz, problem, case)
    most = min(steps, setup.cap or steps)
    trajectory = follow(problem, most, temperature=setup.temperature, step_size=rule)
    stop = trajectory.stop_at(setup.tol)
    found = trajectory.at(stop, case.reference)
    return {
        "steps": stop,
        "temperature": setup.temperature(stop - 1),
        "lipschitz": size,
        "distance": found["distance"],
        "cosine": found["cosine"],
        "length": found["length"],
    }


def _short_step(lipschitz: str | float, problem: Instance, case: Case) -> tuple[ShortStep, float]:
    """The rule, and its L as a share of the largest eigenvalue."""
    largest = _largest(case)
    if isinstance(lipschitz, float):
        return ShortStep(lipschitz * largest), lipschitz
    if lipschitz == "bound":
        rule = ShortStep().start(Quadratic(problem.P, problem.q), torch.zeros_like(problem.q))
        return ShortStep(), float(rule.lipschitz) / largest
    found = power_iteration(problem.P, _following(problem))
    return ShortStep(found), found / largest


@lru_cache(maxsize=4)
def _largest(case: Case) -> float:
    return float(torch.linalg.eigvalsh(case.exact.P)[-1])


def _following(problem: Instance) -> Tensor:
    """The n normal numbers that come after the problem's own in the same generator.

    The authors' script draws there, too. They are the functional that `make` would have drawn.
    """
    return make(problem.family, problem.n, problem.seed, functional="random").v


def power_iteration(P: Tensor, start: Tensor, tol: float = 1e-2, most: int = 100) -> float:
    """The Rayleigh quotient ⟨x, Px⟩ of x ← Px/‖Px‖, until it changes by less than tol.

    It is never above the largest eigenvalue, and short of it where the next one is near.
    """
    x = start.to("cpu", torch.float64)
    matrix = P.to("cpu", torch.float64)
    before = 0.0
    for _ in range(most):
        x = matrix @ x
        x = x / x.norm()
        found = float(x @ (matrix @ x))
        if abs(found - before) < tol:
            break
        before = found
    return found
