"""Train through the layer in one process or in many, without a change.

    python examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py --shard
    torchrun --nproc-per-node 2 examples/data_parallel.py --checkpoints runs/a

A policy learns to act like one whose limit Σ w_i |a_i| ≤ t it does not know. Every process takes
its share of the same batches, one of them a row less than the others; DistributedDataParallel, or
with --shard FSDP2, adds the gradients up. So the parameters are those of one process with the whole
batch, to rounding. In some batches a sensor fails: that row is NaN with a gradient of zero, and
counts for nobody. With --checkpoints the same command continues a run that was killed, also with
another number of processes.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from dfwlayer import DFWLayer

QUICK = "DFW_QUICK" in os.environ
ROWS, OBSERVED, JOINTS, LIMIT = 61, 8, 5, 1.5
FAILING = 5  # every so many batches, the sensor of a row


class Policy(nn.Module):
    """Observations and velocities w to the nearest action with Σ w_i |a_i| ≤ t, t learned."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(OBSERVED, 32), nn.Tanh(), nn.Linear(32, JOINTS, bias=False)
        )
        self.log_limit = nn.Parameter(torch.zeros(1))  # FSDP2 shards no numbers without a dimension
        self.layer = DFWLayer(p=1, on_failure="ignore")  # what fails is looked at below
        self.seconds = 0.0  # in the layer, both passes

    def forward(self, observation: Tensor, velocity: Tensor) -> Tensor:
        wanted, begin = self.network(observation), perf_counter()
        found = self.layer(None, -wanted, weight=velocity, radius=self.log_limit[0].exp())
        self.seconds = perf_counter() - begin
        if found.requires_grad:
            found.register_hook(lambda _: self.passed(-perf_counter()))
            wanted.register_hook(lambda _: self.passed(perf_counter()))
        return found

    def passed(self, seconds: float) -> None:
        """Count the backward pass, from the gradient that reaches the layer to that it sends on."""
        self.seconds += seconds


def batch(step: int, expert: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """Observations, velocities and the expert's actions: the same on every process."""
    draw = torch.Generator().manual_seed(step)
    observation = torch.randn(ROWS, OBSERVED, generator=draw)
    velocity = 0.5 + torch.rand(ROWS, JOINTS, generator=draw)
    with torch.no_grad():
        action = expert(observation, velocity)
    if step % FAILING == 0:
        velocity[step % ROWS, 0] = torch.nan
    return observation, velocity, action


def train(steps: int, shard: bool, checkpoints: Path | None) -> dict[str, Tensor]:
    """The parameters after so many steps."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    expert, policy = Policy().requires_grad_(False), Policy()
    expert.log_limit.fill_(torch.tensor(LIMIT).log())
    model: nn.Module = policy
    if shard and ranks > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(policy.network)
        fully_shard(policy)
    elif ranks > 1:
        model = DistributedDataParallel(policy)
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.02)
    first, steps_took, layer_took = resumed(policy, optimiser, checkpoints), [0.0], [0.0]
    for step in range(first, steps):
        observation, velocity, action = (part[rank::ranks] for part in batch(step, expert))
        begin = perf_counter()
        found = model(observation, velocity)
        sound = torch.isfinite(found).all(-1, keepdim=True)
        # gradients are averaged over processes, so each one's share is of the whole batch
        loss = torch.where(sound, found - action, 0).square().sum() * ranks / ROWS
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        steps_took.append(perf_counter() - begin)
        layer_took.append(policy.seconds)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss of this process' share {loss.item():.4f}")
        if checkpoints is not None and ((step + 1) % 5 == 0 or step + 1 == steps):
            saved(policy, optimiser, step + 1, checkpoints)
    if rank == 0:
        whole_step, layer = (1e3 * median(each) for each in (steps_took, layer_took))
        print(f"a step takes {whole_step:.2f} ms, of which the layer {layer:.2f}")
    return {name: whole(part) for name, part in policy.state_dict().items()}


def whole(part: Tensor) -> Tensor:
    """A parameter of which every process may hold a piece."""
    found: Tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
    return found


def saved(policy: nn.Module, optimiser: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """A checkpoint that any number of processes can read; named once it is complete."""
    model, state = get_state_dict(policy, optimiser)
    dcp.save({"model": model, "optimiser": state}, checkpoint_id=folder / f"step-{step}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        partial = folder / "latest.part"
        partial.write_text(str(step))
        partial.replace(folder / "latest")


def resumed(policy: nn.Module, optimiser: torch.optim.Optimizer, folder: Path | None) -> int:
    """The step after the last checkpoint, which is loaded; 0 without one."""
    if folder is None or not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    model, state = get_state_dict(policy, optimiser)
    there = {"model": model, "optimiser": state}
    dcp.load(there, checkpoint_id=folder / f"step-{step}")
    set_state_dict(
        policy, optimiser, model_state_dict=there["model"], optim_state_dict=there["optimiser"]
    )
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Train through the layer, in parallel or not.")
    parser.add_argument("--steps", type=int, default=20 if QUICK else 200)
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--checkpoints", type=Path, help="a folder; a run there is continued")
    parser.add_argument("--parameters", type=Path, help="write them to this file in the end")
    given = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    try:
        if given.checkpoints is not None:
            given.checkpoints.mkdir(parents=True, exist_ok=True)
        found = train(given.steps, given.shard, given.checkpoints)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"the limit is {LIMIT}, learned: {found['log_limit'].exp().item():.4f}")
            if given.parameters is not None:
                given.parameters.write_text(json.dumps({k: v.tolist() for k, v in found.items()}))
        if dist.is_initialized():
            # gloo's threads free what was sent; PyTorch 2.6 may end in a deadlock with them
            time.sleep(0.2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
