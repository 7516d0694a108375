"""Last layers for a policy with a power limit, all called alike.

Each takes the actions a network wants, μ (B, n), the joints' velocities ω (B, n) and the limit,
and returns actions (B, n). All but ``none`` and ``radial`` look for the nearest action allowed,

    argmin ½‖x − μ‖²   subject to   Σ|ω_i x_i| ≤ limit

A coordinate only ever shrinks on the way there: where |μ_i| ≤ 1, so is |x_i|.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dfwlayer import DFWLayer
from dfwlayer_bench.baselines.altdiff import Solve, alternate
from dfwlayer_bench.baselines.optnet import OptNet
from dfwlayer_bench.report.machine import version
from dfwlayer_bench.systems.base import Setting, load
from dfwlayer_bench.systems.cvxpylayers import SCS

__all__ = ["LAYERS", "LastLayer", "Limit", "find_layer"]

Limit = Callable[[Tensor, Tensor, float], Tensor]  # μ (B, n), ω (B, n), limit -> x (B, n)
INSTALL = "pip install 'dfwlayer[bench]'"

# The published settings for robots. β = 0.1 multiplies the gradient, so the temperature is 10; the
# cap ends before it would be annealed.
PAPER: dict[str, Any] = {"method": "dfw", "max_steps": 10, "temperature": 10.0, "tol": 1e-4}
ANNEALED: dict[str, Any] = {"method": "dfw", "tol": 1e-4}
# a dense adjoint is exact at this size, and faster than the default, LSQR, which is not
CVXPY: dict[str, Setting] = {**SCS, "mode": "dense"}
# the penalty needs few rounds for both robots
ALT_DIFF: dict[str, Any] = {"rho": 0.5, "tol": 1e-5, "max_steps": 1000}


@dataclass(frozen=True)
class LastLayer:
    """One row of the registry.

    Attributes:
        name: What ``--layers`` accepts.
        label: What tables and figures print.
        build: Makes the layer.
        settings: How it is set, for the record.
        packages: Distributions it needs beside torch.
        slow: Whether a training step takes so much longer that fewer are asked of it by default.

    """

    name: str
    label: str
    build: Callable[[], Limit]
    settings: dict[str, Setting]
    packages: tuple[str, ...] = ()
    slow: bool = False

    def missing(self) -> str | None:
        """A sentence that names what has to be installed; None if the layer can run."""
        absent = [name for name in self.packages if version(name) is None]
        return f"{self.name} needs {', '.join(absent)}; {INSTALL}" if absent else None


class Unlimited:
    """μ itself."""

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        return wanted


class Radial:
    """μ, scaled back onto the limit: all joints lose the same share."""

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        power = (velocity * wanted).abs().sum(-1, keepdim=True)
        return wanted * (limit / power.clamp_min(limit))


class Projected:
    """By this library, with a method and its settings."""

    def __init__(self, **settings: Any) -> None:
        # how far each comes is measured, and a method may be given few steps on purpose
        self.layer = DFWLayer(p=1, on_failure="ignore", **settings)

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        nearest: Tensor = self.layer(None, -wanted, velocity, limit)
        return nearest


class ByCvxpyLayers:
    """By cvxpylayers, compiled once for a number of joints; its numbers are float64 inside."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[int, bool], Any] = {}

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        key = wanted.shape[-1], torch.is_grad_enabled() and wanted.requires_grad
        if key not in self.compiled:
            self.compiled[key] = self.compile(*key)
        radius = torch.tensor(limit, dtype=torch.float64)
        (found,) = self.compiled[key](wanted.double(), velocity.abs().double(), radius)
        actions: Tensor = found.to(wanted.dtype)
        return actions

    @staticmethod
    def compile(n: int, differentiate: bool) -> Any:
        """The canonical form of the problem."""
        cp, layers = load("cvxpy"), load("cvxpylayers.torch")
        x, wanted = cp.Variable(n), cp.Parameter(n)
        weight, radius = cp.Parameter(n, nonneg=True), cp.Parameter(nonneg=True)
        jobs = torch.get_num_threads()
        arguments = {**SCS, "n_jobs_forward": jobs}
        if differentiate:  # these it would hand on to SCS where there is nothing to differentiate
            arguments |= {**CVXPY, "n_jobs_backward": jobs}
        nearest = cp.Minimize(0.5 * cp.sum_squares(x - wanted))
        return layers.CvxpyLayer(
            cp.Problem(nearest, [cp.norm1(cp.multiply(weight, x)) <= radius]),
            parameters=[wanted, weight, radius],
            variables=[x],
            solver="DIFFCP",
            solver_args=arguments,
        )


class ByOptNet:
    """By OptNet, in batches."""

    def __init__(self) -> None:
        self.layer = OptNet()

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        eye = torch.eye(wanted.shape[-1], dtype=wanted.dtype, device=wanted.device)
        # in units of the batch's velocities, with which it fails to converge least often
        unit = float(velocity.square().mean().sqrt()) or limit
        found: Tensor = self.layer(eye, -wanted, velocity / unit, limit / unit)
        return found


class ByAltDiff:
    """By Alt-Diff, differentiated backwards, a batch as one block-diagonal program."""

    def __call__(self, wanted: Tensor, velocity: Tensor, limit: float) -> Tensor:
        eye = torch.eye(wanted.shape[-1], dtype=wanted.dtype, device=wanted.device)
        balls = Balls(velocity.abs(), wanted.new_full(wanted.shape[:1], limit))
        linear = torch.cat([-wanted.reshape(-1), torch.zeros_like(wanted).reshape(-1)])
        found = alternate(eye, linear, balls, **ALT_DIFF)
        return found.z[: wanted.numel()].reshape(wanted.shape)


@dataclass(frozen=True)
class Balls:
    """A batch of balls ‖w ∘ x‖₁ ≤ t as the inequalities of one program, for `alternate`.

    z holds all x, then all y, and each problem has the 3n + 1 rows of `altdiff.Ball`: their
    matrix is block diagonal, and the Hessian is the same for every problem.
    """

    w: Tensor  # (B, n)
    t: Tensor  # (B,)

    @property
    def h(self) -> Tensor:
        return torch.cat([self.w.new_zeros(3 * self.w.numel()), self.t])

    def apply(self, z: Tensor) -> Tensor:
        """(x − y, −x − y, −y, ⟨w, y⟩)."""
        x, y = z.reshape(2, *self.w.shape)
        rows = torch.cat([x - y, -x - y, -y]).reshape(-1)
        return torch.cat([rows, (self.w * y).sum(-1)])

    def adjoint(self, r: Tensor) -> Tensor:
        """(r₁ − r₂, w r₄ − r₁ − r₂ − r₃)."""
        first, second, third = r[: 3 * self.w.numel()].reshape(3, *self.w.shape)
        last = r[3 * self.w.numel() :].unsqueeze(-1)
        pull = self.w * last - first - second - third
        return torch.cat([first - second, pull]).reshape(-1)

    def solver(self, H: Tensor, A: Tensor | None, rho: float) -> Solve:
        """P + 2ρI by Cholesky, once for all, and 3I + wwᵀ by Sherman and Morrison."""
        if A is not None:
            raise ValueError("A: found equations, but the balls have none; use Dense rows")
        eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(H + 2 * rho * eye))
        size = 3 + self.w.square().sum(-1, keepdim=True)

        def solve(r: Tensor) -> Tensor:
            top, bottom = r.reshape(2, *self.w.shape)
            along = (self.w * bottom).sum(-1, keepdim=True) / size
            return torch.cat([top @ inverse, (bottom - self.w * along) / (3 * rho)]).reshape(-1)

        return solve


_SETTINGS: dict[str, Setting] = {"method": "auto", "differentiate": "implicit", "tol": 1e-5}
LAYERS: dict[str, LastLayer] = {
    layer.name: layer
    for layer in (
        LastLayer("none", "no layer", Unlimited, {}),
        LastLayer("dfwlayer", "dfwlayer (exact)", Projected, _SETTINGS),
        LastLayer("radial", "radial scaling", Radial, {}),
        LastLayer("dfw-paper", "DFW as published", partial(Projected, **PAPER), PAPER),
        LastLayer(
            "dfw-annealed",
            "DFW, annealed",
            partial(Projected, **ANNEALED),
            {**ANNEALED, "temperature": "2^-(k // 30)", "max_steps": 1000},
            slow=True,
        ),
        LastLayer("alt-diff", "Alt-Diff", ByAltDiff, {**ALT_DIFF, "mode": "reverse"}),
        LastLayer("optnet", "OptNet", ByOptNet, {"tol": 3e-7, "max_steps": 50}),
        LastLayer(
            "cvxpylayers",
            "CvxpyLayer",
            ByCvxpyLayers,
            {"backend": "DIFFCP", **CVXPY, "dtype": "float64"},
            packages=("cvxpy", "cvxpylayers", "diffcp"),
            slow=True,
        ),
    )
}


def find_layer(name: str) -> LastLayer:
    """The layer of this name."""
    layer = LAYERS.get(name)
    if layer is None:
        raise ValueError(f"layer: found {name!r}, expected one of {', '.join(LAYERS)}")
    return layer
