"""What a file answers against what the model it was made of does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dfwlayer.deploy.files import Call, format_of, load, write
from dfwlayer.deploy.module import deployed

__all__ = ["Report", "export"]

UNITS = 8  # units in the last place of a set's numbers that a point may be outside
TIMED = 200  # calls


@dataclass(frozen=True)
class Report:
    """What was written and what it is worth."""

    path: Path
    format: str
    count: int  # inputs that were tried
    error: float  # the largest |x − x of the model|
    tol: float
    violation: float | None  # the largest amount outside of the set, None where nobody can tell
    allowed: float  # what rounding makes of it
    seconds: float  # median of calls with one problem
    eager: float  # the same of the model
    fastest: float  # the least of such calls, which other programs of the machine disturb less

    @property
    def passed(self) -> bool:
        """Whether all answers are close enough, and feasible."""
        return self.error <= self.tol and (self.violation is None or self.violation <= self.allowed)

    def __str__(self) -> str:
        outside = "" if self.violation is None else f", at most {self.violation:.1e} outside"
        return (
            f"{self.path} ({self.format}): {self.count} inputs, largest error {self.error:.1e}"
            f"{outside}; one problem {1e6 * self.seconds:.1f} µs "
            f"(fastest {1e6 * self.fastest:.1f}), eager {1e6 * self.eager:.1f} µs; "
            f"{'passed' if self.passed else f'FAILED (error ≤ {self.tol:g} wanted)'}"
        )


def export(
    model: nn.Module,
    path: str | Path,
    inputs: Any,
    *,
    max_steps: int = 50,
    format: str | None = None,  # noqa: A002
    batched: Sequence[bool] | None = None,
    samples: Callable[[int], Any] | None = None,
    violation: Callable[..., Tensor] | None = None,
    count: int = 1000,
    tol: float = 1e-5,
) -> Report:
    """Write a model to a file, with its layers deployed, and check it on random inputs.

    Args:
        model: A layer, or a model with layers in it.
        path: Of the file, ``.onnx`` or ``.pt2``.
        inputs: What the model is called with: a tensor, a tuple, a dict of keywords, or a `Call`
            with both. A tensor as long as the first one, with at least two problems, has the batch
            in front, which may then be of any size.
        max_steps: Of the layers.
        format: "onnx", "aoti" (a package of AOTInductor, for this kind of machine) or "export" (a
            program of torch.export); None for what the path ends in, .pt2 being "aoti".
        batched: Which of the tensors have a batch, where that rule is wrong.
        samples: A function that makes so many inputs; without it their entries are uniform between
            the least and the largest of those given.
        violation: A function of x and the inputs that tells how far each x is outside, in units of
            the radius. A layer knows it.
        count: Inputs to try.
        tol: The largest error in an entry.

    Returns:
        Errors, feasibility and times. It is for the caller to see that it has ``passed``.

    """
    call, target = Call.of(inputs), Path(path)
    kind = format_of(target, format)
    lengths = [t.shape[0] if t.dim() else 0 for t in call.tensors]
    if batched is None:
        batched = [lengths[0] > 1 and length == lengths[0] for length in lengths]
    write(deployed(model, max_steps=max_steps), call, batched, target, kind)
    given = _uniform(call, batched, count) if samples is None else Call.of(samples(count))
    return _compared(model, target, kind, given, batched, violation, tol)


def _uniform(call: Call, batched: Sequence[bool], count: int) -> Call:
    """Uniform entries between the least and the largest of those given; what is shared stays."""

    def drawn(tensor: Tensor) -> Tensor:
        low, high = (float(end) for end in torch.aminmax(tensor))
        return torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype).uniform_(low, high)

    pairs = zip(call.tensors, batched, strict=True)
    return call.with_tensors([drawn(t) if some else t for t, some in pairs])


@torch.no_grad()
def _compared(
    model: nn.Module,
    path: Path,
    kind: str,
    call: Call,
    batched: Sequence[bool],
    violation: Callable[..., Tensor] | None,
    tol: float,
) -> Report:
    run = load(path, kind)
    x, expected = run(call), model(*call.args, **call.kwargs)
    error = float((x.double() - expected.double()).abs().max())
    outside = _outside(model, violation, call)
    eps = torch.finfo(x.dtype).eps
    one = call.with_tensors(
        [t[:1] if some else t for t, some in zip(call.tensors, batched, strict=True)]
    )
    times = _times(lambda: run(one))
    return Report(
        path,
        kind,
        len(x) if any(batched) else 1,
        error if error == error else float("inf"),
        tol,
        None if outside is None else float(outside(x).max()),
        # what the model itself leaves to rounding, or a few units of numbers of size one
        UNITS * eps if outside is None else max(UNITS * eps, 2 * float(outside(expected).max())),
        median(times),
        median(_times(lambda: model(*one.args, **one.kwargs))),
        min(times),
    )


def _outside(
    model: nn.Module, violation: Callable[..., Tensor] | None, call: Call
) -> Callable[[Tensor], Tensor] | None:
    """How far points are outside, by the function given or by what a layer knows of its set."""
    if violation is not None:
        return lambda x: violation(x, *call.args, **call.kwargs)
    if not hasattr(model, "solve"):
        return None
    layer: Any = model
    solution = layer.solve(*call.args, **call.kwargs)
    return lambda x: solution._asked().violation(x)


def _times(ask: Callable[[], Any]) -> list[float]:
    """Seconds of calls."""
    times = []
    for _ in range(TIMED + 20):
        begin = time.perf_counter()
        ask()
        times.append(time.perf_counter() - begin)
    return times[20:]
