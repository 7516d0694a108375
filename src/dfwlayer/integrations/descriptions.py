"""Objectives and sets over arrays of another library, described by what they are built from.

The constructors of this library look at tensors. Where the arrays are not tensors yet, or stand for
values that are known later only, a description takes them in: the same call with the same names,
from which the objective or set is built once there are tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer import constraints, objectives
from dfwlayer.constraints import Constraint
from dfwlayer.engines.base import Arguments, bind
from dfwlayer.engines.shapes import flattened
from dfwlayer.methods import Settings
from dfwlayer.methods.settings import check_settings, check_wish
from dfwlayer.objectives import Objective
from dfwlayer.solution import Solution
from dfwlayer.solve import solve

__all__ = [
    "NAMES",
    "Described",
    "Fit",
    "Layout",
    "Problem",
    "Spec",
    "described",
    "mirrored",
    "problem_of",
]


class Slot(NamedTuple):
    """The place of an array."""

    name: str


class Several(NamedTuple):
    """A list or tuple of parts."""

    kind: type
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Form:
    """A call of a constructor, in which arrays are places; hashable."""

    kind: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def built(self, tensors: Iterator[Tensor]) -> Any:
        """What the constructor returns for these tensors."""
        args = [_filled(part, tensors) for part in self.args]
        return self.kind(*args, **{k: _filled(part, tensors) for k, part in self.kwargs})


@dataclass(frozen=True)
class Described:
    """An objective or a set over arrays; made by `described`.

    Attributes:
        arrays: Those of the call, in their order.
        names: By which errors call them.
        form: The call without them.

    """

    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    form: Form

    def __repr__(self) -> str:
        return f"{self.form.kind.__name__}({', '.join(self.names)})"


def described(kind: Callable[..., Any]) -> Callable[..., Described]:
    """A function with the arguments of an objective or a set, which takes arrays for tensors.

    Args:
        kind: A class of this library or of your own, or a function that returns a set.

    """
    signature = inspect.signature(kind)

    def describe(*args: Any, **kwargs: Any) -> Described:
        named = _names(signature, args, kwargs)
        arrays: list[tuple[str, Any]] = []
        own = tuple(_apart(named[i], value, arrays) for i, value in enumerate(args))
        form = Form(kind, own, tuple((k, _apart(k, v, arrays)) for k, v in kwargs.items()))
        names, values = zip(*arrays, strict=True) if arrays else ((), ())
        return Described(values, names, form)

    describe.__name__ = describe.__qualname__ = kind.__name__
    describe.__doc__ = kind.__doc__
    describe.__signature__ = signature  # type: ignore[attr-defined]
    return describe


def _names(signature: inspect.Signature, args: Any, kwargs: Any) -> list[str]:
    """The names of the positional arguments; a TypeError for those that do not fit."""
    signature.bind(*args, **kwargs)
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(args) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names


def _apart(name: str, value: Any, arrays: list[tuple[str, Any]]) -> Any:
    """The value with places for its arrays, which are appended."""
    if isinstance(value, Described):
        arrays += [(f"{name}.{own}", a) for own, a in zip(value.names, value.arrays, strict=True)]
        return value.form
    if isinstance(value, Tensor | Constraint | Objective):
        raise ValueError(
            f"{name}: expected arrays and what this module describes, got a "
            f"{type(value).__name__} of dfwlayer or torch; with tensors use dfwlayer.solve"
        )
    if isinstance(value, list | tuple):
        parts = (_apart(f"{name}[{i}]", part, arrays) for i, part in enumerate(value))
        return Several(list if isinstance(value, list) else tuple, tuple(parts))
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        arrays.append((name, value))
        return Slot(name)
    return value


def _filled(part: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(part, Slot):
        return next(tensors)
    if isinstance(part, Several):
        return part.kind(_filled(each, tensors) for each in part.parts)
    return part.built(tensors) if isinstance(part, Form) else part


def _is_offered(value: Any) -> bool:
    """Whether it is an objective, a set, or a function that is called like one."""
    if isinstance(value, type):
        return issubclass(value, Objective | Constraint) and not inspect.isabstract(value)
    return inspect.isfunction(value) and value.__name__[0].isupper()


_OFFERED = {
    name: value
    for package in (objectives, constraints)
    for name in package.__all__
    if _is_offered(value := getattr(package, name))
}
NAMES = tuple(_OFFERED)  # of the objectives and sets of the library


@cache
def mirrored(name: str) -> Callable[..., Described]:
    """`described` for the class of this library with that name; AttributeError if there is none."""
    if name not in _OFFERED:
        raise AttributeError(f"dfwlayer has no objective or set {name!r}; it has {list(NAMES)}")
    return described(_OFFERED[name])


class Spec(NamedTuple):
    """What is known of a tensor before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self) -> Tensor:
        """A tensor like it, which takes no memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


class Fit(NamedTuple):
    """What the shapes of a problem say."""

    lead: tuple[int, ...]  # the batch
    shape: tuple[int, ...]  # of one problem's variable
    mode: str  # how it is differentiated


class Layout(NamedTuple):
    """How a tensor with further batch dimensions in front becomes one that the library takes."""

    shape: tuple[int, ...]  # of its own, a number for all entries written out
    ones: int  # dimensions of size 1 between those in front and its own

    def spread(self, tensor: Tensor, spec: Spec) -> Tensor:
        """The tensor, (*front, *spec.shape), as (*front, *ones, *shape)."""
        front = tensor.shape[: tensor.dim() - len(spec.shape)]
        blank = [1] * (len(self.shape) - len(spec.shape))
        wide = tensor.reshape(*front, *[1] * self.ones, *blank, *spec.shape)
        return wide.expand(*front, *[1] * self.ones, *self.shape)


@dataclass(frozen=True)
class Problem:
    """A call of `dfwlayer.solve` without its tensors; hashable."""

    objective: Form
    constraint: Form
    start: bool  # whether the last tensor is x0
    options: tuple[tuple[str, Any], ...]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Objective, Constraint, Tensor | None]:
        """Objective, set and start."""
        rest = iter(tensors)
        objective, constraint = self.objective.built(rest), self.constraint.built(rest)
        return objective, constraint, next(rest) if self.start else None

    def solved(self, tensors: Sequence[Tensor]) -> Solution:
        """Solve with these tensors."""
        objective, constraint, x0 = self.arguments(tensors)
        return solve(objective, constraint, x0=x0, **dict(self.options))

    def fit(self, specs: tuple[Spec, ...]) -> Fit:
        """Check everything but values; raises the ValueError that `dfwlayer.solve` would."""
        return _fit(self, specs)

    def layouts(self, specs: tuple[Spec, ...]) -> tuple[Layout, ...] | None:
        """How each tensor is given a batch, None where one of them cannot have it."""
        return _layouts(self, specs)


@lru_cache(maxsize=256)
def _fit(problem: Problem, specs: tuple[Spec, ...]) -> Fit:
    objective, constraint, x0 = problem.arguments([spec.stand_in() for spec in specs])
    for name, part, kind in (
        ("objective", objective, Objective),
        ("constraint", constraint, Constraint),
    ):
        if not isinstance(part, kind):
            raise ValueError(f"{name}: expected {kind.__name__}, got {type(part).__name__}")
    settings, shape = _settings(dict(problem.options), constraint)
    arguments = Arguments(objective, constraint, x0, settings.step_size)
    flat = flattened(arguments, shape)
    task = bind(arguments if flat is None else flat.arguments, settings)
    if flat is None:
        return Fit(task.lead, task.shape, settings.mode)
    return Fit(flat.lead, flat.shape, settings.mode)


def _settings(options: dict[str, Any], constraint: Constraint) -> tuple[Settings, Any]:
    """Those that `dfwlayer.solve` would make of the options, and the shape."""
    defaults = inspect.signature(solve).parameters
    unknown = options.keys() - (defaults.keys() - {"objective", "constraint", "x0"})
    if unknown:
        raise TypeError(f"solve() got an unexpected keyword argument {min(unknown)!r}")
    given = {n: options.get(n, p.default) for n, p in defaults.items()}
    check_wish(given["on_infeasible"])
    names = [name for name in inspect.signature(check_settings).parameters if name in given]
    known = {name: given[name] for name in names}
    return check_settings(**known, preferred=constraint.preferred_method), given["shape"]


@lru_cache(maxsize=256)
def _layouts(problem: Problem, specs: tuple[Spec, ...]) -> tuple[Layout, ...] | None:
    """Tried out on the shapes of one tensor after the other: the library is to say what fits."""
    fit = problem.fit(specs)
    size = 1 + max((s for spec in specs for s in spec.shape), default=1)  # like no other

    def fits(i: int, layout: Layout) -> bool:
        shape = (size, *[1] * layout.ones, *layout.shape)
        tried = (*specs[:i], specs[i]._replace(shape=shape), *specs[i + 1 :])
        try:
            return _fit.__wrapped__(problem, tried)[:2] == ((size, *fit.lead), fit.shape)
        except ValueError:
            return False

    found = []
    for i, spec in enumerate(specs):
        shapes = [spec.shape]
        if spec.shape == ():  # one number for all entries of the variable, or for all rows
            shapes += [fit.shape, *{s.shape[-2:-1]: None for s in specs if len(s.shape) > 1}]
        options = (Layout(s, k) for s in shapes for k in range(len(fit.lead) + 1))
        layout = next(filter(partial(fits, i), options), None)
        if layout is None:
            return None
        found.append(layout)
    return tuple(found)


def problem_of(
    objective: Any, constraint: Any, start: bool, options: dict[str, Any], module: str
) -> Problem:
    """The call of `solve` that two descriptions stand for; ``module`` is where they come from."""
    for name, part, example in (
        ("objective", objective, "Quadratic(P, q)"),
        ("constraint", constraint, "LpBall(1, radius=t)"),
    ):
        if not isinstance(part, Described):
            raise ValueError(
                f"{name}: expected one of {module}, such as {example}, got {type(part).__name__}"
            )
    return Problem(objective.form, constraint.form, start, tuple(sorted(options.items())))
