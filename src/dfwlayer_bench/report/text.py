"""Numbers and tables as text, the same in every report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "NOTHING",
    "markdown_table",
    "significant",
    "small",
    "spread",
    "status",
    "time",
    "times",
]

NOTHING = "—"


def time(seconds: float | None) -> str:
    """Seconds or milliseconds, three digits."""
    if seconds is None:
        return NOTHING
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def small(value: float | None) -> str:
    """An error: its order of magnitude and one digit more."""
    if value is None:
        return NOTHING
    return "0" if value == 0 else f"{value:.1e}"


def times(ratio: float | None, digits: int = 2) -> str:
    """How many times as long, to so many digits."""
    return NOTHING if ratio is None else f"{ratio:.{digits}g}"


def status(name: str, detail: str) -> str:
    """How something ended, and why if that is known."""
    return f"{name}: {detail}" if detail else name


def significant(value: float | None, digits: int = 3) -> str:
    """So many digits, without an exponent where that stays readable."""
    if value is None:
        return NOTHING
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}" if value else "0"
    text = f"{value:#.{digits}g}".rstrip(".")
    return text if "e" not in text else f"{value:.0f}"


def spread(mean: float | None, std: float | None, digits: int = 3) -> str:
    """Mean ± standard deviation, the mean to so many digits."""
    if mean is None:
        return NOTHING
    return f"{significant(mean, digits)} ± {significant(std, 2)}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(header), _line("---" for _ in header), *(_line(row) for row in rows)]


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "/") for text in texts) + " |"
