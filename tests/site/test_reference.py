"""The API reference shows every public name."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
MODULES = [
    "dfwlayer",
    "dfwlayer.deploy",
    "dfwlayer.graphs",
    "dfwlayer.sb3",
    "dfwlayer.integrations.batches",
    "dfwlayer.integrations.cvxpy",
    "dfwlayer.integrations.jax",
    "dfwlayer.integrations.numpy",
    "dfwlayer.integrations.sklearn",
]


def documented():
    """The names after `:::` in docs/reference.md."""
    text = (ROOT / "docs/reference.md").read_text()
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def shown(module):
    """What the reference shows of objects in the package of a module, and by which name."""
    found = {}
    for path in documented():
        where, _, name = path.rpartition(".")
        if where.startswith(("dfwlayer.integrations", "dfwlayer.sb3")) and module == "dfwlayer":
            continue
        try:
            found[id(getattr(importlib.import_module(where), name))] = path
        except ImportError:
            continue  # of a package that is not installed
    return found


def test_every_integration_is_looked_at():
    folder = ROOT / "src/dfwlayer/integrations"
    parts = {path.stem for path in folder.iterdir() if not path.stem.startswith("_")}
    inner = {"actor_gradients", "descriptions", "tables", "tickets"}  # reached through the others
    assert parts - inner == {name.rpartition(".")[2] for name in MODULES[3:]}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    found = pytest.importorskip(module, exc_type=ImportError)  # some need another package
    known = shown(module)
    missing = [name for name in found.__all__ if id(getattr(found, name)) not in known]
    assert not missing


def test_everything_in_the_reference_exists_once():
    paths = documented()
    assert len(paths) == len(set(paths)) > 80
