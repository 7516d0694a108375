from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("scipy")

import scipy.io
import scipy.sparse
import torch
from typer.testing import CliRunner

from dfwlayer_bench.bench.qp.problems import files_in, read
from dfwlayer_bench.bench.qp.report import shifted_mean
from dfwlayer_bench.bench.qp.rivals import Said
from dfwlayer_bench.bench.qp.systems import SYSTEMS
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.cli import build_app

VALUES = {"TINY": -8.75, "WALK": -0.5}


@pytest.fixture
def collection(tmp_path):
    """Two problems, one in each format, and a file that is broken."""
    folder = tmp_path / "collection"
    folder.mkdir()
    # HS35MOD: x2 = 0.5 is fixed, x1 + x2 + 2 x3 ≤ 3
    P = np.array([[4.0, 2, 2], [2, 4, 0], [2, 0, 2]])
    rows = np.concatenate(([[1.0, 1, 2]], np.eye(3)))
    scipy.io.savemat(
        folder / "TINY.mat",
        {
            "P": scipy.sparse.csc_matrix(P),
            "q": np.array([[-8.0], [-6], [-4]]),
            "A": scipy.sparse.csc_matrix(rows),
            "l": np.array([[-1e20], [0], [0.5], [0]]),
            "u": np.array([[3.0], [1e20], [0.5], [1e20]]),
        },
    )
    none = np.array(None, dtype=object)
    np.savez(
        folder / "WALK.npz",
        P=np.eye(2),
        q=np.array([-1.0, -1.0]),
        G=np.array([[1.0, 1.0], [1.0, 0.0]]),
        h=np.array([1e30, 1.0]),
        A=np.array([[1.0, -1.0]]),
        b=np.array([1.0]),
        lb=none,
        ub=np.array([np.inf, np.inf]),
    )
    (folder / "BROKEN.npz").write_bytes(b"not a file")
    return folder


def dfw(*words):
    return CliRunner().invoke(build_app(), ["bench", "--suite", "qp", *map(str, words)])


def test_both_formats_are_read(collection):
    files = files_in(collection)
    assert list(files) == ["BROKEN", "TINY", "WALK"]
    tiny, walk = read(files["TINY"]), read(files["WALK"])
    assert tiny.G.tolist() == [[1, 1, 2]]
    assert tiny.lower.tolist() == [0, 0.5, 0]
    assert tiny.upper.tolist() == [math.inf, 0.5, math.inf]
    assert len(tiny.b) == 0
    assert walk.G.tolist() == [[1, 0]]  # a row with h of 1e30 is none
    assert walk.lower.tolist() == [-math.inf] * 2
    assert walk.residual(np.array([2.0, 0.0])) == 1
    assert walk.value(np.array([1.0, 0.0])) == -0.5


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", VALUES)
def test_a_system_that_is_installed_finds_the_value(system, name, collection):
    if SYSTEMS[system].missing():
        pytest.skip("not installed")
    problem = read(files_in(collection)[name])
    said = Said()
    x = SYSTEMS[system].prepare(problem, said).forward().numpy()
    assert abs(problem.value(x) - VALUES[name]) <= 1e-6
    assert problem.residual(x) <= 1e-7
    assert said.answer


def test_a_run_ends_with_tables_and_files_and_goes_on_where_it_was(
    collection, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    words = [collection, "--quick", "--systems", "dfwlayer", "piqp", "--out", out]
    monkeypatch.setitem(SYSTEMS, "piqp", replace(SYSTEMS["piqp"], packages=("no-such-package",)))
    result = dfw(*words)
    assert result.exit_code == 0, result.output
    rows = {
        (row["problem"], row["system"]): row
        for row in json.loads((out / "qp.json").read_text())["rows"]
    }
    assert len(rows) == 6
    for name, value in VALUES.items():
        ours, rival = rows[name, "dfwlayer"], rows[name, "piqp"]
        assert ours["answer"] == "CONVERGED"
        assert ours["value"] == pytest.approx(value, abs=1e-9)
        assert abs(ours["gap"]) <= 1e-9
        assert ours["residual"] <= 1e-12
        assert ours["seconds"] > 0
        assert rival["status"] == "missing"
    assert "cannot be read" in rows["BROKEN", "dfwlayer"]["detail"]
    text = (out / "qp.md").read_text()
    assert "dfw bench --suite qp collection" in text
    assert "2 of 2" in text

    def refuse(problem, said):
        raise AssertionError("it was finished before")

    monkeypatch.setitem(SYSTEMS, "dfwlayer", replace(SYSTEMS["dfwlayer"], prepare=refuse))
    assert dfw(*words).exit_code == 0


def test_processor_time_leaves_out_what_a_call_waits_for(collection, tmp_path, monkeypatch):
    def sleeping(problem, said):
        def forward():
            time.sleep(0.05)
            return torch.zeros(len(problem.q), dtype=torch.float64)

        return Passes(forward, None, {})

    monkeypatch.setitem(SYSTEMS, "piqp", replace(SYSTEMS["piqp"], prepare=sleeping, packages=()))
    words = [collection, "--quick", "--systems", "piqp", "--family", "TINY", "--out"]
    told = {}
    for clock in ("wall", "cpu"):
        result = dfw(*words, tmp_path / clock, "--clock", clock)
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / clock / "qp.json").read_text())
        told[clock] = record["rows"][0]["seconds"]
        assert record["clock"] == clock
    assert told["wall"] >= 0.05 > 0.04 > told["cpu"]
    assert "--clock cpu" in (tmp_path / "cpu" / "qp.md").read_text()
    result = dfw(*words, tmp_path / "cpu")
    assert result.exit_code == 2  # the two clocks do not share a folder
    assert "clock" in result.output


def test_the_shifted_mean():
    assert shifted_mean([], 10) is None
    assert shifted_mean([2.0, 2.0], 10) == pytest.approx(2)
    assert shifted_mean([0.0, 30.0], 10) == pytest.approx(10)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "PATH"),
        (["no-such-folder"], "PATH"),
        (["{folder}", "--systems", "qpth"], "--systems"),
        (["{folder}", "--family", "AUG2D"], "--family"),
        (["{folder}", "--sizes", "5", "6"], "--sizes"),
        (["{folder}", "--dtype", "float32"], "--dtype"),
        (["{folder}", "--clock", "sundial"], "--clock"),
    ],
)
def test_bad_options_are_named(words, named, collection):
    result = dfw(*(word.format(folder=collection) for word in words))
    assert result.exit_code == 2
    assert named in result.output


def test_a_folder_is_for_this_suite_only(collection):
    result = CliRunner().invoke(build_app(), ["bench", str(collection), "--suite", "small"])
    assert result.exit_code == 2
    assert "PATH" in result.output
