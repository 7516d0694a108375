"""A grammar of bad values, crossed with every argument of everything public.

A call has to end in one of two ways: with a ValueError that begins with the name of an argument
of that call (of the set or objective it is in, where they are nested), or with a valid result:
finite or with a status that says why not.
"""

import math
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status

NAN, INF = math.nan, math.inf
N = 3


class Odd:
    """Something else, that does not even print."""

    def __repr__(self):
        raise RuntimeError("no")


def sparse(*shape):
    return torch.ones(*shape).to_sparse()


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


SCALARS = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "2": 2,
    "half": 0.5,
    "nan": NAN,
    "inf": INF,
    "-inf": -INF,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "1e300": 1e300,
    "2**70": 2**70,
    "1e-320": 1e-320,
    "complex": 1 + 1j,
    "fraction": Fraction(1, 2),
    "np.float64": np.float64(0.5),
    "np.float32": np.float32(0.5),
    "np.float16": np.float16(0.5),
    "np.int64": np.int64(2),
    "np.bool": np.bool_(True),
    "np.nan": np.float32(NAN),
    "np.complex": np.complex64(1j),
}
OBJECTS = {
    "string": "1",
    "empty string": "",
    "bytes": b"1",
    "list": [1.0, 2.0, 3.0],
    "ints": [0, 1, 2],
    "empty list": [],
    "tuple": (1, 2),
    "ragged": [[0], [1, "a"]],
    "mixed": [0, [1], None],
    "strings": ["a", "b", "c"],
    "huge indices": [10**400, 0, 1],
    "large indices": [[10**12], [0], [1]],
    "large labels": [10**12, 0, 1],
    "set": {1, 2},
    "dict": {"a": 1},
    "generator": iter([1, 2, 3]),
    "range": range(3),
    "object": Odd(),
    "function": lambda *_: None,
    "nonsense function": lambda *_: "hot",
    "tensor function": lambda *_: torch.ones(7, 2),
    "type": int,
    "layer": dfw.DFWLayer,
    "set type": dfw.LpBall,
    "rule type": dfw.ShortStep,
    "array": np.ones(3),
    "array 0-d": np.array(1.0),
    "object array": np.array([None, 1]),
    "module": torch.nn.Linear(2, 2),
    "dtype": torch.float32,
    "a ball": dfw.LpBall(1),
    "a quadratic": dfw.Quadratic(None, torch.ones(N)),
    "a rule": dfw.ShortStep(),
}
TENSORS = {
    "0-d": torch.tensor(0.5),
    "negative 0-d": torch.tensor(-0.5),
    "nan 0-d": torch.tensor(NAN),
    "inf 0-d": torch.tensor(INF),
    "(3,)": torch.ones(3),
    "(3,) of nan": torch.full((3,), NAN),
    "(3,) of inf": torch.full((3,), INF),
    "(3,) negative": -torch.ones(3),
    "(3,) zero": torch.zeros(3),
    "(2,)": torch.ones(2),
    "(2,) negative": torch.tensor([1.0, -1.0]),
    "(2,) nan": torch.tensor([1.0, NAN]),
    "(5,)": torch.ones(5),
    "(0,)": torch.ones(0),
    "(2, 3)": torch.ones(2, 3),
    "(2, 3) with nan": torch.tensor([[1.0, 1, 1], [1, NAN, 1]]),
    "(0, 3)": torch.ones(0, 3),
    "(4, 3)": torch.ones(4, 3),
    "(3, 0)": torch.ones(3, 0),
    "(3, 3)": torch.eye(3),
    "(3, 3) skew": torch.tensor([[1.0, 1, 0], [-1, 1, 0], [0, 0, 1]]),
    "(3, 3) singular": torch.ones(3, 3),
    "(2, 3, 3)": torch.eye(3).expand(2, 3, 3),
    "(1, 1, 1, 1)": torch.ones(1, 1, 1, 1),
    "double": torch.ones(3, dtype=torch.float64),
    "half": torch.ones(3).half(),
    "bfloat16": torch.tensor(1.0).bfloat16(),
    "long": torch.ones(3, dtype=torch.long),
    "labels": torch.tensor([0, 1, 1]),
    "gaps": torch.tensor([0, 10**12, 1]),
    "bool": torch.ones(3, dtype=torch.bool),
    "complex": torch.ones(3, dtype=torch.complex64),
    "complex 0-d": torch.tensor(1j),
    "sparse": sparse(3),
    "sparse 0-d": torch.tensor(1.0).to_sparse(),
    "sparse (3, 3)": sparse(3, 3),
    "meta": torch.ones(3, device="meta"),
    "meta 0-d": torch.ones((), device="meta"),
    "meta (3, 3)": torch.ones(3, 3, device="meta"),
    "meta labels": torch.ones(3, device="meta", dtype=torch.long),
    "nested": nested(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "huge": torch.full((3,), 1e18),
    "tiny": torch.full((3,), 1e-45),
}
VALUES = (
    {f"number {k}": v for k, v in SCALARS.items()}
    | {f"object {k}": v for k, v in OBJECTS.items()}
    | {f"tensor {k}": v for k, v in TENSORS.items()}
)

Q = torch.tensor([1.0, -2.0, 0.5])
P = torch.eye(N) * 2
A = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 3.0], [1.0, 1.0, 1.0]])
QUICK = {"max_steps": 10}


def solved(constraint, shape=(N,)):
    """A set is tried by a solve over it, which first of all has to know its shape."""
    if shape == (N,):
        return dfw.solve(dfw.Quadratic(P, Q), constraint, **QUICK)
    target = torch.ones(shape)
    f = dfw.Smooth(lambda x, c: ((x - c) ** 2).flatten(-len(shape)).sum(-1), target, shape=shape)
    return dfw.solve(f, constraint, **QUICK)


def vertex(cost):
    return -torch.sign(cost)


def quadratic(x, c):
    return ((x - c) ** 2).sum(-1)


def stepped(rule):
    return dfw.solve(
        dfw.Quadratic(P, Q), dfw.Simplex(), step_size=rule, method="frank-wolfe", **QUICK
    )


def cooled(temperature):
    return dfw.solve(
        dfw.Quadratic(P, Q), dfw.Simplex(), temperature=temperature, method="dfw", **QUICK
    )


def layer(P=P, q=Q, weight=None, radius=1.0, centre=None, **settings):
    made = dfw.DFWLayer(**(QUICK | {"on_failure": "ignore"} | settings))
    made(P, q, weight, radius, centre=centre)
    return made.solve(P, q, weight, radius, centre=centre)


def projected(q=Q, weight=None, radius=1.0):
    return dfw.DFWLayer(on_failure="ignore")(None, q, weight, radius)


# name: (the call, the arguments that are fine)
CALLABLES = {
    "LpBall": (lambda **k: solved(dfw.LpBall(**k)), {"p": 1, "radius": 1.0, "weight": None}),
    "centred LpBall": (lambda **k: solved(dfw.LpBall(2, **k)), {"radius": 1.0, "centre": Q}),
    "Box": (lambda **k: solved(dfw.Box(**k)), {"lower": -1.0, "upper": 1.0}),
    "Box of tensors": (lambda **k: solved(dfw.Box(**k)), {"lower": -Q.abs(), "upper": Q.abs()}),
    "Simplex": (lambda **k: solved(dfw.Simplex(**k)), {"radius": 1.0}),
    "CappedSimplex": (lambda **k: solved(dfw.CappedSimplex(**k)), {"radius": 1.0, "cap": 0.5}),
    "KSparse": (lambda **k: solved(dfw.KSparse(**k)), {"k": 2, "radius": 1.0}),
    "L1Box": (
        lambda **k: solved(dfw.L1Box(**k)),
        {"radius": 1.0, "weight": None, "lower": -1.0, "upper": 1.0},
    ),
    "PlaneCut": (
        lambda **k: solved(dfw.PlaneCut(**k)),
        {"constraint": dfw.Box(-1.0, 1.0), "normal": 1.0, "level": 0.5},
    ),
    "Shifted": (
        lambda **k: solved(dfw.Shifted(**k)),
        {"constraint": dfw.Simplex(), "centre": 0.5},
    ),
    "Product": (
        lambda **k: solved(dfw.Product(**k)),
        {"sets": [dfw.LpBall(1), dfw.Box(0.0, 1.0)], "sizes": [2, 1]},
    ),
    "Product, an entry": (
        lambda sets, sizes: solved(dfw.Product([sets, dfw.Box(0.0, 1.0)], [sizes, 1])),
        {"sets": dfw.LpBall(1), "sizes": 2},
    ),
    "GroupBall": (
        lambda **k: solved(dfw.GroupBall(**k)),
        {"groups": [[0, 1], [2]], "radius": 1.0, "weight": None, "centre": None},
    ),
    "GroupBall, an entry": (
        lambda groups: solved(dfw.GroupBall([groups, [1, 2]])),
        {"groups": [0]},
    ),
    "Ellipsoid": (
        lambda **k: solved(dfw.Ellipsoid(**k)),
        {"A": A, "centre": None, "radius": 1.0},
    ),
    "SchattenBall": (
        lambda **k: solved(dfw.SchattenBall(**k), (2, 2)),
        {"p": 2, "radius": 1.0, "shape": None, "centre": None},
    ),
    "NuclearBall": (
        lambda **k: solved(dfw.NuclearBall(**k), (2, 2)),
        {"radius": 1.0, "shape": (2, 2), "centre": None},
    ),
    "SpectralBall": (
        lambda **k: solved(dfw.SpectralBall(**k), (4,)),
        {"radius": 1.0, "shape": (2, 2), "centre": None},
    ),
    "Birkhoff": (lambda **k: solved(dfw.Birkhoff(**k), (2, 2)), {"n": 2, "rounds": 3}),
    "CustomSet": (
        lambda **k: solved(dfw.CustomSet(**k)),
        {"vertex": vertex, "batched": False, "samples": 2},
    ),
    "project_l1_box": (
        dfw.project_l1_box,
        {"z": Q, "weight": None, "radius": 1.0, "lower": -1.0, "upper": 1.0},
    ),
    "Quadratic": (
        lambda **k: dfw.solve(dfw.Quadratic(**k), dfw.LpBall(2), **QUICK),
        {"P": P, "q": Q},
    ),
    "LeastSquares": (
        lambda **k: dfw.solve(dfw.LeastSquares(**k), dfw.LpBall(1), **QUICK),
        {"A": A, "b": torch.ones(4)},
    ),
    "Smooth": (
        lambda fn, params, **k: dfw.solve(dfw.Smooth(fn, params, **k), dfw.LpBall(2), **QUICK),
        {"fn": quadratic, "params": Q, "shape": (N,), "lipschitz": None},
    ),
    "solve": (
        dfw.solve,
        {
            "objective": dfw.Quadratic(P, Q),
            "constraint": dfw.Simplex(),
            "x0": Q,
            "method": "auto",
            "differentiate": "auto",
            "tol": 1e-5,
            "max_steps": 30,
            "step_size": None,
            "temperature": None,
            "verify": True,
        },
    ),
    "layer": (
        layer,
        {
            "P": P,
            "q": Q,
            "weight": None,
            "radius": 1.0,
            "centre": None,
            "p": 2,
            "method": "auto",
            "differentiate": "auto",
            "tol": 1e-5,
            "max_steps": 30,
            "step_size": None,
            "temperature": None,
            "verify": True,
            "on_failure": "ignore",
        },
    ),
    "projection layer": (projected, {"q": Q, "weight": None, "radius": 1.0}),
    "ShortStep": (lambda **k: stepped(dfw.ShortStep(**k)), {"lipschitz": 2.0}),
    "OpenLoop": (lambda **k: stepped(dfw.OpenLoop(**k)), {"offset": 2}),
    "Backtracking": (lambda **k: stepped(dfw.Backtracking(**k)), {"shrink": 0.9, "trials": 3}),
    "Constant": (lambda **k: cooled(dfw.Constant(**k)), {"value": 1.0}),
    "Anneal": (lambda **k: cooled(dfw.Anneal(**k)), {"start": 1.0, "factor": 0.5, "period": 3}),
    "temperature": (cooled, {"temperature": 1.0}),
    "a schedule": (
        lambda returned: cooled(lambda _: returned),
        {"returned": 1.0},
    ),
    "FrankWolfe": (
        lambda **k: dfw.solve(
            dfw.Quadratic(P, Q), dfw.Simplex(), method=dfw.FrankWolfe(**k), **QUICK
        ),
        {"pairwise": True},
    ),
    "ProjectedNewton": (
        lambda **k: dfw.solve(
            dfw.Quadratic(P, Q), dfw.Simplex(), method=dfw.ProjectedNewton(**k), **QUICK
        ),
        {"block": 10, "inner": 50},
    ),
}
ALIASES = {
    ("a schedule", "returned"): "temperature",
    ("Smooth", "params"): "params[0]",
}
# a callable is a callable: what it raises itself is passed on
WELCOME = {
    ("CustomSet", "vertex"): ("object module",),
    ("temperature", "temperature"): ("object module",),
}
CROSSED = [(name, argument) for name, (_, fine) in CALLABLES.items() for argument in fine]
# failures that are the solver's to report, not the arguments'
LOST = (Status.NONFINITE, Status.INFEASIBLE, Status.INVALID)


def check_result(result):
    """Finite, or not without a reason."""
    if isinstance(result, torch.Tensor):
        assert result.dtype in (torch.float32, torch.float64)
        return
    x, status = result.x.detach(), result.status
    assert x.dtype in (torch.float32, torch.float64)
    assert x.shape[: status.dim()] == status.shape
    rows = x.reshape(*status.shape, -1) if x.numel() else x.reshape(0, 1)
    lost = sum(status == code for code in LOST).bool()
    sound = torch.isfinite(rows).all(-1).reshape(-1)
    assert (sound | lost.reshape(-1)[: len(sound)]).all(), (x, status)


@pytest.mark.parametrize(("name", "argument"), CROSSED, ids=[f"{n}-{a}" for n, a in CROSSED])
def test_every_argument_of_every_callable(name, argument):
    call, fine = CALLABLES[name]
    names = {re.escape(n) for n in fine} | {re.escape(ALIASES.get((name, argument), argument))}
    names |= {r"sets\[\d\]: \w+", r"sets\[\d\]", r"sizes\[\d\]", "lower, upper", "fn", "variable"}
    found = []
    for label, value in VALUES.items():
        if label in WELCOME.get((name, argument), ()):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                check_result(call(**(fine | {argument: value})))
            except ValueError as error:
                if not re.match(rf"({'|'.join(names)}): \S", str(error)):
                    found.append(f"{label}: unnamed ValueError: {error}")
            except Exception as error:
                found.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CALLABLES)
def test_the_calls_are_fine_without_a_bad_value(name):
    call, fine = CALLABLES[name]
    check_result(call(**fine))


@pytest.mark.parametrize("name", CALLABLES)
def test_unknown_arguments_are_pythons_affair(name):
    call, fine = CALLABLES[name]
    with pytest.raises(TypeError):
        call(**fine, nonsense=1)


def test_numbers_of_numpy_are_numbers():
    want = dfw.solve(dfw.Quadratic(P, Q), dfw.LpBall(2.0, 0.5)).x
    for kind in (np.float64, np.float32, np.float16):
        got = dfw.solve(dfw.Quadratic(P, Q), dfw.LpBall(kind(2.0), kind(0.5))).x
        assert torch.equal(got, want)
    steps = dfw.solve(dfw.Quadratic(P, Q), dfw.LpBall(np.int64(2), 0.5), max_steps=np.int32(7))
    assert torch.equal(steps.x, want)


@pytest.mark.parametrize("x0", [[0.0, 0.0, 0.0], np.zeros(3), sparse(3), "0"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_start_that_is_no_tensor(x0, autocast):
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(ValueError, match=r"^x0: expected a (dense )?tensor"),
    ):
        dfw.solve(dfw.Quadratic(P, Q), dfw.LpBall(1), x0=x0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.long, torch.half])
def test_project_l1_box_of_other_numbers(dtype):
    with pytest.raises(ValueError, match=r"^z: expected float32 or float64"):
        dfw.project_l1_box(torch.ones(3, dtype=dtype), None, 1.0, -1.0, 1.0)
