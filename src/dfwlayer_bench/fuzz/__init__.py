"""Fuzzing: random problems against promises, by formulas that are not the library's.

sets           balls, polyhedra, composed: parameters, constraints, vertices, designed solutions
objectives     values and gradients in long double
problems       which batch has which set, objective, method, dtype, units and tightness
checks         feasible, certified, and the same alone, beside a NaN, in other units
gradients      against differences of roots of the optimality conditions
grammar        calls with bad arguments
soak           many calls and the memory of the process
run, report    tasks over processes, the state on disk, the summary
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfwlayer_bench.fuzz.checks import Failure, judge, reproducer
    from dfwlayer_bench.fuzz.gradients import draw_gradient, gradient_reproducer, judge_gradient
    from dfwlayer_bench.fuzz.grammar import draw_call, judge_call
    from dfwlayer_bench.fuzz.problems import Problem, draw_problem

__all__ = [
    "Failure",
    "Problem",
    "draw_call",
    "draw_gradient",
    "draw_problem",
    "gradient_reproducer",
    "judge",
    "judge_call",
    "judge_gradient",
    "reproducer",
]

_HOMES = {
    "checks": ("Failure", "judge", "reproducer"),
    "gradients": ("draw_gradient", "gradient_reproducer", "judge_gradient"),
    "grammar": ("draw_call", "judge_call"),
    "problems": ("Problem", "draw_problem"),
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: `dfw --help` imports this package, and torch takes its time."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
