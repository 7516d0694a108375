"""What a run says of the paper's claims, each judged by a rule and told with its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dfwlayer_bench.report import text
from dfwlayer_bench.report.findings import (
    BEYOND,
    FAILS,
    IN_PART,
    NOT_MEASURED,
    OTHER_SIZES,
    REPRODUCES,
    Finding,
)
from dfwlayer_bench.reproduce.paper import ACCURACY, ROLES, TIMES, Measured
from dfwlayer_bench.reproduce.rows import Spread, SystemRow
from dfwlayer_bench.reproduce.sections import PAPER, activity, families_of
from dfwlayer_bench.systems import label_of

__all__ = ["at_sizes", "system_findings"]

ROUNDING = 1e-6  # a violation / t below this is float32's
SIZES = tuple(TIMES["DFWLayer"])  # that the paper ran
SYSTEM_OF = {role: name for name, role in ROLES.items()}


def system_findings(rows: Sequence[SystemRow]) -> list[Finding]:
    """Of running time and accuracy."""
    if not rows:
        return []
    found = [
        _faster(rows, "CvxpyLayer"),
        _faster(rows, "Alt-Diff"),
        _growth(rows),
        _agreement(rows, "DFWLayer"),
        _agreement(rows, "Alt-Diff"),
        _feasible(rows),
        _alt_diff_violates(rows),
        _activity(rows),
        *_exactness(rows),
        _peer_itself(rows),
        _default_times(rows),
    ]
    return [at_sizes(finding, {r.n for r in rows}) for finding in found if finding is not None]


def at_sizes(finding: Finding, sizes: Iterable[int]) -> Finding:
    """The finding, without a verdict on the paper where none of its sizes was run."""
    if finding.verdict == BEYOND or any(n in SIZES for n in sizes):
        return finding
    told = f"The paper's sizes are {', '.join(map(str, SIZES))}."
    return replace(finding, verdict=OTHER_SIZES, evidence=f"{finding.evidence} {told}")


def judge(outcomes: Iterable[bool]) -> str:
    """All, some or none."""
    known = list(outcomes)
    if not known:
        return NOT_MEASURED
    return REPRODUCES if all(known) else (IN_PART if any(known) else FAILS)


def _row(rows: Sequence[SystemRow], role: str, n: int, family: str = PAPER) -> SystemRow | None:
    name = SYSTEM_OF.get(role, role)
    return next((r for r in rows if (r.family, r.n, r.system) == (family, n, name)), None)


def _sizes(rows: Sequence[SystemRow]) -> list[int]:
    return sorted({row.n for row in rows if row.family == PAPER})


def _why_not(rows: Sequence[SystemRow], *roles: str) -> str:
    """Why there is nothing to compare."""
    if not _sizes(rows):
        return "Family paper was not run."
    for role in roles:
        own = [row for row in (_row(rows, role, n) for n in _sizes(rows)) if row is not None]
        if not own:
            return f"{label_of(SYSTEM_OF.get(role, role))} was not among the systems."
        troubled = [row for row in own if row.seconds is None]
        if troubled:
            detail = f" ({troubled[0].detail})" if troubled[0].detail else ""
            return f"{troubled[0].label}: {troubled[0].status}{detail}."
    return "There is nothing to compare."


def _times(factor: float) -> str:
    return f"{text.significant(factor, 3)}×"


def _faster(rows: Sequence[SystemRow], rival: str) -> Finding:
    """Holds at a size if the method is faster there by at least half the paper's factor."""
    paper = {n: TIMES[rival][n].mean / TIMES["DFWLayer"][n].mean for n in TIMES[rival]}
    told = ", ".join(f"{factor:.0f}× at n = {n}" for n, factor in paper.items())
    claim = f"DFWLayer is faster than {rival}: by {told}."
    parts, outcomes = [], []
    for n in _sizes(rows):
        own, other = _row(rows, "DFWLayer", n), _row(rows, rival, n)
        if own is None or other is None or own.seconds is None or other.seconds is None:
            continue
        factor = other.seconds.mean / own.seconds.mean
        outcomes += [factor > 1, factor >= paper[n] / 2] if n in paper else []
        parts.append(f"{_times(factor)} at n = {n}")
    if not parts:
        return Finding(NOT_MEASURED, claim, _why_not(rows, rival, "DFWLayer"))
    judged = " (judged at the paper's sizes: faster, and by at least half its factor)"
    evidence = f"Time of {rival} / time of DFWLayer: {', '.join(parts)}{judged}."
    return Finding(judge(outcomes), claim, evidence)


def _growth(rows: Sequence[SystemRow]) -> Finding | None:
    low, high = _row(rows, "DFWLayer", 500), _row(rows, "DFWLayer", 2000)
    if low is None or high is None or low.seconds is None or high.seconds is None:
        return None
    paper = TIMES["DFWLayer"][2000].mean / TIMES["DFWLayer"][500].mean
    factor = high.seconds.mean / low.seconds.mean
    claim = f"From n = 500 to 2000 DFWLayer's time grows {paper:.1f}×."
    evidence = f"Measured: {_times(factor)} (judged: at most twice the paper's)."
    return Finding(judge([factor <= 2 * paper]), claim, evidence)


def _agreement(rows: Sequence[SystemRow], role: str) -> Finding:
    """Holds where the mean is within two of the paper's standard deviations of the paper's.

    The spread of the run itself does not count: a wide one would make anything agree.
    """
    paper = ACCURACY[role]
    cosines = [told.cosine.mean for told in paper.values()]
    distances = [told.distance.mean for told in paper.values()]
    claim = (
        f"{role} agrees with CvxpyLayer: cosine {min(cosines):.3f} to {max(cosines):.3f}, "
        f"distance {min(distances):.3f} to {max(distances):.3f}."
    )
    parts, outcomes = [], []
    for n, told in paper.items():
        row = _row(rows, role, n)
        if row is None or row.peer_cosine is None or row.peer_distance is None:
            continue
        outcomes += [_near(row.peer_cosine, told.cosine), _near(row.peer_distance, told.distance)]
        parts.append(
            f"n = {n}: cosine {row.peer_cosine.mean:.3f} ± {row.peer_cosine.std:.3f}, "
            f"distance {row.peer_distance.mean:.4f} ± {row.peer_distance.std:.4f}"
        )
    if not parts:
        return Finding(NOT_MEASURED, claim, _why_not(rows, "CvxpyLayer", role))
    judged = "judged: within two of the paper's standard deviations"
    return Finding(judge(outcomes), claim, f"Measured: {'; '.join(parts)} ({judged}).")


def _near(found: Spread, told: Measured) -> bool:
    # the paper prints three decimals
    return abs(found.mean - told.mean) <= 2 * told.std + 5e-4


def _feasible(rows: Sequence[SystemRow]) -> Finding:
    claim = "DFWLayer never violates the constraint."
    known = [r for r in rows if r.system == "dfw" and r.relative_violation is not None]
    own = [r for r in known if r.n in SIZES] or known
    if not own:
        return Finding(NOT_MEASURED, claim, _why_not(rows, "DFWLayer"))
    worst = max(r.relative_violation or 0.0 for r in own)
    where = ", ".join(families_of(own))
    count = sum(r.trials for r in own)
    evidence = f"Largest violation / t over {count} problems ({where}): {text.small(worst)}."
    return Finding(judge([worst <= ROUNDING]), claim, evidence)


def _alt_diff_violates(rows: Sequence[SystemRow]) -> Finding:
    """Holds at a size if the mean is within a factor of two of the paper's."""
    told = ACCURACY["Alt-Diff"]
    means = [accuracy.mean_violation for accuracy in told.values()]
    claim = (
        f"Alt-Diff violates the constraint: by {min(means)} to {max(means)} in the mean, by 1.000 "
        "at most."
    )
    parts, outcomes, inactive = [], [], []
    for n in _sizes(rows):
        row = _row(rows, "Alt-Diff", n)
        if row is None or row.mean_violation is None or row.max_violation is None:
            continue
        if not row.active_seeds:
            inactive.append(n)
            continue
        if n in told:
            outcomes.append((row.relative_violation or 0.0) > ROUNDING)
            ratio = row.mean_violation / told[n].mean_violation
            outcomes += [0.5 <= ratio <= 2, 0.5 <= row.max_violation / told[n].max_violation <= 2]
        parts.append(
            f"n = {n}: mean {text.significant(row.mean_violation, 2)}, "
            f"largest {text.significant(row.max_violation, 2)}"
        )
    if not parts:
        nothing = "In every problem of this run the constraint is inactive at the solution."
        return Finding(NOT_MEASURED, claim, nothing if inactive else _why_not(rows, "Alt-Diff"))
    evidence = f"Measured with the paper's stopping rule: {'; '.join(parts)}"
    tight = [r for r in rows if r.system == "alt-diff" and r.family == PAPER and r.trials]
    if tight:
        largest = max(r.max_violation or 0.0 for r in tight)
        evidence += f". Run to convergence, its largest is {text.significant(largest, 2)}"
    judged = " (judged at the paper's sizes: it does, and within a factor of 2)."
    return Finding(judge(outcomes), claim, evidence + judged)


def _activity(rows: Sequence[SystemRow]) -> Finding | None:
    told = activity(rows, PAPER)
    if not told:
        return None
    claim = "How often the constraint is active in the paper's own problems."
    evidence = f"Active for {'; '.join(told)}. Where it is not, the answer is that of P x = −q."
    return Finding(BEYOND, claim, evidence)


def _exactness(rows: Sequence[SystemRow]) -> list[Finding]:
    """The published and the default method against the exact solution, family by family."""
    made = []
    for name, claim in (
        ("dfw", "How far the published method is from the exact solution."),
        ("dfwlayer", "How far this library's default method is from it."),
    ):
        parts = []
        for family in families_of(rows):
            own = [r for r in rows if (r.family, r.system) == (family, name)]
            errors = [r.error.mean for r in own if r.error is not None]
            cosines = [r.cosine.mean for r in own if r.cosine is not None]
            if errors and cosines:
                parts.append(
                    f"{family}: error of x {_range(errors)}, cosine of the gradient "
                    f"{_angles(cosines)}"
                )
        if parts:
            made.append(Finding(BEYOND, claim, f"Means over the trials: {'; '.join(parts)}."))
    return made


def _range(values: Sequence[float]) -> str:
    low, high = text.small(min(values)), text.small(max(values))
    return low if low == high else f"{low} to {high}"


def _angles(cosines: Sequence[float]) -> str:
    low, high = f"{min(cosines):.5f}", f"{max(cosines):.5f}"
    return low if low == high else f"{low} to {high}"


def _peer_itself(rows: Sequence[SystemRow]) -> Finding | None:
    own = [r for r in rows if r.system == r.peer and r.error is not None and r.cosine is not None]
    if not own:
        return None
    errors = [r.error.mean for r in own if r.error is not None]
    cosines = [r.cosine.mean for r in own if r.cosine is not None]
    return Finding(
        BEYOND,
        "How good the paper's reference, CvxpyLayer, is itself.",
        f"{own[0].label}: error of x {_range(errors)}, cosine of the gradient "
        f"{_angles(cosines)}, largest violation / t "
        f"{text.small(max(r.relative_violation or 0.0 for r in own))}.",
    )


def _default_times(rows: Sequence[SystemRow]) -> Finding | None:
    """The default method's time against the best of the others whose answer is right."""
    parts = []
    for own in (r for r in rows if r.system == "dfwlayer"):
        others = [
            r
            for r in rows
            if (r.family, r.n) == (own.family, own.n)
            and r.system != "dfwlayer"
            and r.seconds is not None
            and r.error is not None
            and r.error.mean <= 1e-3
        ]
        if own.seconds is None or not others:
            continue
        best = min(others, key=lambda r: r.seconds.mean if r.seconds is not None else 0.0)
        assert best.seconds is not None
        ratio = best.seconds.mean / own.seconds.mean
        parts.append(f"{own.family} n = {own.n}: {_times(ratio)} ({best.label})")
    if not parts:
        return None
    claim = "Time of the fastest other system / time of this library's default method."
    evidence = f"Among those whose mean error of x is at most 1e-3: {'; '.join(parts)}."
    return Finding(BEYOND, claim, evidence)
