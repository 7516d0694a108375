"""Simplices against the packages people use for them, where those are installed.

The projection onto the simplex against sparsemax of `entmax`, and a quadratic over the capped
simplex against `cvxpylayers`: a pass forwards and one backwards, each with its own defaults, and
the answers compared. They take turns in one process on one thread. DFW_QUICK=1 makes the problems
small.
"""

import importlib
import os
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer import CappedSimplex, Quadratic, Simplex, solve

QUICK = "DFW_QUICK" in os.environ


class Pass(NamedTuple):
    """A solution and the gradient of ⟨v, x⟩ in what it was found from."""

    x: Tensor
    gradient: Tensor


def optional(name: str) -> ModuleType | None:
    """A package that need not be there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"  {name}: not installed")
        return None


def timed(calls: dict[str, Callable[[], Pass]], rounds: int) -> dict[str, tuple[float, Pass]]:
    """Least seconds and the answer of each; the first call, which may build things, not counted.

    The least, as other programs on the machine can only add to it.
    """
    answers = {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: (min(times[name]), answers[name]) for name in calls}


def differentiated(run: Callable[[Tensor], Tensor], data: Tensor, v: Tensor) -> Pass:
    """Forwards and backwards."""
    leaf = data.clone().requires_grad_()
    x = run(leaf)
    (gradient,) = torch.autograd.grad((v * x).sum(), leaf)
    return Pass(x.detach(), gradient)


def projection(batch: int, n: int, rounds: int) -> None:
    """argmin ‖x − z‖ over the simplex, which is sparsemax(z)."""
    print(f"projection onto the simplex, batch {batch}, n = {n}, float32")
    z, v = torch.randn(batch, n), torch.randn(batch, n)
    calls = {
        "dfwlayer": lambda: differentiated(lambda z: solve(Quadratic(None, -z), Simplex()).x, z, v)
    }
    entmax = optional("entmax")
    if entmax is not None:
        calls["entmax"] = lambda: differentiated(lambda z: entmax.sparsemax(z, -1), z, v)
        k = max(1, n // 10)  # a guess of the support makes it faster
        calls[f"entmax, k = {k}"] = lambda: differentiated(
            lambda z: entmax.sparsemax(z, -1, k), z, v
        )
    found = timed(calls, rounds)
    own = found["dfwlayer"][1]
    for name, (seconds, answer) in found.items():
        off = max(float((a - b).abs().max()) for a, b in zip(own, answer, strict=True))
        print(f"  {name}: {1e3 * seconds:.1f} ms, differs from ours by {off:.0e}")


def portfolio(n: int, rounds: int) -> None:
    """A quadratic over {x : 0 ≤ x ≤ cap, Σ x = 1}, with gradients in q."""
    print(f"quadratic over the capped simplex, n = {n}, float64")
    R = torch.randn(n, n, dtype=torch.float64)
    P = R @ R.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)
    q, v = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    q = 3 / n * q  # of the size of Px, so that x is between its bounds in many entries
    cap = 5 / n
    capped = CappedSimplex(1.0, cap)
    calls = {"dfwlayer": lambda: differentiated(lambda q: solve(Quadratic(P, q), capped).x, q, v)}
    cp, layers = optional("cvxpy"), optional("cvxpylayers.torch")
    if cp is not None and layers is not None:
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # theirs
        x, linear = cp.Variable(n), cp.Parameter(n)
        value = 0.5 * cp.quad_form(x, cp.psd_wrap(P.numpy())) + linear @ x
        task = cp.Problem(cp.Minimize(value), [x >= 0, x <= cap, cp.sum(x) == 1])
        layer = layers.CvxpyLayer(task, parameters=[linear], variables=[x])
        calls["cvxpylayers"] = lambda: differentiated(lambda q: layer(q)[0], q, v)
    found = timed(calls, rounds)
    own = found["dfwlayer"][1]
    for name, (seconds, (x, gradient)) in found.items():
        outside = max(0.0, float(-x.min()), float(x.max()) - cap, abs(float(x.sum()) - 1))
        cosine = torch.cosine_similarity(gradient, own.gradient, dim=0)
        print(
            f"  {name}: {1e3 * seconds:.1f} ms, violation {outside:.0e}, "
            f"‖x − ours‖ {float((x - own.x).norm()):.0e}, cosine of the gradients {cosine:.6f}"
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if QUICK:
        projection(batch=8, n=50, rounds=1)
        portfolio(n=30, rounds=1)
    else:
        projection(batch=512, n=1000, rounds=21)
        portfolio(n=1000, rounds=5)
