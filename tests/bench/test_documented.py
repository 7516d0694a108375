"""What README and docs/ tell to run: code, commands, extras, links and pictures."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch
import typer

from dfwlayer_bench import cli
from repository import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# `dfw …` in a line of text, or a line that starts with it, as in a block of commands
COMMAND = re.compile(r"`(dfw [^`\n]+)`|^(?:    )?(dfw (?:.*\\\n)*.*)$", re.MULTILINE)


def test_the_readme_runs_as_printed_and_keeps_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert len(blocks[0].splitlines()) == 11  # ten lines and an empty one
    found: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), found)
    assert "largest norm" in capsys.readouterr().out
    assert bool(found["sol"].converged.all())
    assert float(found["sol"].x.detach().abs().sum(-1).max()) <= 0.3 * (1 + 1e-6)
    assert found["q"].grad is not None
    assert found["radius"].grad is not None
    torques = found["torques"]
    assert torques.shape == (32, 6)
    assert float(torques.detach().abs().max()) <= 0.5
    assert float(torques.detach().abs().sum(-1).max()) <= 1 + 1e-6
    (slope,) = torch.autograd.grad((3 * found["power"] + torques.square().sum()), found["power"])
    assert bool(slope.isfinite())


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 95


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_are_there(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("#"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            own = re.findall(r"\{ ?#([\w-]+) ?\}", path.read_text(encoding="utf-8"))
            assert anchor in {*map(_anchor, heads), *own}, f"{page.name}: {target}"


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"\s+", "-", words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_the_options_they_are_given(page: Path) -> None:
    app = typer.main.get_command(cli.build_app())
    for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
        text = (match[1] or match[2]).replace("\\\n", " ")
        if "…" in text or "..." in text or re.search(r"\b[a-z]+ \|", text):
            continue  # a pattern, no command
        words = shlex.split(text, comments=True)[1:]
        command: Any = app
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if words:
            command.make_context(text, words)


def test_extras_that_are_to_be_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in PAGES:
        asked = re.findall(r"(?:dfwlayer|\.)\[([\w,]+)\]'?", page.read_text(encoding="utf-8"))
        wanted = {name for names in asked for name in names.split(",") if not name.isdigit()}
        assert wanted <= set(project["optional-dependencies"]), page.name
