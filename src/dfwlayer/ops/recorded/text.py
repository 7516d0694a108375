"""Arguments as a text with the tensors apart, and back.

An operator takes tensors and plain values, so a set, an objective or a method goes to it as a text,
such as ``('o', 'dfwlayer.constraints.balls.lp_ball:LpBall', {'p': ('f', '0x1.0p+0'), …})``: what
makes it, and its fields in order. ``('t',)`` stands for the next one of the tensors.

`described` is written for torch.compile, which follows it and has a constant text in the end.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from inspect import signature
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dfwlayer.ops.tensors import fields_of, names_of
from dfwlayer.ops.tracing import real_tensors

__all__ = ["described", "rebuilt", "with_checks"]

_T = TypeVar("_T")

# as tuples: older compilers do not know a union of types
_PLAIN = (bool, str)
_SEQUENCES = (tuple, list)
_CALLED = (FunctionType, nn.Module)

Make = Callable[[Iterator[Tensor]], Any]

_own: dict[str, Any] = {}  # classes and functions that no module holds, by the name given to them


def described(node: Any, tensors: list[Tensor], missing: list[str]) -> str:
    """The text; its tensors are appended, and the names of things that no text can stand for."""
    if node is None or isinstance(node, _PLAIN):
        return f"('c', {node!r})"
    if isinstance(node, int):
        return f"('c', {int(node)!r})"
    if isinstance(node, float):
        return f"('f', {node.hex()!r})"
    if isinstance(node, Tensor):
        if node.layout != torch.strided:
            missing.append("a sparse tensor")
        tensors.append(node)
        return "('t',)"
    if isinstance(node, _SEQUENCES):
        parts = [described(part, tensors, missing) for part in node]
        return f"('s', ({''.join([part + ', ' for part in parts])}))"
    if isinstance(node, dict):
        parts = [f"{key!r}: {described(part, tensors, missing)}" for key, part in node.items()]
        return f"('d', {{{', '.join(parts)}}})"
    if isinstance(node, _CALLED):
        if torch.compiler.is_dynamo_compiling() and named_functions() == "no":
            missing.append("a function")
            return ""
        function: Any = node
        inside = torch.compiler.is_dynamo_compiling() and isinstance(node, FunctionType)
        if inside and len(function.__code__.co_freevars) > 0:  # they may have no values
            missing.append("a function with variables of the one around it")
            return ""
        return f"('n', {made_outside(node)!r})"
    if isinstance(node, type):
        return f"('n', {made_outside(node)!r})"
    kind = type(node)
    if names_of(kind) == "?":
        given = getattr(node, "given", None)  # what its constructor makes it from
        if given is None:
            missing.append(kind.__name__)
            return ""
        return described(given, tensors, missing)
    parts = []
    for name in fields_of(kind):
        parts.append(f"{name!r}: {described(getattr(node, name), tensors, missing)}")
    return f"('o', {made_outside(kind)!r}, {{{', '.join(parts)}}})"


def made_outside(thing: Any) -> str:
    """A name for a class or a function, which must not be made inside of what is compiled."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if isinstance(module, str) and isinstance(path, str) and _found(module, path) is thing:
        return f"{module}:{path}"
    for name, known in _own.items():
        if known is thing:
            return name
    name = f"#{len(_own)}"
    _own[name] = thing
    return name


def named_functions() -> str:
    """Whether the compiler can hand a function over; those that cannot end in an error."""
    variables = torch._dynamo.variables.functions
    known = vars(variables.NestedUserFunctionVariable)
    return "yes" if "as_python_constant" in known else "no"


made_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `names_of`
named_functions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _found(module: str, path: str) -> Any:
    """What a module holds under that path, None for nothing."""
    thing: Any = sys.modules.get(module)
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def with_checks(node: _T) -> _T:
    """An object that was made while operations were recorded, with its checks done."""
    tensors: list[Tensor] = []
    text = described(node, tensors, [])
    found: _T = rebuilt(text, tensors)
    return found


def rebuilt(text: str, tensors: Sequence[Tensor]) -> Any:
    """What the text stands for, made of these tensors."""
    return _maker(text)(iter(tensors))


@lru_cache(maxsize=1024)
def _maker(text: str) -> Make:
    return _make(ast.literal_eval(text))


def _make(node: Any) -> Make:
    """How to make a part; one without tensors is made once."""
    if "('t',)" in repr(node):
        return _with_tensors(node)
    with real_tensors():
        made = _with_tensors(node)(iter(()))
    return lambda _: made


def _with_tensors(node: Any) -> Make:
    match node:
        case ("t",):
            return next
        case ("c", value):
            return lambda _: value
        case ("f", digits):
            number = float.fromhex(digits)
            return lambda _: number
        case ("n", name):
            thing = _named(name)
            return lambda _: thing
        case ("s", parts):
            each = [_make(part) for part in parts]
            return lambda tensors: tuple([make(tensors) for make in each])
        case ("d", pairs):
            known = {key: _make(part) for key, part in pairs.items()}
            return lambda tensors: {key: make(tensors) for key, make in known.items()}
        case ("o", name, pairs):
            return _object(_named(name), {key: _make(part) for key, part in pairs.items()})
    raise ValueError(f"text: expected what described() returns, found {node!r}")


def _object(kind: type, parts: dict[str, Make]) -> Make:
    """A dataclass with these fields; what its constructor has put off is done now."""
    check = getattr(kind, "__post_init__", None)
    later = getattr(check, "deferred", False)
    # what is for the constructor alone, a centre, is part of another set by then
    given = [None] * (len(signature(check).parameters) - 1) if check is not None and later else []

    def make(tensors: Iterator[Tensor]) -> Any:
        copy: Any = object.__new__(kind)
        for name, part in parts.items():
            object.__setattr__(copy, name, part(tensors))
        if later:
            copy.__post_init__(*given)
        return copy

    return make


def _named(name: str) -> Any:
    if name in _own:
        return _own[name]
    module, _, path = name.partition(":")
    if path:
        __import__(module)
    thing = _found(module, path) if path else None
    if thing is None:
        raise RuntimeError(
            f"a class or function of a recorded problem is not known here as {name!r}: define it "
            "in a module, outside of functions, and import that before the program is loaded"
        )
    return thing
