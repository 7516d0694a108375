"""Where a solve may run: the device, and the engine that takes the steps there."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from dfwlayer.engines import compiled
from dfwlayer.ops import graphs

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """A device and an engine, "eager", "graph" or "compiled"."""

    device: str
    engine: str

    def __str__(self) -> str:
        return f"{self.device} {self.engine}"

    def run(self, calculate: Callable[[], Result], *, recorded: bool = False) -> Result:
        """What it gives there; ``recorded`` asks for a recording, where this is the engine for it.

        The first call of a shape is not recorded, the second one is, and later ones are replayed.
        """
        graphs.clear_graphs()
        with compiled.using(self.engine == "compiled"), pytest.MonkeyPatch.context() as patch:
            if self.engine != "graph":
                patch.setattr(graphs, "WARM_UP", sys.maxsize)
                return calculate()
            for _ in range(2):
                calculate()
            assert graphs._recordings or not recorded
            return calculate()


CPU = Place("cpu", "eager")
PLACES = (
    CPU,
    Place("cpu", "compiled"),
    pytest.param(Place("cuda", "eager"), marks=pytest.mark.cuda),
    pytest.param(Place("cuda", "graph"), marks=pytest.mark.cuda),
    pytest.param(Place("cuda", "compiled"), marks=pytest.mark.cuda),
)
places = pytest.mark.parametrize("place", PLACES, ids=str)


def moved(value, place: Place, dtype: torch.dtype | None = None, *, copy: bool = False):
    """A tensor, or all of a dictionary, there."""
    if isinstance(value, dict):
        return {k: v.to(place.device, dtype, copy=copy) for k, v in value.items()}
    return value.to(place.device, dtype, copy=copy)
