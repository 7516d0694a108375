"""One call in a process of its own: its peak memory, and whether it ends within the time limit.

Native solvers can be neither interrupted nor measured from inside, so before a system is timed
among the others it runs once here. The process reports each phase as a line of JSON.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Probe", "probe"]

START_LIMIT = 300.0  # seconds to import a rival and make the problem


@dataclass(frozen=True)
class Probe:
    """What the process told: a status as in a cell, and the memory beyond the problem itself."""

    status: str
    detail: str = ""
    memory_mb: float | None = None


def probe(task: dict[str, Any], time_limit: float) -> Probe:
    """Run ``task`` (system, family, n, seed, dtype, device, functional, threads) once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dfwlayer_bench.bench.probe", json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        for phase, limit in (
            ("start", START_LIMIT),
            ("build", time_limit),
            ("call", time_limit),
            ("second call", time_limit),
        ):
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                return Probe("time limit", f"{phase}: over {limit:g} s")
            if line is None:
                return Probe("failed", f"the process ended with code {process.wait()} in {phase}")
            report = json.loads(line)
            if "failed" in report:
                return Probe("failed", report["failed"])
        return Probe("ok", memory_mb=report["memory_mb"])
    finally:
        process.kill()
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # a rival may print
            lines.put(line)
    lines.put(None)
    process.stdout.close()


def main(task: dict[str, Any]) -> None:
    """The other side: import, build, call twice; the memory is that of the second call."""
    import warnings

    import torch

    from dfwlayer_bench.problems.families import make
    from dfwlayer_bench.report.machine import reset_peak, resident_mb
    from dfwlayer_bench.systems import find
    from dfwlayer_bench.systems.base import load

    warnings.simplefilter("ignore")
    try:
        if task["threads"] is not None:
            torch.set_num_threads(task["threads"])
        system = find(task["system"])
        for package in system.packages:
            load(package)
        problem = make(
            task["family"],
            task["n"],
            task["seed"],
            dtype=getattr(torch, task["dtype"]),
            device=task["device"],
            functional=task["functional"],
        )
        before = resident_mb()
        on_gpu = problem.device.type == "cuda"
        held = torch.cuda.memory_allocated() if on_gpu else 0
        _say({"phase": "start"})
        ready = system.prepare(problem)
        _say({"phase": "build"})
        ready.call()
        _say({"phase": "call"})
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        reset_peak()
        ready.call()
        peak = resident_mb(peak=True)
        memory = None if peak is None or before is None else max(0.0, peak - before)
        if on_gpu:
            memory = (torch.cuda.max_memory_allocated() - held) / 2**20
        _say({"phase": "second call", "memory_mb": memory})
    except Exception as error:
        _say({"failed": f"{type(error).__name__}: {error}"[:300]})


def _say(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
