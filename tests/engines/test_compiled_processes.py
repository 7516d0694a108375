"""Where compiled code runs: threads, processes, without Numba."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64, N
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import threads
from dfwlayer.engines.compiled.kernels import (
    ball,
    exchange,
    linear,
    nearest,
    outside,
    power,
    search,
)


def test_without_numba(monkeypatch):
    q = torch.randn(4, dtype=F64)
    expected = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), dfw.Simplex())
    monkeypatch.setattr(compiled, "_loaded", {})
    monkeypatch.setitem(sys.modules, "dfwlayer.engines.compiled.engine", None)
    monkeypatch.delattr(compiled, "engine")
    assert not dfw.warm_up()
    sol = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), dfw.Simplex())
    torch.testing.assert_close(sol.x, expected.x)


@cache
def batch():
    """Made once: matrices are multiplied by threads, which do not survive a fork."""
    make = torch.Generator().manual_seed(5)
    root = torch.randn(300, N, N, dtype=F64, generator=make)
    q = torch.randn(300, N, dtype=F64, generator=make)
    return dfw.Quadratic(root.mT @ root + torch.eye(N, dtype=F64), q)


def solved_there(_=None):
    torch.set_num_threads(1)
    objective = batch()
    torch.set_num_threads(2)
    try:
        return dfw.solve(objective, dfw.Simplex()).x.numpy()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["threads", "fork", "spawn"])
def test_threads_and_processes(kind):
    """Batches that are spread over threads, in threads, after a fork, and in a new process.

    What runs in one process, or in a fork of it, is the same code, to the last bit. A new process
    loads what was kept on disk, which another one may have compiled where both began with nothing;
    sums may be taken in any order, and Numba does not always choose the same one.
    """
    expected = solved_there()
    if kind == "threads":
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(solved_there, range(8)))
    else:
        with multiprocessing.get_context(kind).Pool(2) as pool:
            found = pool.map_async(solved_there, range(4)).get(timeout=120)
    for x in found:
        if kind == "spawn":
            np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-13)
        else:
            np.testing.assert_array_equal(x, expected)


def test_is_loaded_when_needed_only():
    """Numba takes a while to import; those who solve nothing small should not wait for it."""
    code = (
        "import sys, torch, dfwlayer as dfw; assert 'numba' not in sys.modules; "
        "dfw.solve(dfw.Quadratic(None, torch.ones(2)), dfw.LpBall(2, 1.0), method='dfw'); "
        "assert 'numba' not in sys.modules; assert dfw.warm_up(); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_is_not_loaded_where_it_is_turned_off():
    code = (
        "import sys, torch, dfwlayer as dfw\n"
        "q = torch.ones(4, 3, dtype=torch.float64)\n"
        "for _ in range(2):  # the second call is known by its signature\n"
        "    dfw.solve(dfw.Quadratic(None, q), dfw.Box(-0.1, 0.1))\n"
        "assert 'numba' not in sys.modules"
    )
    off = os.environ | {"DFWLAYER_COMPILED": "off"}
    subprocess.run([sys.executable, "-c", code], check=True, env=off)


def test_warm_up_leaves_nothing_to_compile():
    """Every way in from Python has been called, forwards and backwards, also those by columns.

    And with arrays of the same types as all others, those of a tensor of weights among them.
    """
    assert dfw.warm_up()
    for p in (1.0, 2.0, 3.0):
        for shape in ((N,), (2, N)):
            weight = torch.ones(shape, dtype=F64, requires_grad=True)
            radius = torch.full(shape[:-1], 0.5, dtype=F64, requires_grad=True)
            f = dfw.Quadratic(torch.eye(N, dtype=F64), torch.ones(N, dtype=F64))
            dfw.solve(f, dfw.LpBall(p, radius, weight)).x.sum().backward()
    ways = (search.search, search.adjoint, nearest.search, nearest.adjoint, exchange.exchange)
    ways += (ball.search, ball.adjoint, power.search, power.adjoint, linear.search, linear.adjoint)
    ways += (outside.begin, outside.assess, outside.certify)
    assert [len(way.signatures) for way in ways] == [1] * len(ways)


def test_what_no_thread_has_begun_is_done_by_the_caller(monkeypatch):
    """Threads may have to wait for a core, or for what others have given them to do."""
    done, busy = [], Event()
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(threads, "_pool", lambda: pool)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        held = pool.submit(busy.wait, 20)
        threads.spread(lambda *part: done.append(part), 9, threads.WORTH, "given")
        assert not held.done()
    finally:
        torch.set_num_threads(before)
        busy.set()
        pool.shutdown()
    assert sorted(done) == [(0, 3, "given"), (3, 6, "given"), (6, 9, "given")]
