"""The ball as rows, for rivals that take general programs: qpax, dQP and Moreau by its own API.

‖w ∘ x‖₁ ≤ t is |x| ≤ y and ⟨w, y⟩ ≤ t: 2n variables, 2n + 1 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Passes, Ready
from dfwlayer_bench.systems.rows import from_jax, layers
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["prepare_dqp", "prepare_moreau", "prepare_qpax", "rows_of"]


def rows_of(problem: Instance) -> Rows:
    """The program over (x, y), in float64."""
    exact, n = problem.to(torch.float64), problem.n
    eye, none = torch.eye(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    P = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    P[:n, :n] = exact.P
    top, middle = torch.cat([eye, -eye], 1), torch.cat([-eye, -eye], 1)
    G = torch.cat([top, middle, torch.cat([none, exact.w]).unsqueeze(0)])
    high = torch.zeros(2 * n + 1, dtype=torch.float64)
    high[-1] = exact.t
    return Rows(
        P=P,
        q=torch.cat([exact.q, none]),
        G=G,
        low=torch.full_like(high, -torch.inf),
        high=high,
        A=G.new_zeros(0, 2 * n),
        b=G.new_zeros(0),
        v=torch.cat([exact.v, none]),
    )


def _ready(problem: Instance, prepare: Callable[[Rows], Passes]) -> Ready:
    passes, n = prepare(rows_of(problem)), problem.n
    both = passes.both
    assert both is not None

    def call() -> Answer:
        z, gradient = both()
        return Answer(z[:n], gradient[:n])

    return Ready(call, {**passes.settings, "rows": 2 * n + 1, "dtype": "float64"})


def prepare_qpax(problem: Instance) -> Ready:
    """qpax, dense, jitted; see `rows.from_jax`."""
    return _ready(problem, from_jax.prepare_qpax)


def prepare_dqp(problem: Instance) -> Ready:
    """dQP over PIQP; sparse, as most entries of the program over (x, y) are zero."""
    return _ready(problem, lambda rows: layers.prepare_dqp(rows, sparse=True))


def prepare_moreau(problem: Instance) -> Ready:
    """Moreau's interior-point method by its own API, as its active-set method asks for P > 0."""
    return _ready(problem, lambda rows: layers.prepare_moreau(rows, active_set=False))
