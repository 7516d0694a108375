"""Files of deployed layers: recorded, exported, and run in a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfwlayer as dfw
from dfwlayer.deploy import Call, Report, export

SETS = {
    "l1": dfw.LpBall(1, 0.8, torch.tensor([0.5, 1.0, 2.0, 0.0, 1.0, 0.3])),
    "l2 around a centre": dfw.LpBall(2, 0.8, centre=torch.ones(6)),
    "simplex": dfw.Simplex(),
    "l1 in a box": dfw.L1Box(1.0, None, -0.4, 0.4),
    "budget": dfw.PlaneCut(dfw.Box(0.0, 0.5)),
    "nuclear": dfw.NuclearBall(1.0, (2, 3)),
    "product": dfw.Product([dfw.Simplex(), dfw.Box(-1.0, 1.0)], [4, 2]),
}

# what a robot's computer would run: NumPy and onnxruntime
ALONE = """
import json, sys, time
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options)
given = dict(np.load(sys.argv[2]))
(x,) = session.run(None, given)
one = {name: value[:1] for name, value in given.items()}
times = []
for _ in range(3000):
    begin = time.perf_counter()
    session.run(None, one)
    times.append(time.perf_counter() - begin)
np.save(sys.argv[3], x)
print(json.dumps({"torch": "torch" in sys.modules, "fastest": min(times)}))
"""


@pytest.mark.parametrize("name", SETS)
def test_a_recording_is_not_of_one_problem(name: str) -> None:
    model = dfw.SetLayer(SETS[name]).deploy(max_steps=5)
    q = 2 * torch.randn(3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that constants of the set are constants
        traced = torch.jit.trace(model, (q,))
    exported = torch.export.export(model, (q,), dynamic_shapes=(({0: torch.export.Dim("b")},),))
    for count in (1, 5):
        other = 2 * torch.randn(count, 6)
        torch.testing.assert_close(traced(other), model(other))
        torch.testing.assert_close(exported.module()(other), model(other))


class Policy(nn.Module):
    """A network, and a limit on the power of what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 6))
        self.limit = dfw.DFWLayer(1)

    def forward(self, observation: Tensor, velocity: Tensor) -> Tensor:
        action: Tensor = self.limit(None, -self.network(observation), velocity, 0.7)
        return action


@pytest.fixture(scope="module")
def projection(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Call]:
    """The weighted l1 projection as an ONNX file, and the inputs it was checked on."""
    pytest.importorskip("onnxruntime", reason="needs the extra: pip install 'dfwlayer[export]'")
    gen = torch.Generator().manual_seed(2)

    def draw(count: int) -> Call:
        weight, radius = torch.rand(count, 6, generator=gen), torch.rand(count, generator=gen)
        q = 2 * torch.randn(count, 6, generator=gen)
        return Call((None, q, weight + 0.05), {"radius": radius + 0.1})

    tried = draw(10_000)
    path = tmp_path_factory.mktemp("onnx") / "l1.onnx"
    report = export(dfw.DFWLayer(1), path, draw(3), samples=lambda _: tried)
    return report, tried


def test_an_onnx_file_answers_as_the_layer_does(projection: tuple[Report, Call]) -> None:
    report, _ = projection
    assert report.passed, report
    assert report.count == 10_000
    assert report.error <= 1e-5
    assert report.violation is not None
    assert report.violation <= 2 * torch.finfo(torch.float32).eps
    assert "passed" in str(report)


def test_the_file_runs_without_torch_and_quickly(
    projection: tuple[Report, Call], tmp_path: Path
) -> None:
    report, call = projection
    inputs, outputs = tmp_path / "in.npz", tmp_path / "out.npy"
    names = ("q", "weight", "radius")
    np.savez(inputs, **{k: v.numpy() for k, v in zip(names, call.tensors, strict=True)})
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(report.path), str(inputs), str(outputs)],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(ran.stdout)
    assert not told["torch"]
    assert told["fastest"] <= 50e-6
    x, (q, weight, radius) = np.load(outputs), (t.numpy() for t in call.tensors)
    want = dfw.DFWLayer(1)(
        None, *(torch.from_numpy(a) for a in (q, weight)), torch.from_numpy(radius)
    )
    np.testing.assert_allclose(x, want, atol=1e-5)
    size = np.abs(weight.astype(np.float64) * x).sum(-1)
    assert (size <= radius.astype(np.float64) * (1 + 2 * np.finfo(np.float32).eps)).all()


def test_a_policy_is_exported_with_its_limit(tmp_path: Path) -> None:
    def violation(x: Tensor, _: Tensor, velocity: Tensor) -> Tensor:
        return ((velocity.double() * x.double()).abs().sum(-1) - 0.7).clamp_min(0)

    inputs = torch.randn(3, 9), torch.randn(3, 6)
    path = tmp_path / "policy.pt2"
    report = export(Policy(), path, inputs, format="export", violation=violation, count=500)
    assert report.passed, report
    assert report.violation is not None
    assert torch.export.load(path).module()(torch.randn(2, 9), torch.randn(2, 6)).shape == (2, 6)


def test_a_file_that_does_not_answer_as_the_model_fails(tmp_path: Path) -> None:
    def draw(count: int) -> Call:
        P = torch.diag(torch.logspace(0, 4, 6)).expand(count, 6, 6)
        return Call((P, torch.randn(count, 6)), {"radius": 1.0})

    layer, path = dfw.DFWLayer(1), tmp_path / "few.pt2"
    few = export(layer, path, draw(3), max_steps=1, format="export", samples=draw, count=20)
    assert not few.passed
    assert few.violation == 0
    assert "FAILED" in str(few)


class Plain(nn.Module):
    """A model that calls its input as the file would call its output."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = dfw.SetLayer(dfw.Simplex())

    def forward(self, x: Tensor) -> Tensor:
        point: Tensor = self.limit(x)
        return point


def test_an_input_may_be_called_x(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs dfwlayer[export]")
    path = tmp_path / "plain.onnx"
    assert export(Plain(), path, torch.randn(2, 6)).passed
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [given.name for given in session.get_inputs()] == ["x"]
    assert [found.name for found in session.get_outputs()] == ["x_out"]


def test_what_has_no_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format: expected one of"):
        export(dfw.DFWLayer(1), tmp_path / "l1.bin", (None, torch.ones(2, 3)))
    pytest.importorskip("onnxruntime", reason="needs the extra: pip install 'dfwlayer[export]'")
    nuclear = dfw.SetLayer(dfw.NuclearBall(1.0, (2, 3)))
    with pytest.raises(ValueError, match=r"singular values or eigenvalues.*'aoti' and 'export'"):
        export(nuclear, tmp_path / "nuclear.onnx", torch.randn(2, 6))
