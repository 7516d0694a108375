"""What the options of several commands have in common: names, help, limits and checks.

Lists are ``--sizes 500 1000``, ``--sizes 500,1000`` and repeated options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = [
    "Clock",
    "Collection",
    "Device",
    "Dtype",
    "Family",
    "Fresh",
    "ListCommand",
    "Memory",
    "Out",
    "Ray",
    "Seed",
    "Sizes",
    "Suite",
    "Systems",
    "Threads",
    "Trials",
    "check_clock",
    "check_device",
    "check_names",
    "check_sizes",
    "repeats",
    "split",
    "time_limit",
]

Sizes = Annotated[
    list[str] | None, typer.Option(help="Numbers of variables. (default: 500 1000 2000)")
]
Family = Annotated[
    list[str] | None,
    typer.Option(help="paper, active, ill, very, loose, or all. (default: paper active ill)"),
]
Suite = Annotated[
    str,
    typer.Option(
        help="large: one problem with an l1 ball, hundreds of variables. small: batches of small "
        "problems over five kinds of sets, for which --sizes are problems x variables such as "
        "64x10, --family names the sets and --threads is 2; results in bench-results-small. "
        "lasso: sparse least squares, for which --family names the problems and --threads is 2; "
        "results in bench-results-lasso. layers: programs, projections and hulls of vertices, "
        "beside layers that guess, sample or split; --family names the problems and --threads is "
        "2; results in bench-results-layers. gpu: batches of small problems on a CUDA device, by "
        "one program for each problem and without; --family names the sets, results in "
        "bench-results-gpu. qp: quadratic programs from the files in the folder PATH; --sizes is "
        "the most variables (4096), --family names the problems, --threads is 1; results in "
        "bench-results-qp."
    ),
]
Collection = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH",
        help="For --suite qp: a folder of .mat (Maros-Meszaros) or .npz (MPC) files.",
        show_default=False,
    ),
]
Systems = Annotated[
    list[str] | None, typer.Option(help="Systems to compare. (default: every one there is)")
]
Trials = Annotated[
    int | None, typer.Option(min=1, help="Problems for each family and size. (default: 5)")
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the first trial; the next ones add 100 each.")
]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Out = Annotated[
    Path, typer.Option(help="Folder for results; a run that was interrupted goes on there.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Forget what the folder holds and start over.")
]
Memory = Annotated[
    bool | None,
    typer.Option(
        help="Run each system once in a process of its own first, to measure its memory and to "
        "stop it at the time limit. (default: yes, but not with --quick)",
        show_default=False,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|local",
        help="Run the cells on Ray: at this address, auto for a cluster that is found, or local "
        "for one on this machine. All machines need to see the folder of --out.",
        show_default=False,
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Cores for every system. (default: all)")]

Clock = Annotated[
    str,
    typer.Option(
        help="wall, or cpu: seconds that the process itself is at work. With --threads 1 these are "
        "what it takes on a machine with nothing else to do."
    ),
]


def repeats(default: int) -> Any:
    """The option --repeats of a command with this default."""
    return typer.Option(min=1, help=f"Timed calls on each problem. (default: {default})")


def time_limit(default: float) -> Any:
    """The option --time-limit of a command with this default."""
    text = f"Seconds that one call, or building, may take. (default: {default:g})"
    return typer.Option(min=0.1, help=text)


class ListCommand(TyperCommand):
    """A command whose repeatable options take every value up to the next option.

    A positional argument has to come before such an option, which would swallow it.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Repeat the option before each further value."""
        names = {
            option
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for option in parameter.opts
        }
        spread: list[str] = []
        current: str | None = None
        taken = 0
        for argument in args:
            if argument.startswith("-"):
                current, taken = (argument if argument in names else None), 0
            elif current is not None:
                if taken:
                    spread.append(current)
                taken += 1
            spread.append(argument)
        return super().parse_args(ctx, spread)


def split(values: Sequence[str] | None) -> list[str]:
    """Repeated and comma-separated values as one list, without doubles."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))


def check_sizes(texts: Sequence[str]) -> list[int]:
    """The numbers of variables, or an error that names the option."""
    numbers = [int(text) if text.isdecimal() else 0 for text in texts]
    if any(number < 2 for number in numbers):
        raise typer.BadParameter(f"--sizes: expected integers of at least 2, got {list(texts)}")
    return numbers


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error that names the option unless every name is known."""
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"{option}: unknown {', '.join(unknown)}; expected any of {', '.join(known)}"
        )


def check_clock(clock: str) -> None:
    """Raise an error for a clock that there is not."""
    from dfwlayer_bench.systems.base import CLOCKS

    check_names("--clock", [clock], CLOCKS)


def check_device(device: str) -> None:
    """Raise an error unless torch can use the device."""
    import torch

    check_names("--device", [device], ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: torch finds no CUDA device here; use cpu")
