"""What an agent's actions have to obey: sets that may depend on what is observed."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from dfwlayer.arguments import INTEGERS, as_number, check_tensor, shown
from dfwlayer.constraints import Box, Intersection, L1Box, LpBall, Shifted
from dfwlayer.constraints.base import Constraint
from dfwlayer.layer import DFWLayer, SetLayer
from dfwlayer.objectives import Quadratic
from dfwlayer.ops.recorded import uncompiled
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solution import SolveError

__all__ = ["ActionLimit", "ActionSet", "Bounds", "Limit", "as_limit", "batch_of", "fitted"]

Value = Tensor | float
CLOSE = 8  # roundings by which a nearest action may miss a bound and still be at it


class Bounds(NamedTuple):
    """Of actions, in the units they are given in."""

    lower: Value  # a number or (n,)
    upper: Value


class Limit(ABC):
    """The actions allowed at an observation; see `ActionLimit` and `ActionSet`."""

    reads_observations = True

    @uncompiled
    def __call__(
        self,
        actions: Tensor,  # (B, n)
        observations: Any,  # (B, ...), or a dict of such
        unit: Value = 1.0,  # (n,), of the actions given, in the environment's
        offset: Value = 0.0,  # (n,), what an action of 0 is in the environment's units
        bounds: Bounds | None = None,
    ) -> Tensor:
        """The nearest actions that obey the limit and the bounds.

        That is x = argmin ½‖x − z‖² such that offset + unit ∘ x is in the set and x within the
        bounds. Where the nearest point of the set is within them it is the answer, and the
        intersection of both is asked for the other rows only.
        """
        nearest = self._nearest(actions, observations, unit, offset, None)
        if bounds is None:
            return nearest
        lower, upper = (torch.as_tensor(b).to(nearest) for b in bounds)
        with torch.no_grad():
            near = CLOSE * torch.finfo(nearest.dtype).eps
            inside = (nearest >= lower - near * lower.abs()) & (
                nearest <= upper + near * upper.abs()
            )
            left = (~(inside | nearest.isnan()).all(-1)).nonzero().squeeze(-1)
        if len(left):
            both = self._nearest(
                actions[left], _rows(observations, left), unit, offset, Bounds(lower, upper)
            )
            nearest = nearest.index_copy(0, left, both)
        return nearest.clamp(lower, upper)

    @abstractmethod
    def _nearest(
        self, actions: Tensor, observations: Any, unit: Value, offset: Value, bounds: Bounds | None
    ) -> Tensor:
        """As above, without a look at bounds that are not given."""

    def executed(
        self, actions: NDArray[Any], observations: Any, space: gymnasium.spaces.Box
    ) -> NDArray[Any]:
        """What is done where these actions (B, n) are asked for, in the space's own numbers.

        They are brought within the bounds first, as Stable-Baselines3 does with all actions.
        """
        lower, upper = (b.reshape(-1).astype(np.float64) for b in (space.low, space.high))
        asked = torch.as_tensor(np.clip(actions, lower, upper), device=_device(observations))
        bounds = Bounds(torch.from_numpy(lower), torch.from_numpy(upper))
        with torch.no_grad():
            exact = self(asked, observations, bounds=bounds).cpu().numpy()
        return self.rounded(exact, space)

    def rounded(self, exact: NDArray[np.float64], space: gymnasium.spaces.Box) -> NDArray[Any]:
        """Actions in the space's dtype, within its bounds."""
        near = exact.astype(space.dtype)
        return np.clip(near, space.low.reshape(-1), space.high.reshape(-1))

    def seen_through(self, env: VecEnv) -> Limit:
        """The limit for a policy whose observations `VecNormalize` has normalised, which it undoes.

        With the statistics as they are at each call; saved with the policy. ``env`` is the
        environment as the algorithm gets it. Without a VecNormalize in it the limit stays as it is.
        """
        normaliser = unwrap_vec_normalize(env)
        if normaliser is None or not normaliser.norm_obs or not self.reads_observations:
            return self
        return _SeenThrough(self, normaliser)

    def __getstate__(self) -> dict[str, Any]:
        """Functions as cloudpickle holds them, so that also those without a name are saved."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {k: _Pickled.of(v) if inspect.isroutine(v) else v for k, v in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            held = cloudpickle.loads(value.code) if isinstance(value, _Pickled) else value
            object.__setattr__(self, name, held)


@dataclass(frozen=True)
class ActionLimit(Limit):
    """‖w(observation) ∘ action‖_p ≤ radius, in the units of the environment's actions.

    Args:
        weights: Where the weights stand in an observation, one index for each action, or a
            function from observations (B, ...) to weights (B, n).
        radius: The limit.
        p: Of the norm, 1 to limit a sum of absolute values.
        key: Of the part of an observation in which the indices count, where observations are
            dictionaries.

    Observations are taken as the policy gets them. If they are normalised on the way
    (VecNormalize), `seen_through` undoes it.

    """

    weights: Sequence[int] | Callable[[Any], Tensor]
    radius: float
    p: float = 1.0
    key: str | None = None
    layer: DFWLayer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        radius = as_number("radius", self.radius, "a number of at least 0", least=0)
        object.__setattr__(self, "radius", radius)
        if not callable(self.weights):
            indices = isinstance(self.weights, Sequence) and not isinstance(self.weights, str)
            if not indices or not all(isinstance(i, INTEGERS) for i in self.weights):
                raise ValueError(
                    "weights: expected the indices of the weights in an observation, or a function "
                    f"from observations to weights, got {shown(self.weights)}"
                )
        if self.key is not None and (callable(self.weights) or not isinstance(self.key, str)):
            raise ValueError(
                "key: expected the name of the part of an observation in which the indices "
                f"count, and no function beside it, got {shown(self.key)}"
            )
        object.__setattr__(self, "layer", DFWLayer(p=self.p))

    def of(self, observations: Any) -> Tensor:
        """The weights (B, n) of a batch of observations."""
        if callable(self.weights):
            found = self.weights(observations)
            check_tensor("weights", found, "a function that returns a tensor")
            return found
        if self.key is not None:
            if not isinstance(observations, dict) or self.key not in observations:
                there = list(observations) if isinstance(observations, dict) else "no parts"
                raise ValueError(
                    f"key: expected one of an observation's parts, which has {there}, got "
                    f"{self.key!r}"
                )
            observations = observations[self.key]
        if not isinstance(observations, Tensor) or observations.dim() != 2:
            raise ValueError(
                "weights: indices need observations that are vectors; name the part with key=, or "
                "pass a function from your observations to the weights"
            )
        width = observations.shape[1]
        outside = [int(i) for i in self.weights if not -width <= i < width]
        if outside:
            raise ValueError(
                f"weights: expected indices of observations with {width} entries, got {outside}"
            )
        return observations[:, [int(i) for i in self.weights]]

    def _nearest(
        self, actions: Tensor, observations: Any, unit: Value, offset: Value, bounds: Bounds | None
    ) -> Tensor:
        """In the units given the limit is ‖(w ∘ unit) ∘ (x − c)‖_p ≤ radius, c = −offset / unit."""
        weight = self.of(observations).to(actions) * unit
        if weight.shape != actions.shape:
            raise ValueError(
                f"weights: expected one for each of the actions {tuple(actions.shape)}, got "
                f"{tuple(weight.shape)}"
            )
        centre = _centre(offset, unit, actions)
        if bounds is None:
            nearest: Tensor = self.layer(None, -actions, weight, self.radius, centre=centre)
            return nearest
        constraint: Constraint
        if self.p == 1:
            lower, upper = bounds if centre is None else (b - centre for b in bounds)
            constraint = L1Box(self.radius, weight.abs(), lower, upper)
            constraint = constraint if centre is None else Shifted(constraint, centre)
        else:
            ball = LpBall(self.p, self.radius, weight, centre=centre)
            constraint = Intersection(ball, Box(*bounds))
        return _solved(Quadratic(None, -actions), constraint)

    def rounded(self, exact: NDArray[np.float64], space: gymnasium.spaces.Box) -> NDArray[Any]:
        """Towards 0, so that not even rounding exceeds the limit."""
        near = exact.astype(space.dtype)
        return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, near * 0), near)


@dataclass(frozen=True)
class ActionSet(Limit):
    """Any set of the library, in the units of the environment's actions.

    Args:
        constraint: The set, or a function from observations (B, ...) to the set, whose parameters
            then have a batch: ``lambda seen: Ellipsoid(shape_of(seen), radius=seen[:, 3])``.

    """

    constraint: Constraint | Callable[[Any], Constraint]

    def __post_init__(self) -> None:
        if not isinstance(self.constraint, Constraint) and not callable(self.constraint):
            raise ValueError(
                "constraint: expected a set such as LpBall, or a function from observations to "
                f"one, got {shown(self.constraint)}"
            )

    @property
    def reads_observations(self) -> bool:  # type: ignore[override]
        """Whether the set depends on them."""
        return not isinstance(self.constraint, Constraint)

    def of(self, observations: Any, like: Tensor) -> Constraint:
        """The set at a batch of observations, in the dtype and on the device of the actions."""
        found = self.constraint
        if not isinstance(found, Constraint):
            found = found(observations)
        if not isinstance(found, Constraint):
            raise ValueError(
                "constraint: expected a function that returns a set such as LpBall, it returned "
                f"{shown(found)}"
            )
        tensors = tensors_in(found)
        return filled(found, (t.to(like) for t in tensors)) if tensors else found

    def _nearest(
        self, actions: Tensor, observations: Any, unit: Value, offset: Value, bounds: Bounds | None
    ) -> Tensor:
        """In the environment's units: argmin ½ Σ (y_i − offset_i − unit_i z_i)² / unit_i²."""
        constraint = self.of(observations, actions)
        step = torch.as_tensor(unit).to(actions).expand(actions.shape[-1])
        at = torch.as_tensor(offset).to(actions)
        if bounds is not None:
            constraint = Intersection(constraint, Box(*(at + step * b for b in bounds)))
        asked = at + step * actions
        if bool((step == step[0]).all()):
            objective = Quadratic(None, -asked)
        else:
            each = (step / step.max()).pow(-2)
            objective = Quadratic(torch.diag(each), -each * asked)
        return (_solved(objective, constraint) - at) / step


@dataclass(frozen=True)
class _SeenThrough(Limit):
    """A limit on what was observed before it was normalised."""

    limit: Limit
    normaliser: VecNormalize

    def _nearest(
        self, actions: Tensor, observations: Any, unit: Value, offset: Value, bounds: Bounds | None
    ) -> Tensor:
        return self.limit._nearest(actions, self.raw(observations), unit, offset, bounds)

    def rounded(self, exact: NDArray[np.float64], space: gymnasium.spaces.Box) -> NDArray[Any]:
        return self.limit.rounded(exact, space)

    def seen_through(self, env: VecEnv) -> Limit:
        return self.limit.seen_through(env)

    def raw(self, observations: Any) -> Any:
        """What the environment gave, but for what was clipped."""
        about: Any = self.normaliser.obs_rms
        if isinstance(observations, dict):
            return {
                name: self._restored(part, about[name]) if name in about else part
                for name, part in observations.items()
            }
        return self._restored(observations, about)

    def _restored(self, part: Tensor, about: RunningMeanStd) -> Tensor:
        size = torch.as_tensor(np.sqrt(about.var + self.normaliser.epsilon)).to(part)
        return part * size + torch.as_tensor(about.mean).to(part)


class _Pickled(NamedTuple):
    code: bytes

    @classmethod
    def of(cls, value: Any) -> _Pickled:
        return cls(cloudpickle.dumps(value))


def as_limit(limit: Any) -> Limit:
    """A limit as it was given, or of a set, or of a function from observations to a set."""
    if isinstance(limit, Limit):
        return limit
    if isinstance(limit, Constraint) or (callable(limit) and not isinstance(limit, type)):
        return ActionSet(limit)
    raise ValueError(
        f"limit: expected an ActionLimit, got {type(limit).__name__}; a set of the library or a "
        "function from observations to one will do, too"
    )


def fitted(limit: Limit) -> Limit:
    """The limit for the policy that an algorithm is making at this moment.

    If the algorithm's observations are normalised, the limit has to know: it is refused unless it
    came from `Limit.seen_through`, and then reads the statistics of that environment, which for a
    model that was loaded is another one than before.
    """
    algorithm = _maker()
    normaliser = None if algorithm is None else algorithm.get_vec_normalize_env()
    if normaliser is None or not normaliser.norm_obs or not limit.reads_observations:
        return limit
    if not isinstance(limit, _SeenThrough):
        raise ValueError(
            "limit: VecNormalize changes the observations that the policy gets, and the limit "
            "would read them so; use policy_kwargs={'limit': limit.seen_through(env)} with the "
            "VecNormalize environment, which undoes it"
        )
    return limit.seen_through(normaliser)


def _maker() -> BaseAlgorithm | None:
    """The algorithm that is making a policy, which it does in `_setup_model`.

    It does not tell the policy of itself or of its environment, so the callers are looked at.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "_setup_model" else None
        if isinstance(owner, BaseAlgorithm):
            return owner
        frame = frame.f_back
    return None


_LAYER = SetLayer(lambda constraint: constraint, on_failure="raise")


def _solved(objective: Quadratic, constraint: Constraint) -> Tensor:
    try:
        x: Tensor = _LAYER(objective, constraint=constraint)
    except SolveError as error:
        raise SolveError(
            f"limit: there are observations without a nearest action that obeys the limit and the "
            f"bounds of the action space together; {error}",
            error.solution,
        ) from None
    return x


def _centre(offset: Value, unit: Value, like: Tensor) -> Tensor | None:
    """−offset / unit (n,), None where it is 0."""
    at = torch.as_tensor(offset).to(like)
    return -(at / unit).expand(like.shape[-1]) if bool(at.any()) else None


def _rows(observations: Any, index: Tensor) -> Any:
    if isinstance(observations, dict):
        return {name: _rows(part, index) for name, part in observations.items()}
    return observations[index.to(observations.device)]


def _device(observations: Any) -> torch.device:
    parts = list(observations.values()) if isinstance(observations, dict) else [observations]
    return parts[0].device if isinstance(parts[0], Tensor) else torch.device("cpu")


def batch_of(observation: Any) -> Any:
    """A single observation as tensors with a batch of one."""
    if isinstance(observation, dict):
        return {name: batch_of(part) for name, part in observation.items()}
    return torch.as_tensor(np.asarray(observation)).unsqueeze(0)
