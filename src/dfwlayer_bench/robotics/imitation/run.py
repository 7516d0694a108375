"""All runs of an imitation, one after the other, and their evaluation, with bars and records."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.report.document import Document, Picture
from dfwlayer_bench.report.machine import describe
from dfwlayer_bench.report.progress import STEPS, lasting, progress
from dfwlayer_bench.robotics.expert.run import board
from dfwlayer_bench.robotics.files import FileError, versions, writing
from dfwlayer_bench.robotics.imitation.evaluate import (
    EVALUATION,
    EXPERT_NAME,
    FRESH_SEED,
    Policies,
    roll_out_together,
)
from dfwlayer_bench.robotics.imitation.figures import POWER, draw_curves, draw_paper, draw_power
from dfwlayer_bench.robotics.imitation.layers import LAYERS
from dfwlayer_bench.robotics.imitation.report import Results, read_runs, write_report
from dfwlayer_bench.robotics.imitation.timing import time_layers
from dfwlayer_bench.robotics.imitation.training import Imitation, Plan, Split, Step, run_file
from dfwlayer_bench.robotics.tasks import Task

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Job",
    "animate",
    "evaluate_all",
    "imitate_all",
    "note",
    "time_all",
    "trace_power",
    "trained",
    "write_all",
]

TIMING, ABOUT, ANIMATION = "timing.json", "about.json", "robot.gif"
SHOWN_EVERY = 20  # steps between two looks at the bar


@dataclass(frozen=True)
class Job:
    """A layer, a seed, and how many steps they are to be trained."""

    layer: str
    seed: int
    steps: int


def imitate_all(
    plan: Plan, data: Split, jobs: Sequence[Job], folder: Path, console: Console
) -> None:
    """Train every job that is not done; each is kept in a file and goes on where it was."""
    runs = [
        Imitation(replace(plan, steps=job.steps), data, job.layer, job.seed, folder) for job in jobs
    ]
    for run in runs:
        run.resume()
    left = sum(max(run.plan.steps - run.step, 0) for run in runs)
    with progress(console, left, STEPS) as bar:
        for run in runs:
            if not run.finished:
                _train(run, bar)


def _train(run: Imitation, bar: Any) -> None:
    name = f"{run.plan.task.name} {run.layer}, seed {run.seed}"
    first = run.step
    bar(name, 0)
    with board(run.path.with_suffix("")) as record:

        def report(step: Step) -> None:
            nonlocal first
            if step.tested is not None:
                for quantity in ("loss", "mse", "mean_violation", "violation_rate"):
                    record(quantity, step.tested[quantity], step.step)
            if step.tested is not None or step.step % SHOWN_EVERY == 0:
                shown = run.curve[-1]
                bar(
                    f"{name}: loss {step.loss:.4f}, test MSE {shown['mse']:.4f}, violations "
                    f"{100 * shown['violation_rate']:.3g} %",
                    step.step - first,
                )
                first = step.step

        run.run(report)


def time_all(
    plan: Plan, data: Split, layers: Sequence[str], repeats: int, folder: Path, console: Console
) -> None:
    """Time the layers together, unless all of them have been; those timed before join in."""
    path = folder / TIMING
    known = _read(path)
    if set(layers) <= set(known):
        return
    wanted = {"none", *known, *layers}
    together = [name for name, row in LAYERS.items() if name in wanted and not row.missing()]
    with progress(console, len(together) + repeats, STEPS) as bar:
        found = time_layers(plan, data, together, repeats, bar)
    with writing(path) as draft:
        content = {timing.layer: asdict(timing) for timing in found}
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")


def evaluate_all(
    policies: Policies, jobs: Sequence[tuple[str, int]], episodes: int, console: Console
) -> None:
    """Fresh episodes for every policy that was trained."""
    with progress(console, len(jobs)) as bar:
        for layer, seed in jobs:
            bar(f"{policies.task.name} {layer}, seed {seed}", 0)
            start = time.perf_counter()
            found = policies.evaluate(layer, seed, episodes)
            took = lasting(time.perf_counter() - start)
            bar(f"{layer}, seed {seed}: return {found.mean_return:.1f}, {took}", 1)


def trace_power(policies: Policies, jobs: Sequence[tuple[str, int]], steps: int) -> list[Picture]:
    """Draw the power of these policies in one fresh episode, the same for all."""
    powers = {
        layer: roll_out_together(policies.task, policies.act(layer, seed)[0], 1).powers[:, 0]
        for layer, seed in jobs
    }
    return draw_power(policies.folder, policies.task, powers, steps)


def animate(policies: Policies, jobs: Sequence[tuple[str, int]], steps: int) -> Path | None:
    """Film these policies side by side; None where the simulator cannot draw here.

    The episode is the one whose return is the median of the first policy's.
    """
    from dfwlayer_bench.robotics.imitation.animation import STRIDE, film, record, save_animation

    task, episode = policies.task, FRESH_SEED + policies.median_episode(*jobs[0])
    try:
        scenes = {
            _title(layer): record(task, policies.act(layer, seed)[0], steps, episode)
            for layer, seed in jobs
        }
    except (ImportError, RuntimeError, AttributeError, OSError):
        # no EGL, no window: what is raised depends on the part that is missing
        return None
    return save_animation(policies.folder / ANIMATION, film(task, scenes), 30 * STRIDE)


def _title(layer: str) -> str:
    return LAYERS[layer].label if layer in LAYERS else layer


def note(folder: Path, task: Task, about: dict[str, Any]) -> None:
    """Keep how an imitation is made, where the report will look for it.

    Commands that added layers, seeds or steps to a folder are kept one below the other.
    """
    commands = [*_read(folder / ABOUT).get("command", "").splitlines(), about["command"]]
    whole = about | {
        "command": "\n".join(dict.fromkeys(commands)),
        "task": task.name,
        "machine": describe("cpu"),
        "versions": versions(),
    }
    with writing(folder / ABOUT) as draft:
        draft.write_text(json.dumps(whole, indent=1), encoding="utf-8")


def write_all(folder: Path, task: Task, layers: Sequence[str], seeds: Sequence[int]) -> Document:
    """Everything the folder knows, as figures and a report."""
    runs = read_runs(folder, task, list(LAYERS), _seeds(folder, seeds))
    evaluations = _read(folder / EVALUATION)
    missing = {name: why for name in layers if (why := LAYERS[name].missing())}
    about = _read(folder / ABOUT)
    results = Results(task, runs, _read(folder / TIMING), evaluations, missing, about)
    pictures = draw_curves(folder, task, runs) + draw_paper(folder, task, runs)
    if (folder / f"{POWER.name}.png").exists():
        pictures.append(POWER)
    return write_report(folder, results, pictures)


def _seeds(folder: Path, seeds: Sequence[int]) -> list[int]:
    """These seeds, and those of earlier runs."""
    names = [path.stem.rsplit("-", 1)[1] for path in (folder / "runs").glob("*.safetensors")]
    return sorted({*seeds, *(int(name) for name in names if name.isdecimal())})


def trained(folder: Path, layers: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """The expert, and the policies there are."""
    own = [(n, s) for n in layers for s in seeds if run_file(folder, n, s).exists()]
    if not own:
        raise FileError(
            f"{folder} holds no policies of these layers and seeds; make them with `dfw robotics "
            "imitate`"
        )
    return [(EXPERT_NAME, 0), *own]


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
