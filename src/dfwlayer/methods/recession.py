"""Whether a function falls for ever over a set: a direction that says so, and its proof.

A convex quadratic f has no minimum over a polyhedron if, and only if, there is a direction d that
never leaves it, along which f is straight, ∇²f d = 0, and falls, ⟨∇f, d⟩ < 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.region import Region
from dfwlayer.methods.base import Problem
from dfwlayer.methods.interior_point import ITERATIONS, interior_point
from dfwlayer.methods.region_face import on_face
from dfwlayer.objectives.model import Model

__all__ = ["falls_for_ever", "is_far_out"]

STIFF = (1e4, 1e8)  # weights of ⟨d, ∇²f d⟩ against ⟨∇f, d⟩ that are tried, both of size one
NONE = 1e-3  # of the largest entry of d, below which an entry is none
FAR = 1e4  # times the size of x, where a function that is not quadratic still has to be straight
FAR_OUT = 1e6  # times what ∇f(0) and the curvature of f make one expect, beyond which x is suspect
STRAIGHT = 1e-6  # relative change of its slope on the way there


@torch.no_grad()
def falls_for_ever(problem: Problem, x: Tensor, asked: Tensor) -> Tensor:  # (...)
    """Mask of the problems among those asked for (...) for which a direction was found."""
    flat = x.reshape(-1, x.shape[-1])
    index = asked.reshape(-1).nonzero().squeeze(-1)
    found = torch.zeros(len(flat), dtype=torch.bool, device=x.device)
    region = problem.constraint.region(flat)
    model = problem.objective.model(x)
    if region is None or model is None:
        return found.reshape(asked.shape)
    eps = torch.finfo(x.dtype).eps
    model = model.rows(index).dense()
    # along d the slope is the same everywhere; that at zero has no terms of the size of x
    cone, slope = region.rows(index).directions(), model.slope
    for stiffness in STIFF:
        d = _steepest(model, slope, cone, stiffness)
        sure = _is_proof(model, slope, cone, d, eps)
        if not problem.objective.quadratic:
            whole = torch.zeros_like(flat, dtype=torch.double).index_copy(0, index, d)
            sure = sure & _is_straight(problem, x, whole.to(x.dtype).reshape(x.shape))[index]
        found[index] = found[index] | sure
    return found.reshape(asked.shape)


@torch.no_grad()
def is_far_out(problem: Problem, x: Tensor) -> Tensor:  # (...)
    """Mask of the points of sets without a bound so far out that f may fall for ever.

    There the rounding of ∇f hides whether it does. A quadratic f with a minimum that is badly
    conditioned may have it there, too.
    """
    if problem.unbounded is None or not problem.objective.quadratic:
        return torch.zeros_like(x[..., 0], dtype=torch.bool)
    slope = problem.objective.gradient(torch.zeros_like(x)).abs().amax(-1)
    curvature = problem.objective.scale(x, x).curvature.amax(-1)
    far: Tensor = curvature * x.abs().amax(-1) > FAR_OUT * slope
    return far & (slope > 0)


def _steepest(model: Model, slope: Tensor, cone: Region, stiffness: float) -> Tensor:  # (B, n)
    """A direction in the cone, with entries up to 1, along which f falls and hardly bends.

    It minimises ⟨g, d⟩ + c/2 ⟨d, Hd⟩ for a large c. What little Hd is left is then taken away by
    the entries that are neither 0 nor ±1, as long as these stay where they are.
    """
    H = model.matrix.expand(len(slope), *model.matrix.shape[-2:])
    size = H.abs().amax((-2, -1)).clamp_min(1e-300)
    H = H / size[:, None, None]
    g = slope / slope.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    stiff = Model(stiffness * H, g, factored=False)
    limit = torch.full((len(g),), ITERATIONS, device=g.device)
    pair, _ = interior_point(stiff, cone, torch.ones_like(g), limit)
    exact, settled = on_face(stiff, cone, pair)
    d = torch.where(settled.unsqueeze(-1), exact, pair.x).nan_to_num(0.0)
    largest = d.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    d = d / largest
    d = torch.where(d.abs() <= NONE, 0, torch.where(d.abs() >= 1 - NONE, d.sign(), d))
    free = (d != 0) & (d.abs() < 1)
    rows = torch.cat((H, cone.slopes), -2)
    part = rows * free.unsqueeze(-2)
    for _ in range(2):  # the second time for what rounding left
        off = rows @ d.unsqueeze(-1)
        d = d - (torch.linalg.pinv(part, rtol=1e-11) @ off).squeeze(-1) * free
    return torch.minimum(torch.maximum(d, cone.lower), cone.upper)


def _is_proof(model: Model, slope: Tensor, cone: Region, d: Tensor, eps: float) -> Tensor:  # (B,)
    """Whether d is in the cone, and H d = 0 and ⟨g, d⟩ < 0 beyond rounding."""
    H = model.matrix
    rounding = 64 * eps * d.shape[-1] ** 0.5
    long, size = d.abs(), H.abs()
    bend = (H @ d.unsqueeze(-1)).squeeze(-1).abs()
    terms = (size @ long.unsqueeze(-1)).squeeze(-1)
    # an entry of H that is exact may be small; what is zero is so to the rounding of the largest
    largest = size.amax((-2, -1)).reshape(-1, 1) * long.amax(-1, keepdim=True)
    straight: Tensor = (bend <= rounding * torch.maximum(terms, largest)).all(-1)
    off = (cone.slopes @ d.unsqueeze(-1)).squeeze(-1).abs()
    wide = (cone.slopes.abs() @ long.unsqueeze(-1)).squeeze(-1)
    inside: Tensor = (off <= rounding * wide).all(-1)
    inside = inside & ((d >= cone.lower) & (d <= cone.upper)).all(-1)
    falls: Tensor = (slope * d).sum(-1) < -rounding * (slope.abs() * long).sum(-1)
    return straight & inside & falls


def _is_straight(problem: Problem, x: Tensor, d: Tensor) -> Tensor:  # (B,)
    """Whether the slope of f along d is the same far away."""
    objective = problem.objective
    size = x.abs().amax(-1, keepdim=True).clamp_min(1)
    here, there = ((objective.gradient(x + t * d) * d).sum(-1) for t in (0 * size, FAR * size))
    near: Tensor = (here - there).abs() <= STRAIGHT * here.abs()
    return near.reshape(-1)
