"""One call in a process of its own: its peak memory, and whether it ends within the time limit.

Native solvers can be neither interrupted nor measured from inside, so before a system is timed
among the others it runs once here. The process reports each phase as a line of JSON.

Importing torch and a rival takes much longer than a small problem. So a server imports torch once,
forks once for each system, which imports its rival, and that forks once for each problem: every
problem still has a process that has solved nothing before.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Probe", "Prober", "probe"]

START_LIMIT = 300.0  # seconds to import a rival and make the problem
FORKS = hasattr(os, "fork")


@dataclass(frozen=True)
class Probe:
    """What the process told: a status as in a cell, and the memory beyond the problem itself."""

    status: str
    detail: str = ""
    memory_mb: float | None = None


class Prober:
    """Runs tasks as `probe` does, without importing the same packages again for each.

    A fork carries on no thread but one, and a package that starts some when it is imported may
    wait for them for ever. So what fails the first time a system is forked is tried again by
    `probe`, and if it succeeds there the system is never forked again.
    """

    def __init__(self) -> None:
        self._server: _Process | None = None
        self._forks: dict[str, bool] = {}  # of systems, once that is known
        self._known: dict[tuple[str, str, int], Probe] = {}

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def first(self, task: dict[str, Any], time_limit: float) -> Probe:
        """As `probe`; a problem of the same family and size stands for the others."""
        key = task["system"], task["family"], task["n"]
        if key not in self._known:
            self._known[key] = self(task, time_limit)
        return self._known[key]

    def __call__(self, task: dict[str, Any], time_limit: float) -> Probe:
        """As `probe`."""
        name = task["system"]
        if not self._forks.get(name, FORKS):
            return probe(task, time_limit)
        if self._server is None:
            self._server = _Process("serve")
        self._server.ask(task)
        found = self._server.phases(time_limit)
        if found.status == "time limit" or self._server.ended:
            self.close()  # what hangs has to end; the next task starts anew
        if found.status != "ok" and name not in self._forks:
            found = probe(task, time_limit)
            self._forks[name] = found.status != "ok"
        self._forks.setdefault(name, True)
        return found

    def close(self) -> None:
        """End the processes there are."""
        if self._server is not None:
            self._server.end()
            self._server = None


def probe(task: dict[str, Any], time_limit: float) -> Probe:
    """Run ``task`` (system, family, n, seed, dtype, device, functional, threads) once."""
    process = _Process("once")
    try:
        process.ask(task)
        return process.phases(time_limit)
    finally:
        process.end()


class _Process:
    """The other side, which takes tasks as lines, and a thread that reads what it says."""

    def __init__(self, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dfwlayer_bench.bench.probe", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=FORKS,  # a group, to end all of it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, task: dict[str, Any]) -> None:
        """Hand on a task; a process that has ended is noticed by who waits for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> bool:
        """Whether it takes no more tasks."""
        return self._process.poll() is not None

    def phases(self, time_limit: float) -> Probe:
        """Wait for each phase of a task; what the last one told, or why there is none."""
        for phase, limit in (
            ("start", START_LIMIT),
            ("build", time_limit),
            ("call", time_limit),
            ("second call", time_limit),
        ):
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                return Probe("time limit", f"{phase}: over {limit:g} s")
            report: dict[str, Any] = (
                {"code": self._process.wait()} if line is None else json.loads(line)
            )
            if "code" in report:
                return Probe("failed", f"the process ended with code {report['code']} in {phase}")
            if "failed" in report:
                return Probe("failed", report["failed"])
        return Probe("ok", memory_mb=report["memory_mb"])

    def end(self) -> None:
        """Kill it and what it has forked."""
        if FORKS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what it never read
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # a rival may print
                self._lines.put(line)
        self._lines.put(None)
        self._process.stdout.close()


def once() -> None:
    """The other side of `probe`: one task in this process."""
    task = json.loads(sys.stdin.readline())
    _import(task["system"])
    _run(task)


def serve() -> None:
    """The other side of `Prober`: hands each task on to a fork for its system."""
    import dfwlayer_bench.problems.families
    import dfwlayer_bench.systems  # noqa: F401

    rivals: dict[str, int] = {}  # where each fork reads its tasks
    for line in sys.stdin:
        name = json.loads(line)["system"]
        if name not in rivals:
            receiving, rivals[name] = os.pipe()
            if not os.fork():
                for sending in rivals.values():  # else nobody would notice that this one ends
                    os.close(sending)
                _serve_system(name, receiving)
                os._exit(0)
            os.close(receiving)
        os.write(rivals[name], line.encode())


def _serve_system(name: str, receiving: int) -> None:
    """Import the packages of a system, then fork for each of its tasks."""
    _import(name)
    with os.fdopen(receiving) as tasks:
        for line in tasks:
            child = os.fork()
            if not child:
                _run(json.loads(line))
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                _say({"code": code})


def _import(name: str) -> None:
    """Load what the system needs; what cannot be loaded is told by the task that needs it."""
    import warnings

    from dfwlayer_bench.systems import find
    from dfwlayer_bench.systems.base import load, module_of

    warnings.simplefilter("ignore")
    with contextlib.suppress(Exception):
        for package in find(name).packages:
            load(module_of(package))


def _run(task: dict[str, Any]) -> None:
    """Build, call twice; the memory is that of the second call."""
    try:
        import torch

        from dfwlayer_bench.problems.families import make
        from dfwlayer_bench.report.machine import mapped_mb, reset_peak, resident_mb
        from dfwlayer_bench.systems import find
        from dfwlayer_bench.systems.base import load, module_of

        if task["threads"] is not None:
            torch.set_num_threads(task["threads"])
        system = find(task["system"])
        for package in system.packages:
            load(module_of(package))
        problem = make(
            task["family"],
            task["n"],
            task["seed"],
            dtype=getattr(torch, task["dtype"]),
            device=task["device"],
            functional=task["functional"],
        )
        before, code = resident_mb(), mapped_mb()
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
        more_code = (mapped_mb() or 0.0) - (code or 0.0)  # libraries, read when they are first used
        memory = None if peak is None or before is None else max(0.0, peak - before - more_code)
        if on_gpu:
            memory = (torch.cuda.max_memory_allocated() - held) / 2**20
        _say({"phase": "second call", "memory_mb": memory})
    except Exception as error:
        _say({"failed": f"{type(error).__name__}: {error}"[:300]})


def _say(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    {"once": once, "serve": serve}[sys.argv[1]]()
