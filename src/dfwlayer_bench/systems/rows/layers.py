"""Rivals with gradients on quadratic programs with rows: QPLayer, dQP, Moreau, OptNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dfwlayer_bench.baselines.optnet import OptNetQP
from dfwlayer_bench.systems.base import Passes, Setting, load
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["prepare_dqp", "prepare_moreau", "prepare_optnet", "prepare_qplayer"]

FAR = 1e20  # what ProxQP takes for no bound at all
LARGEST_ACTIVE = 500  # variables up to which Moreau has an active-set method


def prepare_qplayer(rows: Rows) -> Passes:
    """QPLayer of proxsuite; one problem after the other inside, as is its default."""
    eps, eps_backward = 1e-9, 1e-9
    solve = load("proxsuite.torch.qplayer").QPFunction(eps=eps, eps_backward=eps_backward)
    low, high = rows.low.clamp_min(-FAR), rows.high.clamp_max(FAR)
    A = rows.A if len(rows.A) else rows.A.new_empty(0)

    def x_of(data: Tensor) -> Tensor:
        q, b = rows.split(data)
        right = b if len(rows.A) else b.new_empty(0)
        found: Tensor = solve(rows.P, q, A, right, rows.G, low, high)[0]
        return found.view_as(q)

    settings: dict[str, Setting] = {"eps": eps, "eps_backward": eps_backward}
    return Passes.of(x_of, rows.data, rows.value, settings)


def prepare_dqp(rows: Rows, *, sparse: bool = False) -> Passes:
    """dQP over PIQP; one problem after the other inside, as is its default.

    Sparse, for one problem, it gets P and G as sparse matrices and an LU of SciPy's for those:
    with QDLDL, which is as fast, the gradient was right to three digits only. Rows with less slack
    than ``eps_active`` hold the solution. Over (x, y) a small entry of x is such a slack, and at
    n = 1000 some are below 1e-6; the solution is exact enough there for 1e-9. That of a batch is
    not always.
    """
    module = load("dqp.dQP")
    eps, active = 1e-12, 1e-9 if sparse else 1e-6  # with an eps of 1e-9, x is off by 1e-6
    kind = ("sparse", "scipy SPLU") if sparse else ("dense", "scipy LU")
    options = {"solve_type": kind[0], "qp_solver": "piqp", "lin_solver": kind[1]}
    told = module.build_settings(**options, eps_abs=eps, eps_active=active, empty_batch=False)
    layer = module.dQP_layer(settings=told)
    G, h = rows.one_sided()
    P, count = rows.P, rows.count
    if sparse:
        P, G = P.to_sparse_csc(), G.to_sparse_csc()

    def many(part: Tensor, dim: int) -> Tensor:
        """With a batch in front: everything has to have one."""
        if sparse:
            return part
        if not rows.batched or count == 1:
            return part.reshape(part.shape[-dim:])
        return part.expand(count, *part.shape[-dim:])

    def x_of(data: Tensor) -> Tensor:
        q, b = rows.split(data)
        equations = (many(rows.A, 2), many(b, 1)) if len(rows.A) else ()
        found: Tensor = layer(many(P, 2), many(q, 1), many(G, 2), many(h, 1), *equations)[0]
        return found.reshape(q.shape)

    settings: dict[str, Setting] = {**options, "eps_abs": eps, "eps_active": active}
    return Passes.of(x_of, rows.data, rows.value, settings)


def prepare_moreau(rows: Rows, *, active_set: bool = True) -> Passes:
    """Moreau by its own API: all problems of a batch in one call.

    Its active-set method, which is what it picks for programs with up to 500 variables, or its
    interior-point method to 1e-12 for larger ones and where that is asked for. That one does not
    scale the program before: where it does, the gradients of the ball as rows were wrong (a cosine
    of 0.72 on ``active``, n = 500), at any tolerance and any of its ways to differentiate.
    """
    moreau, solver_of = load("moreau"), load("moreau.torch").Solver
    G, h = rows.one_sided()
    matrix = torch.cat([rows.A, G])
    n, m, count = rows.n, len(matrix), rows.count
    small = active_set and n <= LARGEST_ACTIVE
    more: dict[str, Any] = {} if small else {"ipm_settings": moreau.IPMSettings(**_exact())}
    told = moreau.Settings(
        solver="active_set" if small else "ipm",
        device="cpu",
        batch_size=count,
        enable_grad=True,
        **more,
    )
    cones = moreau.Cones(num_zero_cones=len(rows.A), num_nonneg_cones=len(G))
    pattern = _pattern(rows.P.reshape(-1, n, n).abs().amax(0)), _pattern(matrix)
    (P_starts, P_columns, P_mask), (A_starts, A_columns, A_mask) = pattern
    solver = solver_of(n, m, P_starts, P_columns, A_starts, A_columns, cones, told)
    P_values, A_values = rows.P[..., P_mask], matrix[A_mask]
    if rows.batched:
        P_values = P_values.expand(count, -1).contiguous()
        A_values = A_values.expand(count, -1).contiguous()

    def x_of(data: Tensor) -> Tensor:
        q, b = rows.split(data)
        right = torch.cat([b, h.expand(*b.shape[:-1], len(h))], -1)
        found: Tensor = solver.solve(P_values, A_values, q, right).x
        return found.view_as(q)

    used: dict[str, Setting] = {"solver": "active_set" if small else "ipm"}
    return Passes.of(x_of, rows.data, rows.value, used if small else {**used, **_exact()})


def _exact() -> dict[str, Setting]:
    tight: dict[str, Setting] = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-12)
    return {**tight, "diff_method": "exact", "equilibrate_enable": False}


def _pattern(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and columns of the entries that are not zero, as CSR has them, and their mask."""
    mask = matrix != 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(-1).cumsum(0)])
    return starts, mask.nonzero()[:, 1], mask


def prepare_optnet(rows: Rows) -> Passes:
    """OptNet, our own implementation, in batches."""
    layer = OptNetQP()
    G, h = rows.one_sided()

    def x_of(data: Tensor) -> Tensor:
        q, b = rows.split(data)
        equations = (rows.A, b) if len(rows.A) else ()
        found: Tensor = layer(rows.P, q, G, h, *equations)
        return found

    return Passes.of(x_of, rows.data, rows.value, {"tol": 1e-8})
