"""The tables of docs/ that hold recorded numbers, made from docs/results.

Such a table stands below a line ``<!-- recorded: NAME -->``. ``python -m dfwlayer_bench.recorded``
compares all of them with the records, and with ``--write`` makes them anew.
"""

from __future__ import annotations

import re

from dfwlayer_bench.recorded import benchmarks, reproduce, robotics
from dfwlayer_bench.report.text import markdown_table

__all__ = ["TABLES", "compared"]

TABLES = benchmarks.TABLES | reproduce.TABLES | robotics.TABLES
MARK = re.compile(r"^<!-- recorded: ([\w-]+) -->\n((?:\|.*\n)*)", re.MULTILINE)


def compared(text: str) -> tuple[str, list[str]]:
    """A page with its tables as the records have them, and the names of these."""

    def made(match: re.Match[str]) -> str:
        header, rows = TABLES[match[1]]()
        lines = [f"<!-- recorded: {match[1]} -->", *markdown_table(header, rows)]
        return "\n".join(lines) + "\n"

    return MARK.sub(made, text), [match[1] for match in MARK.finditer(text)]
