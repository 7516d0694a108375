"""Code of examples and notebooks on pages, taken from the files that run.

`<!-- code: examples/portfolio.py decide quality -->` in a page shows these functions of the
script (`for`: its first loop) and, folded, all of it. A notebook `NAME.ipynb` in this folder is
the page `NAME.md`, with what its cells printed and drew when it was run last.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LISTING = re.compile(r"^<!-- code: (?P<path>\S+)(?P<names>[\w ]*) -->$", re.MULTILINE)
ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put listings where the page asks for them; links to a notebook lead to its page."""
    markdown = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", markdown)
    return LISTING.sub(lambda match: listing(match["path"], match["names"].split()), markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, and the pictures in it."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb")
        page, pictures = converted(json.loads(notebook.content_string), Path(name).name)
        files.append(File.generated(config, f"{name}.md", content=page))
        for picture, data in pictures.items():
            where = (Path(name).parent / picture).as_posix()
            files.append(File.generated(config, where, content=data))
    return files


def listing(path: str, names: list[str]) -> str:
    """The named functions and classes of a script, or its first loop; then all of it, folded."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    found = {node.name: node for node in tree.body if hasattr(node, "name")}
    loops = [node for node in tree.body if isinstance(node, ast.For)]
    found.update(zip(["for"], loops, strict=False))
    parts = []
    for name in names:
        node = found[name]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    shown = _fence("\n\n\n".join(parts)) if parts else ""
    folded = "\n".join(f"    {line}".rstrip() for line in _fence(source.rstrip()).splitlines())
    return f'{shown}\n\n??? example "All of `{path}`"\n\n{folded}\n'


def converted(
    notebook: dict[str, list[dict[str, object]]], name: str
) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their file names."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_fence(source))
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                picture = f"{name}-{len(pictures)}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({picture})")
            elif text:
                parts.append(f'```text title="prints"\n{text.rstrip()}\n```')
    return "\n\n".join(parts) + "\n", pictures


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"
