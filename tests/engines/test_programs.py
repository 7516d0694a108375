"""Triton programs against tensor operations: on a CUDA device, and in Triton's interpreter."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F32, F64, OBJECTIVES, SETS, N, answers, attempted, close, leaf
from dfwlayer.engines import compiled
from dfwlayer.ops.tensors import filled, tensors_in
from kernel_cases import DEVICES, devices
from polyhedron_cases import problem, random

# NumPy, which the interpreter computes with, warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    """Also for problems on the CPU, which the interpreter takes."""
    monkeypatch.setattr(compiled, "_loaded", {})
    gpu = compiled.ENGINES["cuda"]
    monkeypatch.setattr(compiled, "ENGINES", {"cpu": gpu, "cuda": gpu})


def moved(given, device, dtype=None):
    """A copy there, whose tensors are leaves."""
    copies = (leaf(t.detach().to(device, dtype)) for t in tensors_in(given))
    return filled(given, copies)


def agrees(given, device, dtype, terms=1):
    """What programs answer, against tensor operations on the CPU in float64.

    Rows of the set are sums of that size, and so is their rounding.
    """
    here = moved(given, device)
    found = attempted(*here)
    assert found is not None
    assert found.left is None or not bool(found.left.all())
    sol, gradients = answers(*here)
    with compiled.using(False):
        expected, right = answers(*moved(given, "cpu", F64), tol=1e-13)
    eps = torch.finfo(dtype).eps
    assert (sol.status == 0).all()
    close(sol.x, expected.x, max(8 * eps, 1e-8))
    for own, other in zip(gradients, right, strict=True):
        close(own, other, max(500 * eps, 1e-7))
    value, gap = sol.value.detach().double().cpu(), sol.gap.detach().double().cpu()
    assert (value - expected.value <= gap + 8 * eps * expected.value.abs()).all()
    with torch.no_grad():
        assert float(here[1].violation(sol.x).max()) <= 4 * eps * terms


# what is left to others: sets around a centre, products, boxes that lack bounds
OTHERS = ("around", "product", "bounds", "ellipsoid")
# the interpreter takes its time, so there objectives are crossed with one set only
CROSSED = [
    pytest.param(constraint, objective, device.values[0], marks=device.marks)
    for device in DEVICES
    for constraint in SETS
    for objective in OBJECTIVES
    if not any(part in constraint for part in OTHERS)
    and (device.values[0] == "cuda" or objective == "quadratic" or constraint == "l1")
]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(("constraint", "objective", "device"), CROSSED)
def test_agrees_with_tensor_operations(constraint, objective, device, dtype):
    """The data are exact in float64, so that both solve the same problem to the last digits."""
    lead = (2,)
    agrees((OBJECTIVES[objective](lead, dtype), SETS[constraint](lead, dtype)), device, dtype)


@devices
@pytest.mark.parametrize("constraint", ["l1", "l2", "capped simplex"])
def test_one_problem(constraint, device):
    agrees((OBJECTIVES["quadratic"]((), F64), SETS[constraint]((), F64)), device, F64)


@devices
@pytest.mark.parametrize("n", [1, 17, 50, 128])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sizes(n, dtype, device):
    """Lanes that are no coordinates, and the inverse in float32 for more than 64 of them."""
    root = torch.randn(2, n, n, dtype=dtype)
    P = root.mT @ root / n + 0.5 * torch.eye(n, dtype=dtype)
    q = torch.randn(2, n, dtype=dtype)
    bounds = [0.2 * torch.rand(2, n, dtype=dtype) for _ in range(2)]
    bodies = [dfw.LpBall(1, torch.full((2,), 0.7, dtype=dtype))]
    if device == "cuda" or (n < 50 and dtype == F64):  # the interpreter takes its time
        bodies += [dfw.Box(-bounds[0], bounds[1]), dfw.Simplex()]
        bodies += [dfw.LpBall(2, torch.full((2,), 0.3, dtype=dtype))]
    if device == "cuda":
        bodies += [dfw.LpBall(p, torch.full((2,), 0.3, dtype=dtype)) for p in (1.5, 3, 10)]
    for body in bodies:
        agrees((dfw.Quadratic(P, q), body), device, dtype)


@devices
@pytest.mark.parametrize("constraint", ["l1", "l2", "simplex"])
def test_second_derivatives(constraint, device):
    given = OBJECTIVES["quadratic"]((), F64), SETS[constraint]((), F64)

    def second(device):
        objective, body = moved(given, device)
        tensors = [objective.q, *tensors_in(body)]
        x = dfw.solve(objective, body).x
        (first, *_) = torch.autograd.grad(x.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(first.sum(), tensors, allow_unused=True)

    found = second(device)
    with compiled.using(False):
        expected = second("cpu")
    for own, other in zip(found, expected, strict=True):
        close(own, other, 1e-7)


@devices
def test_problems_that_are_left_are_solved_by_others(device):
    """A row of NaN, one whose solution is at a kink, and one like any other."""
    P = leaf(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64, device=device)) + 1)
    at_a_kink = -P.detach() @ torch.tensor([1.0, 0.5, -0.25], dtype=F64, device=device)
    q = torch.stack((at_a_kink * torch.nan, at_a_kink, at_a_kink * 1.5)).requires_grad_()
    body = dfw.Box(-1.0, 1.0)
    found = attempted(dfw.Quadratic(P, q), body)
    assert found is not None
    assert found.left.tolist() == [True, True, False]
    sol = dfw.solve(dfw.Quadratic(P, q), body)
    assert sol.status.tolist() == [dfw.Status.NONFINITE, 0, 0]
    assert sol.x[0].isnan().all()
    torch.autograd.backward(sol.x[1:].sum())
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P.detach(), q.detach()), body)
    torch.testing.assert_close(sol.x.detach()[1:], other.x[1:])
    assert (q.grad[0] == 0).all()
    assert torch.isfinite(P.grad).all()
    # the next batch is looked at for itself
    assert attempted(dfw.Quadratic(P, q[2:]), body).left is None


@devices
@pytest.mark.parametrize(
    "body",
    [
        lambda bad: dfw.KSparse(bad.new_tensor([2.0, 0.5])),
        lambda bad: dfw.LpBall(1, bad),
        lambda bad: dfw.LpBall(2, bad),
        lambda bad: dfw.CappedSimplex(1.0, torch.stack([bad.new_ones(4), bad.new_full((4,), -1)])),
        lambda bad: dfw.L1Box(
            1.0, None, -1.0, torch.stack([bad.new_ones(4), bad.new_full((4,), -1)])
        ),
    ],
)
def test_values_out_of_range_have_the_same_status(body, device):
    q = torch.randn(2, 4, dtype=F64, device=device)
    P = torch.eye(4, dtype=F64, device=device)
    bad = q.new_tensor([1.0, -0.5])
    sol = dfw.solve(dfw.Quadratic(P, q), body(bad))
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P, q), body(bad))
    assert sol.status.tolist() == other.status.tolist()
    assert sol.status[1] != 0


@devices
def test_what_is_shared_and_wrong_is_refused(device):
    q = torch.randn(2, 4, dtype=F64, device=device)
    with pytest.raises(ValueError, match="radius"):
        dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, q.new_tensor(-1.0)))
    skew = torch.ones(4, 4, dtype=F64, device=device).triu()
    with pytest.raises(ValueError, match="P: expected a symmetric matrix"):
        dfw.solve(dfw.Quadratic(skew, q), dfw.LpBall(1, 0.5))
    with pytest.raises(ValueError, match="x0"):
        dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, 0.5), x0=q[0] * torch.nan)


@devices
@pytest.mark.parametrize("constraint", ["l1", "l2"])
def test_starts(constraint, device):
    """From the solution, from far away, and a row of NaN, all end at the same point."""
    given = moved((OBJECTIVES["quadratic"]((3,), F64), SETS[constraint]((3,), F64)), device)
    expected = dfw.solve(*given).x.detach()
    start = expected.clone()
    start[1] *= 100
    start[2] = torch.nan
    found = attempted(*given, x0=start)
    assert found.left is None
    torch.testing.assert_close(found.solution.x, expected)


@devices
def test_changed_in_place(device):
    q = torch.randn(2, N, dtype=F64, device=device, requires_grad=True)
    P = torch.eye(N, dtype=F64, device=device)
    x = dfw.solve(dfw.Quadratic(P, q * 1), dfw.LpBall(1, 0.5)).x
    P.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@devices
@pytest.mark.parametrize("p", [1, 2, 3, "rows"])
def test_gradients_that_arrive_as_nan_go_on(p, device):
    """To what a problem has for itself, and to all of what it shares."""
    q = torch.randn(3, 3, dtype=F32, device=device)
    P, t = leaf(torch.eye(3, dtype=F32, device=device) + 0.1), leaf(q.new_tensor(0.3))
    q = leaf(q)
    body = dfw.LpBall(p, t) if p != "rows" else dfw.Polyhedron(P.detach(), t * q.new_ones(3))
    found = attempted(dfw.Quadratic(P, q), body)
    assert found.left is None
    v = torch.ones_like(q)
    v[1, 2] = torch.inf
    of_P, of_q, of_t = torch.autograd.grad(found.solution.x, (P, q, t), v)
    assert of_P.isnan().all()
    assert of_t.isnan()
    assert of_q.isnan().any(-1).tolist() == of_q.isnan().all(-1).tolist() == [False, True, False]


@devices
@pytest.mark.parametrize("p", [1.5, 3])
def test_starts_and_the_inside_of_curved_balls(p, device):
    """A solution within the ball, one on its boundary, and starts anywhere."""
    q = leaf(torch.tensor([[0.1, -0.2, 0.05], [3.0, -1.0, 0.5]], dtype=F64, device=device))
    P = torch.eye(3, dtype=F64, device=device) + 0.2
    start = torch.tensor([[9.0, 9, 9], [torch.nan, 0, 0]], dtype=F64, device=device)
    found = attempted(dfw.Quadratic(P, q), dfw.LpBall(p, 1.0), x0=start)
    assert found.left is None
    free = torch.linalg.solve(P, -q.detach()[0])
    torch.testing.assert_close(found.solution.x[0].detach(), free)
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, 1.0), tol=1e-13)
    close(found.solution.x, other.x, 1e-9)
    (own,) = torch.autograd.grad(found.solution.x[0].sum(), q)
    torch.testing.assert_close(own[0], -torch.linalg.inv(P).sum(0))


@devices
def test_views(device):
    """Tensors need not be contiguous."""
    P, q = OBJECTIVES["quadratic"]((4,), F64).P.detach(), torch.randn(N, 4, dtype=F64)
    P, q = P.to(device), q.to(device)
    body = dfw.Box(-q.new_full((1, N), 0.1).expand(4, N), 0.2)
    found = attempted(dfw.Quadratic(P.mT[::2], q.mT[::2]), dfw.Box(body.lower[:2], 0.2))
    other = attempted(
        dfw.Quadratic(P.mT[::2].contiguous(), q.mT[::2].contiguous()), dfw.Box(-0.1, 0.2)
    )
    torch.testing.assert_close(found.solution.x, other.solution.x, rtol=0, atol=1e-12)


@devices
def test_what_is_not_for_it(device):
    q = torch.randn(4, dtype=F64, device=device)
    P = torch.eye(4, dtype=F64, device=device)
    body = dfw.LpBall(1.0)
    assert attempted(dfw.Quadratic(P, q), body) is not None
    for options in ({"method": "dfw"}, {"differentiate": "unroll"}, {"max_steps": 0}):
        assert attempted(dfw.Quadratic(P, q), body, **options) is None
    assert attempted(dfw.Quadratic(P.half(), q.half()), body) is None
    for p in (1.01, 50.0):
        assert attempted(dfw.Quadratic(P, q), dfw.LpBall(p)) is None
    assert attempted(dfw.Quadratic(-P, q), body) is None
    large = torch.eye(129, dtype=F64, device=device)
    assert attempted(dfw.Quadratic(large, large[0]), body) is None


@devices
@pytest.mark.parametrize(
    ("shared", "box", "dtype"),
    [((), True, F64), (("P", "G", "A"), False, F32)],
    ids=str,
)
def test_polyhedra_agree_with_tensor_operations(shared, box, dtype, device):
    parts = random(3, 3, 3, 1, (2,), box=box, shared=shared, dtype=dtype)
    agrees(problem(**parts), device, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(("n", "m", "k"), [(1, 2, 0), (12, 0, 4), (30, 25, 5), (50, 50, 10)])
def test_polyhedra_of_all_sizes(n, m, k, dtype):
    for box in (False, True):
        agrees(problem(**random(n, n, m, k, (16,), box=box, dtype=dtype)), "cuda", dtype, n)


@devices
def test_other_functions_over_polyhedra(device):
    parts = random(6, 2, 2, 0, box=False)
    body = dfw.Polyhedron(parts["G"], parts["h"])
    if device == "cuda":  # the interpreter takes its time
        agrees((dfw.Quadratic(None, parts["q"]), body), device, F64)
    make = torch.Generator().manual_seed(1)
    A, b = (torch.randn(*shape, dtype=F64, generator=make) for shape in ((5, 2), (1, 5)))
    agrees((dfw.LeastSquares(A, b), body), device, F64)


@devices
def test_equations_that_depend_on_each_other(device):
    """What they carry is the least; one coordinate is fixed, and one row says nothing."""
    parts = {name: part.detach() for name, part in random(8, 3, 2, 1, box=False).items()}
    for name in ("A", "b"):
        parts[name] = leaf(torch.cat((parts[name], -2 * parts[name])).to(device))
    parts["h"][1] = torch.inf
    parts["lower"] = torch.tensor([0.25, -torch.inf, -torch.inf], dtype=F64)
    parts["upper"] = torch.tensor([0.25, torch.inf, torch.inf], dtype=F64)
    given = problem(**{name: part.to(device) for name, part in parts.items()})
    sol = attempted(*given).solution
    with compiled.using(False):
        other = dfw.solve(*given)
    close(sol.x, other.x, 1e-12)
    for own, right in ((sol.x.sum(), other.x.sum()), (sol.value, other.value)):
        (found,) = torch.autograd.grad(own, given[1].b, retain_graph=True)
        (expected,) = torch.autograd.grad(right, given[1].b, retain_graph=True)
        torch.testing.assert_close(found[1], -0.5 * found[0])
        torch.testing.assert_close(found[0] - 2 * found[1], expected[0] - 2 * expected[1])


@devices
def test_a_function_that_is_flat_but_for_the_equations(device):
    """A double integrator, whose states have no cost."""
    A = torch.tensor([[1.0, 1.0, -1.0, 0.0, 0.0], [0.0, 1.0, 0.0, -1.0, 1.0]], dtype=F64)
    P = torch.diag(torch.tensor([1.0, 0.5, 0.0, 0.0, 0.2], dtype=F64))
    q = torch.tensor([[0.3, -0.4, 0.0, 0.0, 0.1], [-1.0, 2.0, 0.0, 0.0, 0.7]], dtype=F64)
    upper = torch.tensor([torch.inf, torch.inf, torch.inf, torch.inf, 0.1], dtype=F64)
    body = dfw.Polyhedron(A=A, b=torch.tensor([0.5, -0.2], dtype=F64), upper=upper)
    agrees((dfw.Quadratic(P, q), body), device, F64)


@devices
def test_polyhedra_that_are_left_to_others(device):
    """No point, numbers that are none, two rows that meet a solution twice; and one like others."""
    P = torch.eye(2, dtype=F64, device=device)
    q = torch.tensor([[-1.0, -1], [torch.nan, 0], [-2, 0.0], [-1, -3]], dtype=F64, device=device)
    G = torch.tensor([[1.0, 0], [-1, 0], [2, 0]], dtype=F64, device=device)
    h = q.new_tensor([[0.0, -1, 1], [1, 1, 1], [1, 1, 2], [0.5, 1, 3]])
    q, h = leaf(q), leaf(h)
    given = dfw.Quadratic(P, q), dfw.Polyhedron(G, h)
    assert attempted(*given).left.tolist() == [True, True, True, False]
    sol = dfw.solve(*given)
    with compiled.using(False):
        other = dfw.solve(*given)
    assert sol.status.tolist() == other.status.tolist()
    assert sol.status[:2].tolist() == [dfw.Status.INFEASIBLE, dfw.Status.NONFINITE]
    torch.testing.assert_close(sol.x[2:], other.x[2:])
    own, right = (
        torch.autograd.grad(s.x[2:].sum(), (q, h), allow_unused=True) for s in (sol, other)
    )
    torch.testing.assert_close(own[0], right[0])
    torch.testing.assert_close(own[1][3], right[1][3])
    # what each of the two rows x ≤ h₀ and 2x ≤ h₂ gets is a choice, but not what both get together
    together = q.new_tensor([1.0, 0, 2])
    torch.testing.assert_close(own[1][2] @ together, right[1][2] @ together)
    assert float(own[1][2] @ together) == pytest.approx(1.0, rel=1e-12)


@devices
def test_rows_that_are_met_without_a_force(device):
    """They count as inactive."""
    q = leaf(torch.tensor([[-1.0, -2.0]], dtype=F64, device=device))
    G, h = torch.eye(2, dtype=F64, device=device), q.detach().new_tensor([1.0, 1.0])
    found = attempted(dfw.Quadratic(None, q), dfw.Polyhedron(G, h))
    assert found.left is None
    (gradient,) = torch.autograd.grad(found.solution.x.sum(), q)
    assert gradient.tolist() == [[-1.0, 0.0]]


@devices
def test_polyhedra_that_are_too_large(device):
    P = torch.eye(64, dtype=F64, device=device)
    assert attempted(dfw.Quadratic(P, P[0]), dfw.Polyhedron(P[:1].repeat(65, 1), 1.0)) is None


@devices
def test_calls_with_one_signature_are_laid_out_once_and_agree(device):
    """Other values, and other strides, which a signature does not tell."""
    made = []
    body = dfw.LpBall(1, 0.7)
    for turn in range(3):
        root = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(turn), dtype=F64)
        P = root.mT @ root / 5 + 0.5 * torch.eye(5, dtype=F64)
        P = P.mT if turn == 1 else P
        q = torch.randn(5, 2, dtype=F64).T if turn == 2 else torch.randn(2, 5, dtype=F64)
        agrees((dfw.Quadratic(P, q), body), device, F64)
        given = leaf(P.to(device)), leaf(q.to(device))
        x = dfw.solve(dfw.Quadratic(*given), body).x
        made.append(torch.autograd.grad(x.square().sum(), given))
        with compiled.using(False):
            own = leaf(P), leaf(q)
            expected = torch.autograd.grad(
                dfw.solve(dfw.Quadratic(*own), body, tol=1e-13).x.square().sum(), own
            )
        for found, right in zip(made[-1], expected, strict=True):
            close(found, right, 1e-7)


@devices
def test_polyhedra_where_f_is_nearly_zero_are_proven_in_float32(device):
    """Rounding x moves f by more than the tolerance, unless x is rounded with that in mind."""
    make = torch.Generator().manual_seed(3)
    n = 8

    def normal(*shape):
        return torch.randn(2, *shape, generator=make, dtype=F64).float()

    root, G, A, inside = normal(n, n), normal(n, n), normal(2, n), normal(n, 1)
    P, q = (root.mT @ root / n + 0.1 * torch.eye(n)), normal(n)
    h, b = (G @ inside).squeeze(-1) + 0.1, (A @ inside).squeeze(-1)
    body = dfw.Polyhedron(G, h, A, b)
    wide = dfw.Polyhedron(*(t.double() for t in (G, h, A, b)))
    with compiled.using(False):
        x = dfw.solve(dfw.Quadratic(P.double(), q.double()), wide).x
        # a multiple of the first equation moves f by a constant, and x by nothing
        value = 0.5 * (x * (P.double() @ x.unsqueeze(-1)).squeeze(-1)).sum(-1)
        value = value + (q.double() * x).sum(-1)
        q = (
            q.double() - 0.99 * (value / b[:, 0].double()).unsqueeze(-1) * A[:, 0].double()
        ).float()
        expected = dfw.solve(dfw.Quadratic(P.double(), q.double()), wide)
    assert (expected.value.abs() < 0.02 * value.abs()).all()
    found = attempted(*(moved(each, device) for each in (dfw.Quadratic(P, q), body)))
    assert found is not None
    assert found.left is None
    off = (found.solution.value.cpu().double() - expected.value).abs()
    assert (off <= found.solution.gap.cpu().double() + 1e-12).all()


@devices
@pytest.mark.parametrize("pull", [5.0, -5.0])
@pytest.mark.parametrize("bends", [True, False])
def test_of_two_bounds_that_are_one_the_one_that_holds_moves_x(device, bends, pull):
    P = leaf(2 * torch.eye(4, dtype=F64) + 0.3) if bends else None
    q = torch.full((2, 4), pull, dtype=F64) + torch.linspace(0, 0.2, 4, dtype=F64)
    lower, upper = torch.full((4,), -1.0, dtype=F64), torch.full((4,), 1.0, dtype=F64)
    lower[1] = upper[1] = 0.5
    agrees((dfw.Quadratic(P, leaf(q)), dfw.Box(leaf(lower), leaf(upper))), device, F64)
