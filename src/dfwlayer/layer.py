"""Layers: settings in the constructor, problems in forward."""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dfwlayer.arguments import as_integer, shown
from dfwlayer.constraints import LpBall, Polyhedron
from dfwlayer.constraints.base import Constraint
from dfwlayer.deploy import DeployedBall, DeployedProgram, DeployedSet
from dfwlayer.differentiate.transforms import unwrapped
from dfwlayer.engines.projection import project, project_and_back
from dfwlayer.methods import Method
from dfwlayer.objectives import Quadratic
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.recorded import recordable
from dfwlayer.ops.tensors import fields_of, filled, tensors_in
from dfwlayer.ops.tracing import recording, refuse_recording
from dfwlayer.solution import FAILURES, Solution, SolveError, Status
from dfwlayer.solve import again, check_settings, check_wish, outline, solve
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature

__all__ = ["DFWLayer", "QPLayer", "SetLayer"]

ON_FAILURE = ("ignore", "warn", "raise")
# the settings of `solve` that a layer keeps, and their defaults
DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(solve).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("x0", "shape", "callback")
}
OPTIONS = tuple(DEFAULTS)
RECORDED = (*OPTIONS, "on_failure")


class _Layer(nn.Module):
    """What all layers have in common: the settings of `solve`, and what to do about failures."""

    method: str | Method
    differentiate: str
    max_steps: int
    verify: bool

    def __init__(self, *, on_failure: str = "warn", **settings: Any) -> None:
        super().__init__()
        options = DEFAULTS | settings
        check_wish(options["on_infeasible"])
        found = check_settings(**{k: v for k, v in options.items() if k != "on_infeasible"})
        if not isinstance(on_failure, str) or on_failure not in ON_FAILURE:
            raise ValueError(
                f"on_failure: expected one of {list(ON_FAILURE)}, got {shown(on_failure)}"
            )
        # numbers as Python's own
        plain = {"tol": found.tol, "max_steps": found.max_steps, "verify": found.verify}
        for name, value in (options | plain).items():
            setattr(self, name, value)
        self.on_failure = on_failure
        self._warned = [False]  # in a list, as the replicas of DataParallel share it with the layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy warns for itself."""
        own = {"on_failure": "warn", "on_infeasible": "nan"} | state | {"_warned": [False]}
        super().__setstate__(own)  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script."""
        refuse_recording("torch.jit.script")

    def extra_repr(self) -> str:
        """The settings, leaving out what has its default."""
        always = ("method", "differentiate", "tol", "max_steps")
        shown = []
        for name, default in (DEFAULTS | {"on_failure": "warn"}).items():
            value = getattr(self, name)
            if name in always or value != default:
                shown.append(f"{name}={value:g}" if name == "tol" else f"{name}={value!r}")
        return ", ".join(shown)

    def deploy(self, *, max_steps: int = 50, **constants: Tensor | None) -> nn.Module:
        """The layer as plain tensor operations with so many steps, for torch.export, AOTInductor
        and ONNX: see `dfwlayer.deploy`.

        What it answers is feasible whatever ``max_steps``, and exact without steps where the set
        has a formula. A QPLayer takes its ``Q``, ``G``, ``h``, ``A`` and ``b`` here.
        """
        return self._deployed(as_integer("max_steps", max_steps, 1), **constants)

    @abstractmethod
    def _deployed(self, steps: int) -> nn.Module: ...

    def _solved(self, objective: Objective, constraint: Constraint, **more: Any) -> Solution:
        """By the settings of the layer."""
        return solve(objective, constraint, **more, **self._options())

    def _options(self) -> dict[str, Any]:
        """The settings of `solve`."""
        return {name: getattr(self, name) for name in OPTIONS}

    def _itself(self) -> Any:
        """The layer, or what is recorded of it."""
        if not recording():
            return self
        own = {name: getattr(self, name) for name in RECORDED}
        if isinstance(self, DFWLayer):
            own["p"] = self.p
        return _Settings(type(self), own)

    def _check(self, solution: Solution) -> None:
        """Do what is to be done about problems that were not solved."""
        if self.on_failure == "ignore" or (self.on_failure == "warn" and self._warned[0]):
            return
        counts = _failures(solution.status)
        if not counts:
            return
        total, kind = unwrapped(solution.status).numel(), type(self).__name__
        told = "; ".join(f"{count} {s}: {s.message}" for s, count in counts.items())
        message = (
            f"{sum(counts.values())} of {total} problems were not solved ({told}). {kind}.solve "
            "returns the statuses"
        )
        if self.on_failure == "raise":
            raise SolveError(message, solution)
        self._warned[0] = True
        warnings.warn(
            f"{message}; this is said once for each layer, {kind}(..., on_failure='raise') "
            "makes it an error and on_failure='ignore' silences it",
            RuntimeWarning,
            stacklevel=2,
        )


class DFWLayer(_Layer):
    """x*(P, q, w, t) = argmin ½ xᵀPx + qᵀx subject to ‖w ∘ x‖_p ≤ t, as a layer.

    With a ``centre`` c the constraint is ‖w ∘ (x − c)‖_p ≤ t. The layer has no parameters of its
    own: P, q, the weights, the radius and the centre come from other layers or are parameters of
    yours, and each of them receives its gradient. The arguments are those of `dfwlayer.solve`.

    Args:
        p: Of the norm, any number in [1, ∞].
        method: See `dfwlayer.solve`, as for all that is not said here.
        differentiate: "implicit", "unroll" or "auto".
        tol: On the relative gap.
        max_steps: Most steps.
        step_size: A rule such as ``ShortStep()``.
        temperature: Of the method "dfw".
        verify: Whether to read the values of tensors to check them.
        on_failure: What a call of the layer does about problems that were not solved, those with
            a status other than CONVERGED and ROUNDING_FLOOR: "warn" (once in the life of the
            layer), "raise" a `SolveError`, or "ignore". Its method ``solve``, which returns the
            statuses, never does anything.

    Examples:
        >>> layer = DFWLayer(p=1)
        >>> x = layer(None, torch.tensor([-3.0, 1.0]), radius=2.0)  # projects (3, −1)

    """

    def __init__(
        self,
        p: float = 1.0,
        *,
        method: str | Method = "auto",
        differentiate: str = "auto",
        tol: float = 1e-5,
        max_steps: int = 1000,
        step_size: StepSize | None = None,
        temperature: float | Temperature | None = None,
        verify: bool = True,
        on_failure: str = "warn",
    ) -> None:
        super().__init__(
            method=method,
            differentiate=differentiate,
            tol=tol,
            max_steps=max_steps,
            step_size=step_size,
            temperature=temperature,
            verify=verify,
            on_failure=on_failure,
        )
        self.p = LpBall(p).p

    def forward(
        self,
        P: Tensor | None,  # (n, n), (*batch, n, n), or None for the identity
        q: Tensor,  # (n,) or (*batch, n)
        weight: Tensor | None = None,  # (n,) or (*batch, n), None for ones
        radius: float | Tensor = 1.0,  # number, () or (*batch)
        *,
        centre: Tensor | None = None,  # (n,) or (*batch, n), None for zero
    ) -> Tensor:
        """The solution, of q's shape (with a batch if another argument has one) and dtype."""
        if recording() and not isinstance(radius, Tensor):
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            radius = torch.full((), radius, dtype=wide, device=q.device)  # it may change
        return _ball(self._itself(), P, q, weight, radius, centre)

    @property
    def _projects(self) -> bool:
        """Whether without a P nothing but the exact projection is asked for."""
        named = isinstance(self.method, str) and self.method in ("auto", "projected-newton")
        exact = named and self.differentiate != "unroll"
        return self.p == 1 and exact and self.max_steps > 0

    def solve(
        self,
        P: Tensor | None,
        q: Tensor,
        weight: Tensor | None = None,
        radius: float | Tensor = 1.0,
        *,
        x0: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        ball = LpBall(self.p, radius, weight, centre=centre)
        return self._solved(Quadratic(P, q), ball, x0=x0)

    def _deployed(self, steps: int) -> nn.Module:
        return DeployedBall(self.p, steps)

    def extra_repr(self) -> str:
        """p, and the settings."""
        return f"p={self.p:g}, {super().extra_repr()}"


class SetLayer(_Layer):
    """x*(P, q) = argmin ½ xᵀPx + qᵀx over any set, as a layer.

    ``layer(q)`` is ``solve(Quadratic(None, q), constraint).x``, the point of the set nearest to −q,
    so it stands in an ``nn.Sequential``; q is what x costs, and ``layer(-z)`` projects z.
    ``layer(P, q)`` has a P, ``layer(objective)`` any objective. Tensors of the set belong to the
    layer: parameters are trained, all of them are saved and moved with it. A set that depends on
    the call is made by a function, or by a module with parameters of its own, from the keyword
    arguments of the call.

    Args:
        constraint: The set, or a function that returns it.
        shape: Of one problem's variable, as for `dfwlayer.solve`.
        settings: Those of `DFWLayer`, with its defaults, and ``on_infeasible`` of `dfwlayer.solve`.

    Examples:
        >>> decide = nn.Sequential(nn.Linear(8, 5), SetLayer(Simplex()))
        >>> ball = SetLayer(LpBall(1, radius=nn.Parameter(torch.ones(()))))  # learns its radius
        >>> made = SetLayer(lambda radius: LpBall(1, radius))
        >>> x = made(P, q, radius=radius)

    """

    def __init__(
        self,
        constraint: Constraint | Callable[..., Constraint],
        *,
        shape: tuple[int, ...] | int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if not isinstance(constraint, Constraint) and not callable(constraint):
            raise ValueError(
                "constraint: expected a set such as Simplex(), or a function that returns one, got "
                f"{shown(constraint)}"
            )
        self.constraint = _Held(constraint) if isinstance(constraint, Constraint) else constraint
        self.shape = shape

    def forward(self, *problem: Any, **parameters: Any) -> Tensor:
        """The solution for (q), (P, q) or (objective), over the set for these parameters."""
        constraint = self._set(parameters)
        return _over_set(self._itself(), _objective(problem), constraint, self.shape)

    def solve(self, *problem: Any, x0: Tensor | None = None, **parameters: Any) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        constraint = self._set(parameters)
        return self._solved(_objective(problem), constraint, x0=x0, shape=self.shape)

    def _set(self, parameters: dict[str, Any]) -> Constraint:
        """The set for these parameters."""
        constraint = self.constraint(**parameters)
        if not isinstance(constraint, Constraint):
            raise ValueError(
                "constraint: expected a function that returns a set such as LpBall, it returned "
                f"{shown(constraint)}"
            )
        return constraint

    def _deployed(self, steps: int) -> nn.Module:
        held = isinstance(self.constraint, _Held)
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        return DeployedSet(self.constraint() if held else self.constraint, steps, shape)

    def extra_repr(self) -> str:
        """The settings, and what the set is, unless it is a module."""
        told = [] if self.shape is None else [f"shape={self.shape}"]
        if not isinstance(self.constraint, nn.Module):
            told.append(f"constraint={shown(self.constraint)}")
        return ", ".join((*told, super().extra_repr()))


class QPLayer(_Layer):
    """x*(Q, p, G, h, A, b) = argmin ½ xᵀQx + pᵀx subject to Gx ≤ h, Ax = b.

    The call is that of qpth's ``QPFunction``: the same arguments in the same order, each with a
    batch or shared by all problems, and None or a tensor without entries for what there is not. Q
    is positive semi-definite and may be zero, which is a linear program. All arguments get their
    gradients.

    Args:
        settings: Those of `DFWLayer`, with its defaults, and ``on_infeasible`` of `dfwlayer.solve`.

    Examples:
        >>> x = QPLayer()(Q, p, G, h, torch.Tensor(), torch.Tensor())

    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)

    def forward(
        self,
        Q: Tensor | None,  # (n, n) or (*batch, n, n), None for the identity
        p: Tensor,  # (n,) or (*batch, n)
        G: Tensor | None = None,  # (m, n) or (*batch, m, n)
        h: Tensor | None = None,  # (m,) or (*batch, m)
        A: Tensor | None = None,  # (k, n) or (*batch, k, n)
        b: Tensor | None = None,  # (k,) or (*batch, k)
    ) -> Tensor:
        """The solution, (n,) or (*batch, n)."""
        return _program(self._itself(), Q, p, G, h, A, b)

    def solve(
        self,
        Q: Tensor | None,
        p: Tensor,
        G: Tensor | None = None,
        h: Tensor | None = None,
        A: Tensor | None = None,
        b: Tensor | None = None,
        *,
        x0: Tensor | None = None,
    ) -> Solution:
        """Like forward, with the certificate: the whole `Solution`."""
        with _renamed(P="Q", q="p"):
            parts = Polyhedron(*map(_unless_empty, (G, h, A, b)))
            return self._solved(Quadratic(Q, p), parts, x0=x0)

    def _deployed(self, steps: int, Q: Tensor | None = None, **rows: Tensor | None) -> nn.Module:
        given = {name: _unless_empty(value) for name, value in rows.items()}
        return DeployedProgram(Polyhedron(**given), _unless_empty(Q), steps)


class _Held(nn.Module):
    """A set whose tensors are parameters and buffers, named after their fields."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        tensors = tensors_in(constraint, sparse=False)
        self.names = [name for name, _ in _named(constraint)]
        for name, tensor in zip(self.names, tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.form = filled(constraint, (torch.empty(0) for _ in tensors))

    def forward(self, **parameters: Any) -> Constraint:
        """The set with the tensors that are there now."""
        if parameters:
            raise ValueError(
                f"constraint: expected a function of {', '.join(parameters)}, got a set"
            )
        found: Constraint = self.form
        if self.names:
            found = filled(self.form, (getattr(self, name) for name in self.names))
        return found

    def _get_name(self) -> str:
        return type(self.form).__name__

    def extra_repr(self) -> str:
        """The fields of the set."""
        held = self.forward()
        told = ", ".join(f"{name}={shown(getattr(held, name))}" for name in fields_of(held))
        return " ".join(told.split())


def _named(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors in a set with names, in the order of `tensors_in`."""
    if isinstance(node, Tensor):
        if node.layout == torch.strided:
            yield "_".join(path), node
    elif isinstance(node, tuple | list | dict):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, part in pairs:
            yield from _named(part, (*path, str(key)))
    elif not isinstance(node, type):
        for name in fields_of(node):
            yield from _named(getattr(node, name), (*path, name))


def _objective(problem: tuple[Any, ...]) -> Objective:
    """That of (q), (P, q) or (objective)."""
    if len(problem) == 1 and isinstance(problem[0], Objective):
        return problem[0]
    if len(problem) not in (1, 2):
        raise ValueError(
            "q: expected one of the calls layer(q), layer(P, q) and layer(objective), with the "
            f"set's parameters by name, got {len(problem)} arguments"
        )
    return Quadratic(*problem) if len(problem) == 2 else Quadratic(None, *problem)


def _unless_empty(value: Any) -> Any:
    """None for a tensor without entries, which stands for a part that is missing."""
    return None if isinstance(value, Tensor) and value.numel() == 0 else value


@contextmanager
def _renamed(**names: str) -> Iterator[None]:
    """Errors that call arguments as the caller does."""
    letter = "[A-Za-z0-9_]"
    pattern = re.compile(rf"(?<!{letter})({'|'.join(names)})(?!{letter})")
    try:
        yield
    except ValueError as error:
        told = pattern.sub(lambda found: names[found.group()], str(error))
        raise ValueError(told) from error


@dataclass(frozen=True)
class _Settings:
    """A layer as it is recorded: what it is, without the tensors it may hold."""

    kind: type[_Layer]
    own: dict[str, Any]

    @cached_property
    def layer(self) -> Any:
        """One like it, that warns for itself."""
        made = object.__new__(self.kind)
        own = {"constraint": None, "shape": None} | self.own
        nn.Module.__init__(made)
        vars(made).update(own, _warned=[False])
        return made


def _checked_x(layer: _Layer, solution: Solution) -> Tensor:
    layer._check(solution)
    return solution.x


def _real(layer: Any) -> Any:
    return layer.layer if isinstance(layer, _Settings) else layer


def _ball_shapes(layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any) -> Any:
    ball = LpBall(_real(layer).p, radius, weight, centre=centre)
    return outline(Quadratic(P, q), ball)[:1]


def _ball_again(
    found: Any, layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any
) -> Any:
    own = _real(layer)
    ball = LpBall(own.p, radius, weight, centre=centre)
    return again(found, Quadratic(P, q), ball, **own._options())


def _ball_direct(layer: Any, P: Any, q: Any, weight: Any, radius: Any, centre: Any) -> Any:
    own = _real(layer)
    if P is not None or centre is not None or not own._projects:
        return None
    return project_and_back(q, weight, radius, own.verify)


@recordable(shapes=_ball_shapes, again=_ball_again, direct=_ball_direct)
def _ball(
    layer: Any,
    P: Tensor | None,
    q: Tensor,
    weight: Tensor | None,
    radius: float | Tensor,
    centre: Tensor | None,
) -> Tensor:
    """The solution, by the shortest way."""
    own = _real(layer)
    if P is None and centre is None and own._projects:
        x = project(q, weight, radius, own.verify)
        if x is not None:
            return x
    return _checked_x(own, own.solve(P, q, weight, radius, centre=centre))


def _set_shapes(_: Any, objective: Any, constraint: Any, shape: Any) -> Any:
    return outline(objective, constraint, shape=shape)[:1]


def _set_again(found: Any, layer: Any, objective: Any, constraint: Any, shape: Any) -> Any:
    return again(found, objective, constraint, shape=shape, **_real(layer)._options())


@recordable(shapes=_set_shapes, again=_set_again)
def _over_set(
    layer: Any, objective: Objective, constraint: Constraint, shape: tuple[int, ...] | int | None
) -> Tensor:
    """The solution over any set."""
    own = _real(layer)
    return _checked_x(own, own._solved(objective, constraint, shape=shape))


def _program_shapes(_: Any, Q: Any, p: Any, *rows: Any) -> Any:
    return outline(Quadratic(Q, p), Polyhedron(*map(_unless_empty, rows)))[:1]


def _program_again(found: Any, layer: Any, Q: Any, p: Any, *rows: Any) -> Any:
    parts = Polyhedron(*map(_unless_empty, rows))
    return again(found, Quadratic(Q, p), parts, **_real(layer)._options())


@recordable(shapes=_program_shapes, again=_program_again)
def _program(layer: Any, *given: Tensor | None) -> Tensor:
    """The solution of a quadratic program."""
    own = _real(layer)
    return _checked_x(own, own.solve(*given))


def _failures(status: Tensor) -> dict[Status, int]:
    """How many problems failed in which way; a GPU is waited for."""
    codes = unwrapped(status).reshape(-1).cpu()
    if not bool(codes.any()):  # all have converged
        return {}
    # one by one: PyTorch 2.6 cannot make a list inside of torch.func.grad
    counts = {s: int((codes == s).sum()) for s in FAILURES}
    return {s: count for s, count in counts.items() if count}
