"""Commands say how far they are where the output is no terminal, and why a row is empty."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console
from rich.progress import Progress, TextColumn
from typer.testing import CliRunner

from dfwlayer_bench import cli
from dfwlayer_bench.bench import probe as probing
from dfwlayer_bench.bench.probe import Probe, Prober
from dfwlayer_bench.report import progress as talk
from dfwlayer_bench.report.document import Document, Section, Table, show
from dfwlayer_bench.systems import SYSTEMS, base

LINE = re.compile(r"^\[(\d+) of (\d+)\] (.*) \((.*)\)$", re.MULTILINE)
NO_TERMINAL = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")) | {"COLUMNS": "80"}
TASK = {
    "system": "floor",
    "family": "active",
    "n": 6,
    "seed": 1,
    "dtype": "float64",
    "device": "cpu",
    "functional": "sum",
    "threads": 1,
}


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(talk.time, "monotonic", made.monotonic)
    return made


def run(*arguments: str) -> Any:
    return CliRunner(env=NO_TERMINAL).invoke(cli.build_app(), list(arguments))


# the lines themselves ----------------------------------------------------------------------------


def test_a_line_for_each_finished_cell_says_the_time_and_what_is_left(clock: Clock) -> None:
    said = io.StringIO()
    with talk.progress(Console(file=said), 4) as report:
        report("first", 0)
        clock.now += 3
        report("first, 2 ms a call", 1)
        clock.now += 5
        report("second, missing", 1)
    assert said.getvalue().splitlines() == [
        "[1 of 4] first, 2 ms a call (3.0 s so far, 3 left, about 9.0 s)",
        "[2 of 4] second, missing (8.0 s so far, 2 left, about 8.0 s)",
    ]


def test_what_is_left_is_not_guessed_from_the_first_of_many_cells(clock: Clock) -> None:
    """The first one may take long, as it compiles, or no time, as it cannot run."""
    said = io.StringIO()
    with talk.progress(Console(file=said, width=200), 40) as report:
        for _ in range(4):
            clock.now += 5
            report("cell", 1)
    assert [" about " in line for line in said.getvalue().splitlines()] == [False] * 3 + [True]


def test_what_was_there_before_does_not_count_for_the_time_left(clock: Clock) -> None:
    said = io.StringIO()
    with talk.progress(Console(file=said), 103) as report:
        report("found", 50)
        report("found", 50)
        clock.now += 60
        report("made", 1)
    assert (
        said.getvalue().splitlines()[-1] == "[101 of 103] made (60 s so far, 2 left, about 2 min)"
    )


def test_steps_are_told_now_and_then_and_at_the_end(clock: Clock) -> None:
    said = io.StringIO()
    with talk.bar(Console(file=said), TextColumn("loss {task.fields[loss]:.1f}")) as shown:
        task = shown.add_task("training", total=100, loss=1.0)
        for step in range(100):
            clock.now += 0.3
            shown.update(task, advance=1, loss=step / 10)
    lines = LINE.findall(said.getvalue())
    assert 3 <= len(lines) <= 5
    assert lines[0][2] == "training, loss 3.3"
    assert lines[-1][:3] == ("100", "100", "training, loss 9.9")


def test_long_silence_is_broken_by_what_is_at_work(clock: Clock) -> None:
    said = io.StringIO()
    with talk.progress(Console(file=said), 2) as report:
        report("first", 0)
        clock.now += 30
        report("second", 0)
    assert said.getvalue() == "[0 of 2] now second (30 s so far, 2 left)\n"


def test_a_call_that_takes_long_is_told_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "SILENCE", 0.05)
    monkeypatch.setattr(talk, "TICK", 0.01)
    said = io.StringIO()
    with talk.progress(Console(file=said), 2) as report:
        report("first", 0)
        report("second, a long call", 0)
        end = time.monotonic() + 30
        while "now" not in said.getvalue() and time.monotonic() < end:
            time.sleep(0.01)  # nothing is reported meanwhile
    assert said.getvalue().startswith("[0 of 2] now second, a long call (")


def test_phases_that_follow_each_other_have_times_of_their_own(clock: Clock) -> None:
    said = io.StringIO()
    with talk.bar(Console(file=said), every=0) as shown:
        first, second = (shown.add_task(name, total=2) for name in ("first", "second"))
        for task in (first, second):
            for _ in range(2):
                clock.now += 10
                shown.update(task, advance=1)
    assert [told for *_, told in LINE.findall(said.getvalue())] == [
        "10 s so far, 1 left, about 10 s",
        "20 s so far",
    ] * 2


def test_a_terminal_has_a_bar() -> None:
    assert isinstance(talk.bar(Console(file=io.StringIO(), force_terminal=True)), Progress)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (100, "100 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_times_as_people_say_them(seconds: float, text: str) -> None:
    assert talk.lasting(seconds) == text


# the commands ------------------------------------------------------------------------------------


def test_bench_in_a_pipe_talks_while_it_works(tmp_path: Path) -> None:
    code = (
        "from dataclasses import replace; from dfwlayer_bench import cli, systems\n"
        "row = replace(systems.SYSTEMS['jaxopt'], packages=('surely-not-installed',))\n"
        "systems.SYSTEMS['jaxopt'] = row; cli.main()"
    )
    words = ["bench", "--quick", "--sizes", "6", "--family", "active", "--repeats", "1"]
    words += ["--systems", "floor", "jaxopt", "--out", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    first, *lines = found.stderr.splitlines()
    assert re.fullmatch(r"A quick run: up to \d+ s on 2 cores", first)
    cells = LINE.findall("\n".join(lines))
    assert [(done, total) for done, total, *_ in cells] == [("1", "2"), ("2", "2")]
    assert "jaxopt, missing: not installed: pip install surely-not-installed" in cells[0][2]
    assert re.search(r"floor, [\d.]+ ms a call$", cells[1][2])
    assert (
        "missing: not installed: pip install surely-not-installed" in found.stdout
    )  # in the table, too


def test_reproduce_judges_the_papers_sizes_alone_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = base.System("jaxopt", "jaxopt", lambda _: None, ("surely-not-installed",))  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(SYSTEMS, "jaxopt", gone)
    chosen = ["--systems", "dfw", "alt-diff-paper", "jaxopt", "--family", "paper", "--no-memory"]
    size = ["--sizes", "6", "--trials", "1", "--repeats", "1"]
    found = run("reproduce", "table1", *size, *chosen, "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    assert len(LINE.findall(found.stderr)) == 3
    assert "does not reproduce" not in found.stdout
    told = found.stdout.replace("\n", " ")
    assert "not measured at these sizes: DFWLayer is faster than Alt-Diff" in told
    assert "jaxopt: missing: not installed: pip install surely-not-installed (n = 6)" in told


def test_fuzz_talks(tmp_path: Path) -> None:
    few = ["--problems", "0", "--gradients", "0", "--bad-inputs", "20"]
    found = run("fuzz", *few, "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    assert "] bad-inputs, 0 failures (" in found.output


def test_notes_of_a_table_are_on_the_terminal() -> None:
    table = Table("times", ["a"], [["1"]], ["Moreau: missing: not installed: moreau (n = 6)"])
    document = Document("", [], "", [], [Section("part", "Part", tables=[table])])
    said = io.StringIO()
    show(document, ["part"], Console(file=said, width=100))
    assert "Moreau: missing: not installed: moreau (n = 6)" in said.getvalue()


# probing a rival ---------------------------------------------------------------------------------


class Recorded(probing._Process):
    """A process that is counted."""

    modes: list[str]

    def __init__(self, mode: str) -> None:
        self.modes.append(mode)
        super().__init__(mode)


def test_packages_are_imported_once_for_all_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    if not probing.FORKS:
        pytest.skip("needs fork")
    Recorded.modes = []
    monkeypatch.setattr(probing, "_Process", Recorded)
    with Prober() as prober:
        for family in ("active", "ill", "ill"):
            found = prober.first({**TASK, "family": family}, 60.0)
            assert found.status == "ok"
            assert found.memory_mb is None or found.memory_mb < 100
        assert prober({**TASK, "n": 0}, 60.0).status == "failed"
        assert prober({**TASK, "n": 9}, 60.0).status == "ok"  # the server has survived that
        assert Recorded.modes == ["serve"]


class Forked:
    """A server whose forks hang."""

    ended = False

    def __init__(self, mode: str) -> None:
        assert mode == "serve"

    def ask(self, task: dict[str, Any]) -> None: ...

    def phases(self, time_limit: float) -> Probe:
        return Probe("time limit", f"build: over {time_limit:g} s")

    def end(self) -> None: ...


@pytest.mark.parametrize("alone", ["ok", "failed"])
def test_what_fails_in_a_fork_is_tried_alone(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def probe(task: dict[str, Any], time_limit: float) -> Probe:
        tried.append(task["n"])
        return Probe(alone)

    monkeypatch.setattr(probing, "FORKS", True)
    monkeypatch.setattr(probing, "_Process", Forked)
    monkeypatch.setattr(probing, "probe", probe)
    with Prober() as prober:
        assert prober({**TASK, "n": 1}, 1.0).status == alone
        assert prober._server is None  # what hangs has ended
        again = prober({**TASK, "n": 2}, 1.0)
    assert again.status == ("ok" if alone == "ok" else "time limit")
    assert tried == ([1, 2] if alone == "ok" else [1])
