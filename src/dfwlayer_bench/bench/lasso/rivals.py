"""The rivals, each at the λ that matches the radius, or at the radius where it takes one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.bench.lasso.problems import Lasso, Penalised
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Setting, load

__all__ = ["prepare_adelie", "prepare_celer", "prepare_skglm", "prepare_sklearn", "prepare_spgl1"]

Many = list[Any]  # coefficients, one vector for each λ


def _passes(problem: Lasso, solve: Callable[[], Many], settings: dict[str, Setting]) -> Passes:
    """Without gradients; coefficients in the order of the radii."""

    def forward() -> Tensor:
        found = [c.toarray().ravel() if hasattr(c, "toarray") else np.asarray(c) for c in solve()]
        x = torch.from_numpy(np.stack(found).astype(np.float64))
        return x[0] if problem.radius.dim() == 0 else x

    return Passes(forward, None, settings)


def _alphas(given: Penalised) -> Any:
    """λ/m, the penalty where the squares are divided by the number of rows."""
    return given.penalties / len(given.problem.b)


def prepare_celer(given: Penalised) -> Passes:
    """Working sets and dual extrapolation."""
    celer = load("celer")
    A, b, alphas = given.problem.columns, given.problem.b.numpy(), _alphas(given)
    tol = 1e-14

    def solve() -> Many:
        _, coefficients, _ = celer.celer_path(A, b, "lasso", alphas=alphas, tol=tol, max_iter=200)
        return list(coefficients.T)

    return _passes(given.problem, solve, {"tol": tol, "max_iter": 200})


def prepare_skglm(given: Penalised) -> Passes:
    """Working sets and Anderson acceleration."""
    skglm = load("skglm")
    A, b, alphas = given.problem.columns, given.problem.b.numpy(), _alphas(given)
    tol = 1e-10
    model = skglm.Lasso(fit_intercept=False, tol=tol, max_iter=200)

    def solve() -> Many:
        if len(alphas) == 1:
            model.alpha = alphas[0]
            return [model.fit(A, b).coef_]
        return list(model.path(A, b, alphas)[1].T)

    return _passes(given.problem, solve, {"tol": tol, "max_iter": 200})


def prepare_adelie(given: Penalised) -> Passes:
    """Screening with a pivot rule."""
    adelie, threads = load("adelie"), torch.get_num_threads()
    A, b, alphas = given.problem.columns, given.problem.b.numpy(), _alphas(given)
    options: dict[str, Setting] = {"tol": 1e-14, "n_threads": threads}
    glm = adelie.glm.gaussian(b)
    if given.problem.A.layout != torch.strided:
        A = adelie.matrix.sparse(A, method="naive", n_threads=threads)

    def solve() -> Many:
        state = adelie.grpnet(
            A,
            glm,
            lmda_path=alphas,
            intercept=False,
            early_exit=False,
            progress_bar=False,
            **options,
        )
        return [state.betas[i] for i in range(len(alphas))]

    return _passes(given.problem, solve, options)


def prepare_sklearn(given: Penalised) -> Passes:
    """Coordinate descent."""
    model = load("sklearn.linear_model")
    A, b, alphas = given.problem.columns, given.problem.b.numpy(), _alphas(given)
    options = {"tol": 1e-10, "max_iter": 100_000}

    def solve() -> Many:
        if len(alphas) == 1:
            lasso = model.Lasso(alpha=alphas[0], fit_intercept=False, **options)
            return [lasso.fit(A, b).coef_]
        _, coefficients, _ = model.lasso_path(A, b, alphas=alphas, **options)
        return list(coefficients.T)

    return _passes(given.problem, solve, dict(options))


def prepare_spgl1(given: Penalised) -> Passes:
    """Spectral projected gradient at the radius, each from the solution at the last one."""
    lasso = load("spgl1").spgl1
    logging.getLogger("spgl1.spgl1").setLevel(logging.ERROR)  # of every step that it shortens
    b, radii = given.problem.b.numpy(), np.atleast_1d(given.problem.radius.numpy())
    A = given.problem.columns
    if given.problem.A.layout != torch.strided:
        A = load("scipy.sparse.linalg").aslinearoperator(A)
    options: dict[str, Setting] = {"opt_tol": 1e-9, "ls_tol": 1e-12, "iter_lim": 5_000}

    def solve() -> Many:
        found: Many = []
        for radius in radii:
            x, *_ = lasso(A, b, tau=radius, x0=found[-1] if found else None, **options)
            found.append(x)
        return found

    return _passes(given.problem, solve, options)
