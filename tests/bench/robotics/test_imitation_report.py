"""What is reported of imitation: rows over seeds, figures, verdicts, the animation."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")


from dfwlayer_bench.robotics.imitation.animation import BAD, GOOD, SIZE, Scene, film, save_animation
from dfwlayer_bench.robotics.imitation.figures import draw_paper
from dfwlayer_bench.robotics.imitation.findings import findings_of
from dfwlayer_bench.robotics.imitation.layers import LAYERS
from dfwlayer_bench.robotics.imitation.report import Results, rows_of, table_of
from dfwlayer_bench.robotics.imitation.rows import Row, Run
from dfwlayer_bench.robotics.tasks import TASKS

CHEETAH, REACHER = TASKS["HC+O"], TASKS["R+O03"]


def point(step, mse, rate=0.0):
    over = {"violation_rate": rate, "mean_violation": rate, "largest_violation": 2 * rate}
    return {"step": step, "loss": 0.0, "mse": mse, **over}


def driven(seed, returns, rate, most, steps=10):
    over = {"violation_rate": rate, "largest_violation": most}
    told = {"layer": "none", "seed": seed, "trained_steps": steps, "returns": returns}
    return {**told, **over}


def test_rows_are_over_the_seeds_that_got_furthest():
    runs = [
        Run("none", 0, 10, [point(10, 1.0, 0.25)]),
        Run("none", 1, 10, [point(10, 3.0, 0.75)]),
        Run("none", 2, 5, [point(5, 9.0, 0.9)]),
    ]
    timings = {"none": {"median": 0.5, "times_none": 1.0}}
    evaluations = {
        "none-0": driven(0, [1.0, 3.0], 0.5, 4.0),
        "none-1": driven(1, [5.0, 7.0], 0.0, 0.0),
        "none-2": driven(2, [900.0, 900.0], 1.0, 9.0, steps=5),  # of a policy that is left out
    }
    results = Results(REACHER, runs, timings, evaluations, {"cvxpylayers": "needs it"}, {})
    none, absent = rows_of(results)
    assert (none.seeds, none.steps, none.mse, none.violation_rate) == (2, 10, 2.0, 0.5)
    assert none.mse_std == pytest.approx(2**0.5)
    assert (none.largest_violation, none.step_seconds) == (1.5, 0.5)
    assert (none.episode_return, none.episode_violation_rate) == (4.0, 0.25)
    assert none.episode_return_std == pytest.approx(8**0.5)
    # Student's t with one degree of freedom: 12.706 s / √2
    assert none.mse_interval == pytest.approx(12.706)
    assert none.violation_rate_interval == pytest.approx(12.706 * 0.25)
    assert none.episode_return_interval == pytest.approx(2 * 12.706)
    assert none.mse_change is None  # there was one test
    assert (absent.layer, absent.mse, absent.detail) == ("cvxpylayers", None, "needs it")


def test_seeds_that_the_clock_stopped_are_compared_at_a_test_they_share():
    tested = {step: point(step, 10.0 - step / 10) for step in (0, 30, 32, 34)}
    runs = [
        Run("none", seed, last, [at for step, at in tested.items() if step <= last])
        for seed, last in enumerate((34, 32, 34))
    ]
    evaluations = {
        f"none-{run.seed}": driven(run.seed, [float(run.step)], 0.0, 0.0, run.step) for run in runs
    }
    evaluations["none-1"]["trained_steps"] = 30  # before it went on: no longer that policy's
    (row,) = rows_of(Results(REACHER, runs, {}, evaluations, {}, {}))
    assert (row.seeds, row.steps, row.mse) == (3, 32, pytest.approx(6.8))
    assert (row.episode_return, row.episode_return_interval) == (34.0, 0.0)


def test_the_change_in_the_last_quarter_is_that_of_the_mean():
    curves = [
        [point(step, mse) for step, mse in ((0, 9.0), (30, first), (40, second))]
        for first, second in ((4.0, 3.0), (6.0, 6.0))
    ]
    runs = [Run("none", seed, 40, curve) for seed, curve in enumerate(curves)]
    (row,) = rows_of(Results(REACHER, runs, {}, {}, {}, {}))
    assert row.mse_change == pytest.approx(-0.1)
    assert "-10.0 %" in table_of(REACHER, [row]).rows[0]


def test_the_papers_figure_needs_tests_on_the_papers_way(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'dfwlayer[cli]'")
    tested = [point(step, 1.0, 0.1) for step in (0, 200, 400, 5000)]
    ours = Run("dfwlayer", 0, 5000, tested)
    seldom = Run("dfw-paper", 0, 5000, [tested[0], tested[-1]])
    assert draw_paper(tmp_path, REACHER, [ours, seldom]) == []
    (drawn,) = draw_paper(tmp_path, REACHER, [ours, seldom, Run("alt-diff", 0, 5000, tested)])
    assert (tmp_path / f"{drawn.name}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / f"{drawn.name}.svg").read_text()
    assert LAYERS["alt-diff"].label in text
    assert LAYERS["dfw-paper"].label not in text


def test_verdicts_follow_the_numbers():
    def verdicts(published_mse, rate, steps=10):
        none = Row("none", "no layer", 1, 10, 1.0, 0.0, 0.4)
        published = Row("dfw-paper", "DFW", 1, steps, published_mse, 0.0, rate)
        return [finding.verdict for finding in findings_of(REACHER, [none, published])]

    assert verdicts(1.05, 0.0) == ["reproduces", "reproduces"]
    assert verdicts(1.3, 0.0) == ["reproduces", "in part"]
    assert verdicts(1.05, 0.0, steps=5) == ["reproduces", "not measured"]
    assert verdicts(4.0, 0.1) == ["does not reproduce", "does not reproduce"]
    assert [f.verdict for f in findings_of(REACHER, [])] == ["not measured"] * 2
    # what was trained for longer is compared where both were tested
    rows = [Row("none", "", 1, 10, 1.0, 0.0, 0.4), Row("dfw-paper", "", 1, 5, 4.4, 0.0, 0.0)]
    curve = [point(0, 9.0), point(5, 4.0), point(10, 1.0)]
    _, compared = findings_of(REACHER, rows, [Run("none", 0, 10, curve)])
    assert compared.verdict == "reproduces"
    assert "Test MSE 4.40 against 4.00 after 5 steps: 1.10 times" in compared.evidence


def test_the_animation_shows_what_is_over_the_limit(tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    frame = np.full((480, 480, 3), 200, dtype=np.uint8)
    calm, wild = (Scene([frame] * 3, [used] * 3, 0, 0.0) for used in (10.0, 25.0))
    pictures = film(CHEETAH, {"calm": calm, "wild": wild})
    inside = (20, SIZE[1] + 30)
    assert pictures[0].size[0] == 2 * SIZE[0]
    assert pictures[0].getpixel(inside) == GOOD
    assert pictures[0].getpixel((SIZE[0] + inside[0], inside[1])) == BAD
    path = save_animation(tmp_path / "robot.gif", pictures, 50)
    with Image.open(path) as found:
        assert found.n_frames >= 1
        assert found.size == pictures[0].size
