"""The layer for quadratic programs, with the arguments of qpth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dfwlayer.constraints import Polyhedron
from dfwlayer.deploy import DeployedProgram
from dfwlayer.layer.base import Layer, checked_x, real
from dfwlayer.objectives import Quadratic
from dfwlayer.ops.recorded import recordable
from dfwlayer.solution import Solution
from dfwlayer.solve import again, outline

__all__ = ["QPLayer"]


class QPLayer(Layer):
    """x*(Q, p, G, h, A, b) = argmin ½ xᵀQx + pᵀx subject to Gx ≤ h, Ax = b.

    The call is that of qpth's ``QPFunction``: the same arguments in the same order, each with a
    batch or shared by all problems, and None or a tensor without entries for what there is not. Q
    is positive semi-definite and may be zero, which is a linear program. All arguments get their
    gradients.

    Args:
        settings: Those of `DFWLayer`, with its defaults, and ``on_infeasible`` of `dfwlayer.solve`.

    Examples:
        >>> x = QPLayer()(Q, p, G, h, torch.Tensor(), torch.Tensor())

    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)

    def forward(
        self,
        Q: Tensor | None,  # (n, n) or (*batch, n, n), None for the identity
        p: Tensor,  # (n,) or (*batch, n)
        G: Tensor | None = None,  # (m, n) or (*batch, m, n)
        h: Tensor | None = None,  # (m,) or (*batch, m)
        A: Tensor | None = None,  # (k, n) or (*batch, k, n)
        b: Tensor | None = None,  # (k,) or (*batch, k)
    ) -> Tensor:
        """The solution, (n,) or (*batch, n)."""
        return _program(self._itself(), Q, p, G, h, A, b)

    def solve(
        self,
        Q: Tensor | None,
        p: Tensor,
        G: Tensor | None = None,
        h: Tensor | None = None,
        A: Tensor | None = None,
        b: Tensor | None = None,
        *,
        x0: Tensor | None = None,
    ) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        with _renamed(P="Q", q="p"):
            parts = Polyhedron(*map(_unless_empty, (G, h, A, b)))
            return self._solved(Quadratic(Q, p), parts, x0=x0)

    def _deployed(self, steps: int, Q: Tensor | None = None, **rows: Tensor | None) -> nn.Module:
        given = {name: _unless_empty(value) for name, value in rows.items()}
        return DeployedProgram(Polyhedron(**given), _unless_empty(Q), steps)


def _unless_empty(value: Any) -> Any:
    """None for a tensor without entries, which stands for a part that is missing."""
    return None if isinstance(value, Tensor) and value.numel() == 0 else value


@contextmanager
def _renamed(**names: str) -> Iterator[None]:
    """Errors that call arguments as the caller does."""
    letter = "[A-Za-z0-9_]"
    pattern = re.compile(rf"(?<!{letter})({'|'.join(names)})(?!{letter})")
    try:
        yield
    except ValueError as error:
        told = pattern.sub(lambda found: names[found.group()], str(error))
        raise ValueError(told) from error


def _program_shapes(_: Any, Q: Any, p: Any, *rows: Any) -> Any:
    return outline(Quadratic(Q, p), Polyhedron(*map(_unless_empty, rows)))[:1]


def _program_again(found: Any, layer: Any, Q: Any, p: Any, *rows: Any) -> Any:
    parts = Polyhedron(*map(_unless_empty, rows))
    return again(found, Quadratic(Q, p), parts, **real(layer)._options())


@recordable(shapes=_program_shapes, again=_program_again)
def _program(layer: Any, *given: Tensor | None) -> Tensor:
    """The solution of a quadratic program."""
    own = real(layer)
    return checked_x(own, own.solve(*given))
