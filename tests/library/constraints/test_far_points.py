"""Projections of points near and far, against exact arithmetic; vertices and repairs to the ulp."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.composed import plane_cut
from dfwlayer.constraints.polyhedra.knapsack import falling_root
from helpers import F64, draw

DTYPES = [torch.float32, torch.float64]
FAR = [1.0, 1e3, 1e8, 1e12, 1e25]
N = 6


def exact(values):
    """Tensor entries as fractions."""
    return [Fraction(v) for v in values.tolist()]


def knapsack(z, a, lower, upper, total):
    """The point of {l ≤ x ≤ u, ⟨a, x⟩ = b} nearest to z, by a search over all pieces in θ."""

    def at(theta):
        moved = [zi - theta * ai for zi, ai in zip(z, a, strict=True)]
        return [min(max(m, lo), up) for m, lo, up in zip(moved, lower, upper, strict=True)]

    def excess(theta):
        return sum(ai * xi for ai, xi in zip(a, at(theta), strict=True)) - total

    kinks = sorted(
        {
            (zi - edge) / ai
            for zi, ai, lo, up in zip(z, a, lower, upper, strict=True)
            for edge in (lo, up)
            if ai
        }
    )
    for left, right in pairwise(kinks):
        rise, fall = excess(left), excess(right)
        if rise >= 0 >= fall:
            theta = left if rise == fall else left + (right - left) * rise / (rise - fall)
            return at(theta)
    return at(kinks[0] if excess(kinks[0]) <= 0 else kinks[-1])


def budget(z, w, t, lower, upper):
    """The point of {Σ w|x| ≤ t, l ≤ x ≤ u} nearest to z."""
    x = [min(max(zi, lo), up) for zi, lo, up in zip(z, lower, upper, strict=True)]
    if sum(wi * abs(xi) for wi, xi in zip(w, x, strict=True)) <= t:
        return x
    bound = [-lo if zi < 0 else up for zi, lo, up in zip(z, lower, upper, strict=True)]
    size = knapsack([abs(v) for v in z], w, [Fraction(0)] * len(z), bound, t)
    return [-s if zi < 0 else s for s, zi in zip(size, z, strict=True)]


def drawn(seed, dtype):
    """Sets with their exact projection."""
    torch.manual_seed(seed)
    zero, t = [Fraction(0)] * N, torch.rand((), dtype=dtype) + 0.5
    one, (total,) = [Fraction(1)] * N, exact(t.reshape(1))
    cap = torch.rand(N, dtype=dtype) * 0.4 + 0.3
    w = torch.rand(N, dtype=dtype) + 0.3
    lower, upper = -torch.rand(N, dtype=dtype), torch.rand(N, dtype=dtype)
    a = torch.randn(N, dtype=dtype)
    wide = dfw.Box(-torch.ones(N, dtype=dtype), torch.ones(N, dtype=dtype))
    three = exact((3 * t).reshape(1))[0]
    return {
        "simplex": (dfw.Simplex(t), lambda z: knapsack(z, one, zero, [total] * N, total)),
        "capped": (
            dfw.CappedSimplex(t, cap),
            lambda z: knapsack(z, one, zero, exact(cap), total),
        ),
        "l1 box": (
            dfw.L1Box(t, w, lower, upper),
            lambda z: budget(z, exact(w), total, exact(lower), exact(upper)),
        ),
        "k-sparse": (
            dfw.KSparse(3.0, t),
            lambda z: budget(z, one, three, [-total] * N, [total] * N),
        ),
        "box in a plane": (
            dfw.PlaneCut(wide, a, 0.25),
            lambda z: knapsack(z, exact(a), [-v for v in one], one, Fraction(1, 4)),
        ),
        "l1 ball": (
            dfw.LpBall(1, t),
            lambda z: budget(z, one, total, [-total] * N, [total] * N),
        ),
    }


def points(far, dtype):
    """Some at random, some with ties, some with ties that a small part decides."""
    ties = torch.randint(-2, 3, (N,)).to(dtype) * far
    return [torch.randn(N, dtype=dtype) * far, ties, ties + torch.randn(N, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", list(drawn(0, torch.float64)))
def test_projection_is_the_exact_one(name, far, dtype):
    eps = torch.finfo(dtype).eps
    for seed in range(6):
        constraint, nearest = drawn(seed, dtype)[name]
        weighted = name in ("l1 box", "box in a plane")
        if name == "box in a plane" and bool(abs(constraint.normal).sum() < 0.5):
            continue  # the plane might miss the box
        # products with weights are told from ties up to twice the digits only
        for z in points(far, dtype)[: 1 if weighted and far > 1e12 else 3]:
            want = nearest(exact(z))
            bound = constraint.bind((N,), dtype, z.device)
            several = constraint.bind((N,), dtype, z.device).project(z.expand(2, N))
            for x in (bound.project(z), bound.retract(bound.project(z)), several[1]):
                off = max(abs(Fraction(v) - e) for v, e in zip(x.tolist(), want, strict=True))
                assert float(off) <= 16 * eps, (seed, z, x, [float(v) for v in want])
            q = (-z).requires_grad_()
            sol = dfw.solve(dfw.Quadratic(None, q), constraint)
            off = max(abs(Fraction(v) - e) for v, e in zip(sol.x.tolist(), want, strict=True))
            assert float(off) <= 16 * eps, (seed, z, sol)
            assert sol.status == dfw.Status.CONVERGED


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [6, 40])
def test_batches_and_many_coordinates(n, dtype):
    """The searches of long vectors and of batches agree with the exact projection, too."""
    torch.manual_seed(n)
    eps, one, zero = torch.finfo(dtype).eps, [Fraction(1)] * n, [Fraction(0)] * n
    cap = torch.rand(n, dtype=dtype) * 0.3 + 1 / n
    constraint = dfw.CappedSimplex(1.0, cap).bind((n,), dtype, cap.device)
    for far in FAR:
        z = torch.cat((torch.randn(3, n, dtype=dtype), torch.randint(-2, 3, (3, n)).to(dtype))).mul(
            far
        )
        for row, x in zip(z, constraint.project(z), strict=True):
            want = knapsack(exact(row), one, zero, exact(cap), Fraction(1))
            off = max(abs(Fraction(v) - e) for v, e in zip(x.tolist(), want, strict=True))
            assert float(off) <= 16 * eps, (far, row, x)


def edges(ends, a, level):
    """The vertices of the hull of some points, cut by ⟨a, x⟩ = b: they lie on lines between two."""

    def along(s):
        return sum(ai * si for ai, si in zip(a, s, strict=True)) - level

    found = []
    for s in ends:
        for r in ends:
            low, high = along(s), along(r)
            if low <= 0 <= high and low != high:
                found.append(
                    [si + (ri - si) * low / (low - high) for si, ri in zip(s, r, strict=True)]
                )
    return found


def hulls(name, dtype):
    """A set and all of its vertices."""
    unit = [[Fraction(int(i == j)) for i in range(N)] for j in range(N)]
    signed = unit + [[-v for v in s] for s in unit]
    a = torch.randn(N, dtype=dtype)
    level = torch.as_tensor(0.1 * float(a.amax()), dtype=dtype)
    normal, (b,) = exact(a), exact(level.reshape(1))
    if name == "simplex in a plane":
        level = 0.5 * (a.amin() + a.amax())
        return dfw.PlaneCut(dfw.Simplex(), a, level), edges(unit, normal, Fraction(level.item()))
    if name == "l1 ball in a plane":
        return dfw.PlaneCut(dfw.LpBall(1), a, level), edges(signed, normal, b)
    side = range(3)
    each = [[Fraction(int(p[i] == j)) for i in side for j in side] for p in permutations(side)]
    return dfw.Birkhoff(3), each


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", ["simplex in a plane", "l1 ball in a plane", "birkhoff"])
def test_no_vertex_is_in_the_direction_of_the_point(name, far, dtype):
    """⟨z − x, s − x⟩ ≤ 0 for all s of the set, in exact arithmetic, tells the projection."""
    torch.manual_seed(3)
    eps = torch.finfo(dtype).eps
    for _ in range(12):
        constraint, vertices = hulls(name, dtype)
        n = len(vertices[0])
        z = torch.randn(n, dtype=dtype) * far
        if name == "birkhoff":
            z = z + torch.randint(-2, 3, (n,)).to(dtype) * far
        bound = constraint.bind((n,), dtype, z.device)
        for x in (bound.project(z), bound.project(z.expand(2, n))[0]):
            at, out = exact(x), [p - q for p, q in zip(exact(z), exact(x), strict=True)]
            size = max(abs(v) for v in out)
            for s in vertices:
                gain = sum(o * (si - xi) for o, si, xi in zip(out, s, at, strict=True))
                assert float(gain / size) <= 64 * eps, (z, x)
            assert float(bound.violation(x)) <= 16 * eps
            assert not bool(((x > 0) & (x < eps)).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "weight"), [(1e-25, 1.0), (1e25, 1.0), (1.0, 1e-18), (1.0, 1e18), (1e12, 1e12)]
)
def test_units_do_not_matter(size, weight, dtype):
    """Sets and points in other units have the same projections and vertices in those units."""
    torch.manual_seed(0)
    B, n = 3, 20
    z = 3 * torch.randn(B, n, dtype=torch.float64)
    w, cap = torch.rand(2, n, dtype=torch.float64) + 0.3
    a = torch.randn(n, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)

    def sets(s, f, kind):
        t, u, c, m = (
            (one * s * f).to(kind),
            (w * f).to(kind),
            (cap * s).to(kind),
            (a * f).to(kind),
        )
        r = (one * s).to(kind)
        yield from (dfw.Simplex(r), dfw.CappedSimplex(r, c), dfw.KSparse(2.5, r))
        yield from (dfw.L1Box(t, u, -c, c), dfw.LpBall(1, t, u), dfw.LpBall(1.1, t, u))
        yield from (dfw.LpBall(3, t, u), dfw.PlaneCut(dfw.Box(-c, c), m, 0.1 * t))
        yield dfw.PlaneCut(dfw.L1Box(t, u, -c, c), m, 0.01 * t)

    for plain, scaled in zip(sets(1.0, 1.0, torch.float64), sets(size, weight, dtype), strict=True):
        plain = plain.bind((n,), torch.float64, z.device)
        scaled = scaled.bind((n,), dtype, z.device)
        tol = {"rtol": 0, "atol": 3e-5 if dtype == torch.float32 else 1e-12}
        want = plain.retract(plain.project(z))
        got = scaled.retract(scaled.project((z * size).to(dtype))).double() / size
        torch.testing.assert_close(got, want, **tol)
        got = scaled.vertex(z.to(dtype)).double() / size
        torch.testing.assert_close(got, plain.vertex(z), **tol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vertices_are_whole(dtype):
    """k entries of ±t, and nothing in the others; what the caps leave is on one entry."""
    torch.manual_seed(0)
    for k in (1, 3, 7, 11):
        for t in (0.1, 0.3, 1 / 3, 0.7, 1e-20, 3e20):
            g = torch.randn(4, 12, dtype=dtype)
            constraint = dfw.KSparse(float(k), t).bind((12,), dtype, g.device)
            radius = torch.tensor(t, dtype=dtype)
            s = constraint.vertex(g)
            assert ((s.abs() == radius).sum(-1) == k).all()
            assert ((s == 0).sum(-1) == 12 - k).all()
            box = dfw.L1Box(k * radius, None, -radius, radius).bind((12,), dtype, g.device)
            assert torch.equal(box.vertex(g), s)
            capped = dfw.CappedSimplex(k * radius, radius).bind((12,), dtype, g.device)
            assert ((capped.vertex(g) == radius).sum(-1) == k).all()
            assert ((capped.vertex(g) == 0).sum(-1) == 12 - k).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capped_simplex_reaches_its_plane(dtype):
    """Also where every entry is at a bound, and where the caps sum to t up to rounding."""
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    for n in (3, 8, 50):
        for tight in (False, True):
            cap = torch.rand(n, dtype=dtype) + 0.1
            on = torch.ones(n, dtype=dtype) if tight else (torch.arange(n) % 2).to(dtype)
            for off in (0.0, eps, 1e-6, 1e-4, -1e-4, 1e-2, -1e-2):
                if tight and off > 0:
                    continue
                at = cap * on
                t = float(at.double().sum()) * (1 + off)
                radius = torch.tensor(t, dtype=dtype)
                if tight and float(radius) > float(cap.double().sum()):
                    radius = torch.nextafter(radius, torch.zeros_like(radius))
                constraint = dfw.CappedSimplex(radius, cap).bind((n,), dtype, cap.device)
                for x in (constraint.retract(at), constraint.retract(at.expand(2, n))[1]):
                    total = sum(exact(x))
                    assert abs(float(total / Fraction(radius.item()) - 1)) <= 2 * eps, (n, off)
                    assert bool(((x >= 0) & (x <= cap)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_objectives_end_at_a_vertex(dtype):
    """P = 0, and hardly anything of it, which makes steps that go far."""
    torch.manual_seed(0)
    q = torch.randn(8, N, dtype=dtype)
    a = torch.randn(N, dtype=dtype)
    sets = (
        dfw.Simplex(),
        dfw.CappedSimplex(1.0, 0.3),
        dfw.L1Box(1.0, None, -0.4, 0.6),
        dfw.KSparse(2.0, 0.5),
        dfw.PlaneCut(dfw.Simplex(), a, float(a.mean())),
        dfw.Product([dfw.Simplex(), dfw.CappedSimplex(1.0, 0.5)], [3, 3]),
    )
    for constraint in sets:
        want = constraint.bind((N,), dtype, q.device).vertex(q)
        for P in (0.0, 1e-12, 1e-30):
            sol = dfw.solve(dfw.Quadratic(P * torch.eye(N, dtype=dtype), q), constraint)
            assert (sol.status == int(dfw.Status.CONVERGED)).all()
            torch.testing.assert_close(sol.x, want, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_gradients_of_the_budget_projection_to_second_order():
    torch.manual_seed(0)
    z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    w = (torch.rand(5, dtype=torch.float64) + 0.5).requires_grad_()
    t = torch.rand(3, dtype=torch.float64).add(0.5).requires_grad_()
    low, high = (s * torch.rand(5, dtype=torch.float64).add(0.3) for s in (-1, 1))
    inputs = (z, w, t, low.requires_grad_(), high.requires_grad_())
    assert torch.autograd.gradcheck(dfw.project_l1_box, inputs)
    assert torch.autograd.gradgradcheck(dfw.project_l1_box, inputs)


def test_a_cut_of_a_set_that_is_small_beside_z_is_met_at_once(monkeypatch):
    """Where ⟨a, x⟩ jumps over b, by rounding, the origin moves no further."""
    searches = []

    def counted(*args, **kwargs):
        searches[-1] += 1
        return falling_root(*args, **kwargs)

    monkeypatch.setattr(plane_cut, "falling_root", counted)
    for seed in range(60):
        a, z, spread = draw(3, 5, seed=seed)
        size = 10.0 ** -(15 + seed % 10)
        sides = (-size * torch.sigmoid(spread), size * torch.sigmoid(spread + 1))
        cut = dfw.PlaneCut(dfw.L1Box(0.8 * size, lower=sides[0], upper=sides[1]), a, 0.0)
        searches.append(0)
        x = cut.bind((5,), F64, z.device).project(z)
        assert (a * x).sum().abs() <= 16 * torch.finfo(F64).eps * (a * x).abs().sum()
        assert (sides[0] <= x).all()
        assert (x <= sides[1]).all()
    assert max(searches) > 1
    assert max(searches) <= 5
