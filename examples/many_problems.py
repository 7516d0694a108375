"""Ten million small problems, from Parquet to Parquet: on Ray, or without it.

    python examples/many_problems.py --out runs/many                    # on a Ray of this machine
    python examples/many_problems.py --out runs/many --ray HOST:PORT    # of many: a shared folder
    python examples/many_problems.py --out runs/many --no-ray           # the same, by processes
    python examples/many_problems.py --out runs/many --compare          # both in turns: throughput

Ten million accounts want to move towards a portfolio of their own, and each may trade only so much:
minimise ½xᵀPx + qᵀx over Σ|x_i| ≤ t with ten assets, a P for all, and a q and a t for each. Shards
of problems become shards of results with x, value, certified gap and status of every row; rows
without sound data say so in their status and disturb no others.

A shard gets its name when it is complete, so that the same command goes on after anything: workers
that are killed are replaced, and a run that was killed is continued; no shard is solved twice, and
none is lost.
"""

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    sys.exit("this example needs the extra: pip install 'dfwlayer[ray]'")

import dfwlayer.integrations.numpy as dfw
from dfwlayer import Status, warm_up
from dfwlayer.integrations.batches import BatchSolver, Column
from dfwlayer_bench.report.machine import cores
from dfwlayer_bench.sweep import SweepError, cluster

QUICK = "DFW_QUICK" in os.environ
ASSETS = 10
BATCH = 20_000  # problems that are solved in one call
BAD = 1000  # of so many accounts, the data of one are broken
TURNS = 5  # of each side, when throughput is compared
Run = Callable[..., Iterator[tuple[str, Any]]]  # a function and its cells, as `Cluster.run` takes


def solver() -> BatchSolver:
    returns = np.random.default_rng(0).normal(size=(4 * ASSETS, ASSETS))
    risk = (np.cov(returns.T) + 0.1 * np.eye(ASSETS)).astype(np.float32)
    return BatchSolver(dfw.Quadratic(risk, Column("q")), dfw.LpBall(1, radius=Column("limit")))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A draft to write to, which gets the name of the file once it is complete."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def make_shard(path: Path, first: int, rows: int) -> None:
    """Problems first, …, first + rows − 1, the same ones each time."""
    if path.exists():
        return
    draw = np.random.default_rng([1, first])
    q = draw.normal(size=(rows, ASSETS)).astype(np.float32)
    account = np.arange(first, first + rows)
    q[account % BAD == BAD - 1, 0] = np.nan
    columns = {
        "account": account,
        "q": pa.FixedSizeListArray.from_arrays(q.ravel(), ASSETS),
        "limit": draw.uniform(0.05, 2.0, rows).astype(np.float32),
    }
    with whole(path) as draft:
        pq.write_table(pa.table(columns), draft, row_group_size=BATCH, compression="none")


def solve_shard(source: Path, target: Path) -> None:
    """Batch by batch, unless it is done."""
    if target.exists():
        return
    solve = solver()
    writer = None
    with pq.ParquetFile(source) as problems, whole(target) as draft, ExitStack() as stack:
        for batch in problems.iter_batches(BATCH):
            results = solve(batch)
            if writer is None:
                kind = pq.ParquetWriter(draft, results.schema, compression="none")
                writer = stack.enter_context(kind)
            writer.write_batch(results)


class Job:
    """The shards of a folder."""

    def __init__(self, out: Path, problems: int, shard: int) -> None:
        self.out, self.problems, self.shard = out, problems, shard
        self.firsts = {f"{i:06}.parquet": i * shard for i in range(-(-problems // shard))}
        out.mkdir(parents=True, exist_ok=True)
        for draft in out.glob("**/.*.draft"):  # of a run that was killed
            draft.unlink()
        about = {"problems": problems, "shard": shard}
        note = out / "job.json"
        if note.exists() and json.loads(note.read_text()) != about:
            sys.exit(f"--out: {out} holds another job, {note.read_text()}; name another folder")
        with whole(note) as draft:
            draft.write_text(json.dumps(about))

    def folder(self, name: str) -> Path:
        found = (self.out / name).absolute()  # workers may run elsewhere
        found.mkdir(parents=True, exist_ok=True)
        return found

    def rows(self, name: str) -> int:
        return min(self.shard, self.problems - self.firsts[name])

    def to_make(self) -> dict[str, tuple[Path, int, int]]:
        folder = self.folder("problems")
        cells = {n: (folder / n, first, self.rows(n)) for n, first in self.firsts.items()}
        return {name: cell for name, cell in cells.items() if not cell[0].exists()}

    def to_solve(self, target: str) -> dict[str, tuple[Path, Path]]:
        source, results = self.folder("problems"), self.folder(target)
        cells = {name: (source / name, results / name) for name in self.firsts}
        return {name: cell for name, cell in cells.items() if not cell[1].exists()}

    def finish(self, run: Run, work: Callable[..., None], cells: Mapping[str, Any]) -> float:
        """Run these shards and show how far it is; the seconds."""
        start, shown, rows = time.perf_counter(), 0.0, 0
        for done, (name, _) in enumerate(run(work, cells), 1):
            rows += self.rows(name)
            seconds = time.perf_counter() - start
            if seconds - shown > 2 or done == len(cells):
                shown, left = seconds, seconds * (len(cells) - done) / done
                print(
                    f"{work.__name__}: {done} of {len(cells)} shards, {rows / seconds:,.0f} "
                    f"problems/s, {left:.0f} s left",
                    flush=True,
                )
        return time.perf_counter() - start

    def checked(self, target: str) -> None:
        """Every problem is answered once; tells how they ended."""
        counts: dict[int, int] = {}
        for name, first in self.firsts.items():
            found = pq.read_table(self.folder(target) / name, columns=["account", "status"])
            account = found["account"].to_numpy()
            assert np.array_equal(account, np.arange(first, first + self.rows(name))), name
            codes, times = np.unique(found["status"].to_numpy(), return_counts=True)
            for code, count in zip(codes.tolist(), times.tolist(), strict=True):
                counts[code] = counts.get(code, 0) + count
        assert sum(counts.values()) == self.problems
        named = ", ".join(f"{count:,} {Status(code).name}" for code, count in counts.items())
        print(f"{self.problems:,} problems in {self.folder(target)}: {named}")


@contextmanager
def on_ray(address: str, count: int) -> Iterator[Run]:
    with cluster(address, count) as workers:
        yield lambda work, cells: workers.run(work, cells, say=print)


@contextmanager
def in_processes(count: int) -> Iterator[Run]:
    deaf = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which ends the others
    pool = ProcessPoolExecutor(count, get_context("spawn"), signal.signal, deaf)

    def run(work: Callable[..., Any], cells: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        futures = {pool.submit(work, *cell): name for name, cell in cells.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def compare(job: Job, address: str, count: int) -> None:
    """The same shards with Ray and without, in turns, after both have warmed up."""
    rmtree(job.out / "compared", ignore_errors=True)
    with on_ray(address, count) as ray, in_processes(count) as plain:
        sides = {"with Ray": ray, "without": plain}
        first = list(job.firsts)[: 2 * count]
        job.finish(ray, make_shard, job.to_make())
        for side, run in sides.items():
            cells = job.to_solve(f"compared/{side}, warming up")
            job.finish(run, solve_shard, {name: cells[name] for name in first})
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        turns = min(TURNS, max(1, len(job.firsts) // count))
        names = [list(job.firsts)[turn::turns] for turn in range(turns)]
        for turn, some in enumerate(names):
            order = list(sides.items())[:: 1 if turn % 2 else -1]
            for side, run in order:
                cells = job.to_solve(f"compared/{side}")
                seconds[side].append(job.finish(run, solve_shard, {n: cells[n] for n in some}))
    for side in sides:
        job.checked(f"compared/{side}")
        print(f"{side}: {job.problems / sum(seconds[side]):,.0f} problems/s")
    each = [b / a for a, b in zip(seconds["with Ray"], seconds["without"], strict=True)]
    ratio = sum(seconds["without"]) / sum(seconds["with Ray"])
    print(f"throughput with Ray / without: {ratio:.3f}, in turns {[round(r, 3) for r in each]}")
    for name in job.firsts:
        ours, theirs = (pq.read_table(job.folder(f"compared/{side}") / name) for side in sides)
        for column in ("x", "gap", "status"):
            a, b = (t[column].combine_chunks() for t in (ours, theirs))
            a, b = (c.flatten() if column == "x" else c for c in (a, b))
            assert np.array_equal(a.to_numpy(), b.to_numpy(), equal_nan=True), (name, column)


def main() -> int:
    parser = argparse.ArgumentParser(description="Millions of problems, from Parquet to Parquet.")
    parser.add_argument("--problems", type=int, default=4000 if QUICK else 10**7)
    parser.add_argument("--shard", type=int, default=500 if QUICK else 100_000, help="problems")
    parser.add_argument("--out", type=Path, default=Path("runs/many_problems"))
    parser.add_argument("--ray", default="local", metavar="ADDRESS|local")
    parser.add_argument("--no-ray", action="store_true", help="a pool of processes instead")
    parser.add_argument("--compare", action="store_true", help="throughput with Ray and without")
    parser.add_argument("--cores", type=int, default=cores(), help="of this machine")
    given = parser.parse_args()
    warm_up()  # what is compiled is on disk then, and all workers here load it
    job = Job(given.out, given.problems, given.shard)
    try:
        if given.compare:
            compare(job, given.ray, given.cores)
            return 0
        place = in_processes(given.cores) if given.no_ray else on_ray(given.ray, given.cores)
        with place as run:
            job.finish(run, make_shard, job.to_make())
            left = job.to_solve("results")
            print(f"{len(job.firsts) - len(left)} of {len(job.firsts)} shards are there")
            job.finish(run, solve_shard, left)
    except SweepError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted; the same command goes on")
    job.checked("results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
