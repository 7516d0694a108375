"""What is said twice: the version, the oldest versions that will do, and which files there are."""

import re
import tomllib
from pathlib import Path

import pytest

import dfwlayer

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version():
    assert "version" in PROJECT["project"]["dynamic"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{dfwlayer.__version__}"\n' in source.read_text()
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [dfwlayer.__version__]


def pins(name):
    """What a file of constraints asks for, by the name of the package."""
    lines = (ROOT / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def release(version):
    """1.26.0 as (1, 26)."""
    return tuple(map(int, re.sub(r"(\.0)+$", "", version).split(".")))


def bounds(*extras):
    """The lower bound of everything that is required for the extras."""
    project = PROJECT["project"]
    required = list(project["dependencies"])
    for extra in extras:
        required += project["optional-dependencies"][extra]
    found = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in required)
    return {match[1].lower(): match[2] for match in found if match}


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = pins("constraints-oldest.txt")
    for package, bound in bounds("cli", "examples", "test").items():
        assert release(oldest[package]) == release(bound), package


@pytest.mark.parametrize("extra", ["cli", "test", "dev", "docs", "examples"])
def test_the_pinned_versions_are_allowed(extra):
    pinned = pins("constraints.txt")
    for package, bound in bounds(extra).items():
        assert release(pinned[package]) >= release(bound), package


def listed():
    """The modules that docs/architecture.md lists, by folder."""
    _, text = (ROOT / "docs" / "architecture.md").read_text().split("\n## The files\n")
    folders: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("### "):
            own = folders.setdefault(line.split("`")[1].removeprefix("src/dfwlayer/"), [])
        elif line.startswith("- "):
            own += re.findall(r"`(\w+)`", line.partition(":")[0])
    return folders


def test_the_page_on_architecture_lists_every_module_once():
    source = ROOT / "src" / "dfwlayer"
    there: dict[str, list[str]] = {}
    for path in source.rglob("*.py"):
        folder = path.parent.relative_to(source).as_posix()
        if path.stem != "__init__":
            there.setdefault("" if folder == "." else f"{folder}/", []).append(path.stem)
    found = listed()
    assert found.keys() == there.keys()
    for folder, names in there.items():
        assert sorted(found[folder]) == sorted(names), folder


def test_files_named_on_the_page_on_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*")}
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        assert any(f"/{file}".endswith(f"/{name.strip('/')}") for file in files), name
