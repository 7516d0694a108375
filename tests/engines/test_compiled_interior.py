"""Interior-point steps of one sparse program in compiled code."""

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines.compiled.background import using
from dfwlayer.engines.compiled.interior import walked
from dfwlayer.engines.compiled.kernels import ordering
from dfwlayer.linalg.quadratic import Program, Thin, homogeneous, minimise, solver
from dfwlayer.linalg.quadratic.thin import small_or_thin
from dfwlayer.linalg.quadratic.units import in_units
from dfwlayer.linalg.sparse_factor import as_csr, exact_factor
from program_cases import drawn

numba = pytest.importorskip("numba")
pytest.importorskip("scipy")

F64 = torch.float64
INF = float("inf")


@pytest.fixture(autouse=True)
def _compiled():
    with using("wait"):
        yield


def thin(P, q, G, h, A, b, lower, upper):
    vectors = (part.unsqueeze(0) for part in (q, h, b, lower, upper))
    return Thin(as_csr(P), as_csr(G), as_csr(A), *vectors)


@pytest.mark.parametrize("rank", [None, 5, 0], ids=["bent", "mostly flat", "linear"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_solution_as_by_tensor_operations(seed, rank, monkeypatch):
    program = thin(**drawn(120, 40, 60, seed, rank))
    scaled, _ = in_units(program)
    found = walked(scaled, 100)
    assert found is not None
    assert float(found.off) <= 1e-9
    quick = minimise(program)
    monkeypatch.setattr(homogeneous, "_offered", [])
    slow = minimise(program)
    assert bool(quick.exact) and bool(slow.exact)  # noqa: PT018
    torch.testing.assert_close(program.value(quick.x), program.value(slow.x), rtol=1e-11, atol=0)


def test_steps_are_taken_in_compiled_code(monkeypatch):
    """Tensor operations have no steps to take where it ends on a face."""

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(solver, "interior", never)
    parts = drawn(200, 50, 80, 3)
    objective = dfw.Quadratic(parts.pop("P").to_sparse(), parts.pop("q"))
    found = dfw.solve(objective, dfw.Polyhedron(**parts))
    assert bool(found.converged)


def test_rows_that_depend_on_each_other_and_rows_without_a_limit():
    parts = drawn(100, 30, 40, 4)
    plain = minimise(thin(**parts))
    parts["A"] = torch.cat((parts["A"], parts["A"][:7] + parts["A"][7:14]))
    parts["b"] = torch.cat((parts["b"], parts["b"][:7] + parts["b"][7:14]))
    parts["G"] = torch.cat((parts["G"], parts["G"][:5], 0 * parts["G"][:2], -parts["G"][:1]))
    parts["h"] = torch.cat((parts["h"], torch.tensor([INF] * 5 + [1.0, 0.0, INF], dtype=F64)))
    more = minimise(thin(**parts))
    assert bool(more.exact)
    torch.testing.assert_close(more.x, plain.x, rtol=0, atol=1e-10)


def test_programs_without_a_solution_are_left_to_those_who_prove_it():
    parts = drawn(90, 20, 70, 5, 0)
    empty = parts | {"h": parts["h"] - 100}
    assert walked(in_units(thin(**empty))[0], 100) is None
    assert bool(minimise(thin(**empty)).empty)
    endless = parts | {"upper": parts["upper"] + INF, "lower": parts["lower"] - INF}
    endless |= {"G": parts["G"][:5], "h": parts["h"][:5]}
    assert bool(minimise(thin(**endless)).endless)


def test_a_limit_of_steps_holds():
    scaled, _ = in_units(thin(**drawn(100, 30, 40, 6)))
    assert walked(scaled, 2) is None
    found = walked(scaled, 100)
    assert found is not None
    assert int(found.steps) > 2


def test_where_compiled_code_is_off_there_is_none():
    with using(False):
        assert walked(thin(**drawn(50, 5, 5, 7)), 100) is None


def test_one_small_program_is_seen_as_a_sparse_one_and_a_batch_is_not():
    parts = drawn(20, 4, 5, 8)
    order = ("P", "q", "G", "h", "A", "b", "lower", "upper")
    one = Program(*(parts[name].unsqueeze(0) for name in order))
    seen = small_or_thin(one)
    assert seen is not None
    assert np.array_equal(seen.G.toarray(), parts["G"].numpy())
    two = Program(*(torch.stack((parts[name], parts[name])) for name in order))
    assert small_or_thin(two) is None


def by_rows(matrix):
    found = as_csr(torch.from_numpy(matrix))
    start, place = (part.astype(np.int64) for part in (found.indptr, found.indices))
    return start, place, found.data


def filled(matrix, order):
    """Entries below the diagonal of the factor of a matrix with that pattern."""
    pattern = (matrix != 0)[np.ix_(order, order)]
    for j in range(len(order)):
        below = j + 1 + np.flatnonzero(pattern[j + 1 :, j])
        pattern[np.ix_(below, below)] = True
    return int(np.tril(pattern, -1).sum())


@numba.njit
def ordered(P, A, G):
    return ordering.elimination_order(P, A, G)


def test_an_order_keeps_the_factor_of_an_arrow_sparse():
    """The tip, next to all others, has to come last; ahead of them it would fill everything."""
    n = 300
    arrow = np.eye(n)
    arrow[0] = arrow[:, 0] = 1
    none = by_rows(np.zeros((0, n)))
    order = ordered(by_rows(arrow), none, none)
    assert sorted(order) == list(range(n))
    assert filled(arrow, order) == n - 1


@pytest.mark.parametrize("seed", range(3))
def test_an_order_is_as_good_as_that_of_scipy(seed):
    parts = {name: part.numpy() for name, part in drawn(80, 25, 40, seed).items()}
    order = ordered(*(by_rows(parts[name]) for name in "PAG"))
    scaled = thin(**{name: torch.from_numpy(part) for name, part in parts.items()})
    matrix = scaled.bordered.toarray() != 0
    size = len(matrix)
    assert sorted(order) == list(range(size))
    safe = as_csr(torch.from_numpy(np.where(matrix, -1.0, 0.0) + 2 * size * np.eye(size)))
    other = np.argsort(exact_factor(safe.tocsc()).perm_c)
    assert filled(matrix, order) <= 1.15 * filled(matrix, other)


@pytest.mark.parametrize("seed", range(2))
def test_the_minimiser_on_the_face_comes_with_the_steps(seed, monkeypatch):
    """Tensor operations have no face to look for where compiled code has found it."""

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(solver, "on_face", never)
    found = minimise(thin(**drawn(150, 40, 60, seed)))
    assert bool(found.exact)


@pytest.mark.parametrize("n", [300, 2000])
def test_multipliers_that_are_large_are_reached(n, monkeypatch):
    """From a start of size one the steps would get shorter and shorter.

    The second differences of x are to be at most zero, against an x that f would have curved
    upwards: the multipliers are sums of sums. From some hundred coordinates on a ridge in the
    system of the face, of condition n⁴, would hide them.
    """
    monkeypatch.setattr(solver, "interior", lambda *_: pytest.fail("steps by tensor operations"))
    G = torch.zeros(n - 2, n, dtype=F64)
    for i in range(n - 2):
        G[i, i : i + 3] = torch.tensor([1.0, -2.0, 1.0], dtype=F64)
    time = torch.linspace(0, 1, n, dtype=F64)
    free = torch.full((n,), INF, dtype=F64)
    none = torch.zeros(0, n, dtype=F64)
    program = thin(
        torch.eye(n, dtype=F64), -(time**2), G, 0 * G[:, 0], none, none[:, 0], -free, free
    )
    found = minimise(program)
    assert bool(found.exact)
    # the straight line next to t²
    line = torch.stack((torch.ones_like(time), time), -1)
    fit = line @ torch.linalg.lstsq(line, time**2).solution
    torch.testing.assert_close(found.x[0], fit, rtol=0, atol=1e-9)
