"""Cells on Ray: killed workers, interruptions, sweeps and shards, on one local cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")
pytest.importorskip("matplotlib", reason="needs the extra: pip install 'dfwlayer[cli]'")
if find_spec("ray") is None or find_spec("pyarrow") is None:
    pytest.skip("needs the extra: pip install 'dfwlayer[ray]'", allow_module_level=True)
if not Path("/proc/self/cmdline").exists():
    pytest.skip("workers are found in /proc", allow_module_level=True)

from typer.testing import CliRunner

import dfwlayer.integrations.numpy as dfw
from dfwlayer.integrations.batches import BatchSolver, Column
from dfwlayer_bench import cli, sweep
from dfwlayer_bench.sweep import Cluster, SweepError, claimed_cores, cluster
from repository import ROOT

NO_TERMINAL = {"COLUMNS": "200", "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
CORES = 2


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    import ray.cloudpickle

    # workers cannot import this file, and get what its functions consist of
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with cluster("local", CORES) as found:
        yield found


@pytest.fixture(scope="module")
def example(workers: Cluster) -> ModuleType:
    import ray.cloudpickle

    sys.path.append(str(ROOT / "examples"))  # processes that this one starts look there, too
    import many_problems

    ray.cloudpickle.register_pickle_by_value(many_problems)
    return many_problems


def command(*words: object) -> tuple[int, str]:
    result = CliRunner(env=NO_TERMINAL).invoke(cli.build_app(), [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def busy_workers(work: str) -> list[int]:
    """Workers of this process's cluster that run this function."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
            mine = parent(parent(int(path.name))) == os.getpid()
        except (OSError, ValueError):
            continue  # it has ended
        if mine and name.startswith(f"ray::{work}"):
            found.append(int(path.name))
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class Killer(threading.Thread):
    """kill -9 of every worker that runs this function, once something has been finished."""

    def __init__(self, work: str, finished: Callable[[], list[Path]]) -> None:
        super().__init__(daemon=True)
        self.work, self.finished = work, finished
        self.killed: list[int] = []
        self.kept: dict[Path, int] = {}
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 100
        while not self.killed and time.monotonic() < deadline:
            if self.finished():
                for process in busy_workers(self.work):
                    os.kill(process, signal.SIGKILL)
                    self.killed.append(process)
                self.kept = {path: path.stat().st_mtime_ns for path in self.finished()}
            time.sleep(0.005)

    def checked(self) -> None:
        """Some were killed, and what was there is there as it was."""
        self.join()
        assert self.killed
        assert self.kept
        for path, changed in self.kept.items():
            assert path.stat().st_mtime_ns == changed, path


# --- the cells


def cell(folder: Path, name: str, fate: str) -> str:
    """A result on disk, and a line for each time that it was worked for."""
    done = folder / name
    if done.exists():
        return done.read_text()
    with (folder / "log").open("a") as log:
        log.write(f"{name}\n")
    died = folder / f"{name}.died"
    if fate == "dies" or (fate == "dies once" and not died.exists()):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "dies after":
        done.write_text(name)
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "fails":
        raise KeyError(name)
    asked: list[int] = []
    if fate == "saves":
        signal.signal(signal.SIGINT, lambda *_: asked.append(1))
        while not asked:
            time.sleep(0.01)
    done.write_text(name)
    return name


def cells(folder: Path, **fates: str) -> dict[str, tuple[Path, str, str]]:
    return {name: (folder, name, fate) for name, fate in fates.items()}


def test_cells_of_killed_workers_are_run_again(workers: Cluster, tmp_path: Path) -> None:
    told: list[str] = []
    some = cells(tmp_path, a="", b="dies once", c="dies after", d="", e="")
    found = dict(workers.run(cell, some, say=told.append))
    assert found == {name: name for name in "abcde"}
    log = (tmp_path / "log").read_text().split()
    assert sorted(log) == ["a", "b", "b", "c", "d", "e"]  # what was finished, once
    assert len(told) == 2
    assert all("a worker died and another one takes over" in line for line in told)
    assert dict(workers.run(cell, some)) == found  # as after a restart
    assert len((tmp_path / "log").read_text().split()) == len(log)


def test_a_cell_that_kills_its_workers_is_given_up(
    workers: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "DEATHS", 2)
    with pytest.raises(SweepError, match="bad: 2 workers died over it"):
        list(workers.run(cell, cells(tmp_path, bad="dies", a="", b="")))
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()


def test_interrupted_cells_save_what_they_have(workers: Cluster, tmp_path: Path) -> None:
    def interrupt() -> None:
        if (tmp_path / "log").exists() and "slow" in (tmp_path / "log").read_text():
            time.sleep(0.2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(workers.run(cell, cells(tmp_path, slow="saves"), watch=interrupt))
    assert (tmp_path / "slow").exists()


def test_an_error_of_a_cell_is_raised_and_cells_that_fit_nowhere_are_refused(
    workers: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(KeyError, match="bad"):
        list(workers.run(cell, cells(tmp_path, bad="fails")))
    with pytest.raises(SweepError, match=f"takes {CORES + 1} CPU of one machine.* has {CORES}"):
        list(workers.run(cell, cells(tmp_path, a=""), cores=CORES + 1))


def test_claimed_cores_are_claimed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep.tempfile, "gettempdir", lambda: str(tmp_path))
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    with claimed_cores(1):
        mine = os.sched_getaffinity(0)
        assert len(mine) == 1
        os.sched_setaffinity(0, before)
        with claimed_cores(1):
            assert not os.sched_getaffinity(0) & mine
        with claimed_cores(len(before)):  # one of them is taken
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_without_ray_or_out_of_reach_the_commands_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(SweepError, match=r"cannot reach Ray at 127\.0\.0\.1:1 "):
        cluster("127.0.0.1:1").__enter__()
    with pytest.raises(SweepError, match="cannot reach Ray at nowhere"):
        cluster("nowhere").__enter__()
    monkeypatch.setattr(sweep, "find_spec", lambda _: None)
    code, said = command("reproduce", "temperature", "--quick", "--out", tmp_path, "--ray", "local")
    assert code == 2
    assert "pip install 'dfwlayer[ray]'" in said


# --- sweeps


def test_a_reproduction_survives_killed_workers(workers: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "cells"
    words = ["--quick", "--sizes", 8, "--trials", 2, "--family", "active", "--steps", 60]
    words += ["--systems", "dfw", "dfwlayer", "--no-memory", "--threads", 1, "--out", tmp_path]
    killer = Killer("_share", lambda: list(saved.glob("temperature-*.json")))
    code, said = command("reproduce", "temperature", *words, "--ray", "local")
    assert code == 0, said
    killer.checked()
    assert "a worker died and another one takes over" in said
    studies = {path: path.stat().st_mtime_ns for path in saved.iterdir()}
    assert len(studies) == 2 * 5
    code, said = command("reproduce", "table1", *words, "--ray", "local")
    assert code == 0, said
    results = json.loads((tmp_path / "results.json").read_text())
    assert (len(results["cells"]), len(results["records"])) == (2 * 2, 2 * 5)
    assert {cell["status"] for cell in results["cells"] + results["records"]} == {"ok"}
    assert {path: path.stat().st_mtime_ns for path in studies} == studies


def test_experts_of_several_seeds_survive_killed_workers(workers: Cluster, tmp_path: Path) -> None:
    tasks = pytest.importorskip("dfwlayer_bench.robotics.tasks")
    pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")
    absent = tasks.missing(tasks.TASKS["HC+O"])
    if absent:
        pytest.skip(absent)
    words = ["--steps", 1100, "--random-steps", 5000, "--evaluate-every", 1000, "--episodes", 1]
    train = ["robotics", "train-expert", *words, "--seeds"]
    folder = tmp_path / "ray" / "hc_o" / "expert"
    killer = Killer("_train", lambda: list(folder.glob("*/checkpoint.safetensors")))
    code, said = command(*train, 0, 1, "--out", tmp_path / "ray", "--ray", "local")
    assert code == 0, said
    killer.join()
    assert killer.killed
    assert "Best actor: return" in said
    code, said = command(*train, 1, "--out", tmp_path / "alone")
    assert code == 0, said
    alone = json.loads((tmp_path / "alone" / "hc_o" / "expert/seed-1/expert.json").read_text())
    found = [json.loads((folder / f"seed-{seed}/expert.json").read_text()) for seed in (0, 1)]
    assert [each["step"] for each in found] == [1100, 1100]
    for one, other in zip(found[1]["curve"], alone["curve"], strict=True):
        assert one["return"] == other["return"]  # as if nothing had happened
        assert one["step"] == other["step"]


# --- batches


def many(example: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["many_problems", "--out", str(out), *map(str, words)])
    assert example.main() == 0


def test_shards_survive_killed_workers_and_restarts(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = ["--problems", 120_100, "--shard", 10_000]
    results = tmp_path / "results"
    killer = Killer("solve_shard", lambda: sorted(results.glob("*.parquet")))
    many(example, monkeypatch, tmp_path, *job)  # it checks that every problem is answered once
    killer.checked()
    said = capfd.readouterr().out
    assert "a worker died and another one takes over" in said
    assert "119,980 CONVERGED, 120 NONFINITE" in said
    there = {path.name: path.stat().st_mtime_ns for path in results.glob("*.parquet")}
    assert len(there) == 13
    for name in ("000003.parquet", "000007.parquet"):  # as if it had been killed before these
        (results / name).rename(results / f".{name}.0.draft")
    many(example, monkeypatch, tmp_path, *job)
    assert "11 of 13 shards are there" in capfd.readouterr().out
    again = {path.name: path.stat().st_mtime_ns for path in results.glob("*.parquet")}
    assert again.keys() == there.keys()
    changed = sorted(name for name in there if again[name] != there[name])
    assert changed == ["000003.parquet", "000007.parquet"]
    assert not list(results.glob(".*"))
    with pytest.raises(SystemExit, match="holds another job"):
        many(example, monkeypatch, tmp_path, "--problems", 100)


def test_throughput_is_compared_in_turns(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    many(example, monkeypatch, tmp_path, "--compare", "--problems", 60, "--shard", 20, "--cores", 1)
    assert "throughput with Ray / without: " in capfd.readouterr().out


def used_threads(batch: dict) -> int:
    """Of torch, while a worker solves."""
    import torch

    seen: list[int] = []

    def f(x, q):
        seen.append(torch.get_num_threads())
        return (0.5 * x * x + q * x).sum(-1)

    BatchSolver(dfw.Smooth(f, Column("q"), shape=3), dfw.LpBall(1))(batch)
    return max(seen)


def niceness() -> int:
    return os.nice(0)


def test_workers_do_not_stand_back(workers: Cluster) -> None:
    assert workers.ask(niceness, cores=1) == os.nice(0)


def test_a_worker_takes_the_threads_it_was_given(workers: Cluster) -> None:
    batch = {"q": np.ones((4, 3))}
    for cores in (1, 2):
        assert workers.ask(used_threads, batch, cores=cores) == cores


# Ray sets settings of its own that it has given up
@pytest.mark.filterwarnings(r"ignore:`\w+` is deprecated:DeprecationWarning:ray.data.context")
def test_map_batches(workers: Cluster) -> None:
    pytest.importorskip("pandas", reason="ray.data needs pandas")
    import ray

    q = np.random.default_rng(0).normal(size=(40, 3))
    q[5, 0] = np.nan
    solver = BatchSolver(dfw.Quadratic(np.eye(3), Column("q")), dfw.LpBall(1, 0.5))
    table = ray.data.from_numpy([q[:20], q[20:]]).rename_columns({"data": "q"})
    known = solver({"q": q})
    for form in ("numpy", "pyarrow"):
        rows = table.map_batches(solver, batch_format=form, batch_size=8).take_all()
        np.testing.assert_array_equal(np.array([row["x"] for row in rows]), known["x"])
        assert [row["status"] for row in rows] == known["status"].tolist()
