"""The settings of a call, checked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dfwlayer.arguments import as_flag, as_integer, as_number, shown
from dfwlayer.methods import METHODS
from dfwlayer.methods.base import Callback, Method, Settings
from dfwlayer.ops.tensors import PLAIN
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature, as_temperature

__all__ = ["MODES", "check_settings", "check_wish", "settings_of"]

MODES = ("implicit", "unroll")
Given = tuple[Any, Any, Any, Any, Any, Any, Any, Any]  # those of `check_settings`


def settings_of(given: Given, preferred: str) -> Settings:
    """The settings; those of plain values are checked once, as most calls come in a loop."""
    if PLAIN.issuperset(map(type, given)):
        return _known_settings(*given, preferred)
    return check_settings(*given, preferred)


def check_wish(on_infeasible: str) -> None:
    """Raise ValueError for anything but what x may be where the set is empty."""
    if not isinstance(on_infeasible, str) or on_infeasible not in ("nan", "least-violation"):
        raise ValueError(
            f"on_infeasible: expected 'nan' or 'least-violation', got {shown(on_infeasible)}"
        )


def check_settings(
    method: str | Method,
    differentiate: str,
    tol: float,
    max_steps: int,
    step_size: StepSize | None,
    temperature: float | Temperature | None,
    verify: bool,
    callback: Callback | None = None,
    preferred: str = "auto",
) -> Settings:
    """Raise ValueError for settings that make no sense; ``preferred`` is what "auto" means."""
    if not isinstance(differentiate, str) or differentiate not in ("auto", *MODES):
        raise ValueError(
            f"differentiate: expected one of {['auto', *sorted(MODES)]}, got {shown(differentiate)}"
        )
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"method: expected one of {sorted(METHODS)}, got {method!r}")
        if method == "auto" and differentiate == "unroll":
            method = "dfw"  # the best method whose steps can be differentiated
        elif method == "auto":
            method = preferred
        method = METHODS[method]
    elif isinstance(method, type) or not hasattr(method, "run"):
        raise ValueError(
            f"method: expected a name or a method object such as FrankWolfe(), got {shown(method)}"
        )
    as_number("tol", tol, "a finite number ≥ 0", least=0)
    as_integer("max_steps", max_steps, 0)
    if step_size is not None and (isinstance(step_size, type) or not hasattr(step_size, "start")):
        raise ValueError(
            f"step_size: expected a rule such as ShortStep() or None, got {shown(step_size)}"
        )
    if differentiate == "auto":
        differentiate = method.modes[0]
    if differentiate not in method.modes:
        raise ValueError(
            f"differentiate: {type(method).__name__} offers {list(method.modes)}, got "
            f"{differentiate!r}; to differentiate through the steps use method 'dfw'"
        )
    schedule = as_temperature(temperature)
    flag = as_flag("verify", verify)
    if callback is not None and not callable(callback):
        raise ValueError(f"callback: expected a function or None, got {shown(callback)}")
    return Settings(
        method,
        differentiate,
        float(tol),
        int(max_steps),
        step_size,
        schedule,
        flag,
        callback=callback,
    )


_known_settings = lru_cache(maxsize=64, typed=True)(check_settings)
