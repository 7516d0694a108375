"""Thresholds of deployed layers against bisection, also next to bounds that are far away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer.constraints.plain.thresholds import between
from dfwlayer.deploy import export


def bisected(z, a, lower, upper, total) -> np.ndarray:
    """clip(z − θa, l, u) with ⟨a, x⟩ = b, in the longest numbers that there are."""
    z, a, lower, upper = (np.asarray(part, dtype=np.longdouble) for part in (z, a, lower, upper))
    low, high = np.longdouble(-1e25), np.longdouble(1e25)
    for _ in range(300):
        middle = (low + high) / 2
        above = (a * np.clip(z - middle * a, lower, upper)).sum() > total
        low, high = (middle, high) if above else (low, middle)
    return np.clip(z - low * a, lower, upper)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 9),
    spread=st.integers(0, 4),
    far=st.sampled_from([1.0, 1e3, 1e8, 1e20, np.inf]),
    equal=st.booleans(),
)
def test_a_box_cut_by_a_plane(seed, n, spread, far, equal) -> None:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n) * 10 ** rng.uniform(-3, 4)
    a = rng.normal(size=n) * 10 ** (spread * rng.random(n))
    if equal:  # two coordinates that meet their bounds together
        z[:2], a[:2] = z[0], a[0]
    lower, upper = -rng.random(n) * far, rng.random(n) * far
    if equal:
        lower[:2], upper[:2] = lower[0], upper[0]
    low, high = np.maximum(lower, -3), np.minimum(upper, 3)
    total = float((a * (low + rng.random(n) * (high - low))).sum())
    cut = dfw.PlaneCut(dfw.Box(*map(torch.tensor, (lower, upper))), torch.tensor(a), total)
    x = dfw.SetLayer(cut).deploy()(-torch.tensor(z))
    size = 1 + np.abs(z).max() + abs(total)
    np.testing.assert_allclose(
        x, bisected(z, a, lower, upper, total).astype(float), rtol=0, atol=1e-13 * size
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9), far=st.sampled_from([0.5, 1e3, 1e20]))
def test_an_l1_ball_in_a_box_that_need_not_hold_the_origin(seed, n, far) -> None:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n) * 10 ** rng.uniform(-2, 3)
    weight = rng.random(n) + 0.01
    lower = rng.normal(size=n)
    upper = lower + rng.random(n) * far
    nearest = np.clip(0.0, lower, upper)
    total = float((weight * np.abs(nearest)).sum()) + rng.random()
    made = dfw.L1Box(total, *map(torch.tensor, (weight, lower, upper)))
    x = dfw.SetLayer(made).deploy()(-torch.tensor(z)).numpy()
    direct = np.clip(z, lower, upper)
    if (weight * np.abs(direct)).sum() > total:
        away = np.where(z < nearest, nearest - lower, upper - nearest)
        spent = total - (weight * np.abs(nearest)).sum()
        moved = bisected(np.abs(z - nearest), weight, np.zeros(n), away, spent)
        direct = nearest + np.sign(z - nearest) * moved.astype(float)
    np.testing.assert_allclose(x, direct, rtol=0, atol=1e-12 * (1 + np.abs(z).max() + total))


def test_totals_out_of_reach_leave_all_bounds_met() -> None:
    z, upper = torch.randn(3, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    lower = -upper
    for slope in (None, torch.ones(4, dtype=torch.float64)):
        for total, bound in ((9.0, upper), (-9.0, lower)):
            x = between(z, slope, lower, upper, z.new_tensor([total]))
            torch.testing.assert_close(x, bound.expand_as(x), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "made",
    [
        dfw.L1Box(1.0, torch.rand(6) + 0.1, -torch.rand(6), torch.rand(6)),
        dfw.PlaneCut(dfw.Box(-torch.rand(6), torch.rand(6)), torch.randn(6), 0.0),
    ],
    ids=lambda made: type(made).__name__,
)
def test_closed_forms_are_few_operators(made, tmp_path) -> None:
    """One of them takes about half a microsecond in a runtime, whatever it computes."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    assert export(dfw.SetLayer(made), tmp_path / "set.onnx", torch.randn(3, 6)).passed
    options = runtime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "simplified.onnx")
    options.log_severity_level = 3  # without the remark that such a file is for this machine
    runtime.InferenceSession(tmp_path / "set.onnx", options)
    assert len(onnx.load(tmp_path / "simplified.onnx").graph.node) <= 95
