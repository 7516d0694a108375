"""The estimators: scikit-learn's checks, its own at the matching penalty, and SciPy's nnls."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.6")
from scipy import sparse
from scipy.optimize import nnls
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dfwlayer.integrations.sklearn import (
    ConstrainedLasso,
    L1LogisticRegression,
    NonNegativeRegression,
)

ESTIMATORS = [ConstrainedLasso(), NonNegativeRegression(), L1LogisticRegression()]
X, Y = make_regression(60, 12, n_informative=4, noise=5.0, bias=3.0, random_state=0)
Y = Y / 50
SHARES = np.random.default_rng(0).uniform(0.2, 2.0, 60)
ROWS, TWO = make_classification(120, 10, random_state=1)
THREE = np.array(["a", "b", "c"])[
    make_classification(120, 10, n_informative=5, n_classes=3, random_state=1)[1]
]


@pytest.fixture(params=["dense", "sparse", "small and sparse"])
def form(request, monkeypatch):
    """What X is given as; small sparse matrices become dense unless that is forbidden."""
    if request.param == "sparse":
        monkeypatch.setattr("dfwlayer.integrations.sklearn.SMALL", 0)
    return np.asarray if request.param == "dense" else sparse.csr_array


@parametrize_with_checks(ESTIMATORS)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("intercept", [True, False])
def test_the_lasso_is_that_of_scikit_learn(intercept, form):
    model = ConstrainedLasso(2.0, fit_intercept=intercept).fit(form(X), Y, SHARES)
    assert np.abs(model.coef_).sum() == pytest.approx(2.0, rel=1e-9)
    assert model.gap_ <= 1e-9
    peer = Lasso(model.alpha_, fit_intercept=intercept, tol=1e-12, max_iter=100_000)
    peer.fit(X, Y, SHARES)
    np.testing.assert_allclose(model.coef_, peer.coef_, atol=1e-7)
    np.testing.assert_allclose(model.intercept_, peer.intercept_, atol=1e-7)
    np.testing.assert_allclose(model.predict(form(X)), peer.predict(X), atol=1e-6)


def test_weights_of_the_lasso():
    """A weight makes a feature dearer as its scale makes it smaller; zero leaves it free."""
    weight = np.linspace(0.5, 2.0, 12)
    model = ConstrainedLasso(2.0, weight=weight).fit(X, Y)
    scaled = ConstrainedLasso(2.0).fit(X / weight, Y)
    np.testing.assert_allclose(model.coef_, scaled.coef_ / weight, atol=1e-7)
    weight[3] = 0
    free = ConstrainedLasso(0.0, weight=weight).fit(X, Y)
    slope = np.polyfit(X[:, 3], Y, 1)
    np.testing.assert_allclose([free.coef_[3], free.intercept_], slope, atol=1e-7)
    with pytest.raises(ValueError, match="weight: expected a number for each of the 12 features"):
        ConstrainedLasso(weight=[1.0, 2.0]).fit(X, Y)


def test_non_negative_regression_is_that_of_scipy(form):
    model = NonNegativeRegression(fit_intercept=False).fit(form(X), Y)
    np.testing.assert_allclose(model.coef_, nnls(X, Y)[0], atol=1e-8)
    root = np.sqrt(SHARES)
    model = NonNegativeRegression().fit(form(X), Y, SHARES)
    both = root[:, None] * np.column_stack([X, np.ones(60), -np.ones(60)])
    known = nnls(both, root * Y)[0]
    np.testing.assert_allclose(model.coef_, known[:12], atol=1e-7)
    np.testing.assert_allclose(model.intercept_, known[12] - known[13], atol=1e-7)
    assert (model.coef_ >= 0).all()
    assert model.gap_ <= 1e-9


def test_two_classes_are_those_of_scikit_learn(form):
    model = L1LogisticRegression(1.5, fit_intercept=False).fit(form(ROWS), TWO)
    assert np.abs(model.coef_).sum() == pytest.approx(1.5, rel=1e-9)
    strength = 1 / (model.alpha_ * len(TWO))
    peer = LogisticRegression(
        C=strength, l1_ratio=1, solver="liblinear", fit_intercept=False, tol=1e-10, max_iter=10_000
    )
    peer.fit(ROWS, TWO)
    np.testing.assert_allclose(model.coef_, peer.coef_, atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(form(ROWS)), peer.predict_proba(ROWS), atol=1e-5)
    np.testing.assert_array_equal(model.predict(ROWS), peer.predict(ROWS))


def test_three_classes_are_those_of_scikit_learn():
    model = L1LogisticRegression(2.0).fit(ROWS, THREE)
    assert model.coef_.shape == (3, 10)
    strength = 1 / (model.alpha_ * len(THREE))
    peer = LogisticRegression(C=strength, l1_ratio=1, solver="saga", tol=1e-9, max_iter=20_000)
    peer.fit(ROWS, THREE)
    np.testing.assert_allclose(model.coef_, peer.coef_, atol=1e-5)
    np.testing.assert_allclose(model.intercept_, peer.intercept_, atol=1e-5)
    np.testing.assert_array_equal(model.classes_, ["a", "b", "c"])
    np.testing.assert_allclose(model.predict_proba(ROWS).sum(1), 1.0)
    assert model.score(ROWS, THREE) == peer.score(ROWS, THREE)


@pytest.mark.parametrize(
    ("model", "rows", "y"),
    [(ConstrainedLasso(), X, Y), (L1LogisticRegression(), ROWS, TWO)],
    ids=["lasso", "logistic"],
)
def test_a_path_is_the_fits_for_its_radii(model, rows, y):
    radii = [0.2, 0.6, 1.0]
    path = model.path(rows, y, radii)
    for i, radius in enumerate(radii):
        alone = clone(model).set_params(radius=radius).fit(rows, y)
        np.testing.assert_allclose(path.coef[i], alone.coef_, atol=1e-6)
        np.testing.assert_allclose(path.intercept[i], alone.intercept_, atol=1e-6)
        np.testing.assert_allclose(path.alpha[i], alone.alpha_, atol=1e-6)
    assert (np.diff(path.alpha) < 0).all()
    assert (path.gap <= 1e-6).all()
    assert path.n_iter.shape == path.radii.shape == (3,)


def test_they_work_in_pipelines_and_searches_and_keep_float32():
    pipe = make_pipeline(StandardScaler(), ConstrainedLasso())
    search = GridSearchCV(pipe, {"constrainedlasso__radius": [0.1, 3.0]}, cv=3).fit(X, Y)
    assert search.best_params_ == {"constrainedlasso__radius": 3.0}
    single = ConstrainedLasso(tol=1e-5).fit(X.astype(np.float32), Y.astype(np.float32))
    assert single.coef_.dtype == np.float32


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="radius: expected"):
        ConstrainedLasso(-1.0).fit(X, Y)
    with pytest.raises(ValueError, match="at least one non-zero number"):
        ConstrainedLasso().fit(X, Y, np.zeros(60))
    with pytest.raises(ValueError, match="fit_intercept: expected True or False"):
        L1LogisticRegression(fit_intercept="no").fit(ROWS, TWO)
    with pytest.raises(ValueError, match="tol: expected"):
        L1LogisticRegression(tol=-1).fit(ROWS, TWO)
    with pytest.warns(ConvergenceWarning, match="MAX_STEPS"):
        L1LogisticRegression(3.0, max_iter=1).fit(ROWS, TWO)
