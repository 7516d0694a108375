"""Problems over polyhedra for compiled code."""

import torch

import dfwlayer as dfw
from compiled_cases import F64, leaf


def random(seed, n, m, k, lead=(), *, box=True, dtype=F64, shared=()):
    """A strictly convex problem around a point of the set."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape, own=True):
        return torch.randn(*(lead if own else ()), *shape, dtype=dtype, generator=make)

    def positive(*shape):
        return torch.rand(*lead, *shape, dtype=dtype, generator=make) + 0.02

    root = normal(n, n, own="P" not in shared)
    parts = {"P": root.mT @ root / n + 0.1 * torch.eye(n, dtype=dtype), "q": 3 * normal(n)}
    inside = normal(n)
    if m:
        parts["G"] = normal(m, n, own="G" not in shared)
        parts["h"] = (parts["G"] @ inside.unsqueeze(-1)).squeeze(-1) + positive(m)
    if k:
        parts["A"] = normal(k, n, own="A" not in shared)
        parts["b"] = (parts["A"] @ inside.unsqueeze(-1)).squeeze(-1)
    if box:
        parts["lower"], parts["upper"] = inside - positive(n), inside + positive(n)
    return {name: leaf(part.detach()) for name, part in parts.items()}


def problem(P, q, **sides):
    return dfw.Quadratic(P, q), dfw.Polyhedron(**sides)
