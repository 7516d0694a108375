"""The layer: settings in the constructor, problems in forward."""

from __future__ import annotations

from torch import Tensor, nn

from dfwlayer.constraints import LpBall
from dfwlayer.methods import Method
from dfwlayer.objectives import Quadratic
from dfwlayer.projection import project
from dfwlayer.solution import Solution
from dfwlayer.solve import check_settings, solve
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature

__all__ = ["DFWLayer"]


class DFWLayer(nn.Module):
    """x*(P, q, w, t) = argmin ½ xᵀPx + qᵀx subject to ‖w ∘ x‖_p ≤ t, as a layer.

    With a ``centre`` c the constraint is ‖w ∘ (x − c)‖_p ≤ t. The layer has no parameters of its
    own: P, q, the weights, the radius and the centre come from other layers or are parameters of
    yours, and each of them receives its gradient. The arguments are those of `dfwlayer.solve`.

    Example:
        >>> layer = DFWLayer(p=1)
        >>> x = layer(None, torch.tensor([-3.0, 1.0]), radius=2.0)  # projects (3, −1)

    """

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
    ) -> None:
        super().__init__()
        check_settings(method, differentiate, tol, max_steps, step_size, temperature)
        self.p = LpBall(p).p
        self.method = method
        self.differentiate = differentiate
        self.tol = tol
        self.max_steps = max_steps
        self.step_size = step_size
        self.temperature = temperature
        self.verify = verify

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
        if P is None and centre is None and self._projects:
            x = project(q, weight, radius, self.verify)
            if x is not None:
                return x
        return self.solve(P, q, weight, radius, centre=centre).x

    @property
    def _projects(self) -> bool:
        """Whether without a P nothing but the exact projection is asked for."""
        exact = self.method in ("auto", "projected-newton") and self.differentiate != "unroll"
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
            method=self.method,
            differentiate=self.differentiate,
            tol=self.tol,
            max_steps=self.max_steps,
            step_size=self.step_size,
            temperature=self.temperature,
            verify=self.verify,
        )

    def extra_repr(self) -> str:
        """The settings, leaving out what has its default."""
        parts = [
            f"p={self.p:g}",
            f"method={self.method!r}",
            f"differentiate={self.differentiate!r}",
            f"tol={self.tol:g}",
            f"max_steps={self.max_steps}",
        ]
        if self.step_size is not None:
            parts.append(f"step_size={self.step_size!r}")
        if self.temperature is not None:
            parts.append(f"temperature={self.temperature!r}")
        if not self.verify:
            parts.append("verify=False")
        return ", ".join(parts)
