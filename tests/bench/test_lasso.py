from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("scipy")

from typer.testing import CliRunner

import dfwlayer
from dfwlayer_bench.bench.lasso import problems
from dfwlayer_bench.bench.lasso.problems import make, penalised
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.cli import build_app

TINY = ["tiny", "tiny-sparse-path"]


def dfw(*words):
    return CliRunner().invoke(build_app(), ["bench", "--suite", "lasso", *map(str, words)])


def rows(out):
    return json.loads((out / "lasso.json").read_text())["rows"]


@pytest.mark.parametrize("name", TINY)
def test_the_penalties_match_the_radii(name):
    given = penalised(make(name, 3))
    problem = given.problem
    assert len(given.penalties) == max(1, problem.radius.numel())
    assert (given.penalties > 0).all()
    x = SYSTEMS["dfwlayer"].prepare(given).forward()
    assert given.gap(x) < 1e-9
    assert given.gap(0.99 * x) > 1e-6
    assert torch.allclose(x.abs().sum(-1), problem.radius, rtol=1e-12)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("system", [name for name in SYSTEMS if not name.startswith("dfwlayer")])
def test_a_rival_that_is_installed_finds_the_same(system, name):
    if SYSTEMS[system].missing():
        pytest.skip("not installed")
    given = penalised(make(name, 3))
    passes = SYSTEMS[system].prepare(given)
    assert isinstance(passes, Passes)
    x = passes.forward()
    assert x.shape == (*given.problem.radius.shape, given.problem.A.shape[1])
    assert given.gap(x) < 1e-3


def test_a_run_ends_with_tables_and_files_and_goes_on_where_it_was(tmp_path, monkeypatch):
    words = ["--quick", "--systems", "dfwlayer", "celer", "--threads", 1, "--out", tmp_path]
    rival = replace(SYSTEMS["celer"], packages=("no-such-package",))
    monkeypatch.setitem(SYSTEMS, "celer", rival)
    result = dfw(*words)
    assert result.exit_code == 0, result.output
    found = {(row["problem"], row["system"]): row for row in rows(tmp_path)}
    assert set(found) == {(name, system) for name in TINY for system in ("dfwlayer", "celer")}
    for name in TINY:
        ours, rival = found[name, "dfwlayer"], found[name, "celer"]
        assert ours["status"] == "ok" and ours["gap"] < 1e-9 and ours["ratio"] == 1  # noqa: PT018
        assert ours["calls"] == 2 and ours["both_seconds"] > 0  # noqa: PT018
        assert rival["status"] == "missing" and "no-such" in rival["detail"]  # noqa: PT018
    assert found["tiny-sparse-path", "dfwlayer"]["radii"] == problems.RADII
    assert "dfw bench --suite lasso --family tiny" in (tmp_path / "lasso.md").read_text()

    def refuse(given):
        raise AssertionError("it was finished before")

    monkeypatch.setitem(SYSTEMS, "dfwlayer", replace(SYSTEMS["dfwlayer"], prepare=refuse))
    assert dfw(*words).exit_code == 0
    assert {row["status"] for row in rows(tmp_path)} == {"ok", "missing"}


def test_data_that_are_not_installed_are_a_row_that_says_so(tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(problems.importlib.metadata, "distribution", absent)
    result = dfw("--family", "nci60", "--systems", "dfwlayer", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = rows(tmp_path)
    assert row["status"] == "missing"
    assert row["detail"] == "no data, not installed: pip install --no-deps ISLP"


@pytest.mark.parametrize("name", ["diabetes", "wine"])
def test_the_sets_of_scikit_learn_are_wide_and_bind(name):
    pytest.importorskip("sklearn")
    problem = make(name, 3)
    given = penalised(problem)
    x = SYSTEMS["dfwlayer"].prepare(given).forward()
    assert given.gap(x) < 1e-9
    assert 10 < int((x != 0).sum()) < problem.A.shape[0] < 1.6 * problem.A.shape[1]
    lengths = problem.A.square().sum(0)
    assert torch.allclose(lengths, torch.ones_like(lengths))
    assert float(problem.A.sum(0).abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("option", "value"),
    [("--sizes", "10"), ("--family", "paper"), ("--systems", "daqp"), ("--dtype", "float32")],
)
def test_bad_options_are_named(option, value, tmp_path):
    result = dfw(option, value, "--out", tmp_path)
    assert result.exit_code == 2
    assert option in result.output


def test_the_columns_are_those_of_the_tensor():
    for name in TINY:
        problem = make(name, 5)
        dense = problem.A.to_dense()
        columns = problem.columns
        columns = columns.toarray() if hasattr(columns, "toarray") else columns
        assert torch.equal(torch.from_numpy(columns), dense)
        objective = dfwlayer.LeastSquares(problem.A, problem.b)
        assert objective.shape == (dense.shape[1],)
