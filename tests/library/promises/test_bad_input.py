"""Errors name the argument; one bad problem never spoils a batch."""

import math
import re

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import DEVICES, F64, METHODS, close, make_case

Q = torch.tensor([1.0, -2.0, 0.5])
P = torch.eye(3)
NAN, INF = math.nan, math.inf


def layer(P=P, q=Q, weight=None, radius=1.0, **settings):
    return dfw.DFWLayer(**settings)(P, q, weight, radius)


def solve(objective=None, constraint=None, **settings):
    return dfw.solve(objective or dfw.Quadratic(P, Q), constraint or dfw.LpBall(1.0), **settings)


def smooth(fn=lambda x, c: (x * x).sum(-1) + (c * x).sum(-1), *params, shape=(3,), **more):
    return dfw.Smooth(fn, *(params or (Q,)), shape=shape, **more)


A, B = torch.randn(4, 3), torch.randn(4)
T = torch.tensor
BAD_CALLS = [
    # p
    ("p", lambda: layer(p=0.5)),
    ("p", lambda: layer(p=NAN)),
    ("p", lambda: layer(p=-INF)),
    ("p", lambda: layer(p="one")),
    ("p", lambda: layer(p=None)),
    ("p", lambda: dfw.LpBall(0.99)),
    # radius
    ("radius", lambda: layer(radius=-1.0)),
    ("radius", lambda: layer(radius=NAN)),
    ("radius", lambda: layer(radius=INF)),
    ("radius", lambda: layer(radius="1")),
    ("radius", lambda: layer(radius=None)),
    ("radius", lambda: layer(radius=T(-1.0))),
    ("radius", lambda: layer(radius=T(NAN))),
    ("radius", lambda: layer(radius=T(INF))),
    ("radius", lambda: layer(q=Q.expand(3, 3), radius=torch.ones(2, 1, 2))),
    ("radius", lambda: layer(radius=T(1))),
    ("radius", lambda: layer(radius=T(1.0, dtype=F64))),
    ("radius", lambda: layer(radius=T(1.0, device="meta"))),
    ("radius", lambda: layer(q=Q.expand(3, 3), radius=torch.ones(2))),
    # weight
    ("weight", lambda: layer(weight=torch.ones(4))),
    ("weight", lambda: layer(weight=torch.ones(1, 1, 4))),
    ("weight", lambda: layer(weight=T(1.0))),
    ("weight", lambda: layer(weight=torch.ones(3, dtype=torch.long))),
    ("weight", lambda: layer(weight=torch.ones(3, dtype=F64))),
    ("weight", lambda: layer(weight=torch.ones(3, device="meta"))),
    ("weight", lambda: layer(weight=T([1.0, NAN, 1.0]))),
    ("weight", lambda: layer(weight=T([1.0, INF, 1.0]))),
    ("weight", lambda: layer(weight=[1.0, 1.0, 1.0])),
    ("weight", lambda: layer(weight=2.0)),
    ("weight", lambda: layer(weight=torch.ones(3, dtype=torch.complex64))),
    # q
    ("q", lambda: layer(q=torch.ones(0), P=None)),
    ("q", lambda: layer(q=T(1.0), P=None)),
    ("q", lambda: layer(q=torch.ones(1, 2, 0), P=None)),
    ("q", lambda: layer(q=torch.ones(3, dtype=torch.int32), P=None)),
    ("q", lambda: layer(q=Q.half(), P=None)),
    ("q", lambda: layer(q=Q.bfloat16(), P=None)),
    ("q", lambda: layer(q=T([1.0, NAN, 1.0]))),
    ("q", lambda: layer(q=T([1.0, INF, 1.0]))),
    ("q", lambda: layer(q=[1.0, 2.0, 3.0])),
    ("q", lambda: layer(q=None)),
    # P
    ("P", lambda: layer(P=torch.eye(2))),
    ("P", lambda: layer(P=torch.ones(3, 2))),
    ("P", lambda: layer(P=torch.ones(3))),
    ("P", lambda: layer(P=torch.eye(3).expand(2, 2, 3, 3), q=Q.expand(3, 3))),
    ("P", lambda: layer(P=torch.eye(3, dtype=F64))),
    ("P", lambda: layer(P=torch.eye(3, dtype=torch.long))),
    ("P", lambda: layer(P=torch.eye(3).half())),
    ("P", lambda: layer(P=torch.eye(3, device="meta"))),
    ("P", lambda: layer(P=torch.eye(3).expand(2, 3, 3).to_sparse())),
    ("P", lambda: layer(P=T([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]]))),
    ("P", lambda: layer(P=torch.eye(3) * T([1.0, NAN, 1.0]))),
    ("P", lambda: layer(P=torch.eye(3) + T([0.0, INF, 0.0]))),
    ("P", lambda: layer(P=torch.eye(3).expand(2, 3, 3), q=Q.expand(4, 3))),
    ("P", lambda: layer(P=1.0)),
    # least squares
    ("A", lambda: solve(dfw.LeastSquares(torch.ones(4), B))),
    ("A", lambda: solve(dfw.LeastSquares(torch.ones(4, 0), B))),
    ("A", lambda: solve(dfw.LeastSquares(A.long(), B))),
    ("A", lambda: solve(dfw.LeastSquares(A.double(), B))),
    ("A", lambda: solve(dfw.LeastSquares(A * NAN, B))),
    ("A", lambda: solve(dfw.LeastSquares((A * INF).to_sparse(), B))),
    ("A", lambda: solve(dfw.LeastSquares([[1.0]], B))),
    ("A", lambda: solve(dfw.LeastSquares(A.expand(2, 4, 3), B.expand(3, 4)))),
    ("A", lambda: solve(dfw.LeastSquares(A.to("meta"), B))),
    ("b", lambda: solve(dfw.LeastSquares(A, torch.ones(3)))),
    ("b", lambda: solve(dfw.LeastSquares(A, T(1.0)))),
    ("b", lambda: solve(dfw.LeastSquares(A, B.long()))),
    ("b", lambda: solve(dfw.LeastSquares(A, B * NAN))),
    # Smooth
    ("fn", lambda: solve(smooth(3.0))),
    ("fn", lambda: solve(smooth(lambda x, c: x * c))),
    ("fn", lambda: solve(smooth(lambda *_: 1.0))),
    ("fn", lambda: solve(smooth(lambda x, _: x @ torch.ones(5)))),
    ("shape", lambda: solve(smooth(shape=()))),
    ("shape", lambda: solve(smooth(shape=(0,)))),
    ("shape", lambda: solve(smooth(shape=(2.5,)))),
    ("lipschitz", lambda: solve(smooth(lipschitz=-1.0))),
    ("lipschitz", lambda: solve(smooth(lipschitz=NAN))),
    ("params[0]", lambda: solve(smooth(lambda x, c: (x * c).sum(-1), Q * NAN))),
    ("params[0]", lambda: solve(smooth(lambda x, c: (x * c).sum(-1), Q.half()))),
    ("params[1]", lambda: solve(smooth(lambda x, c, d: (x * c * d).sum(-1), Q, Q.double()))),
    # start and settings
    ("x0", lambda: solve(x0=torch.ones(4))),
    ("x0", lambda: solve(x0=torch.ones(1, 1, 4))),
    ("x0", lambda: solve(x0=torch.ones(3, dtype=F64))),
    ("x0", lambda: solve(x0=torch.ones(3, dtype=torch.long))),
    ("x0", lambda: solve(x0=torch.ones(3, device="meta"))),
    ("x0", lambda: solve(x0=T([1.0, NAN, 1.0]))),
    ("x0", lambda: solve(x0=[0.0, 0.0, 0.0])),
    ("method", lambda: solve(method="newton")),
    ("method", lambda: solve(method=None)),
    ("method", lambda: layer(method="DFW")),
    ("differentiate", lambda: solve(differentiate="forward")),
    ("differentiate", lambda: layer(differentiate=None)),
    ("tol", lambda: solve(tol=-1e-3)),
    ("tol", lambda: solve(tol=NAN)),
    ("tol", lambda: solve(tol=INF)),
    ("tol", lambda: solve(tol="small")),
    ("tol", lambda: solve(tol=None)),
    ("max_steps", lambda: solve(max_steps=-1)),
    ("max_steps", lambda: solve(max_steps=1.5)),
    ("max_steps", lambda: solve(max_steps=None)),
    ("step_size", lambda: solve(step_size=0.1)),
    ("step_size", lambda: solve(step_size="short")),
    ("step_size", lambda: solve(step_size=dfw.ShortStep)),
    ("step_size", lambda: solve(smooth(), step_size=dfw.ExactStep(), method="frank-wolfe")),
    ("step_size", lambda: solve(smooth(), step_size=dfw.ShortStep(), method="dfw")),
    ("temperature", lambda: solve(temperature="hot")),
    ("temperature", lambda: solve(temperature=-1.0)),
    ("temperature", lambda: solve(temperature=0.0)),
    ("temperature", lambda: solve(temperature=NAN)),
    ("temperature", lambda: solve(temperature=lambda _: -1.0, method="dfw")),
    ("temperature", lambda: solve(temperature=lambda _: NAN, method="dfw")),
    ("lipschitz", lambda: solve(step_size=dfw.ShortStep(-1.0), method="dfw")),
    ("lipschitz", lambda: solve(step_size=dfw.ShortStep(NAN), method="dfw")),
    ("offset", lambda: dfw.OpenLoop(1.0)),
    ("shrink", lambda: dfw.Backtracking(shrink=0.0)),
    ("trials", lambda: dfw.Backtracking(trials=0)),
    ("start", lambda: dfw.Anneal(start=-1.0)),
    ("factor", lambda: dfw.Anneal(factor=2.0)),
    ("period", lambda: dfw.Anneal(period=0)),
    ("value", lambda: dfw.Constant(-1.0)),
    ("objective", lambda: dfw.solve(Q, dfw.LpBall(1.0))),
    ("constraint", lambda: dfw.solve(dfw.Quadratic(P, Q), 1.0)),
]


@pytest.mark.parametrize(
    ("name", "call"), BAD_CALLS, ids=[f"{i}-{n}" for i, (n, _) in enumerate(BAD_CALLS)]
)
def test_error_names_the_argument(name, call):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is checked below
        call()
    message = str(caught.value)
    assert re.match(rf"{re.escape(name)}(?!\w)", message), message
    # what was found and what is expected, not just that something is wrong
    assert len(message) > len(name) + 15, message


def test_disagreeing_batches_are_told_apart():
    with pytest.raises(ValueError, match=r"radius.*2.*4 of q"):
        layer(q=Q.expand(4, 3), radius=torch.ones(2))


# ---------------------------------------------------------------------------------------------
# isolation

ROWS = 4
BAD_ROW = 2


def isolation_case(objective):
    return make_case(objective, "p=1", "signed", rows=ROWS, n=4, seed=91)


ISOLATED = [
    ("quadratic", "P"),
    ("quadratic", "q"),
    ("quadratic", "weight"),
    ("quadratic", "radius"),
    ("shared quadratic", "q"),
    ("shared quadratic", "weight"),
    ("least squares", "A"),
    ("least squares", "b"),
    ("COO least squares", "b"),
    ("COO least squares", "radius"),
    ("logistic", "c"),
    ("logistic", "weight"),
]


def solve_with_gradients(case, params, method, **settings):
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    sol = dfw.solve(*case.build(leaves), method=method, **settings)
    sol.x.pow(2).sum().backward()  # sends NaN back into the bad row
    return sol, {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("objective", "name"), ISOLATED)
@pytest.mark.parametrize("method", METHODS)
def test_one_bad_problem(method, objective, name, bad, device):
    case, method = isolation_case(objective).to(device), METHODS[method].method
    shared = {k for k, v in case.params.items() if len(v) != ROWS or k in ("F",)}
    if objective in ("shared quadratic", "COO least squares"):
        shared |= {"P", "A"} & case.params.keys()
    others = [i for i in range(ROWS) if i != BAD_ROW]
    spoilt = {k: v.clone() for k, v in case.params.items()}
    spoilt[name][BAD_ROW].view(-1)[0] = bad
    sound = {k: v if k in shared else v[others] for k, v in case.params.items()}
    settings = {"max_steps": 30, "tol": 1e-6}
    sol, grads = solve_with_gradients(case, spoilt, method, **settings)
    want, want_grads = solve_with_gradients(case, sound, method, **settings)
    assert sol.status[BAD_ROW] == Status.NONFINITE
    assert sol.x[BAD_ROW].isnan().all()
    assert sol.value[BAD_ROW].isnan()
    assert sol.gap[BAD_ROW].isnan()
    assert torch.equal(sol.status[others], want.status)
    assert torch.equal(sol.num_steps[others], want.num_steps)
    close(sol.x[others], want.x, rtol=1e-10, atol=1e-12)
    close(sol.value[others], want.value, rtol=1e-11)
    close(sol.gap[others], want.gap, rtol=1e-6, atol=1e-11)
    for key, grad in grads.items():
        if key in shared:
            close(grad, want_grads[key], rtol=1e-7, atol=1e-9)
        else:
            assert (grad[BAD_ROW] == 0).all(), key
            close(grad[others], want_grads[key], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("objective", ["quadratic", "least squares", "logistic"])
@pytest.mark.parametrize("method", METHODS)
def test_all_problems_bad(method, objective):
    case = isolation_case(objective)
    name = {"quadratic": "q", "least squares": "b", "logistic": "c"}[objective]
    spoilt = case.params | {name: torch.full_like(case.params[name], NAN)}
    sol, grads = solve_with_gradients(case, spoilt, METHODS[method].method)
    assert (sol.status == Status.NONFINITE).all()
    assert sol.x.isnan().all()
    assert all((g == 0).all() for g in grads.values())


def test_several_bad_problems_for_different_reasons():
    case = isolation_case("quadratic")
    spoilt = {k: v.clone() for k, v in case.params.items()}
    spoilt["q"][0, 1] = NAN
    spoilt["weight"][1, 0] = INF
    spoilt["P"][3, 1, 1] = NAN
    sol = dfw.solve(*case.build(spoilt))
    assert sol.status.eq(Status.NONFINITE).tolist() == [True, True, False, True]
    close(sol.x[2], dfw.solve(*case.problem()).x[2], rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_finite_data_that_overflow_stay_in_their_row(method):
    """Sums that overflow to infinity are not non-finite data, and no reason to raise."""
    q = torch.tensor([[3e38, 3e38, 1.0], [1.0, -2.0, 0.5]])
    sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1.0), method=METHODS[method].method)
    alone = dfw.solve(dfw.Quadratic(None, q[1:]), dfw.LpBall(1.0), method=METHODS[method].method)
    assert sol.status[0] != Status.NONFINITE
    assert torch.isfinite(sol.x).all()
    close(sol.x[1:], alone.x, rtol=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("method", METHODS)
def test_not_convex(method, p):
    """Negative curvature is reported, x is feasible, and the neighbours do not notice."""
    case = make_case("quadratic", p, "signed", rows=3, seed=92)
    bent = case.params["P"].clone()
    bent[1] = -bent[1]
    # how many points the active set carries depends on the batch, and with it their rounding, which
    # more steps on a round ball make more of
    steps = 20 if method == "active-set" else 50
    settings = {"method": METHODS[method].method, "max_steps": steps, "tol": 1e-6}
    sol = dfw.solve(*case.problem(P=bent), **settings)
    fine = dfw.solve(*case.problem(), **settings)
    assert sol.status[1] == Status.NOT_CONVEX
    size = torch.linalg.vector_norm((case.params["weight"] * sol.x)[1], p)
    assert size <= case.params["radius"][1] * (1 + 1e-15)
    assert (fine.status != Status.NOT_CONVEX).all()
    rtol = 1e-8 if method == "active-set" else 1e-10
    close(sol.x[[0, 2]], fine.x[[0, 2]], rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("method", METHODS)
def test_convex_problems_are_not_called_otherwise(method, unit):
    """Rounding is not negative curvature, singular and float32 included, in any units."""
    gen = torch.Generator().manual_seed(93)
    R = torch.randn(20, 3, 12, generator=gen)
    P = unit * (R.mT @ R)
    q = unit * torch.randn(20, 12, generator=gen)
    inside = -(P @ torch.randn(20, 12, 1, generator=gen)).squeeze(-1)
    for linear, ball in (
        (q, dfw.LpBall(1.0, 0.5)),
        (inside, dfw.LpBall(1.5, 1e3)),
        (q, dfw.LpBall(2.0, 0.0)),
    ):
        objective = dfw.Quadratic(0.5 * (P + P.mT), linear)
        sol = dfw.solve(objective, ball, method=METHODS[method].method, max_steps=200)
        assert (sol.status != Status.NOT_CONVEX).all()


# ---------------------------------------------------------------------------------------------
# switches and precision


@pytest.mark.parametrize("scale", [1.0, 1.0 + 2.0**-22], ids=["exact", "rounded"])
def test_a_kernel_with_large_sums_is_symmetric(scale):
    """Products with entries of one sign round by more than differences of entries that agree."""
    random = torch.Generator().manual_seed(5)
    points = torch.randn(800, 5, generator=random)
    P = torch.exp(-torch.cdist(points, points).square() / 10) + 1e-3 * torch.eye(800)
    P = 0.5 * (P + P.mT)
    P[0, 1:] *= scale
    bound, bad = dfw.Quadratic(P, torch.ones(800)).verified()
    assert bad is None
    close(bound.P, P, rtol=1e-6, atol=0)


def test_small_asymmetry_is_averaged_away():
    case = make_case("quadratic", "p=1", rows=None)
    skew = 1e-9 * torch.randn(6, 6, dtype=F64)
    sol = dfw.solve(*case.problem(P=case.params["P"] + skew), tol=1e-9)
    close(sol.x, case.x_star, rtol=0, atol=1e-3)
    big = torch.eye(200) + torch.randn(200, 200) * 1e-9  # float32 rounding of a product
    dfw.solve(dfw.Quadratic(big, torch.randn(200)), dfw.LpBall(1.0), max_steps=1)


@pytest.mark.parametrize("position", [(0, 1), (150, 3), (199, 198)])
def test_one_asymmetric_entry_is_found(position):
    P = torch.eye(200)
    P[position] = 0.5
    with pytest.raises(ValueError, match=r"^P: .*symmetric"):
        dfw.solve(dfw.Quadratic(P, torch.randn(200)), dfw.LpBall(1.0))


def test_verify_false_skips_what_reads_values():
    skew = T([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]])
    layer(P=skew, verify=False)
    assert solve(dfw.Quadratic(P, Q * NAN), verify=False).x.shape == (3,)
    with pytest.warns(RuntimeWarning, match="1 OUT_OF_RANGE"):  # the certificate is not skipped
        x = layer(radius=T(NAN), verify=False)
    assert x.shape == (3,)
    for name, call in (
        ("weight", lambda: layer(weight=torch.ones(4), verify=False)),
        ("q", lambda: layer(q=Q.long(), P=None, verify=False)),
        ("tol", lambda: layer(tol=-1.0, verify=False)),
        ("radius", lambda: layer(radius=-1.0, verify=False)),  # a number costs nothing to check
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            call()


@pytest.mark.parametrize("method", METHODS)
def test_verify_does_not_change_the_answer(method):
    case = make_case("quadratic", "p=1", "signed", seed=94)
    a, b = (
        dfw.solve(*case.problem(), method=METHODS[method].method, verify=v, max_steps=50)
        for v in (True, False)
    )
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.status, b.status)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("objective", ["quadratic", "least squares", "logistic"])
def test_autocast_computes_in_float32(objective, half):
    case = make_case(objective, "p=1", seed=95).to(half)
    leaves = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = dfw.solve(*case.build(leaves))
    assert sol.x.dtype == sol.value.dtype == sol.gap.dtype == torch.float32
    want = dfw.solve(*case.to(torch.float32).problem())
    close(sol.x, want.x, rtol=1e-4, atol=1e-5)
    sol.x.sum().backward()
    assert all(v.grad.dtype == half and torch.isfinite(v.grad).all() for v in leaves.values())


def test_autocast_in_a_network():
    net, layer = torch.nn.Linear(5, 4), dfw.DFWLayer(p=1)
    inputs = torch.randn(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = net(inputs)
        x = layer(None, q)
    assert q.dtype == torch.bfloat16
    assert x.dtype == torch.float32
    close(x, layer(None, q.float()), rtol=1e-5, atol=1e-6)
    x.pow(2).sum().backward()
    assert net.weight.grad.abs().max() > 0
    double = torch.randn(4, dtype=F64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(None, double).dtype == F64


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_without_autocast_says_what_to_do(half):
    with pytest.raises(ValueError, match="autocast"):
        layer(P=None, q=Q.to(half))
