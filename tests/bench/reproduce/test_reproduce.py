from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from dfwlayer_bench import cli
from dfwlayer_bench.bench.plan import Plan
from dfwlayer_bench.bench.store import Store, StoreError
from dfwlayer_bench.report.figures import Curve, Panel, look_of, save_figure
from dfwlayer_bench.report.findings import OTHER_SIZES
from dfwlayer_bench.reproduce.studies.base import (
    Study,
    Variant,
    run_studies,
    saved_records,
)
from dfwlayer_bench.systems import PAPER_SYSTEMS, SYSTEMS

NO_TERMINAL = {"COLUMNS": "80", "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "GITHUB_ACTIONS": None}


def dfw(*words):
    arguments = ["reproduce", *map(str, words)]
    return CliRunner(env=NO_TERMINAL).invoke(cli.build_app(), arguments)


def small(out, *more, trials=2):
    sizes = ["--quick", "--sizes", 6, 9, "--trials", trials, "--steps", 32, "--no-memory"]
    return [*sizes, "--family", "paper", "active", "--out", out, *more]


def cells(out):
    return {path.stem: path.read_bytes() for path in (out / "cells").glob("*.json")}


# the whole command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Everything once, with a rival that is not installed."""
    out = tmp_path_factory.mktemp("reproduce") / "made" / "by the run"
    known = SYSTEMS["diffcp"]
    SYSTEMS["diffcp"] = replace(known, packages=("surely-not-installed",))
    try:
        systems = ["--systems", "diffcp", "alt-diff-paper", "dfw", "dfwlayer"]
        result = dfw("all", *small(out, *systems, trials=1))
    finally:
        SYSTEMS["diffcp"] = known
    assert result.exit_code == 0, result.output
    return result, out, json.loads((out / "results.json").read_text())


def test_the_run_is_on_record(run):
    result, _, content = run
    assert content["command"].startswith("dfw reproduce all --sizes 6 9 --trials 1 --family paper")
    assert content["machine"]["versions"]["torch"] == version("torch")
    assert content["machine"]["cpu"]
    found = {(row["family"], row["n"], row["system"]): row for row in content["rows"]}
    assert len(found) == 2 * 2 * 4
    assert "tol=0.0001" in found["paper", 9, "dfw"]["settings"]
    studies = {record["study"] for record in content["records"]}
    expected = {
        "temperature",
        "p",
        "step-size",
        "annealing",
        "batch",
        "gradient",
        "theorem",
        "cosine",
    }
    assert studies == expected
    assert all(record["status"] == "ok" for record in content["records"]), result.output
    assert all(record["n"] == 9 for record in content["records"])  # the middle of the sizes


def test_the_default_method_is_exact_and_the_published_one_is_not(run):
    _, _, content = run
    for row in content["rows"]:
        if row["family"] == "active" and row["system"] == "dfwlayer":
            assert row["error"]["mean"] < 1e-5
        if row["family"] == "active" and row["system"] == "dfw":
            assert row["error"]["mean"] > 1e-2
            assert row["max_violation"] < 1e-6


def test_a_missing_rival_is_a_cell_that_says_so(run):
    _, out, content = run
    missing = [row for row in content["rows"] if row["system"] == "diffcp"]
    assert {row["status"] for row in missing} == {"missing"}
    told = "not installed: pip install surely-not-installed"
    assert all(told in row["detail"] for row in missing)
    assert told in (out / "report.html").read_text()
    assert told in (out / "results.md").read_text()
    faster = next(f for f in content["findings"] if "faster than CvxpyLayer" in f["claim"])
    assert faster["verdict"] == OTHER_SIZES  # 6 and 9 variables
    assert told in faster["evidence"]


def test_tables_and_figures_can_be_read(run):
    _, out, content = run
    with (out / "systems.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(content["rows"])
    ours = next(r for r in rows if (r["family"], r["n"], r["system"]) == ("paper", "9", "dfw"))
    found = next(
        r for r in content["rows"] if (r["family"], r["n"], r["system"]) == ("paper", 9, "dfw")
    )
    assert float(ours["seconds_mean"]) == pytest.approx(found["seconds"]["mean"])
    with (out / "curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert {row["step"] for row in curves if row["study"] == "temperature"} >= {"1", "10", "30"}
    with (out / "studies.csv").open() as file:
        assert any(row["quantity"] == "memory_mb" for row in csv.DictReader(file))
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) == 2 * 9  # time, accuracy and seven studies, for two families
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(picture.with_suffix(".svg")).getroot().tag.endswith("svg")


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.outside, self.images, self.scripts = [], 0, 0

    def handle_starttag(self, tag, attributes):
        self.scripts += tag in ("script", "iframe", "object", "embed")
        self.images += tag == "img"
        for name, value in attributes:
            inside = value is not None and value.startswith(("#", "data:"))
            if name in ("src", "href", "srcset", "data") and not inside:
                self.outside.append(value)


def test_the_report_needs_nothing_beside_it(run):
    _, out, _ = run
    text = (out / "report.html").read_text()
    links = Links()
    links.feed(text)
    assert links.outside == []
    assert links.scripts == 0
    assert links.images == len(list(out.glob("*.png")))
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert 'name="viewport"' in text


def test_the_report_says_how_often_the_constraint_is_active(run):
    _, out, content = run
    active = [
        cell["constraint_active"]
        for cell in content["cells"]
        if (cell["family"], cell["n"], cell["system"]) == ("paper", 9, "dfw")
    ]
    told = f"n\u00a0=\u00a09: {sum(active)} of {len(active)}"
    assert told in (out / "report.html").read_text()


def test_one_size_and_one_trial_are_enough_for_every_figure(tmp_path):
    options = ["--quick", "--sizes", 8, "--trials", 1, "--family", "active", "--no-memory"]
    result = dfw("table1", *options, "--systems", "dfwlayer", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "time-active.png").stat().st_size > 0
    assert (tmp_path / "accuracy-active.png").stat().st_size > 0


@pytest.mark.parametrize("value", [10.0, 0.1, 0.001, 0.003482796261565146])
def test_a_single_value_on_a_logarithmic_axis_has_room_around_it(tmp_path, value):
    curve = Curve("one", [8], [value], look_of(0), [value], [value])
    paths = save_figure(tmp_path, "one", [Panel("n", "time", [curve], x_log=True, y_log=True)])
    assert all(path.stat().st_size > 0 for path in paths)


PROBE = """() => ({
  page: document.documentElement.scrollWidth, window: innerWidth,
  images: [...document.images].map(i => i.complete && i.naturalWidth > 0),
  text: parseFloat(getComputedStyle(document.querySelector("td")).fontSize),
  cards: document.querySelectorAll(".finding").length,
  contents: document.querySelector("nav").getBoundingClientRect().toJSON(),
  links: [...document.querySelectorAll("nav a")].map(a => Boolean(document.querySelector(a.hash))),
  headings: document.querySelectorAll("h2").length,
  cut: [...document.querySelectorAll(".scroll")].filter(e => e.querySelector("tr").cells.length < 3
    && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)})"""


@pytest.mark.parametrize("width", [390, 1600])
def test_the_report_opens_in_a_browser(run, browser, width):
    """On a phone and on a wide screen: all images load, only tables scroll, contents stay."""
    _, out, content = run
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((out / "report.html").as_uri())
    page.mouse.wheel(0, 4000)
    page.wait_for_function("scrollY > 1000")
    seen = page.evaluate(PROBE)
    page.close()
    assert seen["window"] == width
    assert seen["page"] <= width
    assert len(seen["images"]) == len(list(out.glob("*.png")))
    assert all(seen["images"])
    assert seen["text"] >= 12
    assert seen["cut"] == []  # two columns fit every screen
    assert seen["cards"] == len(content["findings"])
    assert len(seen["links"]) == seen["headings"]
    assert all(seen["links"])
    assert seen["contents"]["top"] >= 0  # still in view, at the side or in one line at the top
    assert seen["contents"]["bottom"] <= 900
    assert seen["contents"]["height"] <= (60 if width == 390 else 900)


# interruption and errors -------------------------------------------------------------------------


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    words = [*small(tmp_path / "out", "--systems", "dfw", "dfwlayer", "alt-diff-paper")]
    script = "from dfwlayer_bench.cli import main; main()"
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "reproduce", "table1", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None and len(cells(out)) < 4:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        ended = process.wait()
    assert ended == -signal.SIGKILL, f"the run ended by itself with {ended}"
    before = {
        name: text for name, text in cells(out).items() if len(json.loads(text)["seconds"]) == 1
    }
    assert 0 < len(before) < 24
    times = {name: (out / "cells" / f"{name}.json").stat().st_mtime_ns for name in before}
    assert not (out / "report.html").exists()
    result = dfw("table1", *words)
    assert result.exit_code == 0, result.output
    after = cells(out)
    assert len(after) == 24
    assert all(after[name] == before[name] for name in before)
    for name, stamp in times.items():
        assert (out / "cells" / f"{name}.json").stat().st_mtime_ns == stamp
    assert (out / "report.html").exists()


def test_an_interruption_leaves_a_report_of_what_is_there(tmp_path, monkeypatch):
    ready = SYSTEMS["dfwlayer"].prepare
    calls = []

    def prepare(problem):
        calls.append(problem.n)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ready(problem)

    monkeypatch.setitem(SYSTEMS, "dfwlayer", replace(SYSTEMS["dfwlayer"], prepare=prepare))
    words = small(tmp_path, "--systems", "dfwlayer")
    result = dfw("accuracy", *words)
    assert result.exit_code == 130
    assert "run the same command again" in result.output
    assert "dfwlayer (auto)" in (tmp_path / "report.html").read_text()
    assert dfw("accuracy", *words).exit_code == 0
    assert len(calls) == 1 + 2 * 2 * 2  # only the interrupted problem was begun twice


def test_an_unwritable_folder_is_named_before_any_work(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")

    def work(problem):
        raise AssertionError("work was begun")

    monkeypatch.setitem(SYSTEMS, "dfwlayer", replace(SYSTEMS["dfwlayer"], prepare=work))
    result = dfw("table1", *small(blocked / "under", "--systems", "dfwlayer"))
    assert result.exit_code == 2
    assert "--out: cannot write" in result.output


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here to stand for a full disk")
def test_a_full_disk_is_told_and_what_is_saved_stays(tmp_path):
    words = small(tmp_path, "--systems", "dfwlayer")
    (tmp_path / "report.html").symlink_to(FULL)
    result = dfw("accuracy", *words)
    assert result.exit_code == 2
    told = result.output.replace("\n", " ")
    assert "--out: could not write the report" in told
    assert "No space left on device" in told
    before = cells(tmp_path)
    assert len(before) == 8
    (tmp_path / "report.html").unlink()
    assert dfw("accuracy", *words).exit_code == 0
    assert cells(tmp_path) == before
    store = Store(tmp_path)
    (tmp_path / "cells" / "some.tmp").symlink_to(FULL)
    with pytest.raises(StoreError, match=r"No space left on device.*run the same command again"):
        store.write("some", {"x": 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [("--sizes", "many"), ("--family", "nobody"), ("--systems", "floor"), ("--dtype", "int8")],
)
def test_bad_options_are_named(tmp_path, option, value):
    result = dfw("table1", "--out", tmp_path, option, value)
    assert result.exit_code == 2
    assert option in result.output


def test_importing_the_command_does_not_import_torch():
    code = "import sys, dfwlayer_bench.reproduce.command; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    run = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert run.returncode == 0


# studies: one that fails, one that is slow, settings that change ---------------------------------


def plan(**changes):
    one_problem = ("active",), (8,), (), 1, 1, 100
    return replace(Plan(*one_problem, "float64", "cpu", "sum", 60.0, False, None), **changes)


def silent(text, finished):
    pass


def opened(folder):
    store = Store(folder)
    store.open({"seed": 1}, fresh=False)
    return store


def test_a_variant_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path):
    def broken(case):
        raise RuntimeError("out of luck")

    def endless(case):
        while True:
            time.sleep(0.001)

    def fine(case):
        return {"x": 1.0, "y": [math.nan, 2.0]}

    runs = (broken, endless, fine)
    study = Study("some", tuple(Variant(run.__name__, run.__name__, {}, run) for run in runs))
    store = opened(tmp_path)
    records = run_studies(plan(time_limit=0.2), [study], store, silent)
    assert [record.status for record in records] == ["failed", "time limit", "ok"]
    assert "out of luck" in records[0].detail
    assert records[2].values == {"x": 1.0, "y": [None, 2.0]}
    assert saved_records(plan(time_limit=0.2), [study], store) == records


def test_a_record_is_run_again_only_if_its_settings_changed(tmp_path):
    ran = []

    def study(setting):
        def run(case):
            ran.append(setting)
            return {"x": 1.0}

        return Study("some", (Variant("only", "only", {"setting": setting}, run),))

    store = opened(tmp_path)
    for setting in (1, 1, 2):
        run_studies(plan(), [study(setting)], store, silent)
    assert ran == [1, 2]


def test_no_two_systems_of_a_figure_look_the_same():
    looks = {look_of(index) for index in range(len(SYSTEMS) + len(PAPER_SYSTEMS))}
    assert len(looks) == len(SYSTEMS) + len(PAPER_SYSTEMS) > 12
