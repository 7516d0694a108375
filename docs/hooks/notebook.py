"""Run docs/tutorial.ipynb: `python docs/hooks/notebook.py`; with --write, keep what it prints."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[1] / "tutorial.ipynb"


def main() -> None:
    """Every cell in order; the first that fails ends the program with its error."""
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=300, record_timing=False).execute()
    outputs = sum(len(cell.get("outputs", ())) for cell in notebook.cells)
    print(f"{PATH.name}: {len(notebook.cells)} cells, {outputs} outputs")
    if "--write" in sys.argv[1:]:
        nbformat.write(notebook, PATH)


if __name__ == "__main__":
    main()
