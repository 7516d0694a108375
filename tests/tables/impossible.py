"""Random programs without a solution, of several families; each with the status it must have."""

from __future__ import annotations

import torch

from dfwlayer.solution import Status

INF = float("inf")


def _psd(n, rank, gen):
    half = torch.randn(rank, n, generator=gen, dtype=torch.float64)
    return half.mT @ half


def _blank(n):
    return {
        "P": torch.eye(n, dtype=torch.float64),
        "q": torch.zeros(n, dtype=torch.float64),
        "G": torch.zeros(0, n, dtype=torch.float64),
        "h": torch.zeros(0, dtype=torch.float64),
        "A": torch.zeros(0, n, dtype=torch.float64),
        "b": torch.zeros(0, dtype=torch.float64),
        "lower": torch.full((n,), -INF, dtype=torch.float64),
        "upper": torch.full((n,), INF, dtype=torch.float64),
    }


def _feasible_rows(n, m, gen):
    """G x ≤ h with a point inside."""
    G = torch.randn(m, n, generator=gen, dtype=torch.float64)
    x = torch.randn(n, generator=gen, dtype=torch.float64)
    return G, G @ x + torch.rand(m, generator=gen, dtype=torch.float64) + 0.1, x


def crossing_rows(n, gen):
    """a x ≤ −1 and −a x ≤ −1 among rows that do not contradict."""
    out = _blank(n)
    G, h, x = _feasible_rows(n, n, gen)
    a = torch.randn(n, generator=gen, dtype=torch.float64)
    gap = 0.1 + torch.rand((), generator=gen, dtype=torch.float64)
    out["G"] = torch.cat((G, a[None], -a[None]))
    out["h"] = torch.cat((h, (a @ x - gap)[None], (-a @ x - gap)[None]))
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    return out


def combination(n, gen):
    """Rows y ≥ 0 of which sum to 0 ≤ −1, none of which contradicts another by itself."""
    out = _blank(n)
    m = 2 * n
    G = torch.randn(m, n, generator=gen, dtype=torch.float64)
    y = 0.1 + torch.rand(m, generator=gen, dtype=torch.float64)
    last = -(y @ G)
    h = torch.randn(m, generator=gen, dtype=torch.float64)
    out["G"] = torch.cat((G, last[None]))
    out["h"] = torch.cat((h, (-(y @ h) - 0.5)[None]))
    out["P"] = _psd(n, max(1, n // 2), gen)
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    return out


def equations(n, gen):
    """A x = b with dependent rows and a b that does not follow."""
    out = _blank(n)
    k = max(1, n // 2)
    A = torch.randn(k, n, generator=gen, dtype=torch.float64)
    mix = torch.randn(k, generator=gen, dtype=torch.float64)
    b = torch.randn(k, generator=gen, dtype=torch.float64)
    out["A"] = torch.cat((A, (mix @ A)[None]))
    out["b"] = torch.cat((b, (mix @ b + 1)[None]))
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    out["P"] = torch.zeros(n, n, dtype=torch.float64)
    return out


def bounds_and_equation(n, gen):
    """Σ x = n + 1 within [0, 1]."""
    out = _blank(n)
    out["lower"], out["upper"] = torch.zeros_like(out["q"]), torch.ones_like(out["q"])
    out["A"] = torch.ones(1, n, dtype=torch.float64)
    out["b"] = torch.full((1,), n + 0.1, dtype=torch.float64)
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    return out


def row_beyond_bounds(n, gen):
    """A row that no point of the box satisfies, and large numbers."""
    out = _blank(n)
    scale = 10.0 ** float(torch.randint(-3, 4, (), generator=gen))
    a = torch.randn(n, generator=gen, dtype=torch.float64)
    out["lower"], out["upper"] = -scale * torch.ones(n), scale * torch.ones(n)
    out["lower"], out["upper"] = out["lower"].double(), out["upper"].double()
    out["G"], out["h"] = a[None], (-1.05 * scale * a.abs().sum())[None]
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    out["P"] = _psd(n, n, gen)
    return out


def ray(n, gen):
    """A linear program whose cost falls along a direction that no row ends."""
    out = _blank(n)
    d = torch.randn(n, generator=gen, dtype=torch.float64)
    G, _, x = _feasible_rows(n, 2 * n, gen)
    G = G - torch.outer(1.01 * (G @ d).clamp_min(0) / (d @ d), d)
    out["G"], out["h"] = G, G @ x + torch.rand(2 * n, generator=gen, dtype=torch.float64)
    q = torch.randn(n, generator=gen, dtype=torch.float64)
    out["q"] = q - ((q @ d + 1) / (d @ d)) * d
    out["P"] = torch.zeros(n, n, dtype=torch.float64)
    return out


def flat_direction(n, gen):
    """P has a null space along which q falls; equations leave it open."""
    out = _blank(n)
    n_eq = max(1, n // 4)
    d = torch.randn(n, generator=gen, dtype=torch.float64)
    d = d / d.norm()
    strip = torch.eye(n, dtype=torch.float64) - torch.outer(d, d)
    out["P"] = strip @ _psd(n, n, gen) @ strip
    A = torch.randn(n_eq, n, generator=gen, dtype=torch.float64) @ strip
    out["A"], out["b"] = A, A @ torch.randn(n, generator=gen, dtype=torch.float64)
    q = torch.randn(n, generator=gen, dtype=torch.float64)
    out["q"] = q - (q @ d + 0.5) * d
    return out


def open_bound(n, gen):
    """A coordinate without an upper bound, in which f is linear and falls."""
    out = _blank(n)
    j = int(torch.randint(n, (), generator=gen))
    out["P"] = torch.diag(torch.rand(n, generator=gen, dtype=torch.float64) + 0.1)
    out["P"][j, j] = 0
    out["q"] = torch.randn(n, generator=gen, dtype=torch.float64)
    out["q"][j] = -0.01 - torch.rand((), generator=gen, dtype=torch.float64)
    out["lower"] = -torch.ones(n, dtype=torch.float64)
    out["upper"] = torch.ones(n, dtype=torch.float64)
    out["upper"][j] = INF
    return out


def cone(n, gen):
    """x ≥ 0 with rows through 0, and a cost that falls along a ray of that cone."""
    out = _blank(n)
    d = torch.rand(n, generator=gen, dtype=torch.float64)
    G = torch.randn(n, n, generator=gen, dtype=torch.float64)
    G = G - torch.outer(1.01 * (G @ d).clamp_min(0) / (d @ d), d)
    out["G"], out["h"] = G, torch.zeros(n, dtype=torch.float64)
    out["lower"] = torch.zeros(n, dtype=torch.float64)
    q = torch.randn(n, generator=gen, dtype=torch.float64)
    out["q"] = q - ((q @ d + 1) / (d @ d)) * d
    out["P"] = torch.zeros(n, n, dtype=torch.float64)
    return out


FAMILIES = {
    make.__name__: (make, status)
    for status, makers in (
        (
            Status.INFEASIBLE,
            (crossing_rows, combination, equations, bounds_and_equation, row_beyond_bounds),
        ),
        (Status.UNBOUNDED, (ray, flat_direction, open_bound, cone)),
    )
    for make in makers
}
