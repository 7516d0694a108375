"""TD3 for many agents at once, which differ in seed and in how they learn through the limit.

Networks of all agents are stacked, so that a step of all of them costs little more than that of
one. Agents of one seed begin with the same weights and draw the same numbers: episodes, noise and
the rows of their memories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer import DFWLayer
from dfwlayer.integrations.actor_gradients import Exact, GradientMode, Penalty, Soft
from dfwlayer_bench.robotics.files import FileError, load_run, save_arrays
from dfwlayer_bench.robotics.gradients.plants import PLANTS, Plant

__all__ = ["MODES", "NO_LAYER", "Agents", "Plan"]

NO_LAYER = "none"
# what is compared: no layer, where the limit is part of the environment alone, and the modes
MODES: dict[str, tuple[str, GradientMode | None]] = {
    NO_LAYER: ("no layer, limited by the environment", None),
    "exact": ("exact", Exact()),
    "penalty": ("exact and a penalty of weight 1", Penalty(1.0)),
    "soft": ("soft, half passed straight through", Soft(0.5)),
}
HIDDEN = (64, 64)
BATCH, LEARNING_RATE, TARGET_SHARE, DELAY = 100, 1e-3, 0.005, 2
NOISE, TARGET_NOISE, TARGET_CLIP = 0.1, 0.2, 0.5
EPISODES = 20  # in an evaluation
EVALUATION_SEED = 700_000  # of its episodes, which training never sees
LAYER = DFWLayer(p=1)


@dataclass(frozen=True)
class Plan:
    """Which agents, and how long; the first ``evaluate_every`` steps are random."""

    task: str
    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    evaluate_every: int

    @property
    def name(self) -> str:
        """As files know it."""
        return self.task

    @property
    def plant(self) -> Plant:
        return PLANTS[self.task]

    def identity(self) -> dict[str, Any]:
        """What a checkpoint has to agree in; with more steps it goes further."""
        return {
            "modes": list(self.modes),
            "seeds": list(self.seeds),
            "evaluate_every": self.evaluate_every,
        }


class Nets:
    """An MLP with ReLU for each of K agents: (K, R, in) to (K, R, out)."""

    def __init__(self, sizes: Sequence[int], generators: Sequence[torch.Generator], modes: int):
        self.weights: list[Tensor] = []
        for inputs, outputs in pairwise(sizes):
            bound = inputs**-0.5  # as in nn.Linear
            for shape in ((inputs, outputs), (1, outputs)):
                each = [bound * (2 * torch.rand(shape, generator=g) - 1) for g in generators]
                self.weights.append(torch.stack(each).repeat(modes, 1, 1).requires_grad_())

    def __call__(self, x: Tensor) -> Tensor:
        pairs = list(zip(self.weights[::2], self.weights[1::2], strict=True))
        for weight, bias in pairs[:-1]:
            x = torch.baddbmm(bias, x, weight).relu()
        return torch.baddbmm(pairs[-1][1], x, pairs[-1][0])

    def copied(self) -> Nets:
        """With weights of their own, without gradients."""
        twin = Nets.__new__(Nets)
        twin.weights = [w.detach().clone() for w in self.weights]
        return twin

    def follow(self, others: Nets) -> None:
        """Take a share of the others' weights."""
        for own, other in zip(self.weights, others.weights, strict=True):
            own.lerp_(other.detach(), TARGET_SHARE)


@dataclass
class Memory:
    """The last transitions of K agents, all that there are."""

    parts: dict[str, Tensor] = field(default_factory=dict)  # (K, capacity, size) each
    size: int = 0

    @classmethod
    def empty(cls, agents: int, capacity: int, sizes: dict[str, int]) -> Memory:
        """Room for so many transitions."""
        return cls({name: torch.zeros(agents, capacity, n) for name, n in sizes.items()})

    def add(self, **rows: Tensor) -> None:
        """One transition (K, size) of each agent."""
        for name, row in rows.items():
            self.parts[name][:, self.size] = row
        self.size += 1

    def reserve(self, size: int) -> None:
        """Hold so many transitions, to be filled in; there is room for at least that many."""
        for name, part in self.parts.items():
            if size > part.shape[1]:
                self.parts[name] = part.new_zeros(len(part), size, part.shape[-1])
        self.size = size

    def sample(self, index: Tensor) -> dict[str, Tensor]:
        """The transitions at these places (K, R)."""
        return {
            name: part.gather(1, index.unsqueeze(-1).expand(-1, -1, part.shape[-1]))
            for name, part in self.parts.items()
        }


class Agents:
    """All agents of a plan, their environments and memories."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan, self.path = plan, path
        plant, count = plan.plant, len(plan.modes)
        self.generators = [torch.Generator().manual_seed(seed) for seed in plan.seeds]
        self.step = 0
        self.curve: list[dict[str, Any]] = []  # one entry for each agent and evaluation
        self.state = plant.begin(self._drawn(torch.rand, plant.draws))
        size = plant.observe(self.state).shape[-1]
        both = size + plant.action_size
        self.actors = Nets((size, *HIDDEN, plant.action_size), self.generators, count)
        self.critics = [Nets((both, *HIDDEN, 1), self.generators, count) for _ in range(2)]
        self.actors_target = self.actors.copied()
        self.critics_target = [critic.copied() for critic in self.critics]
        weights = [w for critic in self.critics for w in critic.weights]
        # with a loss that is a sum over the agents, Adam treats each of them by itself
        self.learn_actor = torch.optim.Adam(self.actors.weights, LEARNING_RATE)
        self.learn_critics = torch.optim.Adam(weights, LEARNING_RATE)
        sizes = {"seen": size, "action": plant.action_size, "reward": 1, "next": size}
        self.memory = Memory.empty(len(self.state), plan.steps, sizes)

    # acting

    def _drawn(self, draw: Callable[..., Tensor], *size: int) -> Tensor:
        """Numbers of each seed, the same for all modes: (K, *size)."""
        each = torch.stack([draw(*size, generator=g) for g in self.generators])
        return each.repeat(len(self.plan.modes), *[1] * len(size))

    def _allowed(self, wanted: Tensor, seen: Tensor) -> Tensor:
        """The nearest actions to (K, R, n) within the limit."""
        weights = self.plan.plant.weights(seen.flatten(0, 1))
        found: Tensor = LAYER(None, -wanted.flatten(0, 1), weights, self.plan.plant.limit)
        return found.view_as(wanted)

    def acted(self, nets: Nets, seen: Tensor) -> tuple[Tensor, Tensor]:
        """What the agents want and what they do, (K, R, n), each learning in its way."""
        wanted = nets(seen).tanh()
        nearest = self._allowed(wanted, seen)
        done = []
        for number, mode in enumerate(self.plan.modes):
            carry, seeds = MODES[mode][1], len(self.plan.seeds)
            for row in range(number * seeds, (number + 1) * seeds):
                own = wanted[row], nearest[row]
                done.append(own[0] if carry is None else carry(*own))
        return wanted, torch.stack(done)

    def run(self, report: Callable[[int], None]) -> None:
        """Train to the end, with an evaluation and a checkpoint every so many steps."""
        plant, random_steps = self.plan.plant, self.plan.evaluate_every
        while self.step < self.plan.steps:
            with torch.no_grad():
                seen = plant.observe(self.state)
                asked = 2 * self._drawn(torch.rand, plant.action_size) - 1
                noise = self._drawn(torch.randn, plant.action_size)
                if self.step >= random_steps:
                    asked = self.acted(self.actors, seen.unsqueeze(1))[1].squeeze(1)
                    asked = (asked + NOISE * noise).clamp(-1, 1)
                executed = self._allowed(asked.unsqueeze(1), seen.unsqueeze(1)).squeeze(1)
                self.state, reward = plant.move(self.state, executed)
                after = plant.observe(self.state)
                self.memory.add(seen=seen, action=asked, reward=reward.unsqueeze(-1), next=after)
            self.step += 1
            if self.step % plant.episode == 0:  # cut off, not ended: the memory has no ends
                self.state = plant.begin(self._drawn(torch.rand, plant.draws))
            if self.step > random_steps:
                self._update()
            if self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps:
                self._evaluate()
                self.save()
            report(self.step)

    # learning

    def _update(self) -> None:
        places = torch.stack(
            [torch.randint(self.memory.size, (BATCH,), generator=g) for g in self.generators]
        ).repeat(len(self.plan.modes), 1)
        rows = self.memory.sample(places)
        noise = self._drawn(torch.randn, BATCH, self.plan.plant.action_size)
        with torch.no_grad():
            smoothing = (TARGET_NOISE * noise).clamp(-TARGET_CLIP, TARGET_CLIP)
            action = self.acted(self.actors_target, rows["next"])[1]
            pair = torch.cat((rows["next"], (action + smoothing).clamp(-1, 1)), -1)
            least = torch.minimum(*(critic(pair) for critic in self.critics_target))
            target = rows["reward"] + self.plan.plant.gamma * least
        pair = torch.cat((rows["seen"], rows["action"]), -1)
        errors = [(critic(pair) - target).square().mean((1, 2)) for critic in self.critics]
        self.learn_critics.zero_grad()
        torch.stack(errors).sum().backward()  # type: ignore[no-untyped-call]
        self.learn_critics.step()
        if self.step % DELAY:
            return
        _, action = self.acted(self.actors, rows["seen"])
        worth = self.critics[0](torch.cat((rows["seen"], action), -1))
        self.learn_actor.zero_grad()
        (-worth.mean((1, 2)).sum()).backward()  # type: ignore[no-untyped-call]
        self.learn_actor.step()
        self.actors_target.follow(self.actors)
        for own, other in zip(self.critics_target, self.critics, strict=True):
            own.follow(other)

    # looking

    def _evaluate(self) -> None:
        """Fresh episodes without noise, the same for all agents."""
        plant, agents = self.plan.plant, len(self.state)
        generator = torch.Generator().manual_seed(EVALUATION_SEED)
        draws = torch.rand(EPISODES, plant.draws, generator=generator)
        state = plant.begin(draws.repeat(agents, 1))
        total, exceeded, visited = torch.zeros(agents), torch.zeros(agents), []
        with torch.no_grad():
            for step in range(plant.episode):
                seen = plant.observe(state).view(agents, EPISODES, -1)
                wanted = self.actors(seen).tanh()
                action = self._allowed(wanted, seen).flatten(0, 1)
                power = (plant.weights(seen.flatten(0, 1)).double() * action).abs().sum(-1)
                over = power.view(agents, -1) > plant.limit * (1 + 1e-6)
                exceeded += over.double().mean(-1) / plant.episode
                state, reward = plant.move(state, action)
                total += reward.view(agents, -1).mean(-1)
                if step % 5 == 0:
                    visited.append(seen)
        examined = self._examined(torch.cat(visited, 1))
        for number in range(agents):
            mode, seed = divmod(number, len(self.plan.seeds))
            self.curve.append(
                {
                    "mode": self.plan.modes[mode],
                    "seed": self.plan.seeds[seed],
                    "step": self.step,
                    "mean_return": float(total[number]),
                    "violation_rate": float(exceeded[number]),
                    **{name: float(values[number]) for name, values in examined.items()},
                }
            )

    def _examined(self, seen: Tensor) -> dict[str, Tensor]:
        """How often and how far wanted actions are outside, and what the layer takes away, (K,).

        The last is 1 − Σ‖Jᵀv‖² / Σ‖v‖² over the observations (K, R, o), with J the derivative of
        the projection and v the gradient of the critic in the action.
        """
        wanted = self.actors(seen).tanh().detach().requires_grad_()
        nearest = self._allowed(wanted, seen)
        at = nearest.detach().requires_grad_()
        worth = self.critics[0](torch.cat((seen, at), -1)).sum()
        (v,) = torch.autograd.grad(worth, at)
        (kept,) = torch.autograd.grad(nearest, wanted, v)
        distance = (wanted - nearest).detach().norm(dim=-1)
        whole = v.square().sum((1, 2)).clamp_min(1e-30)
        return {
            "outside": (distance > 1e-6).double().mean(-1),
            "distance": distance.mean(-1),
            "lost": 1 - kept.square().sum((1, 2)) / whole,
        }

    # keeping

    def _tensors(self) -> dict[str, Tensor]:
        """All that changes, by name; they are written to in place when a run goes on."""
        nets = {"actor": self.actors, "actor_target": self.actors_target}
        for number, pair in enumerate(zip(self.critics, self.critics_target, strict=True)):
            nets |= {f"critic{number}": pair[0], f"critic{number}_target": pair[1]}
        named = {f"{k}.{i}": w for k, net in nets.items() for i, w in enumerate(net.weights)}
        for name, part in self.memory.parts.items():
            named[f"memory.{name}"] = part[:, : self.memory.size]
        return named | {"state": self.state}

    def save(self) -> None:
        """Write a checkpoint."""
        arrays = {name: tensor.detach().numpy() for name, tensor in self._tensors().items()}
        for name, optimiser in (("actor", self.learn_actor), ("critics", self.learn_critics)):
            for number, kept in optimiser.state_dict()["state"].items():
                arrays |= {f"adam.{name}.{number}.{k}": v.numpy() for k, v in kept.items()}
        for number, generator in enumerate(self.generators):
            arrays[f"random.{number}"] = generator.get_state().numpy()
        about = {"task": self.plan.task, "step": self.step, "curve": self.curve}
        save_arrays(self.path, arrays, about | self.plan.identity())

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if not self.path.exists():
            return
        arrays, about = load_run(self.path, self.plan, self.plan.identity())  # type: ignore[arg-type]
        self.step, self.curve = about["step"], about["curve"]
        self.memory.reserve(self.step)
        try:
            with torch.no_grad():
                for name, tensor in self._tensors().items():
                    tensor.copy_(_tensor(arrays[name]))
            for number, generator in enumerate(self.generators):
                generator.set_state(_tensor(arrays[f"random.{number}"]))
            for name, optimiser in (("actor", self.learn_actor), ("critics", self.learn_critics)):
                _restore(optimiser, f"adam.{name}.", arrays)
        except (KeyError, RuntimeError) as error:
            raise FileError(
                f"{self.path} lacks a part of a checkpoint ({error}); --fresh starts over"
            ) from error


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array.copy())


def _restore(optimiser: torch.optim.Adam, prefix: str, arrays: dict[str, Any]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            number, kind = name.removeprefix(prefix).split(".")
            state.setdefault(int(number), {})[kind] = _tensor(array)
    optimiser.load_state_dict(optimiser.state_dict() | {"state": state})
