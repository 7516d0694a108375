"""A convex set: what methods and the implicit gradient may ask of it, and what follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensors
from dfwlayer.constraints.abilities import Atoms, Recordable
from dfwlayer.constraints.binding import ASKED, bound_first, bound_type, copied, measured
from dfwlayer.constraints.face import Face
from dfwlayer.constraints.minimum import Minimum
from dfwlayer.constraints.parameters import Kind, Parameter, merged, table
from dfwlayer.constraints.perturbed import mean_vertex
from dfwlayer.constraints.plain import Plain
from dfwlayer.constraints.region import Block, Region
from dfwlayer.constraints.relaxation import Relaxation
from dfwlayer.linalg.hull import Descent
from dfwlayer.ops.rows import Scalar, dot, norm
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.tracing import deferred
from dfwlayer.ops.values import Value, shape_of, tensor_of, tensors_among

if TYPE_CHECKING:
    from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron

__all__ = ["Around", "Atoms", "Constraint", "Face", "Recordable", "measured"]


class Around(NamedTuple):
    """A set {x : x − c ∈ S} as it was given."""

    inner: Constraint  # S
    centre: Value  # c
    placed: Callable[[Tensor], Tensor]  # y ↦ c + y, as `Constraint.placed` has it


class Constraint(ABC):
    """A convex set, one per problem; vectors are rows (B, n), or (n,) for a single problem.

    A set is a frozen dataclass. It declares its parameters as fields (`number` and `entries` of
    `dfwlayer.constraints.parameters`) and writes `vertex`, `project`, `retract` and `face`. The
    rest follows, and is written where there is a better answer than what follows.

    What a set writes is asked of a *bound* set only, whose parameters are tensors: () or (B,) for
    a number, (n,) or (B, n) for entries. `solve` binds a set once, so that what a bound set keeps
    (`measured`) lives as long as one solve. A set that is asked on its own is bound for that one
    question.

    Some coordinates may be without a bound, on one side or on both (those of zero weight); methods
    move them along the gradient where it points to an open side.
    """

    bound: ClassVar[bool] = False
    unchecked: ClassVar[bool] = False  # made while operations were recorded
    # dimensions of one problem's fields, of a set in whose fields any tensor may have a batch
    ranks: ClassVar[Mapping[str, int]] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = deferred(cls.__post_init__)  # type: ignore[method-assign]
        for name in () if cls.bound else ASKED & vars(cls).keys():
            setattr(cls, name, bound_first(name, vars(cls)[name]))

    @deferred
    def __post_init__(self) -> None:
        for name, about in table(type(self)).items():
            object.__setattr__(self, name, about.check(name, getattr(self, name)))
        tensors = self.tensors()
        if tensors:
            check_tensors(tensors, half_allowed=True, sparse=self._maybe_sparse())
        else:
            self.check_values()

    # what a set writes

    @abstractmethod
    def vertex(self, g: Tensor) -> Tensor:
        """A minimiser of ⟨g, s⟩ over the set, zero along the coordinates that are `open_ended`."""

    @abstractmethod
    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """The point of the set nearest to z: (..., n) -> (..., n).

        ``near`` is a point whose face may be that of the result, for sets that can use a guess.
        """

    @abstractmethod
    def retract(self, x: Tensor) -> Tensor:
        """A point of the set next to x, and x itself where x is inside."""

    @abstractmethod
    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> Face:
        """The local face at x, given ∇f(x) = g.

        Without ``scale`` it is the face x lies on to rounding. With the scale of f at x it is the
        face on which the solution next to x is expected, as `dfwlayer.ops.scale` tells it.
        """

    def check_values(self) -> Tensor | None:
        """Statuses (B,) of the problems whose set is empty or has no meaning, None if none is.

        A ValueError where that is so for what all problems share; see
        `dfwlayer.constraints.parameters.fault`. Values are finite and in the range that was
        declared. They are numbers still where a set has nothing else and was not bound yet.
        """
        return None

    # what follows from the parameters

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Batch size of every parameter that has a batch dimension, by name.

        ``shape`` is that of one problem's variable.
        """
        return {name: lead[0] for name, lead in self.leads(shape).items()}

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """All batch dimensions of these parameters, by name."""
        about, own = table(type(self)), self.shape_of(shape)
        return {
            name: tuple(tensor.shape[: tensor.dim() - rank])
            for name, tensor in self.tensors().items()
            if tensor.dim() > (rank := about[name].dims(own))
        }

    @property
    def deep(self) -> bool:
        """Whether a parameter may have several batch dimensions, or a variable be no vector."""
        for name, about in table(type(self)).items():
            if len(shape_of(getattr(self, name))) > about.kind + 1:
                return True
        return False

    def variable(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a variable that a tensor (*batch, *shape) of these sizes stands for.

        None where the set does not say: it is a vector then.
        """
        return None

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Constraint:
        """The same over vectors, all batch dimensions as one; ``lead`` are the problems'."""
        about, own = table(type(self)), self.shape_of(shape)
        values = {
            name: about[name].in_one_batch(name, tensor, own, lead)
            for name, tensor in self.tensors().items()
        }
        return self._within(lambda part: part.flattened(shape, lead), values) or self

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """The set over flattened variables of that shape, its parameters as tensors."""
        values: dict[str, Tensor] = {}
        like = torch.empty(0, dtype=dtype, device=device)
        for name, about in table(type(self)).items():
            value: Value | None = getattr(self, name)
            if value is None:
                continue
            values[name] = about.flat(name, tensor_of(value, like), self.shape_of(shape))
        if values:
            check_tensors({"the objective": like} | values, sparse=self._maybe_sparse())
        return self.as_bound(**values)

    @property
    def variable_dims(self) -> int:
        """Dimensions of one problem's variable, for a set that is asked on its own."""
        return 1

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one problem's entries, for variables of that shape."""
        return shape

    def float32(self) -> Self:
        """The same set with half-precision parameters in float32."""
        wide = {
            name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            for name, tensor in self.tensors().items()
        }
        return self._within(lambda part: part.float32(), wide) or self

    def verified(self) -> tuple[Self, Tensor | None]:
        """Raise ValueError for values no set can have; what is wrong with single problems.

        That is a status (B,), 0 for problems that can be solved, or None.
        """
        about, tensors = table(type(self)), self.tensors()
        bad = merged(
            *(about[name].not_finite(name, tensor) for name, tensor in tensors.items()),
            *(about[name].out_of_range(name, tensor) for name, tensor in tensors.items()),
        )
        sound = self if bad is None else self.replace_rows(bad != 0)
        return self, merged(bad, sound.check_values())

    def replace_rows(self, bad: Tensor) -> Self:
        """The set with harmless constants in place of the problems that are flagged."""
        return (
            self._within(
                lambda part: part.replace_rows(bad),
                self._parameters(lambda about, tensor: about.replaced(tensor, bad)),
            )
            or self
        )

    def rows(self, index: Tensor) -> Constraint | None:
        """The sets of the problems at these positions, None where that cannot be."""
        return self._within(
            lambda part: part.rows(index),
            self._parameters(
                lambda about, tensor: (
                    tensor[index] if tensor.dim() > about.kind and len(tensor) > 1 else tensor
                )
            ),
        )

    def scaled(self, factor: Tensor) -> Constraint | None:
        """{factor · x : x in the set} for a factor () or (B,) > 0, None where that cannot be."""
        if not any(about.grows for about in table(type(self)).values()):
            return None
        return self._within(
            lambda part: part.scaled(factor),
            self._parameters(
                lambda about, tensor: tensor * about.beside(factor) if about.grows else tensor
            ),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that are tensors, by name."""
        return tensors_among({name: getattr(self, name) for name in table(type(self))})

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """What `Solution.multipliers` has a price for, by name: the parameters that grow with the
        set, such as radii, bounds and levels.

        With each of them the shape of one problem's, None where it is that of the tensor.
        ``shape`` is that of one problem's variable.
        """
        sizes = {Kind.NUMBER: (), Kind.ENTRIES: self.shape_of(shape)}
        return {
            name: (value, None if about.apart else sizes.get(about.kind))
            for name, about in table(type(self)).items()
            if about.grows and (value := getattr(self, name)) is not None
        }

    def blank(self, n: int) -> Tensor:
        """Ones (n,) of the parameters' dtype and device."""
        own = next(iter(self.tensors().values()), torch.empty(0))
        return torch.ones(n, dtype=own.dtype, device=own.device)

    def changed(self, **values: Any) -> Self:
        """The set with other values in some of its fields, which are not checked."""
        return copied(self, type(self), values)

    def as_bound(self, **values: Any) -> Self:
        """The bound set with these values, whose parameters are all tensors of the right shape."""
        bound: type[Self] = bound_type(type(self))
        return copied(self, bound, values)

    def _maybe_sparse(self) -> list[str]:
        return [name for name, about in table(type(self)).items() if about.sparse]

    def _parameters(self, change: Callable[[Parameter, Tensor], Tensor]) -> dict[str, Tensor]:
        about = table(type(self))
        return {name: change(about[name], tensor) for name, tensor in self.tensors().items()}

    def _within(
        self, ask: Callable[[Constraint], Constraint | None], values: dict[str, Tensor]
    ) -> Self | None:
        """The set with other parameters and other sets in it, None where one of them is None."""
        return self.changed(**values)

    # what follows from vertex, project, retract and face

    def start(self, like: Tensor) -> Tensor:
        """A point of the set for every row of ``like`` (B, n)."""
        return self.retract(self.project(torch.zeros_like(like)))

    def unbounded(self) -> Tensor | None:
        """Mask (n,) or (B, n) of the coordinates without a bound, on a side or on both.

        None if there are none.
        """
        return None

    def open_ended(self, g: Tensor) -> Tensor | None:
        """Those of them along which ⟨g, s⟩ falls for ever: open on both sides, or on that of −g."""
        return self.unbounded()

    def relaxation(self, x: Tensor, g: Tensor) -> Relaxation | None:
        """A set whose part in some planes this is, if ⟨g, s⟩ may fall for ever, told at x."""
        return None

    def lowest(self, g: Tensor) -> Tensor:
        """min ⟨g, s⟩ over the set, leaving open-ended coordinates aside: (..., n) -> (...)."""
        return dot(g, self.vertex(g))

    def lowest_terms(self, g: Tensor) -> Tensor | None:  # (..., n) -> (...)
        """The size of what `lowest` sums up, None where that is ⟨g, s⟩ for the vertex s."""
        return None

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """A point of the set that depends smoothly on g and tends to the vertex as τ → 0.

        Unless a set knows better, it is a mean of vertices for costs with noise of size τ, and its
        derivative an estimate: see `dfwlayer.constraints.perturbed`.
        """
        return mean_vertex(self.vertex, g, temperature)

    def atoms(self) -> Atoms | None:
        """The vertices where they are few, None otherwise."""
        return None

    def violation(self, x: Tensor) -> Tensor:
        """How far x is outside, in the units of the radius; 0 inside: (B, n) -> (B,)."""
        return norm(x - self.retract(x.detach()))

    def diameter(self, n: int) -> Tensor:
        """Largest Euclidean distance of two points in n dimensions, () or (B,), or infinity.

        Unless a set knows better, that of two vertices, which is no more than that.
        """
        direction = self.blank(n).cumsum(-1).cos()
        ends = self.vertex(direction).detach(), self.vertex(-direction).detach()
        return norm(ends[0] - ends[1])

    # what only some sets can do

    @property
    def preferred_method(self) -> str:
        """What "auto" means for it."""
        return "auto"

    def nearest(self, z: Tensor) -> tuple[Tensor, Face] | None:
        """The point of the set nearest to z (..., n), feasible to rounding, and its face."""
        return None

    def stretched(self, factor: Tensor) -> Constraint | None:
        """{factor ∘ x : x in the set} for a positive factor (n,) or (B, n)."""
        return None

    def step(self, x: Tensor, gradient: Tensor, curvature: Scalar) -> Tensor | None:
        """The projection of x − gradient/curvature by a kernel, None where there is none."""
        return None

    def centred(self) -> tuple[Constraint, Tensor] | None:
        """S and c, (n,) or (B, n), of a set {x : x − c ∈ S}; `solve` looks for x − c."""
        return None

    def placed(self, y: Tensor) -> Tensor:
        """The x = c + y of a set around a centre c, for a y of S, both (..., n)."""
        return y

    def around(self, like: Tensor) -> Around | None:
        """The same of a set that is not bound, for vectors like these (..., n)."""
        return None

    def region(self, like: Tensor) -> Region | None:
        """A bound set for vectors like these (B, n) as bounds, budgets and equations."""
        return None

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """Bounds, budgets and equations, or a ball, for each block of the n coordinates.

        Or a polyhedron, which is the only block then.

        Asked of a set as it was given, after `is_plain`. What depends on its parameters does so for
        autograd, too. A problem whose parameters make no set may have NaN in its place. Which of
        its parameters stand where, and which numbers beside them, follows from their types, shapes
        and numbers alone: where all tensors in it are parameters as they were given, it is asked
        once for all calls that have these in common.
        """
        return None

    def form_in_sight(self, n: int) -> Sequence[Block] | None:
        """The same in operations that compilers can follow, also for a set of a single point."""
        return self.normal_form(n)

    def is_plain(self, like: Tensor) -> bool:
        """Whether nothing is wrong with the parameters, for vectors like these (..., n).

        Asked of a set as it was given: their dtype, device and shape, and the range of those that
        all problems share, where NaN is out of range.
        """
        return all(
            about.is_plain(value, like)
            for name, about in table(type(self)).items()
            if isinstance(value := getattr(self, name), Tensor)
        )

    def as_polyhedron(self, like: Tensor) -> Polyhedron | None:
        """A bound set for vectors like these (..., n) as a bound `Polyhedron`, where it is one."""
        return None

    def minimised(self, P: Tensor, q: Tensor, like: Tensor, most: int) -> Minimum | None:
        """The minimiser of ½ xᵀPx + qᵀx over a bound set, for vectors like these (..., n).

        P is (n, n) or (B, n, n) and q (B, n), in double precision; ``most`` is the number of steps
        after which any point of the set will do. P is sparse where the set `takes_sparse` ones.
        """
        return None

    def takes_sparse(self, like: Tensor) -> bool:
        """Whether `minimised` should be given a sparse P, for vectors like these (..., n)."""
        return False

    def minimiser(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """(H, q) ↦ argmin ½⟨x, Hx⟩ + ⟨q, x⟩ over a bound set that has an equation for it.

        H is (n, n) or (B, n, n), q and the result (B, n), in double precision.
        """
        return None

    def hull_faces(self) -> Callable[[Descent], Face] | None:
        """How to tell the face at a combination of points, for a set that tells it best so."""
        return None

    def plain(self, *, fixed: bool = True) -> Plain | None:
        """The projection in tensor operations that ask for no value, to be exported.

        Asked of a set as it was given, over vectors. ``fixed`` says that its parameters are
        constants, from which something may be found beforehand. A ValueError says why that cannot
        be for a set that has one otherwise.
        """
        return None

    def as_recordable(self) -> Recordable | None:
        """The set, where its operations may be recorded in a CUDA graph."""
        return None
