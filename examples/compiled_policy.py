"""A policy with limits in one graph of torch.compile: what a step costs, and recompilations.

    python examples/compiled_policy.py
    python examples/compiled_policy.py --limits box simplex l1-box

Prints the time of a call and of a training step of the network alone and of policies with a limit
on their six actions, in eager mode and compiled with fullgraph=True, and how often 100 calls of 10
batch sizes compile.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import torch
from torch import Tensor, nn

import dfwlayer as dfw
from dfwlayer.constraints.base import Constraint

QUICK = bool(os.environ.get("DFW_QUICK"))
REPEATS = 30 if QUICK else 1000
HIDDEN = 64 if QUICK else 256
BACKEND = "aot_eager" if QUICK else "inductor"


class Network(nn.Module):
    """Actions of six joints, without a limit."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Linear(17, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        self.net = nn.Sequential(*inner, nn.Linear(HIDDEN, 6), nn.Tanh())

    def forward(self, observation: Tensor) -> Tensor:  # (B, 17) -> (B, 6)
        return self.net(observation) * observation[:, 11:17]


class Policy(Network):
    """The action next to the network's with Σ|ω_i a_i| ≤ 0.5, ω the joints' velocities."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = dfw.DFWLayer(p=1)

    def forward(self, observation: Tensor) -> Tensor:
        return self.limit(None, -self.net(observation), observation[:, 11:17], 0.5)


class Within(Network):
    """The action next to the network's in a set."""

    def __init__(self, limit: Constraint) -> None:
        super().__init__()
        self.limit = dfw.SetLayer(limit)

    def forward(self, observation: Tensor) -> Tensor:
        return self.limit(-super().forward(observation))


def learnt(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


LIMITS = {
    "none": Network,
    "power": Policy,
    "box": lambda: Within(dfw.Box(-0.5, 0.3)),
    "linf": lambda: Within(dfw.LpBall(math.inf, 0.5)),
    "l1": lambda: Within(dfw.LpBall(1, learnt(0.5))),
    "l2": lambda: Within(dfw.LpBall(2, learnt(1.0))),
    "simplex": lambda: Within(dfw.Simplex()),
    "capped-simplex": lambda: Within(dfw.CappedSimplex(1.0, 0.5)),
    "l1-box": lambda: Within(dfw.L1Box(learnt(1.0), lower=-0.3, upper=0.5)),
    "k-sparse": lambda: Within(dfw.KSparse(2.0, 0.4)),
}


def least(*calls) -> list[float]:
    """Microseconds of processor time of each call, the least of many, taken in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(REPEATS):
        for i, call in enumerate(calls):
            begin = time.thread_time_ns()
            call()
            best[i] = min(best[i], (time.thread_time_ns() - begin) / 1e3)
    return best


def acting(model: nn.Module, observation: Tensor):
    @torch.no_grad()
    def call() -> None:
        model(observation)

    return call


def training(model: nn.Module, observation: Tensor):
    def call() -> None:
        model.zero_grad()
        model(observation).square().sum().backward()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", nargs="*", default=["none", "power"], choices=list(LIMITS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dfw.warm_up()
    print(f"hidden layers of {HIDDEN}, {BACKEND}, one thread, µs of processor time")
    print("limit           batch  what      eager  compiled")
    for name in given.limits:
        torch._dynamo.reset()
        model = LIMITS[name]()
        compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
        for batch in (1, 256):
            observation = torch.randn(batch, 17)
            for what in (acting, training):
                eager, fast = least(what(model, observation), what(compiled, observation))
                print(
                    f"{name:14} {batch:6}  {what.__name__:8} {eager:6.0f}  {fast:8.0f}", flush=True
                )

    for name in given.limits:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        policy = LIMITS[name]()
        compiled = torch.compile(policy, backend=BACKEND, fullgraph=True)
        worst = 0.0
        for call in range(100):
            observation = torch.randn(2 + 7 * (call % 10), 17)
            error = (compiled(observation) - policy(observation)).detach().abs().max()
            worst = max(worst, float(error))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(
            f"{name}: 100 calls of 10 batch sizes, {graphs} graphs, differences up to {worst:.1e}"
        )
        assert graphs <= 2, graphs  # one for the first size, one for all others
        assert worst < 1e-5, worst


if __name__ == "__main__":
    main()
