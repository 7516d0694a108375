"""f(x + c), the objective as seen from another origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from dfwlayer.objectives.base import Curvature, Objective
from dfwlayer.objectives.model import Model
from dfwlayer.ops.rows import Scalar, where_rows
from dfwlayer.ops.scale import Scale, scale_of_terms

__all__ = ["Translated"]


@dataclass(frozen=True)
class Translated(Objective):
    """y ↦ f(c + y), differentiable in c; f is bound already, and c is (n,) or (B, n)."""

    objective: Objective
    origin: Tensor

    shape = property(attrgetter("objective.shape"))
    batch_sizes = property(attrgetter("objective.batch_sizes"))
    dtype = property(attrgetter("objective.dtype"))
    device = property(attrgetter("objective.device"))
    quadratic = property(attrgetter("objective.quadratic"))
    least = property(attrgetter("objective.least"))
    isotropic = property(attrgetter("objective.isotropic"))
    shards = property(attrgetter("objective.shards"))

    def float32(self) -> Translated:
        """Half-precision data in float32."""
        wide = torch.promote_types(self.origin.dtype, torch.float32)
        return Translated(self.objective.float32(), self.origin.to(wide))

    def bind(self, batch: int | None) -> Translated:
        return replace(self, objective=self.objective.bind(batch))

    def verified(self) -> tuple[Translated, Tensor | None]:
        """f's own; whose c it is has looked at c."""
        objective, bad = self.objective.verified()
        return replace(self, objective=objective), bad

    def replace_rows(self, bad: Tensor) -> Translated:
        """Flagged problems are seen from zero."""
        return Translated(self.objective.replace_rows(bad), where_rows(~bad, self.origin, 0))

    def value(self, x: Tensor) -> Tensor:
        """f(c + y)."""
        return self.objective.value(self.origin + x)

    def gradient(self, x: Tensor) -> Tensor:
        """∇f(c + y)."""
        return self.objective.gradient(self.origin + x)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.objective.value_and_gradient(self.origin + x)

    def dependence(self, x: Tensor) -> Tensor:
        """The gradient itself where c asks for one."""
        if self.origin.requires_grad:
            return self.gradient(x)
        return self.objective.dependence(self.origin + x)

    def tracked_value(self, x: Tensor) -> Tensor | None:
        """None where f has none."""
        found = self.objective.tracked_value(self.origin + x)
        return None if found is None else self.value(x)

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """∇²f(c + y) v."""
        return self.objective.hvp(self.origin + x, v)

    def hvps(self, x: Tensor, vectors: Tensor) -> Tensor:
        """f's at c + y."""
        return self.objective.hvps(self.origin + x, vectors)

    def shifted(self, rho: Scalar) -> tuple[Callable[[Tensor], Tensor], Scalar] | None:
        """f's, which has no constant Hessian unless it is the same everywhere."""
        return self.objective.shifted(rho)

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """f's, likewise."""
        return self.objective.reduced(free, bend)

    def model(self, x: Tensor) -> Model | None:
        """f's at c + y, as a function of y."""
        found = self.objective.model(self.origin.detach() + x)
        return None if found is None else found.translated(self.origin.detach().expand_as(x))

    def curvature(self) -> Curvature | None:
        """f's."""
        return self.objective.curvature()

    def rescaled(self, unit: Tensor, factor: Tensor) -> Translated | None:
        """f's, seen from c/u."""
        objective = self.objective.rescaled(unit, factor)
        origin = self.origin / unit.unsqueeze(-1)
        return None if objective is None else Translated(objective, origin)

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """f's at c + y, which is rounded by as much as c and y are."""
        origin = self.origin.detach()
        own = self.objective.scale(origin + x, gradient)
        terms = scale_of_terms(own.curvature, origin.abs() + x.abs(), torch.zeros_like(x))
        return own._replace(noise=torch.maximum(own.noise, terms.noise))
