"""Deployed layers against the layers they stand for, set by set, and what is refused."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dfwlayer as dfw
from dfwlayer.deploy import deployed
from helpers import ulps_outside
from set_cases import CASES

REFUSED = {
    "CustomSet": "not known as a fixed number of tensor operations",
    "Ascending of docs/extending.md": "not known as a fixed number of tensor operations",
}
# where the rows come with the call, no point that satisfies them is known beforehand
FIXED_ONLY = ("Polyhedron",)
STEPS = 60
ROWS = 12


def drawn(name: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parameters and costs, one problem per row."""
    case, gen = CASES[name], torch.Generator().manual_seed(11)
    parameters = {k: v.to(dtype) for k, v in case.parameters(gen, ROWS).items()}
    q = case.pull * torch.randn(ROWS, *case.shape, generator=gen, dtype=torch.float64)
    q[: ROWS // 4] *= 0.01  # some inside, or nearly so
    return parameters, q.to(dtype)


def outside(name: str, x: torch.Tensor, parameters: dict[str, torch.Tensor]) -> float:
    """By the table's own formulas, in double precision."""
    each = ({k: v[i].double().numpy() for k, v in parameters.items()} for i in range(len(x)))
    points = x.double().numpy()
    return max(CASES[name].violation(p, own) for p, own in zip(points, each, strict=True))


def alike(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first problem's for all."""
    return {k: v[:1].expand_as(v) for k, v in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_fixed_set_answers_as_the_layer_does_and_is_never_left(name, dtype) -> None:
    case, (parameters, q) = CASES[name], drawn(name, dtype)
    layer = dfw.SetLayer(
        case.build({k: v[0] for k, v in parameters.items()}), shape=case.shape, on_failure="ignore"
    )
    x = layer.deploy(max_steps=STEPS)(q)
    assert x.shape == q.shape
    assert x.dtype == dtype
    size = 1 + float(x.abs().max())
    assert float((x - layer(q)).abs().max()) <= 1e-5 * size
    assert outside(name, x, alike(parameters)) <= 32 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_any_number_of_steps_is_feasible(name) -> None:
    case, (parameters, q) = CASES[name], drawn(name, torch.float32)
    layer = dfw.SetLayer(case.build({k: v[0] for k, v in parameters.items()}), shape=case.shape)
    x = layer.deploy(max_steps=1)(q)
    size = 1 + float(x.abs().max())
    assert outside(name, x, alike(parameters)) <= 32 * torch.finfo(q.dtype).eps * size


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in REFUSED and name not in FIXED_ONLY]
)
def test_a_set_made_in_the_call_answers_as_the_layer_does(name) -> None:
    case, (parameters, q) = CASES[name], drawn(name, torch.float32)
    layer = dfw.SetLayer(lambda **given: case.build(given), shape=case.shape, on_failure="ignore")
    x = layer.deploy(max_steps=STEPS)(q, **parameters)
    size = 1 + float(x.abs().max())
    assert float((x - layer(q, **parameters)).abs().max()) <= 1e-5 * size
    assert outside(name, x, parameters) <= 32 * torch.finfo(q.dtype).eps * size


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_deployed_says_so(name) -> None:
    case, (parameters, _) = CASES[name], drawn(name, torch.float64)
    constraint = case.build({k: v[0] for k, v in parameters.items()})
    layer = dfw.SetLayer(constraint)
    with pytest.raises(ValueError, match=f"{type(constraint).__name__}.*{REFUSED[name]}"):
        layer.deploy()


def test_other_refusals_name_the_set_and_the_reason() -> None:
    ball = dfw.Intersection(dfw.LpBall(2), dfw.LpBall(1, centre=torch.ones(3)))
    with pytest.raises(ValueError, match=r"Intersection cannot be deployed: .*own convergence"):
        dfw.SetLayer(ball).deploy()
    G, h = torch.eye(3), torch.ones(3)
    made = dfw.SetLayer(lambda h: dfw.Polyhedron(G, h)).deploy()
    with pytest.raises(ValueError, match=r"Polyhedron cannot be deployed: .*constant"):
        made(torch.ones(3), h=h)
    with pytest.raises(ValueError, match=r"Polyhedron cannot be deployed: .*strictly"):
        dfw.QPLayer().deploy(G=torch.cat((G, -G)), h=torch.cat((h, -h)))
    with pytest.raises(ValueError, match=r"Polyhedron cannot be deployed: .*no rows"):
        dfw.QPLayer().deploy()
    with pytest.raises(ValueError, match="P: expected None"):
        dfw.SetLayer(dfw.Polyhedron(G, h)).deploy()(torch.eye(3), torch.ones(3))
    with pytest.raises(ValueError, match="max_steps: expected an integer"):
        dfw.DFWLayer().deploy(max_steps=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_ten_thousand_projections_onto_balls(p: float, weighted: bool) -> None:
    gen = torch.Generator().manual_seed(3)
    q = 3 * torch.randn(10_000, 6, generator=gen)
    weight = torch.rand(10_000, 6, generator=gen) + 0.05 if weighted else None
    if weight is not None:
        weight[:100, 0] = 0  # leaves its coordinate alone
        weight[100:200] *= -1
    radius = torch.rand(10_000, generator=gen) * 2
    radius[:10] = 0
    layer = dfw.DFWLayer(p)
    x = layer.deploy()(None, q, weight, radius)
    size = 1 + x.abs().amax(-1, keepdim=True)
    assert float(((x - layer(None, q, weight, radius)).abs() / size).max()) <= 1e-5
    ones = torch.ones_like(q) if weight is None else weight
    assert max(ulps_outside(x[i], ones[i], radius[i], p) for i in range(0, 10_000, 50)) <= 4
    far = dfw.LpBall(p, radius.double(), ones.double()).violation(x.double())
    assert float((far / radius.double().clamp_min(1e-30)).max()) <= 4 * torch.finfo(q.dtype).eps


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_quadratic_functions_by_steps(p: float) -> None:
    gen = torch.Generator().manual_seed(5)
    R = torch.randn(200, 10, 10, generator=gen)
    P, q = R.mT @ R / 10 + 0.2 * torch.eye(10), 2 * torch.randn(200, 10, generator=gen)
    layer = dfw.DFWLayer(p)
    want = layer(P, q, radius=0.7)
    errors = [
        float((layer.deploy(max_steps=k)(P, q, radius=0.7) - want).abs().max()) for k in (1, 4, 100)
    ]
    assert errors[2] <= 1e-5
    assert errors[2] < errors[1] < errors[0]


def test_a_quadratic_program_with_constant_rows() -> None:
    gen = torch.Generator().manual_seed(7)
    n, m = 5, 9
    R = torch.randn(n, n, generator=gen)
    Q, p = R.mT @ R + 0.1 * torch.eye(n), 3 * torch.randn(300, n, generator=gen)
    G, h = torch.randn(m, n, generator=gen), torch.rand(m, generator=gen) + 0.2
    A, b = torch.randn(1, n, generator=gen), torch.zeros(1)
    layer = dfw.QPLayer()
    x = layer.deploy(Q=Q, G=G, h=h, A=A, b=b)(p)
    assert float((x - layer(Q, p, G, h, A, b)).abs().max()) <= 2e-5
    few = layer.deploy(Q=Q, G=G, h=h, A=A, b=b, max_steps=2)(p)
    for found in (x, few):
        assert float((found.double() @ G.double().mT - h).max()) <= 1e-6
        assert float((found.double() @ A.double().mT - b).abs().max()) <= 2e-6
    assert float((few - x).abs().max()) > 1e-3  # which the first steps did not reach


def test_a_row_that_is_not_finite_becomes_nan_alone() -> None:
    q = torch.randn(4, 5)
    q[1, 2], q[2, 0] = math.nan, math.inf
    for layer in (
        dfw.SetLayer(dfw.Simplex()),
        dfw.SetLayer(dfw.L1Box()),
        dfw.SetLayer(dfw.Box(-1.0, 1.0)),
    ):
        x = layer.deploy()(q)
        assert x[1:3].isnan().all()
        torch.testing.assert_close(x[[0, 3]], layer.deploy()(q[[0, 3]]))


def test_a_model_is_deployed_with_what_it_has_learnt() -> None:
    radius = nn.Parameter(torch.tensor(0.5))
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), dfw.SetLayer(dfw.LpBall(1, radius)))
    plain = deployed(model)
    z = torch.randn(7, 4)
    torch.testing.assert_close(plain(z), model(z))
    assert not plain.training
    assert not any(hasattr(part, "solve") for part in plain.modules())
    with torch.no_grad():
        radius.fill_(5.0)
    assert float(plain(z).detach().abs().sum(-1).max()) <= 0.5 * (1 + 1e-6)  # a copy
    copy = deployed(model)
    copy.load_state_dict(plain.state_dict())
    torch.testing.assert_close(copy(z), plain(z))


def test_one_problem_and_several_batch_dimensions() -> None:
    layer = dfw.DFWLayer(1)
    q = torch.randn(2, 3, 5)
    torch.testing.assert_close(layer.deploy()(None, q), layer(None, q))
    torch.testing.assert_close(layer.deploy()(None, q[0, 0]), layer(None, q[0, 0]))
    c = torch.randn(5)
    torch.testing.assert_close(layer.deploy()(None, q[0], centre=c), layer(None, q[0], centre=c))


def test_far_out_in_double_precision() -> None:
    q = 1e7 * torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for constraint in (dfw.LpBall(1), dfw.Simplex(), dfw.KSparse(2), dfw.CappedSimplex(1.0, 0.5)):
        layer = dfw.SetLayer(constraint)
        x = layer.deploy()(q)
        np.testing.assert_allclose(x, layer(q), atol=1e-8)
        assert float(constraint.violation(x).max()) <= 1e-15


def test_torchscript_is_by_tracing_and_scripting_says_so() -> None:
    made = dfw.SetLayer(dfw.Spectraplex(1.0), shape=(3, 3)).deploy()
    z = torch.randn(5, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is out of date, it says
        torch.testing.assert_close(torch.jit.trace(made, (z[:2],))(z), made(z))
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
            torch.jit.script(nn.Sequential(made))


@pytest.mark.parametrize("made", [dfw.NuclearBall(), dfw.Spectraplex(1.0)])
def test_matrices_are_not_for_onnx_by_any_door(made, tmp_path) -> None:
    pytest.importorskip("onnx")
    layer = dfw.SetLayer(made, shape=(3, 3)).deploy()
    given = (torch.randn(2, 3, 3),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter is out of date, it says
        with pytest.raises(ValueError, match="'aoti' and 'export'"):
            torch.onnx.export(layer, given, str(tmp_path / "m.onnx"), dynamo=False)
