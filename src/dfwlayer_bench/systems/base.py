"""One signature for every system: a problem in; x, gradient, times and settings out."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.report.machine import version

__all__ = [
    "CLOCKS",
    "Answer",
    "Packaged",
    "Passes",
    "Ready",
    "Result",
    "Setting",
    "System",
    "absent",
    "load",
    "module_of",
    "quietly",
    "run",
    "timed",
]

# what they ask for beside is not needed here, and much of it
ALONE = frozenset({"ISLP", "libdqp"})
# distributions whose module has another name
MODULES = {"libdqp": "dqp", "pinet-hcnn": "pinet", "scikit-learn": "sklearn"}

# seconds that pass, or that this process is at work: the latter hardly depends on what else runs
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Setting = str | int | float | bool
Found = TypeVar("Found")


@dataclass(frozen=True)
class Answer:
    """What one forward and backward pass gave.

    Attributes:
        x: (n,).
        gradient: (n,), d(v·x)/dq.
        note: What the solver says of itself where it is not plain success.

    """

    x: Tensor
    gradient: Tensor
    note: str = ""


@dataclass(frozen=True)
class Ready:
    """A system made ready for one problem: ``call`` runs forward and backward once."""

    call: Callable[[], Answer]
    settings: dict[str, Setting]


@dataclass(frozen=True)
class Passes:
    """A system made ready for one problem.

    Attributes:
        forward: Finds x, (..., n).
        both: Finds x and a gradient as well; None for a system that has none.
        settings: What it was told, for the record.

    """

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, Tensor]] | None
    settings: dict[str, Setting]

    @classmethod
    def of(
        cls,
        x_of: Callable[[Tensor], Tensor],
        given: Tensor,
        value: Callable[[Tensor], Tensor],
        settings: dict[str, Setting],
    ) -> Passes:
        """Of a function that torch differentiates: the gradient of value(x) in what is given."""

        def both() -> tuple[Tensor, Tensor]:
            learned = given.detach().requires_grad_()
            x = x_of(learned)
            (gradient,) = torch.autograd.grad(value(x), learned)
            return x.detach(), gradient

        return cls(lambda: x_of(given), both, settings)


class Packaged:
    """Something that needs packages which may not be installed."""

    packages: tuple[str, ...]

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if _installed(name) is None]

    def absent(self) -> str:
        """What is missing and how to get it, for a row that is empty; nothing if all is there."""
        return absent(self.missing())

    def versions(self) -> dict[str, str]:
        """The packages it needs and their versions."""
        return {name: _installed(name) or "not installed" for name in self.packages}


def absent(missing: Sequence[str]) -> str:
    """That these distributions or modules are not installed, and the command that installs them."""
    if not missing:
        return ""
    names = [next((d for d, module in MODULES.items() if module == m), m) for m in missing]
    alone = any(name in ALONE for name in names)
    words = ["pip install", *(["--no-deps"] if alone else []), *names]
    return f"not installed: {' '.join(words)}"


_installed = functools.cache(version)  # looked up once a run, not in every cell


@dataclass(frozen=True)
class System(Packaged):
    """One row of the registry.

    Attributes:
        name: What ``--systems`` accepts.
        label: What tables and figures print.
        prepare: Makes a call ready. What a user does once per problem structure (canonicalise,
            compile, find L) belongs here and is not timed.
        packages: Distributions it needs beside torch; the first one names the rival.
        devices: Where it runs.
        solves: False for the floor, whose answer is not the constrained problem's.

    """

    name: str
    label: str
    prepare: Callable[[Instance], Ready]
    packages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    solves: bool = True


@dataclass(frozen=True)
class Result:
    """One system on one problem."""

    system: str
    answer: Answer
    seconds: tuple[float, ...]
    settings: dict[str, Setting]


def run(system: System, problem: Instance, *, repeats: int = 1) -> Result:
    """Prepare, call once to warm up, then time ``repeats`` calls."""
    ready = system.prepare(problem)
    answer, _ = timed(ready.call, problem.device)
    seconds = [timed(ready.call, problem.device)[1] for _ in range(repeats)]
    return Result(system.name, answer, tuple(seconds), ready.settings)


def timed(
    call: Callable[[], Found], device: torch.device, clock: str = "wall"
) -> tuple[Found, float]:
    """What a call gave and the seconds it took, without garbage collection."""
    now = CLOCKS[clock]
    collecting = gc.isenabled()
    gc.disable()
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = now()
        found = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found, now() - start
    finally:
        if collecting:
            gc.enable()


@contextmanager
def quietly() -> Iterator[None]:
    """Rivals warn about their own settings and print; neither belongs among the tables."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def load(module: str) -> Any:
    """Import a rival when it is needed; none of them is a dependency, few have types."""
    return importlib.import_module(module)


def module_of(distribution: str) -> str:
    """The name by which a distribution is imported."""
    return MODULES.get(distribution, distribution)
