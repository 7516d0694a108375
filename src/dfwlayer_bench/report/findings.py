"""What a run says of a claim: verdicts, and the findings that carry them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BEYOND",
    "COLOURS",
    "FAILS",
    "IN_PART",
    "NOT_MEASURED",
    "OTHER_SIZES",
    "REPRODUCES",
    "VERDICTS",
    "Finding",
]

REPRODUCES, IN_PART, FAILS = "reproduces", "in part", "does not reproduce"
NOT_MEASURED, BEYOND = "not measured", "beyond the paper"
OTHER_SIZES = "not measured at these sizes"  # which are not the paper's
VERDICTS = {
    REPRODUCES: "What reproduces",
    IN_PART: "What reproduces in part",
    FAILS: "What does not reproduce",
    NOT_MEASURED: "What this run did not measure",
    OTHER_SIZES: "What this run measured at other sizes than the paper",
    BEYOND: "What the paper does not show",
}
COLOURS = {  # on the terminal
    REPRODUCES: "green",
    IN_PART: "yellow",
    FAILS: "red",
    NOT_MEASURED: "dim",
    OTHER_SIZES: "dim",
    BEYOND: "blue",
}


@dataclass(frozen=True)
class Finding:
    """A claim, what this run says of it, and the numbers that say so."""

    verdict: str  # a key of VERDICTS
    claim: str
    evidence: str
