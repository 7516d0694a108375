"""Agents whose actions obey a limit, for Stable-Baselines3.

    limit = ActionLimit(weights=range(11, 17), radius=20.0)   # Σ|ω_i a_i| ≤ 20, ω = obs[11:17]
    env = LimitedActions(gymnasium.make("HalfCheetah-v5"), limit)
    model = TD3(LimitedTD3Policy, env, policy_kwargs={"limit": limit})

The policy ends in the nearest action that obeys the limit, and learns through it. What an
algorithm adds afterwards, noise, samples or random actions at the beginning, is limited by the
wrapper around the environment. `limits` says what may be asked of actions, `policies` what obeys
it, `dfwlayer.integrations.actor_gradients` how it learns.

Needs stable-baselines3; nothing else in this package imports it.
"""

from dfwlayer.integrations.actor_gradients import Exact, GradientMode, Penalty, Soft
from dfwlayer.integrations.sb3 import policies
from dfwlayer.integrations.sb3.limits import ActionLimit, ActionSet, Limit
from dfwlayer.integrations.sb3.policies import *  # noqa: F403
from dfwlayer.integrations.sb3.wrapper import LimitedActions

__all__ = [
    "ActionLimit",
    "ActionSet",
    "Exact",
    "GradientMode",
    "Limit",
    "LimitedActions",
    "Penalty",
    "Soft",
]
__all__ += policies.__all__
