"""Tables in docs/ are made from docs/results, and sentences tell what follows from it."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

pytest.importorskip("rich")

from dfwlayer_bench.recorded import TABLES, compared
from dfwlayer_bench.recorded.texts import record, rows_by
from repository import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def words(page: str) -> str:
    """The page with single blanks, wherever its lines end."""
    path = ROOT / page if page == "README.md" else DOCS / page
    return " ".join(path.read_text(encoding="utf-8").split())


def test_tables_are_those_of_the_records() -> None:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        right, names = compared(text)
        assert right == text, f"{page.name}: python -m dfwlayer_bench.recorded --write"
        found += names
    assert sorted(found) == sorted(TABLES)


def test_another_number_is_seen() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    row = re.search(r"^\| 500, `paper` \| (\S+)", text, re.MULTILINE)
    assert row is not None
    changed = text[: row.start(1)] + "9.99" + text[row.end(1) :]
    assert compared(changed)[0] == text


def test_no_cell_of_a_table_of_measurements_is_empty() -> None:
    """It holds a number, a limit, or why it has none; a corner above names may be empty."""
    for name, make in TABLES.items():
        header, rows = make()
        for row in rows:
            assert len(row) == len(header), name
            assert all(cell.strip() not in ("", "—", "–", "None", "nan") for cell in row), (
                name,
                row,
            )


def test_records_that_pages_link_to_say_their_command() -> None:
    linked = set()
    for page in PAGES:
        linked |= set(re.findall(r"\((results/[\w/]+\.json)\)", page.read_text(encoding="utf-8")))
    for path in linked:
        content = record(str(Path(path).relative_to("results")))
        assert "command" in content or path.endswith(("gpu.json", "scaling.json")), path


# ratios that sentences tell ----------------------------------------------------------------------


def large(family: str, n: int, system: str, key: str = "seconds") -> float:
    return float(rows_by("bench/bench.json", "family", "n", "system")[family, n, system][key])


def against_ours(family: str, n: int, system: str) -> float:
    return large(family, n, system) / large(family, n, "dfwlayer")


def small(name: str, count: int, n: int, system: str, key: str = "both_seconds") -> float:
    row = rows_by("bench/small.json", "set", "count", "n", "system")[name, count, n, system]
    return float(row[key])


def quotient(name: str, count: int, n: int, system: str, key: str = "both_seconds") -> float:
    return small(name, count, n, system, key) / small(name, count, n, "dfwlayer", key)


def span(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def fastest(name: str, count: int, n: int) -> float:
    """How many times as long the next best system with gradients takes."""
    systems = ["jaxopt"] if name in ("l1", "l2") else ["jaxopt", "qpax"]
    return min(quotient(name, count, n, system) for system in systems)


SIZES = (500, 1000, 2000)
SETS = ("l1", "l2", "box", "simplex", "capped-simplex")
FLAT = SETS[2:]


def floor(system: str) -> str:
    ratio = large("active", 2000, system, "ratio")
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def imitation(task: str, key: str, layer: str, other: str) -> float:
    rows = {row["layer"]: row for row in record(f"robotics/{task}/imitation.json")["rows"]}
    return float(rows[layer][key] / rows[other][key])


def reproduced(record_: str, n: int, system: str) -> float:
    """Mean seconds on the paper's problems."""
    rows = rows_by(f"reproduce/{record_}.json", "family", "n", "system")
    return float(rows["paper", n, system]["seconds"]["mean"])


def every(system: str) -> list[float]:
    """Against this library's time, at n = 500, 1000 and 2000."""
    where = {500: "processor", 1000: "processor", 2000: "table1"}
    return [
        reproduced(name, n, system) / reproduced(name, n, "dfwlayer") for n, name in where.items()
    ]


def lasso(problem: str, system: str) -> float:
    rows = rows_by("bench/lasso.json", "problem", "system")
    seconds = [rows[problem, name]["forward_seconds"] for name in (system, "dfwlayer")]
    return float(seconds[0] / seconds[1])


def gap(problem: str, system: str) -> str:
    return f"{rows_by('bench/lasso.json', 'problem', 'system')[problem, system]['gap']:.0e}"


def fastest_fits() -> str:
    """On how many problems this library takes the least time."""
    best: dict[str, tuple[float, str]] = {}
    for (problem, system), row in rows_by("bench/lasso.json", "problem", "system").items():
        mine = (row["forward_seconds"], system)
        best[problem] = min(best.get(problem, mine), mine)
    return f"{sum(system == 'dfwlayer' for _, system in best.values())} of {len(best)}"


def forth_and_back(problem: str) -> str:
    """Both passes of this library, in ms."""
    seconds = rows_by("bench/lasso.json", "problem", "system")[problem, "dfwlayer"]["both_seconds"]
    return f"{1e3 * seconds:.0f} ms"


def followed(variant: str, n: int) -> list[dict[str, str]]:
    """The rows of the cosine study, one for each seed."""
    with (DOCS / "results/reproduce/cosine.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "paper"]
    return [row for row in rows if (row["variant"], row["n"]) == (variant, str(n))]


def gradient_study(family: str, variant: str, digits: int) -> str:
    """The mean cosine after 300 steps."""
    with (DOCS / "results/reproduce/studies.csv").open(encoding="utf-8", newline="") as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["study"], row["family"], row["quantity"]) == ("gradient", family, "cosine")
            and row["variant"] == f"{variant}, 300 steps"
        )
    return f"{float(row['mean']):.{digits}f}"


def cells(page: str, header: str) -> list[list[str]]:
    """The rows of the first table whose header begins so, as texts."""
    table, *_ = re.findall(
        rf"^\| {re.escape(header)}[^\n]*\n\|[- |]*\n((?:\|.*\n)+)",
        (DOCS / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def listed(values: list[float], digits: int = 1) -> str:
    *most, last = (f"{value:.{digits}f}" for value in values)
    return f"{', '.join(most)} and {last}"


def statements() -> list[tuple[str, str]]:
    mild = [(family, n) for family in ("paper", "active") for n in SIZES]
    ratios = {n: [against_ours(f, m, "jaxopt") for f, m in mild if m == n] for _, n in mild}
    ill = [against_ours("ill", n, "jaxopt") for n in SIZES]
    floors = [large(family, n, "dfwlayer", "ratio") for family, n in mild]
    floors += [large("ill", n, "dfwlayer", "ratio") for n in (500, 1000)]
    published = [against_ours(family, 2000, "dfw") for family in ("paper", "active", "ill")]
    alone = [quotient(name, 1, 10, "jaxopt") for name in SETS]
    batches = [(s, c, n) for c, n in ((64, 10), (128, 10), (128, 50)) for s in SETS]
    next_best = {key: fastest(*key) for key in batches}
    daqp = [quotient(s, c, 10, "daqp", "forward_seconds") for c in (64, 128) for s in FLAT]
    cvxpy = [reproduced("cpu", n, "diffcp") / reproduced("cpu", n, "dfw") for n in SIZES]
    growth = reproduced("cpu", 2000, "dfw") / reproduced("cpu", 500, "dfw")
    slower = reproduced("cpu", 2000, "alt-diff-paper")
    alt_diff = slower / reproduced("cpu", 2000, "dfw")
    outside = max(
        large(f, n, "jaxopt", "violation") for f in ("paper", "active", "ill") for n in SIZES
    )
    over_limit = imitation("hc_o", "mse", "dfwlayer", "none")
    return [
        (
            "README.md",
            f"| {floor('dfwlayer')}; jaxopt {floor('jaxopt')}, the published method "
            f"{floor('dfw')} |",
        ),
        (
            "README.md",
            f"over a box jaxopt takes {quotient('box', 128, 50, 'jaxopt'):.0f} times as long, "
            f"over a simplex {quotient('simplex', 128, 50, 'jaxopt'):.0f}",
        ),
        ("README.md", f"jaxopt takes [{span(alone)} of the time]"),
        ("README.md", f"0 of 200,000; {100 * (1 - over_limit):.0f} % lower"),
        ("why.md", f"take {floor('dfwlayer')} times what two unconstrained"),
        ("why.md", f"jaxopt takes {floor('jaxopt')} times and the published method {floor('dfw')}"),
        ("why.md", f"At n = 500 jaxopt takes {span(ratios[500])} times as long"),
        ("why.md", f"its error is {100 * (1 - over_limit):.0f} % lower than without a layer"),
        (
            "benchmarks.md",
            f"jaxopt takes {span(ratios[2000])} times as long, {ill[2]:.0f} times if P is "
            "ill-conditioned",
        ),
        ("benchmarks.md", f"takes {min(published):.0f} to {max(published):.0f} times"),
        (
            "benchmarks.md",
            f"it takes {span(ratios[500])} times as long as this library at n = 500, "
            f"{span(ratios[1000])} times at 1000, and {span(ratios[2000])} times at 2000; "
            f"on `ill` {ill[0]:.0f}, {ill[1]:.0f} and {ill[2]:.0f} times",
        ),
        (
            "benchmarks.md",
            f"takes {span(floors)} times the floor, and "
            f"{large('ill', 2000, 'dfwlayer', 'ratio'):.1f} times on `ill` at n = 2000",
        ),
        ("benchmarks.md", f"jaxopt takes {span(alone)} of the time"),
        (
            "benchmarks.md",
            f"the next best takes {min(next_best.values()):.1f} to "
            f"{max(next_best.values()):.0f} times as long",
        ),
        ("benchmarks.md", f"10 variables it takes {span(daqp)} times as long"),
        (
            "benchmarks.md",
            f"**fastest** on {fastest_fits()} problems; celer takes {lasso('wine', 'celer'):.2f} "
            f"of the time on `wine`, adelie and skglm {lasso('wine', 'adelie'):.2f} and "
            f"{lasso('wine', 'skglm'):.2f}",
        ),
        (
            "benchmarks.md",
            f"celer takes {lasso('wine', 'celer'):.2f} of this library's time (with a gap of "
            f"{gap('wine', 'celer')} against {gap('wine', 'dfwlayer')}), adelie "
            f"{lasso('wine', 'adelie'):.2f} and skglm {lasso('wine', 'skglm'):.2f}. celer comes "
            f"close on `sparse-path` ({lasso('sparse-path', 'celer'):.1f} times), skglm on "
            f"`correlated` ({lasso('correlated', 'skglm'):.1f}) and `gaussian` "
            f"({lasso('gaussian', 'skglm'):.1f})",
        ),
        ("benchmarks.md", f"| celer | {lasso('wine', 'celer'):.2f} of this library's time on"),
        ("reproduce.md", f"reproduces in part: {listed(cvxpy, 0)} times at n = 500, 1000 and 2000"),
        ("reproduce.md", f"than CvxpyLayer, but {listed(cvxpy, 0)} times"),
        ("reproduce.md", f"grows slowly, {growth:.1f} times from n = 500 to 2000"),
        ("reproduce.md", f"jaxopt comes closest, with {listed(every('jaxopt'))} times"),
        ("reproduce.md", f"reverse mode with {listed(every('alt-diff-reverse'))} times"),
        ("reproduce.md", f"and {alt_diff:.1f} times faster at 2000"),
        *of_the_studies(),
        *of_the_layers(),
        *of_tables_alone(),
        ("why.md", f"takes {imitation('hc_o', 'step_seconds', 'dfwlayer', 'none'):.1f} times as"),
        (
            "why.md",
            f"CvxpyLayer takes {reproduced('cpu', 2000, 'diffcp'):.0f} s (in the paper 482 s), the "
            f"published method {reproduced('cpu', 2000, 'dfw'):.2f} s (0.31 s) and this library's "
            f"default {reproduced('cpu', 2000, 'dfwlayer'):.2f} s",
        ),
        (
            "why.md",
            f"the last two take {reproduced('cuda', 2000, 'dfw'):.2f} s and "
            f"{reproduced('cuda', 2000, 'dfwlayer'):.4f} s",
        ),
        (
            "benchmarks.md",
            f"took {forth_and_back('sparse')} on `sparse`, {forth_and_back('huge')} on `huge` and "
            f"{forth_and_back('correlated-path')} for the 20 radii",
        ),
        ("benchmarks.md", f"jaxopt does by up to {outside:.1e} of its radius"),
    ]


def of_the_studies() -> list[tuple[str, str]]:
    largest = next(r for r in followed("L the largest eigenvalue", 500) if r["seed"] == "500")
    length = f"{float(largest['length']):.0e}".split("e+0")
    before = {
        f"{statistics.fmean(float(row['cosine']) for row in followed(name, n)):.3f}"
        for name in ("τ at least 1/8", "at most 120 steps")
        for n in SIZES
    }
    distances = [float(row["distance"]) for row in followed("at most 120 steps", 500)]
    there = [
        gradient_study(family, variant, digits)
        for variant, digits in (("implicit", 3), ("unrolled", 2))
        for family in ("paper", "active")
    ]
    return [
        (
            "reproduce.md",
            f"to a gradient {length[0]}·10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[int(length[1])]} times too long, after "
            f"{largest['steps']} steps",
        ),
        (
            "reproduce.md",
            f"gives {min(before)} to {max(before)}, and distances of "
            f"{statistics.fmean(distances):.4f} ± {statistics.pstdev(distances):.4f} at n = 500",
        ),
        (
            "reproduce.md",
            f"cosine of {there[0]} on `paper` and {there[1]} on `active`, where the unrolled one "
            f"has {there[2]} and {there[3]}",
        ),
    ]


def layered(problem: str, system: str, other: str = "dfwlayer") -> float:
    rows = rows_by("bench/layers.json", "problem", "system")
    return float(rows[problem, system]["both_seconds"] / rows[problem, other]["both_seconds"])


def of_the_layers() -> list[tuple[str, str]]:
    custom = layered("assignment", "dfwlayer-custom")
    others = [layered("assignment", name, "dfwlayer-custom") for name in ("pyepo", "frank-wolfe")]
    return [
        (
            "benchmarks.md",
            f"`CustomSet` takes {custom:.0f} times as long as `Birkhoff`. PyEPO takes "
            f"{others[0]:.0f} times and plain away steps {others[1]:.0f} times as long",
        ),
        (
            "benchmarks.md",
            f"Πnet on `assignment` ({layered('assignment', 'pinet'):.2f} of its time) and `paths` "
            f"({layered('paths', 'pinet'):.2f})",
        ),
        ("benchmarks.md", f"takes {layered('simplex', 'entmax'):.1f} times as long"),
        (
            "benchmarks.md",
            f"**Perturbed layers** take {layered('assignment', 'perturbed'):.1f} and "
            f"{layered('assignment', 'pyepo-perturbed'):.1f} times as long",
        ),
        ("benchmarks.md", f"({layered('simplex', 'dc3'):.0f} times as long on a simplex)"),
        ("benchmarks.md", f"| {layered('paths', 'pinet'):.2f} of this library's time on `paths`"),
        ("benchmarks.md", f"| {layered('program', 'dc3'):.2f} of the time on its own programs"),
    ]


def of_tables_alone() -> list[tuple[str, str]]:
    """What follows from tables, and from collected programs."""
    times = cells("benchmarks.md", "family, n |")
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for family, ours, jaxopt, _ in times:
        ratios[family.startswith("ill")].append(float(jaxopt) / float(ours))
    alone = {name: cell for name, *cell in cells("benchmarks.md", "set | floor | dfwlayer")}
    both = {name: [cell.split(", ")[0] for cell in row] for name, row in alone.items()}
    quicker = [float(row[2]) / float(row[1]) for row in both.values()]
    least = {name: [cell.split(", ")[-1] for cell in row] for name, row in alone.items()}["box"]
    left = [float(both["box"][2]) - float(both["box"][0]), float(least[3]) - float(least[0])]
    cvxpy = cells("coming_from_cvxpylayers.md", "problem | set | B")
    gains = {
        count: sorted(float(row[5].strip("×")) for row in cvxpy if row[2] == count)
        for count in ("1", "32")
    }
    programs = {row[0]: row for row in cells("benchmarks.md", "system | solved | mean, shift 10 s")}
    piqp, own = programs["PIQP"], programs["dfwlayer"]
    maros = rows_by("bench/maros.json", "problem", "system")
    pilot = maros["QPILOTNO", "dfwlayer"]
    missed = f"{maros['STADAT1', 'dfwlayer']['residual']:.1e}"
    mpc = rows_by("bench/mpc.json", "problem", "system")
    daqp = {problem: row["seconds"] for (problem, system), row in mpc.items() if system == "daqp"}
    slow = [daqp.pop("QUADCMPC3"), daqp.pop("QUADCMPC4")]
    quick = " to ".join(f"{1e3 * bound(daqp.values()):.2f}" for bound in (min, max))
    solved = f"solves {piqp[1]} where this library solves {own[1].split()[0]}"
    return [
        (
            "benchmarks.md",
            f"jaxopt takes {span(ratios[False])} times as long as this library on `paper` and "
            f"`active`, and {min(ratios[True]):.0f} to {max(ratios[True]):.0f} times on `ill`",
        ),
        ("benchmarks.md", f"({span(quicker)} in the last table, by processor time)"),
        ("benchmarks.md", f"would have to be done in {left[0]:.3f} and {left[1]:.3f} ms"),
        (
            "coming_from_cvxpylayers.md",
            f"32 problems are {gains['32'][0]:.0f} to {gains['32'][-2]:.0f} times faster "
            f"(`mpc` {gains['32'][-1]:.0f})",
        ),
        (
            "coming_from_cvxpylayers.md",
            f"Single problems are {gains['1'][1]:.0f} to {gains['1'][-2]:.0f} times faster "
            f"(`mpc` {gains['1'][-1]:.0f}, `monotone` {gains['1'][0]:.0f})",
        ),
        (
            "benchmarks.md",
            f"it takes {slow[0]:.1f} and {slow[1]:.1f} s for these two and {quick} ms",
        ),
        (
            "benchmarks.md",
            f"misses one by {missed.replace('e-0', 'e-')}, the last bit of such a term; QPILOTNO "
            f"ends as {pilot['answer']} after {pilot['seconds']:.1f} s",
        ),
        ("benchmarks.md", f"PIQP takes {piqp[4]} of the time, but {solved}"),
        ("benchmarks.md", f"{piqp[4]} of this library's time on [Maros-Meszaros]"),
        ("README.md", f"PIQP takes {piqp[4]} of the time on [Maros-Meszaros]"),
    ]


def test_no_action_of_the_robots_exceeds_the_limit_with_the_layer() -> None:
    for task in ("hc_o", "r_o03"):
        rows = {row["layer"]: row for row in record(f"robotics/{task}/imitation.json")["rows"]}
        assert rows["dfwlayer"]["violation_rate"] == 0
        assert rows["dfwlayer"]["episode_violation_rate"] == 0


@pytest.mark.parametrize(("page", "sentence"), statements())
def test_sentences_tell_the_ratios_of_the_records(page: str, sentence: str) -> None:
    assert sentence in words(page)
