"""What an actor's gradient modes do to a gradient, against the loss they stand for."""

from __future__ import annotations

import pytest
import torch

from dfwlayer import DFWLayer
from dfwlayer.integrations.actor_gradients import Exact, Penalty, Soft, as_mode

LAYER = DFWLayer(p=1)


def problem():
    torch.manual_seed(0)
    wanted = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(16, 4, dtype=torch.float64)
    return wanted, LAYER(None, -wanted, radius=1.5), v


def gradient(loss, wanted, **kwargs):
    return torch.autograd.grad(loss, wanted, **kwargs)[0]


@pytest.mark.parametrize("mode", [Exact(), Penalty(0.7), Soft(0.3), Soft(1.0), Penalty(0.0)])
def test_the_action_is_the_nearest_one_to_the_bit(mode):
    wanted, nearest, _ = problem()
    assert torch.equal(mode(wanted, nearest), nearest)


def test_exact_is_the_derivative_of_the_projection():
    wanted, nearest, v = problem()
    want = gradient((nearest * v).sum(), wanted, retain_graph=True)
    assert torch.equal(gradient((Exact()(wanted, nearest) * v).sum(), wanted), want)


def test_a_penalty_is_that_of_the_mean_squared_distance():
    wanted, nearest, v = problem()
    penalty = 0.7 * 0.5 * (wanted - nearest).square().sum(-1).mean()
    want = gradient((nearest * v).sum() + penalty, wanted, retain_graph=True)
    found = gradient((Penalty(0.7)(wanted, nearest) * v).sum(), wanted, retain_graph=True)
    torch.testing.assert_close(found, want)
    exact = gradient((nearest * v).sum(), wanted)
    assert not torch.allclose(found, exact)


def test_soft_mixes_the_exact_gradient_and_the_identity():
    wanted, nearest, v = problem()
    mixed = 0.7 * nearest + 0.3 * wanted
    want = gradient((mixed * v).sum(), wanted, retain_graph=True)
    found = gradient((Soft(0.3)(wanted, nearest) * v).sum(), wanted, retain_graph=True)
    torch.testing.assert_close(found, want)
    straight = gradient((Soft(1.0)(wanted, nearest) * v).sum(), wanted)
    torch.testing.assert_close(straight, v)


def test_at_a_vertex_only_the_exact_gradient_is_zero():
    wanted = torch.tensor([[3.0, 0.2]], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    found = {}
    for name in ("exact", "penalty", "soft"):
        nearest = LAYER(None, -wanted, radius=1.0)
        found[name] = gradient((as_mode(name)(wanted, nearest) * v).sum(), wanted)
    assert torch.equal(found["exact"], torch.zeros(1, 2, dtype=torch.float64))
    torch.testing.assert_close(found["penalty"], wanted.detach() - torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(found["soft"], v / 2)


def test_gradients_can_be_differentiated():
    wanted, nearest, v = problem()
    u = torch.randn_like(v)

    def twice(loss):
        first = gradient(loss, wanted, create_graph=True)
        return gradient((first * u).sum(), wanted, retain_graph=True)

    penalty = 0.35 * (wanted - nearest).square().sum(-1).mean()
    pulled = (Penalty(0.7)(wanted, nearest) * v).sum()
    torch.testing.assert_close(twice(pulled), twice((nearest * v).sum() + penalty))
    mixed = 0.7 * nearest + 0.3 * wanted
    carried = mixed + (nearest - mixed).detach()  # the value of one, the gradient of the other
    soft = Soft(0.3)(wanted, nearest)
    torch.testing.assert_close(
        twice((soft * v).square().sum()), twice((carried * v).square().sum())
    )


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="weight: expected a finite number ≥ 0, got -1"):
        Penalty(-1)
    with pytest.raises(ValueError, match=r"share: expected a number in \[0, 1\], got 2"):
        Soft(2)
    for given in ("hard", None, 3, Soft):
        with pytest.raises(ValueError, match="gradient: expected one of"):
            as_mode(given)
