"""A layer as a shared library of AOTInductor, run from Python and from a C++ program.

It takes a C++ compiler a minute or two, so that it runs where DFW_AOTI=1 asks for it, as CI does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.deploy import Call, export

pytestmark = [
    pytest.mark.skipif(os.environ.get("DFW_AOTI") != "1", reason="DFW_AOTI=1 asks for it"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="links as Linux does"),
]

# reads two batches of costs, projects, and exits with 1 if an action is outside of its ball
PROGRAM = r"""
#include <torch/torch.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <iostream>

int main(int, char** argv) {
    c10::InferenceMode guard;
    torch::inductor::AOTIModelPackageLoader loader(argv[1]);
    for (int64_t batch : {1, 7}) {
        auto q = 2 * torch::randn({batch, 6}), weight = torch::rand({batch, 6}) + 0.1;
        auto radius = torch::rand({batch}) + 0.1;
        auto x = loader.run({q, weight, radius})[0];
        auto size = (weight * x).abs().to(torch::kFloat64).sum(-1);
        if (!(size <= radius.to(torch::kFloat64) * (1 + 1e-6)).all().item<bool>()) return 1;
        std::cout << x.size(0) << " " << x.size(1) << std::endl;
    }
    return 0;
}
"""


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # inside of torch
def test_a_package_runs_in_python_and_in_cpp(tmp_path: Path) -> None:
    path = tmp_path / "l1.pt2"
    gen = torch.Generator().manual_seed(0)

    def draw(count: int) -> Call:
        q = 2 * torch.randn(count, 6, generator=gen)
        weight, radius = torch.rand(count, 6, generator=gen), torch.rand(count, generator=gen)
        return Call((None, q, weight + 0.1), {"radius": radius + 0.1})

    report = export(dfw.DFWLayer(1), path, draw(3), samples=draw, count=10_000)
    assert report.passed, report
    assert report.format == "aoti"
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM)
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", "-std=c++20", "-O0", "-w", abi, *include, str(source), "-o", str(program)]
    subprocess.run([*command, *libraries, "-lc10"], check=True)
    ran = subprocess.run([program, path], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["1", "6", "7", "6"]
