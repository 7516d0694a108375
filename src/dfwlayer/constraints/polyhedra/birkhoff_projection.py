"""Projection onto matrices with given sums, and repairs of nearly doubly stochastic ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.polyhedra.assignment import assign, potentials
from dfwlayer.ops.rows import or_one

__all__ = ["balanced", "filled_up", "laplacian_solve", "project_birkhoff", "project_sums"]

STEPS = 100  # most Newton steps; about 10 are needed
SHORTER = 30  # times a step may be halved
FAR = 8  # spread of the entries over n, beyond which a permutation comes first
PASSES = 40  # most times it does; each takes the rounding of the one before as its size
ROUNDING = 4  # units in the last place, times n
LEAST = 1e-12  # shift of a singular matrix, relative to its diagonal
BALANCING = 3  # Newton steps for row and column sums that are nearly 1


def laplacian_solve(
    weight: Tensor,  # w ≥ 0, (..., m, k)
    r: Tensor,  # (..., m), for the rows
    s: Tensor,  # (..., k), for the columns
    shift: Tensor | float = 0.0,  # (..., 1)
) -> tuple[Tensor, Tensor]:
    """a (..., m), b (..., k) with Σ_j w_ij (a_i + b_j) = r_i and Σ_i w_ij (a_i + b_j) = s_j.

    For each part of the graph with the edges w > 0, a solution is determined up to a shift of a
    against b; a small ``shift`` of the matrix's diagonal, never quite zero, chooses one.
    """
    m = weight.shape[-2]
    rows, columns = weight.sum(-1), weight.sum(-2)
    top = torch.cat((torch.diag_embed(rows), weight), -1)
    low = torch.cat((weight.mT, torch.diag_embed(columns)), -1)
    matrix = torch.cat((top, low), -2)
    largest = torch.cat((rows, columns), -1).amax(-1, keepdim=True)
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift + LEAST * largest.clamp_min(LEAST))
    factor, _ = torch.linalg.cholesky_ex(matrix)
    found = torch.cholesky_solve(torch.cat((r, s), -1).unsqueeze(-1), factor).squeeze(-1)
    return found[..., :m], found[..., m:]


def project_birkhoff(z: Tensor) -> Tensor:  # (B, n, n) -> (B, n, n)
    """argmin ½‖X − Z‖² over X ≥ 0 with row and column sums 1, in double precision.

    Z may be replaced by Z − u_i − v_j for any u, v. Where it is far out, those of the permutation
    it points to leave small numbers where it matters; see `_nearer`.
    """
    n = z.shape[-1]
    z = z.double()
    for _ in range(PASSES):
        far = (z.amax((-2, -1)) - z.amin((-2, -1)) > FAR * n).nonzero().squeeze(-1)
        if len(far) == 0:
            break
        z = z.index_copy(0, far, _nearer(z[far]))
    one = z.new_ones(1, n)
    return project_sums(z, one, one)


def project_sums(
    z: Tensor,  # (B, m, k)
    r: Tensor,  # ≥ 0, (·, m), for the rows
    s: Tensor,  # ≥ 0, (·, k), for the columns, of the same total; all of size one
) -> Tensor:  # (B, m, k)
    """argmin ½‖X − Z‖² over X ≥ 0 with these row and column sums, in double precision.

    X = (Z − u_i − v_j)₊ with the u, v that minimise the convex φ = ½‖(Z − u_i − v_j)₊‖² + ⟨r, u⟩ +
    ⟨s, v⟩, whose gradient is what the sums lack. φ is quadratic as long as the support stays, so
    Newton steps, shortened where φ does not fall, end in one that is exact. Where Z is far out they
    may end before that, and the sums are missed.
    """
    z = z.double()
    m, k = z.shape[-2:]
    # the projection onto the matrices with these sums, of any sign
    rows, columns = z.sum(-1) - r, z.sum(-2) - s
    u, v = rows / k, (columns - columns.mean(-1, keepdim=True)) / m
    size = (z.amax((-2, -1)) - z.amin((-2, -1))).clamp_min(1)
    sums = r.double(), s.double()
    _, u, v = _newton(z, u, v, size, sums)
    # seen from there, what is left is of the size of X
    none = torch.zeros_like(u), torch.zeros_like(v)
    x, _, _ = _newton(_less(z, u, v), *none, torch.ones_like(size), sums)
    # what rounding alone has left above zero is not
    return torch.where(x > ROUNDING * max(m, k) * torch.finfo(x.dtype).eps, x, 0)


def _nearer(z: Tensor) -> Tensor:  # (B, n, n) -> (B, n, n)
    """Z − u_i − v_j with the potentials of the permutation σ for which ⟨Z, X⟩ is largest.

    It is zero on σ and not positive elsewhere, both up to a rounding r. If x_ij > 0, the support
    of X has a permutation π through ij, and by the optimality of X and Σ_π (u + v) = Σ_σ (u + v)
    the sum of Z over π is at most n below that over σ. So entries below −n(1 + 2r) play no part.
    """
    n = z.shape[-1]
    z = z / 2  # differences stay within range
    columns = assign(-z)
    u, v = potentials(-z, columns)
    rest = 2 * _less(z, -u, -v)
    chosen = rest.gather(-1, columns.unsqueeze(-1)).abs().amax((-2, -1), keepdim=True)
    rounding = torch.maximum(chosen, rest.amax((-2, -1), keepdim=True))
    return torch.maximum(rest, -2 * n * (1 + 2 * rounding))


def _less(z: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Z − u_i − v_j, exact where it is small, as the rounding of Z − u_i is added at the end."""
    u, v = u.unsqueeze(-1), v.unsqueeze(-2)
    first = z - u
    back = first - z
    lost = (z - (first - back)) - (u + back)
    return (first - v) + lost


def _newton(
    z: Tensor, u: Tensor, v: Tensor, size: Tensor, sums: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """X, u and v for a Z that is not far out, beginning somewhere.

    Args:
        z: (B, m, k).
        u: (B, m).
        v: (B, k).
        size: (B,), of the numbers that X is a difference of, for its rounding.
        sums: Of rows (·, m) and columns (·, k).

    """
    spread = (z.amax((-2, -1)) - z.amin((-2, -1))).clamp_min(1)
    eps = torch.finfo(z.dtype).eps
    x, value, noise, r, s = _dual(z, u, v, sums)
    for _ in range(STEPS):
        lacking = torch.maximum(r.abs().amax(-1), s.abs().amax(-1))
        going = lacking > 4 * eps * size
        if not bool(going.any()):
            break
        # where the support falls into parts, the shift makes potentials move by about the spread
        shift = (0.1 * lacking / spread).clamp(max=0.1).unsqueeze(-1)
        du, dv = laplacian_solve((x > 0).double(), -r, -s, shift)
        slope = (r * du).sum(-1) + (s * dv).sum(-1)
        length = torch.where(going, 1.0, 0.0).double()
        for _ in range(SHORTER):
            step = length.unsqueeze(-1)
            trial = _dual(z, u + step * du, v + step * dv, sums)
            high = trial[1] > value + 1e-4 * length * slope + noise
            if not bool(high.any()):
                break
            length = torch.where(high, 0.5 * length, length)
        u, v = u + step * du, v + step * dv
        x, value, noise, r, s = trial
    return x, u, v


def _dual(
    z: Tensor, u: Tensor, v: Tensor, sums: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X, φ, the rounding of φ, and what the sums of rows and columns lack."""
    r, s = sums
    x = (z - u.unsqueeze(-1) - v.unsqueeze(-2)).clamp_min(0)
    square, linear = 0.5 * (x * x).sum((-2, -1)), torch.cat((r * u, s * v), -1)
    noise = 8 * torch.finfo(z.dtype).eps * (square + linear.abs().sum(-1))
    return x, square + linear.sum(-1), noise, r - x.sum(-1), s - x.sum(-2)


def balanced(x: Tensor) -> Tensor:  # (B, n, n) -> (B, n, n)
    """X_ij (1 + a_i + b_j) with row and column sums 1, for X ≥ 0 whose sums are nearly 1.

    Newton steps for the factors, so that zeros stay; what does not settle is left to `filled_up`.
    """
    for _ in range(BALANCING):
        r, s = 1 - x.sum(-1), 1 - x.sum(-2)
        a, b = laplacian_solve(x, r, s)
        x = x * (1 + a.unsqueeze(-1) + b.unsqueeze(-2)).clamp(0.5, 2)
    return x


def filled_up(
    x: Tensor,  # ≥ 0, (..., m, k)
    r: Tensor | float = 1.0,  # for the rows, (..., m, 1)
    s: Tensor | float = 1.0,  # for the columns, (..., 1, k), of the same total
) -> Tensor:  # (..., m, k)
    """A matrix ≥ 0 with these sums close to X, differentiably.

    Rows, then columns, whose sum is too large are scaled down, and a matrix of rank one, ≥ 0, makes
    up for what is missing. The idea is from Altschuler, Weed and Rigollet (2017).
    """
    x = x * _down(x.sum(-1, keepdim=True), r)
    x = x * _down(x.sum(-2, keepdim=True), s)
    rows = (r - x.sum(-1, keepdim=True)).clamp_min(0)
    columns = (s - x.sum(-2, keepdim=True)).clamp_min(0)
    return x + rows * columns / or_one(columns.sum(-1, keepdim=True))


def _down(total: Tensor, most: Tensor | float) -> Tensor:
    """The factor that brings sums down to what they may be."""
    over = total > most
    return torch.where(over, most / torch.where(over, total, 1), 1)
