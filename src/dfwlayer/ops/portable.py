"""Whether an object, with the functions in it, works on any device that its tensors are moved to.

Objects of this library are what the tensors in their fields make of them. A function of the user's
may hold tensors of its own, or name a device. It is looked at: what it refers to by global names,
closures and defaults has to be numbers, texts, other such functions, or parts of the libraries
named below; it may not import, nor mention CUDA. What cannot be told is not portable.
"""

from __future__ import annotations

import builtins
import dis
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.tensors import fields_of

__all__ = ["portable"]

LIBRARIES = frozenset(
    ("dfwlayer", "torch", "math", "cmath", "numpy", "builtins", "collections", "dataclasses",
     "functools", "itertools", "operator", "typing", "abc", "enum", "_operator", "_functools")
)  # fmt: skip
PLAIN = (str, float, int, bool, complex, bytes, type(None), torch.dtype, type(Ellipsis))
REFUSED = frozenset(("eval", "exec", "compile", "globals", "locals", "open", "__import__"))


def portable(value: Any) -> bool:
    """Whether it is made of tensors in known places, and of what knows no device."""
    return _portable(value, set())


def _portable(value: Any, met: set[int]) -> bool:
    """Those that were met before are being looked at further up."""
    kind = type(value)
    if isinstance(value, PLAIN) or id(value) in met:
        return not (kind is str and "cuda" in value)
    met.add(id(value))
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    if isinstance(value, tuple | list | set | frozenset):
        return all(_portable(part, met) for part in value)
    if isinstance(value, dict):
        return all(_portable(part, met) for pair in value.items() for part in pair)
    if isinstance(value, FunctionType):
        return _known(value.__module__) or _function(value, met)
    if isinstance(value, MethodType):
        return _portable(value.__self__, met) and _portable(value.__func__, met)
    if isinstance(value, ModuleType):
        return _known(value.__name__)
    if isinstance(value, BuiltinFunctionType):
        return value.__name__ not in REFUSED and not isinstance(value.__self__, Tensor)
    if isinstance(value, type):
        return _class(value, met)
    if isinstance(value, torch.nn.Module) or not _class(kind, met):
        return False
    known = fields_of(value)
    if not known and not _known(kind.__module__):
        return False
    return all(_portable(getattr(value, name), met) for name in known)


def _known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


def _class(kind: type, met: set[int]) -> bool:
    """Its methods, and those that it inherits."""
    for base in kind.__mro__:
        if _known(base.__module__):
            continue
        for name, part in vars(base).items():
            inner = getattr(part, "__wrapped__", None) or getattr(part, "__func__", part)
            if isinstance(inner, property):
                inner = inner.fget
            if isinstance(inner, Tensor):  # nobody would move it
                return False
            special = name.startswith(("__", "_abc_")) and not isinstance(inner, FunctionType)
            if not special and not _portable(inner, met):
                return False
    return True


def _function(function: FunctionType, met: set[int]) -> bool:
    names = _names(function.__code__)
    if names is None:
        return False
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        held += (cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # not filled yet
        return False
    own = function.__globals__
    held += (own[name] for name in names if name in own)
    # a tensor that a function holds stays where it is
    return all(not _holds_tensor(part) and _portable(part, met) for part in held)


def _holds_tensor(part: Any) -> bool:
    if isinstance(part, tuple | list | set | frozenset):
        return any(map(_holds_tensor, part))
    if isinstance(part, dict):
        return any(map(_holds_tensor, part.values()))
    if isinstance(part, type | FunctionType | ModuleType):
        return False
    return isinstance(part, Tensor) or any(_holds_tensor(getattr(part, f)) for f in fields_of(part))


@lru_cache(maxsize=256)
def _names(code: CodeType) -> frozenset[str] | None:
    """The names in a function and those inside of it, None if it does what cannot be followed."""
    names = set(code.co_names)
    if names & REFUSED or "cuda" in names:
        return None
    if any(each.opname == "IMPORT_NAME" for each in dis.get_instructions(code)):
        return None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names(constant)
            if inner is None:
                return None
            names |= inner
        elif isinstance(constant, str) and "cuda" in constant:
            return None
    return frozenset(name for name in names if not hasattr(builtins, name))
