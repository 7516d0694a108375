"""One problem without a batch, from parameters to variables.

A call of a small problem takes less arithmetic than tensor operations to write the problem down.
Here that is done in NumPy around calls of compiled code, and likewise backwards by `pullback`. The
answer is that of the tensor operations of `Model`, to which everything else is left: batches, other
devices, transforms, second derivatives, dual variables, some of the sets, and what compiled code
leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from dfwlayer.constraints import LpBall, Polyhedron
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Linear
from dfwlayer.engines import compiled
from dfwlayer.integrations.cvxpy.affine import Group
from dfwlayer.integrations.cvxpy.model import LARGE, Model, Output
from dfwlayer.integrations.cvxpy.pieces import Where

__all__ = ["BOUNDS", "SIDES", "Found", "Named", "Numbers", "Single", "single_of"]

Numbers = NDArray[Any]
Named = dict[str, Numbers]
KINDS = Tensor, Parameter
DTYPES = torch.float64, torch.float32
ONES = np.ones(1)
SIDES = "A", "b", "G", "h"
BOUNDS = "lower", "upper"
# whether what autograd saves may be handed to functions, where PyTorch tells
HOOKS_GO = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)


class Link(NamedTuple):
    """Entries of an array that are entries of a tensor of the set."""

    tensor: int  # its number, as `dfwlayer.engines.compiled.alone` tells them
    name: str  # of the array
    places: Numbers | None  # in it, flat; None for all, in the order of the tensor's
    entries: Numbers  # of the tensor


class Made(NamedTuple):
    """How a set comes from the arrays of a problem, for all problems with these shapes."""

    shapes: tuple[Any, ...] | None  # of its tensors; None where they are more than such entries
    asked: tuple[bool, ...]  # which of them vary
    links: tuple[Link, ...]


class Turned(NamedTuple):
    """An ellipsoid ‖W y + c‖ ≤ ρ as a ball, ‖u‖ ≤ ρ with u = W y + c."""

    inverse: Numbers  # W⁻¹
    P: Numbers  # of f in u
    q: Numbers


class Found(NamedTuple):
    """A solution, and what its gradients need."""

    terms: Numbers
    at: Named
    y: Numbers
    alone: Any  # `dfwlayer.engines.compiled.alone.Alone`
    where: Where | None
    turned: Turned | None


class Single:
    """A model, for problems without a batch whose tensors are plain ones of this processor."""

    def __init__(self, model: Model, group: Group, outputs: list[Output]) -> None:
        self.model, self.group, self.outputs = model, group, outputs
        ends = np.cumsum([0, *group.sizes]).tolist()
        self.parts = list(zip(group.names, group.shapes, ends[:-1], ends[1:], strict=True))
        self.size = ends[-1]
        constants = model.arrays.constants(torch.device("cpu"))
        self.constants = {name: value.numpy() for name, value in constants.items()}
        self.turned = model.form.turned
        names = model.arrays.arrays
        self.of_set = [name for name in names if name in (*SIDES, *BOUNDS) or "ball" in name]
        if self.turned is not None:
            self.of_set = [f"{self.turned.name}.radius"]
        self.varies = model.pieces is not None or any(name in group.names for name in self.of_set)
        self.layout: Any = None  # that of the last problem, if the set is always the same
        self.rows: bool | None = None  # whether the set is a polyhedron, once one was made
        self.made: Made | None = None
        self.P: Tensor | None = None
        self.scale = 1.0  # of f, where P does not vary
        if not model.varies:
            # the device that tensors are made on by default may be another one
            blank = {"q": torch.zeros(model.n, dtype=torch.float64, device="cpu")}
            self.P, self.scale = model.steady(blank | constants)

    def takes(self, params: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether these are parameters of one problem, with numbers that may be looked at."""
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return False  # in forward mode they may have tangents
        if len(params) != len(shapes):
            return False
        for value, shape in zip(params, shapes, strict=True):
            if type(value) not in KINDS or value.shape != shape or value.dtype not in DTYPES:
                return False
            if not value.is_cpu or value.layout != torch.strided or value.is_neg():
                return False
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return False
        return True

    def found(self, params: Sequence[Tensor], tol: float, most: int, asked: bool) -> Found | None:
        """The solution, None where tensor operations should look for it."""
        engine = compiled.for_one()
        if engine is None:
            return None
        with np.errstate(all="ignore"):  # what is beyond the range of numbers is for others
            return self._found(engine, params, tol, most, asked)

    def _found(
        self, engine: Any, params: Sequence[Tensor], tol: float, most: int, asked: bool
    ) -> Found | None:
        terms, at = self._arrays(params)
        P, q = self._objective(at)
        now, where = {name: from_numpy(at[name]) for name in self.of_set}, None
        pieces = self.model.pieces
        if pieces is not None:
            for name in ("kink.place", "kink.cost", "kink.jump"):
                if name in at:
                    now[name] = from_numpy(at[name])
            if self.scale != 1:
                now["kink.cost"] = now["kink.cost"] / self.scale
            bounds = pieces.region.bounds(now)
            where = pieces.located(P, from_numpy(q), now, bounds, now["kink.cost"])
            if where is None:
                return None
            q = q + (now["kink.cost"].numpy() * where.passed[0]).sum(-1)
            now = self._on_pieces(at, bounds, where)
        turned = None
        if self.turned is not None:
            turned = self._turned(at, P, q)
            if turned is None:
                return None
            P, q = from_numpy(turned.P), turned.q
        slope = from_numpy(q)
        body = self._body(now) if self.layout is None else None
        alone = engine.located(P, slope, body, tol, most, sets_of=self.layout, asked=asked)
        if alone is None:
            return None
        y = alone.x if turned is None else self._back(at, turned, alone.x)
        if where is not None and not where.hold(y[None]):
            return None
        if not self.varies:
            self.layout = alone.layout
        elif asked and turned is None and not self._is_made(engine, alone, P, slope, now):
            return None
        return Found(terms, at, y, alone, where, turned)

    def _body(self, now: dict[str, Tensor]) -> Constraint | Linear:
        """The set; one that has rows without the checks, which it has passed once."""
        form = self.model.form
        if self.turned is not None:
            return LpBall(2, self.turned.radius(now))
        if self.rows:
            low, high = form.region.bounds(now)
            lower, upper = -math.inf if low is None else low, math.inf if high is None else high
            sides = (now.get("G"), now.get("h", 0.0)), (now.get("A"), now.get("b", 0.0))
            return Linear(self.model.n, lower, upper, *sides[0], *sides[1])
        made = form.made(now)
        self.rows = isinstance(made, Polyhedron)
        return made

    def _turned(self, at: Named, P: Tensor | None, q: Numbers) -> Turned | None:
        """f in u = W y + c, None where W has no inverse or the set is a point."""
        assert self.turned is not None
        W, c = at[f"{self.turned.name}.W"], at.get(f"{self.turned.name}.c")
        if not at[self.of_set[0]] > 0:
            return None
        try:
            inverse = np.linalg.inv(W)
        except np.linalg.LinAlgError:
            return None
        left = inverse.T if P is None else inverse.T @ P.numpy()
        curved = left @ inverse
        slope = inverse.T @ q
        if c is not None:
            slope -= left @ (inverse @ c)
        return Turned(inverse, (curved + curved.T) / 2, slope)

    def _back(self, at: Named, turned: Turned, u: Numbers) -> Numbers:
        """y = W⁻¹ (u − c)."""
        assert self.turned is not None
        c = at.get(f"{self.turned.name}.c")
        y: Numbers = turned.inverse @ (u if c is None else u - c)
        return y

    def _arrays(self, params: Sequence[Tensor]) -> tuple[Numbers, Named]:
        """The terms, and the arrays as multiples of them."""
        group = self.group
        parts = [ONES] if group.one else []
        parts += [params[i].detach().numpy().reshape(-1) for i in group.parameters]
        terms, done = np.concatenate(parts, dtype=np.float64), 0
        for end in group.levels:
            left, right = (side[done:end].numpy() for side in (group.left, group.right))
            terms, done = np.concatenate((terms, terms[left] * terms[right])), end
        values = group.matrix.matrix @ terms
        at = self.constants.copy()
        for name, shape, first, end in self.parts:
            part = values[first:end]
            at[name] = part if len(shape) == 1 else part.reshape(shape)
        return terms, at

    def _objective(self, at: Named) -> tuple[Tensor | None, Numbers]:
        """P and q, as `Model.objective` has them."""
        model, q, K = self.model, at["q"], at.get("K")
        if K is not None:
            q = q + (at["qz"] + at["Pz"] * at["k"]) @ K
        if not model.varies:
            return self.P, q if self.scale == 1 else q / self.scale
        P = at.get("P")
        if K is not None:
            part = K.T @ (at["Pz"][:, None] * K)
            P = part if P is None else P + part
        assert P is not None
        return from_numpy(P), q

    def _on_pieces(
        self, at: Named, bounds: tuple[Tensor | None, Tensor | None], where: Where
    ) -> dict[str, Tensor]:
        """The arrays of the set there, as `Pieces.posed` has them."""
        now = {name: at[name] for name in self.of_set}
        place, passed, n = at["kink.place"], where.passed[0], len(at["q"])
        jump = at.get("kink.jump")
        if jump is not None:
            rises, count = jump * passed, len(jump)
            for name, more in (
                ("G", rises.sum(-1)),
                ("h", (rises * place).reshape(count, -1).sum(-1)),
            ):
                now[name] = now[name].copy()
                now[name][:count] += more
        pool = np.empty(place.size + 2 * n)
        pool[: place.size] = place.reshape(-1)
        for k, (own, none) in enumerate(zip(bounds, (-math.inf, math.inf), strict=True)):
            first = place.size + k * n
            pool[first : first + n] = none if own is None else own.numpy()
        ends = pool[where.ends[0]]
        now["lower"], now["upper"] = ends[:n], ends[n:]
        return {name: from_numpy(value) for name, value in now.items()}

    def _is_made(
        self, engine: Any, alone: Any, P: Tensor | None, q: Tensor, now: dict[str, Tensor]
    ) -> bool:
        """Whether it is known how gradients in the tensors of the set are some in the arrays."""
        shapes = tuple([None if t is None else t.shape for t in alone.tensors])
        if self.made is None:
            with ExitStack() as left:
                left.enter_context(torch.enable_grad())
                if HOOKS_GO():
                    # those of the caller are for the tensors of the caller: a checkpoint counts
                    left.enter_context(saved_tensors_hooks(_itself, _itself))
                own = {name: value.clone().requires_grad_() for name, value in now.items()}
                self.made = _made(shapes, engine.tensors_of(P, q, self._body(own)), own)
        return self.made.shapes == shapes

    @cached_property
    def fixed(self) -> list[bool]:
        """Which outputs are the same for all parameters."""
        names = self.group.names
        return [
            each.places is None and not each.moves and f"{each.name}.k" not in names
            for each in self.outputs
        ]

    def variables(self, found: Found, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """See `Model.variables`, in memory of their own."""
        outputs = []
        for each in self.outputs:
            if each.places is None:
                value = found.at[f"{each.name}.k"]
                value = value + found.at[f"{each.name}.K"] @ found.y if each.moves else value.copy()
            elif isinstance(each.places, slice):
                value = found.y[each.places].copy()
            else:
                value = found.y[each.places.numpy()]
            outputs.append(from_numpy(value.reshape(each.shape)).to(dtype))
        return tuple(outputs)


def single_of(model: Model) -> Single | None:
    """None for models that are left to tensor operations."""
    arrays, region = model.arrays, model.form.region
    groups = arrays.grouped((False,) * len(arrays.terms.sizes))
    outputs = [each for each in model.outputs if isinstance(each, Output)]
    plain = all(
        not part.scaled and not part.squared and (part.weight == 1).all() for part in region.parts
    )
    diagonal = "K" not in arrays.arrays or (model.diagonal and "Pyz" not in arrays.arrays)
    if len(groups) != 1 or len(outputs) < len(model.outputs) or region.held or model.squares:
        return None
    if not plain or not diagonal or model.n > LARGE:
        return None
    turned = model.form.turned
    if turned is not None and turned.count > model.n:  # the sphere is cut by the image of W
        return None
    return Single(model, groups[0], outputs)


def _made(
    shapes: tuple[Any, ...], tensors: Sequence[Tensor | None], own: dict[str, Tensor]
) -> Made:
    """Each entry of an array is one of a tensor, or none: told by numbers that come back.

    Squares come back as well, so that what is more than an entry, as −l or the sum of two, is seen.
    """
    links, sound = [], True
    for i, tensor in enumerate(tensors):
        if tensor is None or not tensor.requires_grad:
            continue
        size = tensor.numel()
        labels = torch.arange(1.0, size + 1, dtype=tensor.dtype, device=tensor.device)
        back, again = (
            torch.autograd.grad(
                tensor,
                list(own.values()),
                given.reshape(tensor.shape),
                allow_unused=True,
                retain_graph=True,
            )
            for given in (labels, labels * labels)
        )
        for name, label, square in zip(own, back, again, strict=True):
            if label is None or square is None:
                continue
            flat = label.reshape(-1).numpy()
            sound = sound and bool((square.reshape(-1).numpy() == flat * flat).all())
            sound = sound and bool((flat >= 0).all() and (flat <= size).all())
            places = np.flatnonzero(flat)
            entries = flat[places].astype(np.int64) - 1
            same = len(places) == len(flat) == size and (entries == places).all()
            links.append(Link(i, name, None if same else places, entries))
    asked = tuple([t is not None and t.requires_grad for t in tensors])
    return Made(shapes if sound else None, asked, tuple(links))


def _itself(t: Tensor) -> Tensor:
    return t
