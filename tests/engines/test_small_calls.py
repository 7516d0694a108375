"""What is kept from one small call to the next must not be seen, nor what is left out in it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch

from dfwlayer import Box, CappedSimplex, L1Box, LpBall, Quadratic, Simplex, Status, solve
from dfwlayer.engines import compiled
from dfwlayer.engines.base import Arguments
from dfwlayer.engines.compiled import layout
from dfwlayer.methods.settings import check_settings

pytestmark = pytest.mark.skipif(not compiled.available(), reason="needs Numba")


@pytest.fixture(autouse=True)
def _compiled():
    with compiled.using("wait"):
        yield


def test_sets_of_numbers_are_kept_by_their_numbers():
    z = torch.tensor([2.0, -3.0, 0.1], dtype=torch.float64)
    for bound in (0.5, 1.0, 0.5, 2.5):
        x = solve(Quadratic(None, -z), Box(-bound, bound)).x
        assert torch.equal(x, z.clamp(-bound, bound))
    # other coordinates, another kind of set with the same numbers
    assert solve(Quadratic(None, -z[:2]), Box(-0.5, 0.5)).x.shape == (2,)
    for radius in (1.0, 2.0):
        assert solve(Quadratic(None, -z), Simplex(radius)).x.sum() == pytest.approx(radius)
        assert solve(Quadratic(None, -z), LpBall(1, radius)).x.abs().sum() <= radius
        assert solve(Quadratic(None, -z), LpBall(2, radius)).x.norm() == pytest.approx(radius)


def test_a_number_that_was_changed_behind_the_back_of_a_set_counts():
    z = torch.tensor([2.0, -3.0], dtype=torch.float64)
    box = Box(-1.0, 1.0)
    assert torch.equal(solve(Quadratic(None, -z), box).x, z.clamp(-1, 1))
    object.__setattr__(box, "upper", 1.5)
    assert torch.equal(solve(Quadratic(None, -z), box).x, z.clamp(-1, 1.5))


def test_not_more_sets_are_kept_than_there_is_room_for():
    q = torch.tensor([1.0, -1.0, 2.0])
    for i in range(3 * layout.MOST):
        solve(Quadratic(None, q), CappedSimplex(1.0, 0.5 + 0.001 * i))
    assert len(layout._of_numbers) <= layout.MOST


@pytest.mark.parametrize("smallest", [1.0, 1e-4, 1e-8])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_multiplier_of_a_round_ball_has_all_its_digits(smallest, weighted):
    random = torch.Generator().manual_seed(3)
    n = 8
    basis = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    P = basis * torch.logspace(0, 1, n, base=smallest, dtype=torch.float64) @ basis.mT
    P = 0.5 * (P + P.mT)
    q = torch.randn(5, n, generator=random, dtype=torch.float64)
    w = torch.rand(n, generator=random, dtype=torch.float64) + 0.5 if weighted else None
    size = torch.ones(n, dtype=torch.float64) if w is None else w
    found = solve(Quadratic(P, q), LpBall(2, 0.3, w), tol=1e-10)
    assert (found.status == Status.CONVERGED).all()
    assert ((size * found.x).norm(dim=-1) - 0.3).abs().max() < 1e-15
    # −∇f is a multiple of W²x
    force, normal = -(found.x @ P + q), size**2 * found.x
    along = (force * normal).sum(-1, keepdim=True) / normal.square().sum(-1, keepdim=True)
    assert (along > 0).all()
    assert (force - along * normal).abs().max() < 1e-13 * force.abs().max()


def test_a_gradient_beyond_the_range_of_its_dtype_is_dropped_alone():
    # u = P⁻¹ v is 1e40 in the first problem and 3 in the other one
    P = torch.diag_embed(torch.tensor([[1e-20, 1e-20], [1.0, 1.0]]))
    q = torch.tensor([[1e-21, -1e-21], [0.25, -0.25]]).requires_grad_()
    x = solve(Quadratic(P, q), Box(-1.0, 1.0)).x
    torch.testing.assert_close(x.detach(), torch.tensor([[-0.1, 0.1], [-0.25, 0.25]]))
    (gradient,) = torch.autograd.grad(x, q, torch.tensor([[1e20, 0.0], [3.0, 0.0]]))
    assert torch.equal(gradient, torch.tensor([[0.0, 0.0], [-3.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [0.05, 0.1, 0.25])  # of which some add up to the total
def test_a_corner_of_a_capped_simplex_is_found_by_compiled_code(cap, dtype):
    random = torch.Generator().manual_seed(0)
    q = torch.randn(64, 40, generator=random, dtype=dtype).requires_grad_()
    v = torch.randn(64, 40, generator=random, dtype=dtype)
    body = CappedSimplex(1.0, cap)
    settings = check_settings("auto", "auto", 1e-5, 1000, None, None, True)
    found = compiled.attempt(Arguments(Quadratic(None, q), body, None, None), settings)
    assert found is not None
    assert found.left is None
    x = found.solution.x
    at_bounds = ((x == 0) | (x == x.new_tensor(cap))).all(-1)
    assert at_bounds.any()
    assert (x.double().sum(-1) - 1).abs().max() < 4 * torch.finfo(dtype).eps
    (gradient,) = torch.autograd.grad((v * x).sum(), q)
    with compiled.using(False):
        other = solve(Quadratic(None, q), body)
        (expected,) = torch.autograd.grad((v * other.x).sum(), q)
    torch.testing.assert_close(x, other.x)
    torch.testing.assert_close(gradient, expected)
    assert not gradient[at_bounds].any()


def test_a_corner_whose_caps_are_learned_is_left_to_others():
    # a cap that grows moves x and one that falls leaves no point, so it is for tensor operations
    q = torch.tensor([-3.0, -2.0, 0.0, 1.0], dtype=torch.float64)
    cap = torch.full((4,), 0.5, dtype=torch.float64)
    for learned in (False, True):
        body = CappedSimplex(1.0, cap.clone().requires_grad_(learned))
        settings = check_settings("auto", "auto", 1e-5, 1000, None, None, True)
        found = compiled.attempt(Arguments(Quadratic(None, q), body, None, None), settings)
        assert (found is None) == learned
        assert torch.equal(solve(Quadratic(None, q), body).x.detach(), cap * (q < -1))


def _problem():
    q = torch.tensor([2.0, -3.0, 0.1], dtype=torch.float64)
    P = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    return P, q, torch.tensor(1.0, dtype=torch.float64)


def test_a_call_like_others_before_is_checked_for_its_own_values():
    P, q, radius = _problem()
    for _ in range(3):
        assert solve(Quadratic(P, q), LpBall(1, radius)).converged
    skew = P.clone()
    skew[0, 1] = 1.0
    with pytest.raises(ValueError, match="P: expected a symmetric"):
        solve(Quadratic(skew, q), LpBall(1, radius))
    with pytest.raises(ValueError, match="q: 3 of 3 values"):
        solve(Quadratic(P, q * torch.nan), LpBall(1, radius))
    with pytest.raises(ValueError, match="radius"):
        solve(Quadratic(P, q), LpBall(1, -radius))
    assert solve(Quadratic(-P, q), LpBall(1, radius)).status == Status.NOT_CONVEX
    batch = torch.stack((q, q * torch.nan))
    for _ in range(3):
        assert solve(Quadratic(P, batch), LpBall(1, radius)).status.tolist() == [0, 3]


SETS_OF_TENSORS = {
    "l1": lambda t, _: LpBall(1, t),
    "l1-weighted": lambda t, each: LpBall(1, t, each),
    "l2": lambda t, _: LpBall(2, t),
    "l2-weighted": lambda t, each: LpBall(2, t, each),
    "l3-weighted": lambda t, each: LpBall(3, t, each),
    "inf": lambda t, _: LpBall(float("inf"), t),
    "box": lambda _, each: Box(-each, each),
    "one-sided": lambda _, each: Box(upper=each),
    "simplex": lambda t, _: Simplex(t),
    "capped": lambda t, each: CappedSimplex(t, each),
    "l1-box": lambda t, each: L1Box(radius=t, lower=-each, upper=each),
}


@pytest.mark.parametrize("count", [None, 2])  # one for all problems, or one for each
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("make", SETS_OF_TENSORS.values(), ids=SETS_OF_TENSORS.keys())
def test_the_tensors_of_a_set_are_read_in_every_call(make, learned, count):
    random = torch.Generator().manual_seed(1)
    P = torch.diag(torch.tensor([1.0, 2.0, 4.0, 3.0], dtype=torch.float64))
    q = 3 * torch.randn(2, 4, generator=random, dtype=torch.float64)
    lead = () if count is None else (count,)
    for size in (1.0, 0.7, 1.3):  # of which only the first one is laid out by its normal form
        radius = size * torch.full(lead, 0.9, dtype=torch.float64)
        each = size * (0.4 + torch.rand(*lead, 4, generator=random, dtype=torch.float64))
        for factor in (1.0, 1.1):  # the same tensors, which were changed in place
            radius, each = radius.detach().mul_(factor), each.detach().mul_(factor)
            if learned:
                radius.requires_grad_(), each.requires_grad_()
            found = []
            for mode in ("wait", "off"):
                with compiled.using(mode):
                    x = solve(Quadratic(P, q), make(radius, each), tol=1e-12).x
                used = [t for t in (radius, each) if t.requires_grad]
                pulled = (
                    torch.autograd.grad(x.square().sum(), used, allow_unused=True) if used else ()
                )
                found.append([x.detach(), *(t for t in pulled if t is not None)])
            torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_a_tensor_that_asks_for_a_gradient_or_none_is_told_in_every_call():
    P, q, radius = _problem()
    for learned in (False, True, False, True):
        own = radius.clone().requires_grad_(learned)
        assert solve(Quadratic(P, q), LpBall(1, own)).x.requires_grad == learned
        with torch.no_grad():
            assert not solve(Quadratic(P, q), LpBall(1, own)).x.requires_grad
        if learned:
            (price,) = torch.autograd.grad(solve(Quadratic(P, q), LpBall(1, own)).value, own)
            assert price < 0


def test_two_bounds_that_were_one_tensor_are_told_apart_in_the_next_call():
    z = torch.tensor([2.0, -3.0], dtype=torch.float64)
    one, two = torch.full((2, 2), 0.5, dtype=torch.float64)
    for upper in (one, two + 0.25, one):
        assert torch.equal(solve(Quadratic(None, -z), Box(one, upper)).x, z.clamp(one, upper))


def test_what_is_kept_holds_none_of_the_tensors_of_a_call():
    P, q, _ = _problem()
    radius = torch.tensor(1.0, dtype=torch.float64)
    weight = torch.ones(3, dtype=torch.float64)
    held = [weakref.ref(radius), weakref.ref(weight)]
    for p in (1, 2, 3):
        solve(Quadratic(P, q), LpBall(p, radius, weight))
    del radius, weight
    gc.collect()
    assert [ref() for ref in held] == [None, None]


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, radius):
        return radius.view_as(radius)

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


@dataclasses.dataclass(frozen=True)
class _Slow(LpBall):
    """A ball whose radius learns at half the pace, in the same memory."""

    def normal_form(self, n):
        return LpBall(self.p, _Halved.apply(self.radius)).normal_form(n)


def test_a_set_that_changes_a_gradient_on_its_way_does_so_in_every_call():
    P, q, _ = _problem()
    slopes = []
    for kind in (LpBall, _Slow):
        for _ in range(3):
            radius = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
            x = solve(Quadratic(P, q), kind(1, radius)).x
            slopes.append(torch.autograd.grad(x.square().sum(), radius)[0].item())
    assert slopes == pytest.approx([slopes[0]] * 3 + [slopes[0] / 2] * 3)


def test_settings_that_are_equal_but_of_another_type_are_not_taken_for_each_other():
    P, q, radius = _problem()
    for _ in range(2):
        solve(Quadratic(P, q), LpBall(1, radius), verify=True, tol=1.0, max_steps=1000)
    for wrong in ({"verify": 1}, {"tol": True}, {"max_steps": 1000.0}):
        given = {"verify": True, "tol": 1.0, "max_steps": 1000} | wrong
        with pytest.raises(ValueError, match=next(iter(wrong))):
            solve(Quadratic(P, q), LpBall(1, radius), **given)
    with pytest.raises(ValueError, match="shape"):
        solve(Quadratic(P, q), LpBall(1, radius), shape=4)


@pytest.mark.filterwarnings("ignore:.*")  # of torch.jit.trace
def test_what_follows_a_call_is_asked_for_in_every_call():
    P, q, radius = _problem()
    at = solve(Quadratic(P, q), LpBall(1, radius)).x
    for _ in range(2):
        solve(Quadratic(P, q), LpBall(1, radius))

    def x_of(q):
        return solve(Quadratic(P, q), LpBall(1, radius)).x

    assert torch.func.jacrev(x_of)(q).shape == (3, 3)
    torch.testing.assert_close(torch.func.vmap(x_of)(q.expand(2, 3)), at.expand(2, 3))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(x_of, (q,))
    half = Quadratic(P.bfloat16(), q.bfloat16()), LpBall(1, radius.bfloat16())
    for _ in range(2):
        with pytest.raises(ValueError, match="bfloat16"):
            solve(*half)
        with torch.autocast("cpu", torch.bfloat16):
            assert solve(*half).x.dtype == torch.float32


def test_a_set_with_state_of_its_own_is_told_from_others_of_its_class():
    q = torch.tensor([2.0, -3.0], dtype=torch.float64)

    class Cube(Box):  # no dataclass of its own
        def __init__(self, size):
            super().__init__(-size, size)
            object.__setattr__(self, "size", size)

    for size in (1.0, 2.0, 1.0):
        assert torch.equal(solve(Quadratic(None, q), Cube(size)).x, -q.clamp(-size, size))


def test_an_input_that_changes_after_the_solve_is_noticed():
    P, q, radius = _problem()
    q.requires_grad_()
    for _ in range(3):
        found = solve(Quadratic(P, q), LpBall(1, radius))
    P += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.x.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _ = found.multipliers


def test_parts_that_nobody_asked_for_are_those_of_the_solve():
    P, q, radius = _problem()
    found = [solve(Quadratic(P, q), LpBall(1, radius)) for _ in range(4)]
    with torch.inference_mode():
        gap = found[0].gap
    assert not gap.is_inference()
    for other in (copy.deepcopy(found[1]), pickle.loads(pickle.dumps(found[2])), found[3]):
        assert other.gap == gap
        assert other.status == Status.CONVERGED
        assert other.num_steps.dtype == torch.int64
        assert other.gap.shape == other.status.shape == ()
        assert not hasattr(other, "nothing")
    again = dataclasses.replace(solve(Quadratic(P, q), LpBall(1, radius)), x=q)
    assert again.gap == gap
    assert "CONVERGED 1" in repr(solve(Quadratic(P, q), LpBall(1, radius)))


def test_a_tensor_that_is_also_the_sets_is_not_taken_for_it_in_the_next_call():
    # both calls have one signature; in the first one q is the upper bound as well
    q = torch.tensor([0.5, 0.25], dtype=torch.float64)
    low, other = torch.full_like(q, -1.0), torch.tensor([-0.3, 0.1], dtype=torch.float64)
    for _ in range(3):
        assert torch.equal(solve(Quadratic(None, q), Box(low, q)).x, -q)
        assert torch.equal(solve(Quadratic(None, other), Box(low, q)).x, -other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [2, 5, 40])  # whose entries are looked at in different ways
def test_a_gradient_that_is_no_number_spoils_its_own_problem_only(n, bad):
    q = torch.linspace(-0.5, 0.5, 3 * n, dtype=torch.float64).reshape(3, n).requires_grad_()
    v = torch.ones(3, n, dtype=torch.float64)
    v[1, 0], v[1, 1] = bad, -bad
    (gradient,) = torch.autograd.grad(solve(Quadratic(None, q), Box(-1.0, 1.0)).x, q, v)
    assert gradient[1].isnan().all()
    assert torch.equal(gradient[[0, 2]], -v[[0, 2]])
