from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

pytest.importorskip("cvxpy")
pytest.importorskip("matplotlib")

import cvxpy as cp

import dfwlayer
from dfwlayer_bench.baselines.altdiff import Ball, alternate
from dfwlayer_bench.bench import measure
from dfwlayer_bench.bench.measure import held_bytes
from dfwlayer_bench.bench.store import Cell
from dfwlayer_bench.problems.families import make
from dfwlayer_bench.report.findings import (
    FAILS,
    IN_PART,
    NOT_MEASURED,
    OTHER_SIZES,
    REPRODUCES,
)
from dfwlayer_bench.reproduce.findings import system_findings
from dfwlayer_bench.reproduce.paper import ACCURACY, TIMES
from dfwlayer_bench.reproduce.rows import groups_of_records, system_rows
from dfwlayer_bench.reproduce.studies import ablations
from dfwlayer_bench.reproduce.studies import cosine as cosine_study
from dfwlayer_bench.reproduce.studies.base import Case, Record
from dfwlayer_bench.reproduce.studies.findings import study_findings
from dfwlayer_bench.reproduce.studies.trajectory import follow
from dfwlayer_bench.systems.altdiff_paper import prepare_alt_diff, rounds_of

# what is measured --------------------------------------------------------------------------------


def test_one_trajectory_holds_what_a_solve_for_each_number_of_steps_gives():
    problem = make("active", 12, 300)
    schedule = dfwlayer.Anneal(period=4)
    trajectory = follow(problem, 11, temperature=schedule)
    reference = Case("active", 12, 0, 300, "float64", "cpu").reference
    for k in (1, 2, 7, 11):
        q = problem.q.clone().requires_grad_()
        x = dfwlayer.solve(
            dfwlayer.Quadratic(problem.P, q),
            dfwlayer.LpBall(1, problem.t, problem.w),
            method="dfw",
            tol=0.0,
            max_steps=k,
            temperature=schedule,
        ).x
        (gradient,) = torch.autograd.grad(x.sum(), q)
        x = x.detach()
        assert torch.allclose(trajectory.points[k], x, rtol=1e-12)
        found = trajectory.at(k, reference)
        expected = torch.nn.functional.cosine_similarity(gradient, reference.gradient, dim=0)
        assert found["cosine"] == pytest.approx(float(expected), abs=1e-12)
        assert found["distance"] == pytest.approx(float((x - reference.x).norm()), rel=1e-9)


@pytest.mark.parametrize("family", ["paper", "active"])
def test_the_stop_of_a_trajectory_is_where_the_published_method_stops(family):
    problem = make(family, 15, 500)
    layer = dfwlayer.DFWLayer(method="dfw", tol=1e-4)
    steps = int(layer.solve(problem.P, problem.q, problem.w, problem.t).num_steps)
    assert follow(problem, 1000).stop == steps


def test_alt_diff_stops_after_the_first_small_change_of_f():
    problem = make("paper", 20, 500)
    c = torch.cat([problem.q, torch.zeros_like(problem.q)])
    before, rounds = None, 0
    while True:
        rounds += 1
        rows = Ball(problem.w, problem.t)
        z = alternate(problem.P, c, rows, rho=1.0, tol=0.0, max_steps=rounds).z
        x = z[: problem.n]
        value = float(x @ (0.5 * problem.P @ x + problem.q))
        if before is not None and abs(value - before) <= 1e-4 * abs(before):
            break
        before = value
    assert rounds_of(problem) == rounds
    answer = prepare_alt_diff(problem).call()
    assert torch.allclose(answer.x, x, rtol=1e-10)


def test_memory_counts_what_lives_on():
    own = torch.zeros(500)
    assert held_bytes(lambda: [torch.ones(1000) for _ in range(10)])[1] == 40_000

    def chain():
        x = torch.ones(1000)
        for _ in range(10):
            x = x + 1
        return x

    assert held_bytes(chain)[1] == 4000
    assert held_bytes(lambda: own.view(5, 100), own=[own])[1] == 0
    x = torch.ones(1000, requires_grad=True)
    assert held_bytes(lambda: x.exp().exp().sum(), own=[x])[1] == 8000 + 4  # both results are kept


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_the_targets_of_the_norms_agree_with_clarabel(p):
    case = Case("active", 10, 0, 200, "float64", "cpu")
    target = ablations._target(case, p)
    exact = case.exact
    x = cp.Variable(10)
    objective = 0.5 * cp.quad_form(x, cp.psd_wrap(exact.P.numpy())) + exact.q.numpy() @ x
    norm = cp.norm(cp.multiply(exact.w.numpy(), x), "inf" if p == math.inf else p)
    problem = cp.Problem(cp.Minimize(objective), [norm <= float(target.radius)])
    problem.solve(solver=cp.CLARABEL)
    found = torch.from_numpy(np.asarray(x.value))
    assert float((target.x - found).norm() / found.norm()) < 1e-4
    assert target.slope_error < 1e-4
    assert target.gap < 1e-10


def test_a_gap_above_the_bound_would_be_seen(monkeypatch):
    case = Case("active", 10, 0, 200, "float64", "cpu")
    honest = ablations._against_bound("soft", 20, case)
    assert (honest["broken"], honest["checked"]) == (0, 20)

    def nothing(vertices, k, reach, n):
        return 1e-9 * torch.ones_like(k)

    monkeypatch.setattr(ablations, "_bound", nothing)
    assert ablations._against_bound("soft", 20, case)["broken"] == 20


def test_what_a_first_call_loads_is_not_part_of_its_typical_time(monkeypatch):
    taken = iter([12.0, 0.1, 0.3, 0.2, 0.4])

    def timed(call, device):
        return call(), next(taken)

    monkeypatch.setattr(measure, "timed", timed)
    assert measure.typical_seconds(lambda: "x", torch.device("cpu")) == ("x", 0.3)
    taken = iter([12.0, 11.0])
    assert measure.typical_seconds(lambda: "x", torch.device("cpu")) == ("x", 11.0)


def test_a_power_iteration_ends_below_the_largest_eigenvalue():
    P = torch.diag(torch.tensor([1.0, 7.99, 8.0], dtype=torch.float64))
    start = torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64)
    assert 7.9 < cosine_study.power_iteration(P, start) < 7.995
    assert cosine_study.power_iteration(P, start, 0.0, 20_000) == pytest.approx(8.0, abs=1e-9)


@pytest.mark.parametrize(("name", "early"), [("here", 0), ("authors", 1), ("shift", 0)])
def test_the_set_ups_of_the_cosine_study_do_as_they_say(name, early):
    """The published rule written out once more, with the numbers that follow in the generator."""
    case = Case("active", 20, 0, 400, "float32", "cpu")
    _, setup = cosine_study.SETUPS[name]
    found = cosine_study._stopped(setup, 1000, case)

    random = np.random.RandomState(400)
    random.standard_normal(1 + 20 * 20 + 20)
    random.uniform(size=20)
    x, before = random.standard_normal(20), 0.0
    P = case.exact.P.numpy()
    for _ in range(100):
        x = P @ x / np.linalg.norm(P @ x)
        size = x @ P @ x
        if abs(size - before) < 1e-2:
            break
        before = size
    largest = float(np.linalg.eigvalsh(P)[-1])
    assert found["lipschitz"] == pytest.approx(size / largest if name == "authors" else 1, rel=1e-5)

    problem = case.problem
    w = problem.w + (0 if name == "here" else 1e-8)
    scale = found["lipschitz"] * largest
    q = problem.q.clone().requires_grad_()
    x, value, steps = torch.zeros(20), 1e-30, 0
    while True:
        tau = 0.5 ** ((steps + early) // 30)
        gradient = problem.P @ x + q
        score = gradient * problem.t / w
        s = -problem.t / w * score.sign() * torch.softmax(score.abs() / tau, 0)
        gamma = (gradient @ (x - s) / (scale * (x - s).square().sum())).clamp(0, 1)
        x = x - gamma * (x - s)
        steps += 1
        point = x.detach().double()
        now = float(point @ (0.5 * case.exact.P @ point + case.exact.q))
        if abs(now - value) <= 1e-4 * abs(value):
            break
        value = now
    (slope,) = torch.autograd.grad(x.sum(), q)
    exact = case.reference.gradient
    angle = torch.nn.functional.cosine_similarity(slope.double(), exact, dim=0)
    assert found["steps"] == steps
    assert found["temperature"] == tau
    assert found["distance"] == pytest.approx(float((point - case.reference.x).norm()), rel=1e-3)
    assert found["cosine"] == pytest.approx(float(angle), abs=1e-2)
    assert found["length"] == pytest.approx(float(slope.norm() / exact.norm()), rel=1e-2)


def test_the_cosine_study_names_the_set_ups_that_have_the_papers():
    means = {"here": 0.8, "authors": 0.9, "least-0.125": 0.975, "lower": 0.5, "higher": 0.7}
    made = []
    for variant, cosine in means.items():
        label = cosine_study.SETUPS[variant][0]
        record = Record("cosine", "paper", 500, 0, 1, variant, label, status="ok", active=True)
        made.append(replace(record, values={"cosine": cosine, "length": 40.0}))
    first, second = study_findings(groups_of_records(made))
    assert "0.800 here, 0.900 with the authors' combination; the paper has 0.977" in first.evidence
    assert first.evidence.endswith("Within 0.01 of that: τ at least 1/8 0.975.")
    assert "from 0.500 to 0.700" in second.evidence
    assert "up to 40.0 times" in second.evidence
    assert study_findings(groups_of_records(made[1:])) == []


# rows and findings from made-up numbers ----------------------------------------------------------


def cell(system, trial, n=500, family="paper", **values):
    settings = {"status": "ok", "seconds": [1.0], "violation": 0.0, "radius": 2.0, "error": 0.1}
    return Cell(family, n, trial, 100 * trial, system, **{**settings, "cosine": 1.0, **values})


def test_rows_compare_with_the_rival_as_the_paper_does():
    pair = [cell("diffcp", 0), cell("diffcp", 1), cell("dfw", 0), cell("dfw", 1)]
    pair[2].violation, pair[2].seconds = 0.25, [1.0, 9.0, 2.0]
    answers = {
        pair[0].key: (np.array([0.0, 0.0]), np.array([1.0, 0.0])),
        pair[1].key: (np.array([0.0, 0.0]), np.array([1.0, 0.0])),
        pair[2].key: (np.array([3.0, 4.0]), np.array([1.0, 0.0])),
        pair[3].key: (np.array([0.0, 1.0]), np.array([0.0, 2.0])),
    }
    row = next(row for row in system_rows(pair, answers) if row.system == "dfw")
    assert (row.peer_distance.mean, row.peer_distance.std) == (3.0, 2.0)
    assert row.peer_cosine.mean == pytest.approx(0.5)
    assert (row.mean_violation, row.max_violation) == (0.25, 0.5)
    assert row.relative_violation == 0.25
    assert row.seconds.mean == 1.5  # the median call of each trial


def verdicts(rows):
    return {finding.claim[:30]: finding.verdict for finding in system_findings(rows)}


def test_claims_on_time_are_judged_by_the_paper_factors():
    def rows(factor):
        timed = []
        for n, told in TIMES["DFWLayer"].items():
            timed.append(cell("dfw", 0, n, seconds=[told.mean]))
            rival = told.mean * factor(n)
            timed += [cell("diffcp", 0, n, seconds=[rival]), cell("alt-diff-paper", 0, n)]
        return system_rows(timed, {})

    def verdict(factor):
        return verdicts(rows(factor))["DFWLayer is faster than CvxpyL"]

    def paper(n):
        return TIMES["CvxpyLayer"][n].mean / TIMES["DFWLayer"][n].mean

    assert verdict(paper) == REPRODUCES
    assert verdict(dict.fromkeys(TIMES["DFWLayer"], 2.0).get) == IN_PART
    assert verdict(dict.fromkeys(TIMES["DFWLayer"], 0.5).get) == FAILS
    assert verdicts([]) == {}


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, REPRODUCES), (0.2, FAILS)])
def test_claims_on_agreement_are_judged_by_the_standard_deviations(shift, verdict):
    told = ACCURACY["DFWLayer"][500]
    angle = told.cosine.mean - shift
    pair = [cell("diffcp", 0), cell("dfw", 0)]
    answers = {
        pair[0].key: (np.array([0.0, 0.0]), np.array([1.0, 0.0])),
        pair[1].key: (
            np.array([told.distance.mean + shift, 0.0]),
            np.array([angle, math.sqrt(1 - angle**2)]),
        ),
    }
    assert verdicts(system_rows(pair, answers))["DFWLayer agrees with CvxpyLaye"] == verdict


def test_a_wide_spread_is_no_agreement():
    """Cosines 1 and 0.6 have the paper's mean within one standard deviation of theirs."""
    told = ACCURACY["DFWLayer"][500]
    pairs = [cell(system, trial) for trial in (0, 1) for system in ("diffcp", "dfw")]
    far = np.array([told.distance.mean, 0.0])
    slopes = (np.array([1.0, 0.0]), np.array([0.6, 0.8]))
    answers = {}
    for own in pairs:
        answers[own.key] = (np.zeros(2), np.array([1.0, 0.0]))
        if own.system == "dfw":
            answers[own.key] = (far, slopes[own.trial])
    assert verdicts(system_rows(pairs, answers))["DFWLayer agrees with CvxpyLaye"] == IN_PART


def test_a_violation_is_not_called_reproduced_where_no_constraint_is_active():
    quiet = [cell("alt-diff-paper", 0, constraint_active=False)]
    assert verdicts(system_rows(quiet, {}))["Alt-Diff violates the constrai"] == NOT_MEASURED
    mean, most = (ACCURACY["Alt-Diff"][500].mean_violation, ACCURACY["Alt-Diff"][500].max_violation)
    amounts = (most, 0.1 * mean, 0.1 * mean)  # / t, and t is 2 in these cells
    loud = [
        cell("alt-diff-paper", i, constraint_active=True, violation=amount / 2)
        for i, amount in enumerate(amounts)
    ]
    assert verdicts(system_rows(loud, {}))["Alt-Diff violates the constrai"] == IN_PART
    feasible = [cell("dfw", 0, violation=1e-3)]
    assert verdicts(system_rows(feasible, {}))["DFWLayer never violates the co"] == FAILS


def test_other_sizes_than_the_papers_get_no_verdict():
    def rows(*sizes):
        timed = [cell(name, 0, n) for n in sizes for name in ("dfw", "diffcp", "alt-diff-paper")]
        return system_rows([replace(own, violation=0.5) for own in timed], {})

    claims = [
        finding.verdict for finding in system_findings(rows(60)) if finding.claim[:3] != "How"
    ]
    assert set(claims[:6]) == {OTHER_SIZES}
    judged = verdicts(rows(60, 500))
    assert judged["DFWLayer is faster than CvxpyL"] == FAILS  # the same time at n = 500
    fast = system_rows(
        [
            cell("diffcp", 0, 500, seconds=[100.0]),
            cell("dfw", 0, 500),
            cell("diffcp", 0, 60, seconds=[0.1]),
            cell("dfw", 0, 60),
        ],
        {},
    )
    assert verdicts(fast)["DFWLayer is faster than CvxpyL"] == REPRODUCES  # n = 60 does not count


def temperature_records(annealed, constants, n=1000):
    """(distance, cosine) at the two steps 10 and 20; the published rule stops at 10."""
    made = []
    for variant, (distance, cosine) in {"annealed": annealed, **constants}.items():
        values = {"step": [10, 20], "distance": distance, "cosine": cosine, "stop": 10}
        record = Record("temperature", "paper", n, 0, 1, variant, variant, status="ok")
        made.append(replace(record, values={**values, "error": distance}))
    return made


def test_claims_on_temperature_are_judged_at_the_stop_and_at_the_end():
    constants = {
        "1": ([4.0, 4.0], [0.9, 0.9]),
        "0.5": ([3.0, 3.0], [0.9, 0.95]),
        "0.25": ([2.0, 2.0], [0.5, 0.5]),
        "0.125": ([1.0, 1.0], [0.1, 0.1]),
    }

    def judged(annealed, constants=constants):
        groups = groups_of_records(temperature_records(annealed, constants))
        return [finding.verdict for finding in study_findings(groups)][:3]

    assert judged(([0.5, 0.5], [0.95, 0.95])) == [REPRODUCES] * 3
    # a gradient that is not finite has no direction
    assert judged(([0.5, 0.5], [0.95, None])) == [REPRODUCES, REPRODUCES, IN_PART]
    assert judged(([9.0, 9.0], [0.1, 0.1])) == [REPRODUCES, REPRODUCES, FAILS]
    upside = {**constants, "0.125": ([9.0, 9.0], [0.99, 0.99])}
    assert judged(([0.5, 0.5], [0.99, 0.99]), upside) == [IN_PART, IN_PART, REPRODUCES]
    missing = {name: found for name, found in constants.items() if name != "0.5"}
    assert judged(([0.5, 0.5], [0.9, 0.9]), missing) == [NOT_MEASURED] * 3
    small = groups_of_records(temperature_records(([9.0, 9.0], [0.1, 0.1]), constants, n=60))
    assert [finding.verdict for finding in study_findings(small)][:3] == [OTHER_SIZES] * 3


def test_records_are_what_json_can_hold():
    record = Record("some", "paper", 5, 0, 1, "x", "x", values={"step": [1], "cosine": [None]})
    assert json.loads(json.dumps(asdict(record), allow_nan=False)) == asdict(record)
