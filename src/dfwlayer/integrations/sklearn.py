"""Estimators for scikit-learn whose coefficients obey a limit, with a certificate.

    from dfwlayer.integrations.sklearn import ConstrainedLasso

    model = ConstrainedLasso(radius=3.0).fit(X, y)   # ‖β‖₁ ≤ 3
    model.coef_, model.gap_, model.alpha_

Losses are means over the samples, so that ``alpha_``, what a unit of the radius is worth, is the
``alpha`` for which the penalised problem has the same solution.

Needs scikit-learn; nothing else in this package imports it.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from torch.nn.functional import pad, softplus

from dfwlayer.arguments import as_flag, as_integer, as_number
from dfwlayer.constraints import Box, Constraint, LpBall
from dfwlayer.integrations.numpy import tensor_of
from dfwlayer.objectives import LeastSquares, Objective, Smooth
from dfwlayer.solution import FAILURES, Solution, Status
from dfwlayer.solve import solve

__all__ = ["ConstrainedLasso", "L1LogisticRegression", "NonNegativeRegression", "Path"]

Array = NDArray[Any]
PRECISIONS = (np.float64, np.float32)
SMALL = 2**20  # entries up to which a sparse matrix is solved for as a dense one, with more digits


class Path(NamedTuple):
    """The fits for several radii, one entry each, in the order in which these were given."""

    radii: Array
    coef: Array  # like coef_
    intercept: Array  # like intercept_
    alpha: Array  # the penalties with the same solutions
    gap: Array  # the loss is at most so much above the least one
    n_iter: Array


class _Fit(NamedTuple):
    coef: Array
    intercept: Array
    solution: Solution
    limit: str | None  # the parameter of the set that has a price

    @property
    def n_iter(self) -> int:
        return max(1, int(self.solution.num_steps))  # scikit-learn counts from one

    @property
    def alpha(self) -> float:
        assert self.limit is not None
        return float(self.solution.multipliers[self.limit])


class _Limited(BaseEstimator):  # type: ignore[misc]
    """What the estimators have in common: data in, one solve, coefficients and certificate out."""

    tol: float
    max_iter: int
    fit_intercept: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _read(self, X: Any, y: Any, **checks: Any) -> tuple[Any, Any]:
        """The data to fit to, in floating point; what is small is dense."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=list(PRECISIONS), **checks)
        if sparse.issparse(X) and X.shape[0] * X.shape[1] <= SMALL:
            X = X.toarray()
        return X, y

    def _again(self, X: Any) -> Any:
        """The data to predict for."""
        check_is_fitted(self)
        return validate_data(self, X, accept_sparse="csr", dtype=list(PRECISIONS), reset=False)

    def _solved(
        self, objective: Objective, constraint: Constraint, start: Solution | None
    ) -> Solution:
        """The solution, from that of a similar problem; a warning where it is none."""
        as_number("tol", self.tol, "a number ≥ 0", least=0)
        as_integer("max_iter", self.max_iter, 1)
        with torch.no_grad():
            found = solve(
                objective,
                constraint,
                x0=None if start is None else start.x,
                tol=self.tol,
                max_steps=self.max_iter,
            )
        status = Status(int(found.status))
        if not bool(torch.isfinite(found.x).all()):
            raise ValueError(f"{type(self).__name__}: {status.message}")
        if status in FAILURES:
            text = f"{type(self).__name__}: {status.name}, {status.message}"
            warnings.warn(text, ConvergenceWarning, stacklevel=4)
        return found

    def _keep(self, fit: _Fit) -> Self:
        """The attributes of a fitted estimator."""
        self.coef_, self.intercept_ = fit.coef, fit.intercept
        self.n_iter_, self.gap_ = fit.n_iter, float(fit.solution.gap)
        if fit.limit is not None:
            self.alpha_ = fit.alpha
        return self

    def _weights(self, weight: Any, X: Any, intercepts: int, rows: int = 1) -> Tensor | None:
        """Of rows of coefficients and then of intercepts, which have none; None for ones."""
        count = X.shape[1]
        if weight is None and not intercepts:
            return None
        own = np.ones(count) if weight is None else np.asarray(weight)
        if own.shape != (count,) or not np.issubdtype(own.dtype, np.number):
            raise ValueError(
                f"weight: expected a number for each of the {count} features, got "
                f"{own.dtype} of shape {own.shape}"
            )
        padded = np.concatenate([np.tile(own, rows), np.zeros(intercepts)])
        return torch.from_numpy(padded.astype(X.dtype))


class _InBall(_Limited):
    """With ‖w ∘ β‖₁ ≤ radius."""

    def __init__(
        self,
        radius: float = 1.0,
        *,
        weight: Any = None,
        fit_intercept: bool = True,
        tol: float = 1e-10,
        max_iter: int = 1000,
    ) -> None:
        self.radius = radius
        self.weight = weight
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    @abstractmethod
    def _data(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """What is fitted to."""

    @abstractmethod
    def _fitted(self, data: Any, radius: float, start: Solution | None = None) -> _Fit:
        """The fit for a radius."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to X (samples, features), dense or sparse, and y (samples,), numbers or labels."""
        return self._keep(self._fitted(self._data(X, y, sample_weight), self.radius))

    def path(self, X: Any, y: Any, radii: Iterable[float], sample_weight: Any = None) -> Path:
        """The fits for these radii, each one started from the one before."""
        fits: list[_Fit] = []
        data = self._data(X, y, sample_weight)
        given = np.asarray(list(radii), dtype=np.float64)
        for radius in given:
            fits.append(self._fitted(data, radius, fits[-1].solution if fits else None))
        columns = (
            [fit.coef for fit in fits],
            [fit.intercept for fit in fits],
            [fit.alpha for fit in fits],
            [float(fit.solution.gap) for fit in fits],
            [fit.n_iter for fit in fits],
        )
        return Path(given, *map(np.asarray, columns))


def _shares(sample_weight: Any, X: Any) -> Array:
    """What each sample counts, with sum one."""
    weight: Array = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
    shares: Array = weight / weight.sum()  # which scikit-learn has found to be positive
    return shares


class _Rows(NamedTuple):
    """½ ‖A β − b‖² as a mean over samples, the intercept taken out or as a last column."""

    objective: LeastSquares
    X: Any
    mean: Array  # of X, zero where there is no intercept to be taken out
    offset: float  # of y
    columns: int  # for intercepts

    def fit(self, solution: Solution, limit: str | None) -> _Fit:
        """The coefficients of the solution."""
        x = solution.x.numpy()
        coef = x[:-1] if self.columns else x
        intercept = x[-1] if self.columns else self.offset - self.mean @ coef
        return _Fit(coef, self.X.dtype.type(intercept), solution, limit)


class _Linear(RegressorMixin, _Limited):  # type: ignore[misc]
    """Least squares."""

    def _rows(self, X: Any, y: Any, sample_weight: Any) -> _Rows:
        X, y = self._read(X, y, y_numeric=True)
        intercept = as_flag("fit_intercept", self.fit_intercept)
        y, share = np.asarray(y, X.dtype), _shares(sample_weight, X)
        root, mean, offset, columns = np.sqrt(share), np.zeros(X.shape[1], X.dtype), 0.0, 0
        if sparse.issparse(X):
            if intercept:  # taken out of its columns, X would not be sparse any more
                X = sparse.hstack([X, np.ones((X.shape[0], 1), X.dtype)], format="csr")
                columns = 1
            A = sparse.diags_array(root) @ X
            X = X[:, : len(mean)]
        else:
            if intercept:
                mean, offset = share @ X, float(share @ y)
            A = root[:, None] * (X - mean)
        b = root * (y - X.dtype.type(offset))
        return _Rows(LeastSquares(tensor_of(A, X.dtype), tensor_of(b)), X, mean, offset, columns)

    def predict(self, X: Any) -> Array:
        """X β + intercept."""
        X = self._again(X)
        found: Array = safe_sparse_dot(X, self.coef_) + self.intercept_
        return found


class ConstrainedLasso(_Linear, _InBall):
    """Least squares with ‖w ∘ β‖₁ ≤ radius: min ½ Σ s_i (y_i − x_i β − c)² / Σ s_i.

    Args:
        radius: The limit, at least 0.
        weight: w, a number for each feature; a zero leaves a coefficient free. None for ones.
        fit_intercept: Whether there is a c.
        tol: On the gap relative to the loss.
        max_iter: Most steps.

    Attributes:
        coef_: β.
        intercept_: c.
        gap_: The loss is at most so much above the least one.
        alpha_: The multiplier of the limit: ``Lasso(alpha=alpha_)`` has the same solution.
        n_iter_: Steps.

    """

    def _data(self, X: Any, y: Any, sample_weight: Any) -> _Rows:
        return self._rows(X, y, sample_weight)

    def _fitted(self, rows: _Rows, radius: float, start: Solution | None = None) -> _Fit:
        ball = LpBall(1, radius, self._weights(self.weight, rows.X, rows.columns))
        return rows.fit(self._solved(rows.objective, ball, start), "radius")


class NonNegativeRegression(_Linear):
    """Least squares with β ≥ 0: min ½ Σ s_i (y_i − x_i β − c)² / Σ s_i; the c may be negative.

    Args:
        fit_intercept: Whether there is a c.
        tol: On the gap relative to the loss.
        max_iter: Most steps.

    Attributes:
        coef_: β.
        intercept_: c.
        gap_: The loss is at most so much above the least one.
        n_iter_: Steps.

    """

    def __init__(
        self, *, fit_intercept: bool = True, tol: float = 1e-10, max_iter: int = 1000
    ) -> None:
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to X (samples, features), dense or sparse, and y (samples,)."""
        rows = self._rows(X, y, sample_weight)
        lower = torch.zeros(rows.objective.shape, dtype=rows.objective.dtype)
        if rows.columns:
            lower[-1] = -torch.inf
        return self._keep(rows.fit(self._solved(rows.objective, Box(lower), None), None))


class _Labelled(NamedTuple):
    """The mean logistic loss of a classification."""

    objective: Smooth
    X: Any
    rows: int  # of coefficients: one for two classes
    intercepts: int  # for more classes one less, as only their differences matter

    def fit(self, solution: Solution) -> _Fit:
        """The coefficients of the solution."""
        coef, free = np.split(solution.x.numpy(), [self.rows * self.X.shape[1]])
        intercept = np.zeros(self.rows, coef.dtype)
        intercept[: self.intercepts] = free
        if self.rows > 1:
            intercept -= intercept.mean()
        return _Fit(coef.reshape(self.rows, -1), intercept, solution, "radius")


class L1LogisticRegression(ClassifierMixin, _InBall):  # type: ignore[misc]
    """Logistic regression with ‖w ∘ β‖₁ ≤ radius, for two classes or, multinomial, for more.

    The loss is the mean of −log p(y_i | x_i), over samples with weights. For two classes β has one
    row, for K classes K of them, and the ball is that of all their entries.

    Args:
        radius: The limit, at least 0.
        weight: w, a number for each feature; a zero leaves its coefficients free. None for ones.
        fit_intercept: Whether there are intercepts, which the limit does not touch.
        tol: On the gap relative to the loss.
        max_iter: Most steps.

    Attributes:
        classes_: The labels.
        coef_: β, (1, features) for two classes, otherwise (classes, features).
        intercept_: One for each row of β.
        gap_: The loss is at most so much above the least one.
        alpha_: The multiplier of the limit: ``LogisticRegression`` with an ℓ1 penalty and
            C = 1/(alpha_ · samples) has the same solution.
        n_iter_: Steps.

    """

    def __init__(
        self,
        radius: float = 1.0,
        *,
        weight: Any = None,
        fit_intercept: bool = True,
        tol: float = 1e-7,
        max_iter: int = 1000,
    ) -> None:
        super().__init__(
            radius, weight=weight, fit_intercept=fit_intercept, tol=tol, max_iter=max_iter
        )

    def _data(self, X: Any, y: Any, sample_weight: Any) -> _Labelled:
        X, y = self._read(X, y)
        check_classification_targets(y)
        share = _shares(sample_weight, X)
        counted = share > 0  # a class without a sample that counts would have no intercept
        X, share = X[counted], share[counted]
        self.classes_, label = np.unique(y[counted], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "y: expected at least two classes among the samples that count, got one class, "
                f"{self.classes_[0]!r}"
            )
        rows = 1 if len(self.classes_) == 2 else len(self.classes_)
        intercepts = max(1, rows - 1) if as_flag("fit_intercept", self.fit_intercept) else 0
        matrix, parts = tensor_of(X), torch.from_numpy(share)
        size = rows * X.shape[1] + intercepts
        if rows == 1:
            sign = torch.from_numpy((2 * label - 1).astype(X.dtype))
            loss = Smooth(_two_classes, matrix, sign, parts, shape=size)
        else:
            loss = Smooth(_classes, matrix, torch.from_numpy(label), parts, rows, shape=size)
        return _Labelled(loss, X, rows, intercepts)

    def _fitted(self, data: _Labelled, radius: float, start: Solution | None = None) -> _Fit:
        weight = self._weights(self.weight, data.X, data.intercepts, data.rows)
        return data.fit(self._solved(data.objective, LpBall(1, radius, weight), start))

    def decision_function(self, X: Any) -> Array:
        """Log-odds: (samples,) of the second class for two, otherwise (samples, classes)."""
        X = self._again(X)
        scores: Array = safe_sparse_dot(X, self.coef_.T) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """The most likely label of each sample."""
        scores = self.decision_function(X)
        index = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        found: Array = self.classes_[index]
        return found

    def predict_log_proba(self, X: Any) -> Array:
        """log p, (samples, classes)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], 1)
        return torch.from_numpy(scores).log_softmax(1).numpy()

    def predict_proba(self, X: Any) -> Array:
        """p, (samples, classes)."""
        return np.exp(self.predict_log_proba(X))


def _two_classes(x: Tensor, X: Tensor, sign: Tensor, share: Tensor) -> Tensor:
    """Σ s_i log(1 + exp(−y_i (x_i β + c))) for y_i = ±1."""
    count = X.shape[1]
    scores = X @ x[:count] + x[count:].sum()
    return (share * softplus(-sign * scores)).sum()


def _classes(x: Tensor, X: Tensor, label: Tensor, share: Tensor, rows: int) -> Tensor:
    """−Σ s_i log softmax(β x_i + c)_{y_i}; the last class has no intercept of its own."""
    size = rows * X.shape[1]
    scores = X @ x[:size].reshape(rows, -1).T
    if len(x) > size:
        scores = scores + pad(x[size:], (0, 1))
    chosen = scores.gather(1, label.unsqueeze(1)).squeeze(1)
    return (share * (scores.logsumexp(1) - chosen)).sum()
