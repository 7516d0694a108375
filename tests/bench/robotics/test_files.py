"""Files of networks and datasets: whole or not at all, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")

from dfwlayer_bench.robotics.files import (
    Dataset,
    FileError,
    load_actor,
    load_dataset,
    prepare_folder,
    save_dataset,
    writing,
)
from dfwlayer_bench.robotics.tasks import TASKS, Task

CHEETAH, REACHER = TASKS["HC+O"], TASKS["R+O03"]


def tiny_dataset(task: Task, rows: int = 3) -> Dataset:
    random = np.random.default_rng(0)
    return Dataset(
        task.name,
        random.normal(size=(rows, task.observation_size)).astype(np.float32),
        random.normal(size=(rows, task.action_size)).astype(np.float32),
        random.normal(size=rows).astype(np.float32),
        {"note": "ω"},
    )


def test_dataset_comes_back_as_it_was(tmp_path: Path) -> None:
    dataset = tiny_dataset(REACHER)
    save_dataset(tmp_path / "d.npz", dataset)
    found = load_dataset(tmp_path / "d.npz", REACHER)
    np.testing.assert_array_equal(found.observations, dataset.observations)
    np.testing.assert_array_equal(found.actions, dataset.actions)
    np.testing.assert_array_equal(found.rewards, dataset.rewards)
    assert found.metadata["note"] == "ω"
    assert [path.name for path in tmp_path.iterdir()] == ["d.npz"]


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["BOMB"]),)


def test_files_with_pickles_are_refused_unexecuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bombs = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "d.npz", observations=bombs, actions=bombs, metadata=bombs)
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Bomb()))
    torch.save({"bomb": Bomb()}, tmp_path / "a.safetensors")
    for name in ("d.npz", "p.npz"):
        with pytest.raises(FileError, match=name):
            load_dataset(tmp_path / name, REACHER)
    with pytest.raises(FileError, match=r"a\.safetensors"):
        load_actor(tmp_path / "a.safetensors", REACHER)
    assert not (tmp_path / "exploded").exists()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with pytest.raises(FileError, match=r"d\.npz is not there"):
        load_dataset(path, REACHER)
    save_dataset(path, tiny_dataset(REACHER))
    with pytest.raises(FileError, match=r"belongs to task R\+O03, expected HC\+O"):
        load_dataset(path, CHEETAH)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FileError, match="no dataset that can be read"):
        load_dataset(path, REACHER)
    good = tiny_dataset(REACHER)
    save_dataset(path, Dataset("R+O03", good.observations[:, :4], good.actions))
    with pytest.raises(FileError, match=r"observations are float32 of shape \(3, 4\)"):
        load_dataset(path, REACHER)
    bad = good.observations.copy()
    bad[0, 0] = np.nan
    save_dataset(path, Dataset("R+O03", bad, good.actions))
    with pytest.raises(FileError, match="finite"):
        load_dataset(path, REACHER)


def write_half(path: Path) -> None:
    with writing(path) as draft:
        draft.write_text("half")
        raise OSError(28, "No space left on device")


def test_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(FileError, match=r"could not write .*file \(No space left"):
        write_half(path)
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileError, match="cannot write to"):
        prepare_folder(path / "below a file")
