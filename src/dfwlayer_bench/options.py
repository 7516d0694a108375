"""Lists on the command line: ``--sizes 500 1000``, ``--sizes 500,1000`` and repeated options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer
from typer.core import TyperCommand

__all__ = ["ListCommand", "check_device", "check_names", "check_sizes", "split"]


class ListCommand(TyperCommand):
    """A command whose repeatable options take every value up to the next option.

    Only for commands without positional arguments, as it would swallow them.
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


def check_device(device: str) -> None:
    """Raise an error unless torch can use the device."""
    import torch

    check_names("--device", [device], ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: torch finds no CUDA device here; use cpu")
