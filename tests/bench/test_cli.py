"""The command line and the examples, run as a user would run them, at the smallest size."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

import dfwlayer
from dfwlayer_bench import cli
from dfwlayer_bench.demo import exact as demo_exact
from dfwlayer_bench.demo import steps as demo_steps
from repository import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


# as in a pipe, whatever terminal or CI service the tests run in
NO_TERMINAL = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")) | {"COLUMNS": "80"}


def run(*arguments: str) -> Any:
    return CliRunner(env=NO_TERMINAL).invoke(cli.build_app(), list(arguments))


@dataclass(frozen=True)
class Demo:
    """What one run of the demo left behind."""

    output: str
    exit_code: int
    folder: Path

    @property
    def numbers(self) -> dict[str, Any]:
        numbers: dict[str, Any] = json.loads((self.folder / "demo.json").read_text())
        return numbers


def run_demo(folder: Path, *options: str) -> Demo:
    result = run("demo", "--quick", "--out", str(folder), *options)
    return Demo(result.output, result.exit_code, folder)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("demo") / "made" / "by the demo")


def test_demo_passes_its_own_checks(quick: Demo) -> None:
    assert quick.exit_code == 0, quick.output
    assert all(quick.numbers["checks"].values())
    count = len(quick.numbers["checks"])
    assert f"{count} of {count} checks passed" in quick.output


def test_demo_writes_what_it_says(quick: Demo) -> None:
    told = quick.output.replace("\n", "")
    for name in ("demo.png", "demo.svg", "demo.json"):
        assert str(quick.folder / name) in told
    assert (quick.folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(quick.folder / "demo.svg").getroot().tag.endswith("svg")
    assert {path.name for path in quick.folder.iterdir()} == {"demo.png", "demo.svg", "demo.json"}


def test_demo_numbers_are_sane(quick: Demo) -> None:
    default, published = (quick.numbers["batch"][method] for method in ("auto", "dfw"))
    for result in (default, published):
        assert sum(result["statuses"].values()) == demo_steps.QUICK.problems
        assert 0 <= result["violation"] <= 1e-6
        assert 0 < result["nonzeros"] <= demo_steps.QUICK.variables
    assert default["relative_error"] < 1e-4 < published["relative_error"] < 2
    for check in quick.numbers["gradients"].values():
        assert check["compared"] > 0
        assert check["relative_error"]["auto"] < demo_steps.GRADIENT_TOLERANCE
    training = quick.numbers["training"]
    assert len(training["loss"]) == len(training["radius"]) == demo_steps.QUICK.training_steps
    assert training["loss"][-1] < training["loss"][0]
    assert training["violations"] == 0


def test_demo_is_readable_without_a_terminal(quick: Demo) -> None:
    assert "\x1b" not in quick.output  # no colours, no cursor movements
    assert re.search(r"^A quick run: up to \d+ s on 2 cores$", quick.output, re.MULTILINE)
    steps = demo_steps.QUICK.training_steps
    assert f"[{steps} of {steps}] Training, loss" in quick.output  # how far it is, and when
    assert max(len(line) for line in quick.output.splitlines() if "wrote" not in line) <= 80


def test_demo_is_determined_by_its_seed(quick: Demo, tmp_path: Path) -> None:
    same = run_demo(tmp_path / "same")
    other = run_demo(tmp_path / "other", "--seed", "1", "--steps", "3")
    for name in ("demo.png", "demo.svg", "demo.json"):
        assert (same.folder / name).read_bytes() == (quick.folder / name).read_bytes(), name
    assert other.numbers["batch"] != quick.numbers["batch"]
    assert len(other.numbers["training"]["loss"]) == 3


def test_a_wrong_gradient_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = demo_steps._gradients

    def twice_in_radius(*arguments: Any) -> Any:
        found = sound(*arguments)
        return found | {"radius": 2 * found["radius"]}

    monkeypatch.setattr(demo_steps, "_gradients", twice_in_radius)
    result = run_demo(tmp_path)
    assert result.exit_code == 1
    assert "FAILED the gradient in radius is right" in result.output
    assert result.numbers["checks"]["the gradient in q is right"]


def test_an_unwritable_folder_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("work was done before the folder was tried")

    monkeypatch.setattr(demo_exact, "random_problems", never)
    file = tmp_path / "file"
    file.write_text("kept")
    for folder in (file, file / "below"):
        result = run_demo(folder)
        assert result.exit_code == 1
        assert "--out" in result.output
        assert "choose another folder" in result.output
    assert file.read_text() == "kept"


@pytest.mark.parametrize("option", [("--steps", "0"), ("--seed", "-1"), ("--seed", "x")])
def test_bad_options_are_usage_errors(option: tuple[str, str], tmp_path: Path) -> None:
    assert run_demo(tmp_path, *option).exit_code == 2


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"dfwlayer {dfwlayer.__version__}\n"


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from dfwlayer_bench.cli import build_app\n"
        "try: build_app()(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'dfwlayer') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "demo" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("missing", cli.EXTRA)
def test_a_missing_extra_is_told(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object | None:
        return None if name == missing else object()

    monkeypatch.setattr(cli, "find_spec", find_spec)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert missing in str(stopped.value)
    assert "pip install 'dfwlayer[cli]'" in str(stopped.value)


def test_the_yardstick_projects_exactly() -> None:
    rng = np.random.default_rng(0)
    v, weight = 3 * rng.standard_normal((200, 5)), rng.uniform(0.2, 2, (200, 5))
    radius = rng.uniform(0.1, 20, 200)
    x = demo_exact.project(v, weight, radius)
    assert demo_exact.relative_violation(x, weight, radius) < 1e-14
    inside = np.abs(weight * v).sum(-1) <= radius
    assert inside.any()
    np.testing.assert_array_equal(x[inside], v[inside])
    # the nearest point: ⟨v − x, y − x⟩ ≤ 0 for every vertex y of the ball
    away = v - x
    furthest = (radius[:, None] * np.abs(away) / weight).max(-1)
    assert (furthest - (away * x).sum(-1)).max() < 1e-12


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    """As a user runs it, in whatever folder; what it draws goes there."""
    result = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"DFW_QUICK": "1"},
        timeout=600,  # the first one compiles all kernels, which takes minutes on a busy machine
    )
    if result.stderr.startswith("this example needs the extra"):
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dfwlayer_bench.baselines.altdiff", ["AltDiff", "AltDiffQP"]),
        ("dfwlayer_bench.baselines.optnet", ["OptNet", "OptNetQP"]),
        ("dfwlayer_bench.families", ["FAMILIES", "make"]),
        ("dfwlayer_bench.fuzz", ["draw_problem", "judge"]),
        ("dfwlayer_bench.problems.families", ["FAMILIES", "make"]),
        ("dfwlayer_bench.robotics.expert", ["expert_policy", "roll_out"]),
        ("dfwlayer_bench.robotics.files", ["ASSETS", "load_actor", "load_dataset"]),
        ("dfwlayer_bench.robotics.tasks", ["TASKS", "power"]),
    ],
)
def test_documented_paths_are_importable(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in names)
    assert not hasattr(found, "no_such_name")
