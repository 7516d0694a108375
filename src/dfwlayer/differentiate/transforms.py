"""torch.func, forward mode and higher derivatives around calls that solve.

A solve is a loop that looks at its data, so transforms cannot pass through it. They meet one
autograd.Function instead, `Derived`, which knows what to do with each of them: a vmap becomes a
batch, a derivative becomes another `Derived`, and what reaches the bottom are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dfwlayer.ops.tensors import tensors_in

__all__ = [
    "Derived",
    "Pullback",
    "Recipe",
    "any_in_transform",
    "derived",
    "has_derivatives",
    "in_transform",
]


class Recipe(Protocol):
    """A calculation on tensors, to be done at the bottom of all transforms."""

    @property
    def batches(self) -> bool:
        """Whether all inputs may get one more dimension in front, of size 1 where shared."""

    @property
    def own(self) -> frozenset[int]:
        """Inputs that must not be shared by a batch, since each problem has an output for them."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, with autograd derivatives that are right up to the order."""


@dataclass(frozen=True)
class _Derivative:
    """Of a recipe, and itself one."""

    of: Recipe

    @property
    def batches(self) -> bool:
        return self.of.batches


@dataclass(frozen=True)
class Pullback(_Derivative):
    """(gradients in the outputs, inputs) ↦ gradients in some of the inputs."""

    outputs: int
    wanted: tuple[int, ...]

    @property
    def own(self) -> frozenset[int]:
        return frozenset(self.outputs + i for i in (*self.wanted, *self.of.own))

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """By autograd."""
        given, at = inputs[: self.outputs], inputs[self.outputs :]
        with torch.enable_grad():
            at = _leaves(at, self.wanted, order)
            outs = self.of(order + 1, *at)
            return _pulled(outs, [at[i] for i in self.wanted], given, keep=order > 0)


@dataclass(frozen=True)
class Pushforward(_Derivative):
    """(movements of some of the inputs, inputs) ↦ movements of the outputs."""

    moving: tuple[int, ...]

    @property
    def own(self) -> frozenset[int]:
        tangents = len(self.moving)
        return frozenset((*range(tangents), *(tangents + i for i in (*self.moving, *self.of.own))))

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The transpose of the pullback, which is linear: autograd twice, at any point."""
        given, at = inputs[: len(self.moving)], inputs[len(self.moving) :]
        with torch.enable_grad():
            at = _leaves(at, self.moving, order)
            outs = self.of(order + 1, *at)
            anywhere = [torch.zeros_like(out).requires_grad_() for out in outs]
            pulled = _pulled(outs, [at[i] for i in self.moving], anywhere, keep=True)
            return _pulled(pulled, anywhere, given, keep=order > 0)


def _leaves(inputs: Sequence[Tensor], chosen: Sequence[int], order: int) -> tuple[Tensor, ...]:
    """The inputs, those chosen with autograd; below the outermost calculation its graph goes on."""
    if order == 0:
        return tuple(t.detach().requires_grad_(i in chosen) for i, t in enumerate(inputs))
    fresh = {i for i in chosen if not inputs[i].requires_grad}
    return tuple(t.detach().requires_grad_() if i in fresh else t for i, t in enumerate(inputs))


def _pulled(
    outs: Sequence[Tensor], at: Sequence[Tensor], given: Sequence[Tensor], keep: bool
) -> tuple[Tensor, ...]:
    """Gradients in ``at`` of those outputs that depend on anything."""
    pairs = [(o, g.expand_as(o)) for o, g in zip(outs, given, strict=True) if o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(t) for t in at)
    some, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(some, at, grads, create_graph=keep, materialize_grads=True)


class Derived(torch.autograd.Function):
    """A recipe under any stack of torch.func transforms, forward mode and autograd."""

    @staticmethod
    def forward(recipe: Recipe, *inputs: Tensor) -> tuple[Tensor, ...]:
        return recipe(0, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.recipe = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        pullback = Pullback(ctx.recipe, len(given), wanted)
        found = iter(derived(pullback, *given, *ctx.saved_tensors))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        moving = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
        given = [tangent for tangent in tangents if tangent is not None]
        return derived(Pushforward(ctx.recipe, moving), *given, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], recipe: Recipe, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, dims = info.batch_size, in_dims[1:]
        if recipe.batches:
            laid_out = []
            for i, (tensor, dim) in enumerate(zip(inputs, dims, strict=True)):
                if dim is not None:
                    laid_out.append(tensor.movedim(dim, 0))
                elif i in recipe.own:
                    laid_out.append(tensor.expand(size, *tensor.shape))
                else:
                    laid_out.append(tensor.unsqueeze(0))
            outs = derived(recipe, *laid_out)
        else:
            each = [
                derived(
                    recipe,
                    *(
                        t if dim is None else t.select(dim, k)
                        for t, dim in zip(inputs, dims, strict=True)
                    ),
                )
                for k in range(size)
            ]
            outs = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return outs, (0,) * len(outs)


def in_transform(node: Any) -> bool:
    """Whether a call with these tensors is inside of a transform, or they have tangents."""
    if torch._C._are_functorch_transforms_active():
        return True
    if isinstance(node, Tensor) and torch._C._functorch.is_legacy_batchedtensor(node):
        return True
    if forward_ad._current_level < 0:
        return False
    duals = [forward_ad.unpack_dual(t) for t in tensors_in(node, sparse=False)]  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


def any_in_transform(*gradients: Tensor | None) -> bool:
    """The same of gradients that arrive, None for those that do not."""
    for gradient in gradients:  # noqa: SIM110 - asked in every backward pass, where it takes less
        if gradient is not None and in_transform(gradient):
            return True
    return False


def derived(recipe: Recipe, *inputs: Tensor) -> tuple[Tensor, ...]:
    """``Derived.apply``, but with a word to those who come through the vmap of old."""
    if any(torch._C._functorch.is_legacy_batchedtensor(t) for t in inputs):
        raise RuntimeError(
            "is_grads_batched=True, vectorize=True and gradcheck(check_batched_grad=True) use a "
            "vmap that knows no rules for autograd functions, so dfwlayer does not work inside of "
            "it: use torch.func.jacrev, torch.func.jacfwd or torch.func.vmap"
        )
    out: tuple[Tensor, ...] = Derived.apply(recipe, *inputs)  # type: ignore[no-untyped-call]
    return out


def has_derivatives(t: Tensor) -> bool:
    """Whether t depends on anything that is being differentiated, at whatever level."""
    functorch = torch._C._functorch
    while True:
        tangent = forward_ad.unpack_dual(t).tangent  # type: ignore[no-untyped-call]
        if t.requires_grad or tangent is not None:
            return True
        if not functorch.is_functorch_wrapped_tensor(t):
            return False
        t = functorch.get_unwrapped(t)
