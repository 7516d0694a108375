"""The numbers that the pages print are those of the data files beside them."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = {
    "CvxpyLayer (DIFFCP)": "diffcp",
    "the same, LSMR": "diffcp-lsmr",
    "CvxpyLayer (Moreau)": "moreau",
    "QPLayer": "qplayer",
    "Alt-Diff, stopped as in the paper": "alt-diff-paper",
    "Alt-Diff, converged": "alt-diff",
    "Alt-Diff, converged, reverse mode": "alt-diff-reverse",
    "OptNet": "optnet",
    "jaxopt": "jaxopt",
    "DFW as published": "dfw",
    "dfwlayer": "dfwlayer",
}
LAYERS = {
    "none": "none",
    "dfwlayer": "dfwlayer",
    "radial": "radial",
    "DFW as published": "dfw-paper",
    "OptNet": "optnet",
    "Alt-Diff": "alt-diff",
    "CvxpyLayer": "cvxpylayers",
    "DFW, annealed": "dfw-annealed",
}
SIZES = (500, 1000, 2000)


def tables(page):
    """The tables of a page: the first cell of the header, and rows as lists of plain texts."""
    found, rows = [], None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            rows = None
            continue
        cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        if rows is None:
            rows = []
            found.append((cells, rows))
        elif not set(cells[0]) <= set("-: ") or cells[0] == "":
            rows.append(cells)
    return found


def data(name):
    with (DOCS / "results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(text):
    return re.findall(r"−?\d[\d.]*(?:e-?\d+)?", text)


def agrees(printed, value, factor=1.0):
    """Whether a number is the value to the digits that are printed."""
    printed = printed.replace("−", "-")
    head, _, power = printed.partition("e")
    digit = 10.0 ** (int(power or 0) - len(head.partition(".")[2]))
    return abs(float(printed) - factor * float(value)) <= 0.5001 * digit


def test_numbers_are_compared_to_the_digits_printed():
    assert agrees("0.81", 0.8149)
    assert not agrees("0.81", 0.8151)
    assert agrees("2e-07", 2.24e-7)
    assert not agrees("2e-08", 1.46e-8)
    assert agrees("−0.03", -0.0316)


def test_running_times_are_those_on_record():
    record = {(r["family"], r["system"], int(r["n"])): r for r in data("reproduce/cpu.csv")}
    (rows,) = [rows for head, rows in tables("reproduce.md") if "the paper" in head[-1]]
    compared = 0
    for label, *cells, _ in rows:
        for n, cell in zip(SIZES, cells, strict=True):
            own = record["paper", SYSTEMS[label], n]
            if "over" in cell:
                assert "time limit" in own["status"]
                continue
            mean, std = numbers(cell)
            assert agrees(mean, own["seconds_mean"]), (label, n)
            assert agrees(std, own["seconds_std"]), (label, n)
            compared += 1
    assert compared > 20


def test_times_and_errors_where_the_constraint_is_active_are_those_on_record():
    record = {(r["family"], r["system"], int(r["n"])): r for r in data("reproduce/cpu.csv")}
    pages = tables("reproduce.md")
    (times,) = [rows for head, rows in pages if head == ["system", "`active`", "`ill`"]]
    for label, *cells in times:
        for family, cell in zip(("active", "ill"), cells, strict=True):
            for n, printed in zip(SIZES, cell.split(", "), strict=True):
                if printed != "not run":
                    seconds = record[family, SYSTEMS[label], n]["seconds_mean"]
                    assert agrees(printed, seconds), (label, family, n)
    errors = [rows for head, rows in pages if head == ["system", "n = 500", "n = 1000", "n = 2000"]]
    for label, *cells in errors[-1]:
        for n, cell in zip(SIZES, cells, strict=True):
            own = record["active", SYSTEMS[label], n]
            for name, printed in zip(
                ("error_mean", "cosine_mean", "relative_violation"), cell.split(", "), strict=True
            ):
                assert agrees(printed, own[name]), (label, n, name)


def test_the_cosine_study_is_that_on_record():
    record = data("reproduce/cosine.csv")
    (rows,) = [rows for head, rows in tables("reproduce.md") if head.count("seed 500") == 3]
    labels = {"L by their power iteration": "L by power iteration"}
    assert len(rows) == 1 + len({r["variant"] for r in record})
    for label, *cells in rows[1:]:
        for i, n in enumerate(SIZES):
            wanted = labels.get(label, label)
            own = [r for r in record if (r["variant"], int(r["n"])) == (wanted, n)]
            cosines = [float(r["cosine"]) for r in own]
            mean, std = numbers(cells[2 * i])
            assert agrees(mean, statistics.fmean(cosines)), (label, n)
            assert agrees(std, statistics.pstdev(cosines)), (label, n)
            (active,) = [r for r in own if r["active"] == "True"]
            cosine, steps, length = cells[2 * i + 1].split(", ")
            assert agrees(cosine, active["cosine"]), (label, n)
            assert numbers(steps)[0] == active["steps"]
            tau = numbers(steps)[2] if "(" in steps else "16"
            assert 1 / float(active["temperature"]) == float(tau)
            if "10" in length and "·" in length:  # orders of magnitude
                assert float(active["length"]) > 1e4
            else:
                assert float(length) == pytest.approx(float(active["length"]), rel=0.05), (label, n)


LONG = {
    "seeds": ("seeds", 1),
    "steps": ("steps", 1),
    "test MSE": ("mse", 1),
    "its change in the last quarter": ("mse_change", 100),
    "violation rate": ("violation_rate", 100),
    "mean violation": ("mean_violation", 1),
    "return": ("episode_return", 1),
    "violations in the simulator": ("episode_violation_rate", 100),
}
SHORT = {
    "seeds": ("seeds", 1),
    "steps": ("steps", 1),
    "test MSE": ("mse", 1),
    "violation rate": ("violation_rate", 100),
    "CPU time of a training step": ("step_cpu_seconds", 1000),
    "× no layer": ("times_none", 1),
}
HALVES = {"mse": "mse_interval", "episode_return": "episode_return_interval"}


@pytest.mark.parametrize(("number", "folder"), [(0, "hc_o"), (1, "r_o03")])
@pytest.mark.parametrize(
    ("name", "columns", "told_by"),
    [
        ("imitation", LONG, "its change in the last quarter"),
        ("short", SHORT, "× no layer"),
    ],
)
def test_imitations_are_those_on_record(name, columns, told_by, number, folder):
    record = {row["layer"]: row for row in data(f"robotics/{folder}/{name}.csv")}
    pages = [(h, r) for h, r in tables("robotics.md") if h[0] == "last layer" and told_by in h]
    head, rows = pages[number]
    compared = 0
    for cells in rows:
        own = record[LAYERS[cells[0]]]
        for title, cell in zip(head, cells, strict=True):
            if title not in columns or not cell:
                continue
            column, factor = columns[title]
            printed = numbers(cell.replace(",", ""))
            assert agrees(printed[0], own[column], factor), (cells[0], title, cell, own[column])
            if "±" in cell and name == "imitation" and column in HALVES:
                assert agrees(printed[1], own[HALVES[column]]), (cells[0], title, cell)
            compared += 1
    assert compared >= 4 * len(rows) > 0
