"""Problems over polyhedra for compiled code, and what is right for them."""

from itertools import combinations

import numpy as np
import torch

import dfwlayer as dfw
from compiled_cases import F64, answers, attempted, close, leaf
from dfwlayer.engines import compiled


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


def solved(parts, **options):
    found = attempted(*problem(**parts), **{"tol": 1e-9} | options)
    assert found is not None
    assert found.left is None
    return found.solution


def by_both(parts, **options):
    """x and its gradients in every tensor, by compiled code and by tensor operations."""
    found = [answers(*problem(**parts), **options)]
    with compiled.using(False):
        found.append(answers(*problem(**parts), **options))
    return found


def assert_the_same(found, tolerance=1e-9):
    (own, gradients), (other, right) = found
    assert torch.equal(own.status, other.status)
    close(own.x, other.x, tolerance)
    for one, expected in zip(gradients, right, strict=True):
        close(one, expected, 100 * tolerance)


def rows_of(parts):
    """Every constraint ⟨n, x⟩ ≤ c or = c of one problem as rows, and which are equations."""
    n = parts["q"].shape[-1]
    eye, normals, sides, firm = np.eye(n), [], [], []
    get = {name: part.detach().double().numpy() for name, part in parts.items()}
    for normal, side, sign, equation in (
        ("A", "b", 1, True),
        ("G", "h", 1, False),
        (None, "upper", 1, False),
        (None, "lower", -1, False),
    ):
        if side in get:
            matrix = eye if normal is None else get[normal]
            normals.append(sign * matrix)
            sides.append(sign * np.broadcast_to(get[side], len(matrix)))
            firm.append(np.full(len(matrix), equation))
    if not normals:
        return np.zeros((0, n)), np.zeros(0), np.zeros(0, bool)
    return np.concatenate(normals), np.concatenate(sides), np.concatenate(firm)


def brute_force(parts):
    """The best of the minimisers on all sets of rows that are feasible."""
    normals, sides, firm = rows_of(parts)
    P, q = (parts[name].detach().double().numpy() for name in ("P", "q"))
    best, found = np.inf, None
    loose = np.flatnonzero(~firm & np.isfinite(sides))
    for count in range(len(q) + 1):
        for some in combinations(loose, count):
            N = np.concatenate([normals[firm], normals[list(some)]])
            c = np.concatenate([sides[firm], sides[list(some)]])
            K = np.block([[P, N.T], [N, np.zeros((len(N), len(N)))]])
            x = np.linalg.lstsq(K, np.concatenate([-q, c]), rcond=1e-12)[0][: len(q)]
            off = normals @ x - sides
            if (off > 1e-9 * (1 + np.abs(sides))).any() or (np.abs(off[firm]) > 1e-9).any():
                continue
            value = 0.5 * x @ P @ x + q @ x
            if value < best:
                best, found = value, x
    return best, found


def assert_optimal(parts, x, tolerance):
    """The gradient is a combination of rows that are tight, with forces of the right sign."""
    normals, sides, firm = rows_of(parts)
    P, q, x = (t.detach().double().numpy() for t in (parts["P"], parts["q"], x))
    terms = np.abs(normals) @ np.abs(x) + np.abs(sides)
    off = normals @ x - sides
    assert (off <= tolerance * terms).all()
    assert (np.abs(off[firm]) <= tolerance * terms[firm]).all()
    lengths = np.linalg.norm(normals, axis=1)
    tight = firm | (off >= -1e-9 * terms)
    N = normals[tight] / lengths[tight, None]
    g = P @ x + q
    force = np.linalg.lstsq(N.T, -g, rcond=None)[0] if len(N) else np.zeros(0)
    scale = np.abs(P) @ np.abs(x) + np.abs(q)
    assert np.abs(N.T @ force + g).max() <= 1e-9 * scale.max()
    assert (force[~firm[tight]] >= -1e-9 * scale.max()).all()


def differences(parts, name, v, **options):
    """⟨v, x⟩ differentiated in one tensor by central differences."""
    base = parts[name].detach()
    out = torch.zeros_like(base)
    step = 1e-6 * (1 + float(base.abs().max()))
    for i in range(base.numel()):
        values = []
        for sign in (1, -1):
            moved = base.clone()
            moved.view(-1)[i] += sign * step
            if name == "P":
                moved = 0.5 * (moved + moved.mT)
            values.append((solved({**parts, name: moved}, **options).x * v).sum())
        out.view(-1)[i] = (values[0] - values[1]).detach() / (2 * step)
    return out


def codes(parts):
    """Which problems of a batch are left to others."""
    found = attempted(*problem(**parts), tol=1e-9)
    if found is None:
        return [True] * len(parts["q"])
    return [False] * len(parts["q"]) if found.left is None else found.left.tolist()
