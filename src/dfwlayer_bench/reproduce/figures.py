"""The figures of a reproduction: one a family, so that they stack on a narrow screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dfwlayer_bench.bench.plots import look_of_system
from dfwlayer_bench.report.document import Picture
from dfwlayer_bench.report.figures import COLOURS, Curve, Look, Panel, look_of, save_figure
from dfwlayer_bench.reproduce.paper import ROLES, TIMES
from dfwlayer_bench.reproduce.rows import Group, Spread, SystemRow
from dfwlayer_bench.reproduce.sections import PAPER, families_of
from dfwlayer_bench.reproduce.studies.temperature import ANNEALED

__all__ = ["draw_studies", "draw_systems"]

BAND = "bands: one standard deviation"
LOOKS = {"published": look_of(2), "default": look_of(1)}
PAPER_LOOKS = {
    "CvxpyLayer": Look("#555555", "o", ":", 1.2, hollow=True),
    "Alt-Diff": Look("#555555", "s", ":", 1.2, hollow=True),
    "DFWLayer": Look("#555555", "D", ":", 1.2, hollow=True),
}


def draw_systems(folder: Path, rows: Sequence[SystemRow]) -> dict[str, list[Picture]]:
    """Time and accuracy against n; what was drawn, by the section it belongs to."""
    drawn: dict[str, list[Picture]] = {"table1": [], "accuracy": []}
    for family in families_of(rows):
        own = [row for row in rows if row.family == family]
        time, accuracy = _time_panel(family, own), _accuracy_panels(family, own)
        if time.curves:
            name = f"time-{family}"
            save_figure(folder, name, [time], panel_size=(5.6, 3.9))
            caption = f"Time against n, family {family}; {BAND}."
            drawn["table1"].append(Picture(name, caption))
        if accuracy[0].curves:
            name = f"accuracy-{family}"
            save_figure(folder, name, accuracy, panel_size=(5.6, 2.9))
            caption = f"Errors against the exact solution, family {family}; {BAND}."
            drawn["accuracy"].append(Picture(name, caption))
    return drawn


def _curve(label: str, x: Sequence[float], spreads: Sequence[Spread | None], look: Look) -> Curve:
    """Means with their band; on a logarithmic axis it must not reach below the least trial."""
    return Curve(
        label,
        x,
        [None if s is None else s.mean for s in spreads],
        look,
        [None if s is None else max(s.mean - s.std, s.least) for s in spreads],
        [None if s is None else s.mean + s.std for s in spreads],
    )


def _ticks(sizes: Sequence[float]) -> dict[float, str]:
    return {size: f"{size:g}" for size in sorted(set(sizes))}


def _time_panel(family: str, rows: Sequence[SystemRow]) -> Panel:
    timed = [row for row in rows if row.seconds is not None]
    sizes: list[float] = [row.n for row in timed]
    curves = [
        _curve(own[0].label, [r.n for r in own], [r.seconds for r in own], look_of_system(name))
        for name, own in _by_system(timed)
    ]
    if family == PAPER and curves:
        roles = [ROLES[row.system] for row in timed if row.system in ROLES]
        for role in dict.fromkeys(roles):
            told = {n: value for n, value in TIMES[role].items() if n in sizes}
            label = f"{role}, as the paper reports"
            means: list[float | None] = [value.mean for value in told.values()]
            if told:
                curves.append(Curve(label, list(told), means, PAPER_LOOKS[role]))
    return Panel(
        "number of variables n",
        "forward + backward (s)",
        curves,
        title=f"family {family}",
        x_log=True,
        y_log=True,
        ticks=_ticks(sizes),
    )


def _accuracy_panels(family: str, rows: Sequence[SystemRow]) -> list[Panel]:
    known = [row for row in rows if row.error is not None]
    ticks = _ticks([row.n for row in known])

    def panel(label: str, value: Callable[[SystemRow], Spread | None], title: str) -> Panel:
        curves = [
            _curve(own[0].label, [r.n for r in own], [value(r) for r in own], look_of_system(name))
            for name, own in _by_system(known)
        ]
        return Panel(
            "number of variables n", label, curves, title=title, x_log=True, y_log=True, ticks=ticks
        )

    return [
        panel("relative error of x", lambda row: row.error, f"family {family}"),
        panel("relative error of the gradient", lambda row: row.gradient_error, ""),
    ]


def _by_system(rows: Sequence[SystemRow]) -> list[tuple[str, list[SystemRow]]]:
    names = dict.fromkeys(row.system for row in rows)
    return [(n, sorted((r for r in rows if r.system == n), key=lambda r: r.n)) for n in names]


# the studies ---------------------------------------------------------------------------------


def draw_studies(folder: Path, groups: Sequence[Group]) -> dict[str, list[Picture]]:
    """One figure for each study and family that has results; by the study's name."""
    drawn: dict[str, list[Picture]] = {}
    for study, (panels_of, caption) in _STUDIES.items():
        for family in dict.fromkeys(g.family for g in groups if g.study == study and g.records):
            own = [g for g in groups if (g.study, g.family) == (study, family) and g.records]
            panels = panels_of(own)
            panels[0] = replace(panels[0], title=f"family {family}, n = {own[0].n}")
            name = f"{study}-{family}"
            high = 3.7 if len(panels) == 1 else 2.7
            save_figure(folder, name, panels, panel_size=(5.6, high))
            drawn.setdefault(study, []).append(
                Picture(name, f"{caption}, family {family}; {BAND}.")
            )
    return drawn


def _temperature(groups: Sequence[Group]) -> list[Panel]:
    constants = [g.variant for g in groups if g.variant != ANNEALED]
    looks = dict(zip(constants, map(look_of, (2, 3, 7, 5)), strict=False))
    looks[ANNEALED] = Look(COLOURS[0], width=2.4)
    distance = [_curve(g.label, *g.curve("distance"), looks[g.variant]) for g in groups]
    cosine = [_curve(g.label, *g.curve("cosine"), looks[g.variant]) for g in groups]
    return [
        Panel("iterations", "distance ‖x − x*‖", distance, y_log=True),
        Panel("iterations", "cosine of the gradient", cosine, y_range=(None, 1.02)),
    ]


def _norms(groups: Sequence[Group]) -> list[Panel]:
    places = {p: float(i) for i, p in enumerate(dict.fromkeys(g.settings["p"] for g in groups))}
    ticks = {place: p.replace("inf", "∞") for p, place in places.items()}

    def panel(label: str, name: str, *, log: bool) -> Panel:
        curves = []
        for method, title in (("dfw", "published"), ("auto", "default")):
            own = [g for g in groups if g.settings["method"] == method]
            x = [places[g.settings["p"]] for g in own]
            curves.append(_curve(title, x, [g.spread(name) for g in own], LOOKS[title]))
        top = None if log else 1.02
        return Panel("p", label, curves, y_log=log, ticks=ticks, y_range=(None, top))

    return [
        panel("relative error of x", "error", log=True),
        panel("cosine of the gradient", "cosine", log=False),
        panel("forward + backward (s)", "seconds", log=True),
    ]


def _rules(groups: Sequence[Group]) -> list[Panel]:
    curves = [_curve(g.label, *g.curve("suboptimality"), look_of(i)) for i, g in enumerate(groups)]
    return [Panel("iterations", "(f(x) − f*) / |f*|", curves, y_log=True, x_log=True)]


def _annealing(groups: Sequence[Group]) -> list[Panel]:
    x = [float(i) for i in range(len(groups))]
    ticks = {float(i): g.label for i, g in enumerate(groups)}

    def panel(label: str, names: tuple[str, str], *, log: bool) -> Panel:
        curves = [
            _curve(title, x, [g.spread(name) for g in groups], replace(look, line=""))
            for title, name, look in zip(
                ("where the published rule stops", "after all steps"),
                names,
                (look_of(2), look_of(1)),
                strict=True,
            )
        ]
        top = None if log else 1.02
        return Panel("schedule", label, curves, y_log=log, ticks=ticks, y_range=(None, top))

    return [
        panel("relative error of x", ("error", "last_error"), log=True),
        panel("cosine of the gradient", ("cosine", "last_cosine"), log=False),
    ]


def _batches(groups: Sequence[Group]) -> list[Panel]:
    curves = []
    for method, title in (("dfw", "published"), ("auto", "default")):
        own = [g for g in groups if g.settings["method"] == method]
        x = [float(g.settings["batch"]) for g in own]
        curves.append(_curve(title, x, [g.spread("seconds_each") for g in own], LOOKS[title]))
    ticks = _ticks([float(g.settings["batch"]) for g in groups])
    return [
        Panel(
            "problems in a batch",
            "forward + backward a problem (s)",
            curves,
            x_log=True,
            y_log=True,
            ticks=ticks,
        )
    ]


def _gradients(groups: Sequence[Group]) -> list[Panel]:
    modes = {"unroll": ("unrolled", look_of(2)), "implicit": ("implicit", look_of(3))}
    published = [g for g in groups if "steps" in g.settings]
    default = [g for g in groups if "steps" not in g.settings]
    lengths = [float(g.settings["steps"]) for g in published]

    def panel(label: str, name: str, *, log: bool) -> Panel:
        curves = []
        for mode, (title, look) in modes.items():
            own = [g for g in published if g.settings["mode"] == mode]
            x = [float(g.settings["steps"]) for g in own]
            curves.append(_curve(title, x, [g.spread(name) for g in own], look))
        for group in default:
            ends = [min(lengths), max(lengths)] if lengths else [1.0, 2.0]
            look = replace(look_of(1), line="--", marker="")
            curves.append(_curve("default method", ends, [group.spread(name)] * 2, look))
        top = None if log else 1.05
        ticks = _ticks(lengths)
        return Panel(
            "steps of the published method",
            label,
            curves,
            x_log=True,
            y_log=log,
            ticks=ticks,
            y_range=(None, top),
        )

    return [
        panel("forward + backward (s)", "seconds", log=True),
        panel("memory held (MB)", "memory_mb", log=True),
        panel("cosine of the gradient", "cosine", log=False),
    ]


def _theorem(groups: Sequence[Group]) -> list[Panel]:
    curves = []
    for index, group in zip((2, 1), groups, strict=False):
        look = Look(COLOURS[index])
        curves.append(_curve(f"{group.label}, measured", *group.curve("gap"), look))
        dashed = replace(look, line="--")
        curves.append(_curve(f"{group.label}, bound", *group.curve("bound"), dashed))
    return [Panel("iterations", "f(x) − f*", curves, x_log=True, y_log=True)]


_STUDIES: dict[str, tuple[Callable[[Sequence[Group]], list[Panel]], str]] = {
    "temperature": (_temperature, "Solution and gradient along the iterations"),
    "p": (_norms, "The norm"),
    "step-size": (_rules, "Step-size rules"),
    "annealing": (_annealing, "Annealing period T and start"),
    "batch": (_batches, "Time a problem against the batch size"),
    "gradient": (_gradients, "Unrolled against implicit gradient"),
    "theorem": (_theorem, "Theorem 1's bound against the measured gap"),
}
