"""What a method may ask of an objective."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor
from dfwlayer.linalg.rows import Scalar
from dfwlayer.linalg.scale import Scale

__all__ = [
    "Curvature",
    "Objective",
    "RecordableObjective",
    "check_tensors",
    "common_batch",
    "diagonal_of",
    "flag_nonfinite",
    "objective_records",
]


class Curvature(NamedTuple):
    """Bounds on the eigenvalues of ∇²f, each () or (B,): high is above all, low above the least.

    A negative ``low`` proves that the objective is not convex; ``high`` is the Lipschitz constant
    L of the gradient and is never under-estimated.
    """

    low: Tensor
    high: Tensor


class Objective(Protocol):
    """A convex, smooth f(x; θ), for B problems at once.

    Vectors are rows: x is (B, n) with n the number of entries of ``shape``. A method sees an
    objective only after `bind`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one problem's variable."""

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Batch size of every argument that has a batch dimension, by name."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def quadratic(self) -> bool:
        """Whether ∇²f is constant."""

    @property
    def isotropic(self) -> bool:
        """Whether ∇²f is the identity, so that a solution is a projection."""

    def float32(self) -> Objective:
        """The same objective with half-precision data in float32."""

    def bind(self, batch: int | None) -> Objective:
        """The objective ready for rows of that many problems (None: one row, no batch)."""

    def verified(self) -> tuple[Objective, Tensor | None]:
        """Raise ValueError for values no problem can have; mask (B,) of non-finite problems."""

    def replace_rows(self, bad: Tensor) -> Objective:
        """The objective with harmless constants in place of the problems that are flagged."""

    def value(self, x: Tensor) -> Tensor:
        """f(x): (B, n) -> (B,)."""

    def gradient(self, x: Tensor) -> Tensor:
        """∇f(x): (B, n) -> (B, n)."""

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both, for the price of one gradient."""

    def dependence(self, x: Tensor) -> Tensor:
        """Any tensor (..., n) with ∇f(x)'s derivative in the parameters."""

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """∇²f(x) v: (B, n), (B, n) -> (B, n)."""

    def shifted(self, rho: Scalar) -> tuple[Callable[[Tensor], Tensor], Scalar] | None:
        """v ↦ (∇²f + ρ)⁻¹ v by a factorisation, None where that is not to be had.

        Problems that share ∇²f share ρ too; the ρ that was taken is returned.
        """

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """v ↦ (∇²f + diag(bend))⁻¹ v on the free coordinates, 0 on the others, by a factorisation.

        ``free`` is a mask (..., n). None where that is not to be had.
        """

    def curvature(self) -> Curvature | None:
        """Bounds on the spectrum of ∇²f, None where nothing is known."""

    def rescaled(self, unit: Tensor, factor: Tensor) -> Objective:
        """y ↦ f(u y) k/u² for powers of two, u and k () or (B,); k is the same for problems that
        share a Hessian other than zero, and a power of four.
        """

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """The curvature of f and the rounding of its gradient at x, both (..., n)."""


class RecordableObjective(Objective, Protocol):
    """An objective, a dataclass, whose operations never make the host wait for a GPU."""

    def suspect(self) -> Tensor:
        """Whether ``verified`` should have a closer look: ()."""


def objective_records(objective: Objective) -> TypeGuard[RecordableObjective]:
    """Whether an objective can be part of a CUDA graph."""
    return hasattr(objective, "suspect")


def check_tensors(
    tensors: dict[str, Tensor], half_allowed: bool = False, sparse: Collection[str] = ()
) -> None:
    """Raise unless all tensors are floating, of one dtype and on one device.

    They have to be dense, but for those named in ``sparse``.
    """
    wide = (torch.float32, torch.float64)
    half = (torch.float16, torch.bfloat16)
    (first_name, first), *rest = tensors.items()
    for name, tensor in tensors.items():
        check_tensor(name, tensor, sparse=name in sparse)
        if tensor.dtype not in wide and not (half_allowed and tensor.dtype in half):
            hint = (
                "run the layer under torch.autocast or call .float() first"
                if tensor.dtype in half
                else "call .float() or .double() first"
            )
            raise ValueError(f"{name}: expected float32 or float64, got {tensor.dtype}; {hint}")
    for name, tensor in rest:
        if tensor.device != first.device:
            raise ValueError(
                f"{name}: on {tensor.device} while {first_name} is on {first.device}; move them "
                "to one device with .to()"
            )
        mixed_half = half_allowed and (tensor.dtype in half or first.dtype in half)
        if tensor.dtype != first.dtype and not mixed_half:
            raise ValueError(
                f"{name}: is {tensor.dtype} while {first_name} is {first.dtype}; bring them to "
                "one dtype with .to()"
            )


def common_batch(sizes: dict[str, int]) -> int | None:
    """The one batch size of all arguments (1 goes with any), None if none has a batch."""
    first: tuple[str, int] | None = None
    for name, size in sizes.items():
        if size == 1:
            continue
        if first is None:
            first = name, size
        elif size != first[1]:
            raise ValueError(
                f"{name}: batch of {size} problems does not go with the {first[1]} of {first[0]}; "
                "expected the same number, 1, or no batch dimension"
            )
    return first[1] if first is not None else (1 if sizes else None)


def diagonal_of(objective: Objective) -> Tensor | None:
    """The diagonal (n,) or (B, n) of ∇²f where it is constant, positive and known to be diagonal.

    It is not known while a CUDA graph is recorded.
    """
    if objective.device.type == "cuda":
        return None
    found: Tensor | None = getattr(objective, "diagonal", None)
    return found


def flag_nonfinite(name: str, tensor: Tensor, event_dims: int) -> Tensor | None:
    """Mask (B,) of the problems with NaN or infinity; raise if the tensor is not per problem.

    A tensor is per problem if it has one dimension more than ``event_dims``.
    """
    if bool(torch.isfinite(tensor.detach().sum())):  # one pass, and enough in nearly every call
        return None
    finite = torch.isfinite(tensor.detach())
    if bool(finite.all()):
        return None
    if tensor.dim() <= event_dims:
        raise ValueError(
            f"{name}: {int((~finite).sum())} of {finite.numel()} values are NaN or infinite; "
            "expected finite numbers (only a tensor with a batch dimension may hold bad problems)"
        )
    return ~finite.reshape(len(finite), -1).all(1)
