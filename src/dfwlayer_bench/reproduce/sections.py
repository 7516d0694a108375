"""The tables of the systems: running time and accuracy, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dfwlayer_bench.bench.report import settings_text
from dfwlayer_bench.bench.store import Cell
from dfwlayer_bench.problems.families import FAMILIES
from dfwlayer_bench.report import text
from dfwlayer_bench.report.document import Picture, Section, Table
from dfwlayer_bench.report.machine import clock_text, machine_text
from dfwlayer_bench.reproduce.paper import ACCURACY, MACHINE, ROLES, TIMES
from dfwlayer_bench.reproduce.rows import SystemRow, cosine_text, error_text
from dfwlayer_bench.systems import label_of

__all__ = ["PAPER", "accuracy_section", "activity", "settings_section", "table1_section"]

PAPER = "paper"  # the family of the paper's own problems


def families_of(rows: Sequence[SystemRow]) -> list[str]:
    """In the order they were run."""
    return list(dict.fromkeys(row.family for row in rows))


def sizes_of(rows: Sequence[SystemRow]) -> list[int]:
    """From small to large."""
    return sorted({row.n for row in rows})


def activity(rows: Sequence[SystemRow], family: str) -> list[str]:
    """For each size, in how many problems the constraint is active, and their seeds."""
    told = []
    for n in sizes_of(rows):
        own = [row for row in rows if row.family == family and row.n == n and row.trials]
        if own:
            most = max(own, key=lambda row: row.trials)
            seeds = ", ".join(map(str, most.active_seeds))
            share = f"{len(most.active_seeds)} of {most.trials}"
            word = "seed" if len(most.active_seeds) == 1 else "seeds"
            told.append(f"n = {n}: {share}" + (f" ({word} {seeds})" if seeds else ""))
    return told


def table1_section(rows: Sequence[SystemRow], pictures: Sequence[Picture]) -> Section:
    """Running times, one table a family."""
    sizes = sizes_of(rows)
    tables = []
    for family in families_of(rows):
        own = [row for row in rows if row.family == family]
        lines = []
        for name in dict.fromkeys(row.system for row in own):
            found = {row.n: row for row in own if row.system == name}
            lines.append([label_of(name), *(_time(found.get(n)) for n in sizes)])
            role = ROLES.get(name)
            if family == PAPER and role is not None and set(sizes) & set(TIMES[role]):
                lines.append([f"paper: {role}", *(_paper_time(role, n) for n in sizes)])
        header = ["seconds", *(f"n = {n}" for n in sizes)]
        tables.append(Table(_title(family), header, lines, _troubles(own)))
    return Section(
        "table1",
        "Running time (Table 1)",
        [
            "Seconds for one forward and one backward pass, mean ± standard deviation over the "
            f"trials. The paper's rows are its own numbers ({MACHINE}).",
        ],
        tables,
        pictures,
    )


def _title(family: str) -> str:
    return f"{family}: {FAMILIES[family].description}"


def _time(row: SystemRow | None) -> str:
    if row is None:
        return text.NOTHING
    if row.seconds is None:
        return row.status
    return str(row.seconds) + ("" if row.status == "ok" else f" ({row.status})")


def _paper_time(role: str, n: int) -> str:
    found = TIMES[role].get(n)
    return text.NOTHING if found is None else f"{found.mean:.2f} ± {found.std:.2f}"


def _troubles(rows: Sequence[SystemRow]) -> list[str]:
    """What went wrong, each thing once."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row.status != "ok":
            detail = f": {row.detail}" if row.detail else ""
            found.setdefault(f"{row.label}: {row.status}{detail}", []).append(row.n)
    return [f"{what} (n = {', '.join(map(str, sizes))})" for what, sizes in found.items()]


def accuracy_section(rows: Sequence[SystemRow], pictures: Sequence[Picture]) -> Section:
    """As the paper measures it, and against the exact solution."""
    peer = next((row.peer for row in rows if row.peer is not None), None)
    tables = []
    for family in families_of(rows):
        own = [row for row in rows if row.family == family]
        if peer is not None:
            tables.append(_against_peer(family, own, peer))
        tables.append(_against_exact(family, own))
    paragraphs = []
    if peer is None:
        paragraphs.append(
            "CvxpyLayer gave no answers in this run, so that distances to it, which is how the "
            "paper measures, are missing here."
        )
    else:
        paragraphs.append(
            f"As the paper does: against CvxpyLayer ({label_of(peer)}), the cosine of the "
            "gradients and the Euclidean distance of the solutions, mean ± standard deviation; "
            "the violation max(0, ‖w∘x‖₁ − t), mean and largest over the trials."
        )
    paragraphs.append(
        "Against the exact solution in float64: ‖x − x*‖ / ‖x*‖, the cosine and the relative "
        "error of the gradient, mean ± standard deviation, and the largest violation / t."
    )
    paragraphs += _about_the_papers_maximum(rows)
    return Section("accuracy", "Accuracy", paragraphs, tables, pictures)


def _about_the_papers_maximum(rows: Sequence[SystemRow]) -> list[str]:
    cosines = [r.peer_cosine for r in rows if r.system == "alt-diff-paper" and r.family == PAPER]
    known = [spread.most for spread in cosines if spread is not None]
    if not known:
        return []
    return [
        "The paper prints 1.000 for Alt-Diff's largest violation at every size. In the authors' "
        "public script (test_time_for_norms.py) the number printed in that place is the largest "
        "of Alt-Diff's gradient cosines, not of its violations. The largest of those cosines is "
        f"{max(known):.3f} here."
    ]


def _against_peer(family: str, rows: Sequence[SystemRow], peer: str) -> Table:
    header = ["n", "system", "cosine", "distance", "mean violation", "max violation"]
    lines = []
    for n in sizes_of(rows):
        for row in rows:
            if row.n != n or row.system == peer:
                continue
            lines.append(
                [
                    str(n),
                    row.label,
                    row.status if row.peer_cosine is None else cosine_text(row.peer_cosine),
                    str(row.peer_distance or text.NOTHING),
                    text.significant(row.mean_violation, 2),
                    text.significant(row.max_violation, 2),
                ]
            )
            role = ROLES.get(row.system)
            told = ACCURACY.get(role or "", {}).get(n)
            if family == PAPER and told is not None:
                lines.append(
                    [
                        str(n),
                        f"paper: {role}",
                        f"{told.cosine.mean:.3f} ± {told.cosine.std:.3f}",
                        f"{told.distance.mean:.3f} ± {told.distance.std:.3f}",
                        f"{told.mean_violation:g}",
                        f"{told.max_violation:.3f}" if told.max_violation else "0",
                    ]
                )
    return Table(f"{family}, against {label_of(peer)}", header, lines, heads=2)


def _against_exact(family: str, rows: Sequence[SystemRow]) -> Table:
    header = ["n", "system", "error of x", "cosine", "gradient error", "violation / t", "status"]
    lines = []
    for n in sizes_of(rows):
        for row in (row for row in rows if row.n == n):
            told = text.status(row.status, row.detail)
            lines.append(
                [
                    str(n),
                    row.label,
                    error_text(row.error),
                    cosine_text(row.cosine),
                    error_text(row.gradient_error),
                    text.small(row.relative_violation),
                    told,
                ]
            )
    return Table(f"{family}, against the exact solution", header, lines, heads=2)


def settings_section(cells: Sequence[Cell], about: dict[str, Any]) -> Section:
    """Machine, versions, and what every system was run with."""
    lines = []
    for name in dict.fromkeys(cell.system for cell in cells):
        own = [cell for cell in cells if cell.system == name and cell.status == "ok"]
        if own:
            packages = ", ".join(f"{key} {value}" for key, value in own[0].versions.items())
            lines.append(
                [
                    label_of(name),
                    settings_text([cell.settings for cell in own]),
                    packages or text.NOTHING,
                ]
            )
    table = Table("Systems", ["system", "settings", "versions"], lines)
    versions = about["machine"]["versions"]
    known = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    absent = ", ".join(name for name, found in versions.items() if not found)
    return Section(
        "",
        "How it was run",
        [
            f"{machine_text(about['machine'])}; {about['machine']['system']}, Python "
            f"{about['machine']['python']}; {about['dtype']} on {about['device']}.",
            f"Versions: {known}." + (f" Not installed: {absent}." if absent else ""),
            "Not timed is what is done once per problem structure: canonicalising (cvxpylayers), "
            "compiling (jaxopt), tuning penalties and tolerances. A time is the median of the "
            "calls on one problem; means and standard deviations are over the problems."
            + clock_text(about),
        ],
        [table] if lines else [],
    )
