"""Objectives: how they are drawn, their values and gradients in numpy, apart from the library.

In units (α, β) an objective is α f(x/β): parameters carry powers of both, which are powers of two,
so that a problem in other units has exactly the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = ["LeastSquaresRow", "ObjectiveRow", "QuadraticRow", "SmoothRow", "Units"]


@dataclass(frozen=True)
class Units:
    """α for values of f and β for the variable, both powers of two (α one of four)."""

    value: float = 1.0
    variable: float = 1.0


@dataclass(frozen=True)
class ObjectiveRow(ABC):
    """What every objective of the table has."""

    n: int

    @property
    def quadratic(self) -> bool:
        return True

    @abstractmethod
    def draw(self, draw: Draw) -> tuple[Params, Array | None]:
        """Parameters of a batch in units of one, and the unconstrained minimiser if it exists."""

    @abstractmethod
    def scaled(self, params: Params, units: Units) -> Params:
        """The parameters in other units."""

    @abstractmethod
    def code(self, units: Units) -> str:
        """The expression that builds the objective."""

    @abstractmethod
    def value(self, x: Array, p: Wide, units: Units) -> Array:
        """f(x), (B,), in long double."""

    @abstractmethod
    def gradient(self, x: Array, p: Wide, units: Units) -> tuple[Array, Array]:
        """∇f(x), and the size of the terms it is the sum of, both (B, n)."""

    @abstractmethod
    def terms(self, x: Array, p: Wide, units: Units) -> Array:
        """The size of the terms that f(x) is the sum of, (B,)."""

    def bends_down(self, p: Wide) -> Array | None:
        """Negative curvature (B,) that rounding has left in the parameters, None for none."""
        return None

    @abstractmethod
    def fit(self, rng: np.random.Generator, x: Array, force: Array, exact: bool) -> Params:
        """Parameters with ∇f(x) = −force, and f(x) = 0 where ``exact`` (then without force)."""

    @abstractmethod
    def torch(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        """f(x) of one problem in units of one, for derivatives by torch."""


def times(matrix: Array, x: Array) -> Array:
    """(B, m, n) and (B, n) -> (B, m), in long double."""
    product: Array = (matrix * x[:, None, :]).sum(-1)
    return product


def symmetric(P: Array) -> Array:
    """Free of what rounding left."""
    same: Array = 0.5 * (P + np.swapaxes(P, -1, -2))
    return same


@dataclass(frozen=True)
class QuadraticRow(ObjectiveRow):
    """½ xᵀPx + qᵀx.

    ``form``: "none" (P = I), "own", "shared", "diagonal", "zero", "near linear", "singular" or
    "ill" conditioned.
    """

    form: str = "own"
    condition: float = 1e4

    def draw(self, draw: Draw) -> tuple[Params, Array | None]:
        rng, n = draw.rng, self.n
        q = draw.normal(draw.rows, n)
        if draw.kind == "far":
            q = q * 10.0 ** rng.integers(3, 10, (draw.rows, 1))
        P = self._matrix(rng, 1 if self.form == "shared" else draw.rows, draw.kind)
        params = {"q": Param(q, True)}
        if P is None:
            return params, -q
        params["P"] = Param(P[0] if self.form == "shared" else P, self.form != "shared")
        if self.form in ("zero", "singular"):
            return params, None
        return params, -np.linalg.solve(P, q[..., None])[..., 0]

    def bends_down(self, p: Wide) -> Array | None:
        if "P" not in p:
            return None
        values = np.linalg.eigvalsh(p["P"].astype(np.float64))
        # as far as it is not that of the eigenvalues themselves
        own = 8 * np.finfo(np.float64).eps * np.abs(values).max(-1)
        down: Array = np.maximum(-values.min(-1) - own, 0).astype(LONG)
        return down

    def steepest(self, p: Wide) -> Array:
        """The largest entry of P, () or (B,)."""
        steepest: Array = np.ones((), LONG) if self.form == "none" else p["P"].max((-2, -1))
        return steepest

    def _matrix(self, rng: np.random.Generator, rows: int, kind: str) -> Array | None:
        n = self.n
        eye = np.eye(n)
        if self.form == "none":
            return None
        if self.form == "zero":
            return np.zeros((rows, n, n))
        if self.form == "diagonal":
            return symmetric(eye * rng.uniform(0.5, 2.0, (rows, 1, n)))
        if kind == "integer":
            R = rng.integers(-1, 2, (rows, n, n)).astype(np.float64)
            return symmetric(np.swapaxes(R, -1, -2) @ R + (self.form != "singular") * eye)
        if self.form == "ill":
            Q, _ = np.linalg.qr(rng.standard_normal((rows, n, n)))
            values = np.geomspace(1 / self.condition, 1.0, n) if n > 1 else np.ones(1)
            P = (Q * values) @ np.swapaxes(Q, -1, -2)
            return symmetric(P)
        R = rng.standard_normal((rows, max(1, n // 2) if self.form == "singular" else n, n))
        P = np.swapaxes(R, -1, -2) @ R / n
        if self.form != "singular":
            P = P + 0.1 * eye
        P = 1e-6 * P if self.form == "near linear" else P
        return symmetric(P)

    def scaled(self, params: Params, units: Units) -> Params:
        a, b = units.value, units.variable
        out = {"q": params["q"].times(a / b)}
        if "P" in params:
            out["P"] = params["P"].times(a / b / b)
        return out

    def code(self, units: Units) -> str:
        return "dfw.Quadratic(None, q)" if self.form == "none" else "dfw.Quadratic(P, q)"

    def _hessian(self, x: Array, p: Wide) -> Array:
        return x if self.form == "none" else times(p["P"], x)

    def value(self, x: Array, p: Wide, units: Units) -> Array:
        value: Array = (x * (0.5 * self._hessian(x, p) + p["q"])).sum(-1)
        return value

    def gradient(self, x: Array, p: Wide, units: Units) -> tuple[Array, Array]:
        size = np.abs(x) if self.form == "none" else times(np.abs(p["P"]), np.abs(x))
        return self._hessian(x, p) + p["q"], size + np.abs(p["q"])

    def terms(self, x: Array, p: Wide, units: Units) -> Array:
        terms: Array = (np.abs(x) * self.gradient(x, p, units)[1]).sum(-1)
        return terms

    def fit(self, rng: np.random.Generator, x: Array, force: Array, exact: bool) -> Params:
        shared = self.form == "shared"
        P = self._matrix(rng, 1 if shared else len(x), "random")
        curved = x if P is None else (P @ x[..., None])[..., 0]
        params = {"q": Param(-curved - force, True)}
        if P is not None:
            params["P"] = Param(P[0] if shared else P, not shared)
        return params

    def torch(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        curved = x if self.form == "none" else p["P"] @ x
        return (x * (0.5 * curved + p["q"])).sum(-1)


@dataclass(frozen=True)
class LeastSquaresRow(ObjectiveRow):
    """½ ‖Ax − b‖²; ``layout`` is "own", "shared", "coo", "csr" or "correlated" (columns alike)."""

    m: int
    layout: str = "own"
    exact: bool = False

    def _matrix(self, rng: np.random.Generator, rows: int) -> Array:
        own = self.layout in ("own", "correlated")
        A = rng.standard_normal((rows if own else 1, self.m, self.n))
        if self.layout == "correlated":
            A = 0.05 * A + rng.standard_normal((rows, self.m, 1))
        A /= self.n**0.5
        if self.layout in ("coo", "csr"):
            keep = (rng.random(A.shape) < 0.5) | np.eye(self.m, self.n, dtype=bool)
            A = np.where(keep, A + 2 * np.eye(self.m, self.n), 0.0)
        return A

    def draw(self, draw: Draw) -> tuple[Params, Array | None]:
        A = self._matrix(draw.rng, draw.rows)
        x = draw.normal(draw.rows, self.n)
        if draw.kind == "integer":
            A = np.round(2 * A)
        b = (A @ x[..., None])[..., 0]
        if not self.exact:
            b = b + draw.normal(draw.rows, self.m)
        if draw.kind == "far":
            b = b * 10.0 ** draw.rng.integers(3, 8, (draw.rows, 1))
        own = self.layout in ("own", "correlated")
        params = {"A": Param(A if own else A[0], own), "b": Param(b, True)}
        return params, np.linalg.lstsq(A[0], b.T, rcond=None)[0].T if not own else x

    def scaled(self, params: Params, units: Units) -> Params:
        root = units.value**0.5
        return {"A": params["A"].times(root / units.variable), "b": params["b"].times(root)}

    def code(self, units: Units) -> str:
        convert = {"coo": ".to_sparse()", "csr": ".to_sparse_csr()"}.get(self.layout, "")
        return f"dfw.LeastSquares(A{convert}, b)"

    def value(self, x: Array, p: Wide, units: Units) -> Array:
        value: Array = 0.5 * ((times(p["A"], x) - p["b"]) ** 2).sum(-1)
        return value

    def gradient(self, x: Array, p: Wide, units: Units) -> tuple[Array, Array]:
        A, b = p["A"], p["b"]
        At = np.swapaxes(A, -1, -2)
        size = times(np.abs(At), times(np.abs(A), np.abs(x)) + np.abs(b))
        return times(At, times(A, x) - b), size

    def terms(self, x: Array, p: Wide, units: Units) -> Array:
        terms: Array = ((times(np.abs(p["A"]), np.abs(x)) + np.abs(p["b"])) ** 2).sum(-1)
        return terms

    def fit(self, rng: np.random.Generator, x: Array, force: Array, exact: bool) -> Params:
        A = self._matrix(rng, len(x))
        gram = np.swapaxes(A, -1, -2) @ A
        residual = -(A @ np.linalg.solve(gram, force[..., None]))[..., 0]
        b = (A @ x[..., None])[..., 0] - residual
        if not exact and self.m > self.n:  # what is orthogonal to A changes f and not x
            noise = rng.standard_normal(b.shape)
            back = np.linalg.solve(gram, np.swapaxes(A, -1, -2) @ noise[..., None])
            b = b + noise - (A @ back)[..., 0]
        own = self.layout == "own"
        return {"A": Param(A if own else A[0], own), "b": Param(b, True)}

    def torch(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        return 0.5 * (p["A"] @ x - p["b"]).square().sum(-1)


RIDGE = 0.5


def _logistic(r: Array) -> tuple[Array, Array]:
    return np.logaddexp(0, r).sum(-1), 1 / (1 + np.exp(-r))


def _lse(r: Array) -> tuple[Array, Array]:
    top = r.max(-1, keepdims=True)
    e = np.exp(r - top)
    total = e.sum(-1, keepdims=True)
    return top[..., 0] + np.log(total[..., 0]), e / total


def _huber(r: Array) -> tuple[Array, Array]:
    size = np.abs(r)
    small = size < 0.3
    return np.where(small, 0.5 * r * r, 0.3 * (size - 0.15)).sum(-1), np.clip(r, -0.3, 0.3)


def _quartic(r: Array) -> tuple[Array, Array]:
    return 0.25 * (r**4).sum(-1), r**3


def _square(r: Array) -> tuple[Array, Array]:
    return 0.5 * (r * r).sum(-1), r


def _linear(r: Array) -> tuple[Array, Array]:
    return 0 * r.sum(-1), 0 * r


# name: (in numpy, with its derivative in r; in torch; whether there is a ridge)
FUNCTIONS: dict[str, tuple[Callable[[Array], tuple[Array, Array]], str, bool]] = {
    "logistic": (_logistic, "-torch.nn.functional.logsigmoid(-r).sum(-1)", True),
    "log-sum-exp": (_lse, "torch.logsumexp(r, -1)", True),
    "huber": (
        _huber,
        "torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15)).sum(-1)",
        False,
    ),
    "quartic": (_quartic, "0.25 * r.pow(4).sum(-1)", False),
    "square": (_square, "0.5 * r.square().sum(-1)", False),
    "linear": (_linear, "0.0 * r.sum(-1)", False),
}


@dataclass(frozen=True)
class SmoothRow(ObjectiveRow):
    """h(F y − d) + ½ ridge ‖y‖² + ⟨c, y⟩ with y = x/β, times α; h by ``function``.

    The parameters F, d and c have no units of their own, α and β stand in the code.
    """

    m: int
    function: str = "logistic"
    exact: bool = False  # c = 0 and d = F y for some y: the least value is known

    @property
    def quadratic(self) -> bool:
        return self.function in ("square", "linear")

    @property
    def _ridge(self) -> float:
        return RIDGE if FUNCTIONS[self.function][2] and not self.exact else 0.0

    def draw(self, draw: Draw) -> tuple[Params, Array | None]:
        rng = draw.rng
        F = rng.standard_normal((self.m, self.n)) / self.n**0.5
        if draw.kind == "integer":
            F = np.round(2 * F)
        x = draw.normal(draw.rows, self.n)
        d = x @ F.T if self.exact else draw.normal(draw.rows, self.m)
        c = 0 * x if self.exact else draw.normal(draw.rows, self.n)
        if draw.kind == "far" and self.function == "linear":
            c = c * 10.0 ** rng.integers(3, 10, (draw.rows, 1))
        params = {"F": Param(F, False), "d": Param(d, True), "c": Param(c, True)}
        return params, x

    def scaled(self, params: Params, units: Units) -> Params:
        return params

    def code(self, units: Units) -> str:
        y = "x" if units.variable == 1 else f"(x / {units.variable!r})"
        terms = [f"(lambda r: {FUNCTIONS[self.function][1]})({y} @ F.mT - d)"]
        if self._ridge:
            terms.append(f"{0.5 * self._ridge!r} * {y}.square().sum(-1)")
        terms.append(f"(c * {y}).sum(-1)")
        total = " + ".join(terms)
        if units.value != 1:
            total = f"{units.value!r} * ({total})"
        return f"dfw.Smooth(lambda x, F, d, c: {total}, F, d, c, shape=({self.n},))"

    def value(self, x: Array, p: Wide, units: Units) -> Array:
        y = x / LONG(units.variable)
        h, _ = FUNCTIONS[self.function][0](times(p["F"], y) - p["d"])
        total = h + 0.5 * self._ridge * (y * y).sum(-1) + (p["c"] * y).sum(-1)
        value: Array = LONG(units.value) * total
        return value

    def gradient(self, x: Array, p: Wide, units: Units) -> tuple[Array, Array]:
        y = x / LONG(units.variable)
        F = p["F"]
        r = times(F, y) - p["d"]
        _, slope = FUNCTIONS[self.function][0](r)
        Ft = np.swapaxes(F, -1, -2)
        bend = (
            3 * r * r if self.function == "quartic" else LONG(1) if self.function != "linear" else 0
        )
        inner = bend * (times(np.abs(F), np.abs(y)) + np.abs(p["d"]))
        size = times(np.abs(Ft), np.abs(slope) + inner)
        size = size + self._ridge * np.abs(y) + np.abs(p["c"])
        unit = LONG(units.value) / LONG(units.variable)
        return unit * (times(Ft, slope) + self._ridge * y + p["c"]), unit * size

    def terms(self, x: Array, p: Wide, units: Units) -> Array:
        y = np.abs(x) / LONG(units.variable)
        inner = times(np.abs(p["F"]), y) + np.abs(p["d"])
        h, slope = FUNCTIONS[self.function][0](times(p["F"], x / LONG(units.variable)) - p["d"])
        total = np.abs(h) + (np.abs(slope) * inner).sum(-1) + (np.abs(p["c"]) * y).sum(-1)
        terms: Array = LONG(units.value) * (total + self._ridge * (y * y).sum(-1))
        return terms

    def fit(self, rng: np.random.Generator, x: Array, force: Array, exact: bool) -> Params:
        F = rng.standard_normal((self.m, self.n)) / self.n**0.5
        F = F + np.eye(self.m, self.n)
        d = x @ F.T if exact else rng.standard_normal((len(x), self.m))
        _, slope = FUNCTIONS[self.function][0](x @ F.T - d)
        c = -force - slope @ F - (0.0 if exact else self._ridge) * x
        return {"F": Param(F, False), "d": Param(d, True), "c": Param(c, True)}

    def torch(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        r = p["F"] @ x - p["d"]
        h: Any = eval(FUNCTIONS[self.function][1], {"torch": torch, "r": r})
        total: Tensor = h + 0.5 * self._ridge * x.square().sum(-1) + (p["c"] * x).sum(-1)
        return total
