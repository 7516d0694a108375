"""``python -m dfwlayer_bench.recorded``: whether tables in docs/ are those of the records."""

from __future__ import annotations

import sys

from dfwlayer_bench.recorded import compared
from dfwlayer_bench.recorded.texts import RESULTS


def main() -> None:
    """Compare, or write; ends with an error where a table differs and was not written."""
    write = "--write" in sys.argv[1:]
    stale = []
    for page in sorted(RESULTS.parent.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        right, names = compared(text)
        if names:
            print(f"{page.name}: {', '.join(names)}")
        if right != text:
            stale.append(page.name)
            if write:
                page.write_text(right, encoding="utf-8")
    if stale and not write:
        sys.exit(f"other numbers than recorded: {', '.join(stale)}")


if __name__ == "__main__":
    main()
