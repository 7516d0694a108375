"""What to run and how: from the options of a command to a plan, and back to its words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dfwlayer_bench.options import check_clock, check_device, check_names, check_sizes, split

__all__ = [
    "Asked",
    "Defaults",
    "Group",
    "Plan",
    "identity_of",
    "machine_identity",
    "plan_of",
    "words_of",
]

Group = tuple[str, int, int]  # family, n, trial: the systems on one problem


@dataclass(frozen=True)
class Plan:
    """What to run and how."""

    families: tuple[str, ...]
    sizes: tuple[int, ...]
    systems: tuple[str, ...]
    trials: int
    repeats: int
    seed: int
    dtype: str
    device: str
    functional: str
    time_limit: float
    memory: bool
    threads: int | None
    clock: str = "wall"  # "cpu": seconds of this process, for a machine that is busy
    answers: bool = False  # keep x and the gradient of every cell

    def groups(self) -> list[Group]:
        """(family, n, trial), small problems first."""
        return [
            (family, n, trial)
            for n in sorted(self.sizes)
            for family in self.families
            for trial in range(self.trials)
        ]

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.groups()) * len(self.systems)


@dataclass(frozen=True)
class Defaults:
    """What a command takes for an option that is not given."""

    families: tuple[str, ...]
    sizes: tuple[int, ...]
    trials: int
    repeats: int
    time_limit: float


@dataclass(frozen=True)
class Asked:
    """What every suite may be asked for; None and nothing stand for its own choice."""

    sizes: list[str] | None
    family: list[str] | None  # names of problems, or of sets
    systems: list[str] | None
    dtype: str
    repeats: int | None
    seed: int
    out: Path
    fresh: bool
    quick: bool
    threads: int | None
    clock: str = "wall"


def plan_of(
    default: Defaults,
    known: Iterable[str],
    asked: Asked,
    *,
    trials: int | None,
    time_limit: float | None,
    device: str,
    memory: bool | None,
    functional: str = "sum",
    answers: bool = False,
) -> Plan:
    """The options of a command as a plan: each is checked by name, the defaults are filled in.

    ``known`` are the systems it offers.
    """
    from dfwlayer_bench.problems.families import FAMILIES

    known, families, chosen = tuple(known), split(asked.family), split(asked.systems)
    numbers = sorted(check_sizes(split(asked.sizes)))
    if families == ["all"]:
        families = list(FAMILIES)
    check_names("--family", families, FAMILIES)
    check_names("--systems", chosen, known)
    check_names("--dtype", [asked.dtype], ("float32", "float64"))
    check_names("--functional", [functional], ("sum", "random"))
    check_device(device)
    check_clock(asked.clock)
    if asked.clock == "cpu" and device != "cpu":
        raise typer.BadParameter("--clock: cpu cannot see what a CUDA device does; use wall")
    return Plan(
        families=tuple(families) or default.families,
        sizes=tuple(numbers) or default.sizes,
        systems=tuple(chosen) or known,
        trials=trials or default.trials,
        repeats=asked.repeats or default.repeats,
        seed=asked.seed,
        dtype=asked.dtype,
        device=device,
        functional=functional,
        time_limit=time_limit or default.time_limit,
        memory=not asked.quick if memory is None else memory,
        threads=asked.threads,
        clock=asked.clock,
        answers=answers,
    )


def words_of(plan: Plan) -> list[str]:
    """The plan as words of a command, but for its problems: --sizes, --family and --trials."""
    words = ["--systems", *plan.systems, "--dtype", plan.dtype, "--device", plan.device]
    words += ["--repeats", str(plan.repeats), "--seed", str(plan.seed)]
    words += ["--time-limit", f"{plan.time_limit:g}"]
    words += [] if plan.memory else ["--no-memory"]
    words += [] if plan.threads is None else ["--threads", str(plan.threads)]
    words += [] if plan.clock == "wall" else ["--clock", plan.clock]
    return words


def identity_of(plan: Plan, machine: dict[str, Any]) -> dict[str, Any]:
    """What all cells of a folder must have in common."""
    return {
        "dtype": plan.dtype,
        "device": plan.device,
        "seed": plan.seed,
        "functional": plan.functional,
        "threads": plan.threads,
        "clock": plan.clock,
        **machine_identity(machine),
    }


def machine_identity(machine: dict[str, Any]) -> dict[str, Any]:
    """What of a machine has to be the same for times to be compared."""
    versions = machine["versions"]
    kept = {name: versions[name] for name in ("torch", "dfwlayer")}
    return {"cpu": machine["cpu"], "cores": machine["cores"], **kept}
