"""The tables of the studies: temperature, ablations, Theorem 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dfwlayer_bench.report import text
from dfwlayer_bench.report.document import Picture, Section, Table
from dfwlayer_bench.reproduce.rows import Group, Spread, cosine_text, error_text
from dfwlayer_bench.reproduce.studies.ablations import METHODS

__all__ = ["ablation_sections", "cosine_section", "temperature_section"]

Column = tuple[str, Callable[[Group], str]]


def temperature_section(groups: Sequence[Group], pictures: Sequence[Picture]) -> Section:
    """Where each temperature ends up."""
    columns: list[Column] = [
        ("temperature", lambda g: g.label),
        ("steps to the published stop", lambda g: _plain(g.spread("stop"))),
        ("distance at the end", lambda g: _plain(_last(g, "distance"))),
        ("relative", lambda g: error_text(_last(g, "error"))),
        ("cosine at the end", lambda g: cosine_text(_last(g, "cosine"))),
        ("best mean cosine", _best_cosine),
    ]
    paragraphs = [
        "The published method, whatever its stopping rule says, against the exact solution: "
        "Euclidean distance of x and cosine of the gradient at each step. Annealed means "
        "τ = 2^(−⌊k/30⌋). Lines are means over the trials, bands one standard deviation (cut at "
        "the smallest trial on logarithmic axes); a gradient that is not finite counts as "
        "cosine 0."
    ]
    title = _with_size("Temperature", groups)
    return Section("temperature", title, paragraphs, _tables(groups, columns), pictures)


def cosine_section(groups: Sequence[Group]) -> Section:
    """Where each set-up of the published method stops, and what its gradient is worth there."""
    columns: list[Column] = [
        ("set-up", lambda g: g.label),
        ("L / λ_max", lambda g: _ratio(g.spread("lipschitz"))),
        ("steps", _number("steps")),
        ("distance", _number("distance")),
        ("cosine", _angle("cosine")),
        ("steps, active", lambda g: _plain(active(g).spread("steps"))),
        ("τ there", lambda g: _plain(active(g).spread("temperature"))),
        ("cosine there", lambda g: cosine_text(active(g).spread("cosine"))),
        ("gradient / exact, length", lambda g: _plain(active(g).spread("length"))),
    ]
    paragraphs = [
        "The published method, stopped by its rule, against the exact solution and gradient: as in "
        "the accuracy table, with one part of the authors' public script at a time (L by a random "
        "power iteration that ends early, weights shifted by 1e-8, temperatures lowered one step "
        "sooner, float32 or float64), with all of them, and with other L, tolerances, temperatures "
        "and numbers of steps. The last four columns are of the trials whose constraint is active."
    ]
    return Section("cosine", _with_size("The cosine", groups), paragraphs, _tables(groups, columns))


def active(group: Group) -> Group:
    """The trials whose constraint is active."""
    return replace(group, records=tuple(record for record in group.records if record.active))


def _ratio(spread: Spread | None) -> str:
    return text.NOTHING if spread is None else f"{spread.mean:.4f}"


def ablation_sections(groups: Sequence[Group], pictures: dict[str, list[Picture]]) -> list[Section]:
    """One section a study that has results."""
    made = []
    for study, title, paragraph, columns, heads in _LAYOUTS:
        own = [group for group in groups if group.study == study]
        if own:
            tables = _tables(own, columns, heads)
            shown = pictures.get(study, [])
            title = _with_size(title, own)
            made.append(Section("ablations", title, [paragraph], tables, shown))
    return made


def _with_size(title: str, groups: Sequence[Group]) -> str:
    sizes = sorted({group.n for group in groups})
    return f"{title}, n = {', '.join(map(str, sizes))}"


def _tables(groups: Sequence[Group], columns: Sequence[Column], heads: int = 1) -> list[Table]:
    tables = []
    for family in dict.fromkeys(group.family for group in groups):
        own = [group for group in groups if group.family == family]
        trials = max(len(group.records) for group in own)
        active = max(sum(bool(r.active) for r in group.records) for group in own)
        title = f"{family} (ℓ1 constraint active in {active} of {trials} trials)"
        rows = [[value(group) for _, value in columns] for group in own]
        notes = [
            f"{group.label}: {group.status}" + (f": {group.detail}" if group.detail else "")
            for group in own
            if group.status != "ok"
        ]
        tables.append(Table(title, [name for name, _ in columns], rows, notes, heads))
    return tables


def _plain(spread: Spread | None) -> str:
    return text.NOTHING if spread is None else str(spread)


def _last(group: Group, name: str) -> Spread | None:
    spreads = group.curve(name)[1]
    return spreads[-1] if spreads else None


def _best_cosine(group: Group) -> str:
    steps, spreads = group.curve("cosine")
    known = [(s.mean, k) for k, s in zip(steps, spreads, strict=True) if s is not None]
    if not known:
        return text.NOTHING
    mean, step = max(known)
    return f"{mean:.4f} at step {step:g}"


def _number(name: str) -> Callable[[Group], str]:
    return lambda group: _plain(group.spread(name))


def _small(name: str) -> Callable[[Group], str]:
    return lambda group: error_text(group.spread(name))


def _angle(name: str) -> Callable[[Group], str]:
    return lambda group: cosine_text(group.spread(name))


def _worst(name: str) -> Callable[[Group], str]:
    return lambda group: text.small(group.largest(name))


def _setting(name: str) -> Callable[[Group], str]:
    return lambda group: str(group.settings.get(name, text.NOTHING))


def _method(group: Group) -> str:
    return METHODS[group.settings["method"]]


def _count(name: str) -> Callable[[Group], str]:
    return lambda group: f"{sum(r.values[name] for r in group.records):g}"


_NORM: list[Column] = [
    ("p", lambda g: str(g.settings["p"]).replace("inf", "∞")),
    ("method", _method),
    ("active in", lambda g: f"{_count('active')(g)} of {len(g.records)}"),
    ("seconds", _number("seconds")),
    ("steps", _number("steps")),
    ("error of x", _small("error")),
    ("cosine", _angle("cosine")),
    ("gradient error", _small("gradient_error")),
    ("largest gap / |f|", _worst("gap")),
    ("violation / t", _worst("violation")),
    ("ref. gap", _worst("reference_gap")),
    ("ref. slope error", _worst("reference_slope_error")),
]
_STOPPED: list[Column] = [
    ("steps to the published stop", _number("steps")),
    ("error of x there", _small("error")),
    ("cosine there", _angle("cosine")),
    ("error of x at the end", _small("last_error")),
    ("cosine at the end", _angle("last_cosine")),
]
_RULE: list[Column] = [("rule", lambda g: g.label), ("seconds", _number("seconds")), *_STOPPED]
_ANNEALING: list[Column] = [("schedule", lambda g: g.label), *_STOPPED]
_BATCH: list[Column] = [
    ("method", _method),
    ("problems", _setting("batch")),
    ("seconds a call", _number("seconds")),
    ("seconds a problem", _number("seconds_each")),
    ("mean steps", _number("steps")),
    ("median gap / |f|", _small("gap")),
    ("violation / t", _worst("violation")),
]
_GRADIENT: list[Column] = [
    ("gradient", lambda g: g.label),
    ("seconds", _number("seconds")),
    ("memory (MB)", _number("memory_mb")),
    ("error of x", _small("error")),
    ("cosine", _angle("cosine")),
    ("gradient error", _small("gradient_error")),
]
_THEOREM: list[Column] = [
    ("vertices", lambda g: g.label),
    ("steps checked", _count("checked")),
    ("above the bound", _count("broken")),
    ("largest gap / bound", _worst("closest")),
]

# study, title, what is shown, columns, how many of them name the row
_LAYOUTS: tuple[tuple[str, str, str, list[Column], int], ...] = (
    (
        "p",
        "The norm: p = 1, 1.5, 2, 3, ∞",
        "The published method (tolerance 1e-4) and the default one on ‖w∘x‖_p ≤ t. Where the "
        "family takes t from the unconstrained solution, it takes it in the p-norm. The reference "
        "for p = 1 is the exact one; for other p it is the default method in float64, whose "
        "certified gap and whose gradient's error against a central difference along one "
        "direction stand in the last columns.",
        _NORM,
        2,
    ),
    (
        "step-size",
        "Step-size rules",
        "The published method with each rule: stopped by the published rule at 1e-4, and after "
        "all steps of the figure.",
        _RULE,
        1,
    ),
    (
        "annealing",
        "Annealing: period and start",
        "τ = start · 2^(−⌊k/T⌋), with the paper's T = 30 and start 1 where nothing else is said: "
        "where the published rule stops at 1e-4 (after all steps if it does not), and after all "
        "steps.",
        _ANNEALING,
        1,
    ),
    (
        "batch",
        "Batch size",
        "One call on a batch that shares P and w, forward and backward.",
        _BATCH,
        2,
    ),
    (
        "gradient",
        "Unrolled against implicit gradient",
        "The published method after a fixed number of steps, differentiated through its steps "
        "and implicitly at its last point; the default method for comparison. Memory is that of "
        "the tensors the forward pass leaves for the backward pass.",
        _GRADIENT,
        1,
    ),
    (
        "theorem",
        "Theorem 1",
        "f(x_k) − f* against δ(τ_k) + 5LM²/(2k + 4) for soft vertices, δ(τ) = τ log n, and "
        "2LM²/(k + 3) for hard ones, in float64 with the exact L and the diameter M.",
        _THEOREM,
        1,
    ),
)
