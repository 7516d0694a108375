"""Small problems over polyhedra in compiled code: against optimality conditions and differences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from compiled_cases import F32, F64, attempted, close, leaf
from dfwlayer.engines import compiled
from polyhedron_cases import (
    assert_optimal,
    assert_the_same,
    brute_force,
    by_both,
    codes,
    differences,
    problem,
    random,
    rows_of,
    solved,
)

INF = float("inf")


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("n", "m", "k"),
    [
        *((1, 0, 0), (1, 2, 0), (2, 3, 1), (3, 0, 1), (5, 12, 2), (10, 10, 0), (20, 40, 10)),
        *((50, 50, 10), (80, 150, 20), (40, 0, 20)),
    ],
)
def test_solutions_meet_the_optimality_conditions(n, m, k, seed, box):
    parts = random(seed, n, m, k, box=box)
    sol = solved(parts)
    assert_optimal(parts, sol.x, 4 * torch.finfo(F64).eps)
    f = 0.5 * sol.x @ parts["P"] @ sol.x + parts["q"] @ sol.x
    close(sol.value, f, 1e-12)
    assert 0 <= sol.gap <= 1e-9 * sol.value.abs()


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 4), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_agrees_with_all_active_sets_tried(seed, n, m, k):
    parts = random(seed, n, m, min(k, n - 1))
    value, x = brute_force(parts)
    sol = solved(parts)
    close(sol.x, torch.from_numpy(x), 1e-8)
    assert sol.value - value <= sol.gap + 1e-9 * abs(value)


@pytest.mark.parametrize("shared", [(), ("P",), ("P", "G", "A")], ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_gradients_are_those_of_differences(lead, shared):
    parts = random(4, 6, 5, 2, lead, shared=shared)
    parts["upper"] = leaf(parts["upper"].detach() + 2)
    x = solved(parts).x
    v = torch.cos(torch.arange(x.numel(), dtype=F64)).reshape(x.shape)
    gradients = torch.autograd.grad(x, list(parts.values()), v)
    assert float(gradients[-2].abs().max()) > 0
    for name, gradient in zip(parts, gradients, strict=True):
        close(gradient, differences(parts, name, v), 1e-5)


def test_gradients_of_least_squares():
    make = torch.Generator().manual_seed(2)
    A, b = (torch.randn(9, *more, dtype=F64, generator=make) for more in ((4,), ()))
    inside = random(2, 4, 3, 1, box=False)
    del inside["P"], inside["q"]

    def solution(A, b):
        found = attempted(dfw.LeastSquares(A, b), dfw.Polyhedron(**inside), tol=1e-9)
        return found.solution.x

    assert torch.autograd.gradcheck(solution, (leaf(A), leaf(b)), eps=1e-6, atol=1e-6)


def test_projections():
    """Without a P the nearest point to −q is asked for."""
    parts = random(7, 12, 8, 2)
    parts["P"] = torch.eye(12, dtype=F64)
    x = solved(parts).x
    sides = {name: parts[name] for name in parts if name not in ("P", "q")}
    own = attempted(dfw.Quadratic(None, parts["q"]), dfw.Polyhedron(**sides), tol=1e-9).solution.x
    close(own, x, 1e-12)
    v = torch.cos(torch.arange(12, dtype=F64))
    asked = [parts[name] for name in ("q", *sides)]
    for one, other in zip(
        torch.autograd.grad(own, asked, v), torch.autograd.grad(x, asked, v), strict=True
    ):
        close(one, other, 1e-11)


@pytest.mark.parametrize("shared", [(), ("P",), ("P", "G"), ("P", "G", "A")], ids=str)
def test_a_batch_is_its_problems_one_by_one(shared):
    parts = random(11, 7, 6, 2, (5,), shared=shared)
    sol = solved(parts)
    for row in range(5):
        own = {
            name: part[row] if part.dim() > 1 + (name in "PGA") else part
            for name, part in parts.items()
        }
        alone = solved(own)
        for name in ("x", "value", "gap", "num_steps"):
            assert torch.equal(getattr(sol, name)[row], getattr(alone, name))


def test_single_precision():
    parts = random(5, 20, 15, 3, (4,), dtype=F32)
    sol = solved(parts, tol=1e-5)
    for row in range(4):
        normals, sides, _ = rows_of({name: part[row] for name, part in parts.items()})
        x = sol.x[row].detach().double().numpy()
        terms = np.abs(normals) @ np.abs(x) + np.abs(sides)
        assert (normals @ x - sides <= 2 * torch.finfo(F32).eps * terms).all()
    wide = {name: leaf(part.detach().double()) for name, part in parts.items()}
    expected = solved(wide)
    close(sol.x, expected.x, 1e-6)
    v = torch.ones_like(sol.x)
    own = torch.autograd.grad(sol.x, list(parts.values()), v)
    right = torch.autograd.grad(expected.x, list(wide.values()), v.double())
    for one, other in zip(own, right, strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
@pytest.mark.parametrize("names", ["Gh", "Ab", "Pq", ("q", "h", "b", "lower", "upper")], ids=str)
def test_units_do_not_matter(names, scale):
    """Of rows, of f, of x."""
    parts = random(3, 15, 20, 4, (6,))
    x = solved(parts).x
    scaled = {name: part * (scale if name in names else 1.0) for name, part in parts.items()}
    found = solved(scaled).x
    close(found / (scale if "lower" in names else 1.0), x, 1e-11)


def test_every_row_in_units_of_its_own():
    parts = random(3, 15, 20, 4, (6,))
    units = 10.0 ** torch.linspace(-8, 8, 20, dtype=F64)
    scaled = {**parts, "G": parts["G"] * units[:, None], "h": parts["h"] * units}
    close(solved(scaled).x, solved(parts).x, 1e-11)


def test_bad_problems_do_not_touch_the_others():
    """No point in the set, not a number, bounds the wrong way round, f bent down, and none."""
    parts = random(8, 6, 5, 2, (8,))
    expected, v = solved(parts), torch.cos(torch.arange(6, dtype=F64))
    right = torch.autograd.grad(expected.x, list(parts.values()), v.expand(8, 6))
    bad = {name: part.detach().clone() for name, part in parts.items()}
    bad["G"][0, 1], bad["h"][0, 1] = -bad["G"][0, 0], -bad["h"][0, 0] - 1
    bad["G"][1, 0, 0] = torch.nan
    bad["q"][2, 3] = torch.inf
    bad["lower"][3, 2] = bad["upper"][3, 2] + 1
    bad["P"][4] = -bad["P"][4]
    bad["A"][5, 1], bad["b"][5, 1] = bad["A"][5, 0], bad["b"][5, 0] + 1
    bad["h"][6] = -torch.inf
    bad = {name: leaf(part) for name, part in bad.items()}
    assert codes(bad) == [True] * 7 + [False]
    found = attempted(*problem(**bad), tol=1e-9).solution
    assert torch.equal(found.x[7], expected.x[7])
    gradients = torch.autograd.grad(found.x, list(bad.values()), v.expand(8, 6))
    for one, other in zip(gradients, right, strict=True):
        assert torch.equal(one[7], other[7])
        assert not one[:7].any()


def test_no_side_and_rows_of_zeros():
    """±∞ are no sides, rows of zeros say nothing, or that there is no point."""
    parts = random(9, 8, 6, 2, (3,))
    x = solved(parts).x
    lower = parts["lower"].detach().clone()
    more = {
        "G": torch.cat([parts["G"], parts["G"][:, :1], 0 * parts["G"][:, :2]], 1),
        "h": torch.cat([parts["h"], parts["h"][:, :3] * 0 + torch.tensor([INF, 0, 1])], 1),
        "A": torch.cat([parts["A"], 0 * parts["A"]], 1),
        "b": torch.cat([parts["b"], 0 * parts["b"]], 1),
    }
    parts = {**parts, **more}
    assert torch.equal(solved(parts).x, x)
    parts["lower"] = torch.where(lower < x.detach(), -INF, lower)
    close(solved(parts).x, x, 1e-12)
    parts["h"] = more["h"].detach().clone()
    parts["h"][1, -1] = -1
    parts["b"] = more["b"].detach().clone()
    parts["b"][2, -1] = 1
    assert codes(parts) == [False, True, True]


def test_equations_that_others_imply():
    """Their residual is one of rounding, or there is no point."""
    parts = random(10, 9, 6, 3, (3,))
    x = solved(parts).x
    twice = {
        **parts,
        "A": torch.cat([parts["A"], parts["A"].sum(1, keepdim=True), -2 * parts["A"][:, :1]], 1),
        "b": torch.cat([parts["b"], parts["b"].sum(1, keepdim=True), -2 * parts["b"][:, :1]], 1),
    }
    close(solved(twice).x, x, 1e-12)
    twice["b"] = twice["b"] + torch.tensor([0, 0, 0, 0, 1e-6])
    assert codes(twice) == [True] * 3


def test_fixed_coordinates():
    parts = random(12, 10, 8, 2, (3,))
    middle = 0.5 * (parts["lower"] + parts["upper"]).detach()
    for i in range(0, 10, 2):
        for name in ("lower", "upper"):
            parts[name] = parts[name].detach().clone()
            parts[name][:, i] = middle[:, i]
    parts = random(12, 10, 0, 0, (3,)) | {
        "lower": leaf(parts["lower"]),
        "upper": leaf(parts["upper"]),
    }
    sol = solved(parts)
    assert torch.equal(sol.x[:, ::2], middle[:, ::2])
    both = torch.autograd.grad(sol.x.sum(), [parts["lower"], parts["upper"]])
    moved = {**parts, "lower": parts["lower"] + 1e-6, "upper": parts["upper"] + 1e-6}
    close(sum(both).sum(), (solved(moved).x - sol.x).sum() / 1e-6, 1e-4)


def test_rows_that_are_met_without_a_force():
    """They count as inactive: x moves as without them."""
    parts = {"P": leaf(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64)) + 1)}
    x = torch.tensor([1.0, -0.5, 0.25], dtype=F64)
    parts["q"] = leaf(-parts["P"].detach() @ x)
    free = torch.autograd.grad(solved(parts).x.sum(), parts["q"])[0]
    parts["G"] = leaf(torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, -1.0]], dtype=F64))
    parts["h"] = leaf((parts["G"] @ x).detach())
    parts["upper"] = leaf(torch.tensor([1.0, INF, INF], dtype=F64))
    sol = solved(parts)
    close(sol.x, x, 1e-14)
    gradients = torch.autograd.grad(sol.x.sum(), list(parts.values()))
    close(gradients[1], free, 1e-12)
    assert not any(part.any() for part in gradients[2:])


def test_f_that_bends_up_on_the_equations_only():
    """As in control: states without a cost, which the equations tie to inputs that have one."""
    parts = random(14, 12, 8, 4, (3,), box=False)
    make = torch.Generator().manual_seed(1)
    root = torch.randn(3, 9, 12, dtype=F64, generator=make)
    parts["P"] = leaf((root.mT @ root).detach())
    sol = solved(parts)
    for row in range(3):
        own = {name: part[row] for name, part in parts.items()}
        assert_optimal(own, sol.x[row], 4 * torch.finfo(F64).eps)
    v = torch.cos(torch.arange(36, dtype=F64)).reshape(3, 12)
    for name in ("q", "b", "h"):
        close(
            torch.autograd.grad(sol.x, parts[name], v, retain_graph=True)[0],
            differences(parts, name, v),
            1e-5,
        )


@pytest.mark.parametrize("seed", range(4))
def test_f_that_is_flat_along_some_directions(seed):
    """It is enough that it bends up on the rows that hold the solution."""
    parts = random(seed, 10, 8, 2)
    root = torch.randn(6, 10, dtype=F64, generator=torch.Generator().manual_seed(seed))
    parts["P"] = leaf((root.mT @ root).detach())
    assert_the_same(by_both(parts), 1e-8)
    sol = solved(parts)
    assert_optimal(parts, sol.x, 4 * torch.finfo(F64).eps)
    v = torch.cos(torch.arange(10, dtype=F64))
    for name in ("q", "b", "h", "lower"):
        gradient = torch.autograd.grad(sol.x, parts[name], v, retain_graph=True)[0]
        close(gradient, differences(parts, name, v), 1e-5)


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 40), st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_any_shape(seed, n, m, k):
    parts = random(seed, n, m, min(k, n // 2), box=bool(seed % 2))
    assert_optimal(parts, solved(parts).x, 4 * torch.finfo(F64).eps)


@pytest.mark.parametrize("shared", [(), ("P", "G", "A")], ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "m", "k"), [(3, 4, 1), (8, 12, 2), (15, 10, 4)])
def test_agrees_with_tensor_operations(n, m, k, seed, shared):
    assert_the_same(by_both(random(seed, n, m, k, (3,), shared=shared)))


def test_rows_that_are_the_same_share_what_they_carry():
    parts = random(10, 9, 6, 3, (3,))
    parts |= {name: leaf(torch.cat([parts[name], parts[name]], 1).detach()) for name in "Gh"}
    assert codes(parts) == [False] * 3
    found = by_both(parts)
    assert_the_same(found, 1e-8)
    of_h = found[0][1][3]
    assert of_h.any()
    close(of_h[:, :6], of_h[:, 6:], 1e-12)


def test_what_equations_carry_that_depend_on_others():
    """Along moves that leave a point in the set it is what the independent ones do."""
    parts = random(10, 9, 6, 3, (3,))
    x = solved(parts).x
    right = torch.autograd.grad(x.sum(), [parts["b"], parts["A"]])
    ties = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 2]], dtype=F64)
    parts["A"], parts["b"] = ties @ parts["A"], (ties @ parts["b"].unsqueeze(-1)).squeeze(-1)
    again = solved(parts)
    close(again.x, x, 1e-12)
    of_b, of_A = torch.autograd.grad(again.x.sum(), [parts["b"], parts["A"]])
    close(of_b @ ties, right[0], 1e-10)
    close(ties.mT @ of_A, right[1], 1e-10)
    close(of_b[:, 4], of_b[:, 2] / 2, 1e-10)  # in units of their largest entries


def test_agrees_where_problems_are_left():
    parts = random(8, 6, 5, 2, (5,))
    bad = {name: part.detach().clone() for name, part in parts.items()}
    bad["G"][0, 1], bad["h"][0, 1] = -bad["G"][0, 0], -bad["h"][0, 0] - 1
    bad["lower"][3, 2] = bad["upper"][3, 2] + 1
    bad["A"][4, 1], bad["b"][4, 1] = bad["A"][4, 0], bad["b"][4, 0] + 1
    bad = {name: leaf(part) for name, part in bad.items()}
    (own, gradients), (other, right) = by_both(bad, tol=1e-9)
    assert own.status.tolist() == other.status.tolist()
    good = own.status == 0
    assert good.tolist() == [False, True, True, False, False]
    close(own.x[good], other.x[good], 1e-10)
    for one, expected in zip(gradients, right, strict=True):
        close(one, expected, 1e-8)


def test_the_value_carries_its_gradient():
    """By the envelope theorem, in every part."""
    parts = random(6, 7, 6, 2, (3,))
    found = []
    for use in (True, False):
        with compiled.using(use):
            value = dfw.solve(*problem(**parts)).value
            found.append(torch.autograd.grad(value.sum(), list(parts.values())))
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-8)


def test_a_row_of_zeros_that_rounding_made_impossible():
    """0 ≤ −3e-17 is what a sum that should be zero may look like; beyond rounding it is empty."""
    P, q = torch.diag(torch.tensor([2.0, 3.0], dtype=F64)), torch.tensor([-1.0, 1.0], dtype=F64)
    G = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=F64)
    for side, status in ((-3e-17, dfw.Status.CONVERGED), (-1e-3, dfw.Status.INFEASIBLE)):
        body = dfw.Polyhedron(G, torch.tensor([side, -0.5], dtype=F64))
        found = attempted(dfw.Quadratic(P, q), body)
        assert (found is not None) == (status == dfw.Status.CONVERGED)
        sol = dfw.solve(dfw.Quadratic(P, q), body)
        assert sol.status == status
