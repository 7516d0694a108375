"""The kernel of faces against the formulas it stands for."""

import pytest
import torch

from dfwlayer.constraints.balls.lp_face import lp_face
from dfwlayer.ops.kernels import faces as face_kernels
from dfwlayer.ops.scale import Scale
from helpers import F64
from kernel_cases import devices, dtypes

# NumPy, which the interpreter computes with, warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make_face(B, n, weights, radii):
    """Points of balls and gradients as at a solution, in float64."""
    x = torch.randn(B, n, dtype=F64) * (torch.rand(B, n) < 0.6)
    weight = {
        "one": torch.ones(1, dtype=F64),
        "shared": torch.rand(n, dtype=F64) + 0.2,
        "own": torch.rand(B, n, dtype=F64) + 0.2,
    }[weights]
    size = (weight * x).abs().sum(-1)
    radius = {"tight": size, "loose": 2 * size + 1, "zero": 0 * size, "shared": size.max()}[radii]
    within = 1.8 * torch.rand(B, n, dtype=F64) - 0.9
    pull = -torch.rand(B, 1, dtype=F64) - 0.1
    return weight, radius, x, pull * weight * torch.where(x != 0, x.sign(), within)


@devices
@dtypes
@pytest.mark.parametrize("radii", ["tight", "loose", "zero", "shared"])
@pytest.mark.parametrize("weights", ["one", "shared", "own"])
@pytest.mark.parametrize(("B", "n"), [(5, 1), (5, 6), (3, 100)])
def test_face(B, n, weights, radii, dtype, device):
    torch.manual_seed(0)
    given = [t.to(device, dtype) for t in make_face(B, n, weights, radii)]
    curvature = (torch.rand(B, n, dtype=F64) + 0.1).to(device, dtype)
    noise = 64 * torch.finfo(torch.float32).eps * torch.rand(n, dtype=F64).to(device, dtype)
    for scale in (None, Scale(curvature, noise)):
        got = face_kernels.face_l1(*given, scale)
        wide = None if scale is None else Scale(*(part.cpu().double() for part in scale))
        exact = lp_face(1.0, *(t.cpu().double() for t in given), wide, None)
        # with a rounded radius what is tight by construction may be so in one precision alone
        agree = (exact.multiplier > 0) == (got.multiplier.cpu() > 0)
        if radii in ("loose", "zero") or dtype == F64:
            assert agree.all()
        rows = agree.squeeze(-1)
        assert torch.equal(got.free.cpu()[rows], exact.free[rows])
        tol = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
        for name in ("multiplier", "normal", "size"):
            mine, want = getattr(got, name).cpu().double(), getattr(exact, name)
            torch.testing.assert_close(mine[rows], want[rows], **tol)
