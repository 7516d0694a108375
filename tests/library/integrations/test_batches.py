"""Tables of problems: dicts of arrays, pyarrow, pandas, in this process and in others."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch

import dfwlayer.integrations.numpy as dfw
from dfwlayer import Status
from dfwlayer.integrations import batches
from dfwlayer.integrations.batches import BatchSolver, Column

RNG = np.random.default_rng(3)
N, ROWS = 5, 12
G = RNG.normal(size=(N, N))
P = G @ G.T + np.eye(N)
BATCH = {
    "id": np.arange(ROWS),
    "q": RNG.normal(size=(ROWS, N)),
    "t": 0.1 + RNG.random(ROWS),
}


def solver(**settings) -> BatchSolver:
    return BatchSolver(dfw.Quadratic(P, Column("q")), dfw.LpBall(1, Column("t")), **settings)


def known(**settings) -> dfw.Solution:
    return dfw.solve(dfw.Quadratic(P, BATCH["q"]), dfw.LpBall(1, BATCH["t"]), **settings)


def used_threads(batch: dict) -> dict:
    """For a worker: what it solves, and how many threads it has while it does."""
    seen: list[int] = []

    def f(x, q):
        seen.append(torch.get_num_threads())
        return (0.5 * x * x + q * x).sum(-1)

    curved = dfw.Smooth(f, Column("q"), shape=N)
    BatchSolver(curved, dfw.LpBall(1, Column("t")))(batch)
    return solver()(batch) | {"threads": max(seen)}


def test_a_dict_of_arrays():
    found = solver()(BATCH)
    assert list(found) == ["id", "x", "value", "gap", "status"]
    for name in ("x", "value", "gap", "status"):
        np.testing.assert_array_equal(found[name], getattr(known(), name))
    np.testing.assert_array_equal(found["id"], BATCH["id"])
    assert solver().columns == ("q", "t")


def test_outputs_starts_and_options():
    names = {"x": "x", "multipliers.radius": "price", "num_steps": "steps"}
    asked = solver(outputs=names, keep=["t"], x0=Column("start"), tol=1e-9)
    found = asked(BATCH | {"start": np.zeros((ROWS, N))})
    assert list(found) == ["t", *names.values()]
    np.testing.assert_allclose(found["price"], known(tol=1e-9).multipliers["radius"], atol=1e-7)
    with pytest.raises(ValueError, match=r"multipliers\.lower is not a price.*radius"):
        solver(outputs=["multipliers.lower"])(BATCH)


def test_bad_rows_keep_to_themselves():
    q, t = BATCH["q"].copy(), BATCH["t"].copy()
    q[3, 1], t[5] = np.nan, -1.0
    found = solver()(BATCH | {"q": q, "t": t})
    assert found["status"][3] == Status.NONFINITE
    assert found["status"][5] != Status.CONVERGED
    assert np.isnan(found["x"][[3, 5]]).all()
    good = np.delete(np.arange(ROWS), [3, 5])
    np.testing.assert_allclose(found["x"][good], known().x[good], atol=1e-12)


def test_rows_that_do_not_fit_are_bad_where_the_shape_is_known():
    q = np.empty(ROWS, object)
    for i, row in enumerate(BATCH["q"]):
        q[i] = row.tolist()
    q[2], q[4], q[6] = None, [1.0], "nothing"
    shaped = BatchSolver(dfw.Quadratic(P, Column("q", (N,))), dfw.LpBall(1, Column("t")))
    found = shaped(BATCH | {"q": q})
    assert set(found["status"][[2, 4, 6]]) == {Status.NONFINITE}
    np.testing.assert_allclose(found["x"][7:], known().x[7:], atol=1e-12)
    with pytest.raises(ValueError, match="column 'q': expected rows of one shape"):
        solver()(BATCH | {"q": q})


def test_numbers_for_all_entries_matrices_from_lists_and_integers():
    flat = np.stack([P + i * np.eye(N) for i in range(ROWS)]).reshape(ROWS, N * N)
    limits = np.arange(1, ROWS + 1)
    boxed = BatchSolver(
        dfw.Quadratic(Column("P", (N, N)), Column("q")),
        dfw.Box(Column("low"), Column("high")),
    )
    table = BATCH | {"P": flat, "low": -0.01 * limits, "high": limits}
    found = boxed(table)
    assert found["x"].shape == (ROWS, N)
    for i in range(ROWS):
        one = dfw.solve(
            dfw.Quadratic(flat[i].reshape(N, N), BATCH["q"][i]),
            dfw.Box(-0.01 * limits[i], float(limits[i])),
        )
        np.testing.assert_allclose(found["x"][i], one.x, atol=1e-7)


@pytest.mark.parametrize("rows", [0, 1, N])  # N: as many as a problem has variables
def test_few_rows(rows):
    few = {name: values[:rows] for name, values in BATCH.items()}
    found = solver()(few)
    assert found["x"].shape == (rows, N)
    np.testing.assert_allclose(found["x"], known().x[:rows], atol=1e-12)


def test_tables_of_arrow():
    pa = pytest.importorskip("pyarrow")
    rows = [*BATCH["q"].tolist()]
    rows[1] = None
    q = pa.array(rows, pa.list_(pa.float64(), N))
    t = pa.array([None if i == 2 else float(value) for i, value in enumerate(BATCH["t"])])
    whole = pa.table({"id": BATCH["id"], "q": q, "t": t})
    # a slice, several chunks, and lists of which Arrow does not know the length
    parts = pa.concat_tables([whole.slice(0, 5), whole.slice(5)])
    loose = whole.set_column(1, "q", pa.array(rows, pa.list_(pa.float64())))
    shaped = BatchSolver(dfw.Quadratic(P, Column("q", (N,))), dfw.LpBall(1, Column("t")))
    for table in (whole, parts, loose, whole.to_batches()[0]):
        found = shaped(table)
        assert type(found) is type(table)
        assert found.schema.names == ["id", "x", "value", "gap", "status"]
        assert found.column("status").to_pylist()[1:3] == [Status.NONFINITE] * 2
        x = np.array(found.column("x").to_pylist())
        np.testing.assert_allclose(x[3:], known().x[3:], atol=1e-12)
        np.testing.assert_array_equal(found.column("id").to_numpy(), BATCH["id"])
    np.testing.assert_allclose(
        np.array(solver()(whole.slice(4, 3)).column("x").to_pylist()), known().x[4:7], atol=1e-12
    )
    assert solver()(whole.slice(0, 0)).num_rows == 0
    even = whole.slice(3).set_column(1, "q", pa.array(rows[3:]))
    assert solver()(even).num_rows == ROWS - 3


def test_tables_of_pandas():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"id": BATCH["id"], "q": list(BATCH["q"]), "t": BATCH["t"]})
    found = solver()(frame[4:])
    assert list(found.index) == list(range(4, ROWS))
    np.testing.assert_allclose(np.stack(found["x"]), known().x[4:], atol=1e-12)
    assert list(solver(keep=[])(frame).columns) == ["x", "value", "gap", "status"]


def test_pickled_and_in_other_processes_with_their_share_of_threads(monkeypatch):
    again = pickle.loads(pickle.dumps(solver(tol=1e-9)))
    np.testing.assert_array_equal(again(BATCH)["x"], known(tol=1e-9).x)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        (found,) = pool.map(used_threads, [BATCH])
    np.testing.assert_array_equal(found["x"], known().x)
    assert found["threads"] == 1


@pytest.mark.parametrize(("said", "given"), [("3", 3), ("0", 1), ("2,4", 1), (None, 1)])
def test_a_pool_is_given_what_the_environment_says(said, given, monkeypatch):
    assert batches._allowance() is None  # nobody has started this process for work
    monkeypatch.setattr(batches.multiprocessing, "parent_process", lambda: object())
    if said is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert batches._allowance() == given


def test_threads_are_as_before_after_a_batch():
    before = torch.get_num_threads()
    other = 1 + before
    found = solver(threads=other)(BATCH)
    assert torch.get_num_threads() == before
    np.testing.assert_array_equal(found["x"], known().x)


def test_compiled_code_is_waited_for(monkeypatch):
    from dfwlayer.engines.compiled import background

    seen = []
    problem = type(solver()._problem)
    solved = problem.solved

    def looked(self, tensors):
        seen.append(background.mode())
        return solved(self, tensors)

    monkeypatch.setattr(problem, "solved", looked)
    for mode, wanted in (("background", "wait"), ("off", "off")):
        with background.using(mode):
            solver()(BATCH)
        assert seen[-1] == wanted


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BatchSolver(dfw.Quadratic(P, BATCH["q"]), dfw.LpBall(1)), "expected a Column"),
        (lambda: BatchSolver(None, dfw.LpBall(1)), "objective: expected one of"),
        (lambda: solver(outputs=["y"]), "outputs: expected any of"),
        (lambda: solver(outputs=[]), "outputs: expected any of"),
        (lambda: solver(threads=0), "threads: expected"),
        (lambda: solver(keep=["x"]), "keep: 'x' is the name of an output"),
        (lambda: solver()({"q": BATCH["q"]}), r"batch: expected columns \['t'\]"),
        (lambda: solver(keep=["name"])(BATCH), r"batch: expected columns \['name'\]"),
        (lambda: solver()([1, 2]), "batch: expected a dict of NumPy arrays"),
        (
            lambda: solver()(BATCH | {"t": np.array(["a"] * ROWS)}),
            "column 't': expected numbers",
        ),
        (
            lambda: BatchSolver(dfw.Quadratic(P, Column("q", (4,))), dfw.LpBall(1))(BATCH),
            r"column 'q': expected \(4,\) in a row, got \(5,\)",
        ),
    ],
)
def test_mistakes_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()
