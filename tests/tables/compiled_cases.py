"""Problems for compiled code: objectives and sets in normal form, and how to compare answers."""

import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.engines.base import Arguments
from dfwlayer.methods.settings import check_settings
from dfwlayer.ops.tensors import tensors_in

F32, F64 = torch.float32, torch.float64
N = 8


def leaf(t):
    return t.requires_grad_()


def some(lead, dtype, *, low=0.0, high=1.0, entries=True):
    shape = (*lead, N) if entries else lead
    return leaf(low + (high - low) * torch.rand(shape, dtype=dtype))


def through_the_middle(normal):
    """Of a simplex with caps."""
    return dfw.PlaneCut(dfw.CappedSimplex(1.0, 0.4), normal, leaf(normal.detach().mean(-1)))


SETS = {
    "l1": lambda b, d: dfw.LpBall(
        1.0, some(b, d, low=0.3, high=0.8, entries=False), some(b, d, low=0.5, high=1.5)
    ),
    "l1 by numbers": lambda *_: dfw.LpBall(1, 0.5),
    "l2": lambda b, d: dfw.LpBall(
        2.0, some(b, d, low=0.3, high=0.8, entries=False), some(b, d, low=0.5, high=1.5)
    ),
    "l2 by numbers": lambda *_: dfw.LpBall(2, 0.5),
    "l1.3": lambda b, d: dfw.LpBall(
        1.3, some(b, d, low=0.3, high=0.8, entries=False), some(b, d, low=0.5, high=1.5)
    ),
    "l3": lambda b, d: dfw.LpBall(
        3, some(b, d, low=0.3, high=0.8, entries=False), some(b, d, low=0.5, high=1.5)
    ),
    "l4.5 around a centre": lambda b, d: dfw.LpBall(
        4.5, some(b, d, low=0.3, high=0.8, entries=False), centre=some(b, d)
    ),
    "linf": lambda b, d: dfw.LpBall(
        torch.inf, some(b, d, low=0.1, high=0.3, entries=False), some(b, d, low=0.5, high=1.5)
    ),
    "box": lambda b, d: dfw.Box(some(b, d, low=-0.3, high=0.0), some(b, d, high=0.3)),
    "lower bounds": lambda b, d: dfw.Box(lower=some(b, d, low=-0.3, high=0.3)),
    "upper bounds": lambda _, d: dfw.Box(upper=some((), d, low=-0.3, high=0.3)),
    "no bounds": lambda _b, _d: dfw.Box(),
    "lower bounds in a plane": lambda b, d: dfw.PlaneCut(
        dfw.Box(lower=some(b, d, low=-0.3, high=0.0)), some(b, d, low=0.5, high=1.5), 0.4
    ),
    "box shared": lambda _, d: dfw.Box(some((), d, low=-0.3, high=0.0), 0.2),
    "simplex": lambda b, d: dfw.Simplex(some(b, d, low=0.5, entries=False)),
    "capped simplex": lambda b, d: dfw.CappedSimplex(
        some(b, d, low=0.9, entries=False), some(b, d, low=0.2, high=0.4)
    ),
    "l1 in a box": lambda b, d: dfw.L1Box(
        some(b, d, low=0.3, high=0.6, entries=False),
        some(b, d, low=0.5, high=1.5),
        some(b, d, low=-0.3, high=0.0),
        some(b, d, high=0.3),
    ),
    "k-sparse": lambda b, d: dfw.KSparse(
        some(b, d, low=1.5, high=3.0, entries=False), some(b, d, low=0.1, high=0.3, entries=False)
    ),
    "box in a plane": lambda b, d: dfw.PlaneCut(
        dfw.Box(some(b, d, low=-0.3, high=-0.1), some(b, d, low=0.1, high=0.3)),
        some(b, d, low=-1.0),
        some(b, d, low=-0.01, high=0.01, entries=False),
    ),
    "l1 in a plane": lambda b, d: dfw.PlaneCut(
        dfw.LpBall(1, some(b, d, low=0.5, entries=False)),
        some(b, d, low=-1.0),
        some(b, d, low=-0.01, high=0.01, entries=False),
    ),
    "l1 in a box and a plane": lambda b, d: dfw.PlaneCut(
        dfw.L1Box(some(b, d, low=0.4, entries=False), None, some(b, d, low=-0.5, high=-0.1), 0.3),
        some(b, d, low=-1.0),
        0.01,
    ),
    "caps in a plane": lambda b, d: through_the_middle(some(b, d, low=-1.0)),
    "l1 around a centre": lambda b, d: dfw.LpBall(
        1, some(b, d, low=0.3, high=0.8, entries=False), centre=some(b, d, low=-1.0)
    ),
    "l2 around a number": lambda b, d: dfw.LpBall(2, 0.5, some(b, d, low=0.5), centre=0.25),
    "box around a centre": lambda _, d: dfw.Shifted(dfw.Box(-0.2, 0.3), some((), d, low=-1.0)),
    "simplex around two centres": lambda b, d: dfw.Shifted(
        dfw.Shifted(dfw.Simplex(), some(b, d, low=-1.0)), some((), d)
    ),
    "l2 within bounds": lambda b, d: dfw.Intersection(
        dfw.LpBall(2, some(b, d, low=0.3, high=0.6, entries=False)),
        dfw.Box(some(b, d, low=-0.3, high=-0.1), some(b, d, low=0.1, high=0.3)),
    ),
    "an ellipsoid below a plane": lambda b, d: dfw.Intersection(
        dfw.LpBall(2, 0.5, some(b, d, low=0.5, high=1.5)),
        dfw.Polyhedron(some(b, d, low=-1.0).unsqueeze(-2), some(b, d, entries=False).unsqueeze(-1)),
    ),
    "product": lambda b, d: dfw.Product(
        [dfw.LpBall(1, some(b, d, low=0.3, entries=False)), dfw.Simplex(), dfw.Box(-0.1, 0.1)],
        [3, 3, 2],
    ),
}


def matrix(lead, dtype):
    root = torch.randn(*lead, N, N, dtype=dtype)
    return leaf(root.mT @ root / N + 0.1 * torch.eye(N, dtype=dtype))


def normal(*shape, dtype):
    return leaf(torch.randn(*shape, dtype=dtype))


OBJECTIVES = {
    "quadratic": lambda b, d: dfw.Quadratic(matrix(b, d), normal(*b, N, dtype=d)),
    "shared matrix": lambda b, d: dfw.Quadratic(matrix((), d), normal(*b, N, dtype=d)),
    "projection": lambda b, d: dfw.Quadratic(None, normal(*b, N, dtype=d)),
    "least squares": lambda b, d: dfw.LeastSquares(
        normal(*b, 20, N, dtype=d), normal(*b, 20, dtype=d)
    ),
    "shared least squares": lambda b, d: dfw.LeastSquares(
        normal(20, N, dtype=d), normal(*b, 20, dtype=d)
    ),
}


def attempted(objective, constraint, x0=None, **options):
    settings = {
        "method": "auto",
        "differentiate": "auto",
        "tol": 1e-5,
        "max_steps": 1000,
        "step_size": None,
        "temperature": None,
        "verify": True,
    } | options
    arguments = Arguments(objective, constraint, x0, None)
    return compiled.attempt(arguments, check_settings(**settings))


def answers(objective, constraint, **options):
    """The solution, and the gradients of x and of the value in every tensor."""
    sol = dfw.solve(objective, constraint, **options)
    asked = [t for t in tensors_in((objective, constraint)) if t.requires_grad]
    v = torch.cos(torch.arange(sol.x.numel(), dtype=sol.x.dtype)).reshape(sol.x.shape)
    of_x = torch.autograd.grad(sol.x, asked, v.to(sol.x.device), retain_graph=True)
    w = torch.sin(1 + torch.arange(sol.value.numel(), dtype=sol.x.dtype)).reshape(sol.value.shape)
    of_value = torch.autograd.grad(sol.value, asked, w.to(sol.x.device), retain_graph=True)
    return sol, (*of_x, *of_value)


def terms_of(objective, x):
    """f of absolute values: what the rounding of f is measured by, as its terms may cancel."""
    x = x.detach().abs()
    if isinstance(objective, dfw.LeastSquares):
        rows = (objective.A.detach().abs() @ x.unsqueeze(-1)).squeeze(-1)
        return 0.5 * (rows + objective.b.detach().abs()).square().sum(-1)
    P, q = objective.P, objective.q.detach().abs()
    slope = x if P is None else (P.detach().abs() @ x.unsqueeze(-1)).squeeze(-1)
    return (x * (0.5 * slope + q)).sum(-1)


def close(found, expected, tolerance):
    found, expected = (t.detach().double().cpu() for t in (found, expected))
    size = float(expected.abs().max()) if expected.numel() else 0.0
    assert float((found - expected).abs().max()) <= tolerance * max(size, 1e-3)
