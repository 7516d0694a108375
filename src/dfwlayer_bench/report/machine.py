"""What a figure depends on besides the code: the machine, the versions, the threads."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "clock_text",
    "cores",
    "describe",
    "machine_text",
    "mapped_mb",
    "reset_peak",
    "resident_mb",
    "threads",
    "version",
]

PACKAGES = (
    "dfwlayer",
    "torch",
    "numpy",
    "numba",
    "cvxpy",
    "cvxpylayers",
    "diffcp",
    "moreau",
    "jax",
    "jaxopt",
    "proxsuite",
    "qpax",
    "daqp",
    "piqp",
    "clarabel",
    "osqp",
    "libdqp",
    "pinet-hcnn",
    "entmax",
    "pyepo",
    "celer",
    "skglm",
    "adelie",
    "spgl1",
    "scikit-learn",
)


def describe(device: str) -> dict[str, Any]:
    """Machine, threads and versions, for the record."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
    }


@functools.cache  # asked for each cell, and the answer is a search of all folders with packages
def version(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_text(machine: dict[str, Any]) -> str:
    """The machine of a run in one sentence's part."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['versions']['torch']} with "
        f"{machine['torch_threads']} threads" + (f", {machine['gpu']}" if machine["gpu"] else "")
    )


def clock_text(about: dict[str, Any]) -> str:
    """A sentence on the clock of a run, where it is not the one on the wall."""
    told = " Times are seconds that the process itself was at work (--clock cpu)."
    return told if about.get("clock") == "cpu" else ""


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Hold every system to ``count`` cores: pinned where the system can, torch's pool anyway."""
    import torch

    if count is None:
        yield
        return
    before = torch.get_num_threads()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(count)
    if allowed is not None:
        os.sched_setaffinity(0, set(sorted(allowed)[:count]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if allowed is not None:
            os.sched_setaffinity(0, allowed)


def resident_mb(peak: bool = False) -> float | None:
    """Resident memory of this process, now or at its peak, None where it cannot be told."""
    return _memory_mb("VmHWM:" if peak else "VmRSS:")


def mapped_mb() -> float | None:
    """What of the resident memory is files, such as the code of libraries; None as above."""
    return _memory_mb("RssFile:")


def _memory_mb(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), None)


def reset_peak() -> None:
    """Forget the peak so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then counts from the start of the process


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
