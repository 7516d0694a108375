"""Any convex smooth function written in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dfwlayer.linalg import Scalar
from dfwlayer.objectives.base import Curvature, check_tensors
from dfwlayer.objectives.model import FEW, LARGEST, Model

__all__ = ["Smooth"]


@dataclass(frozen=True, init=False)
class Smooth:
    """f(x) = fn(x, *params), convex and differentiable in x.

    ``fn`` is written in torch for a variable of shape ``shape``. Its output tells the batch: ()
    for one problem; for B problems it maps x of shape (B, *shape) to (B,), reducing over the
    variable's own dimensions only (``.sum(-1)``, not ``.sum()``). A function of one problem
    that meets a batched constraint is mapped over the batch by ``torch.func.vmap``.

    Args:
        fn: The function; further tensors it needs come as ``params``, not from a closure, so
            that they are differentiated.
        params: Tensors, differentiated; anything else is passed on as it is.
        shape: Shape of one problem's variable, for instance (n,) or (m, k).
        lipschitz: L of ∇f, a number or (B,), if known. Without it steps are found by
            backtracking.

    """

    fn: Callable[..., Tensor]
    params: tuple[Any, ...]
    shape: tuple[int, ...]
    lipschitz: float | Tensor | None
    batch: int | None
    calling: Literal["single", "rows", "vmap"]

    def __init__(
        self,
        fn: Callable[..., Tensor],
        *params: Any,
        shape: tuple[int, ...] | int,
        lipschitz: float | Tensor | None = None,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"fn: expected a function of (x, *params), got {type(fn).__name__}")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape or any(not isinstance(s, int) or s < 1 for s in shape):
            raise ValueError(
                f"shape: expected the sizes of one problem's variable, such as (n,), got {shape}"
            )
        if lipschitz is not None and not bool((torch.as_tensor(lipschitz) > 0).all()):
            raise ValueError(f"lipschitz: expected a positive number, got {lipschitz}")
        tensors = _tensors(params)
        if tensors:
            check_tensors(tensors, half_allowed=True)
        for name, value in (("fn", fn), ("params", params), ("shape", shape)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "lipschitz", lipschitz)
        object.__setattr__(self, "batch", self._probe())
        object.__setattr__(self, "calling", "rows")

    @property
    def batch_sizes(self) -> dict[str, int]:
        return {} if self.batch is None else {"fn": self.batch}

    @property
    def dtype(self) -> torch.dtype:
        tensors = _tensors(self.params)
        return next(iter(tensors.values())).dtype if tensors else torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        tensors = _tensors(self.params)
        return next(iter(tensors.values())).device if tensors else torch.get_default_device()

    @property
    def quadratic(self) -> bool:
        return False

    @property
    def isotropic(self) -> bool:
        return False

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
            check_tensors(tensors)
        if batch is None:
            return _changed(self, calling="single")
        out = self._try(batch)
        if isinstance(out, tuple) and out == (batch,):
            return _changed(self, calling="rows")
        if self.batch in (None, 1):
            return _changed(self, calling="vmap")
        raise ValueError(
            f"fn: expected shape ({batch},) for x of shape {(batch, *self.shape)}, got "
            f"{out if isinstance(out, tuple) else repr(out)}; reduce over the variable's own "
            "dimensions only, for instance with .sum(-1)"
        )

    def verified(self) -> tuple[Smooth, Tensor | None]:
        """Finite parameters; a parameter whose first dimension is the batch may hold bad rows."""
        bad: Tensor | None = None
        for name, tensor in _tensors(self.params).items():
            finite = torch.isfinite(tensor.detach())
            if bool(finite.all()):
                continue
            if self.batch is None or tensor.dim() == 0 or tensor.shape[0] != self.batch:
                raise ValueError(
                    f"{name}: {int((~finite).sum())} of {finite.numel()} values are NaN or "
                    "infinite; expected finite numbers"
                )
            flagged = ~finite.flatten(1).all(1) if tensor.dim() > 1 else ~finite
            bad = flagged if bad is None else bad | flagged
        return self, bad

    def replace_rows(self, bad: Tensor) -> Smooth:
        """Flagged problems get the parameters of the first sound one, without gradient.

        Where no problem is sound the rows become zero.
        """
        sound = int((~bad).long().argmax()) if bool((~bad).any()) else None

        def clean(param: Any) -> Any:
            per_problem = isinstance(param, Tensor) and param.dim() and param.shape[0] == len(bad)
            if not per_problem:
                return param
            stand_in = torch.zeros_like(param[0]) if sound is None else param[sound].detach()
            return torch.where(bad.reshape(-1, *[1] * (param.dim() - 1)), stand_in, param)

        return _changed(self, params=tuple(clean(p) for p in self.params))

    def value(self, x: Tensor) -> Tensor:
        """f(x)."""
        if self.calling == "single":
            return self.fn(x.reshape(self.shape), *self.params).reshape(x.shape[:-1])
        rows = x.reshape(-1, *self.shape)
        if self.calling == "rows":
            return self.fn(rows, *self.params)
        mapped = torch.func.vmap(lambda row: self.fn(row, *self.params).reshape(()))
        out: Tensor = mapped(rows)
        return out

    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x) by automatic differentiation."""
        return self.value_and_gradient(x)[1]

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one evaluation; the gradient is differentiable where grad mode is on."""
        track = torch.is_grad_enabled()
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            value = self.value(at)
            (gradient,) = torch.autograd.grad(
                value.sum(), at, create_graph=track, materialize_grads=True
            )
        return (value, gradient) if track else (value.detach(), gradient)

    def dependence(self, x: Tensor) -> Tensor:
        """∇f(x) itself."""
        return self.gradient(x)

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """∇²f(x) v by differentiating ⟨∇f(x), v⟩."""
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            gradient = self.gradient(at)
            if not gradient.requires_grad:  # fn is linear in x
                return torch.zeros_like(x)
            (product,) = torch.autograd.grad(gradient, at, v, materialize_grads=True)
        return product

    def reduced(self, free: Tensor, bend: Tensor | None) -> None:
        """None: only products with the Hessian are known."""

    def shifted(self, rho: Scalar) -> None:
        """None: only products with the Hessian are known."""

    def model(self, x: Tensor) -> Model | None:
        """The quadratic model at x, its Hessian from all second derivatives at once."""
        n = x.shape[-1]
        if n > FEW or x.numel() * n > LARGEST:
            return None
        units = torch.eye(n, dtype=x.dtype, device=x.device)
        units = units.reshape(n, *[1] * (x.dim() - 1), n).expand(n, *x.shape)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            gradient = self.gradient(at)
            hessian = torch.zeros_like(units)
            if gradient.requires_grad:  # otherwise fn is linear in x
                try:
                    (hessian,) = torch.autograd.grad(
                        gradient, at, units, is_grads_batched=True, retain_graph=True
                    )
                except RuntimeError:  # an operation of fn's cannot be mapped
                    hessian = torch.stack([self.hvp(x, v) for v in units])
        return Model.at(x, gradient.detach(), hessian.movedim(0, -1))

    def curvature(self) -> Curvature | None:
        """The L that was given, if any."""
        if self.lipschitz is None:
            return None
        high = torch.as_tensor(self.lipschitz, dtype=self.dtype, device=self.device)
        return Curvature(torch.zeros_like(high), high)

    def _probe(self) -> int | None:
        """The batch fn's parameters describe, read off its output."""
        out = self._try(None)
        if isinstance(out, tuple) and len(out) <= 1:
            return out[0] if out else None
        # fn may be written for rows only; the parameters then tell how many there are
        sizes = {t.shape[0] for t in _tensors(self.params).values() if t.dim()}
        for size in sorted(sizes):
            if self._try(size) == (size,):
                return size
        if isinstance(out, tuple):
            raise ValueError(
                f"fn: expected a value of shape () for x of shape {self.shape}, or (B,) for B "
                f"problems, got shape {out}; reduce over the variable, for instance with .sum(-1)"
            )
        raise ValueError(
            f"fn: could not be evaluated on x of shape {self.shape} nor on (B, *{self.shape}); "
            f"it raised {type(out).__name__}: {out}"
        ) from out

    def _try(self, batch: int | None) -> tuple[int, ...] | Exception:
        """Shape of fn's output for a zero variable, or what it raised."""
        rows = self.shape if batch is None else (batch, *self.shape)
        x = torch.zeros(rows, dtype=self.dtype, device=self.device)
        try:
            with torch.no_grad():
                out = self.fn(x, *self.params)
        except Exception as error:  # whatever a user's function raises is passed on as a cause
            return error
        if not isinstance(out, Tensor):
            return ValueError(f"fn returned {type(out).__name__}, expected a tensor")
        return tuple(out.shape)


def _tensors(params: tuple[Any, ...]) -> dict[str, Tensor]:
    """The floating tensors among the parameters, by name."""
    return {
        f"params[{i}]": p
        for i, p in enumerate(params)
        if isinstance(p, Tensor) and p.is_floating_point()
    }


def _changed(objective: Smooth, **changes: Any) -> Smooth:
    """A copy with other fields; the constructor probes fn, a copy need not."""
    copy = object.__new__(Smooth)
    for name in objective.__dataclass_fields__:
        object.__setattr__(copy, name, changes.get(name, getattr(objective, name)))
    return copy
