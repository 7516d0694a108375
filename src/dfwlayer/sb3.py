"""Constrained policies for Stable-Baselines3; see `dfwlayer.integrations.sb3`."""

from dfwlayer.integrations.sb3 import *  # noqa: F403
from dfwlayer.integrations.sb3 import __all__ as __all__
