"""One problem whose rows several processes hold: what they have to tell each other.

Every process has the same x and takes the same decisions, as all of them follow from x and from
sums over the processes, which are the same bits everywhere. So what is shared is one sum for each
product with Aᵀ, and nothing else. Each sum carries a number that was made from the bits of x: if
processes had come apart, it would be found with the next sum, and not go into a solution.

Derivatives: what all processes have (x, the gradient, a set's parameters) has a derivative that all
of them have; what is one process's own (its rows) has its own. `Shards.spread` and `Shards.total`
lead from one to the other, and each is the other's derivative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

from dfwlayer.ops.passed import with_gradient

__all__ = [
    "ALONE",
    "LostProcessError",
    "Member",
    "Shards",
    "Traffic",
    "is_distributed",
    "own_rows",
    "whole",
]

# numbers of which as many as there are processes can be added without rounding
DIGITS = {torch.float32: 2**11, torch.float64: 2**40}
WORDS = {4: torch.int32, 8: torch.int64}


class LostProcessError(ConnectionError):
    """Another process has ended, does not answer, or does something else."""


@dataclass
class Traffic:
    """What one process has exchanged with the others."""

    calls: int = 0
    numbers: int = 0  # in the messages, of any dtype
    bytes: int = 0
    seconds: float = 0.0  # from the call to the result, so with the wait for those who are late
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)  # calls, numbers of each kind

    def clear(self) -> None:
        """Begin anew."""
        self.calls = self.numbers = self.bytes = 0
        self.seconds = 0.0
        self.kinds.clear()


class Member(ABC):
    """What an objective asks of the processes that hold its rows."""

    size: int
    rank: int

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """What all processes have, for use with what is this one's own."""

    @abstractmethod
    def total(self, own: Tensor, what: str, at: Tensor | None = None) -> Tensor:
        """The sum over the processes; ``at`` is what all of them should have, x for instance."""

    @abstractmethod
    def any(self, flag: Tensor) -> Tensor:
        """Whether a flag holds on any of them."""


class Alone(Member):
    """One process that has everything."""

    size, rank = 1, 0

    def spread(self, x: Tensor) -> Tensor:
        return x

    def total(self, own: Tensor, what: str, at: Tensor | None = None) -> Tensor:
        return own

    def any(self, flag: Tensor) -> Tensor:
        return flag


ALONE = Alone()


class Shards(Member):
    """A process group of which each process has some of the rows.

    Args:
        group: Of `torch.distributed`.
        rows: How many this process has.
        facts: What has to be the same everywhere, by name.
        asks: Whether this process asks for derivatives, for each of its tensors.
        fault: What is wrong with this process's arguments, None if nothing is.
        device: Of the messages.

    Raises:
        ValueError: On all processes, if something is wrong on one, or they do not agree.

    """

    def __init__(
        self,
        group: ProcessGroup,
        rows: int = 0,
        facts: dict[str, str] | None = None,
        asks: Sequence[bool] = (),
        fault: ValueError | None = None,
        device: torch.device | None = None,
    ) -> None:
        if torch._C._are_functorch_transforms_active():
            self.refuse_transforms()
        self.group, self.device, self.traffic = group, device, Traffic()
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process does not belong to it; pass one that it is in")
        found = self.gathered((rows, facts or {}, tuple(asks), str(fault or "")), "arguments")
        self._refuse([each[3] for each in found], fault)
        for name, own in (facts or {}).items():
            others = [each[1].get(name) for each in found]
            if any(other != own for other in others):
                told = ", ".join(f"{other} on rank {r}" for r, other in enumerate(others))
                raise ValueError(f"{name}: expected the same on all processes, found {told}")
        self.rows = [each[0] for each in found]
        self.asked = tuple(any(flags) for flags in zip(*(each[2] for each in found), strict=True))

    @staticmethod
    def refuse_transforms() -> NoReturn:
        """Say what to do in place of torch.func."""
        raise ValueError(
            "group: torch.func and forward mode do not go past a process; call .backward() or "
            "torch.autograd.grad outside of them, or solve with an A that one process has"
        )

    def gathered(self, own: Any, what: str) -> list[Any]:
        """An object of each process."""
        found: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(found, own, group=self.group), what, 0, 0)
        return found

    def agree(self, fault: ValueError | None) -> None:
        """Raise on all processes if one has found something wrong."""
        self._refuse(self.gathered(str(fault or ""), "checks"), fault)

    def _refuse(self, faults: Sequence[str], own: ValueError | None) -> None:
        if own is not None:
            raise own
        for rank, fault in enumerate(faults):
            if fault:
                raise ValueError(f"on rank {rank} of the group, {fault}")

    def spread(self, x: Tensor) -> Tensor:
        """x; the derivative in it is the sum of all processes' derivatives."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return with_gradient(x, lambda grad: self.total(grad, "derivative in x"))

    def total(self, own: Tensor, what: str, at: Tensor | None = None) -> Tensor:
        """The sum, which all processes then have."""
        if not (own.requires_grad and torch.is_grad_enabled()):
            return self.summed(own, what, at)
        out: Tensor = _Total.apply(own, what, at, self)  # type: ignore[no-untyped-call]
        return out

    def any(self, flag: Tensor) -> Tensor:
        """A flag, or some of them."""
        return self.summed(flag.to(torch.float64), "checks") > 0

    def all(self, flag: bool) -> bool:
        """Whether something holds on all of them."""
        return not bool(self.any(torch.tensor([not flag], device=self.device)))

    def common(self, *found: Tensor) -> tuple[Tensor, ...]:
        """What all processes have found; its derivative is the mean of those that they ask for.

        That is the derivative itself where all have the same loss.
        """
        if not any(t.requires_grad for t in found):
            return found
        out: tuple[Tensor, ...] = _Common.apply(self, *found)  # type: ignore[no-untyped-call]
        return out

    def summed(self, own: Tensor, what: str, at: Tensor | None = None) -> Tensor:
        """The sum over the processes, without a derivative."""
        return self.together((own,), what, at)[0]

    def together(
        self, parts: Sequence[Tensor], what: str, at: Tensor | None = None
    ) -> list[Tensor]:
        """The sums of several tensors of one dtype, in one message."""
        parts = [part.detach() for part in parts]
        first = parts[0]
        mark = first.new_zeros(1) if at is None else _mark(at.detach(), first.dtype)
        message = torch.cat([*(part.reshape(-1) for part in parts), mark])
        self._call(
            lambda: dist.all_reduce(message, group=self.group),
            what,
            message.numel(),
            message.element_size(),
        )
        if at is not None and bool(message[-1] != self.size * mark[0]):
            self._apart(what)
        found = torch.split(message[:-1], [part.numel() for part in parts])
        return [sums.reshape(part.shape) for sums, part in zip(found, parts, strict=True)]

    def stacked(
        self, own: Tensor, rows: Sequence[int], what: str, at: Tensor | None = None
    ) -> Tensor:
        """The rows (m_k, ...) of all processes, one below the other; ``rows`` are their numbers."""
        own, most = own.detach(), max(rows)
        padded = own.new_zeros((most + 1, *own.shape[1:]))  # the last row tells what x is
        padded[: len(own)] = own
        if at is not None:
            padded[most:] = _mark(at.detach(), own.dtype)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._call(
            lambda: dist.all_gather(found, padded, group=self.group),
            what,
            self.size * padded.numel(),
            padded.element_size(),
        )
        if any(bool((part[most:] != padded[most:]).any()) for part in found):
            self._apart(what)
        return torch.cat([part[:count] for part, count in zip(found, rows, strict=True)])

    def _call(self, run: Callable[[], Any], what: str, numbers: int, width: int) -> None:
        """Run something that all processes have to run; count it."""
        begin, traffic = perf_counter(), self.traffic
        try:
            run()
        except RuntimeError as error:
            raise LostProcessError(
                f"rank {self.rank} of {self.size} was left alone in exchanging the {what} "
                f"({numbers} numbers): another process has ended, has raised an error, has not "
                "come here within the timeout of the process group, or makes other calls than this "
                "one. Look for the first error of the others; all have to make the same calls in "
                "the same order, and init_process_group(timeout=...) says how long one waits. "
                "Start all processes again, for instance with torchrun --max-restarts"
            ) from error
        traffic.seconds += perf_counter() - begin
        traffic.calls += 1
        traffic.numbers += numbers
        traffic.bytes += numbers * width
        calls, before = traffic.kinds.get(what, (0, 0))
        traffic.kinds[what] = calls + 1, before + numbers

    def _apart(self, what: str) -> NoReturn:
        raise LostProcessError(
            f"the processes of the group do not have the same point, as rank {self.rank} found in "
            f"exchanging the {what}: give all of them the same set, start (x0) and settings, the "
            "same number of threads (OMP_NUM_THREADS) and the same kind of processor"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """The same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an objective whose rows several processes hold cannot be pickled, as its process "
            "group cannot: make it anew, with the group, in the process that needs it"
        )


def is_distributed(value: Any) -> bool:
    """Whether a tensor is one of `torch.distributed.tensor`."""
    return type(value).__name__ == "DTensor" and isinstance(value, Tensor)


def own_rows(name: str, given: Tensor, dim: int) -> tuple[Tensor, ProcessGroup]:
    """The rows of a distributed tensor that this process holds, and the group that holds all.

    Rows are along ``dim``, counted from the end. The derivative in them is that of the tensor.
    """
    tensor: Any = given
    split = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    wanted = tensor.dim() + dim
    if len(split) != 1 or not tensor.placements[split[0]].is_shard(wanted):
        raise ValueError(
            f"{name}: expected a DTensor of which each process has some rows, with the placement "
            f"Shard({wanted}) along one dimension of its mesh, got {tensor.placements}; call "
            f".redistribute(placements=[Shard({wanted})])"
        )
    return tensor.to_local(), tensor.device_mesh.get_group(split[0])


def whole(given: Tensor) -> Tensor:
    """All of a distributed tensor, with its derivative."""
    tensor: Any = given
    found: Tensor = tensor.full_tensor()
    return found


def _mark(x: Tensor, dtype: torch.dtype) -> Tensor:  # (1,)
    """A number made of the bits of x, which the dtype can hold as often as there are processes."""
    words = x.contiguous().view(WORDS[x.element_size()])
    return (words.sum() % DIGITS[dtype]).to(dtype).reshape(1)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, what: str, at: Tensor | None, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.summed(own, what, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shards.spread(grad), None, None, None


class _Common(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, *found: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.like = shards, [t.detach() for t in found]
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # which of them any process asks for goes along, so that all do the same with them
        parts = []
        for grad, like in zip(grads, ctx.like, strict=True):
            parts.append(torch.zeros_like(like) if grad is None else grad)
            parts.append(like.new_full((1,), float(grad is not None)))
        flat = torch.cat([part.reshape(-1) for part in parts])
        mean = _Mean.apply(flat, ctx.shards)  # type: ignore[no-untyped-call]
        out: list[Tensor | None] = [None]
        for part, asked in zip(*[iter(mean.split([p.numel() for p in parts]))] * 2, strict=True):
            like = ctx.like[len(out) - 1]
            out.append(part.reshape(like.shape) if bool(asked.detach() > 0) else None)
        return tuple(out)


class _Mean(torch.autograd.Function):
    """The mean over the processes, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.summed(own, "derivative in the solution") / shards.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found: Tensor = _Mean.apply(grad, ctx.shards)  # type: ignore[no-untyped-call]
        return found, None
