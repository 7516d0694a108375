"""What all layers have in common, and what a compiler keeps of one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from dfwlayer.arguments import as_integer, shown
from dfwlayer.constraints.base import Constraint
from dfwlayer.methods import Method
from dfwlayer.methods.settings import check_settings, check_wish
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.said import warn
from dfwlayer.ops.tensors import unwrapped
from dfwlayer.ops.tracing import recording, refuse_recording
from dfwlayer.solution import FAILURES, Solution, SolveError, Status
from dfwlayer.solve import solve

__all__ = ["Layer", "checked_x", "projects", "real"]

ON_FAILURE = ("ignore", "warn", "raise")
# the settings of `solve` that a layer keeps, and their defaults
DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(solve).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("x0", "shape", "callback")
}
OPTIONS = tuple(DEFAULTS)


class Layer(nn.Module):
    """What all layers have in common: the settings of `solve`, and what to do about failures."""

    method: str | Method
    differentiate: str
    max_steps: int
    verify: bool

    _recorded: ClassVar = (*OPTIONS, "on_failure")  # what is kept of it in a recording

    def __init__(self, *, on_failure: str = "warn", **settings: Any) -> None:
        super().__init__()
        options = DEFAULTS | settings
        check_wish(options["on_infeasible"])
        found = check_settings(**{k: v for k, v in options.items() if k != "on_infeasible"})
        if not isinstance(on_failure, str) or on_failure not in ON_FAILURE:
            raise ValueError(
                f"on_failure: expected one of {list(ON_FAILURE)}, got {shown(on_failure)}"
            )
        # numbers as Python's own
        plain = {"tol": found.tol, "max_steps": found.max_steps, "verify": found.verify}
        for name, value in (options | plain).items():
            setattr(self, name, value)
        self.on_failure = on_failure
        self._warned = [False]  # in a list, as the replicas of DataParallel share it with the layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy warns for itself."""
        own = {"on_failure": "warn", "on_infeasible": "nan"} | state | {"_warned": [False]}
        super().__setstate__(own)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script."""
        refuse_recording("torch.jit.script")

    def extra_repr(self) -> str:
        """The settings, leaving out what has its default."""
        always = ("method", "differentiate", "tol", "max_steps")
        shown = []
        for name, default in (DEFAULTS | {"on_failure": "warn"}).items():
            value = getattr(self, name)
            if name in always or value != default:
                shown.append(f"{name}={value:g}" if name == "tol" else f"{name}={value!r}")
        return ", ".join(shown)

    def deploy(self, *, max_steps: int = 50, **constants: Tensor | None) -> nn.Module:
        """The layer as plain tensor operations with so many steps, for torch.export, AOTInductor
        and ONNX: see `dfwlayer.deploy`.

        What it answers is feasible whatever ``max_steps``, and exact without steps where the set
        has a formula. A QPLayer takes its ``Q``, ``G``, ``h``, ``A`` and ``b`` here.
        """
        return self._deployed(as_integer("max_steps", max_steps, 1), **constants)

    @abstractmethod
    def _deployed(self, steps: int) -> nn.Module: ...

    def _solved(self, objective: Objective, constraint: Constraint, **more: Any) -> Solution:
        """By the settings of the layer."""
        return solve(objective, constraint, **more, **self._options())

    def _options(self) -> dict[str, Any]:
        """The settings of `solve`."""
        return {name: getattr(self, name) for name in OPTIONS}

    def _itself(self) -> Any:
        """The layer, or what is recorded of it."""
        if not recording():
            return self
        return Recorded(type(self), {name: getattr(self, name) for name in self._recorded})

    def _check(self, solution: Solution) -> None:
        """Do what is to be done about problems that were not solved."""
        if solution._sound or self.on_failure == "ignore":
            return
        if self.on_failure == "warn" and self._warned[0]:
            return
        counts = _failures(solution.status)
        if not counts:
            return
        total, kind = unwrapped(solution.status).numel(), type(self).__name__
        told = "; ".join(f"{count} {s}: {s.message}" for s, count in counts.items())
        message = (
            f"{sum(counts.values())} of {total} problems were not solved ({told}). {kind}.solve "
            "returns the statuses"
        )
        if self.on_failure == "raise":
            raise SolveError(message, solution)
        self._warned[0] = True
        warn(
            f"{message}; this is said once for each layer, {kind}(..., on_failure='raise') "
            "makes it an error and on_failure='ignore' silences it",
            RuntimeWarning,
        )


@dataclass(frozen=True)
class Recorded:
    """A layer as it is recorded: what it is, without the tensors it may hold."""

    kind: type[Layer]
    own: dict[str, Any]

    @cached_property
    def layer(self) -> Any:
        """One like it, that warns for itself."""
        made = object.__new__(self.kind)
        own = {"constraint": None, "shape": None} | self.own
        nn.Module.__init__(made)
        vars(made).update(own, _warned=[False])
        return made


def checked_x(layer: Layer, solution: Solution) -> Tensor:
    """x, after what is to be done about problems that were not solved."""
    layer._check(solution)
    return solution.x


def projects(own: dict[str, Any]) -> bool:
    """Whether a layer with these settings only projects where there is no P."""
    method = own["method"]
    named = isinstance(method, str) and method in ("auto", "projected-newton")
    if not named or own["differentiate"] == "unroll":
        return False
    steps: int = own["max_steps"]
    return steps > 0


def real(layer: Any) -> Any:
    """The layer, also where that is what was recorded of it."""
    return layer.layer if isinstance(layer, Recorded) else layer


def _failures(status: Tensor) -> dict[Status, int]:
    """How many problems failed in which way; a GPU is waited for."""
    codes = unwrapped(status).reshape(-1).cpu()
    if not bool(codes.any()):  # all have converged
        return {}
    # one by one: PyTorch 2.6 cannot make a list inside of torch.func.grad
    counts = {s: int((codes == s).sum()) for s in FAILURES}
    return {s: count for s, count in counts.items() if count}
