"""Solves of this library in JAX, under ``jit``, ``grad`` and ``vmap``.

    import dfwlayer.integrations.jax as dfw

    @jax.jit
    def loss(q, t):
        return dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, radius=t)).x.sum()

    jax.grad(loss, argnums=(0, 1))(q, 2.0)

Every objective and set of the library is here by its own name, and takes JAX arrays, traced or
not, where the library takes tensors; `described` does the same for a set of your own. The solve
is a callback from JAX, its arrays are read where they are (DLPack) and the results are copied by
JAX. What ``vmap`` maps over becomes the batch of one solve.

Needs jax; nothing else in this package imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dfwlayer.integrations.descriptions import (
    NAMES,
    Described,
    Layout,
    Problem,
    Spec,
    described,
    mirrored,
    problem_of,
)
from dfwlayer.integrations.tickets import Graph, gradients_of, keep
from dfwlayer.ops.rows import common_shape
from dfwlayer.solution import Status

__all__ = ["Solution", "Status", "described", "project", "solve"]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


class Solution(NamedTuple):
    """The outcome of `solve`, (*batch, ...) as in `dfwlayer.Solution`; a pytree."""

    x: jax.Array  # with its gradient
    value: jax.Array  # f(x), with its gradient
    gap: jax.Array  # f(x) − f* ≤ gap
    num_steps: jax.Array  # int32
    status: jax.Array  # int32, codes of `dfwlayer.Status`


def __getattr__(name: str) -> Callable[..., Described]:
    """The objectives and sets of the library, taking arrays."""
    return mirrored(name)


def __dir__() -> list[str]:
    return sorted((*__all__, *NAMES))


jax.tree_util.register_pytree_node(
    Described,
    lambda node: (node.arrays, (node.names, node.form)),
    lambda known, arrays: Described(tuple(arrays), *known),
)


def solve(
    objective: Described, constraint: Described, *, x0: Any = None, **options: Any
) -> Solution:
    """Minimise f(x; θ) over a convex set, differentiably in every array; see `dfwlayer.solve`.

    Reverse mode, to any order, as far as the library's derivatives go: ``jax.grad``, ``vjp``,
    ``jacrev`` and these of each other. Forward mode (``jvp``, ``jacfwd``, ``hessian``) is refused
    by JAX with a TypeError.

    Args:
        objective: ``Quadratic``, ``LeastSquares`` or ``Smooth`` of this module; the function of
            ``Smooth`` is written in torch.
        constraint: A set of this module.
        x0: Start, without a gradient.
        options: ``method``, ``tol``, ``max_steps``, ``shape`` and the others of
            `dfwlayer.solve`.

    Returns:
        The `Solution`. Arrays of different precision are brought to the larger one.

    Raises:
        ValueError: Naming the argument. Under ``jit`` values are looked at when the program runs;
            what is wrong with them then arrives as JAX's error, with that message at its end.

    """
    problem = problem_of(objective, constraint, x0 is not None, options, __name__)
    names = [*objective.names, *constraint.names] + ["x0"] * problem.start
    given = [*objective.arrays, *constraint.arrays] + [x0] * problem.start
    arrays = _alike(names, given)
    problem.fit(_specs(arrays))
    if not _traced(arrays):  # nobody differentiates, maps or compiles
        return Solution(*_host(_Solve(problem), arrays))
    return Solution(*_differentiable(_Solve(problem))(*arrays))


def project(z: Any, constraint: Described, **options: Any) -> jax.Array:
    """The point of a set nearest to z, (*batch, ...), differentiably; options as in `solve`."""
    return solve(mirrored("Quadratic")(None, -jnp.asarray(z)), constraint, **options).x


def _alike(names: Sequence[str], given: Sequence[Any]) -> list[jax.Array]:
    """Arrays of JAX, those of floating point in one precision."""
    arrays = [_array(value) for value in given]
    for name, a in zip(names, arrays, strict=True):
        if str(a.dtype) not in DTYPES:
            raise ValueError(
                f"{name}: expected float32 or float64, got {a.dtype}; use .astype(jnp.float32)"
            )
    floating = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays]
    if not any(floating):
        return arrays
    dtype = jnp.result_type(*(a for a, real in zip(arrays, floating, strict=True) if real))
    return [
        # also of this dtype where it may stand for a number of Python, which has none of its own
        a.astype(dtype) if real and (a.dtype != dtype or (_traced([a]) and a.weak_type)) else a
        for a, real in zip(arrays, floating, strict=True)
    ]


def _array(value: Any) -> jax.Array:
    """The value itself where it is one; asking JAX for that takes long."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _specs(arrays: Sequence[Any]) -> tuple[Spec, ...]:
    return tuple(Spec(tuple(a.shape), DTYPES[str(a.dtype)]) for a in arrays)


# what happens on the side of torch


@dataclass(frozen=True)
class _Solve:
    """Tensors ↦ x, value, gap, number of steps, status, and a ticket if the graph is kept."""

    problem: Problem
    kept: tuple[int, ...] = ()  # the tensors in which gradients of the graph are to be had

    def outputs(self, specs: tuple[Spec, ...]) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes."""
        lead, shape, _ = self.problem.fit(specs)
        dtype = next(str(s.dtype) for s in specs if s.dtype.is_floating_point)
        dtype = dtype.removeprefix("torch.")
        found: list[tuple[tuple[int, ...], Any]] = [((*lead, *shape), dtype)]
        found += 2 * [(lead, dtype)] + 2 * [(lead, "int32")]
        return [*found, ((), "int32")] if self.kept else found

    @property
    def tickets(self) -> int:
        """How many of the outputs are tickets."""
        return int(bool(self.kept))

    def batches(self, specs: tuple[Spec, ...]) -> bool:
        """Whether all tensors may have further dimensions in front."""
        return self.problem.layouts(specs) is not None

    def __call__(
        self, tensors: Sequence[Tensor], specs: tuple[Spec, ...], order: int = 0
    ) -> tuple[Tensor, ...]:
        """Solve, differentiably to an order; with the dimensions in front as a batch."""
        front = _front(tensors, specs)
        if self.kept:
            return self._keeping(tensors, specs, front or (), order)
        if front is not None:
            layouts = self.problem.layouts(specs)
            assert layouts is not None
            tensors = [
                _laid_out(tensor, spec, layout)
                for tensor, spec, layout in zip(tensors, specs, layouts, strict=True)
            ]
        with torch.set_grad_enabled(order > 0):
            sol = self.problem.solved(tensors)
        outs = (sol.x, sol.value, sol.gap, sol.num_steps.int(), sol.status.int())
        if front is None:
            return outs
        lead, shape, _ = self.problem.fit(specs)
        return tuple(
            out.expand(*front, *lead, *(shape if i == 0 else ())) for i, out in enumerate(outs)
        )

    def _keeping(
        self, tensors: Sequence[Tensor], specs: tuple[Spec, ...], front: tuple[int, ...], order: int
    ) -> tuple[Tensor, ...]:
        """Solve, and keep the graph; JAX takes the memory of its arrays back."""
        plain = replace(self, kept=())
        if order > 0:
            return (*plain(tensors, specs, order), torch.zeros(front, dtype=torch.int32))
        own = [t.clone() for t in tensors]
        for i in self.kept:
            own[i] = tensors[i].expand((*front, *specs[i].shape)).clone().requires_grad_()
        outs = plain(own, specs, 1)
        given = own[:-1] if self.problem.start else own
        ticket = keep(Graph(_Solve(replace(self.problem, start=True)), given, outs))
        return (*outs, torch.full(front, ticket, dtype=torch.int32))

    def watched(self, wanted: tuple[int, ...], specs: tuple[Spec, ...]) -> _Solve:
        """The same with its graph kept, where the gradient is that of the exact solution."""
        if not wanted or self.problem.fit(specs).mode != "implicit":
            return self
        return replace(self, kept=wanted)

    def after(self, arrays: tuple[Any, ...], outs: Sequence[Any]) -> tuple[_Solve, tuple[Any, ...]]:
        """The same for a derivative, from where the solution is known to be."""
        problem = self.problem
        if problem.fit(_specs(arrays)).mode != "implicit":
            return replace(self, kept=()), arrays
        own = arrays[:-1] if problem.start else arrays
        return _Solve(replace(problem, start=True)), (*own, jax.lax.stop_gradient(outs[0]))


@dataclass(frozen=True)
class _Pullback:
    """(inputs, gradients in some outputs, a ticket if any) ↦ gradients in some of the inputs."""

    of: _Solve | _Pullback
    given: tuple[int, ...]  # outputs
    wanted: tuple[int, ...]  # inputs
    ticket: bool  # whether there is one, the last of the inputs

    tickets: ClassVar = 0

    def outputs(self, specs: tuple[Spec, ...]) -> list[tuple[tuple[int, ...], Any]]:
        return [(specs[i].shape, str(specs[i].dtype).removeprefix("torch.")) for i in self.wanted]

    @property
    def _inner(self) -> slice:
        """The inputs of what is differentiated."""
        return slice(0, -len(self.given) - self.ticket)

    def batches(self, specs: tuple[Spec, ...]) -> bool:
        return self.of.batches(specs[self._inner])

    def __call__(
        self, tensors: Sequence[Tensor], specs: tuple[Spec, ...], order: int = 0
    ) -> tuple[Tensor, ...]:
        """By autograd; each problem of a batch has gradients of its own."""
        front, inner = _front(tensors, specs), self._inner
        at, gradients = list(tensors[inner]), tensors[inner.stop :][: len(self.given)]
        if front is not None:
            for i in self.wanted:
                at[i] = at[i].expand(*front, *specs[i].shape)
        if self.ticket and order == 0:
            arriving = dict(zip(self.given, gradients, strict=True))
            known = gradients_of(tensors[-1], self.of, at, self.wanted, arriving)
            if known is not None:
                return known
        with torch.enable_grad():
            for i in self.wanted:
                if order == 0 or not at[i].requires_grad:
                    at[i] = at[i].detach().requires_grad_()
            outs = self.of(at, specs[inner], order + 1)
            pairs = [
                (outs[i], g.expand_as(outs[i]))
                for i, g in zip(self.given, gradients, strict=True)
                if outs[i].requires_grad
            ]
            wanted = [at[i] for i in self.wanted]
            if not pairs:
                return tuple(torch.zeros_like(t) for t in wanted)
            some, seeds = zip(*pairs, strict=True)
            return torch.autograd.grad(
                some, wanted, seeds, create_graph=order > 0, materialize_grads=True
            )

    def after(
        self, arrays: tuple[Any, ...], outs: Sequence[Any]
    ) -> tuple[_Pullback, tuple[Any, ...]]:
        return self, arrays

    def watched(self, *_: Any) -> _Pullback:
        return self


_Recipe = _Solve | _Pullback


def _front(tensors: Sequence[Tensor], specs: Sequence[Spec]) -> tuple[int, ...] | None:
    """The sizes of the dimensions in front of the tensors' own, None where there are none."""
    depth = tensors[0].dim() - len(specs[0].shape)
    return common_shape(*(t.shape[:depth] for t in tensors)) if depth else None


def _laid_out(tensor: Tensor, spec: Spec, layout: Layout) -> Tensor:
    front = tensor.shape[: tensor.dim() - len(spec.shape)]
    if all(size == 1 for size in front):  # shared by all problems
        return tensor.reshape(spec.shape)
    return layout.spread(tensor, spec)


# what happens on the side of JAX


def _traced(arrays: Sequence[Any]) -> bool:
    """Whether one of them stands for values that are not known, or are followed."""
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def _host(recipe: _Recipe, arrays: Sequence[Any]) -> list[Any]:
    """Call the recipe, at once where values are known, or as a part of the program."""
    specs = _specs(arrays)
    if not _traced(arrays):
        outs: list[Any] = jax.device_put(_called(recipe, specs, arrays))  # all at once
        return outs
    shapes: Any = [jax.ShapeDtypeStruct(*out) for out in recipe.outputs(specs)]  # type: ignore[no-untyped-call]
    found: list[Any] = jax.pure_callback(
        _callback(recipe, specs), shapes, *arrays, vmap_method="expand_dims"
    )
    return found


@lru_cache(maxsize=256)
def _callback(recipe: _Recipe, specs: tuple[Spec, ...]) -> Callable[..., list[np.ndarray]]:
    """The recipe as JAX calls it; the same function each time, or JAX would compile it anew."""
    return lambda *values: _called(recipe, specs, values)


def _called(recipe: _Recipe, specs: tuple[Spec, ...], values: Sequence[Any]) -> list[np.ndarray]:
    """With arrays for tensors; problems that cannot be one batch are called one by one."""
    # the capsule itself, as asking an array of JAX for its device takes as long as a small solve
    tensors = [from_dlpack(value.__dlpack__()) for value in values]
    front = _front(tensors, specs)
    if front is None or recipe.batches(specs):
        return [out.detach().numpy() for out in recipe(tensors, specs)]
    flat = [
        t.expand(*front, *spec.shape).flatten(0, len(front) - 1)
        for t, spec in zip(tensors, specs, strict=True)
    ]
    each = [recipe([t[k] for t in flat], specs) for k in range(math.prod(front))]
    return [
        torch.stack([o.detach() for o in outs]).reshape(*front, *outs[0].shape).numpy()
        for outs in zip(*each, strict=True)
    ]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Known:
    """What a backward pass knows of its forward pass beside the arrays."""

    recipe: _Recipe
    wanted: tuple[int, ...]
    inputs: int


def _called_in(recipe: _Recipe, arrays: Sequence[Any]) -> list[Any]:
    """A recipe within a derivative: at once where nobody asks for another one of it.

    JAX takes longer to look for derivatives of a function than a small solve takes.
    """
    if not _traced(arrays):
        return _host(recipe, arrays)
    found: list[Any] = _differentiable(recipe)(*arrays)
    return found


@lru_cache(maxsize=256)
def _differentiable(recipe: _Recipe) -> Callable[..., Any]:
    """The recipe as a function of arrays, whose gradient is another such function."""

    @jax.custom_vjp
    def run(*arrays: Any) -> list[Any]:
        return _host(recipe, arrays)

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        arrays = tuple(p.value for p in primals)
        wanted = tuple(
            i
            for i, p in enumerate(primals)
            if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.floating)
        )
        # not the call itself, which would have no second derivative
        watched = recipe.watched(wanted, _specs(arrays))
        outs = _called_in(watched, arrays)
        again, kept = recipe.after(arrays, outs)
        tickets = tuple(outs[len(outs) - watched.tickets :])
        own = outs[: len(outs) + recipe.tickets - watched.tickets]
        return own, (_Known(again, wanted, len(primals)), kept, tickets)

    def backward(kept: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        known, arrays, tickets = kept
        zero = jax.custom_derivatives.SymbolicZero
        seeds = {i: g for i, g in enumerate(gradients) if not isinstance(g, zero)}
        full: list[Any] = [None] * known.inputs
        if seeds and known.wanted:
            pulled = _Pullback(known.recipe, tuple(seeds), known.wanted, bool(tickets))
            found = _called_in(pulled, (*arrays, *seeds.values(), *tickets))
            for i, each in zip(known.wanted, found, strict=True):
                full[i] = each
        return tuple(full)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
