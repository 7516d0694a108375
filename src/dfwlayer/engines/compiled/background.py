"""Nobody has to wait for Numba: what is not compiled yet is compiled beside the caller.

Compiled code is kept on disk, and loaded from there within a second. Where it is not there yet, a
solve is answered by tensor operations, and a process of its own (`dfwlayer.engines.compiled.fill`)
fills the disk at low priority; later solves find the code there. It does not end with the process
that has started it, so that a short program gets it done as well. Where no process can be started,
or nothing can be written to, a thread of this one compiles, and its solves are left to tensor
operations until that has ended.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["NotCompiledError", "busy", "mode", "start", "using", "watch"]

MODES = {"background": "background", "1": "background", "wait": "wait", "off": "off", "0": "off"}
VARIABLE = "DFWLAYER_COMPILED"
KERNELS = "dfwlayer.engines.compiled.kernels."
TAKEN = 75  # the exit code of a process that has found another one at work
PAUSE = 5.0  # seconds before one is started again after that


def _initial() -> str:
    """The mode that the environment asks for."""
    given = os.environ.get(VARIABLE) or "background"
    if given not in MODES:
        raise ValueError(f"{VARIABLE}: expected one of {list(MODES)}, got {given!r}")
    return MODES[given]


DEFAULT = _initial()
_mode: ContextVar[str] = ContextVar("dfwlayer_compiled", default=DEFAULT)


def mode() -> str:
    """What a solve does in this context while there is no compiled code for it.

    "background": tensor operations solve while it is compiled elsewhere; "wait": it is compiled
    first; "off": compiled code is not used at all.
    """
    return _mode.get()


@contextmanager
def using(compiled: bool | str) -> Iterator[None]:
    """Solve with compiled code, or without it, in this context, or in one of the modes."""
    if isinstance(compiled, bool):
        compiled = (DEFAULT if DEFAULT != "off" else "background") if compiled else "off"
    elif compiled not in MODES:
        raise ValueError(f"compiled: expected True, False or one of {list(MODES)}")
    before = _mode.set(MODES[compiled])
    try:
        yield
    finally:
        _mode.reset(before)


class NotCompiledError(Exception):
    """Raised in place of compiling where nobody is to wait for it."""

    def __init__(self, kind: str = "", folder: str | None = None) -> None:
        super().__init__(kind)
        self.kind = kind  # the module of the kernels
        self.folder = folder  # where they are kept on disk, if there is a place for them


def watch() -> None:
    """Have `NotCompiledError` raised where Numba begins to compile a kernel that is not on disk."""
    event: Any = import_module("numba.core.event")

    class Watch(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            dispatcher = event.data.get("dispatcher")
            module = getattr(getattr(dispatcher, "py_func", None), "__module__", None) or ""
            if module.startswith(KERNELS) and mode() == "background":
                raise NotCompiledError(module.removeprefix(KERNELS), dispatcher.stats.cache_path)

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Watch())


class _Work:
    """What is under way for this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.elsewhere: subprocess.Popen[bytes] | None = None
        self.ended = False  # the process that was to fill the disk, whatever came of it
        self.again = 0.0  # when another one may be started
        self.here = False  # a thread is compiling; after a fork that thread is gone
        self.tried = False  # one was started

    def go_on(self, kind: str, folder: str | None) -> None:
        """Start what is to be started, after code was found missing."""
        if self.tried:
            return
        if self.elsewhere is not None:
            code = self.elsewhere.poll()
            if code is None:
                return
            self.elsewhere, self.ended = None, code != TAKEN
            self.again = time.monotonic() + PAUSE
            return  # it may have come to disk since it was missed
        if folder is not None and not self.ended:
            if time.monotonic() < self.again:
                return
            self.elsewhere = _fill(kind, folder)
            if self.elsewhere is not None:
                return
        self.tried = self.here = True
        try:
            threading.Thread(target=self._compile, args=(kind,), daemon=True).start()
        except RuntimeError:  # no more threads
            self.here = False

    def _compile(self, kind: str) -> None:
        try:
            with suppress(Exception):  # tensor operations go on; `warm_up` shows what is wrong
                import_module("dfwlayer.solve").compile_all(kind)
        finally:
            self.here = False


_work = _Work()
_lock = threading.Lock()


def busy() -> bool:
    """Whether compiled code is to be left alone, as a thread is compiling and Numba has one lock.

    One that was compiling before a fork has left that lock behind as it was.
    """
    return _work.here and (mode() == "background" or _work.process != os.getpid())


def start(missing: NotCompiledError) -> None:
    """See to it that what was found missing will be there."""
    global _work
    if not _lock.acquire(blocking=False):
        return
    try:
        if _work.process != os.getpid():  # after a fork
            _work = _Work()
        _work.go_on(missing.kind, missing.folder)
    finally:
        _lock.release()


def _fill(kind: str, folder: str) -> subprocess.Popen[bytes] | None:
    """A process that compiles, this kind of kernels first; None where none can be started.

    An application that was frozen, or has Python built in, would be started itself.
    """
    program = Path(__file__).with_name("fill.py")
    python = sys.executable or ""
    plain = Path(python).name.lower().startswith(("python", "pypy"))
    if getattr(sys, "frozen", False) or not plain or not program.is_file():
        return None
    paths = [str(Path(path).absolute()) for path in sys.path if isinstance(path, str)]
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.BELOW_NORMAL_PRIORITY_CLASS | subprocess.CREATE_NO_WINDOW
    try:
        return subprocess.Popen(
            [python, "-P", str(program), folder, kind, *paths],
            env={**os.environ, VARIABLE: "wait", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor a closed terminal is meant for it
            creationflags=flags,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


@atexit.register
def _let_go() -> None:
    """It may go on after this process, which is not worth a warning."""
    if _work.elsewhere is not None and _work.elsewhere.poll() is None:
        _work.elsewhere.returncode = 0
