"""What the base class makes of a set's parameters, vertex, project, retract and face."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints import Constraint
from helpers import F64
from set_cases import CASES

ROWS = 4


def drawn(name):
    """The set on its own and bound, with a cost for each problem."""
    case, gen = CASES[name], torch.Generator().manual_seed(3)
    given = {key: value.requires_grad_() for key, value in case.parameters(gen, ROWS).items()}
    constraint = case.build(given)
    g = torch.randn(ROWS, math.prod(case.shape), generator=gen, dtype=F64)
    return constraint, constraint.bind(case.shape, F64, g.device), g


def vertices(name):
    """What only bounded sets can be asked."""
    return ("vertex",) if CASES[name].bounded else ()


def test_a_set_writes_four_methods():
    assert Constraint.__abstractmethods__ == {"vertex", "project", "retract", "face"}


@pytest.mark.parametrize("name", CASES)
def test_a_set_answers_on_its_own_as_in_a_solve(name):
    """As often as it is asked: what it keeps of one graph is gone with the next backward pass."""
    constraint, bound, g = drawn(name)
    matrices = constraint.variable_dims == 2
    shape = getattr(constraint, "shape", None) or CASES[name].shape
    own = g.reshape(ROWS, *shape) if matrices else g
    assert not constraint.bound
    assert bound.bound
    for ask in ("lowest", "project", "retract", "violation", *vertices(name)):
        want = getattr(bound, ask)(g)
        for _ in range(2):
            got = getattr(constraint, ask)(own).reshape(want.shape)
            assert torch.equal(got, want), ask
            if got.requires_grad:
                got.sum().backward()
    assert torch.equal(constraint.project(z=own).reshape(g.shape), bound.project(g))
    assert (constraint.unbounded() is None) == (bound.unbounded() is None)
    assert (constraint.atoms() is None) == (bound.atoms() is None)


@pytest.mark.parametrize("name", CASES)
def test_problems_are_taken_apart_scaled_and_replaced(name):
    _, bound, g = drawn(name)
    for ask in ("project", *vertices(name)):
        want, index = getattr(bound, ask)(g), torch.tensor([2, 0])
        part = bound.rows(index)
        if part is not None:
            assert part.bound
            torch.testing.assert_close(getattr(part, ask)(g[index]), want[index])
        factor = torch.tensor([0.5, 1.0, 2.0, 8.0], dtype=F64)
        larger = bound.scaled(factor)
        if larger is not None:  # a vertex does not depend on the length of g
            torch.testing.assert_close(
                getattr(larger, ask)(factor[:, None] * g), factor[:, None] * want
            )
        bad = torch.tensor([False, True, False, False])
        sound = bound.replace_rows(bad)
        assert sound.verified()[1] is None
        torch.testing.assert_close(getattr(sound, ask)(g)[~bad], want[~bad])


def test_a_set_of_the_user_keeps_nothing():
    """Its tensors may be changed in place, and their graph is gone after a backward pass."""
    weight = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    ball = dfw.LpBall(1, 2.0, weight)
    for _ in range(2):
        assert ball.unbounded().tolist() == [False, True, False]
        ball.atoms().scores(torch.ones(3)).sum().backward()
    with torch.no_grad():
        weight[1] = 4.0
    assert ball.unbounded() is None
    assert torch.equal(ball.vertex(torch.tensor([0.0, 9.0, 0.0])), torch.tensor([0.0, -0.5, 0.0]))
