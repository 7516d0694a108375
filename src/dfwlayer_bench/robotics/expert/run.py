"""A training run as a command sees it: bar, TensorBoard, and a stop that loses nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.report.progress import bar as bar_of
from dfwlayer_bench.report.terminal import PLAIN
from dfwlayer_bench.robotics.expert.training import Progress, Training

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["board", "stopping", "train"]


def train(training: Training, console: Console) -> bool:
    """Train with a bar; False if it was stopped before the end."""
    from rich.progress import TextColumn, TimeRemainingColumn

    plan = training.plan
    columns = (TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[told]}"))
    with (
        stopping(console) as stop,
        board(training.folder) as record,
        bar_of(console, *columns, TimeRemainingColumn()) as bar,
    ):
        task = bar.add_task(
            plan.task.name, total=plan.steps, completed=training.step, rate="", told=""
        )
        evaluated = training.curve[-1] if training.curve else None

        def report(progress: Progress) -> None:
            nonlocal evaluated
            record("train/return", progress.episode_return, progress.step)
            record("train/violations", progress.violations, progress.step)
            record("train/steps_per_second", progress.steps_per_second, progress.step)
            if progress.evaluated:
                evaluated = progress.evaluated
                for name in ("return", "violations", "largest_power"):
                    record(f"evaluation/{name}", evaluated[name], progress.step)
                bar.console.print(
                    f"{plan.task.name} step {progress.step}: return {evaluated['return']:.1f} ± "
                    f"{evaluated['return_std']:.1f}, violations {evaluated['violations']:.0f} in "
                    f"evaluation, {progress.violations} in training, "
                    f"{progress.steps_per_second:.0f} steps/s",
                    **PLAIN,
                )
            shown = "" if evaluated is None else f", expert {evaluated['return']:.1f}"
            bar.update(
                task,
                completed=progress.step,
                rate=f"{progress.steps_per_second:.0f} steps/s",
                told=f"return {progress.episode_return:.1f}{shown}, violations "
                f"{progress.violations}",
            )

        training.run(report, stop)
    return training.finished


@contextmanager
def stopping(console: Console) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop, which is then answered True; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals reach the main thread only
        return
    asked = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        console.print("Stopping at the end of this episode; once more to stop without saving.")

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def board(folder: Path) -> Iterator[Callable[[str, float, int], None]]:
    """Records name, value and step live for TensorBoard; does nothing where that is missing."""
    if find_spec("tensorboard") is None:
        yield lambda _name, _value, _step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))
    try:
        yield writer.add_scalar
    finally:
        writer.close()
