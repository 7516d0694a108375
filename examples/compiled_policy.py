"""A policy with a power limit in one graph of torch.compile: what a step costs, and recompilations.

    python examples/compiled_policy.py

Prints the time of a call and of a training step of the network alone and of the policy, in eager
mode and compiled with fullgraph=True, and how often 100 calls of 10 batch sizes compile.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

import dfwlayer as dfw

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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dfw.warm_up()
    print(f"hidden layers of {HIDDEN}, {BACKEND}, one thread, µs of processor time")
    print("model    batch  what      eager  compiled")
    for kind in (Network, Policy):
        torch._dynamo.reset()
        model = kind()
        compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
        for batch in (1, 256):
            observation = torch.randn(batch, 17)
            for what in (acting, training):
                eager, fast = least(what(model, observation), what(compiled, observation))
                print(f"{kind.__name__:8} {batch:5}  {what.__name__:8} {eager:6.0f}  {fast:8.0f}")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy = Policy()
    compiled = torch.compile(policy, backend=BACKEND, fullgraph=True)
    worst = 0.0
    for call in range(100):
        observation = torch.randn(2 + 7 * (call % 10), 17)
        worst = max(
            worst, float((compiled(observation) - policy(observation)).detach().abs().max())
        )
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"100 calls of 10 batch sizes: {graphs} graphs compiled, largest difference {worst:.1e}")
    assert graphs <= 2, graphs  # one for the first size, one for all others
    assert worst < 1e-5, worst


if __name__ == "__main__":
    main()
