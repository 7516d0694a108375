"""``python -m dfwlayer_bench.fuzz``: the same as ``dfw fuzz``, with torch and numpy alone."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dfwlayer_bench.fuzz.report import summary
from dfwlayer_bench.fuzz.run import Options, execute


def main() -> int:
    """Parse, run, report; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m dfwlayer_bench.fuzz", description=__doc__)
    for phase in ("problems", "gradients", "bad-inputs", "soak"):
        parser.add_argument(f"--{phase}", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    given = parser.parse_args()
    wanted = {
        "problems": given.problems,
        "gradients": given.gradients,
        "bad-inputs": given.bad_inputs,
        "soak": given.soak,
    }
    options = Options(wanted, given.seed, given.jobs, given.time_limit, given.out)
    last = time.monotonic() - 100

    def report(phase: str, done: int, total: int, failures: int) -> None:
        nonlocal last
        if time.monotonic() - last > 10 or done >= total:
            last = time.monotonic()
            print(f"{phase}: {done:,} of {total:,}, {failures:,} failures", flush=True)

    try:
        state, whole = execute(options, report)
    except ValueError as error:
        parser.error(str(error))
    print(summary(state, whole))
    return 1 if state.failed else 0


if __name__ == "__main__":
    sys.exit(main())
