"""Programs without a solution are recognised, all of them, and none is reported otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dfwlayer
from dfwlayer.engines import compiled
from dfwlayer.linalg.quadratic import Program, Thin, minimise
from dfwlayer.linalg.quadratic.contradiction import contradiction
from dfwlayer.solution import Status
from impossible import FAMILIES


def batch(name, n, count, seed):
    gen = torch.Generator().manual_seed(seed)
    make, status = FAMILIES[name]
    parts = [make(n, gen) for _ in range(count)]
    return {key: torch.stack([part[key] for part in parts]) for key in parts[0]}, status


def solved(parts):
    rows = {key: value for key, value in parts.items() if key not in ("P", "q")}
    rows = {k: v for k, v in rows.items() if not (k in ("G", "h", "A", "b") and v.shape[1] == 0)}
    objective = dfwlayer.Quadratic(parts["P"], parts["q"])
    return dfwlayer.solve(objective, dfwlayer.Polyhedron(**rows))


@pytest.mark.parametrize("n", [2, 12])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_are_recognised(name, n):
    parts, status = batch(name, n, 20, seed=n)
    found = solved(parts)
    assert found.status.tolist() == [int(status)] * 20


@pytest.mark.parametrize("name", FAMILIES)
def test_multipliers_and_directions_prove_it(name):
    """Aᵀν + Rᵀz = 0 with bᵀν + rᵀz < 0 leaves no point; a point is there where f falls for ever."""
    parts, status = batch(name, 5, 10, seed=3)
    program = Program(**parts)
    found = minimise(program)
    if status == Status.INFEASIBLE:
        limits = torch.where(torch.isfinite(program.limits), program.limits, 0)
        assert (found.z >= 0).all()
        assert (found.z[~torch.isfinite(program.limits)] == 0).all()
        left = (program.pulled(found.nu) + program.gathered(found.z)).abs().amax(-1)
        reach = (program.b * found.nu).sum(-1) + (limits * found.z).sum(-1)
        assert (reach < 0).all()
        assert (left <= 1e-6 * -reach).all()
    else:
        assert found.endless.all()
        assert (found.missed <= 1e-10).all()
        over = program.across(found.x) - program.limits
        assert (over <= 1e-8).all()


def test_others_of_a_batch_do_not_notice():
    parts, _ = batch("crossing_rows", 6, 4, seed=5)
    free = {key: value.clone() for key, value in parts.items()}
    free["h"][1:, -1] += 100  # no longer contradict
    both = solved(free)
    assert both.status[0] == Status.INFEASIBLE
    assert both.x[0].isnan().all()
    for i in range(1, 4):
        alone = solved({key: value[i : i + 1] for key, value in free.items()})
        assert both.status[i] == alone.status[0] == Status.CONVERGED
        assert torch.allclose(both.x[i], alone.x[0], rtol=1e-12, atol=1e-12)


def sparse_rows(m, n, share, rng):
    """Rows with few entries, none of which is empty."""
    rows = rng.standard_normal((m, n)) * (rng.random((m, n)) < share)
    for row in rows:
        if not row.any():
            row[rng.integers(n)] = rng.standard_normal()
    return rows


def solved_over(rows, P, q, mode):
    """The solution over a polyhedron of arrays, and the latter."""
    body = dfwlayer.Polyhedron(**{name: torch.from_numpy(part) for name, part in rows.items()})
    with compiled.using(mode):
        return dfwlayer.solve(
            dfwlayer.Quadratic(torch.from_numpy(P), torch.from_numpy(q)), body
        ), body


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", range(30))
def test_equations_that_contradict_each_other_beside_a_way_down(seed, mode):
    """Where f falls for ever along a direction, but no point is there to start from."""
    rng = np.random.default_rng(seed)
    n, share = int(rng.choice([60, 150])), float(rng.choice([0.02, 0.05]))
    k = int(rng.integers(2, n // 2))
    A = sparse_rows(k, n, share, rng)
    b, mix = A @ rng.standard_normal(n), rng.standard_normal(k - 1)
    A[-1], b[-1] = mix @ A[:-1], mix @ b[:-1] + 10 ** rng.uniform(-2, 2)
    R, q = sparse_rows(int(rng.integers(1, n)), n, share, rng), rng.standard_normal(n)
    rows = {"A": A, "b": b, "G": sparse_rows(3, n, share, rng), "h": rng.random(3)}
    found, body = solved_over(rows, R.T @ R, q, mode)
    assert int(found.status) == Status.INFEASIBLE
    proof = found.proof
    left = body.A.mT @ proof["b"] + body.G.mT @ proof["h"]
    reach = proof["b"] @ body.b + proof["h"] @ body.h
    assert reach < 0
    assert left.abs().max() <= 1e-6 * -reach


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", range(20))
def test_bounds_that_stay_short_of_an_equation_by_little(seed, mode):
    """A sum that bounds keep from its value, by 10⁻⁴ to 1; a point tells the multipliers."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([8, 60, 150]))
    weights, upper = rng.random(n) + 0.1, rng.random(n) + 0.1
    rows = {"A": weights[None], "b": np.array([weights @ upper + 10 ** rng.uniform(-4, 0)])}
    rows |= {"lower": -rng.random(n), "upper": upper}
    R, q = sparse_rows(int(rng.integers(1, n + 1)), n, 0.1, rng), rng.standard_normal(n)
    found, body = solved_over(rows, R.T @ R, q, mode)
    assert int(found.status) == Status.INFEASIBLE
    proof = found.proof
    slope = body.A.mT @ proof["b"]
    least = torch.where(slope > 0, slope * body.lower, slope * body.upper).sum()
    assert least > proof["b"] @ body.b


def rows_that_just_contradict(rng, amount):
    """Rows y ≥ 0 of which sum to 0 ≤ −amount, f bent in some directions, and a point without it."""
    n = int(rng.choice([5, 40, 150]))
    share, m = max(0.05, 5 / n), int(rng.integers(2, n // 2 + 1))
    G, point = sparse_rows(m, n, share, rng), rng.standard_normal(n)
    G[-1] = -(rng.random(m - 1) + 0.1) @ G[:-1]
    h = G @ point
    h[-1] -= amount * np.abs(G[-1]).max()
    R, q = sparse_rows(int(rng.integers(1, n + 1)), n, share, rng), rng.standard_normal(n)
    order = rng.permutation(m)
    return {"G": G[order], "h": h[order]}, R.T @ R, q


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", range(12))
def test_rows_that_contradict_each_other_by_little(seed, mode):
    """By 10⁻⁶ to 10⁻²: steps come that near to a solution, and the proof takes all their digits."""
    rng = np.random.default_rng(seed)
    rows, P, q = rows_that_just_contradict(rng, 10 ** rng.uniform(-6, -2))
    found, body = solved_over(rows, P, q, mode)
    assert int(found.status) == Status.INFEASIBLE
    s = found.proof["h"]
    assert s.min() >= 0
    assert s @ body.h < 0
    assert (body.G.mT @ s).abs().max() <= 1e-6 * -(s @ body.h)


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_leave_little_are_not_said_to_contradict_each_other(seed, mode):
    rng = np.random.default_rng(seed)
    rows, P, q = rows_that_just_contradict(rng, -(10 ** rng.uniform(-6, -2)))
    found, _ = solved_over(rows, P, q, mode)
    assert int(found.status) in (Status.CONVERGED, Status.ROUNDING_FLOOR, Status.UNBOUNDED)


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_a_proof_is_found_from_a_point_that_is_almost_there(layout):
    """Two rows that leave no point by 10⁻⁷, and bounds far away; none where they leave one."""
    bound = torch.tensor([[1e3, 1e3]], dtype=torch.float64)
    for amount, empty in ((1e-7, True), (-1e-7, False)):
        program = Program(
            P=torch.zeros(1, 2, 2, dtype=torch.float64),
            q=torch.zeros(1, 2, dtype=torch.float64),
            G=torch.tensor([[[1.0, 2.0], [-1.0, -2.0]]], dtype=torch.float64),
            h=torch.tensor([[1.0, -1.0 - amount]], dtype=torch.float64),
            A=torch.zeros(1, 0, 2, dtype=torch.float64),
            b=torch.zeros(1, 0, dtype=torch.float64),
            lower=-bound,
            upper=bound,
        )
        given = program if layout == "dense" else Thin.of(program, program.P, program.q)

        def ended(part):
            return minimise(part)[:3]

        asked = torch.ones(1, dtype=torch.bool)
        near = torch.tensor([[0.4, 0.3]], dtype=torch.float64)
        proof = contradiction(given, near, asked, ended)
        assert bool(proof.found) is empty
        if empty:
            left = given.gathered(proof.z)
            assert left.abs().max() <= 1e-8 * -(proof.z[:, :2] * program.h).sum()


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", range(10))
def test_rows_that_contradict_each_other_beside_ways_without_end(seed, mode):
    """A sum of rows of which the last one is short by 10⁻⁴ to 0.1, and x may go out for ever.

    Steps do: beside an x of 10⁶ and more the rows seem to be met.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 9))
    m, k = int(rng.integers(2, n)), int(rng.integers(1, 3))
    G, A, x = (rng.standard_normal(shape) for shape in ((m, n), (k, n), n))
    h, b = G @ x + 4 * rng.random(m), A @ x
    above, beside = rng.random(m) * (rng.random(m) < 0.5), rng.standard_normal(k)
    last, side = above @ G + beside @ A, above @ h + beside @ b + 10 ** rng.uniform(-4, -1)
    rows = {"G": np.vstack((G, -last)), "h": np.append(h, -side), "A": A, "b": b}
    R, q = rng.standard_normal((n, n)), rng.standard_normal(n)
    found, body = solved_over(rows, R @ R.T / n + 0.1 * np.eye(n), q, mode)
    assert int(found.status) == Status.INFEASIBLE
    proof = found.proof
    left = body.G.mT @ proof["h"] + body.A.mT @ proof["b"]
    reach = proof["h"] @ body.h + proof["b"] @ body.b
    assert proof["h"].min() >= 0
    assert reach < 0
    assert left.abs().max() <= 1e-6 * -reach
