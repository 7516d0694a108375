"""Solves from JAX: every set of the table under jit, grad and vmap, and errors by name."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import composed_set_cases
import dfwlayer
import linear_set_cases
import round_set_cases
import set_cases
from dfwlayer import Status
from dfwlayer.integrations import tickets
from set_problems import draw

jax = pytest.importorskip("jax")
dfw = pytest.importorskip("dfwlayer.integrations.jax")
descriptions = pytest.importorskip("dfwlayer.integrations.descriptions")
jnp = jax.numpy

N = 6
# a set of the documentation, which is no name of the library
MIRRORED = [name for name in set_cases.CASES if "extending.md" not in name]


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often the library was asked to solve."""
    count = []

    def counted(*args, **kwargs):
        count.append(1)
        return dfwlayer.solve(*args, **kwargs)

    # the signature is read there
    counted.__signature__ = descriptions.inspect.signature(dfwlayer.solve)
    monkeypatch.setattr(descriptions, "solve", counted)
    return count


def problem(*batch, dtype=np.float64):
    rng = np.random.default_rng(3)
    R = rng.normal(size=(N, N))
    P = R.T @ R / N + 0.1 * np.eye(N)
    q, w = rng.normal(size=(*batch, N)), rng.uniform(0.5, 1.5, size=N)
    return tuple(jnp.asarray(each.astype(dtype)) for each in (P, q, w))


def tensor(array):
    return torch.from_numpy(np.array(array))


def over_ball(P, q, w, t, **options):
    return dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1.5, radius=t, weight=w), **options)


@pytest.mark.parametrize("name", MIRRORED)
def test_every_set_is_solved_and_differentiated_as_by_the_library(name, monkeypatch, calls):
    """The row's own lines build it, with the names of the module for JAX."""
    case, drawn = set_cases.CASES[name], draw(name)
    shape = {"shape": case.shape} if len(case.shape) > 1 else {}
    q = drawn.q.reshape(-1, *case.shape)
    leaves = {k: v.clone().requires_grad_() for k, v in {"q": q, **drawn.parameters}.items()}
    own = {k: v for k, v in leaves.items() if k != "q"}
    known = dfwlayer.solve(dfwlayer.Quadratic(drawn.P, leaves["q"]), case.build(own), **shape)
    known.x.square().sum().backward()

    for module in (set_cases, composed_set_cases, linear_set_cases, round_set_cases):
        monkeypatch.setattr(module, "dfw", dfw)

    def loss(q, parameters, P):
        sol = dfw.solve(dfw.Quadratic(P, q), case.build(parameters), **shape)
        return (sol.x**2).sum(), sol

    arrays = {k: jnp.asarray(v.detach().numpy()) for k, v in leaves.items()}
    args = arrays.pop("q"), arrays, jnp.asarray(drawn.P.numpy())
    (of_q, of_set), sol = jax.jit(jax.vmap(jax.grad(loss, (0, 1), has_aux=True)))(*args)
    assert len(calls) == 1  # one batch, whose graph the backward pass takes, whatever the set
    np.testing.assert_allclose(sol.x, known.x.detach(), atol=1e-12)
    np.testing.assert_allclose(sol.value, known.value.detach(), rtol=1e-12)
    np.testing.assert_array_equal(sol.status, known.status)
    # the face is told at a point that differs by rounding
    np.testing.assert_allclose(of_q, leaves["q"].grad, atol=1e-7)
    for key, found in of_set.items():
        expected = own[key].grad
        np.testing.assert_allclose(found, 0 if expected is None else expected, atol=1e-7)


@pytest.mark.parametrize("room", ["all", "none", "of another"])
def test_a_backward_pass_solves_once_more_where_no_graph_is_kept_for_it(room, monkeypatch, calls):
    """Whatever a ticket says, the gradient is that of the numbers that come with it."""
    P, q, w = problem(3)

    def loss(q, w, t):
        return (over_ball(P, q, w, t).x ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = gradient(q, w, 0.3)
    assert len(calls) == 1
    if room == "none":
        monkeypatch.setattr(tickets._Graphs, "MOST", 0)
    elif room == "of another":  # every ticket is for the solve that was first
        known = first_graph()
        monkeypatch.setattr(tickets._graphs, "get", lambda _: known)
        q, w = 2 * q, 2 * w
        expected = gradient_of_plain(P, q, w, 0.3)
    found = gradient(q, w, 0.3)
    assert len(calls) == (2 if room == "all" else 3)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def first_graph():
    return next(iter(tickets._graphs._known.values()))


def gradient_of_plain(P, q, w, t):
    leaves = [torch.tensor(np.array(v), requires_grad=True) for v in (q, w, t)]
    ball = dfwlayer.LpBall(1.5, leaves[2], leaves[1])
    x = dfwlayer.solve(dfwlayer.Quadratic(tensor(P), leaves[0]), ball).x
    return [g.numpy() for g in torch.autograd.grad(x.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_jit_and_plain_calls_agree_and_keep_the_precision(dtype):
    P, q, w = problem(4, dtype=dtype)
    plain = over_ball(P, q, w, 0.3)
    compiled = jax.jit(over_ball)(P, q, w, 0.3)
    assert plain.x.dtype == compiled.x.dtype == dtype
    assert plain.x.shape == (4, N)
    assert plain.status.shape == (4,)
    known = dfwlayer.solve(
        dfwlayer.Quadratic(tensor(P), tensor(q)), dfwlayer.LpBall(1.5, 0.3, tensor(w))
    )
    np.testing.assert_array_equal(plain.x, known.x)
    # in the program 0.3 is an array, in the library a number with more digits than float32 has
    np.testing.assert_allclose(compiled.x, known.x, rtol=1e-6 if dtype == np.float32 else 1e-13)


def test_without_double_precision_everything_is_float32():
    with jax.enable_x64(False):
        P, q, w = problem()
        gradient = jax.grad(lambda t: over_ball(P, q, w, t).x.sum())(0.3)
        assert over_ball(P, q, w, 0.3).x.dtype == gradient.dtype == np.float32


def test_gradients_of_first_and_second_order_are_right():
    from jax.test_util import check_grads

    P, q, w = problem()

    def loss(P, q, w, t):
        sol = over_ball((P + P.T) / 2, q, w, t)
        return (sol.x**3).sum() + sol.value

    check_grads(loss, (P, q, w, 0.3), 1, modes=["rev"], atol=1e-5, rtol=1e-5)
    slope = jax.jit(jax.grad(loss, 1))
    hessian = jax.jit(jax.jacrev(jax.grad(loss, 1), 1))(P, q, w, 0.3)
    step = 1e-5 * jnp.eye(N)
    along = [(slope(P, q + e, w, 0.3) - slope(P, q - e, w, 0.3)) / 2e-5 for e in step]
    np.testing.assert_allclose(hessian, jnp.stack(along), atol=1e-7)


def test_a_gradient_outside_of_jit_is_one_derivative_for_jax(monkeypatch):
    """And not one of its forward pass and one of its backward pass, which take JAX milliseconds."""
    P, q, w = problem()
    asked, original = [], dfw._differentiable
    monkeypatch.setattr(dfw, "_differentiable", lambda of: asked.append(of) or original(of))
    slope = jax.grad(lambda q: over_ball(P, q, w, 0.3).x.sum())
    first = slope(q)
    assert len(asked) == 1
    np.testing.assert_allclose(first, jax.jit(slope)(q), atol=1e-12)
    asked.clear()
    jax.jacrev(slope)(q)  # and those of a second one
    assert len(asked) > 1


def test_forward_mode_is_refused_by_name():
    P, q, w = problem()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(lambda q: over_ball(P, q, w, 0.3).x)(q)


def test_an_array_without_a_gradient_costs_none(calls):
    """P is shared by the mapped problems, and stays so where nobody asks for its gradient."""
    P, q, w = problem(5)
    seen = []
    original = descriptions.Problem.solved

    def solved(self, tensors):
        seen.append(tensors[0].shape)
        return original(self, tensors)

    descriptions.Problem.solved = solved
    try:
        by_row = jax.vmap(jax.grad(lambda q: over_ball(P, q, w, 0.3).x.sum()))(q)
    finally:
        descriptions.Problem.solved = original
    assert set(seen) == {(N, N)}
    assert by_row.shape == (5, N)


def test_vmap_over_some_arrays_over_several_and_over_batches():
    P, q, w = problem(2, 3, 4)
    t = jnp.asarray([0.2, 0.3])
    one = jax.vmap(lambda q, t: over_ball(P, q, w, t), (0, 0))(q, t)  # batches of (3, 4)
    two = jax.vmap(jax.vmap(lambda q, t: over_ball(P, q, w, t), (0, None)))(q, t)
    three = jnp.stack([over_ball(P, q[i], w, t[i]).x for i in range(2)])
    np.testing.assert_allclose(one.x, three, atol=1e-12)
    np.testing.assert_allclose(two.x, three, atol=1e-12)
    summed = jax.grad(lambda w: jax.vmap(lambda q: over_ball(P, q, w, 0.2).x)(q[0, 0]).sum())(w)
    each = [jax.grad(lambda w, q=q: over_ball(P, q, w, 0.2).x.sum())(w) for q in q[0, 0]]
    np.testing.assert_allclose(summed, sum(each), atol=1e-10)
    same = jax.vmap(lambda _: over_ball(P, q[0, 0, 0], w, 0.2).x)(jnp.arange(3.0))
    assert same.shape == (3, N)


def test_one_number_for_all_entries_is_mapped_as_a_batch(calls):
    """The library would take (B,) for the bounds of a vector."""
    P, q, _ = problem()
    bound = jnp.asarray([0.1, 0.2, 0.3])
    G = jnp.ones((2, N))

    def boxed(u):
        return dfw.solve(dfw.Quadratic(P, q), dfw.Box(-u, u)).x

    def cut(u):
        return dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G, u)).x

    for fn in (boxed, cut):
        calls.clear()
        mapped = jax.vmap(jax.jacrev(fn))(bound)
        assert len(calls) == 2
        np.testing.assert_allclose(mapped, [jax.jacrev(fn)(u) for u in bound], atol=1e-9)


def test_descriptions_are_pytrees_and_sets_of_sets_nest():
    P, q, w = problem()
    body = dfw.Shifted(
        dfw.Product([dfw.LpBall(1, weight=w[:3]), dfw.Simplex(jnp.asarray(2.0))], [3, 3]),
        0.1 * w,
    )
    assert len(jax.tree.leaves(body)) == 3
    assert repr(body) == "Shifted(constraint.sets[0].weight, constraint.sets[1].radius, centre)"
    doubled = jax.tree.map(lambda a: 2 * a, body)
    gradient = jax.jit(jax.grad(lambda s: (dfw.solve(dfw.Quadratic(P, q), s).x ** 2).sum()))
    for each in (body, doubled):
        found = gradient(each)
        assert jax.tree.structure(found) == jax.tree.structure(body)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_a_smooth_function_of_torch_and_a_set_of_ones_own():
    rng = np.random.default_rng(0)
    A, y = jnp.asarray(rng.normal(size=(3, 20, 4))), jnp.asarray(rng.choice([-1.0, 1.0], (3, 20)))

    def fn(x, A, y):
        return torch.nn.functional.softplus(-y * (A @ x)).sum()

    ball = dfw.described(dfwlayer.LpBall)

    def fitted(A, y, t):
        return dfw.solve(dfw.Smooth(fn, A, y, shape=(4,)), ball(1, t)).x

    mapped = jax.vmap(fitted, (0, 0, None))(A, y, 0.5)  # one by one: fn knows no batch
    np.testing.assert_allclose(mapped[1], fitted(A[1], y[1], 0.5), atol=1e-9)
    slope = jax.grad(lambda t: fitted(A[0], y[0], t).sum())(0.5)
    apart = fitted(A[0], y[0], 0.5 + 1e-5).sum() - fitted(A[0], y[0], 0.5 - 1e-5).sum()
    np.testing.assert_allclose(slope, apart / 2e-5, atol=1e-5)


def test_least_squares_start_settings_and_unrolled_gradients():
    rng = np.random.default_rng(0)
    A, b = jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(rng.normal(size=9))

    def fitted(b, **options):
        return dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, 0.3), **options)

    known = fitted(b)
    again = fitted(b, x0=known.x, tol=1e-9)
    np.testing.assert_allclose(again.x, known.x, atol=1e-9)
    nearest = dfw.project(b, dfw.LpBall(2, 0.5))
    np.testing.assert_allclose(nearest, 0.5 * b / jnp.linalg.norm(b), atol=1e-12)
    assert int(fitted(b, max_steps=0).status) != Status.CONVERGED
    unrolled = jax.grad(lambda b: fitted(b, method="dfw", max_steps=7).x[0])(b)
    B = tensor(b).requires_grad_()
    ours = dfwlayer.LeastSquares(tensor(A), B)
    dfwlayer.solve(ours, dfwlayer.LpBall(1, 0.3), method="dfw", max_steps=7).x[0].backward()
    np.testing.assert_allclose(unrolled, B.grad, atol=1e-12)


def test_one_bad_problem_of_a_batch_stays_alone():
    P, q, w = problem(4)
    q = q.at[1, 2].set(jnp.nan)
    sol, gradient = jax.jit(
        lambda q: (over_ball(P, q, w, 0.3), jax.grad(lambda q: over_ball(P, q, w, 0.3).x.sum())(q))
    )(q)
    assert sol.status.tolist() == [0, Status.NONFINITE, 0, 0]
    assert jnp.isnan(sol.x[1]).all()
    assert (gradient[1] == 0).all()
    assert jnp.isfinite(jnp.delete(sol.x, 1, axis=0)).all()


def test_errors_name_the_argument():
    P, q, w = problem()
    for fn in (over_ball, jax.jit(over_ball)):
        with pytest.raises(ValueError, match=r"P: expected shape \(6, 6\)"):
            fn(P[:2], q, w, 0.3)
        with pytest.raises(ValueError, match="weight: expected shape"):
            fn(P, q, w[:3], 0.3)
        with pytest.raises(ValueError, match="q: expected float32 or float64, got bfloat16"):
            fn(P, q.astype(jnp.bfloat16), w, 0.3)
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 0"):
        over_ball(P, q, w, jnp.asarray(-1.0))
    with pytest.raises(Exception, match="radius: expected numbers ≥ 0"):  # JAX's, with our words
        jax.block_until_ready(jax.jit(over_ball)(P, q, w, -1.0))
    with pytest.raises(ValueError, match="q: expected float32 or float64, got"):
        dfw.project(jnp.arange(3), dfw.Simplex())
    with pytest.raises(ValueError, match="method: expected one of"):
        over_ball(P, q, w, 0.3, method="newton")
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        over_ball(P, q, w, 0.3, steps=3)
    with pytest.raises(TypeError, match="radios"):
        dfw.LpBall(1, radios=2.0)
    with pytest.raises(
        ValueError, match=r"constraint: expected one of dfwlayer\.integrations\.jax"
    ):
        dfw.solve(dfw.Quadratic(P, q), dfwlayer.LpBall(1))
    with pytest.raises(ValueError, match="q: expected arrays and what this module describes"):
        dfw.Quadratic(None, torch.ones(3))
    with pytest.raises(AttributeError, match="no objective or set 'Bal'"):
        dfw.Bal(1)
    assert {"LpBall", "Polyhedron", "solve"} <= set(dir(dfw))


def test_several_large_solves_in_one_program_do_not_wait_for_each_other():
    """On one core, from several threads, in a loop: callbacks must not hold what they wait for."""
    code = """
import threading, jax, jax.numpy as jnp, numpy as np
import dfwlayer.integrations.jax as dfw
n = 300
P, q = 2 * jnp.eye(n) + 1 / n, jnp.asarray(np.random.default_rng(0).normal(size=(4, n)), "float32")
@jax.jit
def loss(q):
    own = [dfw.solve(dfw.Quadratic((1 + i) * P, r), dfw.LpBall(1, 2.0)).x for i, r in enumerate(q)]
    def step(r, _):
        return r - dfw.solve(dfw.Quadratic(P, r), dfw.Simplex()).x, None
    return sum((x**2).sum() for x in own) + jax.lax.scan(step, q[0], None, length=3)[0].sum()
found = []
threads = [threading.Thread(target=lambda: found.append(jax.grad(loss)(q))) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 3 and all(jnp.isfinite(g).all() for g in found)
"""
    if hasattr(__import__("os"), "sched_setaffinity"):
        code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + code
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)
