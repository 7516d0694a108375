from __future__ import annotations

import csv
import importlib.util
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from dfwlayer_bench.bench.run import in_turns
from dfwlayer_bench.bench.small import problems
from dfwlayer_bench.bench.small.problems import (
    SETS,
    largest_error,
    make,
    reference_of,
)
from dfwlayer_bench.bench.small.problems import (
    rows_of as rows_of_small,
)
from dfwlayer_bench.bench.small.report import TABLES
from dfwlayer_bench.bench.small.run import SmallCell
from dfwlayer_bench.bench.small.systems import SYSTEMS, SmallSystem
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.cli import build_app

OURS = ["dfwlayer", "dfwlayer-eager"]
# how exact x and the gradient are: QPLayer rounds gradients to float32, qpax smooths them
EXACT = {
    "jaxopt": (1e-6, 1e-6),
    "qpax": (1e-8, 1e-3),
    "proxqp": (1e-6, 1e-3),
    "moreau": (1e-9, 1e-8),
    "dqp": (1e-7, 1e-8),
    "optnet": (1e-8, 1e-7),
    "daqp": (1e-8, 0),
    "piqp": (1e-7, 0),
    "clarabel": (1e-5, 0),
    "osqp": (1e-6, 0),
}
FORWARD = {"daqp", "piqp", "clarabel", "osqp"}


@pytest.fixture(autouse=True)
def prices(monkeypatch):
    """Prices of skfolio's kind where it is not installed: 600 days of 20 stocks."""
    if importlib.util.find_spec("skfolio") is None:
        steps = np.random.default_rng(5).standard_normal((600, 20))
        found = np.exp(np.cumsum(2e-4 + 0.015 * steps, 0))
        frame = SimpleNamespace(to_numpy=lambda: found)
        module = SimpleNamespace(load_sp500_dataset=lambda: frame)
        monkeypatch.setattr(problems, "load", lambda _: module)


def dfw(*words):
    return CliRunner().invoke(build_app(), ["bench", "--suite", "small", *map(str, words)])


def tiny(out, *more):
    return ["--sizes", "1x6", "3x6", "--family", "l1", "box", "--repeats", 2, "--out", out, *more]


def cells(out):
    return {path.stem: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}


def rows(out):
    return json.loads((out / "small.json").read_text())["rows"]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", SETS)
def test_the_reference_is_optimal_and_its_gradient_a_difference_quotient(name, count):
    problem = make(name, count, 7, 3)
    reference = reference_of(problem)
    assert reference.residual < 1e-12
    direction = torch.linspace(-1, 1, 7, dtype=torch.float64)
    plus, minus = (
        reference_of(replace(problem, q=problem.q + step * direction)).x for step in (1e-6, -1e-6)
    )
    expected = float((problem.v * (plus - minus)).sum()) / 2e-6
    assert float((reference.gradient * direction).sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", SETS)
def test_the_projections_give_feasible_points_at_an_obtuse_angle(name, count):
    problem = make(name, count, 7, 3)
    y = 3 * problem.v
    x = problem.set.project(y)
    assert problem.set.violation(x) < 1e-12
    assert problem.set.violation(x + 1) > 1e-3
    # y − x makes no acute angle with the way to any other point of the set
    other = problem.set.project(problem.q)
    assert float(((y - x) * (other - x)).sum(-1).max()) < 1e-12


@pytest.mark.parametrize("name", SETS)
def test_every_set_binds(name):
    problem = make(name, 8, 10, 100)
    free = torch.linalg.solve(problem.P, -problem.q)
    assert problem.set.violation(free) > 0.1


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.filterwarnings("ignore")
def test_every_system_installed_finds_the_solution(system, name, count):
    chosen = SYSTEMS[system]
    if chosen.missing():
        pytest.skip(f"not installed: {', '.join(chosen.missing())}")
    if name not in chosen.sets:
        pytest.skip("not for this set")
    problem = make(name, count, 7, 3)
    reference = reference_of(problem)
    passes = chosen.prepare(problem)
    of_x, of_gradient = EXACT.get(system, (1e-10, 1e-10))
    assert largest_error(passes.forward(), reference.x) < of_x
    assert (passes.both is None) == (system in FORWARD)
    if passes.both is not None:
        x, gradient = passes.both()
        assert largest_error(x, reference.x) < of_x
        assert largest_error(gradient, reference.gradient) < of_gradient


def test_more_assets_than_there_are_and_prices_that_are_not_installed_are_rows_that_say_so(
    tmp_path, monkeypatch
):
    words = ["--family", "portfolio", "--systems", "dfwlayer-eager", "--repeats", 1]
    assert dfw("--sizes", "1x21", *words, "--out", tmp_path / "many").exit_code == 0
    (row,) = rows(tmp_path / "many")
    assert row["status"] == "unsupported" and "20 assets" in row["detail"]  # noqa: PT018

    def absent(name):
        raise ModuleNotFoundError("none", name="skfolio")

    monkeypatch.setattr(problems, "load", absent)
    result = dfw("--sizes", "1x5", *words, "--out", tmp_path / "none")
    (row,) = rows(tmp_path / "none")
    assert row["status"] == "missing"
    assert row["detail"] == "no data, not installed: pip install skfolio"
    assert "pip install skfolio" in result.output


def test_rows_are_the_same_problem():
    problem = make("capped-simplex", 3, 6, 2)
    given, x = rows_of_small(problem), reference_of(problem).x
    assert given.violation(x) < 1e-12
    assert given.violation(x + 0.1) > 0.1
    G, h = given.one_sided()
    assert len(G) == 12 and bool((x @ G.mT <= h + 1e-12).all())  # noqa: PT018


def test_the_suite_writes_every_cell_tables_and_figures(tmp_path):
    result = dfw(*tiny(tmp_path, "--systems", *OURS))
    assert result.exit_code == 0, result.output
    saved = cells(tmp_path)
    assert len(saved) == 2 * 2 * len(OURS)
    for cell in saved.values():
        assert len(cell["forward_seconds"]) == len(cell["both_seconds"]) == 2
        assert cell["error"] < 1e-10
        assert cell["gradient_error"] < 1e-10
        assert cell["violation"] < 1e-12
        assert cell["residual"] < 1e-12
    for name in ("small.md", "small.png", "small.svg", "small-forward.png"):
        assert (tmp_path / name).stat().st_size > 0
    with (tmp_path / "small.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(saved)
    content = json.loads((tmp_path / "small.json").read_text())
    assert content["command"].startswith("dfw bench --suite small --sizes 1x6 3x6 --family l1 box")
    assert content["machine"]["torch_threads"] == 2
    assert "l1, one×6" in result.output
    assert "box, 3×6" in result.output


def test_what_is_finished_is_not_run_again_and_fresh_forgets_it(tmp_path):
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager")).exit_code == 0
    before = cells(tmp_path)
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager")).exit_code == 0
    assert cells(tmp_path) == before
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager", "--repeats", 3)).exit_code == 0
    for key, cell in cells(tmp_path).items():
        assert cell["both_seconds"][:2] == before[key]["both_seconds"]
        assert len(cell["both_seconds"]) == 3
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager", "--fresh")).exit_code == 0
    assert all(len(cell["both_seconds"]) == 2 for cell in cells(tmp_path).values())


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    calls = 0
    prepare = SYSTEMS["dfwlayer-eager"].prepare

    def once(problem):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return prepare(problem)

    chosen = replace(SYSTEMS["dfwlayer-eager"], prepare=once)
    monkeypatch.setitem(SYSTEMS, "dfwlayer-eager", chosen)
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager")).exit_code == 130
    before = cells(tmp_path)
    assert list(before) == ["l1-1x6-dfwlayer-eager"]
    assert len(rows(tmp_path)) == 1
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager")).exit_code == 0
    assert len(cells(tmp_path)) == 4
    assert cells(tmp_path)["l1-1x6-dfwlayer-eager"] == before["l1-1x6-dfwlayer-eager"]


def test_a_run_made_differently_is_not_mixed_in(tmp_path):
    assert dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager")).exit_code == 0
    result = dfw(*tiny(tmp_path, "--systems", "dfwlayer-eager", "--seed", 7))
    assert result.exit_code == 2
    assert "--fresh" in result.output


def test_missing_failing_and_unfit_rivals_are_rows_that_say_so(tmp_path, monkeypatch):
    def fail(problem):
        raise RuntimeError("out of luck")

    def nothing(problem):
        return Passes(lambda: problem.q * math.nan, None, {})

    for system in (
        SmallSystem("absent", "Absent", fail, ("surely-not-installed",)),
        SmallSystem("broken", "Broken", fail),
        SmallSystem("nothing", "Nothing", nothing),
        SmallSystem("other", "Other", fail, sets=("box",)),
        SmallSystem("forward", "Forward", lambda p: Passes(lambda: p.q, None, {})),
    ):
        monkeypatch.setitem(SYSTEMS, system.name, system)
    names = ("absent", "broken", "nothing", "other", "forward")
    result = dfw("--sizes", "1x6", "--family", "l1", "--out", tmp_path, "--systems", *names)
    assert result.exit_code == 0, result.output
    found = {row["system"]: row for row in rows(tmp_path)}
    assert found["absent"]["status"] == "missing"
    assert "surely-not-installed" in found["absent"]["detail"]
    assert found["broken"]["status"] == "failed"
    assert "out of luck" in found["broken"]["detail"]
    assert found["nothing"]["status"] == "failed"
    assert found["other"]["status"] == "unsupported"
    assert found["other"]["detail"] == "takes box"
    assert found["forward"]["status"] == "ok"
    assert found["forward"]["both_seconds"] is None
    assert found["forward"]["error"] > 0.1


def test_processor_time_leaves_out_what_a_call_waits_for(tmp_path, monkeypatch):
    def sleeping(problem):
        def call():
            time.sleep(0.05)
            return problem.q

        return Passes(call, None, {})

    monkeypatch.setitem(SYSTEMS, "sleeping", SmallSystem("sleeping", "Sleeping", sleeping))
    words = ["--sizes", "1x6", "--family", "box", "--repeats", 1, "--systems", "sleeping"]
    for clock in ("wall", "cpu"):
        result = dfw(*words, "--out", tmp_path / clock, "--clock", clock)
        assert result.exit_code == 0, result.output
    told = {c: rows(tmp_path / c)[0]["forward_seconds"] for c in ("wall", "cpu")}
    assert told["cpu"] < 0.04 < 0.05 <= told["wall"]
    assert "--clock cpu" in (tmp_path / "cpu" / "small.md").read_text()
    result = dfw(*words, "--out", tmp_path / "cpu")
    assert result.exit_code == 2  # the two clocks do not share a folder


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--clock", "sundial"),
        ("--sizes", "10"),
        ("--sizes", "0x10"),
        ("--family", "paper"),
        ("--systems", "dfw"),
        ("--dtype", "float64"),
        ("--trials", "3"),
        ("--suite", "middle"),
    ],
)
def test_bad_options_are_named(tmp_path, option, value):
    result = dfw("--out", tmp_path, option, value)
    assert result.exit_code == 2
    assert option in result.output


def test_rows_compare_medians_with_the_same_pass_of_ours():
    def cell(system, forward, both):
        return SmallCell(
            "box", 2, 5, system=system, status="ok", forward_seconds=forward, both_seconds=both
        )

    found = TABLES.rows(
        [
            cell("dfwlayer", [1.0, 1.0, 9.0], [2.0, 2.0, 9.0]),
            cell("qpax", [3.0], [4.0, 8.0, 6.0]),
            cell("daqp", [0.5], []),
        ]
    )
    assert [row.ratio for row in found] == [1.0, 3.0, 0.5]
    assert [row.both_seconds for row in found] == [2.0, 6.0, None]


def test_turns_start_with_another_one_each_round():
    left = {"a": 2, "b": 3, "c": 2}
    order = []
    for name in in_turns(list(left), lambda item: left[item] == 0):
        left[name] -= 1
        order.append(name)
    assert "".join(order) == "abcbcab"
