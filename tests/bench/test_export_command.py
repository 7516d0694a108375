"""``dfw export``, and the expert that drives its robot from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")

from typer.testing import CliRunner

from dfwlayer_bench.cli import build_app


def run(*arguments: str) -> tuple[int, str]:
    # as in a wide pipe, whatever terminal or CI service the tests run in
    plain = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")) | {"COLUMNS": "200"}
    found = CliRunner(env=plain).invoke(build_app(), ["export", *arguments])
    return found.exit_code, found.output


def test_a_file_is_written_and_checked(tmp_path: Path) -> None:
    code, told = run(
        "--set", "box", "simplex", "--inputs", "50", "--format", "export", "--out", str(tmp_path)
    )
    assert code == 0, told
    assert {path.name for path in tmp_path.iterdir()} == {"box.pt2", "simplex.pt2"}
    assert told.count("50 inputs") == told.count("passed") == 2
    assert "outside" in told
    assert "eager" in told
    assert "[1 of 2] box (" in told  # in a pipe it says how far it is
    assert "[2 of 2] simplex (" in told


def test_too_few_steps_are_an_error(tmp_path: Path) -> None:
    few = ("--max-steps", "1", "--inputs", "50", "--format", "export", "--out", str(tmp_path))
    code, told = run("--set", "l1-quadratic", *few)
    assert code == 1
    assert "FAILED" in told


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    assert "--set: unknown disc" in " ".join(run("--set", "disc")[1].split())
    assert "--format: unknown zip" in " ".join(run("--format", "zip")[1].split())
    code, told = run("--set", "birkhoff", "--n", "6", "--out", str(tmp_path))
    assert code == 1
    assert "square number" in told


def test_the_expert_drives_its_robot_from_a_file(tmp_path: Path) -> None:
    for package in ("safetensors", "onnxruntime", "gymnasium"):
        pytest.importorskip(package, reason="needs the extras: export and robotics")
    from dfwlayer_bench.robotics.episodes import roll_out
    from dfwlayer_bench.robotics.expert import expert_policy
    from dfwlayer_bench.robotics.files import ASSETS, load_actor, load_dataset
    from dfwlayer_bench.robotics.policy import export_policy
    from dfwlayer_bench.robotics.tasks import TASKS, missing

    task = next((task for task in (TASKS["R+O03"], TASKS["HC+O"]) if not missing(task)), None)
    if task is None:
        pytest.skip("no simulator here")
    actor, _ = load_actor(ASSETS / f"{task.slug}_expert.safetensors", task)
    sample = load_dataset(ASSETS / f"{task.slug}_sample.npz", task)
    path = tmp_path / "policy.onnx"
    report = export_policy(task, actor, path, sample.observations)
    assert report.passed, report
    assert report.violation == 0
    wanted = ["--task", task.name, "--episodes", "2", "--seed", "77"]
    ran = subprocess.run(
        [sys.executable, "-m", "dfwlayer_bench.robotics.drive", str(path), *wanted],
        capture_output=True,
        text=True,
        check=True,
    )
    driven = json.loads(ran.stdout.splitlines()[-1])
    assert not driven["torch"]
    assert driven["violations"] == 0
    assert driven["steps"] == 2 * task.episode_steps
    eager = roll_out(task, expert_policy(task, actor), 2, 77)
    if task.name == "R+O03":  # whose episodes are not chaotic
        assert driven["returns"] == pytest.approx(eager.returns, rel=1e-2, abs=0.05)
