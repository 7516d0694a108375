"""``dfw reproduce``: the paper's tables and figures, the families it leaves out, and ablations."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfwlayer_bench import options
from dfwlayer_bench.bench.plan import Asked, Defaults, Plan, identity_of, plan_of, words_of
from dfwlayer_bench.report.terminal import PLAIN, interrupted, output, refuse

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.store import Cell, Store
    from dfwlayer_bench.reproduce.studies.base import Record, Study
    from dfwlayer_bench.sweep import Cluster

__all__ = ["reproduce_app"]

PARTS = {
    "table1": "Running time of the paper's systems and of their rivals (Table 1).",
    "accuracy": "Solutions, gradients, violations: as in the paper, and against exact answers.",
    "temperature": "Solution and gradient along the iterations, annealed and at constant τ.",
    "ablations": "p, step sizes, annealing, batches, unrolled against implicit, Theorem 1.",
    "cosine": "What decides how good the published gradient is where its rule stops.",
    "all": "Everything, in one report.",
}
TELL = """

    The folder gets report.html, which holds everything, the tables as CSV, JSON and Markdown, and
    the figures as PNG and SVG. Every finished cell is saved at once: a run that was interrupted
    goes on when the same command is given again. Studies of the method (temperature, ablations,
    cosine) use the middle one of --sizes.
"""
FULL = Defaults(
    ("paper", "active", "ill"), (500, 1000, 2000), trials=5, repeats=3, time_limit=600.0
)
QUICK = Defaults(("paper", "active"), (30, 60), trials=1, repeats=1, time_limit=20.0)
STEPS, QUICK_STEPS = 300, 60
# on 2 cores, with every rival installed and nothing compiled yet
QUICK_SECONDS = {
    "table1": 40,
    "accuracy": 40,
    "temperature": 20,
    "ablations": 40,
    "cosine": 20,
    "all": 55,
}
BATCHES, QUICK_BATCHES = (1, 4, 16, 64), (1, 4)
WIDTH = 170  # columns, where the output is no terminal


@dataclass(frozen=True)
class Request:
    """What was asked for, with the defaults filled in."""

    parts: tuple[str, ...]
    plan: Plan
    steps: int
    batches: tuple[int, ...]
    command: str

    def chosen(self) -> list[Study]:
        """The studies of the parts asked for."""
        return [study for part in self.parts for study in self.studies_of(part)]

    def studies_of(self, part: str) -> list[Study]:
        """The studies of a part; none for the parts that compare systems."""
        from dfwlayer_bench.reproduce.studies.ablations import ablation_studies
        from dfwlayer_bench.reproduce.studies.cosine import cosine_study
        from dfwlayer_bench.reproduce.studies.temperature import temperature_study

        if part == "temperature":
            return [temperature_study(self.steps)]
        if part == "cosine":
            return [cosine_study(self.steps)]
        return ablation_studies(self.steps, self.batches) if part == "ablations" else []

    @property
    def compares(self) -> bool:
        """Whether systems are to be run."""
        return "table1" in self.parts or "accuracy" in self.parts


def reproduce_app() -> typer.Typer:
    """``dfw reproduce`` with one subcommand a part."""
    app = typer.Typer(
        help="Reproduce the paper's experiments, and show what they leave out.",
        no_args_is_help=True,
    )
    for part, description in PARTS.items():
        app.command(part, cls=options.ListCommand)(_command(part, description))
    return app


def _command(part: str, description: str) -> Callable[..., int]:
    def command(
        sizes: options.Sizes = None,
        trials: options.Trials = None,
        family: options.Family = None,
        systems: options.Systems = None,
        device: options.Device = "cpu",
        out: options.Out = Path("reproduce-results"),
        seed: options.Seed = 100,
        time_limit: Annotated[float | None, options.time_limit(FULL.time_limit)] = None,
        quick: Annotated[
            bool,
            typer.Option("--quick", help="A small run: n = 30 and 60, one trial, 60 iterations."),
        ] = False,
        repeats: Annotated[int | None, options.repeats(FULL.repeats)] = None,
        steps: Annotated[
            int | None,
            typer.Option(min=2, help="Iterations that the studies follow. (default: 300)"),
        ] = None,
        dtype: options.Dtype = "float32",
        threads: options.Threads = None,
        clock: options.Clock = "wall",
        memory: options.Memory = None,
        fresh: options.Fresh = False,
        ray: options.Ray = None,
    ) -> int:
        from rich.console import Console

        from dfwlayer_bench.report.progress import announce

        calls = repeats or (1 if part == "accuracy" else None)
        asked = Asked(sizes, family, systems, dtype, calls, seed, out, fresh, quick, threads, clock)
        plan = plan_of(
            QUICK if quick else FULL,
            _systems(),
            asked,
            trials=trials,
            time_limit=time_limit,
            device=device,
            memory=memory,
            answers=True,
        )
        if quick:
            announce(Console(stderr=True), QUICK_SECONDS[part])
        return _reproduce(_request(part, plan, steps, quick), out, ray, fresh=fresh)

    command.__doc__ = description + TELL
    return command


def _request(part: str, plan: Plan, steps: int | None, quick: bool) -> Request:
    """The parts of the report, with what their studies need beside the plan."""
    steps = steps or (QUICK_STEPS if quick else STEPS)
    parts = tuple(name for name in PARTS if name != "all") if part == "all" else (part,)
    batches = QUICK_BATCHES if quick else BATCHES
    return Request(parts, plan, steps, batches, _command_line(part, plan, steps, quick))


def _systems() -> list[str]:
    """Every system that solves the problem, the paper's three first."""
    from dfwlayer_bench.reproduce.paper import ROLES
    from dfwlayer_bench.systems import PAPER_SYSTEMS, SYSTEMS

    solving = [name for name, system in {**SYSTEMS, **PAPER_SYSTEMS}.items() if system.solves]
    return list(dict.fromkeys([*ROLES, *solving]))


def _command_line(part: str, plan: Plan, steps: int, quick: bool) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    words = ["dfw", "reproduce", part, "--sizes", *map(str, plan.sizes)]
    words += ["--trials", str(plan.trials), "--family", *plan.families, *words_of(plan)]
    words += ["--steps", str(steps), *(["--quick"] if quick else [])]
    return shlex.join(words)


def _reproduce(request: Request, out: Path, ray: str | None, *, fresh: bool) -> int:
    from rich.console import Console

    from dfwlayer_bench.bench.store import Store, StoreError
    from dfwlayer_bench.report.document import show
    from dfwlayer_bench.reproduce.output import REPORT, Results, write_results
    from dfwlayer_bench.sweep import SweepError

    console = Console(stderr=True)
    store = Store(out)
    try:
        with _place(request.plan, ray) as (machine, cluster):
            identity = identity_of(request.plan, machine)
            about: dict[str, Any] = {"command": request.command, "machine": machine, **identity}
            store.open(identity, fresh=fresh)
            code = _run(request, store, cluster, console)
        document = write_results(store, Results(*_saved(request, store), about))
    except (StoreError, SweepError) as error:
        return refuse(console, str(error), 2)
    except OSError as error:
        return refuse(
            console,
            f"--out: could not write the report to {out} ({error.strerror or error}); the "
            "finished cells are saved there: make room and run the same command again",
            2,
        )
    show(document, request.parts, output(WIDTH))
    console.print(f"Wrote {out / REPORT} and the tables and figures beside it", **PLAIN)
    return code


@contextmanager
def _place(plan: Plan, ray: str | None) -> Iterator[tuple[dict[str, Any], Cluster | None]]:
    """Where cells are run: the machine, and the cluster if there is one."""
    from dfwlayer_bench.report.machine import describe
    from dfwlayer_bench.report.machine import threads as hold_threads
    from dfwlayer_bench.reproduce.shares import machine_of
    from dfwlayer_bench.sweep import cluster

    if ray is None:
        with hold_threads(plan.threads):
            yield describe(plan.device), None
        return
    with cluster(ray) as workers:
        yield machine_of(workers, plan), workers


def _run(request: Request, store: Store, cluster: Cluster | None, console: Console) -> int:
    """All cells under a progress bar; the exit code."""
    from dfwlayer_bench.bench.run import run_plan
    from dfwlayer_bench.report.progress import progress
    from dfwlayer_bench.reproduce.shares import run_shares
    from dfwlayer_bench.reproduce.studies.base import cases_of, run_studies
    from dfwlayer_bench.sweep import SweepError

    studies = request.chosen()
    variants = sum(len(study.variants) for study in studies)
    total = variants * len(cases_of(request.plan))
    total += request.plan.cells if request.compares else 0
    try:
        with progress(console, total) as report:
            if cluster is not None:
                shares = (request.plan, request.compares, studies)
                say = partial(console.print, **PLAIN)
                run_shares(cluster, *shares, store, report, say)
                return 0
            if studies:  # before the rivals load their libraries and start their threads
                run_studies(request.plan, studies, store, report)
            if request.compares:
                run_plan(request.plan, store, report)
    except KeyboardInterrupt:
        return interrupted(console)
    except SweepError as error:  # what could be done is done, and reported
        return refuse(console, str(error), 1)
    return 0


def _saved(request: Request, store: Store) -> tuple[list[Cell], list[Record]]:
    """What the folder holds for this request, of parts run earlier too."""
    from dfwlayer_bench.bench.run import saved_cells
    from dfwlayer_bench.reproduce.studies.base import saved_records

    studies = [study for part in PARTS for study in request.studies_of(part)]
    return saved_cells(request.plan, store), saved_records(request.plan, studies, store)
