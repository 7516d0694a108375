"""Small problems that are on a GPU are solved on the CPU: which, and that nothing else differs.

Where there is no GPU the CPU stands in for one, from which copies are taken to the CPU.
"""

import math
from importlib import import_module

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled, host
from dfwlayer.engines.base import Arguments, Attempt, bind
from dfwlayer.engines.shapes import flattened
from dfwlayer.methods.settings import check_settings
from dfwlayer.ops.portable import portable
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solve import _run, _solution
from set_cases import CASES
from set_problems import draw, quadratic

F32, F64 = torch.float32, torch.float64
solving = import_module("dfwlayer.solve")
CPU = torch.device("cpu")
sets = pytest.mark.parametrize("name", CASES)


def given(name, rows, dtype=F64, device="cpu"):
    """Objective and set of a row of the table; their tensors are leaves."""
    P, q, parameters = draw(name, rows=rows)
    leaf = lambda t: t.to(device, dtype).requires_grad_()  # noqa: E731
    own = {key: leaf(value) for key, value in parameters.items()}
    case = CASES[name]
    return quadratic(leaf(P), leaf(q), case.shape), case.build(own)


def settings_for(constraint, **options):
    defaults = {"method": "auto", "differentiate": "auto", "tol": 1e-5, "max_steps": 1000}
    more = {"step_size": None, "temperature": None, "verify": True}
    return check_settings(**defaults | more | options, preferred=constraint.preferred_method)


def takes(objective, constraint, x0=None, **options):
    return host.takes(objective, constraint, x0, settings_for(constraint, **options))


def gradients(sol, tensors):
    v = torch.cos(torch.arange(sol.x.numel(), dtype=sol.x.dtype)).reshape(sol.x.shape)
    total = (sol.x * v.to(sol.x.device)).sum() + sol.value.sum()
    return torch.autograd.grad(total, tensors, allow_unused=True, retain_graph=True)


@pytest.fixture
def away(monkeypatch):
    """The CPU counts as a GPU."""
    monkeypatch.setattr(host, "AWAY", ("cpu",))


@pytest.fixture
def once(monkeypatch, away):
    """The same for whole solves, whose copies then stay; a list of what was taken."""
    monkeypatch.setitem(compiled._loaded, "cpu", None)  # as if there were no program
    taken, asked = [], host.takes

    def takes(*arguments):
        if taken:
            return False
        found = asked(*arguments)
        taken.extend([True] if found else [])
        return found

    monkeypatch.setattr(host, "takes", takes)
    return taken


@sets
def test_every_set_is_taken_and_comes_back_the_same(name, away):
    objective, constraint = given(name, 5)
    assert takes(objective, constraint)
    settings = settings_for(constraint)

    def arguments():
        own = Arguments(objective, constraint, None, None)
        flat = flattened(own, None)
        return own if flat is None else flat.arguments

    found = host.answered(_solution, arguments(), settings)
    expected = _solution(arguments(), settings)
    for part in ("x", "value", "gap", "num_steps", "status"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    tensors = [t for t in tensors_in((objective, constraint)) if t.requires_grad]
    for own, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert (own is None) == (other is None)
        assert own is None or torch.equal(own, other)


def test_a_solve_by_way_of_the_host(once):
    """Isolation, second derivatives and what is asked later do not depend on the way."""
    q = torch.randn(4, 3, dtype=F64)
    q[1] = torch.nan
    q = q.requires_grad_()
    body = dfw.Ellipsoid(torch.eye(3, dtype=F64) * 2, 0.4)
    sol = dfw.solve(dfw.Quadratic(None, q), body)
    assert once == [True]
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(None, q), body)
    assert sol.status.tolist() == other.status.tolist() == [0, int(dfw.Status.NONFINITE), 0, 0]
    rows = [0, 2, 3]
    first, second = (
        torch.autograd.grad(s.x[rows].square().sum(), q, create_graph=True)[0] for s in (sol, other)
    )
    torch.testing.assert_close(first[rows], second[rows])
    twice = [torch.autograd.grad(each[rows].sum(), q)[0][rows] for each in (first, second)]
    torch.testing.assert_close(*twice)
    for key, price in sol.multipliers.items():
        torch.testing.assert_close(price[rows], other.multipliers[key][rows])


@pytest.mark.parametrize("changed", ["P", "q", "A"])
def test_changed_in_place(changed, once):
    """Also what asks for no gradient itself; and no gradient is asked for in inference mode."""
    with torch.inference_mode():
        sealed = torch.ones(3, dtype=F64)
    tensors = {"P": torch.eye(3, dtype=F64), "A": 2 * torch.eye(3, dtype=F64)}
    tensors["q"] = torch.randn(3, dtype=F64).requires_grad_()
    body = dfw.Ellipsoid(tensors["A"], sealed)
    x = dfw.solve(dfw.Quadratic(tensors["P"], tensors["q"]), body).x
    assert once == [True]
    with torch.no_grad():
        tensors[changed].mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_what_is_wrong_is_said_by_the_device_of_the_arguments(once):
    q = torch.randn(4, 3, dtype=F64)
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 0, found -1"):
        dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(3, q.new_tensor(-1.0)))
    assert once == [True]


def test_problems_that_compiled_code_leaves(away):
    """A task is taken as well."""
    objective, constraint = given("LpBall, p=1", 4, F32)
    task = bind(Arguments(objective, constraint, None, None), settings_for(constraint)).checked()
    seen = []

    def run(task):
        seen.append(task.objective.q)
        return _run(task)[1]

    found = host.outcome_of(run, run, task)
    assert seen[0] is not task.objective.q
    expected = _run(task)[1]
    for part in ("x", "value", "gap", "num_steps", "status"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    (own,) = torch.autograd.grad(found.x.sum(), objective.q)
    (other,) = torch.autograd.grad(expected.x.sum(), objective.q)
    assert torch.equal(own, other)


def test_large_ones_and_other_wishes_stay(away):
    objective, constraint = given("Ellipsoid", 5)
    assert takes(objective, constraint)
    assert not takes(objective, constraint, callback=lambda _: None)
    assert not takes(objective, constraint, method="dfw", differentiate="unroll")
    assert not takes(objective, constraint, method="frank-wolfe", step_size=dfw.ShortStep())
    with compiled.using(False):
        assert not takes(objective, constraint)
    with torch.autocast("cpu"):
        assert not takes(objective, constraint)
    n = math.isqrt(host.MOST) - 1  # with its P and q
    for size, small in ((n, True), (n + 1, False)):
        P = torch.eye(size)
        assert takes(dfw.Quadratic(P, P[0]), dfw.LpBall(3)) is small
    n = math.isqrt(host.MOST_RECORDED) - 1
    for size, small in ((n, True), (n + 1, False)):
        P = torch.eye(size)
        assert takes(dfw.Quadratic(P, P[0]), dfw.LpBall(1)) is small
    # a variable counts, too
    assert not takes(dfw.Smooth(lambda x: (x * x).sum(-1), shape=(host.MOST + 1,)), dfw.LpBall(3))


def test_nothing_is_taken_from_the_cpu():
    assert not takes(*given("Ellipsoid", 5))


def test_a_default_device_is_respected(away):
    objective, constraint = given("Ellipsoid", 5)
    with torch.device("meta"):
        assert not takes(objective, constraint)


SCALE, HELD = 2.0, torch.ones(3)
module = torch.nn.Linear(3, 3)


def plain(x, y=1.0):
    return SCALE * torch.relu(x).sum(-1) + y + math.pi


def nested(x):
    return torch.stack([plain(row) for row in x])


def holds(x):
    return (x * HELD).sum(-1)


def asks_a_module(x):
    return module(x).sum(-1)


def imports(x):
    import os

    return x.sum(-1) + len(os.sep)


def moves(x):
    return x.cuda().sum(-1)


def names_it(x):
    return x.sum(-1) + torch.zeros((), device="cuda:0")


def with_default(x, held=HELD):
    return (x * held).sum(-1)


def through(x):
    return holds(x)


def enclosing(held):
    return lambda x: (x * held).sum(-1)


class Callee:
    def __call__(self, x):
        return x.sum(-1)


@pytest.mark.parametrize("function", [plain, nested, torch.sum, enclosing(3.0), lambda x: x.sum()])
def test_functions_that_may_be_moved(function):
    assert portable(function)


@pytest.mark.parametrize(
    "function",
    [holds, asks_a_module, imports, moves, names_it, with_default, through, enclosing(HELD),
     Callee(), module, HELD.mul, [plain, holds], enclosing(dfw.LpBall(1, torch.tensor(1.0)))],
)  # fmt: skip
def test_functions_that_stay_where_they_are(function):
    assert not portable(function)


def test_what_functions_hold_keeps_a_solve_where_it_is(away):
    q = torch.randn(2, 3)
    assert takes(dfw.Smooth(lambda x, q: (x * x + q * x).sum(-1), q, shape=3), dfw.LpBall(3))
    assert not takes(dfw.Smooth(lambda x: (x * x + q * x).sum(-1), shape=3), dfw.LpBall(3))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@sets
def test_every_set_from_a_gpu(name, dtype):
    """The answer is there, and what the CPU says."""
    drawn = given(name, 256, dtype)  # of which some tensors are made from others
    here, there = (
        filled(drawn, (t.detach().to(to).requires_grad_(t.requires_grad) for t in tensors))
        for tensors in [tensors_in(drawn)]
        for to in ("cpu", "cuda")
    )
    with compiled.using("wait"):
        sol, expected = dfw.solve(*there), dfw.solve(*here)
        own, other = (
            gradients(s, [t for t in tensors_in(args) if t.requires_grad])
            for s, args in ((sol, there), (expected, here))
        )
    for part in ("x", "value", "gap", "num_steps", "status"):
        found, right = getattr(sol, part), getattr(expected, part)
        assert (found.device.type, found.dtype, found.shape) == ("cuda", right.dtype, right.shape)
    eps = torch.finfo(dtype).eps
    assert sol.status.cpu().tolist() == expected.status.tolist()
    for found, right in ((sol.x, expected.x), (sol.value, expected.value)):
        found, right = found.detach(), right.detach()
        size = float(right.abs().max())
        assert float((found.cpu() - right).abs().max()) <= max(100 * eps, 1e-7) * size
    for found, right in zip(own, other, strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            assert found.device.type == "cuda"
            size = max(float(right.abs().max()), 1e-3)
            assert float((found.cpu() - right).abs().max()) <= max(3000 * eps, 1e-6) * size


@pytest.mark.cuda
def test_errors_name_the_device():
    q = torch.randn(4, 3, device="cuda")
    with pytest.raises(
        ValueError, match=r"x0: expected torch\.float32 on cuda:0 like the objective"
    ):
        dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(3), x0=torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight: .*cuda:0|weight: .* cpu"):
        dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(3, 1.0, torch.ones(3)))


@pytest.mark.parametrize("name", ["Simplex in a plane", "Polyhedron", "L1Box", "HalfSpace"])
def test_what_programs_leave_is_asked_of_compiled_code_first(name, away, monkeypatch):
    """Some problems of a batch, which tensor operations would take a hundred times as long for."""
    objective, constraint = given(name, 6)
    expected = dfw.solve(objective, constraint)
    taken = []
    monkeypatch.setattr(solving, "_run", lambda task: taken.append(task) or _run(task))
    task = bind(Arguments(objective, constraint, None, None), settings_for(constraint)).checked()
    blank = dfw.Solution(*(torch.zeros_like(part) for part in solving.parts(expected)))
    left = torch.tensor([True, False, True, True, False, True])
    with compiled.using("wait"):
        found = solving._completed(task, Attempt(blank, left))
    assert not taken
    torch.testing.assert_close(found.x[left], expected.x[left], rtol=1e-9, atol=1e-12)
    assert (found.x[~left] == 0).all()
    own = tensors_in((objective, constraint))
    (one, *_), (other, *_) = (
        torch.autograd.grad((sol.x[left] ** 3).sum(), own, allow_unused=True)
        for sol in (found, expected)
    )
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)
