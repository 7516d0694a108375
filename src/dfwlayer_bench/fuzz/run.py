"""A run: batches in order, over processes, with a state on disk that a later run goes on from."""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dfwlayer

__all__ = ["PHASES", "Options", "Report", "State", "execute"]

PHASES = {  # in their order, and what is counted in each
    "problems": "problems",
    "gradients": "gradient checks",
    "bad-inputs": "bad inputs",
    "soak": "calls of the soak",
}
BAD_CALLS = 50  # per task
KEPT = 12  # scripts per kind and set
Report = Callable[[str, int, int, int], None]  # phase, done, wanted, failures


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    wanted: dict[str, int]  # by phase
    seed: int = 0
    jobs: int = 1
    time_limit: float | None = None  # seconds
    out: Path = Path("out/fuzz")


@dataclass
class State:
    """What a run has found so far; written to results.json."""

    seed: int
    next: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    skipped: dict[str, int] = field(default_factory=dict)  # gradients too close to a kink
    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # phase, name, kind
    failures: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)  # by process, after each chunk
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    machine: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        counted: int = sum(f["count"] for f in self.failures)
        return counted + len(self.leaks)

    @property
    def leaks(self) -> list[tuple[str, float]]:
        """Processes whose memory grew, by how much."""
        from dfwlayer_bench.fuzz.soak import flat

        judged = ((process, flat(series)) for process, series in self.memory.items())
        return [(process, growth) for process, (level, growth) in judged if not level]

    @classmethod
    def load(cls, options: Options) -> State:
        """That of an earlier run in the same folder, or a new one."""
        file = options.out / "results.json"
        if not file.exists():
            return cls(options.seed)
        state = cls(**json.loads(file.read_text()))
        if state.seed != options.seed:
            raise ValueError(
                f"--out: {file} is of a run with seed {state.seed}, got {options.seed}; name "
                "another folder"
            )
        return state

    def save(self, folder: Path) -> None:
        """Written aside and moved, so that an interruption leaves a whole file."""
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / "results.json.new"
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(folder / "results.json")


def work(task: tuple[str, int, int]) -> dict[str, Any]:
    """One task of a phase: what was counted by name, and the failures with their scripts."""
    phase, seed, index = task
    if phase == "problems":
        from dfwlayer_bench.fuzz.checks import judge, reproducer
        from dfwlayer_bench.fuzz.problems import draw_problem

        problem = draw_problem(seed, index)
        failures = judge(problem)
        return _told({problem.name: problem.rows or 1}, failures, reproducer)
    if phase == "gradients":
        from dfwlayer_bench.fuzz.gradients import draw_gradient, gradient_reproducer, judge_gradient

        case = draw_gradient(seed, index)
        verdict = judge_gradient(case)
        told = _told({case.problem.name: verdict.checked}, verdict.failures, gradient_reproducer)
        return told | {"skipped": {case.problem.name: verdict.skipped}}
    if phase == "bad-inputs":
        from dfwlayer_bench.fuzz.grammar import draw_call, judge_call

        counts: dict[str, int] = {}
        bad = []
        for k in range(index * BAD_CALLS, (index + 1) * BAD_CALLS):
            call = draw_call(seed, k)
            counts[call.target] = counts.get(call.target, 0) + 1
            failure = judge_call(call)
            if failure is not None:
                bad.append(failure)
        return _told(
            counts,
            bad,
            lambda f: f"# {f.kind}: {f.message}\n" + draw_call(f.seed, f.index).source(),
        )
    from dfwlayer_bench.fuzz.soak import soak

    calls, process, memory = soak(seed)
    return _told({"calls": calls}, [], str) | {"memory": (str(process), memory)}


def _told(
    counts: dict[str, int], failures: list[Any], script: Callable[[Any], str]
) -> dict[str, Any]:
    """Failures of one kind and set as one entry, with the script of the first."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for failure in failures:
        key = failure.kind, failure.name
        if key not in entries:
            entries[key] = asdict(failure) | {"count": 0, "script": script(failure)}
        entries[key]["count"] += 1
    return {"counts": counts, "failures": list(entries.values())}


def start_worker() -> None:
    """One thread for each process; an interrupt is for the one that reads the results."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def execute(options: Options, report: Report) -> tuple[State, bool]:
    """Run until everything that was asked for is done; False if it was interrupted before."""
    state = State.load(options)
    state.machine = _machine()
    began = time.monotonic()
    saved = began
    whole = True
    try:
        for phase in PHASES:
            start = time.monotonic()
            before = state.seconds[phase]
            if state.done[phase] >= options.wanted.get(phase, 0):
                continue
            for result in results(phase, options, state.next[phase]):
                state.next[phase] += 1
                _merge(state, phase, result, options.out)
                now = time.monotonic()
                state.seconds[phase] = before + now - start
                report(phase, state.done[phase], options.wanted[phase], state.failed)
                if now - saved > 10:
                    state.save(options.out)
                    saved = now
                if options.time_limit is not None and now - began > options.time_limit:
                    whole = False
                    break
                if state.done[phase] >= options.wanted[phase]:
                    break
            if not whole:
                break
    except KeyboardInterrupt:
        whole = False
    state.save(options.out)
    return state, whole


def results(phase: str, options: Options, first: int) -> Iterator[dict[str, Any]]:
    """The results of a phase's tasks in order, for ever."""
    dfwlayer.warm_up()  # once for all processes, and not within the time that a batch may take
    if options.jobs == 1:
        index = first
        while True:
            yield work((phase, options.seed, index))
            index += 1
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a process starts
    pool = get_context("spawn").Pool(options.jobs, start_worker)
    try:
        waiting: deque[Any] = deque()
        index = first
        while True:
            while len(waiting) < 3 * options.jobs:
                waiting.append(pool.apply_async(work, ((phase, options.seed, index),)))
                index += 1
            yield waiting.popleft().get()
    finally:
        pool.terminate()
        pool.join()


def _merge(state: State, phase: str, result: dict[str, Any], out: Path) -> None:
    table = state.counts.setdefault(phase, {})
    for name, count in result["counts"].items():
        row = table.setdefault(name, {"count": 0})
        row["count"] += count
        state.done[phase] += count
    for name, count in result.get("skipped", {}).items():
        state.skipped[name] = state.skipped.get(name, 0) + count
    if "memory" in result:
        process, memory = result["memory"]
        state.memory.setdefault(process, []).append(memory)
    for entry in result["failures"]:
        row = table.setdefault(entry["name"], {"count": 0})
        row[entry["kind"]] = row.get(entry["kind"], 0) + entry["count"]
        script = entry.pop("script")
        same = [
            f
            for f in state.failures
            if (f["phase"], f["kind"], f["name"]) == (phase, entry["kind"], entry["name"])
        ]
        if len(same) < KEPT:
            entry["file"] = _write(out, phase, entry, script)
            state.failures.append(entry | {"phase": phase})
        else:  # counted with the last one that was kept
            same[-1]["count"] += entry["count"]


def _write(out: Path, phase: str, entry: dict[str, Any], script: str) -> str:
    name = "".join(c if c.isalnum() else "-" for c in f"{phase} {entry['kind']} {entry['name']}")
    file = out / "failures" / f"{name}-{entry['index']}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script)
    return str(file)


def _machine() -> dict[str, str]:
    import numpy
    import torch

    import dfwlayer

    return {
        "dfwlayer": dfwlayer.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "long double": f"{numpy.finfo(numpy.longdouble).nmant + 1} bits",
    }
