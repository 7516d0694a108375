"""Experts of several seeds: one after the other, or side by side on Ray."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from dfwlayer_bench.report.progress import progress
from dfwlayer_bench.report.terminal import PLAIN
from dfwlayer_bench.robotics.expert.run import train
from dfwlayer_bench.robotics.expert.training import SUMMARY, Plan, Training
from dfwlayer_bench.robotics.files import FileError
from dfwlayer_bench.sweep import cluster

__all__ = ["Trained", "train_here", "train_on_ray"]


class Trained(NamedTuple):
    """What came of a training."""

    folder: Path
    step: int
    finished: bool  # False if it was stopped before the end
    best: dict[str, float]  # the point of the curve whose actor was kept; empty without one


def train_here(plan: Plan, folder: Path, threads: int, console: Console) -> Trained:
    """Train in this process, from the checkpoint in the folder if there is one."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # the moments of units that died would slow Adam down
    try:
        training = Training(plan, folder)
        if training.resume():
            console.print(f"Going on from step {training.step} in {folder}", **PLAIN)
        finished = train(training, console)
    finally:
        torch.set_flush_denormal(False)
    best = max(training.curve, key=lambda point: point["return"], default={})
    return Trained(folder, training.step, finished, best)


def train_on_ray(
    plans: Mapping[Path, Plan], threads: int, address: str, console: Console
) -> Iterator[Trained]:
    """Train in workers, each from its own checkpoint; as they are finished.

    Interrupted, they save what they have, as `train` does.
    """
    cells = {
        f"seed {plan.seed}": (plan, folder.absolute(), threads) for folder, plan in plans.items()
    }
    gpus = int(any(plan.device == "cuda" for plan in plans.values()))
    with (
        cluster(address) as workers,
        progress(console, sum(plan.steps for plan in plans.values())) as report,
    ):
        seen = dict.fromkeys(plans, 0)

        def watch() -> None:
            for folder, plan in plans.items():
                now = min(_saved_step(folder), plan.steps)
                report(f"{len(plans)} trainings on Ray", max(0, now - seen[folder]))
                seen[folder] = max(now, seen[folder])

        watch()
        say = partial(console.print, **PLAIN)
        for _, trained in workers.run(
            _train, cells, cores=threads, gpus=gpus, say=say, watch=watch
        ):
            watch()
            yield trained


def _train(plan: Plan, folder: Path, threads: int) -> Trained:
    """What a worker does."""
    if not folder.is_dir():
        raise FileError(
            f"{folder} is not there for a worker on {platform.node()}; choose a folder that all "
            "machines share with --out"
        )
    return train_here(plan, folder, threads, Console(quiet=True))


def _saved_step(folder: Path) -> int:
    """How far the checkpoint is, from the summary that is written with it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["step"])
    return 0
