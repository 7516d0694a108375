"""Nobody waits for Numba: what answers while there is no compiled code, and how it comes about."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64, N
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import answer, arrays, background, engine, fill, sets
from dfwlayer.engines.compiled.kernels import ball

PROBLEM = """
import json, sys, time
import torch
import dfwlayer as dfw
from dfwlayer.engines.compiled import background

q = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
P = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

def solved():
    begin = time.perf_counter()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, 0.5))
    assert sol.converged
    gradient, = torch.autograd.grad(sol.x.square() @ q.detach(), q)
    return *sol.x.tolist(), *gradient.tolist(), time.perf_counter() - begin

def is_compiled():
    from dfwlayer.engines.compiled.kernels import ball
    return bool(ball.search.signatures and ball.adjoint.signatures)
"""
UNTIL_COMPILED = """
end, longest = time.monotonic() + 200, 0.0
while time.monotonic() < end and not (is_compiled() and not background.busy()):
    longest = max(longest, solved()[-1])
    time.sleep(0.05)
assert is_compiled()
print(json.dumps([*solved()[:-1], longest]))
"""


def run(code, **environment):
    """What a program prints at its end, in a process that compiles in the background."""
    env = {**os.environ, "DFWLAYER_COMPILED": "background", **environment}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", PROBLEM + code]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_process_of_its_own_fills_the_disk(tmp_path):
    """It goes on when the program that has started it ends, and the next one finds its work."""
    once = "x = solved(); assert not is_compiled(); work = background._work.elsewhere"
    once += "; assert work.poll() is None; print(json.dumps([*x, work.pid]))"
    *first, _, process = run(once, NUMBA_CACHE_DIR=str(tmp_path))
    try:
        *second, longest = run(UNTIL_COMPILED, NUMBA_CACHE_DIR=str(tmp_path))
    finally:
        os.kill(process, signal.SIGKILL)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    assert longest < 10  # one of them has loaded the code; compiling all of it takes far longer


def test_where_nothing_can_be_written_a_thread_compiles():
    code = (
        "import numba.core.caching as caching\n"
        "kind = getattr(caching, 'CacheImpl', None) or caching._CacheImpl\n"
        "kind._locator_classes = []\n"
        "def only(kind):\n"
        "    with background.using('wait'):\n"
        "        assert kind == 'ball'; solved()\n"
        "import importlib; importlib.import_module('dfwlayer.solve').compile_all = only\n"
        "first = solved(); assert background._work.here and not is_compiled()\n"
    )
    *found, _ = run(code + UNTIL_COMPILED)
    *expected, _ = run("print(json.dumps(solved()))", DFWLAYER_COMPILED="off")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_program_may_end_while_a_thread_compiles(tmp_path):
    code = (
        "background._fill = lambda *_: None\n"
        "solved(); assert background._work.here; time.sleep(2); print(json.dumps(0))"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == 0


class Never:
    """A process that could not be started."""

    def __init__(self, *_, **__):
        raise PermissionError


@pytest.mark.parametrize("where", ["frozen", "embedded", "unknown", "sandbox", "archive"])
def test_where_no_process_can_be_started(where, monkeypatch):
    """An executable that is not Python would be started once more, whatever it is."""
    started = []
    monkeypatch.setattr(background.subprocess, "Popen", lambda *_, **__: started.append(1))
    background._fill("ball", "/somewhere")
    assert started
    if where == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif where == "archive":
        monkeypatch.setattr(background, "__file__", "/nowhere.zip/background.py")
    elif where == "sandbox":
        monkeypatch.setattr(background.subprocess, "Popen", Never)
    else:
        monkeypatch.setattr(sys, "executable", "/opt/editor" if where == "embedded" else None)
    assert background._fill("ball", "/somewhere") is None
    assert len(started) == 1


class Process:
    """One that was started, with its exit code."""

    def __init__(self):
        self.code = None

    def poll(self):
        return self.code


@pytest.fixture
def work(monkeypatch):
    """Work with processes and threads that do nothing."""
    started = []

    def start(*_):
        started.append(Process())
        return started[-1]

    class Thread:
        def __init__(self, **_):
            started.append("thread")

        def start(self):
            pass

    monkeypatch.setattr(background, "_fill", start)
    monkeypatch.setattr(background.threading, "Thread", Thread)
    monkeypatch.setattr(background, "_work", background._Work())
    monkeypatch.setattr(background, "PAUSE", 0.0)
    return started


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_thread_compiles_after_a_process_that_did_not(work, code):
    """The code is looked for once more after its end, as it may have come just before."""
    missing = background.NotCompiledError("ball", "/somewhere")
    background.start(missing)
    background.start(missing)
    assert len(work) == 1
    work[0].code = code
    background.start(missing)
    assert len(work) == 1
    background.start(missing)
    background.start(missing)
    assert work[1:] == ["thread"]
    with compiled.using("background"):
        assert background.busy()
    with compiled.using("wait"):
        assert not background.busy()


def test_another_process_is_started_where_one_was_at_it_already(work):
    missing = background.NotCompiledError("ball", "/somewhere")
    for count in (1, 2, 3):
        background.start(missing)
        assert len(work) == count
        work[-1].code = background.TAKEN
        background.start(missing)


def test_a_fork_starts_anew_but_leaves_a_lock_alone_that_nobody_will_open(work, monkeypatch):
    missing = background.NotCompiledError("ball", "/somewhere")
    background.start(missing)
    monkeypatch.setattr(background.os, "getpid", lambda: -1)
    background.start(missing)
    assert len(work) == 2
    background._work.here = True
    monkeypatch.setattr(background.os, "getpid", lambda: -2)
    for mode in ("background", "wait"):
        with compiled.using(mode):
            assert background.busy()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
def test_two_processes_do_not_do_the_same_work(tmp_path):
    """The second one ends before it has imported anything, which is not to be found here."""
    assert fill.TAKEN == background.TAKEN
    assert fill.alone(str(tmp_path))
    for folder, code in ((tmp_path, fill.TAKEN), (tmp_path / "other", 1)):
        command = [sys.executable, "-P", fill.__file__, folder, "ball", "/nowhere"]
        done = subprocess.run(command, check=False, capture_output=True)
        assert done.returncode == code


def test_a_batch_of_several_threads_waits_if_it_is_to(monkeypatch):
    """What is asked for holds in the threads that a batch is spread over."""
    modes = []
    f = dfw.Quadratic(None, torch.randn(20_000, 40, dtype=F64))
    kernel = sets.nearest.search
    monkeypatch.setattr(
        sets.nearest, "search", lambda *args: (modes.append(background.mode()), kernel(*args))
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compiled.using("background"):
            assert dfw.solve(f, dfw.Simplex()).converged.all()
    finally:
        torch.set_num_threads(threads)
    assert modes == ["background"] * 2


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_gradients_without_compiled_code_for_them(p, rows, monkeypatch):
    """Those of the tensor operations, which have no graph unless one is asked for."""
    make = torch.Generator().manual_seed(7)
    root = torch.randn(*rows, N, N, dtype=F64, generator=make)
    P = (root.mT @ root + torch.eye(N, dtype=F64)).requires_grad_()
    q = torch.randn(*rows, N, dtype=F64, generator=make).requires_grad_()
    weight = (torch.rand(N, dtype=F64, generator=make) + 0.5).requires_grad_()
    radius = torch.full(rows, 0.3, dtype=F64, requires_grad=True)
    inputs = P, q, weight, radius
    v = torch.randn(*rows, N, dtype=F64, generator=make)
    x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, radius, weight)).x
    expected = torch.autograd.grad(x, inputs, v, retain_graph=True)
    asked = []
    monkeypatch.setattr(arrays, "busy", lambda: True)
    monkeypatch.setattr(answer, "start", asked.append)
    found = torch.autograd.grad(x, inputs, v)
    assert asked
    assert not any(gradient.requires_grad for gradient in found)
    torch.testing.assert_close(found, expected)


def test_is_not_compiled_for_those_who_do_not_wait(monkeypatch):
    """Numba is about to compile for types that were not seen before."""
    missed = []
    monkeypatch.setattr(engine, "start", missed.append)
    monkeypatch.setattr(
        engine, "_attempt", lambda *_: ball.search(0, 1, *[torch.ones(1).numpy()] * 14)
    )
    f = dfw.Quadratic(torch.eye(2, dtype=F64), torch.ones(2, dtype=F64))
    with compiled.using("background"):
        assert dfw.solve(f, dfw.LpBall(2, 0.5)).converged
    assert [each.kind for each in missed] == ["ball"]


def test_modes(monkeypatch):
    for given, meant in (("1", "background"), ("0", "off"), ("wait", "wait"), ("", "background")):
        monkeypatch.setenv("DFWLAYER_COMPILED", given)
        assert background._initial() == meant
        monkeypatch.setattr(background, "DEFAULT", meant)
        with compiled.using(True):
            assert background.mode() == (meant if meant != "off" else "background")
        with compiled.using(False):
            assert background.mode() == "off"
    monkeypatch.setenv("DFWLAYER_COMPILED", "maybe")
    with pytest.raises(ValueError, match=r"DFWLAYER_COMPILED: .*'maybe'"):
        background._initial()
    with pytest.raises(ValueError, match="compiled: expected"), compiled.using("maybe"):
        pass
