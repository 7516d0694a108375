"""The layer over a ball of an ℓp norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dfwlayer.constraints import LpBall
from dfwlayer.deploy import DeployedBall
from dfwlayer.engines.projection import project, project_and_back
from dfwlayer.engines.seen import set_in_sight
from dfwlayer.layer.base import Layer, checked_x, projects, real
from dfwlayer.methods import Method
from dfwlayer.objectives import Quadratic
from dfwlayer.ops.recorded import recordable
from dfwlayer.ops.tracing import as_input
from dfwlayer.solution import Solution
from dfwlayer.solve import again, outline
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature

__all__ = ["DFWLayer"]


class DFWLayer(Layer):
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

    Examples:
        >>> layer = DFWLayer(p=1)
        >>> x = layer(None, torch.tensor([-3.0, 1.0]), radius=2.0)  # projects (3, −1)

    """

    _recorded = (*Layer._recorded, "p")

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
        super().__init__(
            method=method,
            differentiate=differentiate,
            tol=tol,
            max_steps=max_steps,
            step_size=step_size,
            temperature=temperature,
            verify=verify,
            on_failure=on_failure,
        )
        self.p = LpBall(p).p

    def forward(
        self,
        P: Tensor | None,  # (n, n), (*batch, n, n), or None for the identity
        q: Tensor,  # (n,) or (*batch, n)
        weight: Tensor | None = None,  # (n,) or (*batch, n), None for ones
        radius: float | Tensor = 1.0,  # number, () or (*batch)
        *,
        centre: Tensor | None = None,  # (n,) or (*batch, n), None for zero
    ) -> Tensor:
        """The solution, of q's shape (with a batch if another argument has one) and dtype."""
        return _ball(self._itself(), P, q, weight, as_input(radius, q), centre)

    @property
    def _projects(self) -> bool:
        """Whether without a P nothing but the exact projection onto an ℓ1 ball is asked for."""
        return self.p == 1 and projects(vars(self))

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
        ball = LpBall(self.p, radius, weight, centre=centre)
        return self._solved(Quadratic(P, q), ball, x0=x0)

    def _deployed(self, steps: int) -> nn.Module:
        return DeployedBall(self.p, steps)

    def extra_repr(self) -> str:
        """p, and the settings."""
        return f"p={self.p:g}, {super().extra_repr()}"


def _ball_shapes(layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any) -> Any:
    ball = LpBall(real(layer).p, radius, weight, centre=centre)
    return outline(Quadratic(P, q), ball)[:1]


def _ball_again(
    found: Any, layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any
) -> Any:
    own = real(layer)
    ball = LpBall(own.p, radius, weight, centre=centre)
    return again(found, Quadratic(P, q), ball, **own._options())


def _ball_direct(layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any) -> Any:
    own = real(layer)
    if P is not None or centre is not None or not own._projects:
        return None
    return project_and_back(q, weight, radius, own.verify)


def _ball_seen(layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any) -> Any:
    own = layer.own  # while a graph is made, of which this is a part
    if P is not None or centre is not None or not projects(own):
        return None
    seen = set_in_sight(LpBall(own["p"], radius, weight), q)
    return None if seen is None else (seen[0], seen[1] if own["verify"] else None)


@recordable(shapes=_ball_shapes, again=_ball_again, direct=_ball_direct, seen=_ball_seen)
def _ball(
    layer: Any,
    P: Tensor | None,
    q: Tensor,
    weight: Tensor | None,
    radius: float | Tensor,
    centre: Tensor | None,
) -> Tensor:
    """The solution, by the shortest way."""
    own = real(layer)
    if P is None and centre is None and own._projects:
        x = project(q, weight, radius, own.verify)
        if x is not None:
            return x
    return checked_x(own, own.solve(P, q, weight, radius, centre=centre))
