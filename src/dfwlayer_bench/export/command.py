"""``dfw export``: deployed layers as files, checked against the layers they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dfwlayer_bench.options import Dtype, check_names, split
from dfwlayer_bench.report.terminal import PLAIN, refuse

__all__ = ["export"]

SUFFIX = {"onnx": ".onnx", "aoti": ".pt2", "export": ".pt2"}


def export(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="l1, l1-weighted, l1-quadratic, l2, l2-weighted, linf, l3, box, simplex, "
            "capped-simplex, l1-box, k-sparse, budget, leverage, groups, ellipsoid, birkhoff, "
            "polyhedron, or all. (default: l1)",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=2, help="Variables.")] = 6,
    radius: Annotated[float, typer.Option(min=0, help="Of the set.")] = 1.0,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Steps, of sets that have no formula and with a P.")
    ] = 50,
    format: Annotated[  # noqa: A002
        str, typer.Option(help="onnx, aoti (AOTInductor) or export (torch.export).")
    ] = "onnx",
    inputs: Annotated[int, typer.Option(min=1, help="Random inputs to check.")] = 10_000,
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Of the sets and the inputs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the files, one for each set.")] = Path(
        "exported"
    ),
) -> int:
    """Write layers to files for ONNX Runtime, AOTInductor or torch.export, and check them.

    Each file is run on random inputs and compared with the layer: the largest error, how far the
    answers are outside of the set, and the time of a call with one problem beside that of the
    layer. The exit code is 1 if a file's answers are not within 1e-5, or not feasible.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with console.status("Loading PyTorch"):
        import torch

        from dfwlayer.deploy import export as export_layer
        from dfwlayer_bench.export.cases import CASES, Size
        from dfwlayer_bench.report.progress import progress
    check_names("--format", [format], SUFFIX)
    check_names("--dtype", [dtype], ("float32", "float64"))
    names = split(sets) or ["l1"]
    names = list(CASES) if names == ["all"] else names
    check_names("--set", names, CASES)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    failed = False
    with progress(Console(stderr=True), len(names)) as tell:
        for name in names:
            tell(name, 0)
            random = torch.Generator().manual_seed(seed)
            size = Size(n, radius, random, getattr(torch, dtype))
            try:
                layer, draw = CASES[name](size)
                report = export_layer(
                    layer,
                    out / f"{name}{SUFFIX[format]}",
                    draw(3),
                    max_steps=max_steps,
                    format=format,
                    samples=draw,
                    count=inputs,
                )
            except (ValueError, ImportError) as error:
                failed = bool(refuse(console, f"{name}: {error}", 1))
            else:
                console.print(f"{name}: {report}", **PLAIN)
                failed = failed or not report.passed
            tell(name, 1)
    return 1 if failed else 0
