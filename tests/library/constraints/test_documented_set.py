"""The set of docs/extending.md as a file of the library, put where the page says."""

import os
import re
import shutil
import subprocess
import sys

from repository import ROOT

EXPORT = "from dfwlayer.constraints.polyhedra.ascending import Ascending"
ASK = "import dfwlayer; print(dfwlayer.solve(dfwlayer.Quadratic(None, -q), dfwlayer.Ascending()).x)"


def test_the_package_can_be_imported_with_the_set_in_it(tmp_path):
    page = (ROOT / "docs" / "extending.md").read_text()
    assert EXPORT in page
    (block,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if "class Ascending" in block
    )
    package = tmp_path / "dfwlayer"
    shutil.copytree(
        ROOT / "src" / "dfwlayer", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    # what blocks before it on the page have imported
    own = "from dataclasses import dataclass\nimport torch\n"
    (package / "constraints" / "polyhedra" / "ascending.py").write_text(own + block)
    for path in (package / "constraints" / "__init__.py", package / "__init__.py"):
        path.write_text(f"{EXPORT}\n{path.read_text()}")  # first of all, where least is there
    found = subprocess.run(
        [sys.executable, "-c", f"import torch; q = torch.tensor([0.9, 0.1, 2.0]); {ASK}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "DFWLAYER_COMPILED": "off"},
    )
    assert found.returncode == 0, found.stderr
    assert "0.5000, 0.5000, 1.0000" in found.stdout
