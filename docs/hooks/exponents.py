"""Numbers such as 2.5e-08 in tables stay on one line: a browser would break them at the hyphen."""

from __future__ import annotations

import re

CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
NUMBER = re.compile(r"\d[\d.]*e-\d+")


def on_page_content(content: str, **_: object) -> str:
    """Mark them, for the style sheet to keep them together."""
    return CELL.sub(lambda cell: NUMBER.sub(r'<span class="number">\g<0></span>', cell[0]), content)
