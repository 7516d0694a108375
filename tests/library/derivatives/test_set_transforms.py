"""Every set inside of every transform: what works is exact, what does not is refused."""

import math

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import dfwlayer as dfw
from helpers import F64
from set_cases import CASES

# what torch itself does when forward mode is first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

MATRICES = ("Schatten", "Nuclear", "Spectral", "Spectraplex")
FIRST_ONLY = {name for name in CASES if name.startswith(MATRICES)}
SLOW = {"Birkhoff"}  # sixteen entries, one solve each


def example(name, seed=6):
    """(q, parameters of the set) ↦ a number that depends on all of x, and a place to look at."""
    case = CASES[name]
    gen = torch.Generator().manual_seed(seed)
    own = {key: value[0] for key, value in case.parameters(gen, 1).items()}
    n = math.prod(case.shape)
    R = torch.randn(n, n, generator=gen, dtype=F64)
    P = R @ R.mT / n + torch.eye(n, dtype=F64)
    q = case.pull * torch.randn(n, generator=gen, dtype=F64)
    v = torch.randn(n, generator=gen, dtype=F64)

    def fn(x, P, q):
        x = x.reshape(*x.shape[: x.dim() - len(case.shape)], n)
        # neither quadratic nor without higher derivatives
        return ((x @ P) * x).sum(-1) / 2 + (q * x).sum(-1) + (x**4).sum(-1) / 50

    def x(q, *values):
        constraint = case.build(dict(zip(own, values, strict=True)))
        return dfw.solve(dfw.Smooth(fn, P, q, shape=case.shape), constraint, tol=1e-13).x.flatten()

    return (lambda *at: (x(*at) * v).sum()), (q, *own.values())


def slopes(loss, at):
    leaves = [t.clone().requires_grad_() for t in at]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOW])
def test_first_derivatives(name):
    loss, at = example(name)
    want = slopes(loss, at)
    every = tuple(range(len(at)))
    got = grad(loss, argnums=every)(*at)
    gen = torch.Generator().manual_seed(4)
    way = tuple(torch.randn(t.shape, generator=gen, dtype=F64) for t in at)
    _, along = jvp(loss, at, way)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    total = sum((a * b).sum() for a, b in zip(want, way, strict=True))
    torch.testing.assert_close(along, total, rtol=1e-9, atol=1e-11)
    # differences know nothing of all this
    step = 1e-5
    moved = [loss(*(t + s * d for t, d in zip(at, way, strict=True))) for s in (step, -step)]
    torch.testing.assert_close(total, (moved[0] - moved[1]) / (2 * step), rtol=1e-3, atol=1e-5)
    rows = torch.stack((at[0], -at[0]))
    mapped = vmap(lambda q: loss(q, *at[1:]))(rows)
    torch.testing.assert_close(mapped, torch.stack([loss(q, *at[1:]) for q in rows]))


@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOW])
def test_second_derivatives(name):
    loss, at = example(name)
    gen = torch.Generator().manual_seed(5)
    way = torch.randn(at[0].shape, generator=gen, dtype=F64)

    def line(s):
        return loss(at[0] + s * way, *at[1:])

    zero = torch.zeros((), dtype=F64)
    if name in FIRST_ONLY:
        for transform in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
            with pytest.raises(ValueError, match="only first derivatives"):
                transform(line)(zero)
        leaf = zero.clone().requires_grad_()
        (first,) = torch.autograd.grad(line(leaf), leaf, create_graph=True)
        with pytest.raises(ValueError, match="only first derivatives"):
            torch.autograd.grad(first, leaf)
        return
    step = 1e-4
    want = sum(s * grad(line)(zero + s * step) for s in (1, -1)) / (2 * step)
    for transform in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        torch.testing.assert_close(transform(line)(zero), want, rtol=1e-4, atol=1e-6)
    leaf = zero.clone().requires_grad_()
    (first,) = torch.autograd.grad(line(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf)
    torch.testing.assert_close(second, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", [[[0, 2], [1]], [0, 1, 0], torch.tensor([0, 1, 0])])
def test_groups_made_inside_of_a_transform_are_read_outside_of_it(given, monkeypatch):
    read = torch.Tensor.tolist

    def from_storage(t):  # as in PyTorch 2.6; tensors of a transform have none
        return read(torch.from_numpy(t.numpy()))

    monkeypatch.setattr(torch.Tensor, "tolist", from_storage)

    def loss(q):
        return dfw.solve(dfw.Quadratic(None, q), dfw.GroupBall(given, 0.5)).x.square().sum()

    q = torch.tensor([3.0, -1.0, 2.0], dtype=F64)
    torch.testing.assert_close(grad(loss)(q), slopes(loss, (q,))[0], rtol=1e-12, atol=1e-14)
