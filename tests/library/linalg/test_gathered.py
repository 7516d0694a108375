"""Systems on a face with few free coordinates: solved with these alone."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.linalg import face_system

N, ROWS = 320, 90


def objectives():
    draw = torch.Generator().manual_seed(3)
    R = torch.randn(N, N, generator=draw, dtype=torch.float64)
    q = torch.randn(N, generator=draw, dtype=torch.float64)
    A = torch.randn(ROWS, N, generator=draw, dtype=torch.float64)
    b = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    return {"quadratic": dfw.Quadratic(R @ R.T / N + 0.01 * torch.eye(N), q)} | {
        "least squares": dfw.LeastSquares(A, b)
    }


@pytest.mark.parametrize("name", ["quadratic", "least squares"])
def test_products_among_some_coordinates_are_those_of_the_whole(name):
    f = objectives()[name].bind(None)
    index = torch.tensor([3, 4, 50, 319])
    product = f.among(index)
    v = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    whole = torch.zeros(N, dtype=torch.float64).index_copy(0, index, v)
    torch.testing.assert_close(product(v), f.hvp(whole, whole)[index])


@pytest.mark.parametrize("P", [None, "batch", "sparse"])
def test_what_cannot_be_gathered_says_so(P):
    eye = torch.eye(N, dtype=torch.float64)
    given = {"batch": eye.expand(2, N, N), "sparse": eye.to_sparse()}.get(P)
    f = dfw.Quadratic(given, torch.ones(2, N, dtype=torch.float64)).bind(2)
    assert f.among(torch.arange(4)) is None


@pytest.mark.parametrize("name", ["quadratic", "least squares"])
@pytest.mark.parametrize("body", ["ball", "simplex", "box"])
def test_solutions_and_gradients_are_those_of_products_with_all_coordinates(
    name, body, monkeypatch
):
    """Tensor operations, once with the free coordinates gathered and once without."""
    f = objectives()[name]
    bodies = {
        "ball": dfw.LpBall(1, 0.3),
        "simplex": dfw.Simplex(),
        "box": dfw.Box(torch.zeros(N).double(), torch.full((N,), 0.01).double()),
    }
    used = []
    among = face_system.FaceSystem._solve_few

    def seen(self, few, *rest):
        used.append(len(few[0]))
        return among(self, few, *rest)

    monkeypatch.setattr(face_system.FaceSystem, "_solve_few", seen)
    v = torch.randn(N, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def found(large):
        monkeypatch.setattr(face_system, "LARGE", large)
        tensors = [t.clone().requires_grad_() for t in (f.P, f.q)] if hasattr(f, "P") else None
        tensors = tensors or [t.clone().requires_grad_() for t in (f.A, f.b)]
        with dfw.engines.compiled.using(False):
            sol = dfw.solve(type(f)(*tensors), bodies[body], tol=1e-10)
            return sol.x.detach(), *torch.autograd.grad(sol.x @ v, tensors)

    gathered, calls = found(256), len(used)
    plain = found(10**6)
    assert calls == len(used) > 0
    assert max(used) <= face_system.FEW * N
    for ours, other in zip(gathered, plain, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-7, atol=1e-9 * float(other.abs().max()))
