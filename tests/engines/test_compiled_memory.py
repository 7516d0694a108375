"""Memory of compiled code: whatever a call makes it gives back, and nothing of its caller's."""

import sys

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64, attempted
from dfwlayer.engines.compiled.kernels import dense

runtime = pytest.importorskip("numba.core.runtime._nrt_python")

N = 6
PROBLEMS = {
    "flat": lambda: dfw.CappedSimplex(1.0, 0.3),
    "budget": lambda: dfw.L1Box(0.5, lower=-0.3, upper=0.3),
    "round": lambda: dfw.LpBall(2, 0.5),
    "power": lambda: dfw.LpBall(3, 0.5),
    "rows": lambda: dfw.Polyhedron(torch.ones(2, N, dtype=F64) + torch.eye(2, N, dtype=F64), 0.1),
}


@pytest.fixture
def counted():
    """What Numba has made and not given back."""
    before = runtime.memsys_stats_enabled()
    runtime.memsys_enable_stats()
    yield lambda: (
        runtime.memsys_get_stats_alloc() - runtime.memsys_get_stats_free(),
        runtime.memsys_get_stats_mi_alloc() - runtime.memsys_get_stats_mi_free(),
    )
    if not before:
        runtime.memsys_disable_stats()


@pytest.mark.parametrize("projects", [False, True], ids=["matrix", "projection"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_stays(name, projects, counted):
    """Also of matrices that are symmetric to rounding only, for which others are made."""
    torch.manual_seed(3)
    root = torch.randn(4, N, N, dtype=F64)
    P = root.mT @ root + torch.eye(N, dtype=F64)
    P[..., 0, 1] *= 1 + 1e-15
    q = torch.randn(4, N, dtype=F64, requires_grad=True)
    v, body = torch.randn(4, N, dtype=F64), PROBLEMS[name]()

    def both():
        found = attempted(dfw.Quadratic(None if projects else P, q), body)
        assert found is not None
        (gradient,) = torch.autograd.grad(found.solution.x, q, v)
        return found.solution.x.detach(), gradient

    first = both()
    held = [sys.getrefcount(part) for part in (P, q, v)]
    made = counted()
    for _ in range(50):
        again = both()
    assert counted() == made
    assert [sys.getrefcount(part) for part in (P, q, v)] == held
    assert all(map(torch.equal, first, again))


def test_kernels_make_no_arrays():
    """What counts no references may not hold any: Numba refuses to compile it."""
    numba = pytest.importorskip("numba")

    @dense.kernel
    def making(n):
        out = dense.np.empty(n)
        for i in range(n):
            out[i] = 1.0
        return out[0]

    @numba.njit
    def outer(n):
        return making(n)

    with pytest.raises(numba.core.errors.NumbaError, match="returning of array"):
        outer(3)
