"""What has no place inside of transforms, and that it is refused rather than wrong."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap

import dfwlayer as dfw
from dfwlayer.constraints import Face
from dfwlayer.objectives import Objective
from helpers import F64, close, make_case

# what torch itself does when forward mode is first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def test_a_sparse_matrix_is_a_constant():
    case = make_case("COO least squares", "p=1", "signed", rows=None, n=4, seed=73)
    A, b, ball = case.params["A"], case.params["b"], case.problem()[1]
    assert b.dim() == 1

    def x(A):
        return lambda b: dfw.solve(dfw.LeastSquares(A, b), ball, tol=1e-14).x

    sparse = A.to_sparse()
    close(jacrev(x(sparse))(b), jacrev(x(A))(b), rtol=1e-9, atol=1e-12)
    close(jacfwd(x(sparse))(b), jacrev(x(A))(b), rtol=1e-9, atol=1e-12)
    close(vmap(x(sparse))(torch.stack((b, -b))), x(A)(torch.stack((b, -b))), rtol=1e-9)
    with pytest.raises(RuntimeError, match="sparse"):
        vmap(x(sparse.requires_grad_()))(torch.stack((b, -b)))
    leaf = b.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="sparse"):
        torch.autograd.grad(x(sparse)(leaf).sum(), leaf, create_graph=True)


def test_derivatives_that_would_be_lost_are_refused():
    linear = torch.nn.Linear(3, 2, dtype=F64)
    c = torch.randn(2, 3, dtype=F64, requires_grad=True)

    def x(c):
        def fn(x, c):
            return torch.logsumexp(linear(x), -1) + (x * x).sum(-1) + (c * x).sum(-1)

        return dfw.solve(dfw.Smooth(fn, c, shape=3), dfw.LpBall(2.0, 0.1)).x

    def inside(c):  # the variable of the transform itself is what is hidden
        def fn(x, F):
            return (x * x).sum(-1) + (c * x).sum(-1)

        F = torch.ones(3, dtype=F64)
        return dfw.solve(dfw.Smooth(fn, F, shape=3), dfw.LpBall(2.0, 0.1)).x.sum()

    with pytest.raises(RuntimeError, match="not one of its arguments"):
        torch.autograd.grad(x(c[0]).sum(), c, create_graph=True)
    with pytest.raises(RuntimeError, match="not one of its arguments"):
        vmap(x)(c)
    for transform in (grad, jacfwd):
        with pytest.raises(RuntimeError, match="not one of its arguments"):
            transform(inside)(c[0].detach())
    linear.requires_grad_(False)
    close(vmap(x)(c), torch.stack((x(c[0]), x(c[1]))), rtol=1e-9)


def test_what_cannot_be_replaced_is_refused():
    class Plain(Objective):
        """½‖x‖² + ⟨q, x⟩, without fields."""

        ranks: ClassVar = {"q": 1}
        shape = (2,)

        def __init__(self, q):
            self.q = q

        def value(self, x):
            return (x * (0.5 * x + self.q)).sum(-1)

        def gradient(self, x):
            return x + self.q

        def hvp(self, x, v):
            return v

    q = torch.tensor([1.0, -2.0], dtype=F64)
    with pytest.raises(ValueError, match="objective: expected a dataclass"):
        grad(lambda q: dfw.solve(Plain(q), dfw.LpBall(2.0, 0.1)).x.sum())(q)


def test_the_old_vmap_says_where_to_go():
    case = make_case("quadratic", "p=1", rows=None, n=4)
    leaf = case.params["q"].clone().requires_grad_()
    x = dfw.solve(*case.problem(q=leaf)).x
    eye = torch.eye(4, dtype=F64)
    with pytest.raises(RuntimeError, match=r"torch\.func\.jacrev"):
        torch.autograd.grad(x, leaf, eye, is_grads_batched=True)


@dataclass(frozen=True)
class HalfSpaceFace(Face):
    """A face that does not tell its multiplier."""

    x: torch.Tensor
    normal: torch.Tensor
    free: torch.Tensor

    @property
    def normals(self):
        return (self.normal,)

    def excess(self):
        return torch.zeros_like(self.normal[..., :1])


class Inside(dfw.LpBall):
    """A ball that no solution touches."""

    def face(self, x, g, scale=None):
        return HalfSpaceFace(x, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool))


def test_a_face_without_its_multiplier_is_refused():
    q = torch.tensor([0.1, -0.2], dtype=F64, requires_grad=True)
    x = dfw.solve(dfw.Quadratic(None, q), Inside(2.0, 10.0)).x
    close(torch.autograd.grad(x.sum(), q, retain_graph=True)[0], -torch.ones(2), rtol=1e-12)
    with pytest.raises(ValueError, match="fields x and multiplier"):
        torch.autograd.grad(x.sum(), q, create_graph=True)
