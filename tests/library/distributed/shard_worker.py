"""What each process of test_row_sharded.py does: cases of which it has the rows of its rank.

Every case is solved by all processes together and by each alone with all rows, and what differs is
collected. The first process writes what was found.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dfwlayer as dfw

F64 = torch.float64
SETS: dict[str, Callable[[Tensor], Any]] = {
    "l1": lambda t: dfw.LpBall(1, t),
    "l2": lambda t: dfw.LpBall(2, t),
    "simplex": lambda t: dfw.Simplex(t),
    "box": lambda t: dfw.Box(-0.02 * t.detach(), 0.03 * t),
}
# rows, columns, batch; the second is solved by working sets
SIZES = {"tall": (60, 9, None), "wide": (30, 120, None), "batch": (40, 8, 3)}


def share(rows: int, rank: int, size: int) -> slice:
    """Rows of a process: uneven, and none for the second of four."""
    cuts = [0, rows // 5, rows // 5, rows] if size == 3 else [0, rows // 3, rows]
    return slice(cuts[rank], cuts[rank + 1])


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to what is expected."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    size = max(float(expected.detach().abs().max()), 1e-12)
    return float((found.detach() - expected.detach()).abs().max()) / size


class Work:
    """The cases, by name."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def data(self, name: str, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, batch = SIZES[name]
        draw = torch.Generator().manual_seed(len(name))
        lead = () if batch is None else (batch,)
        A = torch.randn(rows, columns, generator=draw, dtype=F64)
        b = torch.randn(*lead, rows, generator=draw, dtype=F64)
        return A.to(dtype), b.to(dtype), torch.randn(columns, generator=draw, dtype=F64).to(dtype)

    def solved(self, name: str, body: str, sparse: bool, together: bool) -> tuple[Any, ...]:
        A, b, c = self.data(name)
        own = share(len(A), self.rank, self.size) if together else slice(None)
        A, b = A[own].clone().requires_grad_(), b[..., own].clone().requires_grad_()
        t = torch.tensor(0.4, dtype=F64, requires_grad=True)
        given = A.to_sparse() if sparse else A
        f = dfw.LeastSquares(given, b, group=self.group if together else None)
        sol = dfw.solve(f, SETS[body](t), tol=1e-9)
        ((sol.x * c).sum() + 0.3 * sol.value.sum()).backward()
        return sol, A.grad, b.grad, t.grad

    def same(self, names: Any = SIZES, bodies: Any = SETS) -> dict[str, float]:
        """x, value, gap, status and gradients, of all sets, sizes and layouts."""
        found = {}
        for name in names:
            for body in bodies:
                for sparse in (False, True):
                    one = self.solved(name, body, sparse, together=False)
                    many = self.solved(name, body, sparse, together=True)
                    own = share(SIZES[name][0], self.rank, self.size)
                    expected = one[0].x, one[0].value, one[1][own], one[2][..., own], one[3]
                    differ = map(apart, (many[0].x, many[0].value, *many[1:]), expected)
                    key = f"{name} {body} {'sparse' if sparse else 'dense'}"
                    found[key] = max(differ)
                    assert torch.equal(many[0].status, one[0].status), key
                    assert bool((many[0].gap <= 1e-9 * many[0].value.abs()).all()), key
        return found

    def some(self) -> dict[str, float]:
        """Some of them, for more processes."""
        return self.same(("tall", "wide"), ("l1", "l2"))

    def agreed(self) -> dict[str, float]:
        """All processes have the same bits."""
        sol = self.solved("wide", "l1", False, together=True)
        mine = [sol[0].x.tolist(), sol[0].gap.item(), sol[0].status.item(), sol[3].item()]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return {"bits": float(any(other != everyone[0] for other in everyone))}

    def traffic(self) -> dict[str, float]:
        """A step sums one n-vector with f and a mark; a pool adds its products once."""
        A, b, _ = self.data("wide")
        own, n = share(len(A), self.rank, self.size), A.shape[1]
        found = {}
        for name, body in (("pool", dfw.LpBall(1, 0.4)), ("steps", dfw.LpBall(2, 0.4))):
            f = dfw.LeastSquares(A[own], b[own], group=self.group)
            f.group.traffic.clear()
            sol = dfw.solve(f, body, tol=1e-9)
            seen = f.group.traffic
            kinds = dict(seen.kinds)
            looks = [kinds.pop(kind) for kind in ("gradient", "product") if kind in kinds]
            each = [numbers / calls for calls, numbers in looks]  # f goes with some gradients
            found[f"{name} gradient"] = float(not all(n + 1 <= k <= n + 2 for k in each))
            calls, numbers = kinds.pop("lengths")
            found[f"{name} lengths"] = float(numbers > calls * (n + 4))
            found[f"{name} checks"] = float(kinds.pop("checks")[1] > 8)
            rounds, numbers = kinds.pop("columns of the pool", (0, 0))
            found[f"{name} products"] = float(numbers > 128**2 + 129 * rounds)  # and their slopes
            found[f"{name} others"] = float(len(kinds))
            found[f"{name} seconds"] = float(not 0 < seen.seconds < 60)
            found[f"{name} bytes"] = float(seen.bytes != 8 * seen.numbers)
            found[f"{name} status"] = float(sol.status)
        return found

    def precision(self) -> dict[str, float]:
        A, b, _ = self.data("tall", torch.float32)
        own = share(len(A), self.rank, self.size)
        many = dfw.solve(dfw.LeastSquares(A[own], b[own], group=self.group), dfw.LpBall(2, 0.4))
        one = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(2, 0.4))
        return {"float32": 1e-4 * apart(many.x, one.x)}

    def warm(self) -> dict[str, float]:
        """A second call from the last solution, with other data."""
        A, b, _ = self.data("wide")
        own = share(len(A), self.rank, self.size)
        first = dfw.solve(dfw.LeastSquares(A[own], b[own], group=self.group), dfw.LpBall(1, 0.4))
        f = dfw.LeastSquares(A[own], 1.1 * b[own], group=self.group)
        again = dfw.solve(f, dfw.LpBall(1, 0.4), x0=first.x)
        plain = dfw.solve(dfw.LeastSquares(A, 1.1 * b), dfw.LpBall(1, 0.4))
        return {"x": apart(again.x, plain.x)}

    def second(self) -> dict[str, float]:
        """Derivatives of derivatives, multipliers, and methods other than the default."""
        A, b, _ = self.data("tall")
        own = share(len(A), self.rank, self.size)
        found = {}
        for body in ("l1", "l2"):
            parts = []
            for rows, group in ((own, self.group), (slice(None), None)):
                mine, t = A[rows].clone().requires_grad_(), torch.tensor(0.2, dtype=F64)
                t.requires_grad_()
                sol = dfw.solve(dfw.LeastSquares(mine, b[rows], group=group), SETS[body](t))
                (g,) = torch.autograd.grad(sol.x.sum(), mine, create_graph=True)
                g.square().sum().backward()
                parts.append((sol.multipliers["radius"], mine.grad, t.grad))
            (price, in_A, in_t), (price_1, in_A_1, in_t_1) = parts
            pairs = ((price, price_1), (in_A, in_A_1[own]), (in_t, in_t_1))
            found[body] = max(apart(*pair) for pair in pairs)
        rows_of = torch.cat((torch.eye(9, dtype=F64), torch.ones(1, 9, dtype=F64)))
        for name, bodies, batch in (
            ("polyhedron", dfw.Polyhedron(rows_of, 0.01), ()),
            ("one A each", dfw.Polyhedron(rows_of, 0.01), (2, 1, 1)),
        ):
            parts = []
            for rows, group in ((own, self.group), (slice(None), None)):
                mine = A[rows].repeat(batch) if batch else A[rows].clone()
                mine.requires_grad_()
                sol = dfw.solve(dfw.LeastSquares(mine, b[rows], group=group), bodies)
                sol.x.square().sum().backward()
                parts.append((sol.x, mine.grad))
            (x, in_A), (x_1, in_A_1) = parts
            found[name] = max(apart(x, x_1), apart(in_A, in_A_1[..., own, :]))
        for method in ("frank-wolfe", "dfw", "active-set"):
            parts = []
            for rows, group in ((own, self.group), (slice(None), None)):
                mine = A[rows].clone().requires_grad_()
                f = dfw.LeastSquares(mine, b[rows], group=group)
                sol = dfw.solve(f, dfw.LpBall(1, 0.2), method=method)
                sol.x.square().sum().backward()
                parts.append((sol.x, mine.grad))
            (x, in_A), (x_1, in_A_1) = parts
            found[method] = max(apart(x, x_1), apart(in_A, in_A_1[own]))
        return found

    def asking(self) -> dict[str, float]:
        """One process asks for gradients, or for another loss than the others: the mean counts."""
        A, b, _ = self.data("tall")
        own = share(len(A), self.rank, self.size)
        mine = A[own].clone().requires_grad_(self.rank == 0)
        sol = dfw.solve(dfw.LeastSquares(mine, b[own], group=self.group), dfw.LpBall(1, 0.2))
        (self.size * (self.rank == 0) * sol.x.square().sum()).backward()
        whole = A.clone().requires_grad_()
        one = dfw.solve(dfw.LeastSquares(whole, b), dfw.LpBall(1, 0.2))
        one.x.square().sum().backward()
        return {"A": apart(mine.grad, whole.grad[own]) if self.rank == 0 else 0.0}

    def tensors(self) -> dict[str, float]:
        """DTensors with Shard(0)."""
        mesh = init_device_mesh("cpu", (self.size,))
        A, b, _ = self.data("wide")
        parts = []
        for put in (lambda m: distribute_tensor(m, mesh, [Shard(0)]), lambda m: m.clone()):
            mine = put(A).requires_grad_()
            sol = dfw.solve(dfw.LeastSquares(mine, put(b)), dfw.LpBall(1, 0.4))
            sol.x.square().sum().backward()
            parts.append((sol.x, mine.grad))
        (x, grad), (x_1, grad_1) = parts
        found = {"least squares": max(apart(x, x_1), apart(grad.full_tensor(), grad_1))}
        M, q = A[:29, :40], b[:29]  # so that processes have uneven rows
        P = M @ M.mT / len(M) + 0.01 * torch.eye(len(M), dtype=F64)
        bodies = dict(SETS) | {
            "polyhedron": lambda t: dfw.Polyhedron(torch.eye(len(q), dtype=F64), 0.1 * t)
        }
        for name, body in bodies.items():
            parts = []
            for put in (lambda m: distribute_tensor(m, mesh, [Shard(0)]), lambda m: m.clone()):
                mine, cost = put(P).requires_grad_(), q.clone().requires_grad_()
                t = torch.tensor(0.4, dtype=F64, requires_grad=True)
                sol = dfw.solve(dfw.Quadratic(mine, cost), body(t), tol=1e-9)
                (sol.x.square().sum() + 0.3 * sol.value).backward()
                assert int(sol.status) == 0, name
                rows = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
                parts.append((sol.x, rows, cost.grad, t.grad))
            found[f"quadratic {name}"] = max(map(apart, *parts))
        for wrong, remedy in (
            (lambda: dfw.LeastSquares(distribute_tensor(A, mesh, [Shard(0)]), b), "DTensor"),
            (
                lambda: dfw.LeastSquares(
                    distribute_tensor(A, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
                ),
                "redistribute",
            ),
            (
                lambda: dfw.solve(
                    dfw.Quadratic(P, q), dfw.LpBall(1), x0=distribute_tensor(q, mesh, [Replicate()])
                ),
                "full_tensor",
            ),
        ):
            found[f"refused: {remedy}"] = float(not refused(wrong, remedy))
        return found

    def faults(self) -> dict[str, float]:
        """What is wrong on one process is told to all, and the group lives on."""
        A, b, _ = self.data("tall")
        own, last = share(len(A), self.rank, self.size), self.size - 1
        mine, target = A[own].clone(), b[own].clone()
        bad = mine.clone()
        if self.rank == last:
            bad[0, 0] = torch.nan
        ball = dfw.LpBall(1, 0.2)

        def solve(rows: Tensor, rhs: Tensor, body: Any = ball, **options: Any) -> Any:
            return dfw.solve(dfw.LeastSquares(rows, rhs, group=self.group), body, **options)

        tales = {
            "NaN or infinite": lambda: solve(bad, target),
            "b: expected shape": lambda: solve(mine, target[1:] if self.rank == last else target),
            "on all processes": lambda: solve(mine[:, 1:] if self.rank == last else mine, target),
            "torch.func": lambda: torch.func.grad(lambda m: solve(m, target).x.sum())(mine),
            "process group": lambda: dfw.LeastSquares(mine, target, group="world"),
        }
        found = {text: float(not refused(run, text)) for text, run in tales.items()}
        batch = torch.stack((target, target))
        if self.rank == last:
            batch[1, 0] = torch.inf
        sol = solve(mine, batch)
        good = dfw.solve(dfw.LeastSquares(A, b), ball)
        found["batch"] = apart(sol.x[0], good.x) + float(sol.status.tolist() != [0, 3])
        different = dfw.LpBall(1, 0.2 + 0.1 * (self.rank == last))
        found["other sets"] = float(
            not refused(lambda: solve(mine, target, different, method="frank-wolfe"), "OMP_NUM")
        )
        f = dfw.LeastSquares(mine, target, group=self.group)
        assert copy.deepcopy(f).group is f.group
        found["pickled"] = float(not refused(lambda: pickle.dumps(f), "make it anew"))
        return found


def refused(run: Callable[[], Any], words: str) -> bool:
    """Whether an error says so."""
    try:
        run()
    except (ValueError, TypeError, dfw.LostProcessError) as error:
        return words in str(error)
    return False


def late(work: Work) -> str:
    """What a process is told whose others do not come; they have two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    told = ""
    if work.rank == 0:
        A, b, _ = work.data("tall")
        try:
            dfw.LeastSquares(A, b, group=group)
        except dfw.LostProcessError as error:
            told = str(error)
    dist.barrier()
    return told


def killed(work: Work) -> str:
    """What the others are told when the last one dies in the middle of a solve."""
    A, b, _ = work.data("tall")
    own = share(len(A), work.rank, work.size)

    def die(progress: Any) -> None:
        if work.rank == work.size - 1 and int(progress.num_steps) > 2:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        f = dfw.LeastSquares(A[own], b[own], group=work.group)
        dfw.solve(f, dfw.LpBall(1, 0.2), method="frank-wolfe", callback=die)
    except dfw.LostProcessError as error:
        return str(error)
    return ""


def main() -> None:
    folder, rank, size, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    work, found = Work(), {}
    for name in names:
        mine: dict[str, float] = getattr(work, name)()
        everyone: list[Any] = [None] * work.size
        dist.all_gather_object(everyone, mine)
        found[name] = {key: max(each[key] for each in everyone) for key in mine}
    told = {"late": late(work), "killed": killed(work)}
    if work.rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps({"found": found, "told": told}))
    os._exit(0)  # the group is not whole any more


if __name__ == "__main__":
    main()
