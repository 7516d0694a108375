"""``dfw robotics export``: the expert as an ONNX file that drives the simulator without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated

import typer

from dfwlayer_bench.report.terminal import PLAIN
from dfwlayer_bench.robotics import options

__all__ = ["export_expert"]

FRESH = 500_000_000  # seed of episodes that neither training nor the choice of the expert has seen


def export_expert(
    task: options.TaskName = "HC+O",
    expert: options.Expert = None,
    episodes: Annotated[int, typer.Option(min=0, help="Episodes to drive with the file.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode.")] = FRESH,
    out: options.Out = options.OUT,
) -> int:
    """Write the expert, limit included, to TASK/policy.onnx and drive the simulator with it.

    The file is checked against the expert on its own data. A process without torch then runs
    episodes with onnxruntime alone, and the same ones are run with the expert as it is. The exit
    code is 1 if an action breaks the limit, or the file does not answer as the expert does.
    """
    chosen = options.check_task(task)
    from rich.console import Console

    from dfwlayer_bench.report.progress import progress
    from dfwlayer_bench.robotics.episodes import roll_out
    from dfwlayer_bench.robotics.expert.training import expert_policy
    from dfwlayer_bench.robotics.files import ASSETS, FileError, load_actor, load_dataset
    from dfwlayer_bench.robotics.policy import export_policy

    console = Console()
    try:
        actor, _ = load_actor(options.find_expert(expert, out, chosen), chosen)
        sample = load_dataset(ASSETS / f"{chosen.slug}_sample.npz", chosen)
    except FileError as error:
        return options.refuse(console, error)
    path = out / chosen.slug / "policy.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    with progress(Console(stderr=True), 3 if episodes else 1) as tell:
        report = export_policy(chosen, actor, path, sample.observations)
        tell(f"{path.name} written and checked", 1)
        console.print(str(report), **PLAIN)
        if not episodes:
            return 0 if report.passed else 1
        module = "dfwlayer_bench.robotics.drive"
        wanted = ["--task", chosen.name, "--episodes", str(episodes), "--seed", str(seed)]
        ran = subprocess.run(
            [sys.executable, "-m", module, str(path), *wanted], capture_output=True, text=True
        )
        if ran.returncode:
            return options.refuse(console, RuntimeError(ran.stderr.strip()))
        driven = json.loads(ran.stdout.splitlines()[-1])
        tell(f"{episodes} episodes with the file alone", 1)
        eager = roll_out(chosen, expert_policy(chosen, actor), episodes, seed)
        tell(f"{episodes} episodes with the expert in torch", 1)
    mean = sum(driven["returns"]) / episodes
    console.print(
        f"{chosen.name}, {driven['steps']} steps in a process "
        f"{'with' if driven['torch'] else 'without'} torch: return {mean:.1f} (expert in torch "
        f"{eager.mean_return:.1f}), {driven['violations']} violations, largest power "
        f"{driven['largest_power']:.6g} of {chosen.limit:g}, {1e6 * driven['seconds']:.0f} µs for "
        "an action",
        **PLAIN,
    )
    return 0 if report.passed and not driven["violations"] and not driven["torch"] else 1
