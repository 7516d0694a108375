"""Units of programs: what tells how large x is, and what does not."""

import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.units import in_units

F64 = torch.float64


def rounded_zeros():
    """Rows of which most have limits that rounding made of zeros, beside a few of size one."""
    make = torch.Generator().manual_seed(4)
    n, k = 12, 7
    A = torch.randn(k, n, dtype=F64, generator=make)
    root = torch.randn(n, n, dtype=F64, generator=make)
    b = 1e-16 * torch.rand(k, dtype=F64, generator=make)
    b[:2] = torch.tensor([1.0, 30.0], dtype=F64)
    return root.mT @ root, torch.randn(n, dtype=F64, generator=make), A, b


def test_limits_that_rounding_made_of_zeros_do_not_tell_how_large_x_is():
    P, q, A, b = rounded_zeros()
    n = len(q)
    none, ends = torch.zeros(1, 0, n, dtype=F64), torch.full((1, n), torch.inf, dtype=F64)
    program = Program(P[None], q[None], none, none[..., 0], A[None], b[None], -ends, ends)
    _, units = in_units(program)
    assert units.x.min() > 1e-3
    assert units.x.max() < 1e3


def test_programs_with_such_limits_are_solved():
    P, q, A, b = rounded_zeros()
    plain = torch.where(b < 1e-10, 0.0, b)
    with compiled.using(False):
        own, right = (
            dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(A=A, b=side, lower=-100.0))
            for side in (b, plain)
        )
    assert own.status == right.status == dfw.Status.CONVERGED
    assert (own.x - right.x).abs().max() <= 1e-12 * right.x.abs().max()
