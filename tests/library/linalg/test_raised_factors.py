"""Factors of matrices that rounding made indefinite: each for itself, in a batch as alone."""

import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.ops.matrices import raised_cholesky
from helpers import F64


def test_a_matrix_is_raised_by_what_it_needs_itself():
    """Least eigenvalues from 1e-3 to −1e-3: twice as much as is missing is more than enough."""
    make = torch.Generator().manual_seed(3)
    least = torch.cat([torch.tensor([1e-3, 0.0]), -(10.0 ** torch.arange(-15, -2))]).double()
    turn = torch.linalg.qr(torch.randn(len(least), 4, 4, generator=make, dtype=F64)).Q
    values = torch.cat([torch.ones(len(least), 3, dtype=F64), least[:, None]], -1)
    matrices = turn @ torch.diag_embed(values) @ turn.mT
    size = matrices.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    factors, failed = raised_cholesky(matrices, size, 1e-13)
    assert not failed.any()
    for i, matrix in enumerate(matrices):
        alone, _ = raised_cholesky(matrix, size[i], 1e-13)
        torch.testing.assert_close(factors[i], alone, rtol=1e-6, atol=1e-9)
        more = (factors[i] @ factors[i].mT - matrix).abs().amax()
        assert more <= 200 * max(-float(least[i]), 1e-14)
    hopeless = torch.diag_embed(torch.tensor([[1.0, -1e6], [1.0, 1.0]], dtype=F64))
    assert raised_cholesky(hopeless, 1.0, 1e-12)[1].tolist() == [True, False]


def test_singular_programs_are_certified_beside_each_other():
    """P of rank two as float32 rounds it, rows alone for limits, as many problems as make a batch.

    Some of these P have an eigenvalue of −1e-8, others do not, and so they need other shifts.
    """
    make = torch.Generator().manual_seed(5)
    count, n = 24, 5
    root = torch.randn(count, 2, n, generator=make)
    P, q = root.mT @ root, torch.randn(count, n, generator=make)
    G = (
        torch.cat([torch.eye(n), -torch.eye(n)])
        @ torch.linalg.qr(torch.randn(n, n, generator=make)).Q
    )
    rows = dfw.Polyhedron(G=G, h=torch.ones(2 * n))
    with compiled.using(False):
        together = dfw.solve(dfw.Quadratic(P, q), rows)
        assert together.converged.all()
        assert (together.gap <= 1e-5 * together.value.abs()).all()
