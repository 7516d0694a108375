"""LU factors of several matrices are right whatever the number of threads.

MKL's are not for matrices of some 150 rows and more, where PyTorch hands a batch to its threads.
"""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.ops.matrices import lu_factor, lu_inverse, lu_solved
from helpers import F64, draw

N = 200


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(4))
def test_factors_solutions_and_inverses_of_a_batch(seed):
    A, b = draw(4, N, N, seed=seed), draw(4, N, 2, seed=seed + 10)
    eye = torch.eye(N, dtype=F64)
    x = torch.linalg.lu_solve(*lu_factor(A), b)
    for found, wanted in ((A @ x, b), (A @ lu_solved(A, b), b), (A @ lu_inverse(A), eye)):
        torch.testing.assert_close(found, wanted.expand_as(found), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("of_matrix", "of_right"),
    [((), (3,)), ((1,), (3,)), ((2, 1), (2, 3)), ((3,), ()), ((3,), (1,)), ((), ()), ((0,), (0,))],
)
@pytest.mark.parametrize("n", [3, 70])
def test_batches_are_broadcast(of_matrix, of_right, n):
    A, b = draw(*of_matrix, n, n), draw(*of_right, n, 2, seed=1)
    found = lu_solved(A, b)
    wanted = torch.linalg.inv(A) @ b
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    A, b = (t.requires_grad_() for t in (draw(2, 5, 5), draw(2, 5, 2, seed=1)))
    assert torch.autograd.gradcheck(lu_solved, (A, b))


def test_singular_matrices_raise_where_they_must_not_be():
    for n in (3, 70):
        A, b = torch.zeros(2, n, n, dtype=F64), torch.ones(2, n, 1, dtype=F64)
        for call in (lambda *args, **how: lu_inverse(args[0], **how), lu_solved):
            with pytest.raises(torch.linalg.LinAlgError):
                call(A, b)
            assert not bool(torch.isfinite(call(A, b, sound=False)).all())


@pytest.mark.parametrize("mode", ["off", "wait"])
def test_problems_of_a_batch_are_those_alone(mode):
    row, q = draw(N), draw(4, N, seed=2).requires_grad_()
    v = torch.linspace(-1, 1, N, dtype=F64)
    with compiled.using(mode):
        sol = dfw.solve(dfw.Quadratic(None, q), dfw.Hyperplane(row, 1.0))
        alone = [dfw.solve(dfw.Quadratic(None, one), dfw.Hyperplane(row, 1.0)) for one in q]
    torch.testing.assert_close(sol.x, torch.stack([one.x for one in alone]), rtol=0, atol=1e-12)
    (own,) = torch.autograd.grad((sol.x @ v).sum(), q)
    torch.testing.assert_close(own, (row * (row @ v) / (row @ row) - v).expand_as(own))
