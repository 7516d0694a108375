"""The summary of a run, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dfwlayer_bench.fuzz.run import PHASES, State

__all__ = ["summary"]


def summary(state: State, whole: bool, shown: int = 6) -> str:
    """Counts by set and kind, the first failures with what reproduces them, and the verdict."""
    parts = [_phase(state, phase) for phase in PHASES if state.done[phase]]
    seen: set[tuple[str, str]] = set()
    for f in state.failures:
        key = f["phase"], f["kind"]
        if key in seen or len(seen) >= shown:
            continue
        seen.add(key)
        where = Path(f["file"])
        script = where.read_text() if where.exists() else ""
        lines = script.splitlines()
        listing = "\n".join(f"    {line[:200]}" for line in lines[:24])
        parts.append(
            f"{f['kind']} ({f['name']}), {f['count']} in this batch; python {where}\n{listing}"
        )
    if state.memory:
        ends = [f"{s[0] / 1e6:.0f} -> {s[-1] / 1e6:.0f} MB" for s in state.memory.values()]
        parts.append("memory of the soak, by process: " + ", ".join(ends))
        parts += [f"LEAK: process {p} grew by {g / 1e6:.1f} MB" for p, g in state.leaks]
    if not whole:
        parts.append("stopped before the end; the same command goes on from here")
    total = ", ".join(f"{state.done[p]:,} {PHASES[p]}" for p in PHASES if state.done[p])
    parts.append(f"{total or 'nothing done'}: {state.failed:,} failures")
    return "\n\n".join(parts)


def _phase(state: State, phase: str) -> str:
    table = state.counts.get(phase, {})
    kinds = sorted({kind for row in table.values() for kind in row if kind != "count"})
    head = ["", PHASES[phase], *(["skipped"] if phase == "gradients" else []), *kinds]
    rows = []
    for name in table:
        own = table[name]
        skipped = [str(state.skipped.get(name, 0))] if phase == "gradients" else []
        rows.append([name, f"{own['count']:,}", *skipped, *(str(own.get(k, "")) for k in kinds)])
    seconds = state.seconds[phase]
    rate = f"{state.done[phase]:,} {PHASES[phase]} in {seconds:.0f} s"
    return f"{rate}\n{_table([head, *rows])}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
