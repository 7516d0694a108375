from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("scipy")

from typer.testing import CliRunner

import dfwlayer
from dfwlayer_bench.baselines.dc3 import DC3, BallRule, Completion, LinearRule, Training, train
from dfwlayer_bench.baselines.vertex_layers import Perturbed, RegularisedFrankWolfe
from dfwlayer_bench.bench.layers import rivals
from dfwlayer_bench.bench.layers.problems import PROBLEMS, QUICK, make, reference_of
from dfwlayer_bench.bench.layers.systems import SYSTEMS
from dfwlayer_bench.bench.layers.vertices import (
    assignment_rows,
    best_assignment,
    cheapest_path,
    edges,
    path_rows,
)
from dfwlayer_bench.bench.small.problems import largest_error
from dfwlayer_bench.cli import build_app

F64 = torch.float64
# how exact x and the gradient are; those that are not here are exact to 1e-8
LOOSE = {
    "qpax": (1e-8, 1e-3),
    "proxqp": (1e-6, 1e-3),
    "clarabel": (1e-5, 0),
    "osqp": (1e-6, 0),
    "piqp": (1e-7, 0),
    "pinet": (1e-6, 1e-3),
    "pyepo": (1e-6, 1e-4),
    "frank-wolfe": (1e-5, 1e-6),
}


def dfw(*words):
    return CliRunner().invoke(build_app(), ["bench", "--suite", "layers", *map(str, words)])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("name", QUICK)
def test_the_reference_is_a_difference_quotient_and_the_library_agrees(name):
    posed = make(name, 3)
    reference = reference_of(posed)
    assert reference.residual < 1e-9
    data = posed.rows.data.clone().requires_grad_()
    x = posed.solve(data)
    (gradient,) = torch.autograd.grad(posed.rows.value(x), data)
    assert largest_error(x.detach(), reference.x) < 1e-10
    assert largest_error(gradient, reference.gradient) < 1e-9
    direction = normal(*data.shape, seed=1)

    def moved(step):
        return posed.rows.value(posed.solve(data.detach() + step * direction))

    change = float(moved(1e-6) - moved(-1e-6)) / 2e-6
    assert float((reference.gradient * direction).sum()) == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("ignore")
def test_every_system_installed_finds_the_solution_or_says_what_it_found(name, system, monkeypatch):
    chosen = SYSTEMS[system]
    if chosen.missing():
        pytest.skip(chosen.absent())
    posed = make(name, 3)
    if posed.kind not in chosen.kinds:
        pytest.skip("not for this kind")
    monkeypatch.setattr(rivals, "Training", lambda **_: Training(steps=30))
    passes = chosen.prepare(posed)
    x, gradient = (passes.forward(), None) if passes.both is None else passes.both()
    if system == "dc3":  # a guess that satisfies the equations
        assert float((x @ posed.rows.A.mT - posed.rows.b).abs().max()) < 1e-10
        assert passes.settings["steps"] == 30
        return
    assert posed.rows.violation(x) < 1e-6
    if chosen.samples:  # a mean of a hundred vertices
        exact, slope = posed.expectation
        assert largest_error(x, exact) < 0.3
        assert float((gradient * slope).sum() / gradient.norm() / slope.norm()) > 0.7
        return
    of_x, of_gradient = LOOSE.get(system, (1e-8, 1e-8))
    reference = reference_of(posed)
    assert largest_error(x, reference.x) < of_x
    if gradient is not None:
        assert largest_error(gradient, reference.gradient) < of_gradient


def test_the_algorithms_find_the_best_vertex_and_vertices_satisfy_the_rows():
    costs = normal(5, 9).numpy()
    A, b = assignment_rows(3)
    found = best_assignment(costs)
    for cost, vertex in zip(costs, found, strict=True):
        every = [
            sum(cost[3 * i + j] for i, j in enumerate(order))
            for order in itertools.permutations(range(3))
        ]
        assert cost @ vertex == pytest.approx(min(every))
    assert torch.equal(torch.from_numpy(found) @ A.mT, b.expand(5, -1))

    costs, (A, b) = normal(5, len(edges(3)), seed=1).numpy(), path_rows(3)
    found = cheapest_path(3)(costs)
    assert torch.equal(torch.from_numpy(found) @ A.mT, b.expand(5, -1))
    ways = [w for w in itertools.product((0, 1), repeat=4) if sum(w) == 2]
    for cost, vertex in zip(costs, found, strict=True):
        totals = []
        for way in ways:
            node, total = 0, 0.0
            for down in way:
                step = (node, node + (3 if down else 1))
                total += cost[edges(3).index(step)]
                node = step[1]
            totals.append(total)
        assert cost @ vertex == pytest.approx(min(totals))


def test_completion_satisfies_the_equations_and_correction_descends():
    A, b = normal(3, 7), normal(5, 3, seed=1)
    completion = Completion(A)
    x = completion(normal(5, 4, seed=2), b)
    assert float((x @ A.mT - b).abs().max()) < 1e-12
    linear = LinearRule(normal(4, 7, seed=3), normal(4, seed=4))
    ball = BallRule(torch.rand(7, dtype=F64), torch.tensor(0.5, dtype=F64))
    for rule in (linear, ball):
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(rule.excess(point).square().sum(), point)
        assert torch.allclose(slope, rule.slope(x))
    rate = 0.5 / float(torch.linalg.matrix_norm(linear.G @ completion.Z, 2)) ** 2
    few, many = (DC3(3, completion, linear, rate=rate, steps=steps, width=8) for steps in (0, 50))
    many.load_state_dict(few.state_dict())
    near, corrected = (layer(b, b).detach() for layer in (few, many))
    before, after = linear.excess(near).norm(), linear.excess(corrected).norm()
    assert float((corrected @ A.mT - b).abs().max()) < 1e-12
    assert after < 0.5 * before


def test_training_dc3_comes_close_to_the_solution():
    posed = make("tiny-program", 3)
    rows = posed.rows
    completion = Completion(rows.A)
    G, h = rows.one_sided()
    rate = 0.5 / float(torch.linalg.matrix_norm(G @ completion.Z, 2)) ** 2
    torch.manual_seed(0)
    layer = DC3(rows.data.shape[-1], completion, LinearRule(G, h), rate=rate, width=50)
    exact = reference_of(posed).x
    start = float((layer(rows.b, rows.b).detach() - exact).norm())

    def draw(count, generator):
        return (data := posed.draw(count, generator)), data

    steps, _ = train(layer, draw, lambda x, _: rows.objective(x, rows.q[0]), Training(steps=300))
    assert steps == 300
    assert float((layer(rows.b, rows.b) - exact).norm()) < 0.2 * start


def test_the_regularised_layer_is_the_projection_with_its_derivative_and_loss():
    posed = make("tiny-assignment", 3)
    layer = RegularisedFrankWolfe(posed.vertex, strength=0.5, tol=1e-13)
    theta = 0.3 * normal(4, 9, seed=5)
    target = posed.vertex(-normal(4, 9, seed=6))
    body = dfwlayer.Birkhoff(3)
    one, other = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    x = layer(one)
    exact = dfwlayer.solve(dfwlayer.Quadratic(None, -other / 0.5), body, tol=1e-12).x
    assert torch.allclose(x, exact, atol=1e-6)
    weights = normal(4, 9, seed=7)
    gradients = (
        torch.autograd.grad((weights * found).sum(), given)[0]
        for found, given in ((x, one), (exact, other))
    )
    assert torch.allclose(*gradients, atol=1e-8)
    loss = layer.loss(one, target)
    (slope,) = torch.autograd.grad(loss.sum(), one)
    assert torch.allclose(slope, (x - target).detach())
    assert bool((loss > 0).all())
    assert float(layer.loss(theta, x.detach()).abs().max()) < 1e-12


def test_the_perturbed_layer_has_the_mean_and_the_derivative_of_two_vertices():
    def vertex(costs):
        return torch.nn.functional.one_hot(costs.argmin(-1), 2).to(costs)

    theta = torch.tensor([[0.3, -0.1], [0.0, 0.5]], dtype=F64, requires_grad=True)
    layer = Perturbed(vertex, sigma=0.7, samples=200_000)
    x = layer(theta)
    (gradient,) = torch.autograd.grad(x[:, 0].sum(), theta)
    distance = (theta[:, 0] - theta[:, 1]).detach() / (0.7 * math.sqrt(2))
    assert torch.allclose(x[:, 0], torch.special.ndtr(distance), atol=0.01)
    density = torch.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi) / (0.7 * math.sqrt(2))
    assert torch.allclose(gradient, torch.stack([density, -density], -1), atol=0.02)
    target = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64)
    (slope,) = torch.autograd.grad(layer.loss(theta, target).sum(), theta)
    assert torch.allclose(slope, (x - target).detach())


def test_a_run_ends_with_tables_files_and_rows_that_say_why_they_are_empty(tmp_path, monkeypatch):
    rival = replace(SYSTEMS["pinet"], packages=("no-such-package",))
    monkeypatch.setitem(SYSTEMS, "pinet", rival)
    systems = ["dfwlayer", "dfwlayer-custom", "perturbed", "pinet"]
    problems = ["tiny-simplex", "tiny-assignment"]
    result = dfw("--family", *problems, "--systems", *systems, "--repeats", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "layers.json").read_text())["rows"]
    rows = {(row["problem"], row["system"]): row for row in found}
    assert len(rows) == 8
    ours = rows["tiny-assignment", "dfwlayer"]
    assert ours["status"] == "ok" and ours["ratio"] == 1 and ours["error"] < 1e-8  # noqa: PT018
    assert abs(ours["excess"]) < 1e-12
    assert rows["tiny-assignment", "dfwlayer-custom"]["gradient_error"] < 1e-8
    assert rows["tiny-assignment", "perturbed"]["excess"] is None
    assert rows["tiny-simplex", "perturbed"]["status"] == "unsupported"
    for problem in problems:
        assert rows[problem, "pinet"]["detail"] == "not installed: pip install no-such-package"
    assert "pip install no-such-package" in result.output
    assert "tiny-assignment, 4×9" in result.output


def test_every_problem_that_is_not_tiny_has_a_tiny_one():
    assert {f"tiny-{name}" for name in PROBLEMS if name not in QUICK} == set(QUICK)


def test_costs_keep_their_order_in_a_batch():
    costs = np.array([[3.0, 1.0, 1.0, 3.0], [1.0, 3.0, 3.0, 1.0]])
    assert best_assignment(costs).tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
