"""Single sparse programs, whole in compiled code."""

from importlib import import_module

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import eager
from dfwlayer.engines.compiled.background import using
from dfwlayer.engines.compiled.kernels import outcome
from program_cases import drawn

pytest.importorskip("numba")
pytest.importorskip("scipy")
thin = pytest.importorskip("dfwlayer.engines.compiled.thin")

F64 = torch.float64
INF = float("inf")
LIMITS = 1e-8, 1000


@pytest.fixture(autouse=True)
def _compiled():
    with using("wait"):
        yield


def given(parts, sparse=False):
    parts = dict(parts)
    P = parts.pop("P")
    return dfw.Quadratic(P.to_sparse() if sparse else P, parts.pop("q")), dfw.Polyhedron(**parts)


def code_of(parts):
    """What compiled code says of a program, and x."""
    layout = thin.lay_out_thin(*given(parts, sparse=True))
    assert layout is not None
    found = layout.search(None, *LIMITS)
    return int(found.codes[0, 0]), torch.from_numpy(found.x[0])


def gradients(parts, names, sparse=False):
    parts = {n: p.clone().requires_grad_(n in names) for n, p in parts.items()}
    solution = dfw.solve(*given(parts, sparse), tol=1e-10)
    v = torch.linspace(-1, 1, solution.x.shape[-1], dtype=F64)
    loss = (v * solution.x).sum() + solution.value
    return solution, torch.autograd.grad(loss, [parts[name] for name in names])


def far_apart(parts, seed):
    """The same program with rows and coordinates in units of their own."""
    torch.manual_seed(seed)
    d, r, e = (10.0 ** torch.randint(-1, 2, (len(parts[n]),)).double() for n in "qhb")
    return {
        "P": d * parts["P"] * d[:, None],
        "q": d * parts["q"],
        "G": r[:, None] * parts["G"] * d,
        "h": r * parts["h"],
        "A": e[:, None] * parts["A"] * d,
        "b": e * parts["b"],
        "lower": parts["lower"] / d,
        "upper": parts["upper"] / d,
    }


@pytest.mark.parametrize("units", [False, True], ids=["one unit", "many units"])
@pytest.mark.parametrize("rank", [None, 5, 0], ids=["bent", "mostly flat", "linear"])
def test_solutions_are_those_of_tensor_operations(rank, units):
    for seed in range(4):
        parts = drawn(120, 40, 60, seed, rank)
        parts = far_apart(parts, seed) if units else parts
        code, x = code_of(parts)
        assert code in (outcome.SOLVED, outcome.SHARED)
        solution = dfw.solve(*given(parts, sparse=True), tol=1e-10)
        assert bool(solution.converged)
        with using(False):
            slow = dfw.solve(*given(parts, sparse=True), tol=1e-10)
        torch.testing.assert_close(solution.value, slow.value, rtol=1e-11, atol=0)
        terms = parts["G"].abs() @ x.abs() + parts["h"].abs()
        assert bool((parts["G"] @ x - parts["h"] <= 1e-14 * terms).all())
        assert bool((parts["lower"] <= x).all()) and bool((x <= parts["upper"]).all())  # noqa: PT018


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("rank", [None, 0], ids=["bent", "linear"])
def test_gradients_are_those_of_tensor_operations(rank, sparse):
    names = ["q", "h", "b", "lower", "upper"] if sparse else list(drawn(10, 1, 1, 0))
    for seed in range(3):
        parts = drawn(260, 60, 80, seed, rank)
        parts["upper"][::7] = parts["lower"][::7] = 0.5  # some coordinates are fixed
        parts["b"] = parts["A"] @ torch.full((260,), 0.5, dtype=F64)
        parts["h"] = parts["G"] @ torch.full((260,), 0.5, dtype=F64) + 0.1
        assert code_of(parts)[0] == outcome.SOLVED
        solution, quick = gradients(parts, names, sparse)
        with using(False):
            _, slow = gradients(parts, names, sparse)
        assert bool(solution.converged)
        for name, one, other in zip(names, quick, slow, strict=True):
            size = float(other.abs().max())
            assert size > 0, name
            torch.testing.assert_close(one, other, rtol=0, atol=1e-8 * size, msg=name)


def test_a_value_differs_as_its_gradient_says():
    parts = drawn(200, 40, 60, 5)
    way = {n: torch.randn(p.shape, dtype=F64) for n, p in parts.items() if p.dim() == 1}
    way["b"] = parts["A"] @ way["q"]  # towards where there are points

    def value(step):
        moved = {n: p + step * way[n] if n in way else p for n, p in parts.items()}
        return float(dfw.solve(*given(moved, sparse=True), tol=1e-12).value)

    names = list(way)
    own = {n: p.clone().requires_grad_(n in way) for n, p in parts.items()}
    solution = dfw.solve(*given(own, sparse=True), tol=1e-12)
    slopes = torch.autograd.grad(solution.value, [own[n] for n in names])
    along = sum(float((s * way[n]).sum()) for n, s in zip(names, slopes, strict=True))
    assert (value(1e-6) - value(-1e-6)) / 2e-6 == pytest.approx(along, rel=1e-5)


def test_more_solutions_than_one_are_left_to_others_for_their_gradient():
    parts = drawn(150, 20, 30, 1, rank=3)
    parts["q"] = 0 * parts["q"]  # f* may be zero, along a whole plane
    parts["q"][0] = -1.0
    code, _ = code_of(parts)
    assert code == outcome.SHARED
    assert bool(dfw.solve(*given(parts, sparse=True)).converged)
    q = parts["q"].clone().requires_grad_()
    solution = dfw.solve(*given(parts | {"q": q}, sparse=True))
    (slope,) = torch.autograd.grad(solution.value, q)
    assert bool(solution.converged)
    torch.testing.assert_close(slope, solution.x.detach())


def test_a_weakly_active_bound_is_left_to_others_for_its_gradient():
    parts = drawn(200, 1, 1, 2)
    for name in "GhAb":
        del parts[name]
    parts["P"] = torch.eye(200, dtype=F64)
    parts["q"] = -torch.linspace(0.2, 0.8, 200, dtype=F64)
    parts["upper"][10] = -parts["q"][10]
    assert code_of(parts)[0] == outcome.SHARED
    _, (slope,) = gradients(parts, ["upper"], sparse=True)
    with using(False):
        _, (other,) = gradients(parts, ["upper"], sparse=True)
    torch.testing.assert_close(slope, other)


def test_what_has_no_answer_is_left_to_others():
    parts = drawn(160, 10, 20, 3)
    bad = {
        "INFEASIBLE": parts | {"lower": 0 * parts["q"] + 2, "upper": 0 * parts["q"] + 3},
        "UNBOUNDED": parts | {"P": 0 * parts["P"], "h": 0 * parts["h"] + INF},
        "NOT_CONVEX": parts | {"P": parts["P"] - 50 * torch.eye(160, dtype=F64)},
    }
    bad["UNBOUNDED"] |= {"lower": 0 * parts["q"] - INF, "upper": 0 * parts["q"] + INF}
    assert code_of(parts | {"q": parts["q"] + float("nan")})[0] == outcome.UNFIT
    for status, each in bad.items():
        assert code_of(each)[0] not in (outcome.SOLVED, outcome.SHARED), status
        objective, body = given(each)
        with using(False):
            slow = dfw.solve(objective, body).status
        assert dfw.Status(int(slow)).name == status
        assert int(dfw.solve(objective, body).status) == int(slow)


def test_rows_whose_coordinates_are_fixed_are_met_to_rounding():
    """What rounding leaves of such a row cannot be met by any x."""
    parts = drawn(160, 10, 20, 5)
    on = parts["A"][0] != 0
    value = torch.tensor([0.1, 0.2, 0.7, 0.3], dtype=F64)
    parts["lower"][on] = parts["upper"][on] = value
    parts["b"] = parts["A"] @ torch.full((160,), 0.5, dtype=F64)
    parts["b"][0] = (parts["A"][0, on] * value).sum() * (1 + 4e-16)
    others = (parts["A"][1:, on] * (value - 0.5)).sum(-1)
    parts["b"][1:] += others
    parts["h"] = parts["G"] @ torch.full((160,), 0.5, dtype=F64) + 3.0
    assert code_of(parts)[0] in (outcome.SOLVED, outcome.SHARED)
    parts["b"][0] += 1e-3
    assert code_of(parts)[0] not in (outcome.SOLVED, outcome.SHARED)
    assert dfw.Status(int(dfw.solve(*given(parts, sparse=True)).status)).name == "INFEASIBLE"


def test_multipliers_that_grow_with_every_row():
    """Second differences that f pushes against; steps that keep near a feasible point get short."""
    n = 300
    G = torch.zeros(n - 2, n, dtype=F64)
    for i in range(n - 2):
        G[i, i : i + 3] = torch.tensor([1.0, -2.0, 1.0], dtype=F64)
    time = torch.linspace(0, 1, n, dtype=F64)
    parts = {"P": torch.eye(n, dtype=F64), "q": -(time**2), "G": G, "h": 0 * G[:, 0]}
    code, x = code_of(parts)
    assert code in (outcome.SOLVED, outcome.SHARED)
    line = torch.stack((torch.ones_like(time), time), -1)
    fit = line @ torch.linalg.lstsq(line, time**2).solution
    torch.testing.assert_close(x, fit, rtol=0, atol=1e-9)


def test_a_matrix_that_is_not_symmetric_is_left_to_others():
    parts = drawn(160, 10, 20, 4)
    parts["P"][3, 5] += 1.0
    assert code_of(parts)[0] == outcome.UNFIT


@pytest.mark.parametrize("sizes", [(30, 8, 12), (150, 40, 60)], ids=["few entries", "thin"])
def test_programs_that_dense_factors_leave(sizes, monkeypatch):
    """With P = 0 the dual active-set method has no metric."""
    parts = drawn(*sizes, 6, rank=0)
    with monkeypatch.context() as patch:
        patch.setattr(eager, "locate", lambda *_: pytest.fail("tensor operations"))
        layout_free = dfw.solve(*given(parts))
    assert bool(layout_free.converged)
    with using(False):
        slow = dfw.solve(*given(parts))
    torch.testing.assert_close(layout_free.x, slow.x, rtol=0, atol=1e-9)


def test_constants_are_those_of_tensor_operations():
    """Kernels have them in their own files, by which what is compiled on disk is known."""
    kernels, tensors = "dfwlayer.engines.compiled.kernels", "dfwlayer.linalg.quadratic"
    for own, other, names in (
        ("units", "units", ("FAR", "STEADY", "PASSES")),
        ("proof", "faces", ("DOUBT", "STEEP")),
        ("sparse_system", "thin", ("CLOSED",)),
    ):
        kernel = import_module(f"{kernels}.{own}")
        wanted = import_module(f"{tensors}.{other}")
        for name in names:
            assert getattr(kernel, name) == getattr(wanted, name), name


def test_equations_that_contradict_each_other_are_not_met_far_out():
    """Beside a point of size 10¹⁶ an amount by which rows are missed would look like rounding."""
    torch.manual_seed(0)
    for seed in range(60):
        drawn_rows = torch.Generator().manual_seed(seed)
        A = torch.randn(3, 8, generator=drawn_rows, dtype=F64)
        A[2] = A[0] - 0.3 * A[1]
        b = torch.tensor([0.4, -1.1, 6.0], dtype=F64)
        R = torch.randn(4, 8, generator=drawn_rows, dtype=F64)
        q = torch.randn(8, generator=drawn_rows, dtype=F64)
        found = dfw.solve(dfw.Quadratic(R.T @ R, q), dfw.Polyhedron(A=A, b=b))
        assert not bool(found.converged)
        assert int(found.status) != int(dfw.Status.ROUNDING_FLOOR)
