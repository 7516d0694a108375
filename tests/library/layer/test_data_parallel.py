"""Training through the layer in several processes: examples/data_parallel.py, as users start it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from repository import ROOT

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)

EXAMPLE = str(ROOT / "examples" / "data_parallel.py")
STEPS = 12
# PyTorch 2.6 shards on GPUs only: it records events on streams, which a CPU there has none of
SHARDS = hasattr(torch.cpu.Stream, "record_event")
TOGETHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def started(folder: Path, *options: str, ranks: int = 1) -> subprocess.Popen:
    command = [sys.executable, *(TOGETHER if ranks > 1 else [])]
    command += [EXAMPLE, "--parameters", str(folder / "parameters.json"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def parameters(folder: Path, *options: str, ranks: int = 1) -> dict[str, torch.Tensor]:
    process = started(folder, *options, ranks=ranks)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    return read(folder)


def read(folder: Path) -> dict[str, torch.Tensor]:
    found = json.loads((folder / "parameters.json").read_text())
    return {name: torch.tensor(value) for name, value in found.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-5, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(tmp_path_factory.mktemp("alone"), "--steps", str(STEPS))


def test_two_processes_learn_what_one_does(alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    same(parameters(tmp_path, "--steps", str(STEPS), ranks=2), alone)


def test_a_checkpoint_of_two_is_resumed_by_one(
    alone: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """With FSDP2, so that half of the way is gone by two processes that share parameters."""
    kept = ["--checkpoints", str(tmp_path / "kept")]
    how = ["--shard"] if SHARDS else []
    half = parameters(tmp_path, "--steps", "7", *how, *kept, ranks=2)
    assert not torch.equal(half["log_limit"], alone["log_limit"])
    same(parameters(tmp_path, "--steps", str(STEPS), *kept), alone)


@pytest.mark.skipif(not Path("/proc").exists(), reason="workers are found in /proc")
def test_a_killed_process_ends_the_others_and_nothing_is_lost(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = started(tmp_path, "--steps", "100000", "--checkpoints", str(kept), ranks=2)
    try:
        deadline = time.monotonic() + 100
        while not (kept / "latest").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        output = process.communicate(timeout=100)[0]
        assert process.returncode != 0
        assert "SIGKILL" in output
    finally:
        if process.poll() is None:
            process.terminate()  # which ends the workers, too
            process.communicate(timeout=60)
    step = int((kept / "latest").read_text())
    assert step >= 5
    more = ["--steps", str(step + 3), "--checkpoints", str(kept)]
    parameters(tmp_path, *more, ranks=2)
    assert int((kept / "latest").read_text()) == step + 3
