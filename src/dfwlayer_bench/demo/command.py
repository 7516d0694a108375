"""``dfw demo``: the layer at work, measured in front of the user.

What is measured is in `steps` and `training`, against `exact`; the picture is in
`figure`. Here it is told.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dfwlayer_bench.report.progress import Lines, announce
from dfwlayer_bench.report.progress import bar as bar_of

if TYPE_CHECKING:
    from dfwlayer_bench.demo.steps import BatchResult, GradientCheck
    from dfwlayer_bench.demo.training import Training

__all__ = ["demo"]

ERROR_TOLERANCE = 1e-4  # of the default method in float32, relative
QUICK_SECONDS = 30  # on 2 cores, most of it to compile what is not on disk yet
VIOLATION_TOLERANCE = 1e-6  # a few units in the last place of a float32 radius


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the picture and the numbers; made if missing.")
    ] = Path("dfw-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same numbers.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, show_default="300, or 12 with --quick", help="Training steps."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Everything tiny, in seconds.")] = False,
) -> int:
    """Solve a batch, check it against exact answers, train through the layer, draw a picture."""
    problem = _why_not_writable(out)
    if problem is not None:
        Console(stderr=True).print(f"[bold red]--out {out}:[/] {problem}", highlight=False)
        return 1
    console = Console(highlight=False)
    start = time.perf_counter()
    with console.status("Loading PyTorch and matplotlib"):
        import numpy as np

        from dfwlayer_bench.demo import steps as work
        from dfwlayer_bench.demo.exact import exact_solution, random_problems
        from dfwlayer_bench.demo.figure import draw
        from dfwlayer_bench.demo.training import train

    if quick:
        announce(console, QUICK_SECONDS)
    else:  # most of the first minute shows nothing else
        console.print("A minute; two the first time, as code is compiled and kept")
    size = work.QUICK if quick else work.FULL
    if steps is not None:
        size = replace(size, training_steps=steps)
    rng = np.random.default_rng(seed)
    checks: dict[str, bool] = {}

    _head(console, 1, f"Solve {size.problems} problems in one call")
    console.print(
        f"min 0.5 x'Px + q'x  subject to  |w1 x1| + ... + |wn xn| <= t,  n = {size.variables}, "
        "float32. Every constraint binds. Violation and sparsity are measured in float64."
    )
    problems = random_problems(rng, size.problems, size.variables)
    with console.status("Solving"):
        exact = exact_solution(problems)
        results = [work.solve_batch(problems, exact, method) for method in work.METHODS]
    console.print(_batch_table(results, size.variables))
    checks["every solution is feasible"] = all(
        result.violation <= VIOLATION_TOLERANCE for result in results
    )

    _head(console, 2, "Compare with the exact solution")
    console.print(
        "Computed without the library, by projected gradient steps in numpy; its KKT "
        f"conditions hold to {exact.kkt.max():.0e}."
    )
    console.print(_error_table(results))
    default = results[0]
    checks["the default method is exact"] = default.relative_error <= ERROR_TOLERANCE
    checks["no certificate was wrong"] = all(result.certified for result in results)

    _head(console, 3, "Check the gradients")
    console.print(
        f"Finite differences of the exact solutions of {size.checked_problems} problems, "
        "in float64, against the layer's gradient in each parameter."
    )
    with console.status("Differentiating"):
        gradients = work.check_gradients(
            random_problems(rng, size.checked_problems, size.checked_variables), rng
        )
    console.print(_gradient_table(gradients))
    for check in gradients:
        checks[f"the gradient in {check.parameter} is right"] = check.passed

    _head(console, 4, "Train a network through the layer")
    console.print(
        "Someone decides under prices w and a budget t. From what is seen of the situation "
        "and the decisions alone, the network learns what they want, and the layer w and t."
    )
    with _progress(console, "loss {task.fields[loss]:.4f}  t {task.fields[radius]:.3f}") as bar:
        task = bar.add_task("Training", total=size.training_steps, loss=float("nan"), radius=1.0)
        training = train(
            seed,
            size,
            lambda loss, radius: bar.update(task, advance=1, loss=loss, radius=radius),
        )
    console.print(_training_table(training))
    checks["no decision in training left its budget"] = training.violations == 0
    if size.training_steps >= 10:  # fewer prove nothing
        checks["training made the loss fall"] = training.test_loss < training.loss[0]

    _head(console, 5, "Draw it")
    with _progress(console) as bar:
        trajectory = work.trace(
            problems, exact, size.trace_steps, lambda ks: bar.track(ks, description="Tracing")
        )
    with console.status("Drawing"):
        solutions = {result.method: result.x[0] for result in results}
        pictures = draw(out, work.walk(), trajectory, exact.x[0], solutions, training)
    numbers = out / "demo.json"
    numbers.write_text(json.dumps(_numbers(results, gradients, training, checks), indent=2) + "\n")
    for path in (*pictures, numbers):
        console.print(f"wrote [bold]{path}[/]", soft_wrap=True)

    failed = [name for name, passed in checks.items() if not passed]
    console.print()
    for name in failed:
        console.print(f"[bold red]FAILED[/] {name}")
    console.print(
        f"[bold {'red' if failed else 'green'}]{len(checks) - len(failed)} of {len(checks)} checks "
        f"passed[/] in {time.perf_counter() - start:.0f} s"
    )
    return 1 if failed else 0


def _why_not_writable(folder: Path) -> str | None:
    """Make the folder and try it, before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot write there ({error.strerror}); choose another folder"


def _head(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{title}[/]")


def _progress(console: Console, text: str = "") -> Progress | Lines:
    return bar_of(console, TextColumn(text), TimeRemainingColumn(elapsed_when_finished=True))


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[bold red]FAILED[/]"


def _name(method: str) -> str:
    from dfwlayer_bench.demo.steps import METHODS

    return METHODS[method]


def _batch_table(results: list[BatchResult], n: int) -> Table:
    """One column per method."""
    table = _table("", *(_name(result.method) for result in results))
    rows = {
        "status": [
            ", ".join(f"{name} {count}" for name, count in result.statuses.items())
            for result in results
        ],
        "worst certificate gap / |f|": [f"{result.relative_gap:.1e}" for result in results],
        "worst violation / t": [f"{result.violation:.1e}" for result in results],
        f"mean nonzeros of {n}": [f"{result.nonzeros:.1f}" for result in results],
        "forward and backward": [f"{1e3 * result.seconds:.0f} ms" for result in results],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _error_table(results: list[BatchResult]) -> Table:
    table = _table("", *(_name(result.method) for result in results))
    table.add_row("worst error of x, relative", *(f"{r.relative_error:.1e}" for r in results))
    table.add_row("worst (f - f*) / |f*|", *(f"{max(r.suboptimality, 0):.1e}" for r in results))
    table.add_row("f - f* <= certificate gap", *(_verdict(r.certified) for r in results))
    return table


def _gradient_table(gradients: list[GradientCheck]) -> Table:
    table = _table("relative error in", "default (implicit)", "", "published (unrolled)")
    for check in gradients:
        table.add_row(
            check.parameter,
            f"{check.relative_error['auto']:.1e}",
            _verdict(check.passed),
            f"[dim]{check.relative_error['dfw']:.1e}[/]",
        )
    return table


def _training_table(training: Training) -> Table:
    table = _table("", "first step", "end", "hidden truth")
    table.add_row("loss", f"{training.loss[0]:.4f}", f"{training.loss[-1]:.4f}", "")
    table.add_row("loss on other decisions", "", f"[bold]{training.test_loss:.4f}[/]", "")
    table.add_row(
        "budget t",
        f"{training.radius[0]:.3f}",
        f"[bold]{training.radius[-1]:.3f}[/]",
        f"{training.hidden_radius:.3f}",
    )
    table.add_row("relative error of the prices w", "", f"{training.price_error:.3f}", "0")
    table.add_row(
        "decisions outside their budget", "", f"{training.violations} of {training.decisions}", ""
    )
    return table


def _numbers(
    results: list[BatchResult],
    gradients: list[GradientCheck],
    training: Training,
    checks: dict[str, bool],
) -> dict[str, Any]:
    """All that was measured but for the times, so that the same seed gives the same file."""
    batch = {result.method: asdict(result) for result in results}
    for numbers in batch.values():
        del numbers["x"], numbers["seconds"]
    return {
        "batch": batch,
        "gradients": {check.parameter: asdict(check) for check in gradients},
        "training": asdict(training),
        "checks": checks,
    }
