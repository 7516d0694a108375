"""The numbers in tables are those of the CSV files beside the records that they are made from."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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
    "no layer": "none",
    "dfwlayer (exact)": "dfwlayer",
    "radial scaling": "radial",
    "DFW as published": "dfw-paper",
    "OptNet": "optnet",
    "Alt-Diff": "alt-diff",
    "CvxpyLayer": "cvxpylayers",
    "DFW, annealed": "dfw-annealed",
}
SIZES = (500, 1000, 2000)


def text_of(page):
    """A page of the documentation, or README.md."""
    return ((ROOT if page == "README.md" else DOCS) / page).read_text(encoding="utf-8")


def tables(page):
    """The tables of a page: the first cell of the header, and rows as lists of plain texts."""
    found, rows = [], None
    for line in text_of(page).splitlines():
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
                if printed != "not reached":
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


def test_every_system_in_processor_time_is_that_on_record():
    record = {(r["label"], int(r["n"])): r for r in data("reproduce/processor.csv")}
    rows = own_rows("reproduce.md", "system", "n = 500, five seeds")
    assert {label for label, *_ in rows} == {label for label, _ in record}
    for label, *cells, _ in rows:
        for n, cell in zip((500, 1000), cells, strict=True):
            own = record[label, n]
            mean, std, error, cosine = numbers(cell.replace("e+", "e"))
            for printed, name in (
                (mean, "seconds_mean"),
                (std, "seconds_std"),
                (error, "error_mean"),
                (cosine, "cosine_mean"),
            ):
                assert agrees(printed, own[name]), (label, n, name)


def test_every_system_on_one_problem_of_a_kind_is_that_on_record():
    record = {(r["family"], int(r["n"]), r["label"]): r for r in data("reproduce/table1.csv")}
    every = own_rows("reproduce.md", "system", "n = 500, five seeds")
    compared = [("paper", 2000, label, last) for label, *_, last in every]
    for family in ("active", "ill"):
        for label, *cells in own_rows("reproduce.md", "system", f"`{family}`, n = 500"):
            compared += [(family, n, label, cell) for n, cell in zip(SIZES, cells, strict=True)]
    assert len(compared) == 7 * len({key[2] for key in record})
    for family, n, label, cell in compared:
        own = record.get((family, n, label))
        if cell == "not reached":
            assert own is None or own["status"] == "pending"
            continue
        if cell == "over 120 s":
            assert "time limit" in own["status"]
            assert "over 120 s" in own["detail"] or own["detail"].startswith("a call took ")
            continue
        for printed, name in zip(
            numbers(cell), ("seconds_mean", "error_mean", "cosine_mean"), strict=True
        ):
            assert agrees(printed, own[name]), (family, n, label, name)


def test_no_cell_of_the_reproduction_is_a_hole():
    cells = [cell for _, rows in tables("reproduce.md") for row in rows for cell in row]
    assert not [cell for cell in cells if "not run" in cell or re.search(r"over (?!120 s)\d", cell)]


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
            if not printed:  # it says why there is no number
                assert own[column] == "", (cells[0], title, cell)
                continue
            assert agrees(printed[0], own[column], factor), (cells[0], title, cell, own[column])
            if "±" in cell and name == "imitation" and column in HALVES:
                assert agrees(printed[1], own[HALVES[column]]), (cells[0], title, cell)
            compared += 1
    assert compared >= 4 * len(rows) > 0


def seconds_of(text):
    """A time with its unit; None where there is none."""
    found = re.search(r"([\d.]+) (ms|s)\b", text)
    return (found[1], 1e3 if found[2] == "ms" else 1.0) if found else None


def own_rows(page, *head):
    """The rows of the one table of a page whose header begins like this."""
    (rows,) = [rows for found, rows in tables(page) if tuple(found[: len(head)]) == head]
    return rows


LARGE = ["dfwlayer", "jaxopt", "dfw"]


def large_tables():
    """Those of large problems, each row with the problem, the system, and a cell."""
    for head, rows in tables("benchmarks.md"):
        if head[0] == "n, family":
            yield [
                (int(problem.split(", ")[0]), problem.split("`")[1], system, cell)
                for problem, *cells in rows
                for system, cell in zip(LARGE, cells, strict=False)
            ]


def test_large_problems_are_those_on_record():
    record = {(r["family"], int(r["n"]), r["system"]): r for r in data("bench/bench.csv")}
    times, errors = large_tables()
    assert len(times) == len(errors) == len(record) - len({key[:2] for key in record})
    for n, family, system, cell in times:
        own = record[family, n, system]
        time, ratio = cell.split(", ")
        assert agrees(*scaled(time, own["seconds"])), (family, n, system)
        assert agrees(ratio.strip("×"), own["ratio"]), (family, n, system)
    for n, family, system, cell in errors:
        own = record[family, n, system]
        for printed, name in zip(
            cell.split(", "), ("error", "gradient_error", "cosine"), strict=True
        ):
            assert agrees(printed, own[name]), (family, n, system, name)


def scaled(printed, value):
    """The arguments of `agrees` for a time that is printed with a unit."""
    number, factor = seconds_of(printed)
    return number, value, factor


def small_record():
    found = {}
    for row in data("bench/small.csv"):
        size = "one" if row["count"] == "1" else row["count"]
        found[f"{row['set']}, {size}×{row['n']}", row["system"]] = row
    return found


SMALL = {
    "tensor operations": "dfwlayer-eager",
    "PIQP": "piqp",
    "DAQP": "daqp",
    "PIQP, x only": "piqp",
    "DAQP, x only": "daqp",
}


def test_small_problems_are_those_on_record():
    record = small_record()
    found = [(h[1:], r) for h, r in tables("benchmarks.md") if h[0] == "set, size"]
    assert len(found) == 2
    for systems, rows in found:
        for problem, *cells in rows:
            both = {}
            for system, cell in zip(systems, cells, strict=True):
                own = record[problem, SMALL.get(system, system)]
                *first, forward = cell.split(", ")
                assert agrees(forward, own["forward_seconds"], 1e3), (problem, system)
                assert bool(first) == bool(own["both_seconds"])
                if first:
                    both[system] = float(own["both_seconds"])
                    assert agrees(first[0], own["both_seconds"], 1e3), (problem, system)
            assert min(both, key=both.get) in bold(problem, systems), problem


def bold(problem, systems):
    """The systems of a line whose entry is printed in bold."""
    page = text_of("benchmarks.md").splitlines()
    (line,) = [line for line in page if line.startswith(f"| {problem} |")]
    cells = line.strip("|").split("|")[1:]
    return [system for system, cell in zip(systems, cells, strict=True) if "**" in cell]


def test_the_largest_errors_of_small_problems_are_those_on_record():
    record = list(small_record().values())
    for label, *cells in own_rows("benchmarks.md", "system", "error of x", "gradient error"):
        own = [row for row in record if row["system"] == SMALL.get(label, label)]
        for name, cell in zip(("error", "gradient_error", "violation"), cells, strict=True):
            if numbers(cell):
                assert agrees(cell, max(float(row[name] or 0) for row in own)), (label, name)


def test_lasso_fits_are_those_on_record():
    record = {(r["problem"], r["system"]): r for r in data("bench/lasso.csv")}
    (table,) = [(h, r) for h, r in tables("benchmarks.md") if h[:2] == ["problem", "dfwlayer"]]
    systems, rows = table[0][1:], table[1]
    for problem, *cells in rows:
        for system, cell in zip(systems, cells, strict=True):
            if cell == "not run":
                assert (problem.strip("`"), system) not in record
            else:
                own = record[problem.strip("`"), system]
                time, gap = cell.split(", ")
                assert agrees(*scaled(time, own["forward_seconds"])), (problem, system)
                assert agrees(gap, own["gap"]), (problem, system)


def test_the_gpu_is_that_on_record():
    content = json.loads((DOCS / "results/bench/gpu.json").read_text(encoding="utf-8"))
    record = {
        (row["count"], row["n"], f"{row['programs'] * 1e3:.2f}"): row for row in content["rows"]
    }
    pages = [rows for head, rows in tables("benchmarks.md") if head[:2] == ["set", "B × n"]]
    *rows, floor = pages[0]
    assert len(rows) == len(record)
    for label, size, programs, tensors, error, gradient_error in rows:
        count, n = map(int, size.split(" × "))
        own = record[count, n, seconds_of(programs)[0]]
        assert agrees(*scaled(tensors, own["tensors"])), label
        assert agrees(error, own["error"]), label
        assert agrees(gradient_error, own["gradient_error"]), label
    assert agrees(*scaled(floor[2], content["floor"]))
