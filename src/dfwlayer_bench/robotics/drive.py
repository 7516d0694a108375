"""A robot driven by an exported policy, in a process that does not know torch.

``python -m dfwlayer_bench.robotics.drive policy.onnx --task HC+O``: gymnasium, the simulator, NumPy
and onnxruntime are all it imports. It prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfwlayer_bench.robotics.episodes import roll_out
from dfwlayer_bench.robotics.tasks import find_task

__all__ = ["drive"]


def drive(path: Path, name: str, episodes: int, seed: int) -> dict[str, Any]:
    """Whole episodes with the policy of a file; seconds are the median of its calls."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    times: list[float] = []

    def act(observation: NDArray[Any]) -> NDArray[np.float32]:
        begin = time.perf_counter()
        row = observation.astype(np.float32)[None]
        action: NDArray[np.float32] = session.run(None, {given.name: row})[0][0]
        times.append(time.perf_counter() - begin)
        return action

    found = roll_out(find_task(name), act, episodes, seed)
    return {
        "returns": found.returns,
        "violations": found.violations,
        "steps": found.steps,
        "largest_power": found.largest_power,
        "seconds": float(np.median(times)),
        "torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--task", default="HC+O")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=500_000_000)
    wanted = parser.parse_args()
    print(json.dumps(drive(wanted.path, wanted.task, wanted.episodes, wanted.seed)))
