"""The cells of a sweep on Ray: those of a worker that dies are run again, and Ctrl-C stops them.

A cell is a call that leaves its result on disk, whole or not at all, and returns at once if it is
there. So what was finished is kept whatever happens to a worker or to the program that started it,
and the same command goes on.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from dfwlayer_bench.report.machine import cores as own_cores

__all__ = ["Cluster", "SweepError", "claimed_cores", "cluster"]

DEATHS = 4  # of its workers, after which a cell is given up
TICK = 1.0  # seconds between two looks at what goes on
GRACE = 60.0  # seconds that cells have to save what they have, once they are to stop
REACH = 10.0  # seconds to reach an address
LOCAL = "local"


class SweepError(Exception):
    """The cells cannot be run, or not all of them; the message says why and what to do."""


@contextmanager
def cluster(address: str, cores: int | None = None) -> Iterator[Cluster]:
    """Ray at ADDRESS, or for "local" on so many cores (all) of this machine until the block ends.

    One that this process is connected to already is used, and left as it is.
    """
    if find_spec("ray") is None:
        raise SweepError(
            "--ray: Ray is not installed; install it with pip install 'dfwlayer[ray]', or leave "
            "the option out"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    import ray

    started = not ray.is_initialized()
    if started:
        _start(ray, address, cores)
    try:
        yield Cluster(ray)
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any, address: str, cores: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        # workers would stand back behind everything else on this machine (nice 15), and so would
        # the times that they measure
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(LOCAL, num_cpus=cores or own_cores(), include_dashboard=False, **quiet)
        return
    variables = {n: v for n, v in os.environ.items() if n.startswith("DFWLAYER_")}
    try:
        if address != "auto":  # Ray itself would wait for minutes
            where = urlsplit(address if "//" in address else f"//{address}")
            socket.create_connection((where.hostname or "", where.port or 0), REACH).close()
        ray.init(address, runtime_env={"env_vars": variables}, **quiet)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise SweepError(
            f"--ray: cannot reach Ray at {address} ({error}); expected local, auto, or HOST:PORT "
            "as `ray start` prints it"
        ) from error


class Cluster:
    """Machines that run cells."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def run(
        self,
        work: Callable[..., Any],
        cells: Mapping[str, tuple[Any, ...]],
        *,
        cores: int = 1,
        gpus: int = 0,
        say: Callable[[str], None] = lambda _: None,
        watch: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Any]]:
        """Run ``work(*arguments)`` for each cell; yields names and results as they are finished.

        Args:
            work: A function of a module that the workers can import.
            cells: Names and arguments.
            cores: Of one machine, for one cell.
            gpus: Likewise.
            say: Told about every worker that died, and about an early stop.
            watch: Called about once a second.

        Raises:
            SweepError: After all others are done, naming cells whose workers died again and again;
                before, if no machine is large enough.
            Exception: The first that a cell raises; the others are stopped.

        """
        ray = self._ray
        self._check_room(cores, gpus)
        remote = ray.remote(work).options(num_cpus=cores, num_gpus=gpus, max_retries=0)
        running = {remote.remote(*arguments): name for name, arguments in cells.items()}
        deaths: Counter[str] = Counter()
        try:
            while running:
                ready, _ = ray.wait(list(running), timeout=TICK)
                watch()
                for reference in ready:
                    name = running[reference]
                    try:
                        result = ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except ray.exceptions.RayError as error:  # no fault of the cell's code
                        deaths[name] += 1
                        why = str(error).splitlines()[0] if str(error) else type(error).__name__
                        if deaths[name] < DEATHS:
                            say(f"{name}: a worker died and another one takes over ({why})")
                            running[remote.remote(*cells[name])] = name
                        continue
                    finally:
                        del running[reference]
                    yield name, result
        finally:
            self._stop(running, say)
        lost = [name for name, count in deaths.items() if count >= DEATHS]
        if lost:
            raise SweepError(
                f"{', '.join(lost)}: {DEATHS} workers died over it, out of memory or by a crash; "
                "the others are done and saved. The same command tries it again"
            )

    def ask(self, work: Callable[..., Any], *arguments: Any, cores: int, gpus: int = 0) -> Any:
        """What one worker answers."""
        ((_, answer),) = self.run(work, {"question": arguments}, cores=cores, gpus=gpus)
        return answer

    def _check_room(self, cores: int, gpus: int) -> None:
        """A cell that fits nowhere would be waited for without end."""
        for what, wanted in (("CPU", cores), ("GPU", gpus)):
            nodes = [n["Resources"].get(what, 0) for n in self._ray.nodes() if n["Alive"]]
            if wanted > max(nodes, default=0):
                raise SweepError(
                    f"--ray: a cell takes {wanted} {what} of one machine, and the largest here has "
                    f"{max(nodes, default=0):g}"
                )

    def _stop(self, running: Mapping[Any, str], say: Callable[[str], None]) -> None:
        """Interrupt what goes on, and wait until it has saved what it has."""
        if not running:
            return
        say("Stopping; what goes on saves what it has. Ctrl-C once more stops it at once")
        for reference in running:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=False)
        self._ray.wait(list(running), num_returns=len(running), timeout=GRACE)


@contextmanager
def claimed_cores(count: int | None) -> Iterator[None]:
    """Hold this process to so many cores that no other worker here has claimed; None for all.

    What is timed should not share its cores. A claim is the lock of a file, which ends with the
    process that has it, however that ends.
    """
    if count is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    import fcntl

    allowed = os.sched_getaffinity(0)
    with ExitStack() as stack:
        mine: set[int] = set()
        for core in sorted(allowed):
            path = Path(tempfile.gettempdir()) / f"dfw-core-{os.getuid()}-{core}.lock"
            file: IO[str] = stack.enter_context(path.open("w"))
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine.add(core)
            if len(mine) == count:
                break
        # where others have claimed too many, cores are shared
        os.sched_setaffinity(0, mine if len(mine) == count else allowed)
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)
