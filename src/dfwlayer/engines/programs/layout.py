"""The arguments of a solve as Triton programs read them, and what they write as gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Linear
from dfwlayer.engines.compiled.answer import Gradients, asks, spoiled
from dfwlayer.engines.compiled.kernels.outcome import SOLVED
from dfwlayer.engines.programs.bodies import Body, body_of
from dfwlayer.engines.programs.form import Form, form_of
from dfwlayer.engines.programs.gradients import envelope, is_own, of_shared, of_squares, summed
from dfwlayer.engines.programs.launch import (
    FITS,
    Repeat,
    Strided,
    launch,
    left_so_far,
    options_of,
    strided,
    tableau_options,
)
from dfwlayer.methods.base import Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.signature import Signature

__all__ = ["Layout", "lay_out"]

NARROW = 64  # coordinates up to which an inverse is in float64, and found again sooner than read
ENTRIES = 10**5  # of one matrix of least squares, whose square is formed
# eps and the largest number of a dtype, and numbers whose products of three and squares are numbers
LIMITS = {
    dtype: {"EPS": torch.finfo(dtype).eps, "MAX": torch.finfo(dtype).max / 4, "LARGEST": largest}
    for dtype, largest in ((torch.float32, 1e12), (torch.float64, 1e60))
}

_NO_TENSOR = torch.empty(0)
_seen: dict[torch.device, int] = {}  # how many problems had been left when the host last looked


class Quadratics(NamedTuple):
    """The objectives; what is shared by all has a first stride of 0."""

    P: Strided | None
    q: Strided
    A: Strided | None  # with P = AᵀA and q = −Aᵀb
    b: Strided | None


class Found(NamedTuple):
    """What the programs have written of a batch of B problems; what was left to others is zero."""

    x: list[Tensor]  # (B, n), taken out when it becomes an output, which would be kept for ever
    values: Tensor  # (2, B): f and the gap
    kept: Tensor  # in float64, one after the other: `state` and, as integers, `codes`
    factor: Tensor | None  # (B, N, N): the inverse on the face of the solution, N lanes
    counter: Tensor  # of the problems that all programs of the device have left
    before: int  # what it was when the host last looked
    batch: int
    width: int  # of `state`

    @property
    def state(self) -> Tensor:
        """(B, ·): x, then the multipliers and where coordinates are held."""
        return self.kept[: self.batch * self.width].view(self.batch, self.width)

    @property
    def codes(self) -> Tensor:
        """(2, B): what became of a problem, and steps."""
        rest: Tensor = self.kept[self.batch * self.width :].view(torch.int64)
        return rest.view(2, self.batch)

    def told(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gap, steps and status (B,)."""
        status, steps = self.codes.unbind()
        return self.values[1], steps, status

    def left(self) -> tuple[int, Tensor | None]:
        """How many problems were left, and a mask of them; the only time that the host waits."""
        now = _seen[self.kept.device] = int(self.counter)
        if now == self.before:
            return 0, None
        left = self.codes[0] != SOLVED
        count = int(left.sum())  # another thread may have left some
        return count, left if count else None


class Plan(NamedTuple):
    """What a backward pass writes."""

    targets: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]  # shapes of gradients
    shared: tuple[bool, ...]  # which tensors are matrices whose gradients come from all problems
    u: tuple[int, ...] | None  # the shape of the adjoint solutions, where something asks for these
    missing: int  # gradients that the kernel knows and the set has not
    repeat: list[Repeat]  # the launch, once there was one


@dataclass(frozen=True)
class Layout:
    """A batch of problems."""

    form: Form
    objective: Quadratics
    body: Body
    options: Mapping[str, int]
    # what layouts of calls with the same signature have in common
    repeats: dict[str, Repeat] = field(default_factory=dict)
    plans: dict[tuple[bool, ...], Plan] = field(default_factory=dict)  # by what is asked for

    @property
    def batch(self) -> int | None:
        return self.form.batch

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.form.matrix, self.form.vector, *self.body.tensors

    def search(self, x0: Tensor | None, settings: Settings) -> Found | None:
        form, like = self.form, self.form.vector
        n, batch = form.n, form.batch or 1
        start = None
        if x0 is not None:
            if not _starts(x0, form):
                return None
            start = strided(x0, 1, like)
        width = self.body.state
        x, values = like.new_empty((batch, n)), like.new_empty((2, batch))
        kept_there = like.new_empty(batch * (width + 2), dtype=torch.float64)
        factor = None
        if self._keeps():
            lanes = self.options["N"]
            factor = like.new_empty((batch, lanes, lanes), dtype=torch.float32)
        counter = left_so_far(like.device)
        before = _seen.get(like.device, 0)
        found = Found([x], values, kept_there, factor, counter, before, batch, width)
        repeat = self.repeats.get("search") if start is None else None
        kept = (factor,) if self.body.keeps else ()
        (P, q, A, b), body = self.objective, self.body
        tensors, strides = _handed((P, q, *body.parts, start, A, b), (3, 2, *body.widths, 2, 1, 1))
        m = 0 if A is None else A.tensor.shape[-2]
        most = min(settings.max_steps, FITS - 1)
        numbers = *strides, n, m, *body.counts, batch, _below(settings.tol), most
        if repeat is not None:
            memory = found.kept.data_ptr()
            codes, state = memory + 8 * batch * width, memory
            if repeat(batch, (*tensors, x, values, codes, state, *kept, counter), numbers):
                return found
        repeat = launch(
            body.search,
            batch,
            like,
            (*tensors, x, values, found.codes, found.state, *kept, counter),
            numbers,
            self._constants("EPS", "MAX", "LARGEST"),
            self.options,
        )
        if repeat is not None and start is None:
            self.repeats["search"] = repeat
        return found

    def fresh(self, found: Found) -> Tensor:
        """As it was written first."""
        x = found.x.pop()
        return x[0] if self.batch is None else x

    def seen(self, found: Found) -> Tensor:
        """As the programs have written it a second time, as the other one may be changed."""
        x = found.state[:, : self.form.n].to(self.form.dtype)
        return x[0] if self.batch is None else x

    def gradients(self, asked: Sequence[bool], found: Found, v: Tensor) -> Gradients:
        """Those of `pullback`; programs let NaN, which comes from elsewhere, go on."""
        return self.pullback(asked, found, v if v.dim() == 2 else v.unsqueeze(0))

    def gradients_of_value(
        self, asked: Sequence[bool], found: Found, w: Tensor
    ) -> Gradients | None:
        """From x and the forces that hold it, None where only tensor operations know these."""
        if not self.body.counts:
            return None
        w = w.double().reshape(-1, 1)
        lost = ~torch.isfinite(w)
        solved = (found.codes[0] == SOLVED).unsqueeze(-1)
        every = self.tensors
        known = envelope(
            self.form, every, self.body.rows, found.state, solved, torch.where(lost, 0, w)
        )
        kept = [each if want else None for each, want in zip(known, asked, strict=True)]
        return spoiled(kept, lost.squeeze(-1), self._matrices)

    def pullback(self, asked: Sequence[bool], found: Found, v: Tensor) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        form, body = self.form, self.body
        batch, n = v.shape
        plan = self.plans.get(tuple(asked)) or self._planned(asked, batch)
        u = None if plan.u is None else v.new_empty(plan.u, dtype=torch.float64)
        targets = [
            None if each is None else v.new_empty(each[0], dtype=each[1]) for each in plan.targets
        ]
        tensors, strides = _handed(
            (self.objective.P, *(body.parts[i] for i in body.needed)),
            (3, *(body.widths[i] for i in body.needed)),
        )
        kept = (found.factor,) if body.keeps else ()
        rest = *kept, v, u, *targets, *[None] * plan.missing
        numbers = *strides, *v.stride(), n, *body.counts
        memory, repeat = found.kept.data_ptr(), plan.repeat[0] if plan.repeat else None
        codes, state = memory + 8 * batch * found.width, memory
        if repeat is None or not repeat(batch, (*tensors, codes, state, *rest), numbers):
            repeat = launch(
                body.adjoint,
                batch,
                v,
                (*tensors, found.codes, found.state, *rest),
                numbers,
                self._constants("MAX"),
                self.options,
            )
            plan.repeat[:] = [] if repeat is None else [repeat]
        gradients: Gradients = [
            None if target is None or tensor is None else summed(tensor, target)
            for tensor, target in zip(self.tensors, targets, strict=True)
        ]
        if u is None:
            return gradients
        if form.squared:
            gradients[:2] = of_squares(form, asked, found.codes, found.state[:, :n], u[:, :n])
        for i, tensor in enumerate(self.tensors):
            if tensor is not None and plan.shared[i] and not (i == 0 and form.squared):
                gradients[i] = of_shared(tensor, found.state, u, n, body.rows.get(i - 2))
        return gradients

    def _planned(self, asked: Sequence[bool], batch: int) -> Plan:
        """What a backward pass writes, kept for others."""
        form, body = self.form, self.body
        shapes = (form.n, form.n), (form.n,), *body.shapes
        # matrices that problems share, whose gradients are products of what all of them have found
        shared = tuple(
            wanted and len(shape) == 2 and not is_own(tensor, 2, batch)
            for tensor, wanted, shape in zip(self.tensors, asked, shapes, strict=False)
        )
        targets: list[tuple[tuple[int, ...], torch.dtype] | None] = []
        for i, (tensor, wanted) in enumerate(zip(self.tensors, asked, strict=True)):
            if not wanted or tensor is None or shared[i] or (i < 2 and form.squared):
                targets.append(None)
                continue
            shape = (batch, *shapes[i])
            own = tensor.dim() > 0 and len(tensor) == batch and tensor.numel() == math.prod(shape)
            targets.append((shape, form.dtype if own else torch.float64))
        wide = any(shared) or form.squared or bool(body.counts)
        u = (batch, form.n + body.ties) if wide else None
        plan = Plan(tuple(targets), shared, u, len(shapes) - len(targets), [])
        self.plans[tuple(asked)] = plan
        return plan

    @property
    def _matrices(self) -> tuple[int, ...]:
        """Which of `tensors` they are."""
        return 0, *(2 + place for place in self.body.rows)

    def _keeps(self) -> bool:
        """Whether a gradient may be asked for and the inverse, in float32, takes long to find."""
        wide = self.objective.P is not None and self.options["N"] > NARROW
        return self.body.keeps and wide and asks(self.tensors)

    def _constants(self, *names: str) -> Mapping[str, Any]:
        """What a kernel is compiled for."""
        own = tuple(self.body.constants.items())
        shape = self.options["N"], self.options["C"]
        return _constants_of(own, self.objective.P is not None, self.form.dtype, names, *shape)


@lru_cache(maxsize=256)
def _constants_of(
    own: tuple[tuple[str, Any], ...],
    dense: bool,
    dtype: torch.dtype,
    names: tuple[str, ...],
    lanes: int,
    columns: int,
) -> Mapping[str, Any]:
    limits = {name: LIMITS[dtype][name] for name in names}
    return {**dict(own), "DENSE": dense, **limits, "N": lanes, "C": columns}


class Mould(NamedTuple):
    """What the layouts of calls with one signature over sets of numbers have in common."""

    form: Form  # without tensors
    places: tuple[int, int]  # of matrix and vector among the tensors of a call, −1 for none
    body: Body
    options: Mapping[str, int]
    repeats: dict[str, Repeat]
    plans: dict[tuple[bool, ...], Plan]

    def filled(self, tensors: Sequence[Tensor]) -> Layout:
        """The layout of a call."""
        first, second = self.places
        matrix, vector = None if first < 0 else tensors[first], tensors[second]
        form = replace(self.form, matrix=matrix, vector=vector)
        return Layout(form, _objective(form), self.body, self.options, self.repeats, self.plans)


def lay_out(
    objective: Objective, constraint: Constraint, signature: Signature | None = None
) -> Layout | None:
    """The tensors, or None for what has no normal form or does not fit."""
    mould: Mould | None = None if signature is None else signature.kept.get("programs")
    if mould is not None and signature is not None:
        return mould.filled(signature.tensors)
    form = form_of(objective, constraint, _takes)
    if form is None:
        return None
    body = body_of(form)
    if body is None:
        return None
    tableau = isinstance(form.sets, Linear)
    lanes = form.n + body.ties
    options = tableau_options(lanes) if tableau else options_of(lanes, form.matrix is not None)
    if options is None:
        return None
    layout = Layout(form, _objective(form), body, options)
    if signature is not None and signature.numbers:
        _keep(layout, signature)
    return layout


def _keep(layout: Layout, signature: Signature) -> None:
    """For the calls that are like this one."""
    form, tensors = layout.form, signature.tensors
    names = {id(tensor): place for place, tensor in enumerate(tensors)}
    first = -1 if form.matrix is None else names.get(id(form.matrix), -2)
    second = names.get(id(form.vector), -2)
    # made of others, or one may be in either place
    if -2 in (first, second) or len(names) < len(tensors):
        return
    blank = replace(form, matrix=None, vector=_NO_TENSOR)
    signature.kept["programs"] = Mould(
        blank, (first, second), layout.body, layout.options, layout.repeats, layout.plans
    )


def _handed(
    parts: Sequence[Strided | None], widths: Sequence[int]
) -> tuple[list[Tensor | None], list[int]]:
    """Tensors and their strides, of which what is not there has none but zeros."""
    tensors: list[Tensor | None] = []
    strides: list[int] = []
    for part, width in zip(parts, widths, strict=True):
        tensors.append(None if part is None else part.tensor)
        strides += (0,) * width if part is None else part.strides[:width]
    return tensors, strides


def _takes(matrix: Tensor | None, n: int) -> bool:
    small = matrix is None or math.prod(matrix.shape[-2:]) <= ENTRIES
    return small and options_of(n, matrix is not None) is not None


def _starts(x0: Tensor, form: Form) -> bool:
    """Whether x0 is a point of the problems."""
    like = form.vector
    if x0.dim() not in (1, 2) or x0.shape[-1] != form.n:
        return False
    if (x0.dtype, x0.device) != (like.dtype, like.device):
        return False
    return x0.dim() == 1 or (form.batch is not None and len(x0) in (1, form.batch))


def _objective(form: Form) -> Quadratics:
    like = form.vector
    if not form.squared:
        own = None if form.matrix is None else strided(form.matrix, 2, like)
        return Quadratics(own, strided(like, 1, like), None, None)
    assert form.matrix is not None
    A, b = form.matrix.detach().contiguous(), form.vector.detach().contiguous()
    wide = A.double()
    P, q = wide.mT @ wide, -(wide.mT @ b.double().unsqueeze(-1)).squeeze(-1)
    return Quadratics(
        strided(P, 2, like), strided(q, 1, like), strided(A, 2, like), strided(b, 1, like)
    )


def _below(tol: float) -> float:
    """In float32, in which numbers are handed to a program, but not above it."""
    near = np.float32(tol)
    return float(near if near <= tol else np.nextafter(near, np.float32(0)))
