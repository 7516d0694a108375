"""Any convex smooth function written in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dfwlayer.arguments import INTEGERS, as_lipschitz, as_sizes, check_tensors
from dfwlayer.linalg.sparse import stored_entries
from dfwlayer.objectives.base import Curvature, Objective
from dfwlayer.objectives.model import FEW, LARGEST, Model
from dfwlayer.ops.rows import in_one_batch
from dfwlayer.ops.values import on_tensor, shape_of

__all__ = ["Smooth"]

SEVERAL = 8  # vectors, from which on it is worth while to map over them


@dataclass(frozen=True, init=False)
class Smooth(Objective):
    """f(x) = fn(x, *params), convex and differentiable in x.

    ``fn`` is written in torch for a variable of shape ``shape``. Its output tells the batch: ()
    for one problem; for many it maps x of shape (*batch, *shape) to (*batch), reducing over the
    variable's own dimensions only (``.sum(-1)``, not ``.sum()``). A function of one problem
    that meets a batched constraint is mapped over the batch by ``torch.func.vmap``.

    Args:
        fn: The function; further tensors it needs come as ``params``, not from a closure, so
            that they are differentiated.
        params: Tensors, differentiated; anything else is passed on as it is.
        shape: Shape of one problem's variable, for instance (n,) or (m, k).
        lipschitz: L of ∇f, a number or (*batch), if known. Without it steps are found by
            backtracking.

    """

    fn: Callable[..., Tensor]
    params: tuple[Any, ...]
    shape: tuple[int, ...]
    lipschitz: float | Tensor | None
    lead: tuple[int, ...]  # of the batch that the parameters describe
    variable: tuple[int, ...]  # the shape as fn sees it, and
    rows_seen: tuple[int, ...] | None  # the batch, where both were flattened; None if (B,)
    unit: Tensor | None  # u, and
    size: Tensor | None  # e: the function is fn(u x, …)/e; (...), None for one
    calling: Literal["single", "rows", "vmap"]

    def __init__(
        self,
        fn: Callable[..., Tensor],
        *params: Any,
        shape: tuple[int, ...] | int,
        lipschitz: float | Tensor | None = None,
    ) -> None:
        for name, value in (("fn", fn), ("params", params), ("shape", shape)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "lipschitz", lipschitz)
        for name in ("lead", "variable", "rows_seen", "unit", "size", "calling"):
            object.__setattr__(self, name, None)
        self.__post_init__()

    def __post_init__(self) -> None:
        fn, params, shape, lipschitz = self.fn, self.params, self.shape, self.lipschitz
        if not callable(fn):
            raise ValueError(f"fn: expected a function of (x, *params), got {type(fn).__name__}")
        sizes = (shape,) if isinstance(shape, INTEGERS) else shape
        shape = as_sizes("shape", sizes, "the sizes of one problem's variable, such as (n,)")
        if lipschitz is not None:
            lipschitz = as_lipschitz(lipschitz)
        tensors = _tensors(params)
        if tensors:
            check_tensors(tensors, half_allowed=True, sparse=tensors)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "lipschitz", lipschitz)
        object.__setattr__(self, "unit", None)
        object.__setattr__(self, "size", None)
        object.__setattr__(self, "variable", shape)
        object.__setattr__(self, "rows_seen", None)
        object.__setattr__(self, "lead", self._probe())
        object.__setattr__(self, "calling", "rows")

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """That of fn's value, and of L."""
        leads = {"fn": self.lead} if self.lead else {}
        if own := shape_of(self.lipschitz):
            leads["lipschitz"] = own
        return leads

    @property
    def batch(self) -> int | None:
        """How many problems the parameters describe, None for one without a batch."""
        return math.prod(self.lead) if self.lead else None

    @property
    def deep(self) -> bool:
        return any(len(lead) > 1 for lead in self.leads(self.shape).values())

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Smooth:
        """The same function, which is called with the batch and the variable as they were."""
        constant = on_tensor(self.lipschitz, lambda each: in_one_batch(each, 0, lead))
        own = (math.prod(lead),) if self.lead else ()
        return _changed(
            self, shape=(math.prod(shape),), lead=own, rows_seen=lead, lipschitz=constant
        )

    @property
    def dtype(self) -> torch.dtype:
        tensors = _tensors(self.params)
        return next(iter(tensors.values())).dtype if tensors else torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        tensors = _tensors(self.params)
        return next(iter(tensors.values())).device if tensors else torch.get_default_device()

    def float32(self) -> Smooth:
        """Half-precision parameters in float32."""
        wide = torch.promote_types(self.dtype, torch.float32)
        params = tuple(
            p.to(wide) if isinstance(p, Tensor) and p.is_floating_point() else p
            for p in self.params
        )
        return _changed(self, params=params)

    def bind(self, batch: int | None) -> Smooth:
        """Settle how fn is called: on one variable, on rows, or mapped over rows."""
        tensors = _tensors(self.params)
        if tensors:
            check_tensors(tensors, sparse=tensors)
        if batch is None:
            return _changed(self, calling="single")
        rows = self._rows(batch)
        out = self._try(rows)
        if isinstance(out, tuple) and out == rows:
            return _changed(self, calling="rows")
        if math.prod(self.lead) == 1:
            return _changed(self, calling="vmap")
        raise ValueError(
            f"fn: expected shape {rows} for x of shape {(*rows, *self.variable)}, got "
            f"{out if isinstance(out, tuple) else repr(out)}; reduce over the variable's own "
            "dimensions only, for instance with .sum(-1)"
        )

    def verified(self) -> tuple[Smooth, Tensor | None]:
        """Finite parameters; one whose first dimensions are the batch's may hold bad rows."""
        bad: Tensor | None = None
        rows = self._rows(*self.lead)
        for name, (place, tensor) in _placed(self.params).items():
            dense = tensor.layout == torch.strided
            finite = torch.isfinite(tensor.detach() if dense else stored_entries(tensor))
            if bool(finite.all()):
                continue
            if not (dense and self._is_own(place, rows)):
                raise ValueError(
                    f"{name}: {int((~finite).sum())} of {finite.numel()} values are NaN or "
                    "infinite; expected finite numbers"
                )
            flagged = ~finite.reshape(math.prod(rows), -1).all(1)
            bad = flagged if bad is None else bad | flagged
        return self, bad

    def replace_rows(self, bad: Tensor) -> Smooth:
        """Flagged problems get the parameters of the first sound one, without gradient.

        Where no problem is sound the rows become zero.
        """
        sound = int((~bad).long().argmax()) if bool((~bad).any()) else None
        rows = self._rows(len(bad))

        def clean(place: int, param: Any) -> Any:
            if not isinstance(param, Tensor) or not self._is_own(place, rows):
                return param
            event = param.shape[len(rows) :]
            each = param.detach().reshape(len(bad), *event)
            stand_in = torch.zeros_like(each[0]) if sound is None else each[sound]
            return torch.where(bad.reshape(*rows, *[1] * len(event)), stand_in, param)

        return _changed(self, params=tuple(clean(i, p) for i, p in enumerate(self.params)))

    @torch.no_grad()
    def _is_own(self, place: int, rows: tuple[int, ...]) -> bool:
        """Whether every problem has a part of this parameter for itself.

        A matrix that all share may have as many rows as there are problems. So fn is asked: what
        is spoiled in the part of the last problem must not be seen by the others.
        """
        param, count = self.params[place], math.prod(rows)
        if not self.lead or tuple(param.shape[: len(rows)]) != rows:
            return False
        if count < 2 or param.layout != torch.strided:
            return True
        params = [
            p.detach().nan_to_num(0.0, 0.0, 0.0)
            if isinstance(p, Tensor) and p.is_floating_point()
            else p
            for p in self.params
        ]
        spoiled = params[place].clone(memory_format=torch.contiguous_format)
        each = spoiled.flatten(0, len(rows) - 1)
        if spoiled.is_floating_point():
            each[-1] = torch.nan
        else:  # another one of its values, if there is one
            others = (each != each[-1]).flatten(1).any(-1) if each.dim() > 1 else each != each[-1]
            if not bool(others.any()):
                return True
            each[-1] = each[int(others.long().argmax())].clone()
        # entries that are alike would hide which of them is looked at
        x = torch.rand((*rows, *self.variable), generator=torch.Generator().manual_seed(0))
        x = (0.5 + x).to(dtype=self.dtype, device=param.device)
        before = self.fn(x, *params)
        after = self.fn(x, *params[:place], spoiled, *params[place + 1 :])
        same = (before == after) | (before.isnan() & after.isnan())
        return bool(same.reshape(count, -1)[:-1].all())

    def value(self, x: Tensor) -> Tensor:
        """f(x)."""
        if self.unit is None or self.size is None:
            return self._value(x)
        return self._value(x * self.unit.unsqueeze(-1)) / self.size

    def _value(self, x: Tensor) -> Tensor:
        """fn of the variables in the rows of x."""
        if self.calling == "single":
            at = x.reshape(self.variable)
            return self.fn(at, *self.params).reshape(x.shape[:-1]).to(x.dtype)
        if self.calling == "rows":
            at = x.reshape(*self._rows(math.prod(x.shape[:-1])), *self.variable)
            value = self.fn(at, *self.params).to(x.dtype)
            return value if self.rows_seen is None else value.reshape(x.shape[:-1])
        rows = x.reshape(-1, *self.variable)
        if len(rows) == 0:  # vmap cannot map over nothing
            return x.sum(-1)
        mapped = torch.func.vmap(lambda row: self.fn(row, *self.params).reshape(()))
        out: Tensor = mapped(rows)
        return out.to(x.dtype)

    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x) by automatic differentiation."""
        return self.value_and_gradient(x)[1]

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one evaluation; the gradient is differentiable where grad mode is on."""
        track = torch.is_grad_enabled() and (x.requires_grad or self._depends(x))
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            value = self.value(at)
            gradient = torch.zeros_like(x)
            if value.requires_grad:  # fn may leave out x
                (gradient,) = torch.autograd.grad(
                    value.sum(), at, create_graph=track, materialize_grads=True
                )
        return (value, gradient) if track else (value.detach(), gradient)

    def _depends(self, x: Tensor) -> bool:
        """Whether f(x) has a gradient in anything but x, parameters or what fn holds itself."""
        if any(tensor.requires_grad for tensor in _tensors(self.params).values()):
            return True
        return self.value(x.detach()).requires_grad

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """∇²f(x) v by differentiating ⟨∇f(x), v⟩."""
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            gradient = self.gradient(at)
            if not gradient.requires_grad:  # fn is linear in x
                return torch.zeros_like(x)
            # not with v as an argument of its own: to compare the shapes of the two, torch loads
            # seconds of symbolic mathematics
            (product,) = torch.autograd.grad((gradient * v).sum(), at, materialize_grads=True)
        return product

    def hvps(self, x: Tensor, vectors: Tensor) -> Tensor:
        """By all second derivatives at once, as far as they fit into memory."""
        # mapping loads seconds of symbolic mathematics, for which it takes more than a few of them
        if len(vectors) < SEVERAL or vectors.numel() > LARGEST:
            return super().hvps(x, vectors)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            gradient = self.gradient(at)
            if not gradient.requires_grad:  # fn is linear in x
                return torch.zeros_like(vectors)
            try:
                (products,) = torch.autograd.grad(gradient, at, vectors, is_grads_batched=True)
            except RuntimeError:  # an operation of fn's cannot be mapped
                return super().hvps(x, vectors)
        return products

    def model(self, x: Tensor) -> Model | None:
        """The quadratic model at x, its Hessian from all second derivatives at once."""
        n = x.shape[-1]
        if n > FEW or x.numel() * n > LARGEST:
            return None
        units = torch.eye(n, dtype=x.dtype, device=x.device)
        units = units.reshape(n, *[1] * (x.dim() - 1), n).expand(n, *x.shape)
        return Model.at(x, self.gradient(x).detach(), self.hvps(x, units).movedim(0, -1))

    def curvature(self) -> Curvature | None:
        """The L that was given, if any."""
        if self.lipschitz is None:
            return None
        high = torch.as_tensor(self.lipschitz, dtype=self.dtype, device=self.device)
        return Curvature(torch.zeros_like(high), high)

    def rescaled(self, unit: Tensor, factor: Tensor) -> Smooth:
        """fn(u y, …) k/u²."""
        lipschitz = self.lipschitz
        if lipschitz is not None:
            lipschitz = torch.as_tensor(lipschitz).to(factor) * factor
        return _changed(self, unit=unit, size=unit**2 / factor, lipschitz=lipschitz)

    def _rows(self, *batch: int) -> tuple[int, ...]:
        """The batch dimensions as fn sees them, for a flat batch of that many, or for none."""
        return self.rows_seen if self.rows_seen is not None and batch else batch

    def _probe(self) -> tuple[int, ...]:
        """The batch fn's parameters describe, read off its output."""
        out = self._try(())
        if isinstance(out, tuple) and (len(out) <= 1 or self._try(out) == out):
            return out
        # fn may be written for rows only; the parameters then tell how many there are
        leads = {
            tuple(p.shape[:k])
            for p in self.params
            if isinstance(p, Tensor)
            for k in range(1, p.dim() + 1)
        }
        for lead in sorted(leads, key=lambda lead: (len(lead), lead)):
            if self._try(lead) == lead:
                return lead
        if isinstance(out, tuple):
            raise ValueError(
                f"fn: expected a value of shape () for x of shape {self.shape}, or (*batch) for "
                f"more, got shape {out}; reduce over the variable, for instance with .sum(-1)"
            )
        raise ValueError(
            f"fn: could not be evaluated on x of shape {self.shape} nor on (B, *{self.shape}); "
            f"it raised {type(out).__name__}: {out}"
        ) from out

    def _try(self, lead: tuple[int, ...]) -> tuple[int, ...] | Exception:
        """Shape of fn's output for zero variables, so many, or what it raised."""
        x = torch.zeros((*lead, *self.variable), dtype=self.dtype, device=self.device)
        # some functions of torch take shapes that do not fit, and complain when differentiated
        differentiate = not torch._C._are_functorch_transforms_active()
        try:
            with torch.set_grad_enabled(differentiate):
                out = self.fn(x.requires_grad_() if differentiate else x, *self.params)
                if isinstance(out, Tensor) and out.requires_grad and out.is_floating_point():
                    torch.autograd.grad(out.sum(), x, allow_unused=True)
        except Exception as error:  # whatever a user's function raises is passed on as a cause
            return error
        if not isinstance(out, Tensor):
            return ValueError(f"fn returned {type(out).__name__}, expected a tensor")
        if not out.is_floating_point():
            return ValueError(f"fn returned {out.dtype}, expected floating point numbers")
        return tuple(out.shape)


def _tensors(params: tuple[Any, ...]) -> dict[str, Tensor]:
    """The floating tensors among the parameters, by name."""
    return {name: tensor for name, (_, tensor) in _placed(params).items()}


def _placed(params: tuple[Any, ...]) -> dict[str, tuple[int, Tensor]]:
    """The same, with their places."""
    return {
        f"params[{i}]": (i, p)
        for i, p in enumerate(params)
        if isinstance(p, Tensor) and p.is_floating_point()
    }


def _changed(objective: Smooth, **changes: Any) -> Smooth:
    """A copy with other fields; the constructor probes fn, a copy need not."""
    copy = object.__new__(Smooth)
    for name in objective.__dataclass_fields__:
        object.__setattr__(copy, name, changes.get(name, getattr(objective, name)))
    return copy
