"""What may be said of any argument, with an error that names it and says what is expected."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dfwlayer.ops.shards import is_distributed
from dfwlayer.ops.tracing import may_be_fake, refuse_recording

__all__ = [
    "INTEGERS",
    "WIDE",
    "as_flag",
    "as_integer",
    "as_lipschitz",
    "as_number",
    "as_sizes",
    "check_tensor",
    "check_tensors",
    "common_batch",
    "common_lead",
    "flag_nonfinite",
    "refuse_proxy",
    "shown",
]

# types to compare with; not as unions, which compilers before PyTorch 2.7 cannot follow
INTEGERS = (int, np.integer)
NUMBERS = (float, *INTEGERS, np.floating)
FLAGS = (bool, np.bool_)
TEXTS = (str, bytes)
WIDE = (torch.float32, torch.float64)  # what is solved in
LONGEST = 60  # characters of a value in a message
MOST = 2**53  # of an integer, more than anything is counted to


def shown(value: Any) -> str:
    """A value in a message: of tensors and arrays the shape, of the rest not too much."""
    if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_nested):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # numbers of many thousand digits refuse, and objects may do as they like
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def as_number(
    name: str,
    value: Any,
    expected: str = "a finite number",
    *,
    kind: str = "a number",
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
    infinite: bool = False,
) -> float:
    """A float; numbers of NumPy are numbers, booleans and strings are not.

    Args:
        name: Of the argument.
        value: What was given.
        expected: In the words of the error, for a number out of range.
        kind: Likewise, for what is no number.
        least: It may not be smaller.
        most: Nor larger.
        above: Nor as small as that.
        infinite: Whether it may be infinite.

    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        got = shown(value) if isinstance(value, (Tensor, str)) else type(value).__name__
        refuse_proxy(value)
        raise ValueError(f"{name}: expected {kind}, got {got}{_hint(value, kind)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(
            f"{name}: expected {expected} that a float can hold, got one of {value.bit_length()} "  # type: ignore[union-attr]
            "bits"
        ) from None
    within = least <= number <= most and (above is None or number > above)
    if not within or (math.isinf(number) and not infinite):
        raise ValueError(f"{name}: expected {expected}, got {number:g}")
    return number


def as_integer(name: str, value: Any, least: int) -> int:
    """An int that is neither too small nor astronomical."""
    number = isinstance(value, INTEGERS) and not isinstance(value, bool)
    if not number or not least <= value <= MOST:
        raise ValueError(f"{name}: expected an integer ≥ {least}, got {shown(value)}")
    return int(value)


def as_flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, FLAGS):
        raise ValueError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def as_lipschitz(value: Any) -> float | Tensor:
    """The Lipschitz constant of a gradient: a positive number, a 0-d tensor or (*batch)."""
    if not isinstance(value, Tensor):
        kind = "a positive number or a tensor of them"
        return as_number("lipschitz", value, "a positive number", kind=kind, above=0)
    check_tensor("lipschitz", value)
    if not value.is_floating_point():
        raise ValueError(
            "lipschitz: expected a positive number, or a tensor with one for each problem, got "
            f"{value.dtype} of shape {tuple(value.shape)}"
        )
    if not bool(((value > 0) & torch.isfinite(value)).all()):
        raise ValueError("lipschitz: expected positive numbers, found others in the tensor")
    return value


def as_sizes(name: str, value: Any, expected: str) -> tuple[int, ...]:
    """A shape: positive integers, at least one."""
    given = isinstance(value, Sequence) and not isinstance(value, TEXTS) and len(value) > 0
    if not given or not all(
        isinstance(s, INTEGERS) and not isinstance(s, bool) and 1 <= s <= MOST for s in value
    ):
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")
    return tuple(int(s) for s in value)


def check_tensor(
    name: str,
    value: Any,
    expected: str = "a tensor",
    sparse: bool = False,
    distributed: bool = False,
) -> None:
    """Raise unless it is a tensor with values, a dense and whole one unless others are allowed."""
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        _check_kind(name, value, expected)
        if is_distributed(value) and not distributed:
            raise ValueError(
                f"{name}: expected a tensor that this process has as a whole, got a DTensor; use "
                ".full_tensor()"
            )
    if value.is_nested:  # such a tensor answers hardly any other question
        raise ValueError(
            f"{name}: expected a tensor with one shape, got a nested one; use "
            "torch.nested.to_padded_tensor"
        )
    if value.layout != torch.strided and not sparse:
        raise ValueError(
            f"{name}: expected a dense tensor, got layout {value.layout}; use .to_dense()"
        )
    if value.is_meta:
        raise ValueError(f"{name}: expected a tensor with values, got one on the device meta")


def _check_kind(name: str, value: Any, expected: str) -> None:
    """For what is no plain tensor: a subclass will do, unless it only stands for a tensor."""
    refuse_proxy(value)
    kind = type(value).__name__
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected {expected}, got {kind}{_hint(value, expected)}")
    if kind in ("FakeTensor", "FunctionalTensor") and not may_be_fake():
        refuse_recording("fake tensors")


def refuse_proxy(value: Any) -> None:
    """Raise for what stands for all values at once in torch.fx.symbolic_trace."""
    if type(value).__name__ == "Proxy":
        refuse_recording("torch.fx.symbolic_trace")


def _hint(value: Any, expected: str) -> str:
    if "tensor" not in expected:
        return ""
    if isinstance(value, np.ndarray):
        return "; use torch.as_tensor"
    return "; use torch.tensor" if isinstance(value, (list, tuple)) else ""


def check_tensors(
    tensors: dict[str, Tensor], half_allowed: bool = False, sparse: Collection[str] = ()
) -> None:
    """Raise unless all tensors are floating, of one dtype and on one device.

    They have to be dense, but for those named in ``sparse``.
    """
    half = (torch.float16, torch.bfloat16)
    (first_name, first), *rest = tensors.items()
    for name, tensor in tensors.items():
        check_tensor(name, tensor, sparse=name in sparse, distributed=True)
        if tensor.dtype not in WIDE and not (half_allowed and tensor.dtype in half):
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
    lead = common_lead({name: (size,) for name, size in sizes.items()})
    return lead[0] if lead else None


def common_lead(leads: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The batch dimensions of all arguments together, broadcast as in PyTorch."""
    lead = [1] * max(map(len, leads.values()), default=0)
    first: dict[int, str] = {}  # which argument has said how many there are along a dimension
    for name, own in leads.items():
        for place, size in enumerate(reversed(own), start=1):
            if size == 1 or size == lead[-place]:
                continue
            if place in first:
                along = "" if len(lead) == 1 else f" along dimension −{place} of the batch"
                raise ValueError(
                    f"{name}: batch of {size} problems{along} does not go with the {lead[-place]} "
                    f"of {first[place]}; expected the same number, 1, or no batch dimension"
                )
            lead[-place], first[place] = size, name
    return tuple(lead)


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
