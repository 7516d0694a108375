"""Lists on the command line: ``--sizes 500 1000``, ``--sizes 500,1000`` and repeated options."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.core import TyperCommand

__all__ = ["ListCommand", "split"]


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
