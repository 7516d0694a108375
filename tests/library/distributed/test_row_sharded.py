"""One problem whose rows several processes hold: the same answers as in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfwlayer as dfw
from dfwlayer.ops.recorded.text import described
from dfwlayer.ops.shards import ALONE
from repository import ROOT

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)

WORKER = str(Path(__file__).with_name("shard_worker.py"))
CASES = {
    2: ("same", "agreed", "traffic", "precision", "warm", "second", "asking", "tensors", "faults"),
    3: ("some", "agreed", "faults"),
}


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What some processes have found, all cases in one start; the last one is killed in the end."""
    folder, ranks = tmp_path_factory.mktemp("found"), request.param
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(folder), str(rank), str(ranks), *CASES[ranks]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * (ranks - 1) + [-signal.SIGKILL], "".join(output)
    return ranks, json.loads((folder / "found.json").read_text())


def test_the_answers_are_those_of_one_process(seen: Any) -> None:
    ranks, report = seen
    assert list(report["found"]) == list(CASES[ranks])
    for case, found in report["found"].items():
        assert {key: size for key, size in found.items() if not size < 1e-7} == {}, case


def test_a_killed_process_ends_the_others_with_a_word(seen: Any) -> None:
    ranks, report = seen
    told = report["told"]["killed"]
    assert f"rank 0 of {ranks} was left alone in exchanging the gradient (11 numbers)" in told
    assert "Look for the first error of the others" in told


def test_a_process_that_does_not_come_is_not_waited_for_for_ever(seen: Any) -> None:
    ranks, report = seen
    told = report["told"]["late"]
    assert f"rank 0 of {ranks} was left alone in exchanging the arguments" in told
    assert "init_process_group(timeout=...)" in told


def test_one_process_exchanges_nothing() -> None:
    f = dfw.LeastSquares(torch.eye(3), torch.ones(3))
    assert f.group is None
    assert f.shards is None
    x = torch.ones(3)
    assert ALONE.spread(x) is x
    assert ALONE.total(x, "x") is x
    assert ALONE.any(x) is x


def test_a_group_of_one_process_is_that_process() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        A, b = torch.randn(8, 5).double(), torch.randn(8).double()
        f = dfw.LeastSquares(A, b, group=dist.group.WORLD)
        x = dfw.solve(f, dfw.LpBall(1, 0.3)).x
        plain = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, 0.3)).x
        torch.testing.assert_close(x, plain)
        missing: list[str] = []
        described(f, [], missing)
        assert missing == ["Shards"]  # a recorded graph cannot hold it, and says so
    finally:
        dist.destroy_process_group()
