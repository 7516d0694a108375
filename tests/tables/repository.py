"""Where the documentation and the examples are."""

from pathlib import Path

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").is_file())
