"""The fuzz harness catches what it is for: a solver broken on purpose, one way after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer_bench.fuzz import (
    draw_gradient,
    draw_problem,
    judge,
    judge_gradient,
    reproducer,
)
from dfwlayer_bench.fuzz.balls import LpRow
from dfwlayer_bench.fuzz.checks import Judge
from dfwlayer_bench.fuzz.composed import CutRow
from dfwlayer_bench.fuzz.data import LONG, Draw, Param
from dfwlayer_bench.fuzz.gradients import GradientProblem, solve_on_face
from dfwlayer_bench.fuzz.objectives import QuadraticRow, Units
from dfwlayer_bench.fuzz.polyhedra import CappedRow
from dfwlayer_bench.fuzz.problems import SETS, Problem
from dfwlayer_bench.fuzz.run import Options, State, execute
from dfwlayer_bench.fuzz.soak import flat

ALL_CHECKS = ("alone", "nan", "scale", "precision", "gradient")
sound_solve = dfw.solve


def tame(dtype: str = "float64", units: Units | None = None) -> Problem:
    """Sixteen projections onto a weighted ℓ1 ball that cuts their targets off."""
    rng = np.random.default_rng(0)
    params = {
        "q": Param(rng.standard_normal((16, 5)), True),
        "P": Param(np.broadcast_to(np.diag([1.0, 2.0, 0.5, 1.0, 3.0]), (16, 5, 5)).copy(), True),
        "radius": Param(rng.uniform(0.3, 0.6, 16), True, 1),
        "weight": Param(rng.uniform(0.5, 1.5, (16, 5)), True),
    }
    params = {k: p.rounded(dtype) for k, p in params.items()}
    row = LpRow(5, 1.0, weighted=True)
    units = units or Units()
    return Problem(
        0, 0, "LpBall 1", "tame", row, QuadraticRow(5, "own"), params, units, dtype, "auto", 16, {},
        ALL_CHECKS,
    )  # fmt: skip


def kinds(problem: Problem) -> set[str]:
    return {failure.kind for failure in judge(problem)}


def spoil(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """A solver whose solutions are changed by ``change``(solution, objective)."""

    def solve(objective, constraint, **options):
        solution = sound_solve(objective, constraint, **options)
        return replace(solution, **change(solution, objective))

    monkeypatch.setattr(dfw, "solve", solve)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("units", [Units(), Units(4.0**6, 2.0**5)])
def test_a_sound_solver_passes(dtype: str, units: Units) -> None:
    assert judge(tame(dtype, units)) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infeasible_by_a_few_ulp(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eps = torch.finfo(getattr(torch, dtype)).eps
    spoil(monkeypatch, lambda s, _: {"x": s.x * (1 + 12 * eps)})
    assert "infeasible" in kinds(tame(dtype))


def test_infeasible_by_less_than_promised_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    eps = torch.finfo(torch.float64).eps
    spoil(monkeypatch, lambda s, _: {"x": s.x * (1 + eps)})
    assert "infeasible" not in kinds(tame())


def test_false_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(solution, objective):
        x = 0.99 * solution.x.detach()
        value = objective.bind(16 if x.dim() > 1 else None).value_and_gradient(x)[0]
        return {"x": x, "value": value, "gap": 0 * value}

    spoil(monkeypatch, change)
    assert "certificate" in kinds(replace(tame(), checks=()))


def test_false_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(solution, objective):
        x = 0.9 * solution.x.detach()
        value = objective.bind(16 if x.dim() > 1 else None).value_and_gradient(x)[0]
        return {"x": x, "value": value, "gap": value.abs()}

    spoil(monkeypatch, change)
    assert kinds(replace(tame(), checks=())) == {"status"}
    spoil(monkeypatch, lambda s, o: change(s, o) | {"status": 0 * s.status + 2})
    assert kinds(replace(tame(), checks=())) == {"stall"}
    spoil(monkeypatch, lambda s, o: change(s, o) | {"status": 0 * s.status + 1})
    assert kinds(replace(tame(), checks=())) == {"steps"}


def test_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda s, _: {"value": s.value * (1 + 1e-10)})
    assert "value" in kinds(tame())


def test_dependence_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    # feasible and within tol, but not what the problem gives by itself
    spoil(monkeypatch, lambda s, _: {"x": s.x * (1 - 1e-8 * (s.x.dim() > 1))})
    assert "neighbours" in kinds(replace(tame(), checks=("alone",)))

    def nan_spreads(solution, _objective):
        bad = solution.status == dfw.Status.NONFINITE
        return {"x": solution.x * (1 - 1e-8 * bool(bad.any()))}

    spoil(monkeypatch, nan_spreads)
    assert kinds(replace(tame(), checks=("nan",))) == {"neighbours"}


def test_dependence_on_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda s, _: {"x": s.x * (1 - 1e-8 * bool(s.x.abs().max() > 2))})
    assert "scale" in kinds(replace(tame(units=Units(4.0**6, 2.0**5)), checks=("scale",)))


def test_float32_that_is_worse_than_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(solution, objective):
        return {"x": solution.x * (0.9 if solution.x.dtype == torch.float32 else 1.0)}

    spoil(monkeypatch, change)
    assert "precision" in kinds(replace(tame("float32"), checks=("precision",)))


def test_gradients_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    # √0 has a slope that is infinite, and 0 times that is NaN
    spoil(monkeypatch, lambda s, objective: {"x": s.x + 0 * (0 * objective.q).sqrt()})
    assert kinds(tame()) == {"gradient"}


def test_an_error_on_a_sound_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args, **_options):
        raise RuntimeError("no")

    monkeypatch.setattr(dfw, "solve", refuse)
    assert kinds(tame()) == {"error"}


# ---------------------------------------------------------------------------------------------
# gradients


def active_case(name: str) -> GradientProblem:
    """A designed case of that set in which the constraint holds the solution."""
    first = list(SETS).index(name)
    for index in range(first, first + 400 * len(SETS), len(SETS)):
        case = draw_gradient(5, index)
        problem = case.problem
        # in units of one, and not where rounding is amplified
        plain = problem.units == Units() and problem.dtype == "float64" and case.pull == 1
        # the sum over problems that share a parameter may vanish by chance
        apart = all(p.batched for p in problem.params.values() if p.learned)
        if case.situation == "active" and plain and apart and 2 < problem.set.n < 9:
            return case
    raise AssertionError(name)


@pytest.mark.parametrize("name", list(SETS))
def test_wrong_gradients_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = active_case(name)
    assert judge_gradient(case).checked > 0
    spoil(monkeypatch, lambda s, _: {"x": s.x.detach() + 1.01 * (s.x - s.x.detach())})
    assert "gradient" in {f.kind for f in judge_gradient(case).failures}


def test_the_reference_is_right_where_the_answer_is_known() -> None:
    """The projection onto the ℓ2 ball, x = −t q/‖q‖, by its formula."""
    rng = np.random.default_rng(0)
    row, objective = LpRow(5, 2.0), QuadraticRow(5, "none")
    design = row.design(Draw(rng, 4), "active")
    params = objective.fit(rng, design.x, design.force, False) | design.params
    problem = replace(tame(), set=row, objective=objective, params=params, rows=4)
    case = GradientProblem(problem, "active", design.x, design.notes, 1.0)
    moved = {k: torch.tensor(p.value) + 1e-3 for k, p in params.items()}
    root = solve_on_face(case, moved, None, 6)
    q, t = moved["q"], moved["radius"]
    expected = -t[:, None] * q / q.norm(dim=-1, keepdim=True)
    assert torch.allclose(root.z[:, :5], expected, atol=1e-13)


# ---------------------------------------------------------------------------------------------
# runs


def test_memory_that_grows_is_a_failure() -> None:
    level = [1e9 + 1e5 * (k % 3) for k in range(40)]
    assert flat(level)[0]
    assert not flat([m + 1e6 * k for k, m in enumerate(level)])[0]


BROKEN = """
import torch
import dfwlayer as dfw
from dataclasses import replace

sound = dfw.solve
dfw.solve = lambda *a, **k: (lambda s: replace(s, x=1.001 * s.x))(sound(*a, **k))
"""


def broken_index() -> int:
    """A batch of ℓ1 balls that bind, in units of one."""
    for index in range(0, 4000, len(SETS)):
        problem = draw_problem(0, index)
        if " binding," in problem.about and problem.method == "auto" and problem.units == Units():
            return index
    raise AssertionError


def test_the_reproducer_shows_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda s, _: {"x": 1.001 * s.x})
    failure = next(f for f in judge(draw_problem(0, broken_index())) if f.kind == "infeasible")
    script = tmp_path / "reproducer.py"
    script.write_text(BROKEN + reproducer(failure))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"infeasible: {failure.message}" in run.stdout
    # and the row by itself, with the library alone
    shown = json.loads(run.stdout.splitlines()[-1].split("] ")[0] + "]")
    alone = draw_problem(0, failure.index, only=failure.row)
    weight = alone.params["weight"].value if "weight" in alone.params else 1.0
    assert np.abs(weight * np.array(shown)).sum() > 1.0005 * alone.params["radius"].value


def options(tmp_path: Path, jobs: int = 1, **wanted: int) -> Options:
    return Options({k.replace("_", "-"): v for k, v in wanted.items()}, 7, jobs, None, tmp_path)


def test_a_run_is_resumed_and_does_not_depend_on_jobs(tmp_path: Path) -> None:
    def quiet(*_: object) -> None: ...

    wanted = {"problems": 100, "gradients": 10, "bad_inputs": 40}
    whole, done = execute(options(tmp_path / "whole", **wanted), quiet)
    assert done
    assert whole.done["problems"] >= 100
    half = {name: count // 2 for name, count in wanted.items()}
    execute(options(tmp_path / "parts", **half), quiet)
    parts, _ = execute(options(tmp_path / "parts", jobs=2, **wanted), quiet)
    # phases go on from where each one stopped, so the batches are the same
    assert parts.next == whole.next
    assert parts.counts == whole.counts
    assert json.loads((tmp_path / "parts" / "results.json").read_text())["done"] == whole.done


def test_an_interrupt_leaves_a_summary_and_a_state(tmp_path: Path) -> None:
    from dfwlayer_bench.fuzz.report import summary

    def interrupt(_phase: str, done: int, _total: int, _failures: int) -> None:
        if done:
            raise KeyboardInterrupt

    state, whole = execute(options(tmp_path, problems=10_000), interrupt)
    assert not whole
    assert "stopped before the end" in summary(state, whole)
    assert State.load(options(tmp_path)).done == state.done
    with pytest.raises(ValueError, match=r"--out: .* seed 7, got 8"):
        State.load(replace(options(tmp_path), seed=8))


def test_a_run_that_finds_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dfwlayer_bench.fuzz.report import summary

    spoil(monkeypatch, lambda s, _: {"x": 1.001 * s.x})
    state, whole = execute(options(tmp_path, problems=300), lambda *_: None)
    assert state.failed > 0
    text = summary(state, whole)
    assert "infeasible" in text
    assert "draw_problem(seed=7, index=" in text
    assert list((tmp_path / "failures").glob("*.py"))


def test_commands(tmp_path: Path) -> None:
    arguments = ["--problems", "60", "--bad-inputs", "0", "--gradients", "0", "--seed", "3"]
    module = [sys.executable, "-m", "dfwlayer_bench.fuzz", *arguments, "--out", str(tmp_path / "a")]
    run = subprocess.run(module, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
    assert "problems" in run.stdout
    assert "failures" in run.stdout
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from dfwlayer_bench import cli

    result = CliRunner().invoke(cli.build_app(), ["fuzz", *arguments, "--out", str(tmp_path / "b")])
    assert result.exit_code == run.returncode
    both = [json.loads((tmp_path / name / "results.json").read_text()) for name in "ab"]
    assert both[0]["counts"] == both[1]["counts"]
    assert result.exit_code == (1 if both[0]["failures"] else 0)


def test_nothing_heavy_is_imported() -> None:
    """The machine of a long run may have torch and numpy alone."""
    code = (
        "import sys; from dfwlayer_bench.fuzz import grammar, gradients, report, run, soak; "
        "print([m for m in ('typer', 'rich', 'matplotlib', 'cvxpy', 'scipy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("seed", "index"),
    [
        (301, 1247),  # f is flat along the face: its curvature there is rounding of what it is not
        (777, 2374),  # f is lower outside of the set, by the rounding of x
        (9003, 137),  # a face of matrices that is found in many steps, of which each lowers φ
        (9003, 162),  # singular values in double precision are rounded as x is
        (888, 1371),  # Frank-Wolfe steps along a coordinate without a weight, where f is flatter
        (888, 1842),  # a face of matrices on which the projection has no derivative
        (4242, 487),  # radii over weights of any size, compiled
        (5151, 463),  # gradients that float32 cannot hold, compiled
        (9001, 93),  # a step on the face lowers f and raises the gap, where both are close to zero
        (6262, 2312),  # multipliers that leave some of a slope, over rows alone
        (91001, 546),  # vertices of a disc, for a slope along its normal
        (31337, 314),  # a gap in float32 that is rounding times a wide radius
        (
            20261118,
            2316,
        ),  # an ill-conditioned face of a ball and a box, met to 100 units of rounding
        (20261118, 630),  # f is zero where a search over rows begins
        (20261124, 259),  # f at the centre and what it falls by cancel, over a box around it
        (20261202, 427),  # an entry that is zero, left at 1e-46 of the others
        (20261202, 1094),  # a row of zeros beside limits of 1e23
        (20261202, 6315),  # costs of 1e40 on plans of 1e-16
        (20261203, 1657),  # a ball whose radius f hardly feels, on correlated columns
        (20261203, 3523),  # a vertex of the harness with the rounding of zero in an entry
        (20261222, 6754),  # L of a search that rounding misled
        (20261223, 2341),  # a vertex is as exact as all of a gradient, also where x is zero
        (20261223, 22),  # as many problems as a shared matrix has rows
        (20261222, 3797),  # a gradient of two parts, each next to the largest float32
        (20261212, 995),  # P of 1e76, which compiled code takes in units only
        (9191, 83),  # a linear function that is least at zero, in units of 1e25
    ],
)
def test_batches_that_failed_once_pass(seed: int, index: int) -> None:
    assert judge(draw_problem(seed, index)) == []


def test_what_rounding_makes_non_convex_is_told_from_what_is_not() -> None:
    """Curvature of −1e-3 is rounding for a set of size one only if f has terms that are larger."""
    problem = tame()
    P = problem.params["P"].value.copy()
    P[3, 0, 0] = -1e-3
    P[4] = 0  # singular, and convex
    params = problem.params | {"P": replace(problem.params["P"], value=P)}
    convex = Judge(replace(problem, params=params)).convex(np.ones((16, 5), LONG))
    assert np.flatnonzero(~convex).tolist() == [3]


def test_a_level_that_rounding_put_out_of_reach_is_not_asked_of_float64() -> None:
    """A set that is one point to float32 is none to float64; its neighbour is compared."""
    row = CutRow(3, CappedRow(3))
    params = {
        "q": Param(np.zeros((2, 3)), True),
        "P": Param(np.broadcast_to(np.eye(3), (2, 3, 3)).copy(), True),
        "radius": Param(np.array([1.5, 1.0]), True, 1),
        "cap": Param(np.full((2, 3), 0.5), True, 1),
        "normal": Param(np.broadcast_to([0.1, 0.7, -0.3], (2, 3)).copy(), True),
        "level": Param(np.array([0.25, 0.1]), True, 1),
    }
    params = {k: p.rounded("float32") for k, p in params.items()}
    # the sum 1.5 leaves x = (½, ½, ½) alone, whose ⟨a, x⟩ is beside ¼ as a is rounded
    problem = Problem(
        0, 0, "PlaneCut", "one point", row, QuadraticRow(3, "own"), params, Units(), "float32",
        "auto", 2, {}, ("precision",),
    )  # fmt: skip
    assert row.exists(problem.wide()).tolist() == [False, True]
    assert kinds(problem) == set()


def test_float32_beside_a_level_that_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are left are still compared, and told by their place in the batch."""
    row = CutRow(3, CappedRow(3))
    params = {
        "q": Param(np.array([[0.0, 0, 0], [1, -2, 3]]), True),
        "P": Param(np.broadcast_to(np.eye(3), (2, 3, 3)).copy(), True),
        "radius": Param(np.array([1.5, 1.0]), True, 1),
        "cap": Param(np.full((2, 3), 0.5), True, 1),
        "normal": Param(np.broadcast_to([0.1, 0.7, -0.3], (2, 3)).copy(), True),
        "level": Param(np.array([0.25, 0.3]), True, 1),
    }
    params = {k: p.rounded("float32") for k, p in params.items()}
    problem = Problem(
        0, 0, "PlaneCut", "one point", row, QuadraticRow(3, "own"), params, Units(), "float32",
        "auto", 2, {}, (),
    )  # fmt: skip
    judge_ = Judge(problem)
    seen = judge_.solved(problem, "")
    assert seen is not None
    worse = replace(seen, x=np.array([seen.x[0], [0.5, 0.4, 0.1]], LONG))
    judge_.precision(worse, np.array([True, True]))
    assert [(f.kind, f.row) for f in judge_.failures] == [("precision", 1)]
