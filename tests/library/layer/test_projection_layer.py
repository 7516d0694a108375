"""The layer without P, which projects at once, against `solve`, which certifies what it does."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer.constraints.balls.l1_nearest import nearest_l1
from dfwlayer.engines import projection
from dfwlayer.ops.kernels import nearest as nearest_kernels
from helpers import DTYPES, F64
from kernel_cases import devices, dtypes

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
everywhere = pytest.mark.parametrize("device", ["cpu", CUDA])


def leaves(*given):
    return [g.detach().clone().requires_grad_() if torch.is_tensor(g) else g for g in given]


def gradients(x, v, at):
    return torch.autograd.grad(x, [t for t in at if torch.is_tensor(t)], v)


def draw(kind, dtype, device, n=6):
    lead = () if kind == "single" else (33,)
    q = torch.randn(*lead, n, dtype=dtype)
    weight: torch.Tensor | None = torch.randn(*lead, n, dtype=dtype)
    # lighter ones would have their coordinates lost to cancellation, by some ways more than others
    weight = weight + 0.2 * weight.sign()
    radius: torch.Tensor | float = 2 * torch.rand(lead, dtype=dtype)
    if kind == "shared":
        weight, radius = torch.rand(n, dtype=dtype), torch.tensor(0.7, dtype=dtype)
    elif kind == "plain":
        weight, radius = None, 0.8
    elif kind == "zero weights":
        weight = weight * (torch.rand(*lead, n) < 0.6)
    elif kind == "zero radius":
        radius = torch.zeros_like(radius)
    elif kind == "loose":
        radius = 100 * radius + 100
    return [t.to(device) if torch.is_tensor(t) else t for t in (q, weight, radius)]


KINDS = ["single", "batch", "shared", "plain", "zero weights", "zero radius", "loose"]


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_solve(kind, dtype, device):
    torch.manual_seed(0)
    layer = dfw.DFWLayer(1)
    one, other = leaves(*(given := draw(kind, dtype, device))), leaves(*given)
    assert projection.project(*given, verify=True) is not None
    x, want = layer(None, *one), layer.solve(None, *other).x
    eps = torch.finfo(dtype).eps
    assert (x - want).abs().max() <= 64 * eps * (1 + want.abs().max())
    v = torch.randn_like(x)
    for found, exact in zip(gradients(x, v, one), gradients(want, v, other), strict=True):
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= 64 * eps * (1 + exact.abs().max())
    violation = dfw.LpBall(1, given[2], given[1]).bind((6,), dtype, x.device).violation(x.detach())
    # in float64 the recount itself rounds
    assert violation.max() <= (0 if dtype == torch.float32 else 4 * eps)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
    st.floats(0, 1e3, width=32),
    st.integers(0, 2**16),
)
def test_nearest_and_inside(values, radius, seed):
    """Optimality: what is left, z − x, is λ times a normal of the ball at x."""
    z = np.asarray(values, dtype=np.float64)
    w = np.random.default_rng(seed).uniform(0.01, 2, len(values))
    found = nearest_l1(z, w, np.asarray(float(radius)))
    assert found is not None
    x, multiplier = found.x, float(found.multiplier[0])
    assert (w * np.abs(x)).sum() <= radius
    left = z - x
    scale = 1e-12 * (1 + np.abs(z).max() / w.min())
    assert np.all(np.abs(left) <= multiplier * w + scale)
    support = x != 0
    assert np.allclose(left[support], (multiplier * w * np.sign(x))[support], atol=scale)
    if multiplier > scale:
        assert math.isclose((w * np.abs(x)).sum(), radius, rel_tol=1e-12, abs_tol=scale)


@everywhere
def test_gradcheck_of_both_orders(device):
    torch.manual_seed(3)
    given = leaves(*draw("batch", F64, device))
    layer = dfw.DFWLayer(1)

    def call(q, weight, radius):
        assert projection.project(q, weight, radius, verify=True) is not None
        return layer(None, q, weight, radius)

    torch.autograd.gradcheck(call, given)
    torch.autograd.gradgradcheck(call, given)


@everywhere
def test_x_may_be_changed_in_place(device):
    torch.manual_seed(1)
    q, weight, radius = leaves(*draw("batch", F64, device))
    layer = dfw.DFWLayer(1)
    want = gradients(layer(None, q, weight, radius) * 2, torch.ones_like(q), [q, weight, radius])
    x = layer(None, q, weight, radius)
    got = gradients(x.mul_(2), torch.ones_like(q), [q, weight, radius])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@everywhere
def test_gradients_mapped_over(device):
    """vmap over what is pulled back, the layer having been called outside of it."""
    q, weight, radius = leaves(*draw("single", F64, device))
    x = dfw.DFWLayer(1)(None, q, weight, radius)
    eye = torch.eye(len(q), dtype=F64, device=device)
    mapped = torch.vmap(lambda v: torch.autograd.grad(x, q, v, retain_graph=True)[0])(eye)
    each = torch.stack([torch.autograd.grad(x, q, v, retain_graph=True)[0] for v in eye])
    assert torch.allclose(mapped, each)


@everywhere
def test_only_the_bad_problem_is_lost(device):
    q, weight, radius = leaves(*draw("batch", F64, device))
    with torch.no_grad():
        weight[4, 2], q[7, 0], radius[9] = torch.inf, torch.nan, torch.nan
    assert projection.project(q, weight, radius, verify=True) is None
    with pytest.warns(RuntimeWarning, match=r"^3 of \d+ problems .*\(3 NONFINITE: "):
        x = dfw.DFWLayer(1)(None, q, weight, radius)
    lost = [4, 7, 9]
    assert x[lost].isnan().all()
    assert x.isnan().any(-1).sum() == 3
    (slope,) = torch.autograd.grad(x.nansum(), q)
    assert slope.isfinite().all()


@everywhere
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["batch", "shared"])
def test_a_gradient_that_is_not_finite_goes_on_in_its_problem(device, bad, kind):
    """As NaN, wherever in the row it arrives, and to all of what problems share."""
    given = leaves(*draw(kind, F64, device))
    others = torch.arange(33) != 5
    for place in range(given[0].shape[-1]):  # on coordinates that are free, and on others
        x = dfw.DFWLayer(1)(None, *given)
        v = torch.ones_like(x)
        v[5, place] = bad
        for slope, of in zip(gradients(x, v, given), given, strict=True):
            if of.shape[:1] == x.shape[:1]:
                assert slope[5].isnan().all()
                assert slope[others].isfinite().all()
            else:
                assert slope.isnan().all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("q", (torch.ones(2, 3, 0), None, 1.0)),
        ("weight", (torch.ones(2, 3), torch.ones(4), 1.0)),
        ("weight", (torch.ones(2, 3), torch.ones(3, dtype=F64), 1.0)),
        ("radius", (torch.ones(2, 3), None, torch.ones(3))),
        ("radius", (torch.ones(2, 3), None, torch.tensor(-1.0))),
        ("radius", (torch.ones(2, 3), None, -1.0)),
        ("radius", (torch.ones(2, 3), None, torch.inf)),
        ("radius", (torch.ones(2, 3), None, "one")),
        ("q: expected a dense", (torch.eye(3).to_sparse(), None, 1.0)),
        ("weight: expected a dense", (torch.ones(3), torch.ones(3).to_sparse(), 1.0)),
    ],
)
def test_what_is_wrong_is_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        dfw.DFWLayer(1)(None, *arguments)


def test_where_there_is_more_to_do_solve_does_it():
    q = torch.randn(4, 3)
    weights = torch.rand(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert projection.project(q, None, 1.0, verify=True) is None
    assert projection.project(q[0], weights, 1.0, verify=True) is None  # a batch of weights
    assert dfw.DFWLayer(1)(None, q[0], weights).shape == (2, 3)
    assert projection.project(q.bfloat16(), None, 1.0, verify=True) is None
    assert projection.project(q[:0], None, 1.0, verify=True) is None
    assert dfw.DFWLayer(1)(None, q[:0]).shape == (0, 3)


@devices
@dtypes
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@pytest.mark.parametrize("n", [1, 6, 100])
def test_kernels(kind, n, dtype, device):
    """Launched directly, as their interpreter on the CPU has to be, against NumPy."""
    torch.manual_seed(2)
    q, weight, radius = draw(kind, dtype, device, n)
    if device == "cpu":
        q, weight = q.reshape(-1, n)[:3], weight.reshape(-1, n)[:3].reshape(-1, n)
        weight = weight[0] if kind == "shared" else weight
        radius = radius.reshape(-1)[:3] if radius.dim() else radius
    v = torch.randn_like(q)
    found = nearest_kernels.nearest_l1(q, weight, radius)
    assert not found.suspect.any()
    want = nearest_l1(-q.cpu().numpy(), weight.cpu().numpy(), radius.cpu().numpy())
    assert want is not None
    eps = n**0.5 * torch.finfo(dtype).eps
    assert np.abs(found.x.cpu().numpy() - want.x).max() <= 16 * eps * (1 + np.abs(want.x).max())
    assert torch.equal(found.x, found.own)
    u, nu = want.pullback(v.cpu().numpy())
    to_q, to_weight, to_radius = nearest_kernels.pull_back_l1(
        found, v, weight, radius, to_weight=True, to_radius=True
    )
    force = want.multiplier * np.sign(want.x) * u + nu * np.abs(want.x)
    force = -np.sign(weight.cpu().numpy()) * force
    for got, exact in ((to_q, -u), (to_weight, force), (to_radius, nu[..., 0])):
        error = np.abs(got.cpu().numpy() - exact).max()
        assert error <= 16 * eps * (1 + np.abs(exact).max())


@devices
def test_kernels_tell_what_is_suspect(device):
    q, one = torch.randn(3, 4, device=device), torch.ones((), device=device)
    assert nearest_kernels.nearest_l1(q, None, -one).suspect.any()
    assert nearest_kernels.nearest_l1(q, None, one * torch.inf).suspect.any()
    assert nearest_kernels.nearest_l1(q, torch.full_like(q, torch.nan), one).suspect.any()
    q[2, 1] = torch.nan
    assert nearest_kernels.nearest_l1(q, None, one).suspect.any()


# NumPy, which the interpreter computes with, warns of ∞ − ∞
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@devices
def test_kernels_hand_on_what_is_not_finite(device):
    torch.manual_seed(3)
    q, weight, radius = draw("batch", F64, device)
    found = nearest_kernels.nearest_l1(q, weight, radius)
    v = torch.ones_like(q)
    v[2, 1], v[4, 0], v[7, 5] = torch.nan, torch.inf, -torch.inf
    pulled = nearest_kernels.pull_back_l1(found, v, weight, radius, True, True)
    lost = torch.zeros(len(q), dtype=torch.bool)
    lost[[2, 4, 7]] = True
    for slope in pulled:
        assert slope is not None
        assert slope.cpu()[lost].isnan().all()
        assert slope.cpu()[~lost].isfinite().all()
