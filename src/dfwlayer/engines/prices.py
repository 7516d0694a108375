"""What may be asked of a solution later: its multipliers, and how far it is outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.differentiate.batches import check_no_others, equal_depths, ranks_of
from dfwlayer.differentiate.expansion import worth
from dfwlayer.differentiate.transforms import Recipe, derived
from dfwlayer.engines.base import Arguments, bind
from dfwlayer.engines.mapped import Call, known_at, value_at_zero
from dfwlayer.engines.proofs import proof_of
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import filled, tensors_in, versions_in

__all__ = ["Origin"]


class Origin(NamedTuple):
    """The call that a solution is the answer to."""

    arguments: Arguments
    settings: Settings
    mapped: bool  # inside of a transform, or with tangents
    versions: list[int]  # how often each tensor had been changed in place by then

    def multipliers(self, x: Tensor) -> dict[str, Tensor]:  # (*lead, *shape)
        """See `dfwlayer.Solution`."""
        objective, constraint, _, _ = self.arguments
        names = list(constraint.priced(objective.shape))
        if not names:
            return {}
        differentiable = self.mapped or x.requires_grad
        if differentiable:
            constants = (t.detach() for t in tensors_in(self.arguments, sparse=False))
            plain, fixed, _, _ = filled(self.arguments, constants)
            check_no_others(plain, fixed, lambda: value_at_zero(plain))
        found = self._asked(_Prices, x, differentiable)
        return dict(zip(names, found, strict=True))

    def proof(self, status: Tensor) -> dict[str, Tensor]:  # (*lead)
        """See `dfwlayer.Solution`."""
        self._check_unchanged()
        if self.mapped:
            raise RuntimeError("a proof is to be had of a solve outside of torch.func only")
        with torch.no_grad():
            return proof_of(bind(self.arguments, self.settings), status)

    def violation(self, x: Tensor) -> Tensor:  # (*lead, *shape) -> (*lead)
        """By the set's own measure."""
        return self._asked(_Violation, x, False)[0]

    def _asked(
        self, kind: Callable[..., Recipe], x: Tensor, differentiable: bool
    ) -> tuple[Tensor, ...]:
        """What a recipe makes of the solution and of the tensors it was found from."""
        self._check_unchanged()
        arguments = self.arguments._replace(x0=None)  # the solution takes its place
        ranks = ranks_of(*arguments)
        recipe = kind(ranks, None, arguments, self.settings)
        tensors = tensors_in(arguments, sparse=False)
        if not differentiable:
            tensors = [t.detach() for t in tensors]
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            given = [t.clone() if t.is_inference() else t for t in (x.detach(), *tensors)]
            return derived(recipe, *equal_depths(given, None if ranks is None else (1, *ranks)))

    def _check_unchanged(self) -> None:
        if versions_in(self.arguments[:2]) != self.versions:
            raise RuntimeError(
                "a tensor of the objective or of the set has been modified by an inplace operation "
                "after the solve: ask for the multipliers and the violation before that"
            )


class _Prices(Call):
    """(the solution, what it was found from) ↦ its multipliers, in the order of `priced`."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        (known, *tensors), lead = self.laid_out(inputs, (1,))
        arguments, settings = self.filled(iter(tensors))
        with torch.enable_grad():
            # problems that were bad start anywhere
            start = torch.nan_to_num(known)
            at = known_at(arguments._replace(x0=start), settings, priced=True)
            priced = at.problem.constraint.priced(at.task.shape)
            value = worth(at.problem, at.x, at.face, order + 1)
            slopes = torch.autograd.grad(
                value.sum(),
                [t for t, _ in priced.values()],
                create_graph=order > 0,
                materialize_grads=True,
            )
        out = []
        for slope, (_, shape) in zip(slopes, priced.values(), strict=True):
            assert at.price is not None
            unit = at.price[(..., *[None] * (slope.dim() - at.price.dim()))]
            price = ((0.0 - slope).double() * unit).to(slope.dtype)
            lost = torch.isnan(known).reshape(*at.task.lead, -1).any(-1)
            price = torch.where(lost[(..., *[None] * (price.dim() - lost.dim()))], torch.nan, price)
            sizes = at.task.lead if len(lead) < 2 else lead
            own = price.shape[len(at.task.lead) :] if shape is None else shape
            out.append(price.reshape((*sizes, *own)))
        return tuple(out)


class _Violation(Call):
    """(the solution, what it was found from) ↦ how far it is outside."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        (known, *tensors), lead = self.laid_out(inputs, (1,))
        arguments, settings = self.filled(iter(tensors))
        with torch.no_grad():
            task = bind(arguments._replace(x0=torch.nan_to_num(known)), settings).checked()
            x = known.reshape(*task.lead, -1)
            outside = task.constraint.violation(x)
            outside = torch.where(torch.isnan(x).any(-1), torch.nan, outside)
        return (outside if len(lead) < 2 else outside.reshape(lead),)
