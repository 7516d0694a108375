"""Points of polyhedra where more rows meet than are independent, in compiled code."""

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64, attempted, close, leaf
from dfwlayer.engines import compiled
from dfwlayer_bench.bench.layers.problems import make
from polyhedron_cases import problem, solved


def meeting(seed, *, idle=True):
    """A program whose solution is a point of small integers in which many rows meet, some idle."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, 9))
    rank, k = int(draw.integers(1, n + 1)), int(draw.integers(0, 3))

    def whole(*shape):
        return draw.integers(-3, 4, shape).astype(float)

    x, base = whole(n), whole(rank, n)
    G = whole(int(draw.integers(2, 2 * rank + 3)), rank) @ base
    G = G[np.abs(G).max(-1) > 0] if G.any() else np.ones((1, n))
    share = draw.choice([0.0, 0.3, 0.6]) if idle else 0.0
    force = draw.integers(1, 5, len(G)) * (draw.random(len(G)) >= share)
    root = whole(n, n)
    P = root.T @ root / 8 + np.eye(n)
    q = -P @ x - G.T @ force
    parts = {"P": P, "q": q, "G": G, "h": G @ x}
    if k:
        parts["A"] = np.concatenate([whole(k - 1, rank) @ base, whole(1, n)])
        parts["b"] = parts["A"] @ x
        q -= parts["A"].T @ whole(k)
    if seed % 2:
        at = draw.random(n) < 0.4
        parts["lower"] = np.where(at, x, -10.0)
        q += np.where(at, draw.integers(0, 3, n), 0)
    return {name: leaf(torch.from_numpy(part)) for name, part in parts.items()}


def held(parts, x):
    """The rows that some set of multipliers has a force for, and the equations."""
    scipy = pytest.importorskip("scipy.optimize")
    get = {name: part.detach().numpy() for name, part in parts.items()}
    n = len(x)
    A, lower = get.get("A", np.zeros((0, n))), get.get("lower", np.full(n, -np.inf))
    N = np.concatenate([get["G"][get["h"] - get["G"] @ x < 1e-9], -np.eye(n)[x - lower < 1e-9]])
    slope = get["P"] @ x + get["q"]
    holds = []
    for i in range(len(N)):
        wanted = np.zeros(len(N) + len(A))
        wanted[i] = -1
        limits = [(0, 100)] * len(N) + [(None, None)] * len(A)
        both = np.concatenate([N, A])
        found = scipy.linprog(wanted, A_eq=both.T, b_eq=-slope, bounds=limits)
        assert found.success
        holds.append(found.fun < -1e-7)
    return np.concatenate([N[np.array(holds, bool)], A])


def check_moves(parts, x):
    """Gradients of ⟨v, x⟩ are those of the least-norm system of all rows that hold x."""
    n = len(x)
    N, P = held(parts, x.detach().numpy()), parts["P"].detach().numpy()
    v = np.cos(np.arange(n))
    system = np.block([[P, N.T], [N, np.zeros((len(N), len(N)))]])
    u = (np.linalg.pinv(system, rcond=1e-11) @ np.append(v, np.zeros(len(N))))[:n]
    gradients = dict(
        zip(parts, torch.autograd.grad(x, list(parts.values()), torch.from_numpy(v)), strict=True)
    )
    close(gradients["q"], torch.from_numpy(-u), 1e-9)
    moves = parts["G"].mT @ gradients["h"]
    if "A" in parts:
        moves = moves + parts["A"].mT @ gradients["b"]
    moves = moves + gradients.get("lower", torch.zeros(n, dtype=F64))
    close(moves.detach(), torch.from_numpy(v - P @ u), 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_gradients_are_those_of_all_rows_that_hold_x(seed):
    """In the data of f, and in the sides along moves that leave a point on all of the rows."""
    parts = meeting(seed)
    found = attempted(*problem(**parts), tol=1e-9)
    if found is None or found.left is not None:
        pytest.skip("left to tensor operations")
    check_moves(parts, found.solution.x)


@pytest.mark.parametrize("seed", range(66, 78))
def test_tensor_operations_give_the_same_ones(seed):
    """Also where rows are an equation together: forces are large then, and so is their rounding."""
    parts = meeting(seed)
    with compiled.using(False):
        x = dfw.solve(*problem(**parts), tol=1e-9).x
    check_moves(parts, x)


@pytest.mark.parametrize(("idle", "most"), [(False, 2), (True, 4)])
def test_few_of_them_are_left(idle, most):
    """Rows without a force that may be an equation together are among these."""
    answered = [attempted(*problem(**meeting(seed, idle=idle)), tol=1e-9) for seed in range(40)]
    assert sum(found is None or found.left is not None for found in answered) <= most


def test_five_rows_through_a_point_of_the_plane():
    """All of them hold it, with forces that are balanced."""
    parts = {"P": leaf(torch.eye(2, dtype=F64)), "q": leaf(torch.tensor([-9.0, -8.0], dtype=F64))}
    angles = torch.linspace(0.1, 1.4, 5, dtype=F64)
    corner = torch.tensor([1.0, 2.0], dtype=F64)
    parts["G"] = leaf(torch.stack((angles.cos(), angles.sin()), -1))
    parts["h"] = leaf((parts["G"] @ corner).detach())
    sol = solved(parts)
    close(sol.x, corner, 1e-14)
    (force,) = torch.autograd.grad(-sol.value, parts["h"], retain_graph=True)
    assert (force > 0.1).all()
    close(parts["G"].detach().mT @ force, -(corner + parts["q"].detach()), 1e-12)
    of_q, of_h = torch.autograd.grad(sol.x, [parts["q"], parts["h"]], corner)
    assert of_q.abs().max() <= 1e-14
    close(of_h @ parts["G"].detach(), corner, 1e-12)


@pytest.mark.parametrize("seed", [2, 6, 10, 14, 20])
def test_other_coordinates_take_ties_along(seed):
    """With x = (1 + εM) y the rows still meet: gradients in G and A are those of differences."""
    parts = meeting(seed, idle=False)
    n, rows = len(parts["q"]), [name for name in "GA" if name in parts]
    M = torch.randn(n, n, dtype=F64, generator=torch.Generator().manual_seed(seed))
    v = torch.cos(torch.arange(n, dtype=F64))

    def along(step):
        turn = torch.eye(n, dtype=F64) + step * M
        moved = parts | {name: parts[name] @ turn for name in rows}
        return solved({name: part.detach() for name, part in moved.items()}).x @ v

    gradients = torch.autograd.grad(solved(parts).x, [parts[name] for name in rows], v)
    pairs = zip(rows, gradients, strict=True)
    own = sum((gradient * (parts[name].detach() @ M)).sum() for name, gradient in pairs)
    close(own, (along(1e-5) - along(-1e-5)) / 2e-5, 1e-5)


def test_rows_that_are_the_same_and_carry_nothing():
    """x moves as without them, whatever rounding makes of their forces."""
    x = torch.tensor([3.0, 3.0, -2.0], dtype=F64)
    P = torch.tensor([[2.0, 0.5, 0.25], [0.5, 1.5, -0.125], [0.25, -0.125, 3.0]], dtype=F64)
    A = torch.tensor([[1.0, -2.0, 0.0]], dtype=F64)
    parts = {"P": P, "q": -P @ x - A[0], "A": A, "b": A @ x}
    parts = {name: leaf(part) for name, part in parts.items()}
    free = torch.autograd.grad(solved(parts).x.sum(), parts["q"])[0]
    G = torch.tensor([[-9.0, 0.0, 9.0], [-6.0, 0.0, 6.0]], dtype=F64)
    parts |= {"G": leaf(G), "h": leaf(G @ x)}
    own = torch.autograd.grad(solved(parts).x.sum(), [parts["q"], parts["h"]])
    close(own[0], free, 1e-12)
    assert not own[1].any()


def test_flows_in_a_network():
    """Nothing flows through most nodes, whose equations depend on bounds then."""
    posed = make("tiny-paths", 0)
    rows, count = posed.rows, len(posed.rows.q)
    q, A = leaf(rows.q.clone()), leaf(rows.A.clone())
    b, lower = leaf(rows.b.expand(count, -1).clone()), leaf(rows.low.clone())
    f, flows = dfw.Quadratic(None, q), dfw.Polyhedron(A=A, b=b, lower=lower)
    found = attempted(f, flows, tol=1e-12)
    assert found is not None
    assert found.left is None
    inputs, v = [q, b, lower], rows.v
    own = torch.autograd.grad(found.solution.x, inputs, v)
    with compiled.using(False):
        other = dfw.solve(f, flows, tol=1e-12).x
        right = torch.autograd.grad(other, inputs, v)
    close(found.solution.x, other, 1e-12)
    for one, expected in zip(own, right, strict=True):
        close(one, expected, 1e-9)
