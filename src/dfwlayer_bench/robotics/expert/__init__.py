"""Experts: trained with DPro to keep a power limit, and the data they leave for imitation."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfwlayer_bench.robotics.expert.training import expert_policy, roll_out

__all__ = ["expert_policy", "roll_out"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: `dfw --help` imports this package, and torch takes its time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dfwlayer_bench.robotics.expert import training

    return getattr(training, name)
