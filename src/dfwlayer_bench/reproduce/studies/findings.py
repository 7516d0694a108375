"""What the studies say of the paper's claims on temperature, of Theorem 1, and of the cosine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dfwlayer_bench.report import text
from dfwlayer_bench.report.findings import BEYOND, NOT_MEASURED, Finding
from dfwlayer_bench.reproduce.findings import at_sizes, judge
from dfwlayer_bench.reproduce.paper import ACCURACY, STAGES
from dfwlayer_bench.reproduce.rows import Group, Spread
from dfwlayer_bench.reproduce.sections import PAPER
from dfwlayer_bench.reproduce.studies.cosine import AUTHORS, HERE, SENSITIVE
from dfwlayer_bench.reproduce.studies.sections import active
from dfwlayer_bench.reproduce.studies.temperature import ANNEALED

__all__ = ["study_findings"]

SLACK = 0.01  # cosines closer than this count as equal


def study_findings(groups: Sequence[Group]) -> list[Finding]:
    """Of all studies that have results."""
    found: list[Finding] = []
    temperatures = [group for group in groups if group.study == "temperature"]
    if temperatures:
        own = {g.variant: g for g in temperatures if g.family == PAPER and g.records}
        sizes = {group.n for group in temperatures}
        found += [at_sizes(finding, sizes) for finding in _temperature(own)]
        found += _stops(temperatures)
    found += _theorem([group for group in groups if group.study == "theorem"])
    found += _gradient([group for group in groups if group.study == "gradient"])
    found += _norms([group for group in groups if group.study == "p" and group.records])
    found += _cosine({g.variant: g for g in groups if (g.study, g.family) == ("cosine", PAPER)})
    return found


def _temperature(groups: dict[str, Group]) -> list[Finding]:
    """At the last step of the study, and for annealing also where the published rule stops."""
    lower = "A lower constant temperature gives better solutions."
    fail = "Gradients fail at the constants 0.25 and 0.125."
    both = "Annealing gives both: the solutions of a low temperature, and good gradients."
    names = [f"{tau:g}" for tau in STAGES]
    if any(name not in groups for name in (ANNEALED, *names)):
        why = "The study has no complete results in family paper."
        return [Finding(NOT_MEASURED, claim, why) for claim in (lower, fail, both)]
    end = groups[ANNEALED].curve("cosine")[0][-1]
    distance = {name: _mean(_at(groups[name], "distance", end)) for name in groups}
    cosine = {name: _mean(_at(groups[name], "cosine", end)) for name in groups}
    ordered = [distance[name] for name in names]
    told = ", ".join(f"τ = {n}: {text.significant(distance[n])}" for n in names)
    angles = ", ".join(f"τ = {n}: {cosine[n]:.3f}" for n in names)
    high = min(cosine["1"], cosine["0.5"])
    stop = groups[ANNEALED].spread("stop")
    near = groups[ANNEALED].curve("cosine")[0]
    halt = min(near, key=lambda k: abs(k - stop.mean)) if stop is not None else end
    judged, parts = [], []
    for step in dict.fromkeys((halt, end)):
        best_distance = min(_mean(_at(groups[n], "distance", step)) for n in names)
        best_cosine = max(_mean(_at(groups[n], "cosine", step)) for n in names)
        own_distance = _mean(_at(groups[ANNEALED], "distance", step))
        own_cosine = _mean(_at(groups[ANNEALED], "cosine", step))
        judged += [own_distance <= best_distance * 1.05, own_cosine >= best_cosine - SLACK]
        parts.append(
            f"step {step:g}: annealed distance {text.significant(own_distance)} and cosine "
            f"{own_cosine:.3f}, best constant {text.significant(best_distance)} and "
            f"{best_cosine:.3f}"
        )
    return [
        Finding(
            judge([a > b for a, b in itertools.pairwise(ordered)]),
            lower,
            f"Mean distance after {end:g} steps: {told} (judged: each better than the one before).",
        ),
        Finding(
            judge([cosine["0.25"] < high - SLACK, cosine["0.125"] < high - SLACK]),
            fail,
            f"Mean cosine after {end:g} steps: {angles} (judged: below both higher constants).",
        ),
        Finding(
            judge(judged),
            both,
            f"{'; '.join(parts)} (judged: as good as the best constant, at the step nearest to "
            "where the published rule stops and at the end).",
        ),
    ]


def _at(group: Group, name: str, step: float) -> Spread | None:
    steps, spreads = group.curve(name)
    return spreads[steps.index(step)] if step in steps else None


def _mean(spread: Spread | None) -> float:
    return float("nan") if spread is None else spread.mean


def _stops(groups: Sequence[Group]) -> list[Finding]:
    parts = []
    for group in groups:
        stop = group.spread("stop") if group.variant == ANNEALED else None
        if stop is not None:
            last = group.curve("cosine")[0][-1]
            never = sum(r.values["stop"] >= last for r in group.records)
            told = f"{group.family}: {stop.mean:.0f} ± {stop.std:.0f}"
            parts.append(told + (f" (not within {last:g} in {never} trials)" if never else ""))
    if not parts:
        return []
    claim = "After how many steps the published rule (1e-4) stops; the temperature changes at 30."
    return [Finding(BEYOND, claim, f"{'; '.join(parts)}.")]


def _theorem(groups: Sequence[Group]) -> list[Finding]:
    soft = [r for g in groups if g.variant == "soft" for r in g.records]
    if not soft:
        return []
    checked = sum(r.values["checked"] for r in soft)
    broken = sum(r.values["broken"] for r in soft)
    closest = max(r.values["closest"] for r in soft)
    return [
        Finding(
            judge([broken == 0]),
            "Theorem 1: f(x_k) − f* ≤ δ(τ_k) + 5LM²/(2k + 4).",
            f"Above the bound in {broken} of {checked} steps of {len(soft)} problems; at the "
            f"closest the gap is {text.small(closest)} of the bound.",
        )
    ]


def _gradient(groups: Sequence[Group]) -> list[Finding]:
    """Unrolled against implicit at the longest run, family by family."""
    parts = []
    for family in dict.fromkeys(group.family for group in groups):
        own = {g.variant: g for g in groups if g.family == family and g.records}
        longest = max((g.settings.get("steps", 0) for g in own.values()), default=0)
        pair = [own.get(f"{mode}-{longest}") for mode in ("unroll", "implicit")]
        told = []
        for name, group in zip(("unrolled", "implicit"), pair, strict=True):
            if group is not None:
                memory, cosine = group.spread("memory_mb"), group.spread("cosine")
                seconds = group.spread("seconds")
                if memory is not None and cosine is not None and seconds is not None:
                    told.append(
                        f"{name} {text.time(seconds.mean)}, {text.significant(memory.mean)} MB, "
                        f"cosine {cosine.mean:.3f}"
                    )
        if told:
            parts.append(f"{family}, {longest} steps: {' against '.join(told)}")
    if not parts:
        return []
    claim = "What unrolling costs, and what the implicit gradient at the same point is worth."
    return [Finding(BEYOND, claim, f"{'; '.join(parts)}.")]


def _cosine(groups: dict[str, Group]) -> list[Finding]:
    """Which set-ups have the paper's cosine, and how far L alone moves it."""
    means = {name: _mean(group.spread("cosine")) for name, group in groups.items() if group.records}
    if HERE not in means or AUTHORS not in means:
        return []
    n = groups[HERE].n
    told = f"n = {n}: {means[HERE]:.3f} here, {means[AUTHORS]:.3f} with the authors' combination"
    paper = ACCURACY["DFWLayer"].get(n)
    if paper is not None:
        near = [
            f"{groups[name].label} {mean:.3f}"
            for name, mean in means.items()
            if abs(mean - paper.cosine.mean) <= SLACK
        ]
        listed = ", ".join(near) or "none"
        told += f"; the paper has {paper.cosine.mean:.3f}. Within {SLACK:g} of that: {listed}"
    found = [Finding(BEYOND, "What of the published set-up has the paper's cosine.", f"{told}.")]
    own = [active(groups[name]).spread("cosine") for name in SENSITIVE if name in means]
    known = [spread.mean for spread in own if spread is not None]
    if known:
        long = max(
            active(groups[name]).largest("length") or 0.0 for name in SENSITIVE if name in means
        )
        found.append(
            Finding(
                BEYOND,
                "How far the cosine moves with L alone where the constraint is active.",
                f"n = {n}: from {min(known):.3f} to {max(known):.3f} with L within 1 %, the "
                f"unrolled gradient up to {text.significant(long)} times as long as the exact one.",
            )
        )
    return found


def _norms(groups: Sequence[Group]) -> list[Finding]:
    """The worst error of each method over all p."""
    parts = []
    for method, name in (("dfw", "published"), ("auto", "default")):
        own = [g for g in groups if g.settings["method"] == method]
        worst = [(e.mean, g) for g in own if (e := g.spread("error")) is not None]
        if worst:
            error, group = max(worst, key=lambda pair: pair[0])
            where = f"{group.family}, p = {group.settings['p']}".replace("inf", "∞")
            parts.append(f"{name} method {text.small(error)} ({where})")
    if not parts:
        return []
    claim = "The worst mean error of x over p = 1, 1.5, 2, 3, ∞."
    return [Finding(BEYOND, claim, f"{'; '.join(parts)}.")]
