"""The layer: settings in the constructor, problems in forward."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any, NoReturn

from torch import Tensor, nn

from dfwlayer.arguments import shown
from dfwlayer.constraints import LpBall
from dfwlayer.differentiate.transforms import unwrapped
from dfwlayer.engines.projection import project
from dfwlayer.methods import Method
from dfwlayer.objectives import Quadratic
from dfwlayer.ops.tracing import refuse_recording, uncompiled
from dfwlayer.solution import FAILURES, Solution, SolveError, Status
from dfwlayer.solve import check_settings, solve
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature

__all__ = ["DFWLayer"]

ON_FAILURE = ("ignore", "warn", "raise")
# the settings of `solve` that a layer keeps, and their defaults
DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(solve).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("x0", "shape", "callback")
}
OPTIONS = tuple(DEFAULTS)


class DFWLayer(nn.Module):
    """x*(P, q, w, t) = argmin ½ xᵀPx + qᵀx subject to ‖w ∘ x‖_p ≤ t, as a layer.

    With a ``centre`` c the constraint is ‖w ∘ (x − c)‖_p ≤ t. The layer has no parameters of its
    own: P, q, the weights, the radius and the centre come from other layers or are parameters of
    yours, and each of them receives its gradient. The arguments are those of `dfwlayer.solve`.

    Args:
        p: Of the norm, any number in [1, ∞].
        method: See `dfwlayer.solve`, as for all that is not said here.
        differentiate: "implicit", "unroll" or "auto".
        tol: On the relative gap.
        max_steps: Most steps.
        step_size: A rule such as ``ShortStep()``.
        temperature: Of the method "dfw".
        verify: Whether to read the values of tensors to check them.
        on_failure: What a call of the layer does about problems that were not solved, those with
            a status other than CONVERGED and ROUNDING_FLOOR: "warn" (once in the life of the
            layer), "raise" a `SolveError`, or "ignore". Its method ``solve``, which returns the
            statuses, never does anything.

    Example:
        >>> layer = DFWLayer(p=1)
        >>> x = layer(None, torch.tensor([-3.0, 1.0]), radius=2.0)  # projects (3, −1)

    """

    method: str | Method
    differentiate: str
    max_steps: int
    verify: bool

    def __init__(
        self,
        p: float = 1.0,
        *,
        method: str | Method = "auto",
        differentiate: str = "auto",
        tol: float = 1e-5,
        max_steps: int = 1000,
        step_size: StepSize | None = None,
        temperature: float | Temperature | None = None,
        verify: bool = True,
        on_failure: str = "warn",
    ) -> None:
        super().__init__()
        options = {
            "method": method,
            "differentiate": differentiate,
            "tol": tol,
            "max_steps": max_steps,
            "step_size": step_size,
            "temperature": temperature,
            "verify": verify,
        }
        settings = check_settings(**options)  # type: ignore[arg-type]
        if not isinstance(on_failure, str) or on_failure not in ON_FAILURE:
            raise ValueError(
                f"on_failure: expected one of {list(ON_FAILURE)}, got {shown(on_failure)}"
            )
        self.p = LpBall(p).p
        # numbers as Python's own
        plain = {"tol": settings.tol, "max_steps": settings.max_steps, "verify": settings.verify}
        for name, value in (options | plain).items():
            setattr(self, name, value)
        self.on_failure = on_failure
        self._warned = [False]  # in a list, as the replicas of DataParallel share it with the layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy warns for itself."""
        own = {"on_failure": "warn"} | state | {"_warned": [False]}
        super().__setstate__(own)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script."""
        refuse_recording("torch.jit.script")

    def forward(
        self,
        P: Tensor | None,  # (n, n), (B, n, n), or None for the identity
        q: Tensor,  # (n,) or (B, n)
        weight: Tensor | None = None,  # (n,) or (B, n), None for ones
        radius: float | Tensor = 1.0,  # number, () or (B,)
        *,
        centre: Tensor | None = None,  # (n,) or (B, n), None for zero
    ) -> Tensor:
        """The solution, of q's shape (with a batch if another argument has one) and dtype."""
        return _solution(self, P, q, weight, radius, centre)

    @property
    def _projects(self) -> bool:
        """Whether without a P nothing but the exact projection is asked for."""
        named = isinstance(self.method, str) and self.method in ("auto", "projected-newton")
        exact = named and self.differentiate != "unroll"
        return self.p == 1 and exact and self.max_steps > 0

    def solve(
        self,
        P: Tensor | None,
        q: Tensor,
        weight: Tensor | None = None,
        radius: float | Tensor = 1.0,
        *,
        x0: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        return solve(
            Quadratic(P, q),
            LpBall(self.p, radius, weight, centre=centre),
            x0=x0,
            **{name: getattr(self, name) for name in OPTIONS},
        )

    def extra_repr(self) -> str:
        """The settings, leaving out what has its default."""
        always = ("method", "differentiate", "tol", "max_steps")
        shown = [f"p={self.p:g}"]
        for name, default in (DEFAULTS | {"on_failure": "warn"}).items():
            value = getattr(self, name)
            if name in always or value != default:
                shown.append(f"{name}={value:g}" if name == "tol" else f"{name}={value!r}")
        return ", ".join(shown)

    def _check(self, solution: Solution) -> None:
        """Do what is to be done about problems that were not solved."""
        if self.on_failure == "ignore" or (self.on_failure == "warn" and self._warned[0]):
            return
        counts = _failures(solution.status)
        if not counts:
            return
        total = unwrapped(solution.status).numel()
        told = "; ".join(f"{count} {s}: {s.message}" for s, count in counts.items())
        message = (
            f"{sum(counts.values())} of {total} problems were not solved ({told}). DFWLayer.solve "
            "returns the statuses"
        )
        if self.on_failure == "raise":
            raise SolveError(message, solution)
        self._warned[0] = True
        warnings.warn(
            f"{message}; this is said once for each layer, DFWLayer(..., on_failure='raise') "
            "makes it an error and on_failure='ignore' silences it",
            RuntimeWarning,
            stacklevel=2,
        )


@uncompiled
def _solution(
    layer: DFWLayer,
    P: Tensor | None,
    q: Tensor,
    weight: Tensor | None,
    radius: float | Tensor,
    centre: Tensor | None,
) -> Tensor:
    """The solution, by the shortest way; the compiler leaves all of it alone."""
    if P is None and centre is None and layer._projects:
        x = project(q, weight, radius, layer.verify)
        if x is not None:
            return x
    solution = layer.solve(P, q, weight, radius, centre=centre)
    layer._check(solution)
    return solution.x


def _failures(status: Tensor) -> dict[Status, int]:
    """How many problems failed in which way; a GPU is waited for."""
    codes = unwrapped(status).reshape(-1).cpu()
    if not bool(codes.any()):  # all have converged
        return {}
    # one by one: PyTorch 2.6 cannot make a list inside of torch.func.grad
    counts = {s: int((codes == s).sum()) for s in FAILURES}
    return {s: count for s, count in counts.items() if count}
