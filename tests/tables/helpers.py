"""One table of problems with exact answers, crossed with methods, sets, dtypes and devices.

Every problem is designed backwards. A set gives a point x* of its own and a vector in its normal
cone there ("force"); an objective gets the linear term that makes ∇f(x*) = −force. Then x* is
the solution by the optimality conditions alone, no solver is involved, and f being strongly
convex (modulus ``strong``) it is the only one.

A new set is one row of SETS, a new objective one of OBJECTIVES, a new method one of METHODS, and
the row buys it every test that is written over the table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Context, Decimal

import numpy as np
import pytest
import torch
from torch import Tensor

import dfwlayer as dfw

PS = (1.0, 1.5, 2.0, 3.0, 10.0, math.inf)
DTYPES = (torch.float32, torch.float64)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
F64 = torch.float64


@dataclass(frozen=True)
class MethodRow:
    """A method and what may be expected of it."""

    method: object  # what goes into method=
    exact: Callable[[float], bool]  # whether it reaches any tol within the cap, for this p
    modes: tuple[str, ...] = ("unroll", "implicit")
    unbounded: bool = True  # whether it takes coordinates of weight zero; if not, it says so


METHODS = {
    "auto": MethodRow("auto", exact=lambda p: p >= 1, modes=("implicit", "unroll")),
    "dfw": MethodRow("dfw", exact=lambda p: p < 1),
    # for p > 2 the ball is flat in places and plain Frank-Wolfe is sublinear
    "frank-wolfe": MethodRow("frank-wolfe", exact=lambda p: p <= 2),
    "plain frank-wolfe": MethodRow(dfw.FrankWolfe(pairwise=False), exact=lambda p: 1 < p <= 2),
    # finitely many vertices, and no coordinate without a bound
    "active-set": MethodRow(
        "active-set", exact=lambda p: p in (1, math.inf), modes=("implicit",), unbounded=False
    ),
}


def solved(row: MethodRow, objective, ball: dfw.LpBall, **settings):
    """What the method finds; None where coordinates have no bound and it rightly says so."""
    weight, radius = torch.as_tensor(ball.weight), torch.as_tensor(ball.radius)
    without = weight.abs() <= radius.unsqueeze(-1) / torch.finfo(weight.dtype).max
    if row.unbounded or not without.any():
        return dfw.solve(objective, ball, method=row.method, **settings)
    with pytest.raises(ValueError, match="needs a bounded set"):
        dfw.solve(objective, ball, method=row.method, **settings)
    return None


@dataclass(frozen=True)
class Case:
    """A batch of problems (or one, without a batch) and its exact solution, in float64."""

    params: dict[str, Tensor]
    build: Callable[[dict[str, Tensor]], tuple[object, dfw.LpBall]]
    f: Callable[[Tensor, dict[str, Tensor]], Tensor]  # f(x), written apart from the library
    x_star: Tensor
    p: float
    strong: float  # modulus of strong convexity
    smooth: float  # L

    def problem(self, **changed: Tensor) -> tuple[object, dfw.LpBall]:
        return self.build(self.params | changed)

    def to(self, *args) -> "Case":
        """All data in another dtype or on another device."""
        moved = {k: v.to(*args) for k, v in self.params.items()}
        return replace(self, params=moved, x_star=self.x_star.to(*args))

    def exactly(self) -> "Case":
        """The same numbers in float64 on the CPU, for the judge."""
        return self.to("cpu").to(F64)

    def error(self, x: Tensor) -> Tensor:
        """f(x) − f* in float64, never through the difference of the values themselves.

        ⟨−force, x − x*⟩ + the Bregman distance would be exact; the plain difference in float64
        is enough for what is asked of it here.
        """
        case, x = self.exactly(), x.detach().cpu().to(F64)
        return case.f(x, case.params) - case.f(case.x_star, case.params)

    @property
    def value(self) -> Tensor:
        case = self.exactly()
        return case.f(case.x_star, case.params)

    def diameter(self) -> Tensor:
        case = self.exactly()
        return diameter(case.p, case.params["weight"], case.params["radius"])


# ---------------------------------------------------------------------------------------------
# sets: (generator, rows, n, situation) -> params, constraint from params, x*, force


def lp_ball_row(p: float):
    def make(gen, rows, n, situation):
        shape = (rows, n)
        x = _signs(gen, shape) * (0.2 + _uniform(gen, shape))
        weight = 0.5 + _uniform(gen, shape)
        if situation in ("signed", "zero weight"):
            weight = weight * _signs(gen, shape)
        bounded = torch.ones(shape, dtype=torch.bool)
        if situation == "zero weight":
            bounded[:, 0] = False
            weight = torch.where(bounded, weight, 0)
        size = weight.abs()
        slope = torch.zeros_like(x)
        if p == 1:
            zero = _uniform(gen, shape) < 0.4
            zero[:, -1] = False
            x = torch.where(zero & bounded, 0, x)
            inner = 1.4 * (_uniform(gen, shape) - 0.5)
            slope = size * torch.where(zero, inner, torch.sign(x))
            radius = (size * x.abs()).sum(-1)
        elif p == math.inf:
            at_bound = _uniform(gen, shape) < 0.5
            at_bound[:, -1] = True
            at_bound &= bounded
            radius = 1 + _uniform(gen, (rows,))
            reach = radius[:, None] / torch.where(bounded, size, 1)
            inside = (1.6 * _uniform(gen, shape) - 0.8) * reach
            x = torch.where(at_bound, torch.sign(x) * reach, torch.where(bounded, inside, x))
            slope = torch.where(at_bound, torch.sign(x) * (0.2 + _uniform(gen, shape)), 0)
        else:
            radius = (size * x.abs()).pow(p).sum(-1).pow(1 / p)
            slope = torch.sign(x) * size * (size * x.abs() / radius[:, None]) ** (p - 1)
        if situation == "inside":
            radius, slope = 1.5 * lp_norm(size * x, p), torch.zeros_like(x)
        force = (0.3 + _uniform(gen, (rows, 1))) * slope
        params = {"weight": weight, "radius": radius}
        return params, lambda q: dfw.LpBall(p, q["radius"], q["weight"]), x, force

    return make


SETS = {f"p={p:g}": (p, lp_ball_row(p)) for p in PS}
SITUATIONS = ("active", "signed", "inside", "zero weight")


# ---------------------------------------------------------------------------------------------
# objectives: (generator, x*, force) -> params, objective from params, f(x, params), μ, L


def quadratic_row(shared: bool):
    def make(gen, x, force):
        rows, n = x.shape
        R = _normal(gen, (1 if shared else rows, n, n))
        P = R.mT @ R / n + 0.5 * torch.eye(n, dtype=F64)
        q = -(P @ x[..., None])[..., 0] - force
        eig = torch.linalg.eigvalsh(P)
        params = {"P": P[0] if shared else P, "q": q}

        def f(x, c):
            return 0.5 * (x * (c["P"] @ x[..., None])[..., 0]).sum(-1) + (c["q"] * x).sum(-1)

        return params, lambda c: dfw.Quadratic(c["P"], c["q"]), f, eig.min(), eig.max()

    return make


def identity_row(gen, x, force):
    def f(x, c):
        return 0.5 * (x * x).sum(-1) + (c["q"] * x).sum(-1)

    return {"q": -x - force}, lambda c: dfw.Quadratic(None, c["q"]), f, 1.0, 1.0


def least_squares_row(shared: bool, layout=torch.strided):
    def make(gen, x, force):
        rows, n = x.shape
        A = _normal(gen, (1 if shared else rows, n + 4, n)) / n**0.5
        if layout != torch.strided:  # about half of the entries, and a full diagonal
            keep = (_uniform(gen, A.shape) < 0.4) | torch.eye(n + 4, n, dtype=torch.bool)
            A = torch.where(keep, A + 2 * torch.eye(n + 4, n, dtype=F64), 0)
        residual = -(A @ torch.linalg.solve(A.mT @ A, force[..., None]))[..., 0]
        b = (A @ x[..., None])[..., 0] - residual
        sigma = torch.linalg.svdvals(A)
        params = {"A": A[0] if shared else A, "b": b}

        def objective(c):
            matrix = c["A"]
            if layout == torch.sparse_coo:
                matrix = matrix.to_sparse()
            elif layout == torch.sparse_csr:
                matrix = _csr(matrix)
            return dfw.LeastSquares(matrix, c["b"])

        def f(x, c):
            return 0.5 * ((c["A"] @ x[..., None])[..., 0] - c["b"]).pow(2).sum(-1)

        return params, objective, f, sigma.min() ** 2, sigma.max() ** 2

    return make


RIDGE = 0.5


def logistic(x, F, c):
    """Σ log(1 + exp(Fx)) + ridge, L ≤ ¼‖F‖² + ridge."""
    return (
        torch.nn.functional.softplus(x @ F.mT).sum(-1)
        + 0.5 * RIDGE * (x * x).sum(-1)
        + (c * x).sum(-1)
    )


def log_sum_exp(x, F, c):
    """log Σ exp(Fx) + ridge, L ≤ ‖F‖² + ridge."""
    return torch.logsumexp(x @ F.mT, -1) + 0.5 * RIDGE * (x * x).sum(-1) + (c * x).sum(-1)


def huber(x, F, c):
    """Huber's function of Fx − 1 with the bend at 0.3, L ≤ ‖F‖² + ridge."""
    r = (x @ F.mT - 1).abs()
    loss = torch.where(r < 0.3, 0.5 * r * r, 0.3 * (r - 0.15)).sum(-1)
    return loss + 0.5 * RIDGE * (x * x).sum(-1) + (c * x).sum(-1)


def smooth_row(fn, bend):
    def make(gen, x, force):
        n = x.shape[-1]
        F = _normal(gen, (n + 2, n)) / n**0.5
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(at, F, torch.zeros_like(x)).sum(), at)
        params = {"F": F, "c": -slope - force}
        smooth = bend * torch.linalg.matrix_norm(F, 2) ** 2 + RIDGE

        def f(x, c):
            return fn(x, c["F"], c["c"])

        def objective(c):
            return dfw.Smooth(fn, c["F"], c["c"], shape=(n,))

        return params, objective, f, RIDGE, smooth

    return make


OBJECTIVES = {
    "quadratic": quadratic_row(shared=False),
    "shared quadratic": quadratic_row(shared=True),
    "identity": identity_row,
    "least squares": least_squares_row(shared=False),
    "COO least squares": least_squares_row(shared=True, layout=torch.sparse_coo),
    "CSR least squares": least_squares_row(shared=True, layout=torch.sparse_csr),
    "logistic": smooth_row(logistic, 0.25),
    "log-sum-exp": smooth_row(log_sum_exp, 1.0),
    "huber": smooth_row(huber, 1.0),
}
SMOOTH = ("logistic", "log-sum-exp", "huber")


def make_case(
    objective: str = "quadratic",
    constraint: str | float = "p=1",
    situation: str = "active",
    *,
    rows: int | None = 3,
    n: int = 6,
    seed: int = 0,
    pull: float = 1.0,
) -> Case:
    """The problem of one cell of the table; rows=None gives one problem without a batch.

    ``pull`` multiplies the force with which the constraint holds x* back.
    """
    name = constraint if isinstance(constraint, str) else f"p={constraint:g}"
    p, make_set = SETS[name] if name in SETS else (float(constraint), lp_ball_row(constraint))
    gen = torch.Generator().manual_seed(1000 * seed + n)
    set_params, build_set, x, force = make_set(gen, rows or 1, n, situation)
    params, build_objective, f, strong, smooth = OBJECTIVES[objective](gen, x, pull * force)
    params = params | set_params
    if rows is None:
        per_problem = {"P", "A"} if objective in ("quadratic", "least squares") else set()
        per_problem |= {"q", "b", "c", "weight", "radius"}
        params = {k: v[0] if k in per_problem else v for k, v in params.items()}
        x = x[0]
    return Case(
        params,
        lambda c: (build_objective(c), build_set(c)),
        f,
        x,
        p,
        float(strong),
        float(smooth),
    )


# ---------------------------------------------------------------------------------------------
# measures, written apart from the library


def lp_norm(x: Tensor, p: float) -> Tensor:
    """‖x‖_p, by ratios to the largest entry: powers of 1e9 are asked for too."""
    top = x.abs().amax(-1, keepdim=True)
    ratio = x.abs() / torch.where(top > 0, top, 1)
    return top[..., 0] * torch.linalg.vector_norm(ratio, p, dim=-1)


def dual_exponent(p: float) -> float:
    return math.inf if p == 1 else 1.0 if p == math.inf else p / (p - 1)


def diameter(p: float, weight: Tensor, radius: Tensor) -> Tensor:
    """Twice the largest ‖x‖₂ in the ball: 2t max 1/w for p ≤ 2, else Hölder's 2t ‖1/w‖_2p/(p−2)."""
    inverse = 1 / weight.abs()
    order = math.inf if p <= 2 else 2.0 if p == math.inf else 2 * p / (p - 2)
    return 2 * radius * torch.linalg.vector_norm(inverse, order, dim=-1)


def certificate(x: Tensor, g: Tensor, p: float, weight: Tensor, radius: Tensor) -> Tensor:
    """max over the ball of ⟨g, x − s⟩ = ⟨g, x⟩ + t ‖g/w‖_q, by the definition of the dual norm."""
    return (g * x).sum(-1) + radius * lp_norm(g / weight, dual_exponent(p))


_EXACT = Context(prec=60, Emin=-999999, Emax=999999)


def ulps_outside(x: Tensor, weight: Tensor, radius: Tensor, p: float) -> float:
    """(‖w ∘ x‖_p − t) in units in the last place of t, in 60 digits; for one problem."""
    d = [
        abs(_EXACT.multiply(Decimal(a), Decimal(b)))
        for a, b in zip(x.tolist(), weight.tolist(), strict=True)
    ]
    t = Decimal(radius.item())
    top = max(d)
    if top == 0 or p == math.inf:
        size = top
    else:
        total = Decimal(0)
        for entry in d:
            if entry > 0:
                total = _EXACT.add(total, _EXACT.power(_EXACT.divide(entry, top), Decimal(p)))
        size = _EXACT.multiply(top, _EXACT.power(total, _EXACT.divide(Decimal(1), Decimal(p))))
    kind = np.float32 if radius.dtype == torch.float32 else np.float64
    return float((size - t) / Decimal(float(np.spacing(kind(radius.item())))))


def close(got: Tensor, want: Tensor, rtol: float, atol: float = 0.0) -> None:
    """assert_close that ignores device and dtype."""
    torch.testing.assert_close(
        got.detach().cpu().to(F64), want.detach().cpu().to(F64), rtol=rtol, atol=atol
    )


def _csr(matrix: Tensor) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own CSR support a beta
        return matrix.to_sparse_csr()


def _uniform(gen, shape):
    return torch.rand(shape, generator=gen, dtype=F64)


def _normal(gen, shape):
    return torch.randn(shape, generator=gen, dtype=F64)


def _signs(gen, shape):
    return 2.0 * (_uniform(gen, shape) < 0.5).to(F64) - 1


def draw(*shape, seed=0, dtype=F64):
    """Normal numbers, the same in every dtype but for rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)
