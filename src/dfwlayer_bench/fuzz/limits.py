"""A limit on how long a call may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["LONGER", "limited", "patiently"]

T = TypeVar("T")
WAITING = 10  # times as long, on a machine where others are at work, before a call counts as stuck
LONGER = 4  # times as long, when a call that took too long is made once more


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after that long, in time of this process, where signals can be used."""
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    clocks = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, WAITING * seconds),
    )
    before = [signal.signal(number, stop) for number, *_ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def patiently(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns, within that time; it is made once more if it took longer.

    On a machine with more work than cores the processor time of a call may be a multiple of what it
    is otherwise. Only a call that takes far longer the second time as well raises TimeoutError.
    """
    try:
        with limited(seconds):
            return call()
    except TimeoutError:
        with limited(LONGER * seconds):
            return call()
