"""The layer of cvxpylayers, answered by this library where it can be."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import cvxpy as cp
import torch
from cvxpy.utilities import scopes
from torch import Tensor

from dfwlayer.constraints import Polyhedron
from dfwlayer.integrations.cvxpy.maker import model_of
from dfwlayer.integrations.cvxpy.model import Model
from dfwlayer.integrations.cvxpy.node import answered
from dfwlayer.integrations.cvxpy.recognise import NotRecognisedError
from dfwlayer.integrations.cvxpy.single import single_of
from dfwlayer.layer.base import Layer
from dfwlayer.ops.recorded import uncompiled
from dfwlayer.ops.tensors import unwrapped
from dfwlayer.solution import FAILURES, Solution, SolveError, Status

__all__ = ["CvxpyLayer", "ForwardedWarning"]

ENGINES = ("auto", "dfwlayer", "cvxpylayers")
# what solvers call the accuracy and the number of steps
ACCURACY = ("tol", "eps", "eps_abs", "eps_rel", "tol_gap_rel", "tol_gap_abs")
STEPS = ("max_iters", "max_iter", "max_steps")
INEXACT = (Status.MAX_STEPS, Status.STALLED, Status.STOPPED)


class ForwardedWarning(UserWarning):
    """A problem, or a term of it, that this library does not know goes to cvxpylayers."""


class CvxpyLayer(Layer):
    """The solution of a parametrised cvxpy problem, with gradients: cvxpylayers' torch layer.

    Constructor and call are those of ``cvxpylayers.torch.CvxpyLayer``. A problem is solved here if
    its objective is quadratic in affine or piecewise affine expressions, and its constraints are
    affine, piecewise affine, or norms of affine expressions with limits that depend on parameters
    alone; parameters may stand wherever cvxpy's rules (DPP) allow, also as the matrix of a
    ``quad_form`` in the objective. Others are handed to cvxpylayers where it is installed.

    Args:
        problem: The cvxpy problem.
        parameters: All its parameters, in the order of the call.
        variables: What is returned, in its order: variables of the problem, and dual variables of
            constraints that are affine or piecewise affine.
        solver: Of cvxpylayers. Names do not matter to what is solved here; an object of its
            ``SolverInterface`` is always forwarded.
        gp: Whether the problem is a geometric program; those are forwarded.
        verbose: Of cvxpylayers.
        canon_backend: Of cvxpylayers.
        solver_args: Settings for every call: ``tol`` or ``eps`` and ``max_iters`` under any of
            the names that solvers have for them; what else there is belongs to other solvers and
            does not matter to what is solved here.
        engine: "dfwlayer" (or NotRecognisedError), "cvxpylayers", or "auto" for the first that can.
        on_failure: What is done about problems without a solution: "raise" a `SolveError`, "warn"
            or "ignore", with NaN for them. Those that stopped early are warned of once, as by all
            layers.
        settings: Those of `dfwlayer.DFWLayer`; ``tol`` is 1e-8 unless it is given.

    Attributes:
        engine: "dfwlayer" or "cvxpylayers", by which the problem is solved.

    Examples:
        >>> x, A, b = cp.Variable(2), cp.Parameter((3, 2)), cp.Parameter(3)
        >>> problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)), [x >= 0])
        >>> layer = CvxpyLayer(problem, parameters=[A, b], variables=[x])
        >>> (solution,) = layer(A_tensor, b_tensor)

    """

    def __init__(
        self,
        problem: cp.Problem,
        parameters: Sequence[cp.Parameter],
        variables: Sequence[cp.Variable],
        solver: Any = None,
        gp: bool = False,
        verbose: bool = False,
        canon_backend: str | None = None,
        solver_args: dict[str, Any] | None = None,
        *,
        engine: str = "auto",
        on_failure: str = "raise",
        **settings: Any,
    ) -> None:
        super().__init__(on_failure=on_failure, **({"tol": 1e-8} | settings))
        if engine not in ENGINES:
            raise ValueError(f"engine: expected one of {list(ENGINES)}, got {engine!r}")
        self.solver_args = dict(solver_args or {})
        self._model: Model | None = None
        self._other: Any = None
        self.reason = ""
        given = problem, parameters, variables, solver, gp, verbose, canon_backend, solver_args
        if engine != "cvxpylayers":
            duals = _check(problem, parameters, variables, gp)
            try:
                self._model = _recognised(problem, parameters, variables, duals, solver, gp)
            except NotRecognisedError as unknown:
                self.reason = str(unknown)
                if engine == "dfwlayer":
                    raise
        self._single = None if self._model is None else single_of(self._model)
        self._shapes = [tuple(p.shape) for p in parameters]
        self.engine = "dfwlayer" if self._model is not None else "cvxpylayers"
        if self._model is None:
            self._other = _cvxpylayers(self.reason)(*given)
            if engine == "auto":
                warnings.warn(
                    f"the problem goes to cvxpylayers: {self.reason}; engine='cvxpylayers' "
                    "silences this, and engine='dfwlayer' makes it an error",
                    ForwardedWarning,
                    stacklevel=2,
                )

    @uncompiled
    def forward(
        self,
        *params: Tensor,  # (*shape) of each parameter, or (B, *shape)
        solver_args: dict[str, Any] | None = None,
        warm_start: bool = False,
    ) -> tuple[Tensor, ...]:
        """The variables, with a batch where a parameter has one.

        Args:
            params: The values of the parameters, in their order.
            solver_args: Those of the constructor, for this call.
            warm_start: Of cvxpylayers; what is solved here does not need it.

        """
        if self._model is None:
            found: tuple[Tensor, ...] = self._other(
                *params, solver_args=solver_args, warm_start=warm_start
            )
            return found
        given = _settings(self.solver_args | (solver_args or {}))
        if self._single is not None and self._single.takes(params, self._shapes):
            tol, most = (given.get(name, getattr(self, name)) for name in ("tol", "max_steps"))
            answer = None
            if self._is_plain(tol, most):
                answer = answered(
                    self._single, params, tol, most, lambda again: self._answer(again, given)
                )
            if answer is not None:
                return answer
        return self._answer(params, given)

    def _is_plain(self, tol: Any, most: Any) -> bool:
        """Whether any way to the solution will do, and the settings are numbers that make sense."""
        return (
            self.method == "auto"
            and self.differentiate in ("auto", "implicit")
            and type(tol) is float
            and 0 <= tol < math.inf
            and type(most) is int
            and most > 0
            and self.step_size is None
            and self.temperature is None
            and self.on_infeasible == "nan"
        )

    def _answer(self, params: Sequence[Tensor], settings: dict[str, Any]) -> tuple[Tensor, ...]:
        """The variables, by tensor operations."""
        model, at, solution, y = self._posed(params, settings)
        self._judge(solution)
        dtype = params[0].dtype if params else torch.get_default_dtype()
        outputs = model.variables(at, y, lambda: solution.multipliers)
        return tuple(each.to(dtype) for each in outputs)

    def solve(self, *params: Tensor, solver_args: dict[str, Any] | None = None) -> Solution:
        """The whole `Solution`, of the coordinates that are left, with status and certificate.

        Its value leaves out constants, and may be a multiple of the problem's.
        """
        if self._model is None:
            raise RuntimeError(
                "solve: expected a layer with engine 'dfwlayer', this one is solved by cvxpylayers"
            )
        return self._posed(params, _settings(self.solver_args | (solver_args or {})))[2]

    def explain(self) -> str:
        """How the problem is solved."""
        if self._model is None:
            return f"by cvxpylayers: {self.reason or 'asked for'}"
        model = self._model
        kind = "least squares" if model.squares else "quadratic"
        if not any(name in model.arrays.arrays for name in ("P", "K")):
            kind = "linear"
        kinks = "" if model.pieces is None else f" with {model.pieces.count} kinks"
        return f"by dfwlayer: {kind}{kinks} in {model.n} coordinates over: {model.form.told}"

    def extra_repr(self) -> str:
        """How the problem is solved, and the settings."""
        return f"{self.explain()}, {super().extra_repr()}"

    def _posed(
        self, params: Sequence[Tensor], settings: dict[str, Any]
    ) -> tuple[Model, dict[str, Tensor], Solution, Tensor]:
        """The model and its arrays, the solution, and the coordinates y."""
        model = self._model
        assert model is not None
        flat, batched = _flattened(params, self._shapes)
        solve = self._with(settings)
        at = model.arrays.at(flat, batched)
        posed = model.on_pieces(at)
        if posed is not None:
            objective, constraint, back = model.form.posed(posed.objective, posed.at)
            # pieces may hold no point where digits are lost as f is nearly linear
            with suppress(ValueError):
                solution = solve(objective, constraint)
                if _is_sound(solution) and posed.hold(solution.x):
                    return model, at, solution, back(solution.x)
        if model.lifted is not None:
            model = model.lifted
            at = model.arrays.at(flat, batched)
        objective, constraint, back = model.form.posed(model.objective(at), at)
        try:
            solution = solve(objective, constraint)
        except (
            ValueError
        ):  # bounds that no point obeys are an error of such sets, and a status here
            if model.form.region.parts or isinstance(constraint, Polyhedron):
                raise
            solution = solve(objective, model.form.region.polyhedron(at))
        return model, at, solution, back(solution.x)

    def _with(self, more: dict[str, Any]) -> Any:
        """The solve of the layer with other settings."""
        return self._changed(**more)._solved if more else self._solved

    def _changed(self, **more: Any) -> CvxpyLayer:
        """The layer with other settings, which may be in use by other threads meanwhile."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **more)
        return other

    def _judge(self, solution: Solution) -> None:
        """Raise for problems without a solution, if that is asked for, and warn of others."""
        if self.on_failure != "raise":
            self._check(solution)
            return
        if _is_sound(solution):
            return
        codes = set(unwrapped(solution.status).reshape(-1).tolist())
        lost = [Status(c) for c in codes if c in FAILURES and c not in INEXACT]
        if lost:
            told = "; ".join(f"{status}: {status.message}" for status in lost)
            raise _error()(f"problems were not solved ({told})", solution)
        self._changed(on_failure="warn")._check(solution)


def _is_sound(solution: Solution) -> bool:
    """Whether all problems were solved."""
    if solution._sound:
        return True
    return not any(code in FAILURES for code in unwrapped(solution.status).reshape(-1).tolist())


def _check(
    problem: cp.Problem,
    parameters: Sequence[cp.Parameter],
    variables: Sequence[cp.Variable],
    gp: bool,
) -> dict[int, cp.Constraint]:
    """The constraints by the ids of their dual variables; raise what cvxpylayers would raise."""
    for name, value in (("parameters", parameters), ("variables", variables)):
        if not isinstance(value, list | tuple):
            raise ValueError(f"The layer's {name} must be provided as a list or tuple")
    convex = problem.is_dpp("dgp") if gp else _is_dpp(problem)
    if not convex:
        raise ValueError(
            "Problem must be DPP for geometric programming."
            if gp
            else "Problem must be DPP. Note: quad_form(x, P) with parametric P is only supported "
            "in the objective, not in constraints."
        )
    if set(problem.parameters()) != set(parameters):
        raise ValueError("The layer's parameters must exactly match problem.parameters")
    duals = {dual.id: c for c in problem.constraints for dual in c.dual_variables}
    primal = set(problem.variables())
    for variable in variables:
        if variable not in primal and variable.id not in duals:
            raise ValueError(
                f"Variable {variable} must be a subset of problem.variables or a constraint dual "
                "variable"
            )
    return duals


def _is_dpp(problem: cp.Problem) -> bool:
    """By cvxpy's rules, with parameters for the matrices of quadratic forms in the objective."""
    with scopes.quad_form_dpp_scope():
        objective = problem.objective.is_dcp(dpp=True)
    return bool(objective and all(c.is_dcp(dpp=True) for c in problem.constraints))


def _recognised(
    problem: cp.Problem,
    parameters: Sequence[cp.Parameter],
    variables: Sequence[cp.Variable],
    duals: dict[int, cp.Constraint],
    solver: Any,
    gp: bool,
) -> Model:
    if gp:
        raise NotRecognisedError("gp: it is a geometric program")
    if solver is not None and not isinstance(solver, str):
        raise NotRecognisedError("solver: it is an object")
    return model_of(problem, parameters, variables, duals)


def _cvxpylayers(reason: str) -> Any:
    """The class of cvxpylayers."""
    try:
        return importlib.import_module("cvxpylayers.torch").CvxpyLayer
    except ImportError as missing:
        raise NotRecognisedError(
            f"problem: {reason or 'engine is cvxpylayers'}; install cvxpylayers to have it solved "
            "there"
        ) from missing


def _flattened(
    params: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], tuple[bool, ...]]:
    """The parameters as vectors in float64, (size) or (B, size), and which have a batch."""
    if len(params) != len(shapes):
        raise ValueError(
            "A tensor must be provided for each CVXPY parameter; received "
            f"{len(params)} tensors, expected {len(shapes)}"
        )
    flat, batched = [], []
    for i, (value, shape) in enumerate(zip(params, shapes, strict=True)):
        extra = len(value.shape) - len(shape)
        if extra not in (0, 1):
            raise ValueError(
                f"Invalid parameter dimensionality for parameter {i}. Expected {len(shape)} or "
                f"{len(shape) + 1} dimensions, Got: {len(value.shape)} dimensions"
            )
        if tuple(value.shape[extra:]) != shape:
            wanted = f"batched shape: (batch_size, {', '.join(map(str, shape))})"
            raise ValueError(
                f"Invalid parameter shape for parameter {i}. Expected"
                f"{': ' + str(shape) if not extra else ' ' + wanted}, Got: {tuple(value.shape)}"
            )
        batched.append(bool(extra))
        flat.append(value.double().flatten(extra) if shape else value.double().unsqueeze(-1))
    sizes = {len(value) for value, has in zip(flat, batched, strict=True) if has}
    if len(sizes) > 1:
        found = [len(v) if has else 0 for v, has in zip(flat, batched, strict=True)]
        raise ValueError(
            "Inconsistent batch sizes. Expected all batched parameters to have the same batch "
            f"size, but got: {found}"
        )
    return flat, tuple(batched)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """What solvers are told, as settings of `dfwlayer.solve`."""
    found = {}
    accuracy = [float(given[name]) for name in ACCURACY if name in given]
    if accuracy:
        found["tol"] = min(accuracy)
    steps = [int(given[name]) for name in STEPS if name in given]
    if steps:
        found["max_steps"] = max(steps)
    return found


def _error() -> type[SolveError]:
    """A SolveError, which is one of diffcp as well where that is in use, for who waits for it."""
    diffcp = sys.modules.get("diffcp")
    if diffcp is None:
        return SolveError
    return type("SolveError", (SolveError, diffcp.SolverError), {})
