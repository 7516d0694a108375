"""The folder of a run: one small file a cell, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import platform
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Attempt", "Cell", "Store", "StoreError"]

CELLS, ANSWERS = "cells", "answers"
RUN = "run.json"
Vector = NDArray[np.floating[Any]]


class StoreError(Exception):
    """The folder cannot be used; the message says why and what to do."""


@dataclass(kw_only=True)
class Attempt:
    """What became of one thing that was to be run.

    ``status`` is "ok", "missing", "unsupported", "time limit", "failed" or "pending"; ``detail``
    says more.
    """

    status: str = "pending"
    detail: str = ""
    time_limit: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def cut_short(self, limit: float) -> bool:
        """Whether it was stopped by a time limit below this one, under which it may end."""
        return self.status == "time limit" and (self.time_limit or 0) < limit


@dataclass
class Cell(Attempt):
    """One system on one problem. Numbers are None where they were not measured."""

    family: str
    n: int
    trial: int
    seed: int
    system: str
    seconds: list[float] = field(default_factory=list)
    build_seconds: float | None = None
    error: float | None = None  # ‖x − x_ref‖ / ‖x_ref‖
    cosine: float | None = None  # of the gradient with the reference's
    gradient_error: float | None = None
    violation: float | None = None  # max(0, ‖w∘x‖₁ − t) / t
    memory_mb: float | None = None
    constraint_active: bool | None = None
    radius: float | None = None  # t
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.family}-{self.n}-{self.trial}-{self.system}"


class Store:
    """Cells on disk, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, run: dict[str, Any], *, fresh: bool) -> None:
        """Make the folder usable for a run, or raise `StoreError` before any work."""
        cells = self.folder / CELLS
        try:
            if fresh:
                for name in (CELLS, ANSWERS):
                    if (self.folder / name).is_dir():
                        shutil.rmtree(self.folder / name)
                (self.folder / RUN).unlink(missing_ok=True)
            cells.mkdir(parents=True, exist_ok=True)
            probe = cells / ".probe"
            probe.write_text("writable?")
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"--out: cannot write to {self.folder} ({error.strerror or error}); choose a "
                "folder you can write to"
            ) from error
        self._check(run)
        self._write(self.folder / RUN, run)

    def join(self, run: dict[str, Any]) -> None:
        """Check that a run which another process has opened is this one, and seen from here."""
        if not (self.folder / RUN).exists():
            raise StoreError(
                f"--out: {self.folder} is not there for a worker on {platform.node()}; choose a "
                "folder that all machines share"
            )
        self._check(run)

    def _check(self, run: dict[str, Any]) -> None:
        """Raise an error if the folder's run was made differently."""
        before = self._read(self.folder / RUN)
        if before is not None:
            changed = [key for key in run if before.get(key) != run[key]]
            if changed:
                found = ", ".join(f"{key} {before.get(key)} → {run[key]}" for key in changed)
                raise StoreError(
                    f"--out: {self.folder} holds a run made differently ({found}); choose "
                    "another folder, or --fresh to start it over"
                )

    def load(self, cell: Cell) -> Cell | None:
        """What was saved for this cell, None if nothing usable was."""
        found = self.read(cell.key)
        names = {item.name for item in fields(Cell)}
        if found is None or not set(found) <= names:
            return None
        saved = Cell(**found)
        return saved if saved.seed == cell.seed else None

    def save(self, cell: Cell) -> None:
        """Write a cell."""
        self.write(cell.key, asdict(cell))

    def read(self, key: str) -> dict[str, Any] | None:
        """What was written under this key, None if nothing that can be read."""
        return self._read(self.folder / CELLS / f"{key}.json")

    def write(self, key: str, content: dict[str, Any]) -> None:
        """Keep something under this key."""
        self._write(self.folder / CELLS / f"{key}.json", content)

    def save_answer(self, cell: Cell, x: Vector, gradient: Vector) -> None:
        """Keep the vectors a cell found, to compare systems with each other."""
        path = self.folder / ANSWERS / f"{cell.key}.npz"
        with self._saving(path) as draft:
            path.parent.mkdir(exist_ok=True)
            with draft.open("wb") as file:
                np.savez(file, x=x, gradient=gradient)

    def answer(self, cell: Cell) -> tuple[Vector, Vector] | None:
        """x and the gradient of a cell, None if they were not kept."""
        try:
            with np.load(self.folder / ANSWERS / f"{cell.key}.npz") as found:
                return found["x"], found["gradient"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        with self._saving(path) as draft:
            draft.write_text(json.dumps(content, indent=1), encoding="utf-8")

    @contextmanager
    def _saving(self, path: Path) -> Iterator[Path]:
        """A draft to write to, which takes the place of the file once it is whole."""
        draft = path.with_suffix(".tmp")
        try:
            yield draft
            draft.replace(path)
        except OSError as error:
            raise StoreError(
                f"--out: could not save {path.name} in {self.folder} ({error.strerror or error}); "
                "what was saved before is intact, run the same command again to go on"
            ) from error
