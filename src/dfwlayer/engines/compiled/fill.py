"""A program that compiles everything and leaves it on disk, unless another one is at it.

`dfwlayer.engines.compiled.background` starts it with the kind of kernels to begin with and the
folders that modules are imported from. Torch is imported only when it is known to be needed.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import IO

TAKEN = 75  # as in `background`, which cannot be imported without torch


def alone(file: IO[bytes]) -> bool:
    """Lock a file until this process ends; False if another one holds it.

    True where there are no locks: two then do the same work.
    """
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        return True
    return True


def main(first: str, *paths: str) -> int:
    """The exit code."""
    with open(__file__, "rb") as file:
        if not alone(file):
            return TAKEN
        if hasattr(os, "nice"):
            os.nice(10)
        sys.path[:] = paths
        return 0 if import_module("dfwlayer.solve").compile_all(first) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
