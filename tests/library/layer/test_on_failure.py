"""What a layer says about problems that it could not solve."""

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import SolveError, Status

EYE = torch.eye(2)
GOOD = torch.tensor([[1.0, -2.0], [0.5, 0.25]])
# name: (arguments of the layer, arguments of the call, the row that fails)
FAILURES = {
    "NOT_CONVEX": ({"p": 2}, (torch.stack((EYE, -EYE)), GOOD), 1),
    "NONFINITE": ({"p": 1}, (None, GOOD * torch.tensor([[1.0], [torch.nan]])), 1),
    "UNBOUNDED": (
        {"p": 1},
        (torch.diag(torch.tensor([1.0, 0.0])), GOOD, torch.tensor([[1.0, 1.0], [1.0, 0.0]])),
        1,
    ),
    "INVALID": ({"p": 2}, (None, GOOD, None, torch.tensor([1.0, -1.0])), 1),
    "MAX_STEPS": ({"p": 1, "max_steps": 0}, (None, GOOD * torch.tensor([[0.0], [1.0]])), 1),
}


def quietly(call, *args):
    """The result, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args)


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_said_once_for_each_layer(name):
    settings, args, row = FAILURES[name]
    layer = dfw.DFWLayer(**settings)
    sol = quietly(layer.solve, *args)
    assert sol.status[row] == Status[name]
    expected = rf"^1 of 2 problems were not solved \(1 {name}: .*on_failure='ignore'"
    with pytest.warns(RuntimeWarning, match=expected) as caught:
        x = layer(*args)
    assert Status[name].message in str(caught[0].message)
    assert torch.equal(x, sol.x) or sol.x.isnan().any()
    quietly(layer, *args)
    with pytest.warns(RuntimeWarning, match=expected):
        dfw.DFWLayer(**settings)(*args)


@pytest.mark.parametrize("name", FAILURES)
def test_ignore_and_raise(name):
    settings, args, row = FAILURES[name]
    x = quietly(dfw.DFWLayer(**settings, on_failure="ignore"), *args)
    layer = dfw.DFWLayer(**settings, on_failure="raise")
    for _ in range(2):
        with pytest.raises(SolveError, match=rf"1 of 2 problems .*1 {name}: ") as caught:
            layer(*args)
        sol = caught.value.solution
        assert sol.status[row] == Status[name]
        torch.testing.assert_close(sol.x, x, equal_nan=True)
    assert quietly(layer.solve, *args).status[row] == Status[name]
    assert isinstance(caught.value, RuntimeError)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert str(twin) == str(caught.value)
    assert torch.equal(twin.solution.status, sol.status)


def test_statuses_are_counted():
    P = torch.stack((EYE, -EYE, -2 * EYE, EYE))
    q = torch.ones(4, 2)
    q[3] = torch.nan
    expected = r"^3 of 4 problems .*\(1 NONFINITE: .*; 2 NOT_CONVEX: "
    with pytest.warns(RuntimeWarning, match=expected):
        dfw.DFWLayer(2)(P, q)


def test_a_single_problem():
    with pytest.raises(SolveError, match=r"^1 of 1 problems"):
        dfw.DFWLayer(2, on_failure="raise")(-EYE, GOOD[0])


def test_rounding_is_no_failure():
    gen = torch.Generator().manual_seed(0)
    R = torch.randn(30, 30, generator=gen)
    P, q = R @ R.mT, torch.randn(20, 30, generator=gen)
    layer = dfw.DFWLayer(1, tol=1e-12, on_failure="raise")
    assert (layer.solve(P, q).status == Status.ROUNDING_FLOOR).any()
    layer(P, q)


@pytest.mark.parametrize("setting", ["Warn", None, True, 3, ["warn"], torch.ones(2)])
def test_other_settings_are_refused(setting):
    with pytest.raises(ValueError, match=r"^on_failure: expected one of \['ignore', 'warn', 'r"):
        dfw.DFWLayer(on_failure=setting)


def copies(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(layer),
        "copy": copy.copy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(file, weights_only=False),
    }


@pytest.mark.parametrize("name", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_warn_for_themselves(name):
    layer = dfw.DFWLayer(2)
    with pytest.warns(RuntimeWarning, match="not solved"):
        layer(-EYE, GOOD)
    twin = copies(layer)[name]
    with pytest.warns(RuntimeWarning, match="not solved"):
        twin(-EYE, GOOD)
    quietly(layer, -EYE, GOOD)
    strict = copies(dfw.DFWLayer(2, on_failure="raise"))[name]
    with pytest.raises(SolveError):
        strict(-EYE, GOOD)


def test_replicas_as_data_parallel_makes_them_are_one_layer():
    layer = dfw.DFWLayer(2)
    with pytest.warns(RuntimeWarning, match="not solved"):
        layer._replicate_for_data_parallel()(-EYE, GOOD)
    quietly(layer._replicate_for_data_parallel(), -EYE, GOOD)
    quietly(layer, -EYE, GOOD)


def test_inside_of_transforms():
    """vmap and grad hide the values of the statuses, which are there all the same."""
    P = torch.stack((EYE, -EYE))
    with pytest.raises(SolveError, match=r"^1 of 2 problems .*1 NOT_CONVEX"):
        torch.func.vmap(dfw.DFWLayer(2, on_failure="raise"))(P, GOOD)
    strict = dfw.DFWLayer(2, on_failure="raise")
    with pytest.raises(SolveError, match=r"^2 of 2 problems .*2 NOT_CONVEX"):
        torch.func.grad(lambda q: strict(-EYE, q).sum())(GOOD)
    layer = dfw.DFWLayer(2, on_failure="raise")
    want = torch.stack([layer(EYE, q) for q in GOOD])
    torch.testing.assert_close(torch.func.vmap(lambda q: layer(EYE, q))(GOOD), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:The .grad attribute of a Tensor")
def test_inside_of_the_compiler():
    torch._dynamo.reset()
    layer = dfw.DFWLayer(2)
    compiled = torch.compile(lambda q: 2 * layer(-EYE, q + 1), backend="eager")
    with pytest.warns(RuntimeWarning, match="2 of 2 problems were not solved"):
        compiled(GOOD)
    strict = dfw.DFWLayer(2, on_failure="raise")
    with pytest.raises(SolveError):
        torch.compile(lambda q: 2 * strict(-EYE, q + 1), backend="eager")(GOOD)


def test_threads_share_the_layer():
    layer = dfw.DFWLayer(2, on_failure="raise")
    raised = []

    def call():
        try:
            layer(-EYE, GOOD)
        except SolveError as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 4


def test_statuses_read_as_names():
    for status in Status:
        assert str(status) == f"{status}" == format(status) == status.name
        assert f"{status:>20}".strip() == status.name
        assert f"{status:d}" == str(int(status))
        assert status == int(status)
        assert (torch.tensor([0, int(status)]) == status)[1]
    assert torch.tensor([4, 0]).eq(Status.NOT_CONVEX).tolist() == [True, False]


def test_a_warning_is_about_the_line_of_the_caller():
    inside = torch.nn.Sequential(dfw.SetLayer(dfw.LpBall(1, 0.5)))
    with pytest.warns(RuntimeWarning, match="not solved") as caught:
        inside(torch.full((1, 2), torch.nan))
    assert caught[0].filename == __file__
