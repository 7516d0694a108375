from __future__ import annotations

import importlib.util
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from dfwlayer_bench.problems.families import FAMILIES, make

cp = pytest.importorskip("cvxpy")
typer = pytest.importorskip("typer")

from typer.testing import CliRunner  # noqa: E402

from dfwlayer_bench.baselines.altdiff import AltDiff, AltDiffQP  # noqa: E402
from dfwlayer_bench.baselines.dc3 import Training  # noqa: E402
from dfwlayer_bench.bench.command import bench  # noqa: E402
from dfwlayer_bench.bench.probe import probe  # noqa: E402
from dfwlayer_bench.bench.report import rows_of  # noqa: E402
from dfwlayer_bench.bench.store import Cell, Store, StoreError  # noqa: E402
from dfwlayer_bench.options import ListCommand, split  # noqa: E402
from dfwlayer_bench.problems.reference import (  # noqa: E402
    kkt_residual,
    project_l1,
    solve_reference,
)
from dfwlayer_bench.systems import SYSTEMS, base, dc3, run  # noqa: E402

TASK = {
    "system": "floor",
    "family": "active",
    "n": 6,
    "seed": 1,
    "dtype": "float64",
    "device": "cpu",
    "functional": "sum",
    "threads": 1,
}
ALWAYS = ["floor", "dfwlayer", "dfw", "alt-diff", "alt-diff-reverse"]


def clarabel(problem):
    """The solution by an interior-point method that shares nothing with ours."""
    x = cp.Variable(problem.n)
    objective = 0.5 * cp.quad_form(x, cp.psd_wrap(problem.P.numpy())) + problem.q.numpy() @ x
    ball = cp.norm1(cp.multiply(problem.w.numpy(), x)) <= float(problem.t)
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-12)
    cp.Problem(cp.Minimize(objective), [ball]).solve(solver=cp.CLARABEL, **tight)
    return torch.from_numpy(np.asarray(x.value))


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def slope(problem, direction, step=1e-6):
    """Central difference of v·x along a direction of q, by the reference solver."""
    plus = solve_reference(replace(problem, q=problem.q + step * direction)).x
    minus = solve_reference(replace(problem, q=problem.q - step * direction)).x
    return float(problem.v @ (plus - minus)) / (2 * step)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_agrees_with_clarabel_and_finite_differences(family):
    problem = make(family, 12, 100, functional="random")
    reference = solve_reference(problem)
    assert reference.residual < 1e-10
    assert relative(clarabel(problem), reference.x) < 1e-5
    direction = torch.linspace(-1, 1, 12, dtype=torch.float64)
    expected = float(reference.gradient @ direction)
    assert slope(problem, direction) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_families_differ_in_whether_the_constraint_is_active():
    active = {name: solve_reference(make(name, 30, 100)).active for name in FAMILIES}
    assert not active["loose"]
    assert active["active"]
    assert active["ill"]
    assert active["very"]


def test_problems_are_reproducible_and_float32_is_the_rounded_float64():
    first, again = make("ill", 20, 7), make("ill", 20, 7)
    assert torch.equal(first.P, again.P)
    assert torch.equal(first.P.float(), make("ill", 20, 7, dtype=torch.float32).P)
    assert torch.equal(first.P, first.P.mT)
    assert not torch.equal(first.q, make("ill", 20, 8).q)


def test_the_papers_radius_is_the_first_draw_of_its_seed():
    expected = abs(np.random.RandomState(300).standard_normal(1)[0])
    assert float(make("paper", 5, 300).t) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("family", ("none", 5, 1)), ("n", ("paper", 0, 1))],
)
def test_bad_problems_are_refused_by_name(name, arguments):
    with pytest.raises(ValueError, match=f"^{name}:"):
        make(*arguments)


def test_projection_meets_its_optimality_conditions():
    problem = make("active", 15, 3)
    y = 10 * torch.linspace(-1, 1, 15, dtype=torch.float64)
    x = project_l1(y, problem.w, 1.0)
    assert float((problem.w * x).abs().sum()) == pytest.approx(1.0)
    shift = (y - x).abs() / problem.w
    level = shift[x != 0].mean()
    assert torch.allclose(shift[x != 0], level.expand_as(shift[x != 0]))
    assert bool((shift[x == 0] <= level + 1e-12).all())


def test_kkt_residual_sees_a_wrong_point():
    problem = make("active", 10, 5)
    reference = solve_reference(problem)
    assert kkt_residual(problem, reference.x * 0.9, reference.multiplier) > 1e-3


@pytest.mark.parametrize("mode", ["jacobian", "reverse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alt_diff_solves_and_differentiates_the_ball(family, mode):
    problem = make(family, 14, 200, functional="random")
    reference = solve_reference(problem)
    layer = AltDiff(tol=1e-12, max_steps=100_000, mode=mode)
    q = problem.q.clone().requires_grad_()
    x = layer(problem.P, q, problem.w, problem.t)
    assert layer.converged
    assert relative(x.detach(), clarabel(problem)) < 1e-5
    assert relative(x.detach(), reference.x) < 1e-8
    (gradient,) = torch.autograd.grad(problem.v @ x, q)
    assert relative(gradient, reference.gradient) < 1e-7


def test_alt_diff_reverse_differentiates_in_every_parameter():
    problem = make("active", 3, 400)
    layer = AltDiff(tol=1e-12, max_steps=20_000)
    M = torch.linalg.cholesky(problem.P)

    def solve(M, q, w, t):
        return layer(M @ M.mT, q, w, t)

    inputs = [a.clone().requires_grad_() for a in (M, problem.q, problem.w, problem.t)]
    assert torch.autograd.gradcheck(solve, inputs, eps=1e-6, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("mode", ["jacobian", "reverse"])
def test_alt_diff_solves_a_generic_qp_with_equations(mode):
    generator = torch.Generator().manual_seed(0)
    d, m = 6, 5
    R = torch.randn(d, d, generator=generator, dtype=torch.float64)
    H, c = (
        R.mT @ R + torch.eye(d, dtype=torch.float64),
        torch.randn(d, generator=generator).double(),
    )
    G = torch.randn(m, d, generator=generator, dtype=torch.float64)
    A = torch.randn(2, d, generator=generator, dtype=torch.float64)
    h, b = 0.1 * torch.ones(m, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def exact(c):
        z = cp.Variable(d)
        objective = cp.Minimize(0.5 * cp.quad_form(z, cp.psd_wrap(H.numpy())) + c.numpy() @ z)
        tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-13)
        constraints = [G.numpy() @ z <= h.numpy(), A.numpy() @ z == b.numpy()]
        cp.Problem(objective, constraints).solve(solver=cp.CLARABEL, **tight)
        return torch.from_numpy(np.asarray(z.value))

    layer = AltDiffQP(rho=1.0, tol=1e-12, max_steps=50_000, mode=mode)
    linear = c.clone().requires_grad_()
    z = layer(H, linear, G, h, A, b)
    assert layer.converged
    assert torch.allclose(z.detach(), exact(c), atol=1e-6)
    (gradient,) = torch.autograd.grad(z.sum(), linear)
    direction = torch.linspace(-1, 1, d, dtype=torch.float64)
    change = (exact(c + 1e-4 * direction) - exact(c - 1e-4 * direction)).sum() / 2e-4
    assert float(gradient @ direction) == pytest.approx(float(change), rel=1e-3, abs=1e-6)


def test_alt_diff_refuses_what_it_cannot_do():
    problem = make("active", 4, 1)
    with pytest.raises(ValueError, match=r"^mode:"):
        AltDiff(mode="forward")
    with pytest.raises(ValueError, match=r"^rho:"):
        AltDiff(rho=0.0)
    with pytest.raises(ValueError, match=r"^H: mode='jacobian'"):
        AltDiff(mode="jacobian")(problem.P.requires_grad_(), problem.q)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if SYSTEMS[name].solves])
@pytest.mark.filterwarnings("ignore")
def test_every_rival_installed_finds_the_solution(name, monkeypatch):
    monkeypatch.setattr(dc3, "TRAINING", Training(steps=60, seconds=60.0))
    monkeypatch.setattr(dc3, "SECONDS", 60.0)
    system = SYSTEMS[name]
    if system.missing():
        pytest.skip(f"not installed: {', '.join(system.missing())}")
    problem = make("active", 20, 100)
    reference = solve_reference(problem)
    result = run(system, problem)
    assert len(result.seconds) == 1
    assert result.settings["dtype"] == "float64"
    if name == "dc3":  # a guess: better than nothing, and not far outside
        assert relative(result.answer.x, reference.x) < 1
        assert result.settings["steps"] == 60
    elif name != "dfw":  # the published method stops far from the solution
        assert relative(result.answer.x, reference.x) < 1e-5
        assert relative(result.answer.gradient, reference.gradient) < 2e-2


def test_the_floor_is_the_unconstrained_solution():
    problem = make("loose", 20, 100)
    reference = solve_reference(problem)
    answer = run(SYSTEMS["floor"], problem).answer
    assert relative(answer.x, reference.x) < 1e-5
    assert relative(answer.gradient, reference.gradient) < 1e-5


@pytest.fixture
def dfw():
    app = typer.Typer(result_callback=leave)
    app.command("bench", cls=ListCommand)(bench)
    app.callback()(lambda: None)
    runner = CliRunner()

    def call(*words):
        return runner.invoke(app, ["bench", *map(str, words)])

    return call


def leave(code, **_):
    raise typer.Exit(code or 0)


def options(out, *more):
    small = ["--sizes", 6, 8, "--family", "active", "--trials", 1, "--repeats", 2]
    return [*small, "--dtype", "float64", "--no-memory", "--out", out, *more]


def cells(out):
    return {path.stem: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}


def test_bench_writes_tables_figures_and_every_cell(dfw, tmp_path):
    result = dfw(*options(tmp_path, "--systems", *ALWAYS))
    assert result.exit_code == 0, result.output
    saved = cells(tmp_path)
    assert len(saved) == 2 * len(ALWAYS)
    assert all(len(cell["seconds"]) == 2 for cell in saved.values())
    ours = saved["active-8-0-dfwlayer"]
    assert ours["error"] < 1e-8
    assert ours["cosine"] == pytest.approx(1)
    assert ours["violation"] < 1e-12
    assert saved["active-8-0-floor"]["error"] is None
    for name in ("bench.csv", "bench.md", "time.png", "time.svg", "error.png", "error.svg"):
        assert (tmp_path / name).stat().st_size > 0
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["command"].startswith("dfw bench --sizes 6 8 --family active")
    assert content["machine"]["torch_threads"] >= 1
    assert len(content["rows"]) == 2 * len(ALWAYS)
    assert "dfwlayer (auto)" in result.output


def test_an_interrupted_run_goes_on_where_it_was(dfw, tmp_path, monkeypatch):
    calls = 0
    ready = SYSTEMS["floor"].prepare

    def once(problem):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return ready(problem)

    arguments = options(tmp_path, "--systems", "floor,alt-diff")
    monkeypatch.setitem(SYSTEMS, "floor", replace(SYSTEMS["floor"], prepare=once))
    result = dfw(*arguments)
    assert result.exit_code == 130
    before = cells(tmp_path)
    assert sorted(before) == ["active-6-0-alt-diff", "active-6-0-floor"]
    assert "6" in (tmp_path / "bench.csv").read_text()
    assert dfw(*arguments).exit_code == 0
    after = cells(tmp_path)
    assert len(after) == 4
    assert all(after[key] == before[key] for key in before)
    assert calls == 3  # the finished size was not run again


def test_more_repeats_add_to_what_is_there_and_fresh_forgets_it(dfw, tmp_path):
    arguments = options(tmp_path, "--systems", "floor")
    assert dfw(*arguments).exit_code == 0
    before = cells(tmp_path)["active-6-0-floor"]["seconds"]
    assert dfw(*arguments, "--repeats", 4).exit_code == 0
    after = cells(tmp_path)["active-6-0-floor"]["seconds"]
    assert after[:2] == before
    assert len(after) == 4
    assert dfw(*arguments, "--fresh").exit_code == 0
    assert len(cells(tmp_path)["active-6-0-floor"]["seconds"]) == 2


def test_a_run_made_differently_is_not_mixed_in(dfw, tmp_path):
    assert dfw(*options(tmp_path, "--systems", "floor")).exit_code == 0
    result = dfw(*options(tmp_path, "--systems", "floor", "--seed", 7))
    assert result.exit_code == 2
    assert "--fresh" in result.output


def test_a_missing_and_a_failing_rival_are_rows_that_say_so(dfw, tmp_path, monkeypatch):
    def fail(problem):
        raise RuntimeError("out of luck")

    absent = base.System("absent", "Absent", fail, ("surely-not-installed",))
    broken = base.System("broken", "Broken", fail)
    nothing = base.System(
        "nothing",
        "Nothing",
        lambda p: base.Ready(lambda: base.Answer(p.q * math.nan, p.q), {}),
    )
    for system in (absent, broken, nothing):
        monkeypatch.setitem(SYSTEMS, system.name, system)
    result = dfw(*options(tmp_path, "--systems", "floor", "absent", "broken", "nothing"))
    assert result.exit_code == 0, result.output
    rows = {row["system"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert rows["absent"]["status"] == "missing"
    assert "surely-not-installed" in rows["absent"]["detail"]
    assert rows["broken"]["status"] == "failed"
    assert "out of luck" in rows["broken"]["detail"]
    assert rows["nothing"]["status"] == "failed"
    assert rows["floor"]["status"] == "ok"


def test_processor_time_leaves_out_what_a_call_waits_for(dfw, tmp_path, monkeypatch):
    def sleeping(problem):
        def call():
            time.sleep(0.05)
            return base.Answer(problem.q, problem.q)

        return base.Ready(call, {})

    monkeypatch.setitem(SYSTEMS, "sleeping", base.System("sleeping", "Sleeping", sleeping))
    for clock in ("wall", "cpu"):
        result = dfw(*options(tmp_path / clock, "--systems", "sleeping", "--clock", clock))
        assert result.exit_code == 0, result.output
    told = {c: cells(tmp_path / c)["active-8-0-sleeping"]["seconds"] for c in ("wall", "cpu")}
    assert min(told["wall"]) >= 0.05
    assert max(told["cpu"]) < 0.04
    assert "--clock cpu" in (tmp_path / "cpu" / "bench.md").read_text()
    result = dfw(*options(tmp_path / "cpu", "--systems", "sleeping"))
    assert result.exit_code == 2  # the two clocks do not share a folder
    assert "clock" in result.output


def test_what_a_rival_prints_is_not_among_the_tables(dfw, tmp_path, monkeypatch):
    def chatty(problem):
        print("so much to say")
        return base.Ready(lambda: print("and more") or base.Answer(problem.q, problem.q), {})

    monkeypatch.setitem(SYSTEMS, "chatty", base.System("chatty", "Chatty", chatty))
    result = dfw(*options(tmp_path, "--systems", "chatty"))
    assert result.exit_code == 0, result.output
    assert "Chatty" in result.output
    assert "more" not in result.output
    assert "so much" not in result.output


def test_an_unwritable_folder_is_named_before_any_work(dfw, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")

    def work(problem):
        raise AssertionError("work was begun")

    monkeypatch.setitem(SYSTEMS, "floor", replace(SYSTEMS["floor"], prepare=work))
    result = dfw(*options(blocked / "under", "--systems", "floor"))
    assert result.exit_code == 2
    assert "--out: cannot write" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sizes", "many"),
        ("--family", "nobody"),
        ("--systems", "nobody"),
        ("--dtype", "float16"),
        ("--functional", "mean"),
        ("--clock", "sundial"),
    ],
)
def test_bad_options_are_named(dfw, tmp_path, option, value):
    result = dfw("--out", tmp_path, option, value)
    assert result.exit_code == 2
    assert option in result.output


def test_lists_are_given_with_spaces_commas_or_repeated():
    assert split(["1,2", "3", "2"]) == ["1", "2", "3"]
    assert split(None) == []


def test_a_probe_reports_memory_a_failure_and_a_timeout():
    found = probe(TASK, 60.0)
    assert found.status == "ok"
    assert found.memory_mb is None or found.memory_mb >= 0
    assert probe({**TASK, "system": "none"}, 60.0).status == "failed"
    slow = probe({**TASK, "system": "dfw", "family": "ill", "n": 400}, 0.001)
    assert slow.status == "time limit"


def test_a_missing_package_is_told_with_the_command_that_installs_it():
    assert base.absent([]) == ""
    assert base.absent(["moreau"]) == "not installed: pip install moreau"
    assert base.absent(["sklearn"]) == "not installed: pip install scikit-learn"
    assert base.absent(["libdqp"]) == "not installed: pip install --no-deps libdqp"
    assert base.module_of("libdqp") == "dqp"


def test_rows_hold_medians_ratios_and_the_worst_violation():
    def cell(trial, system, seconds, **more):
        return Cell("active", 5, trial, 1, system, status="ok", seconds=seconds, **more)

    found = rows_of(
        [
            cell(0, "floor", [1.0, 1.0, 3.0]),
            cell(1, "floor", [2.0]),
            cell(0, "dfw", [2.0, 4.0, 9.0], violation=0.0, error=0.1),
            cell(1, "dfw", [8.0], violation=0.5, error=0.3),
        ]
    )
    row = next(row for row in found if row.system == "dfw")
    assert (row.seconds, row.ratio, row.violation, row.error) == (6.0, 4.0, 0.5, 0.2)
    assert row.calls == 4


def test_a_broken_cell_file_is_run_again(tmp_path):
    store = Store(tmp_path)
    store.open({"seed": 1}, fresh=False)
    cell = Cell("active", 5, 0, 1, "floor", status="ok", seconds=[1.0])
    store.save(cell)
    assert store.load(cell) == cell
    assert store.load(replace(cell, seed=2)) is None
    (tmp_path / "cells" / f"{cell.key}.json").write_text("{half")
    assert store.load(cell) is None
    with pytest.raises(StoreError, match="seed 1 → 2"):
        store.open({"seed": 2}, fresh=False)


def test_importing_the_command_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, dfwlayer_bench.bench.command; sys.exit('torch' in sys.modules)"
    assert importlib.util.find_spec("dfwlayer_bench.bench.command") is not None
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
