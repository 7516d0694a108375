"""What ``dfw scaling`` makes of its measurements, and the model of bytes and latency."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dfwlayer_bench.scaling import command
from dfwlayer_bench.scaling.model import MACHINES, Fit, Network, fitted, on, sum_seconds
from dfwlayer_bench.scaling.problem import Shape, own_rows, radius_of

LINK = Network(latency=1e-4, bandwidth=1e9)


def test_a_sum_is_twice_around_a_ring() -> None:
    assert sum_seconds(1000, 1, LINK) == 0
    assert sum_seconds(0, 2, LINK) == pytest.approx(2e-4)
    # 2 (k − 1)/k of the bytes go over each link
    assert sum_seconds(10**6, 4, LINK) == pytest.approx(6e-4 + 1.5 * 8e6 / 1e9)


def test_what_each_process_computes_tells_what_is_shared() -> None:
    fit = fitted(whole=10.0, computing=6.0, processes=2, messages=[10**6] * 5)
    assert (fit.rows, fit.common) == (8.0, 2.0)
    assert fit.seconds(1, LINK) == 10.0
    assert fit.seconds(2, LINK) == pytest.approx(6.0 + 5 * (2e-4 + 8e6 / 1e9))
    assert fitted(1.0, 1.5, 2, []) == Fit(0.0, 1.0, [])  # what is noise is not taken for speed


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_more_processes_pay_where_there_are_entries_enough(machine: Any) -> None:
    k, n = machine.processes, 10**6

    def faster(entries: int) -> float:
        return on(machine, entries, n, 20, 1) / on(machine, entries, n, 20, k)

    assert faster(10**7) < faster(10**9) < faster(10**11) < k
    assert faster(10**11) > 0.9 * k


def test_any_number_of_processes_makes_the_same_rows() -> None:
    shape = Shape(rows=640, columns=50, entries=3000)
    whole, b = own_rows(shape, 0, 1)
    parts = [own_rows(shape, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([A.to_dense() for A, _ in parts]), whole.to_dense())
    assert torch.equal(torch.cat([own for _, own in parts]), b)
    assert radius_of(shape) > 0


def test_the_figures_hold_the_model_against_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    n, network = 1000, Network(1e-3, 1e8)
    fit = Fit(rows=4.0, common=1.0, messages=[n + 2] * 3)

    def measured(out: Path, rows: int, *given: int) -> command.Run:
        columns, entries, processes, _ = given
        assert columns == n
        share = Fit(fit.rows * entries / 8000, fit.common, fit.messages)
        sums = sum(sum_seconds(each, processes, network) for each in fit.messages)
        call = {
            "seconds": share.seconds(processes, network),
            "exchanging": sums,
            "kinds": {"gradient": (3, 3 * (n + 2))} if processes > 1 else {},
            "bytes": 24 * (n + 2),
            "gap": 1e-9,
        }
        own = {"first": call, "again": call, "libraries": 100.0, "memory": 100 + 80 / processes}
        own |= {"short": sum_seconds(0, 2, network), "long": sum_seconds(n, 2, network)}
        torch.save(torch.ones(n), out.with_suffix(".pt"))
        return command.Run(processes, entries, [own] * processes, out.with_suffix(".pt"))

    monkeypatch.setattr(command, "_measured", measured)
    out = tmp_path / "figures.json"
    assert command.scaling(100, n, 8000, 2, 1, quick=False, out=out) == 0
    figures = json.loads(out.read_text())
    solve = figures["again solve"]
    assert solve["predicted / measured"] == pytest.approx(1)
    assert solve["computing"] + solve["exchanging"] == pytest.approx(solve["seconds"])
    assert solve["strong: times faster"] == pytest.approx(5 / solve["seconds"])
    assert solve["weak: efficiency"] == pytest.approx(5 / (solve["seconds"] + 2))
    assert figures["memory beyond libraries, MB"] == [80, 40, 0.5]
    assert figures["difference of x"] == 0
