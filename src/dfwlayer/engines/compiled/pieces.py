"""Kinked costs and rows: the pieces that hold a solution, by compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.background import NotCompiledError, busy, mode, start
from dfwlayer.engines.compiled.kernels import outcome, pieces
from dfwlayer.engines.compiled.threads import spread

__all__ = ["Bent", "Found", "located", "try_out"]

LARGEST = 600  # coordinates
STEPS = 20  # for each coordinate, at most; one or two are needed
WITHIN = 1e-7  # of the largest slope, that a force may be larger than the jump at its kink


class Bent(NamedTuple):
    """½ xᵀPx + qᵀx and its set, see `dfwlayer.engines.compiled.kernels.pieces`.

    What all problems share has a first dimension of 1. Kinks are in the order of their places.
    """

    P: Array  # (·, n, n), or (·, 0, 0) for the identity
    q: Array  # (·, n)
    E: Array  # (·, k, n)
    e: Array  # (·, k)
    G: Array  # (·, m, n)
    h: Array  # (·, m)
    lower: Array  # (·, n)
    upper: Array  # (·, n)
    places: Array  # (·, n, K)
    costs: Array  # (·, n, K)
    jumps: Array  # (·, r, n, K), of the first r inequalities


class Found(NamedTuple):
    """The pieces of a batch."""

    given: Bent
    below: Array  # how many kinks are below each coordinate (B, n)
    prices: Array  # of the rows (B, k + m)

    def hold(self, x: Array) -> bool:  # (B, n)
        """Whether x, which is optimal on these pieces, is so beyond them."""
        x, wrong = np.ascontiguousarray(x), np.empty(len(x), np.bool_)
        P, q, E, _, G, _, *rest = self.given
        try:
            pieces.judge(0, len(x), P, q, E, G, *rest, self.below, self.prices, x, WITHIN, wrong)
        except NotCompiledError as missing:
            start(missing)
            return False
        return not wrong.any()


def located(given: Bent) -> Found | None:
    """The pieces, None where not all problems have some, or there is no compiled code (yet)."""
    n = given.lower.shape[1]
    if n > LARGEST or mode() == "off" or busy():
        return None
    given = Bent(*[np.ascontiguousarray(part, np.float64) for part in given])
    batch = max([len(part) for part in given])
    found = Found(
        given,
        np.zeros((batch, n), np.int64),
        np.zeros((batch, given.e.shape[1] + given.h.shape[1])),
    )
    codes = np.zeros((2, batch), np.int64)
    rest = STEPS * n, found.below, found.prices, codes
    try:
        spread(lambda a, b: pieces.search(a, b, *given, *rest), batch, 8 * n**3 // 3)
    except NotCompiledError as missing:
        start(missing)
        return None
    return None if (codes[0] != outcome.SOLVED).any() else found


def try_out() -> None:
    """Solve a small problem, for the code to be compiled."""
    one, none = np.ones((1, 2)), np.empty((1, 0, 2))
    rows = none, none[..., 0], none, none[..., 0], -one, one
    kinks = one[..., None], one[..., None], none[..., None]
    found = located(Bent(np.eye(2)[None], one, *rows, *kinks))
    assert found is not None
    found.hold(-one)
