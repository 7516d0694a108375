"""Where the fused kernels run, and the rows they are tried on: of conjugate gradients above all."""

import math
import os
from types import SimpleNamespace

import pytest
import torch

from dfwlayer.ops.kernels import common
from dfwlayer.ops.kernels import steps as kernels
from dfwlayer.ops.rows import inner, maximum, ratio
from helpers import DTYPES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(common.triton is None, reason="triton is not installed")
compiled = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 compiles no kernel")
DEVICES = (
    pytest.param("cuda", marks=[pytest.mark.cuda, needs_triton, compiled]),
    pytest.param("cpu", marks=pytest.mark.interpreter),
)
SIZES = [
    pytest.param(device.values[0], B, n, marks=device.marks)
    for device in DEVICES
    for B in (1, 3, 64, 4096)
    for n in (1, 6, 100, 500, 2000, 5000)
    # the interpreter works entry by entry
    if device.values[0] == "cuda" or B * n <= 500
]
cases = pytest.mark.parametrize(("device", "B", "n"), SIZES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
devices = pytest.mark.parametrize("device", DEVICES)


def blocks(kinds, B):
    """Row numbers, below B + K, of batches of B that together show each of the K kinds."""
    total = B + len(kinds)
    count = math.ceil(len(kinds) / B)
    return [[row % total for row in range(i * B, (i + 1) * B)] for i in range(count)]


def rows_of(kinds, total):
    """Numbers of the rows of each kind."""
    return {kind: list(range(first, total, len(kinds))) for first, kind in enumerate(kinds)}


def draw(rows, n, device, dtype):
    """Normal entries, rounded to the dtype, as float64."""
    return torch.randn(rows, n, dtype=dtype, device=device).double()


def near(got, want, scale, n, factor=8.0):
    """|got − want| within the rounding of sums of n terms of the scale."""
    tol = factor * torch.finfo(got.dtype).eps * math.sqrt(n) * scale
    wrong = ~((got.double() - want).abs() <= tol) & ~(got.isnan() & want.isnan())
    wrong &= got.double() != want  # infinities
    assert not wrong.any(), (got[wrong][:5], want[wrong][:5])


CG_KINDS = (
    "plain",
    "solved",  # rho = 0
    "good enough",
    "stopped",
    "capped",
    "no curvature",
    "bent down",
    "no normal",
    "one free",
    "not finite",
)


def make_cg(B, n, device, dtype):
    """A state of conjugate gradients for each kind of row, as the loop would leave it."""
    total = B + len(CG_KINDS)
    state = SimpleNamespace(
        free=(torch.rand(total, n, device=device) < 0.7).double(), u=draw(total, n, device, dtype)
    )
    rows = rows_of(CG_KINDS, total)
    state.free[:, 0] = 1
    state.free[rows["one free"], 1:] = 0
    state.unit = draw(total, n, device, dtype).sign() * state.free
    state.unit /= state.unit.norm(dim=-1, keepdim=True)
    state.unit[rows["no normal"]] = 0
    state.unit = state.unit.to(dtype).double()
    state.residual = tangent(state, draw(total, n, device, dtype)).to(dtype).double()
    state.direction = state.residual + 0.5 * tangent(state, draw(total, n, device, dtype))
    state.direction = state.direction.to(dtype).double()
    state.residual[rows["solved"]] = state.direction[rows["solved"]] = 0
    state.product = state.direction * (0.5 + torch.rand_like(state.direction))
    state.product = state.product.to(dtype).double()
    state.product[rows["no curvature"]] = 0
    state.product[rows["bent down"]] *= -1
    state.product[rows["not finite"], 0] = torch.nan
    state.rho = inner(state.residual, state.residual).to(dtype).double()
    state.length = inner(state.direction, state.direction).to(dtype).double()
    state.target = (1e-6 * state.rho).to(dtype).double()
    state.target[rows["good enough"]] = 2 * state.rho[rows["good enough"]]
    state.going = state.rho > 0
    state.going[rows["stopped"]] = False
    state.steepest = torch.full_like(state.rho, 0.75)
    state.steepest[::5] = 0
    state.flattest = torch.full_like(state.rho, torch.inf)
    state.flat = torch.zeros_like(state.going)
    state.flat[rows["stopped"]] = True
    state.steps = torch.full_like(state.rho, 5)
    state.cap = torch.full_like(state.rho, 6)
    state.cap[rows["capped"]] = 5
    return state


def tangent(state, v):
    v = v * state.free
    return v - state.unit * inner(state.unit, v)


def cg_step(state, step, eps):
    """The step, on float64; the vectors and lengths of rows that stay are left alone."""
    going = state.going & (state.rho > state.target) & (step < state.cap)
    curvature = inner(state.direction, state.product)
    quotient = ratio(curvature, state.length, 0.0)
    state.steepest = maximum(state.steepest, quotient.abs())
    least = eps * state.steepest * state.length
    lower = torch.minimum(state.flattest, quotient)
    state.flattest = torch.where(going, lower, state.flattest)
    state.steps = state.steps + going
    state.flat = state.flat | (going & (curvature <= least))
    state.going = going = going & (curvature > least)
    alpha = torch.where(going, state.rho / curvature, 0)
    u = state.u + alpha * state.direction
    residual = tangent(state, state.residual - alpha * state.product)
    following = inner(residual, residual)
    beta = ratio(following, state.rho, 0.0)
    direction = residual + beta * state.direction
    length = following + beta * beta * state.length
    state.u = torch.where(going, u, state.u)
    state.residual = torch.where(going, residual, state.residual)
    state.direction = torch.where(going, direction, state.direction)
    state.length = torch.where(going, length, state.length)
    state.rho = torch.where(going, following, state.rho)
    return alpha


CG_VECTORS = ("product", "direction", "residual", "u", "free", "unit")
CG_NUMBERS = (
    *("rho", "target", "length", "going", "steepest", "flattest"),
    *("flat", "steps", "cap"),
)


def launch_cg(state, **step):
    kernels.cg_update(*(getattr(state, name) for name in CG_VECTORS + CG_NUMBERS), **step)


def take(state, rows, dtype):
    """Some rows of a state in a dtype of their own."""
    rows = torch.as_tensor(list(rows), device=state.u.device)
    return SimpleNamespace(
        **{
            name: value[rows].to(value.dtype if value.dtype == torch.bool else dtype).clone()
            for name, value in vars(state).items()
        }
    )


def start_cg(rhs, free, unit, tol, cap):
    """Where conjugate gradients start."""
    rest = rhs * free
    rest = rest - unit * (unit * rest).sum(-1, keepdim=True)
    rho = (rest * rest).sum(-1, keepdim=True)
    return SimpleNamespace(
        free=free,
        unit=unit,
        residual=rest,
        direction=rest.clone(),
        u=torch.zeros_like(rhs),
        rho=rho,
        target=tol**2 * rho,
        length=rho.clone(),
        going=rho > 0,
        flat=rho < 0,
        flattest=torch.full_like(rho, torch.inf),
        steepest=torch.zeros_like(rho),
        steps=torch.zeros_like(rho),
        cap=torch.full_like(rho, cap),
    )
