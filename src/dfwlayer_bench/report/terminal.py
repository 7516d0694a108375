"""What the commands say on the terminal, in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PLAIN", "interrupted", "output", "refuse"]

PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def output(width: int) -> Console:
    """Standard output; where that is no terminal, so many columns wide."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def refuse(console: Console, message: str, code: int) -> int:
    """Say why a command cannot go on; returns its exit code."""
    console.print(message, style="red", **PLAIN)
    return code


def interrupted(console: Console) -> int:
    """Say how to go on after an interruption; returns the exit code of one."""
    console.print("Interrupted; run the same command again to go on.")
    return 130
