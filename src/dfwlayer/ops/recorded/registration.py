"""The operators as torch meets them: how they are defined, and where autograd comes in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from dfwlayer.ops.recorded.operators import (
    CALL,
    DERIVED,
    UNSAFE,
    Operator,
    judged,
    judged_mapped,
    judged_shape,
)

__all__: list[str] = []

_PLAIN = frozenset((Tensor, nn.Parameter))
_TAGS = (torch.Tag.pt2_compliant_tag, *(() if UNSAFE is None else (UNSAFE,)))

torch.library.define(
    "dfwlayer::call",
    "(Tensor[] tensors, bool[] needs, str maps, str text) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define(
    "dfwlayer::derived", "(Tensor[] inputs, Tensor? ticket, str text) -> Tensor[]", tags=_TAGS
)
torch.library.define(
    "dfwlayer::judged",
    "(Tensor suspect, Tensor[] tensors, str maps, str text) -> Tensor",
    tags=_TAGS,
)


def _below(
    operator: Operator, keys: Any, tensors: Sequence[Tensor], rest: Sequence[Any]
) -> list[Tensor]:
    """Go on to what comes after autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        after = keys & torch._C._after_autograd_keyset
        found: list[Tensor] = getattr(torch.ops.dfwlayer, operator.name).default.redispatch(
            after, list(tensors), *rest
        )
    return found


def _above(operator: Operator, keys: Any, tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    """The kernel of autograd."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        # in a compiled program there is nothing to be done on the way
        modes = torch._C._len_torch_dispatch_stack()
        inside = torch._C._are_functorch_transforms_active()
        plain = not modes and not inside and _PLAIN.issuperset(map(type, tensors))
        return operator.work(tensors, *rest) if plain else _below(operator, keys, tensors, rest)
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:  # torch.func has taken its levels off before it comes here, and does the same
        found = _Node.apply(operator, keys, rest, *tensors)  # type: ignore[attr-defined]
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(allowed)
    return list(found)


class _Node(_SingleLevelFunction):
    """An operator in a graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, keys: Any, rest: Sequence[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():  # for the other levels of torch.func
            found = _below(operator, keys, tensors, rest)
        ctx.operator = operator
        operator.saves(ctx, (tensors, *rest), found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.operator.backward(ctx, ctx.needs_input_grad[3:], grads)
        return None, None, None, *found


def _refuse_tangents(tensors: Sequence[Tensor]) -> None:
    """Raise in forward mode: torch would drop the tangents of an operator without a word."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "forward-mode derivatives (torch.func.jvp, jacfwd, hessian) of dfwlayer do not work "
            "inside of torch.compile, torch.export and make_fx: use torch.func.vjp, jacrev or grad "
            "there, or leave this part to eager mode, where they work"
        )


def _register() -> torch.library.Library:
    here = torch.library.Library("dfwlayer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for each in (CALL, DERIVED):
        here.impl(each.name, each.kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        here.impl(each.name, partial(_above, each), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"dfwlayer::{each.name}", each.shapes, lib=here)
        torch.library.register_vmap(f"dfwlayer::{each.name}", each.mapped, lib=here)
    here.impl("judged", judged, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # what is added is a constant
    here.impl("judged", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("dfwlayer::judged", judged_shape, lib=here)
    torch.library.register_vmap("dfwlayer::judged", judged_mapped, lib=here)
    return here


_library = _register()
