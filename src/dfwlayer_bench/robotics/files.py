"""Files of networks, datasets and checkpoints. Loading one never executes code.

Networks are safetensors, datasets npz without pickle; both carry metadata, and both are written
whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfwlayer_bench.report.machine import version
from dfwlayer_bench.robotics.tasks import Task

__all__ = [
    "ASSETS",
    "Dataset",
    "FileError",
    "load_actor",
    "load_arrays",
    "load_dataset",
    "load_run",
    "prepare_folder",
    "save_actor",
    "save_arrays",
    "save_dataset",
    "versions",
    "writing",
]

ASSETS = Path(__file__).parent / "assets"  # the experts and samples that come with the package
ENTRY = "dfwlayer"  # the metadata's key in a safetensors file
PACKAGES = ("dfwlayer", "torch", "numpy", "gymnasium", "mujoco", "pybullet")


class FileError(ValueError):
    """A file cannot be used; the message names it, and says why and what to do."""


@dataclass(frozen=True)
class Dataset:
    """What an expert did: a row for each step, in the order of the steps."""

    task: str
    observations: NDArray[np.float32]  # (N, observation_size)
    actions: NDArray[np.float32]  # (N, action_size)
    rewards: NDArray[np.float32] | None = None  # (N,)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.observations)


def versions() -> dict[str, str]:
    """Python's and the packages' versions, those that are installed."""
    found = {name: version(name) for name in PACKAGES}
    installed = {name: number for name, number in found.items() if number is not None}
    return {"python": platform.python_version(), **installed}


def prepare_folder(folder: Path) -> None:
    """Make a folder, and see before any work that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"writable?")
        probe.unlink()
    except OSError as error:
        raise FileError(
            f"cannot write to {folder} ({error.strerror or error}); choose a folder you can "
            "write to with --out"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A draft to write to, which takes the file's place once it is whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(path)
    except OSError as error:
        raise FileError(
            f"could not write {path} ({error.strerror or error}); what was there before is intact. "
            "Make room or choose another folder with --out, and run the same command again"
        ) from error
    finally:
        with suppress(OSError):  # there is none if all went well
            draft.unlink()


def save_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]
) -> None:
    """Write named arrays and metadata as a safetensors file."""
    from safetensors.numpy import save

    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with writing(path) as draft:
        draft.write_bytes(save(whole, {ENTRY: json.dumps(metadata)}))


def load_arrays(path: Path, task: Task) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Named arrays and metadata of a file that `save_arrays` wrote for this task."""
    from safetensors import SafetensorError, safe_open

    _check_there(path)
    try:
        with safe_open(path, "numpy") as file:
            metadata = json.loads((file.metadata() or {}).get(ENTRY, "null"))
            # a scalar comes back as an array of no dimension, not as a number
            arrays = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise FileError(
            f"{path} is no safetensors file that can be read ({error}); make it again"
        ) from error
    if not isinstance(metadata, dict):
        raise FileError(f"{path} lacks the metadata of dfwlayer; make it with `dfw robotics`")
    _check_task(path, metadata.get("task"), task)
    return arrays, metadata


def load_run(
    path: Path, task: Task, identity: Mapping[str, Any]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """As `load_arrays`, of a run that is to go on and so must have been made in the same way."""
    arrays, metadata = load_arrays(path, task)
    changed = [key for key, value in identity.items() if metadata.get(key) != value]
    if changed:
        found = ", ".join(f"{key} {metadata.get(key)} → {identity[key]}" for key in changed)
        raise FileError(
            f"{path} is from a run made differently ({found}); choose another --out, or "
            "--fresh to start over"
        )
    return arrays, metadata


def save_actor(path: Path, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write an actor's ``state_dict`` with its metadata, which must name the task."""
    arrays = {name: value.detach().cpu().numpy() for name, value in state.items()}
    save_arrays(path, arrays, metadata)


def load_actor(path: Path, task: Task) -> tuple[Any, dict[str, Any]]:
    """The actor (`networks.Actor`, on the CPU) of a file, and the file's metadata."""
    import torch

    from dfwlayer_bench.robotics.networks import Actor

    arrays, metadata = load_arrays(path, task)
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    widths = [len(value) for name, value in state.items() if name.endswith(".bias")]
    try:
        actor = Actor(task.observation_size, task.action_size, widths[:-1])
        actor.load_state_dict(state)
    except (RuntimeError, IndexError) as error:
        raise FileError(
            f"{path} does not hold an actor for {task.name}: {error}; train one with "
            f"`dfw robotics train-expert --task {task.name}`"
        ) from error
    return actor.eval(), metadata


def save_dataset(path: Path, dataset: Dataset) -> None:
    """Write a dataset as a compressed npz."""
    arrays: dict[str, NDArray[Any]] = {
        "observations": dataset.observations.astype(np.float32, copy=False),
        "actions": dataset.actions.astype(np.float32, copy=False),
        "metadata": np.array(json.dumps(dataset.metadata | {"task": dataset.task})),
    }
    if dataset.rewards is not None:
        arrays["rewards"] = dataset.rewards.astype(np.float32, copy=False)
    with writing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_dataset(path: Path, task: Task) -> Dataset:
    """The dataset of a file that `save_dataset` wrote for this task."""
    _check_there(path)
    try:
        # opened here, because numpy leaves a file that is no archive open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        metadata = json.loads(str(arrays["metadata"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise FileError(
            f"{path} is no dataset that can be read ({error}); make it again with "
            f"`dfw robotics collect --task {task.name}`"
        ) from error
    _check_task(path, metadata.get("task") if isinstance(metadata, dict) else None, task)
    dataset = Dataset(
        task.name,
        arrays.get("observations", np.empty(0)),
        arrays.get("actions", np.empty(0)),
        arrays.get("rewards"),
        metadata,
    )
    _check_shapes(path, dataset, task)
    return dataset


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise FileError(f"{path} is not there; check the path, or make the file first")


def _check_task(path: Path, found: object, task: Task) -> None:
    if found != task.name:
        raise FileError(
            f"{path} belongs to task {found}, expected {task.name}; name another file or another "
            "--task"
        )


def _check_shapes(path: Path, dataset: Dataset, task: Task) -> None:
    rows = len(dataset.observations)
    wanted: dict[str, tuple[int, ...]] = {
        "observations": (rows, task.observation_size),
        "actions": (rows, task.action_size),
    }
    if dataset.rewards is not None:
        wanted["rewards"] = (rows,)
    for name, shape in wanted.items():
        array = getattr(dataset, name)
        if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
            raise FileError(
                f"{path}: {name} are {array.dtype} of shape {array.shape}, expected finite "
                f"float32 of shape {shape}"
            )
