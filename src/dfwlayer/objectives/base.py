"""What a method may ask of an objective."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensors, flag_nonfinite
from dfwlayer.objectives.model import Model, SparseModel, model_by_columns
from dfwlayer.ops.rows import Scalar, in_one_batch, or_one, quotient
from dfwlayer.ops.scale import Scale, scale_of_terms
from dfwlayer.ops.shards import Shards
from dfwlayer.ops.tracing import deferred

__all__ = [
    "Curvature",
    "Dense",
    "Objective",
]


class Curvature(NamedTuple):
    """Bounds on the eigenvalues of ∇²f, each () or (B,): high is above all, low above the least.

    A negative ``low`` proves that the objective is not convex; ``high`` is the Lipschitz constant
    L of the gradient and is never under-estimated.
    """

    low: Tensor
    high: Tensor


class Dense(NamedTuple):
    """½ xᵀMx + vᵀx, or, squared, ½ ‖Mx − v‖², as the tensors that were given."""

    matrix: Tensor | None  # M, None for the identity
    vector: Tensor  # v
    squared: bool


class Objective(ABC):
    """A convex, smooth f(x; θ), for B problems at once: a dataclass with tensors for θ.

    An objective says what its tensors are (``ranks``) and the ``shape`` of a variable, and writes
    ``value``, ``gradient`` and ``hvp``. The rest has defaults; what answers None is not to be had,
    and methods do without it. Vectors are rows: x is (B, n) with n the number of entries of
    ``shape``, or (n,) for a single problem. A method sees an objective only after `bind`.
    """

    # dimensions of one problem's tensors, by the name of the field; each may have a batch in front
    ranks: ClassVar[Mapping[str, int]] = {}
    unchecked: ClassVar[bool] = False  # made while operations were recorded
    # those that have an entry for each of the variable's, and are of its shape
    variables: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = deferred(cls.__post_init__)  # type: ignore[attr-defined]

    if TYPE_CHECKING:  # a property or a field

        @property
        def shape(self) -> tuple[int, ...]:
            """Shape of one problem's variable."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """f(x): (B, n) -> (B,)."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x): (B, n) -> (B, n)."""

    @abstractmethod
    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """∇²f(x) v: (B, n), (B, n) -> (B, n)."""

    def hvps(self, x: Tensor, vectors: Tensor) -> Tensor:
        """∇²f(x) v for each of several v: (B, n), (k, B, n) -> (k, B, n)."""
        return torch.stack([self.hvp(x, v) for v in vectors])

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Batch size of every argument that has a batch dimension, by name."""
        return {name: lead[0] for name, lead in self.leads(self.shape).items()}

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Batch dimensions of every argument that has some, by name.

        ``shape`` is that of one problem's variable.
        """
        ranks = self._ranks(shape)
        return {
            k: tuple(t.shape[: t.dim() - ranks[k]])
            for k, t in self._tensors.items()
            if t.dim() > ranks[k]
        }

    @property
    def deep(self) -> bool:
        """Whether an argument may have several batch dimensions, or a variable no vector."""
        return any(t.dim() > self.ranks[k] + 1 for k, t in self._tensors.items())

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Those of a tensor (*batch, *shape) whose dimensions may be the batch's or the variable's.

        None where the objective itself tells the shape of its variable.
        """
        return None

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Self:
        """The same over vectors, for variables of that shape, all batch dimensions as one."""
        changed = {}
        for name, rank in self._ranks(shape).items():
            tensor = self._tensors.get(name)
            if tensor is None:
                continue
            if name in self.variables:
                if tuple(tensor.shape[-rank:]) != shape:
                    sizes = ", ".join(map(str, shape))
                    raise ValueError(
                        f"{name}: expected shape (*batch, {sizes}) for variables of shape "
                        f"{shape}, got {tuple(tensor.shape)}"
                    )
                tensor, rank = tensor.flatten(-rank), 1
            changed[name] = in_one_batch(tensor, rank, lead)
        return self._with(changed)

    def _ranks(self, shape: tuple[int, ...]) -> Mapping[str, int]:
        """`ranks` for variables of that shape."""
        if len(shape) == 1 or not self.variables:
            return self.ranks
        return {k: len(shape) if k in self.variables else r for k, r in self.ranks.items()}

    @property
    def dtype(self) -> torch.dtype:
        """That of x."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """That of x."""
        return self._first.device

    @property
    def quadratic(self) -> bool:
        """Whether ∇²f is constant."""
        return False

    @property
    def least(self) -> float:
        """A value that f is nowhere below, −∞ where none is known."""
        return -math.inf

    @property
    def isotropic(self) -> bool:
        """Whether ∇²f is the identity, so that a solution is a projection."""
        return False

    @property
    def diagonal(self) -> Tensor | None:
        """Of ∇²f, (n,) or (B, n), where it is constant, positive and known to be diagonal."""
        return None

    def float32(self) -> Self:
        """The same objective with half-precision data in float32."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self._with({k: t.to(wide) for k, t in self._tensors.items()})

    def bind(self, batch: int | None) -> Self:
        """The objective ready for rows of that many problems (None: one row, no batch).

        Matrices with a batch of one become one for all.
        """
        check_tensors(self._tensors, sparse=self._tensors)  # the constructor knows which may be
        alone = {
            k: t[0]
            for k, t in self._tensors.items()
            if self.ranks[k] > 1 and t.dim() > self.ranks[k] and len(t) == 1 != batch
        }
        return self._with(alone)

    def verified(self) -> tuple[Self, Tensor | None]:
        """Raise ValueError for values no problem can have; mask (B,) of non-finite problems."""
        bad: Tensor | None = None
        for name, tensor in self._tensors.items():
            flagged = flag_nonfinite(name, tensor, self.ranks[name])
            if flagged is not None:
                bad = flagged if bad is None else bad | flagged
        return self, bad

    def replace_rows(self, bad: Tensor) -> Self:
        """The objective with harmless constants, zeros, in place of the problems flagged (B,)."""
        changed = {}
        for name, tensor in self._tensors.items():
            rank = self.ranks[name]
            if rank < 2 or tensor.dim() > rank:
                full = tensor.expand(len(bad), *tensor.shape[tensor.dim() - rank :])
                changed[name] = torch.where(bad.reshape(-1, *[1] * rank), 0, full)
        return self._with(changed)

    def rows(self, index: Tensor) -> Self | None:
        """The problems at these positions, None where a batch cannot be taken apart."""
        if not self.ranks:
            return None
        own = {k: t for k, t in self._tensors.items() if t.dim() > self.ranks[k] and len(t) > 1}
        return self._with({k: t[index] for k, t in own.items()})

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both; for the price of one gradient where an objective knows how."""
        return self.value(x), self.gradient(x)

    def dependence(self, x: Tensor) -> Tensor:
        """Any tensor (..., n) with ∇f(x)'s derivative in the parameters."""
        return self.gradient(x)

    def tracked_value(self, x: Tensor) -> Tensor | None:
        """f(x) with its derivative in the parameters, (B,).

        None where the fields hold all that f depends on, so that it can be made when it is needed.
        """
        return self.value(x)

    def shifted(self, rho: Scalar) -> tuple[Callable[[Tensor], Tensor], Scalar] | None:
        """v ↦ (∇²f + ρ)⁻¹ v by a factorisation, None where that is not to be had.

        Problems that share ∇²f share ρ too; the ρ that was taken is returned.
        """
        return None

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """v ↦ (∇²f + diag(bend))⁻¹ v on the free coordinates, 0 on the others, by a factorisation.

        ``free`` is a mask (..., n). None where that is not to be had.
        """
        return None

    def among(self, index: Tensor) -> Callable[[Tensor], Tensor] | None:
        """v ↦ ∇²f v on some coordinates (k,), of vectors (k,) that have these alone.

        For one problem whose ∇²f is constant; None where single columns of it are not to be had.
        """
        return None

    def model(self, x: Tensor) -> Model | None:
        """The quadratic model of f at x (..., n), None where ∇²f is too large to write down."""
        return model_by_columns(self.hvp, self.gradient, x)

    def sparse_model(self, x: Tensor) -> SparseModel | None:
        """f itself at one problem's x (..., n), for an f with a constant and sparse ∇²f."""
        if not self.isotropic:
            return None
        return SparseModel.identity(self.gradient(torch.zeros_like(x)).double().reshape(1, -1))

    def curvature(self) -> Curvature | None:
        """Bounds on the spectrum of ∇²f, None where nothing is known."""
        return None

    def rescaled(self, unit: Tensor, factor: Tensor) -> Objective | None:
        """y ↦ f(u y) k/u² for powers of two, u and k () or (B,), None where that is not to be had.

        k is the same for problems that share a Hessian other than zero, and a power of four.
        """
        return None

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """The curvature of f and the rounding of its gradient at x, both (..., n).

        By default the largest curvature met along x, ∇f(x) and a fixed vector, for all coordinates.
        What ∇f(x) is the sum of is not known then; for a function with that curvature c it is of
        the size of its change from 0 to x. And it is of that of √(2c|f|), as ‖∇f‖² ≤ 2cf holds for
        any f ≥ 0 and f is a sum of terms that are no smaller.
        """
        fixed = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device).sign() + 0.1
        curvature = torch.zeros_like(x[..., :1])
        for v in (fixed.expand_as(x), x, gradient):
            largest = v.abs().amax(-1, keepdim=True)
            v = v / or_one(largest)
            square = (v * v).sum(-1, keepdim=True)
            along = (v * self.hvp(x, v)).sum(-1, keepdim=True)
            along = quotient(along, square)
            curvature = torch.where(along > curvature, along, curvature)
        typical = (2 * curvature).sqrt() * self.value(x).detach().abs().sqrt().unsqueeze(-1)
        largest = gradient.abs().amax(-1, keepdim=True)
        return scale_of_terms(curvature, x, torch.maximum(largest, typical))

    def dense(self) -> Dense | None:
        """The objective as one dense quadratic function, None where it is something else.

        Which of its tensors these are follows from their types and shapes alone, as it is asked
        once for all calls that have these in common.
        """
        return None

    def by_columns(self) -> Dense | None:
        """Like `dense`, with a matrix that may be sparse: single columns of it can be had.

        Of an objective with `shards` they are the rows that this process has.
        """
        return self.dense()

    def whole(self) -> Dense | None:
        """Like `dense`, with a matrix that may be a sparse tensor."""
        return self.dense()

    @property
    def recordable(self) -> bool:
        """Whether no operation makes the host wait for a GPU, so that a CUDA graph may hold it."""
        return False

    def joined(self) -> Objective:
        """The same with plain tensors, those that are here, in place of distributed ones."""
        return self

    @property
    def shards(self) -> Shards | None:
        """The processes that hold the objective between them, None where this one has it all."""
        return None

    def suspect(self) -> Tensor:
        """Whether ``verified`` should have a closer look (), as far as one can tell at once."""
        return torch.ones((), dtype=torch.bool, device=self.device)

    @property
    def _first(self) -> Tensor:
        """The first tensor."""
        for name in self.ranks:
            first: Tensor | None = getattr(self, name)
            if first is not None:
                return first
        raise AttributeError("an objective has at least one tensor")

    @property
    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in self.ranks}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _with(self, tensors: dict[str, Tensor]) -> Self:
        """A copy with these tensors; they have passed the constructor's checks before."""
        return replace(self, **tensors) if tensors else self  # type: ignore[type-var]
