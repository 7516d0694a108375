"""What ``dfw bench --suite gpu`` does."""

from __future__ import annotations

import json
from dataclasses import asdict

from dfwlayer_bench.bench.plan import Asked
from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.terminal import PLAIN, output, refuse

__all__ = ["bench_gpu"]

REPEATS, QUICK_REPEATS = 50, 5
QUICK_CASES = (("l1", 256, 20), ("box", 256, 20))  # compiling takes most of the time


def bench_gpu(asked: Asked) -> int:
    """Run the suite, write its files and print its table; returns the exit code."""
    import torch
    from rich.console import Console

    from dfwlayer_bench.bench.gpu.run import CASES, SETS, as_markdown, floor_seconds, measured
    from dfwlayer_bench.report import text
    from dfwlayer_bench.report.machine import describe
    from dfwlayer_bench.report.progress import progress

    chosen, out, seed = split(asked.family), asked.out, asked.seed
    check_names("--family", chosen, SETS)
    console = Console(stderr=True)
    if not torch.cuda.is_available():
        return refuse(console, "--suite gpu: PyTorch finds no CUDA device", 2)
    count = asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS)
    known = QUICK_CASES if asked.quick and not chosen else CASES
    cases = [case for case in known if not chosen or case[0] in chosen]
    floor = floor_seconds(count)
    rows = []
    with progress(console, len(cases)) as report:
        for row in measured(cases, getattr(torch, asked.dtype), count, seed):
            rows.append(row)
            report(f"{row.set} {row.count}x{row.n}, {text.time(row.programs)} a call", 1)
    table = as_markdown(rows, floor)
    output(100).print(table, **PLAIN)
    out.mkdir(parents=True, exist_ok=True)
    about = {"machine": describe("cuda"), "dtype": asked.dtype, "repeats": count, "seed": seed}
    content = {**about, "floor": floor, "rows": [asdict(row) for row in rows]}
    (out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "gpu.md").write_text(table)
    console.print(f"Wrote gpu.json and gpu.md to {out}", **PLAIN)
    return 0
