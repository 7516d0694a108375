"""Every kernel that the library launches has a row here, with an answer worked out by hand."""

import ast
from pathlib import Path

import pytest
import torch

import dfwlayer
from dfwlayer.ops.kernels import faces as face_kernels
from dfwlayer.ops.kernels import nearest as nearest_kernels
from dfwlayer.ops.kernels import steps as kernels
from kernel_cases import devices

# NumPy, which the interpreter computes with, warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def numbers(device, *values):
    return [torch.full((1, 1), float(v), device=device) for v in values]


def vector(device, *entries):
    return torch.tensor([entries], device=device)


def project_l1(device):
    """(3, 1) onto |x₁| + |x₂| ≤ 1."""
    one = torch.ones(1, device=device)
    yield kernels.project_l1(vector(device, 3.0, 1.0), one, one, one), [[1.0, 0.0]]


def observe(device):
    """A step of length 2 along which the slope rises by 6: curvature 3."""
    alpha, steepest, flattest, rounding = numbers(device, 1, 0, 9, 0)
    bent_down = torch.zeros(1, 1, dtype=torch.bool, device=device)
    x, gradient = vector(device, 0.0, 0.0), vector(device, -1.0, 0.0)
    trial, slope = vector(device, 2.0, 0.0), vector(device, 5.0, 0.0)
    seen = (alpha, steepest, flattest, bent_down)
    kernels.observe(x, gradient, trial, slope, *seen, rounding, blur=0.0)
    for got, want in zip(seen, (3.0, 3.0, 3.0, False), strict=True):
        yield got, [[want]]


def cg_update(device):
    """The first step for the matrix diag(1, 3) and the right-hand side (1, 1): α = ½."""
    residual, u = vector(device, 1.0, 1.0), vector(device, 0.0, 0.0)
    direction, free, unit = residual.clone(), torch.ones_like(u), torch.zeros_like(u)
    rho, target, length, steepest, flattest, steps, cap = numbers(device, 2, 0, 2, 0, 9, 0, 5)
    going, flat = rho > 0, rho < 0
    vectors = (vector(device, 1.0, 3.0), direction, residual, u, free, unit)
    seen = (rho, target, length, going, steepest, flattest, flat, steps, cap)
    kernels.cg_update(*vectors, *seen)
    yield u, [[0.5, 0.5]]
    yield residual, [[0.5, -0.5]]
    yield direction, [[0.75, -0.25]]
    yield torch.cat((rho, length, steepest, flattest, steps), -1), [[0.5, 0.625, 2.0, 2.0, 1.0]]


def face_l1(device):
    """At (1, 0) with the gradient (−2, 1): the multiplier is 2, and x₂ stays at zero."""
    one = torch.ones(1, device=device)
    found = face_kernels.face_l1(
        one, one, vector(device, 1.0, 0.0), vector(device, -2.0, 1.0), None
    )
    yield found.multiplier, [[2.0]]
    yield found.size, [[1.0]]
    yield found.normal, [[1.0, 0.0]]
    yield found.free, [[True, False]]


def nearest_l1(device):
    """(3, 1) onto |x₁| + |x₂| ≤ 1 once more, with the multiplier 2."""
    found = nearest_kernels.nearest_l1(
        vector(device, -3.0, -1.0), None, torch.ones((), device=device)
    )
    yield found.x, [[1.0, 0.0]]
    yield found.multiplier, [2.0]
    yield found.suspect, [False]


def pull_back_l1(device):
    """There x = (t, 0), whatever q is nearby."""
    one = torch.ones((), device=device)
    found = nearest_kernels.nearest_l1(vector(device, -3.0, -1.0), None, one)
    to_q, _, to_radius = nearest_kernels.pull_back_l1(
        found, vector(device, 5.0, 7.0), None, one, to_weight=False, to_radius=True
    )
    yield to_q, [[0.0, 0.0]]
    yield to_radius, [5.0]


ROWS = {
    "_cg_update": cg_update,
    "_face_l1": face_l1,
    "_nearest_l1": nearest_l1,
    "_observe": observe,
    "_project_l1": project_l1,
    "_pull_back_l1": pull_back_l1,
}


def launched():
    """The first argument of every call of ``launch`` but of programs, which `test_programs` has."""
    source = Path(dfwlayer.__file__).parent
    for path in source.rglob("*.py"):
        if path.is_relative_to(source / "engines" / "programs"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "launch":
                yield ast.unparse(node.args[0]).split(".")[-1]


def test_every_kernel_has_a_row():
    assert sorted(set(launched())) == sorted(ROWS)


@devices
@pytest.mark.parametrize("kernel", ROWS)
def test_answer_by_hand(kernel, device):
    for got, want in ROWS[kernel](device):
        expected = torch.tensor(want, dtype=got.dtype)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)
