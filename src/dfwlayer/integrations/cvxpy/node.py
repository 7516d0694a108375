"""The variables of one problem as one node of the graph of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from dfwlayer.differentiate.transforms import any_in_transform
from dfwlayer.integrations.cvxpy.pullback import pulled
from dfwlayer.integrations.cvxpy.single import Found, Single

__all__ = ["answered"]

Again = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def answered(
    single: Single, params: Sequence[Tensor], tol: float, most: int, again: Again
) -> tuple[Tensor, ...] | None:
    """The variables, None where tensor operations should look for them.

    ``again`` is what does, for derivatives of gradients.
    """
    asked = torch.is_grad_enabled() and any(value.requires_grad for value in params)
    if asked and any(value.is_inference() for value in params):
        return None  # which are not to be saved for a backward pass
    found = single.found(params, tol, most, asked)
    if found is None:
        return None
    if not asked:
        return single.variables(found, params[0].dtype)
    outputs: tuple[Tensor, ...] = _Node.apply(single, found, again, *params)  # type: ignore[attr-defined]
    return outputs


class _Node(_SingleLevelFunction):
    """The variables from the parameters; there are no transforms where it is applied."""

    @staticmethod
    def forward(
        ctx: Any,
        single: Single,
        found: Found,
        again: Again,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.single, ctx.found, ctx.again = single, found, again
        ctx.save_for_backward(*params)
        ctx.set_materialize_grads(False)
        outputs = single.variables(found, params[0].dtype)
        if any(single.fixed):
            fixed = [o for o, is_so in zip(outputs, single.fixed, strict=True) if is_so]
            ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        params = ctx.saved_tensors
        gradients = None
        if not torch.is_grad_enabled() and not any_in_transform(*arriving):
            gradients = pulled(ctx.single, ctx.found, arriving, params)
        if gradients is None:
            gradients = _by_tensors(ctx.again, params, ctx.needs_input_grad[3:], arriving)
        return None, None, None, *gradients


def _by_tensors(
    again: Again,
    params: Sequence[Tensor],
    asked: Sequence[bool],
    arriving: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The same gradients by tensor operations, with derivatives of their own."""
    with torch.enable_grad():
        # a parameter may be made of another one: what flows into a view stays out of that
        views = [p.view_as(p) for p in params]
        outputs = again(views)
    both = zip(outputs, arriving, strict=True)
    pairs = [(o, v) for o, v in both if v is not None and o.requires_grad]
    wanted = [i for i, want in enumerate(asked) if want]
    out: list[Tensor | None] = [None] * len(params)
    if not pairs or not wanted:
        return out
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        [views[i] for i in wanted],
        [v for _, v in pairs],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    for i, gradient in zip(wanted, gradients, strict=True):
        out[i] = gradient
    return out
