"""A program that compiles everything and leaves it on disk, unless another one is at it.

`dfwlayer.engines.compiled.background` starts it with the folder that compiled code is kept in, the
kind of kernels to begin with, and the folders that modules are imported from. Torch is imported
only when it is known to be needed.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

__all__ = ["alone", "main"]

TAKEN = 75  # as in `background`, which cannot be imported without torch


def alone(folder: str) -> bool:
    """Lock a folder until this process ends; False if another one holds it.

    True where that cannot be done: two then do the same work.
    """
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        return True
    return True


def main(folder: str, first: str, *paths: str) -> int:
    """The exit code."""
    if not alone(folder):
        return TAKEN
    if hasattr(os, "nice"):
        os.nice(10)
    sys.path[:] = paths
    return 0 if import_module("dfwlayer.solve").compile_all(first) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
