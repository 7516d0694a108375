"""dfw bench --suite gpu."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dfwlayer_bench.bench.gpu.run import (
    CASES,
    SETS,
    GpuRow,
    as_markdown,
    both_passes,
    moved,
    problem,
)
from dfwlayer_bench.cli import build_app

F64 = torch.float64


def dfw(*words):
    return CliRunner().invoke(build_app(), ["bench", "--suite", "gpu", *map(str, words)])


@pytest.mark.parametrize("name", SETS)
def test_sets_hold_some_coordinates_and_not_others(name):
    """Otherwise there would be nothing to find."""
    P, q, v = problem(4, 20, 1)
    made = SETS[name]
    body = made(4, 20, 1) if callable(made) else made
    x, *gradients = both_passes(P.requires_grad_(), q.requires_grad_(), v, moved(body, "cpu", F64))
    assert all(torch.isfinite(part).all() for part in (x, *gradients))
    free = torch.linalg.solve(P.detach(), -q.detach())
    assert (x - free).abs().amax(-1).min() > 1e-2
    assert gradients[1].abs().max() > 1e-3


def test_cases_name_sets():
    assert {name for name, *_ in CASES} == set(SETS)


def test_table():
    text = as_markdown([GpuRow("l1", 1024, 10, 4e-4, 2.5e-3, 0.0, 1e-7, 2e-7)], 1.5e-4)
    assert "| l1 | 1024 × 10 | 0.40 ms | 2.50 ms | 0.0% | 1e-07 | 2e-07 |" in text
    assert "0.15 ms" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(tmp_path):
    found = dfw("--out", tmp_path)
    assert found.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_options_of_other_suites():
    found = dfw("--sizes", "10")
    assert found.exit_code == 2
    assert "--sizes: not for --suite gpu" in " ".join(found.output.split())


@pytest.mark.cuda
def test_run(tmp_path):
    assert dfw("--quick", "--family", "box", "--out", tmp_path).exit_code == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["set"] for row in content["rows"]} == {"box"}
    assert all(row["error"] < 1e-6 for row in content["rows"])
