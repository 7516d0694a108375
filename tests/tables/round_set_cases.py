"""The rows of sets that are round: groups, ellipsoids, balls of matrices.

No other solver handles their cones to ten digits, so their solutions are designed.
"""

import numpy as np
import torch
from torch import Generator, Tensor

import dfwlayer as dfw
from set_case import F64, SetCase, above, uniform

GROUPS = [[0, 3], [1, 2, 6], [4, 5, 7]]


def group_ball(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {"radius": uniform(gen, rows), "weight": uniform(gen, rows, 3)}


def _group_norms(x):
    return np.array([np.linalg.norm(x[g]) for g in GROUPS])


def group_point(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One group is zero, and there the multipliers are inside of their ball."""
    x = torch.randn(len(p["radius"]), 8, generator=gen, dtype=F64)
    x[:, GROUPS[1]] = 0
    inside = torch.randn(len(x), 3, generator=gen, dtype=F64)
    inside = 0.8 * inside / inside.norm(dim=-1, keepdim=True)
    force = torch.empty_like(x)
    size = torch.zeros(len(x), dtype=F64)
    for k, group in enumerate(GROUPS):
        length = x[:, group].norm(dim=-1, keepdim=True)
        unit = inside if k == 1 else x[:, group] / length
        force[:, group] = p["weight"][:, k : k + 1] * unit
        size += p["weight"][:, k] * length[:, 0]
    return x * (p["radius"] / size)[:, None], 0.7 * force


def ellipsoid(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "A": torch.eye(7, 5, dtype=F64) + 0.4 * torch.randn(rows, 7, 5, generator=gen, dtype=F64),
        "centre": torch.randn(rows, 5, generator=gen, dtype=F64),
        "radius": uniform(gen, rows),
    }


def ellipsoid_point(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = torch.randn(*p["centre"].shape, generator=gen, dtype=F64)
    image = (p["A"] @ y[..., None])[..., 0]
    y = y * (p["radius"] / image.norm(dim=-1))[:, None]
    slope = (p["A"].mT @ p["A"] @ y[..., None])[..., 0] / p["radius"][:, None]
    return p["centre"] + y, 0.7 * slope


def _ellipsoid_violation(x, p):
    size = np.linalg.norm(p["A"] @ (x - p["centre"]))
    # x itself is rounded, which A may make more of
    unit = np.linalg.norm(np.abs(p["A"]) @ np.abs(x)) / p["radius"]
    return above((size - p["radius"]) / p["radius"] / max(1.0, unit))


def schatten_point(p: float, rows: int, columns: int):
    """Low rank for p = 1, equal singular values at the bound for p = ∞."""

    def point(gen: Generator, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        t = own["radius"][:, None]
        seed = torch.randn(len(t), rows, columns, generator=gen, dtype=F64)
        left, _, right = torch.linalg.svd(seed, full_matrices=False)
        draw = uniform(gen, len(t), min(rows, columns), low=0.2, high=0.9)
        half = torch.arange(draw.shape[-1]) < draw.shape[-1] // 2
        if p == 1:
            values = torch.where(half, draw, 0)
            values, profile = values * t / values.sum(-1, keepdim=True), torch.where(half, 1, draw)
        elif p == np.inf:
            values, profile = torch.where(half, 1, draw) * t, torch.where(half, draw, 0)
        else:
            values = draw * t / torch.linalg.vector_norm(draw, p, dim=-1, keepdim=True)
            profile = (values / t) ** (p - 1)
        x, force = ((left * v[:, None]) @ right for v in (values, 0.7 * profile))
        return x, force.flatten(1)

    return point


def _schatten(p, shape=(4, 3), flat=False):
    point = schatten_point(p, *shape)

    def designed(gen: Generator, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x, force = point(gen, own)
        return x.flatten(1) if flat else x, force

    return SetCase(
        lambda gen, rows: {"radius": uniform(gen, rows)},
        lambda own: dfw.SchattenBall(p, own["radius"], shape if flat else None),
        None,
        lambda x, own: above(
            np.linalg.norm(np.linalg.svd(x.reshape(shape), compute_uv=False), p) / own["radius"] - 1
        ),
        shape=(shape[0] * shape[1],) if flat else shape,
        bad=(({"radius": -1.0}, "radius: expected a finite number ≥ 0, got -1"),),
        designed=designed,
    )


def disc(gen: Generator, rows: int) -> dict[str, Tensor]:
    normal = torch.randn(rows, 8, generator=gen, dtype=F64)
    radius = uniform(gen, rows)
    return {"radius": radius, "normal": normal, "level": 0.4 * radius * normal.norm(dim=-1)}


def disc_point(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """On the rim, held by the ball and by the plane."""
    a, b, t = p["normal"], p["level"][:, None], p["radius"][:, None]
    square = a.square().sum(-1, keepdim=True)
    centre = b * a / square
    y = torch.randn(*a.shape, generator=gen, dtype=F64)
    y = y - (y * a).sum(-1, keepdim=True) * a / square
    y = y / y.norm(dim=-1, keepdim=True) * (t**2 - b**2 / square).sqrt()
    x = centre + y
    return x, 0.7 * x / t - 0.3 * a


def _disc_violation(x, p):
    size = np.abs(p["normal"] * x).sum() + abs(p["level"])
    off = abs(p["normal"] @ x - p["level"]) / size
    return above(np.linalg.norm(x) / p["radius"] - 1, off)


def spectraplex_point(gen: Generator, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rank two of four, and a multiplier W ≻ 0 on the rest beside that of the trace."""
    t = own["trace"][:, None]
    seed = torch.randn(len(t), 4, 4, generator=gen, dtype=F64)
    axes = torch.linalg.qr(seed)[0]
    draw = uniform(gen, len(t), 4, low=0.2, high=0.9)
    half = torch.arange(4) < 2
    values = torch.where(half, draw, 0)
    values = values * t / values.sum(-1, keepdim=True)
    profile = torch.where(half, 0.7, 0.7 - draw)
    x, force = ((axes * v[:, None]) @ axes.mT for v in (values, profile))
    return x, force.flatten(1)


def _spectraplex_violation(x, p):
    least = np.linalg.eigvalsh(0.5 * (x + x.T))[0]
    return above(-least, abs(np.trace(x) - p["trace"]), np.abs(x - x.T)) / p["trace"]


ROUND_CASES = {
    "GroupBall": SetCase(
        group_ball,
        lambda p: dfw.GroupBall(GROUPS, p["radius"], p["weight"]),
        None,
        lambda x, p: above((p["weight"] * _group_norms(x)).sum() / p["radius"] - 1),
        bad=(
            ({"radius": -1.0}, "radius: expected a finite number ≥ 0, got -1"),
            ({"weight": torch.ones(8, dtype=F64)}, r"weight: expected shape \(3,\) or \(B, 3\)"),
        ),
        designed=group_point,
    ),
    "Ellipsoid": SetCase(
        ellipsoid,
        lambda p: dfw.Ellipsoid(p["A"], p["centre"], p["radius"]),
        None,
        _ellipsoid_violation,
        shape=(5,),
        bad=(
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),
            ({"A": torch.ones(5, 5, dtype=F64)}, "A: expected full column rank"),
            ({"A": torch.ones(5, 4, dtype=F64)}, "A: expected 5 columns, as the variable has"),
            (
                {"A": torch.ones(3, 5, dtype=F64)},
                r"A: expected shape \(m, n\) or \(\*batch, m, n\)",
            ),
            ({"A": torch.eye(5)}, "A: is torch.float32 while|radius: is torch.float64 while"),
            ({"A": torch.full((5, 5), torch.nan, dtype=F64)}, "A: 25 of 25 values are NaN"),
        ),
        designed=ellipsoid_point,
    ),
    "NuclearBall": _schatten(1),
    "SchattenBall, p=1.5": _schatten(1.5, flat=True),
    "SchattenBall, p=3": _schatten(3.0, (3, 4), flat=True),
    "SpectralBall": _schatten(np.inf, flat=True),
    "Euclidean ball in a plane": SetCase(
        disc,
        lambda p: dfw.PlaneCut(dfw.LpBall(2, p["radius"]), p["normal"], p["level"]),
        None,
        _disc_violation,
        bad=(
            ({"level": 99.0}, "level: expected a number between .* on the set, found 99"),
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1|radius: expected a finite"),
        ),
        designed=disc_point,
    ),
    "Spectraplex": SetCase(
        lambda gen, rows: {"trace": uniform(gen, rows)},
        lambda p: dfw.Spectraplex(p["trace"]),
        None,
        _spectraplex_violation,
        shape=(4, 4),
        bad=(({"trace": -1.0}, "trace: expected numbers ≥ 0, found -1"),),
        designed=spectraplex_point,
    ),
}
