"""Bad inputs from a grammar: calls of the library in which an argument is not what it should be.

A call is Python text, so what fails is its own reproducer. The outcome has to be a ValueError that
names an argument of the call, a TypeError of Python's for a name or a number of arguments that
do not fit, or a valid result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dfwlayer_bench.fuzz.checks import Failure
from dfwlayer_bench.fuzz.limits import limited

__all__ = ["BadCall", "draw_call", "judge_call", "odd"]

SECONDS = 30  # for a call on four numbers

# functions of the library, with arguments that are right for a variable of four entries
CENTRE = {"centre": "torch.zeros(4)"}
SETS: dict[str, dict[str, str]] = {
    "dfw.LpBall": {"p": "2.0", "radius": "1.0", "weight": "torch.ones(4)"} | CENTRE,
    "dfw.Box": {"lower": "-torch.ones(4)", "upper": "1.0"},
    "dfw.Simplex": {"radius": "1.0"},
    "dfw.CappedSimplex": {"radius": "1.0", "cap": "torch.ones(4)"},
    "dfw.L1Box": {"radius": "1.0", "weight": "torch.ones(4)", "lower": "-1.0", "upper": "1.0"},
    "dfw.KSparse": {"k": "2.0", "radius": "1.0"},
    "dfw.PlaneCut": {"constraint": "dfw.Box(-1.0, 1.0)", "normal": "torch.ones(4)", "level": "0.5"},
    "dfw.GroupBall": {"groups": "[[0, 1], [2, 3]]", "radius": "1.0", "weight": "torch.ones(2)"}
    | CENTRE,
    "dfw.Ellipsoid": {"A": "torch.eye(4)", "centre": "torch.zeros(4)", "radius": "1.0"},
    "dfw.SchattenBall": {"p": "1.5", "radius": "1.0", "shape": "(2, 2)"} | CENTRE,
    "dfw.NuclearBall": {"radius": "1.0", "shape": "(2, 2)"},
    "dfw.SpectralBall": {"radius": "1.0", "shape": "(2, 2)"},
    "dfw.Birkhoff": {"n": "2", "rounds": "20"},
    "dfw.Product": {"sets": "[dfw.LpBall(1), dfw.Simplex()]", "sizes": "[2, 2]"},
    "dfw.Shifted": {"constraint": "dfw.LpBall(1)", "centre": "torch.zeros(4)"},
    "dfw.Polyhedron": {
        "G": "torch.ones(1, 4)",
        "h": "torch.ones(1)",
        "A": "torch.tensor([[1.0, -1.0, 0.0, 0.0]])",
        "b": "torch.zeros(1)",
        "lower": "-torch.ones(4)",
        "upper": "2.0",
    },
    "dfw.HalfSpace": {"normal": "torch.ones(4)", "level": "1.0"},
    "dfw.Hyperplane": {"normal": "torch.ones(4)", "level": "1.0"},
    "dfw.AffineSet": {"A": "torch.ones(1, 4)", "b": "torch.ones(1)"},
    "dfw.Transport": {"row_sums": "torch.ones(2)", "column_sums": "torch.ones(2)"},
    "dfw.Spectraplex": {"trace": "1.0"},
    "dfw.Intersection": {"*sets": "dfw.LpBall(2), dfw.Box(-0.5, 0.5)"},
    "dfw.CustomSet": {
        "vertex": "lambda c: torch.eye(4)[c.argmin()]",
        "batched": "False",
        "samples": "4",
    },
}
OBJECTIVES: dict[str, dict[str, str]] = {
    "dfw.Quadratic": {"P": "torch.eye(4)", "q": "torch.ones(4)"},
    "dfw.LeastSquares": {"A": "torch.ones(5, 4)", "b": "torch.ones(5)"},
    "dfw.Smooth": {
        "fn": "lambda x, *c: (x * x).sum(-1)",
        "*params": "torch.ones(4)",
        "shape": "(4,)",
        "lipschitz": "2.0",
    },
}
SETTINGS = {
    "x0": "torch.zeros(4)",
    "method": "'auto'",
    "differentiate": "'auto'",
    "tol": "1e-5",
    "max_steps": "100",
    "step_size": "None",
    "temperature": "None",
    "verify": "True",
    "on_infeasible": "'nan'",
}
LAYER = {"p": "1.0"} | {k: v for k, v in SETTINGS.items() if k not in ("x0", "on_infeasible")}
LAYERS = {  # how a layer is made, and called
    "dfw.QPLayer": (
        {k: v for k, v in SETTINGS.items() if k != "x0"},
        {
            "Q": "torch.eye(4)",
            "p": "torch.ones(4)",
            "G": "-torch.eye(4)",
            "h": "torch.ones(4)",
            "A": "torch.ones(1, 4)",
            "b": "torch.zeros(1)",
        },
    ),
    "dfw.SetLayer": (
        {"constraint": "dfw.Box(-1.0, 1.0)", "shape": "(4,)"}
        | {k: v for k, v in SETTINGS.items() if k != "x0"},
        {"*problem": "torch.ones(4)"},
    ),
}
FORWARD = {
    "P": "torch.eye(4)",
    "q": "torch.ones(4)",
    "weight": "torch.ones(4)",
    "radius": "1.0",
    "centre": "torch.zeros(4)",
}
PROJECT = {
    "z": "torch.ones(4)",
    "weight": "torch.ones(4)",
    "radius": "1.0",
    "lower": "-torch.ones(4)",
    "upper": "torch.ones(4)",
}
STEPS = {
    "dfw.ShortStep": {"lipschitz": "2.0"},
    "dfw.OpenLoop": {},
    "dfw.ExactStep": {},
    "dfw.Backtracking": {},
    "dfw.Anneal": {},
    "dfw.Constant": {"temperature": "0.1"},
}

ODD = (
    "None", "True", "-1.0", "0.0", "-1", "0", "3", "2.5", "float('nan')", "float('inf')",
    "-float('inf')", "10**400", "-10**400", "2**70", "1j", "'a'", "''", "b'x'", "[]", "()", "{}",
    "[1.0, 2.0]", "[1.0, 2.0, 3.0, 4.0]", "[[0, 1], [1, 2]]", "[[0], [9]]", "(2, 2, 2)", "(0,)",
    "('a', 'b')", "object()", "lambda *a: None", "len", "torch", "int", "np.ones(4)",
    "np.float32(1.0)", "range(4)", "dfw.Simplex()", "dfw.LpBall", "dfw.Status.CONVERGED",
    "torch.nn.Linear(4, 4)", "set()", "[None]", "[dfw.LpBall(1)]", "[dfw.LpBall(1), 3]",
)  # fmt: skip
SHAPES = ("()", "(0,)", "(1,)", "(3,)", "(4,)", "(5,)", "(0, 4)", "(1, 4)", "(2, 4)", "(3, 4)",
          "(4, 1)", "(4, 4)", "(2, 4, 4)", "(0, 4, 4)", "(2, 3, 4)", "(1, 1)", "(2,)")  # fmt: skip
VALUES = ("1.0", "0.0", "-1.0", "0.5", "float('nan')", "float('inf')", "1e30")
TYPES = (
    "float32",
    "float32",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "bool",
    "complex64",
)


class BadCall:
    """A call as text, and the names a message about it may use."""

    def __init__(self, seed: int, index: int, text: str, target: str, names: set[str]) -> None:
        self.seed, self.index, self.text, self.target, self.names = seed, index, text, target, names

    def source(self) -> str:
        """Python that makes the call."""
        lines = [
            "import numpy as np",
            "import torch",
            "import dfwlayer as dfw",
            "",
            f"print({self.text})",
        ]
        return "\n".join(lines) + "\n"

    def run(self) -> Any:
        """What it returns, or raises."""
        import dfwlayer as dfw

        return eval(self.text, {"torch": torch, "dfw": dfw, "np": np})


def draw_call(seed: int, index: int) -> BadCall:
    """Bad call number ``index`` of a seed."""
    rng = np.random.default_rng([seed, index, 4])
    kind = rng.integers(10)
    if kind < 6:
        objective = _pick(
            rng,
            {"dfw.Quadratic": OBJECTIVES["dfw.Quadratic"]} if rng.random() < 0.5 else OBJECTIVES,
        )
        constraint = _pick(rng, SETS)
        # one of the three parts is spoilt, with one or two odd arguments
        part = rng.choice(["objective", "constraint", "settings"], p=[0.3, 0.5, 0.2])
        texts = [
            _call(rng, *objective, spoilt=part == "objective"),
            _call(rng, *constraint, spoilt=part == "constraint"),
            _call(rng, "", SETTINGS, spoilt=part == "settings", few=True)[1:-1],
        ]
        text = f"dfw.solve({', '.join(t for t in texts if t)})"
        names = {
            *objective[1],
            *constraint[1],
            *SETTINGS,
            "objective",
            "constraint",
            "sets",
            "groups",
        }
        target = {"objective": objective[0], "constraint": constraint[0]}.get(
            str(part), "dfw.solve"
        )
    elif kind < 7:
        name = str(rng.choice(list(LAYERS)))
        made, called = LAYERS[name]
        bad = bool(rng.random() < 0.5)
        text = _call(rng, name, made, spoilt=bad) + _call(rng, "", called, spoilt=not bad)
        names, target = {*made, *called, "q"}, name
    elif kind < 8:
        bad = bool(rng.random() < 0.3)
        layer = _call(rng, "dfw.DFWLayer", LAYER, spoilt=bad, few=True)
        text = layer + _call(rng, "", FORWARD, spoilt=not bad)
        names, target = {*LAYER, *FORWARD}, "dfw.DFWLayer"
    elif kind < 9:
        text = _call(rng, "dfw.project_l1_box", PROJECT, spoilt=True)
        names, target = set(PROJECT), "dfw.project_l1_box"
    else:
        rule = _pick(rng, STEPS)
        spoilt = _call(rng, *rule, spoilt=bool(rule[1]))
        setting = "temperature" if rule[0] in ("dfw.Anneal", "dfw.Constant") else "step_size"
        method = rng.choice(["dfw", "frank-wolfe"])
        text = (
            "dfw.solve(dfw.Quadratic(torch.eye(4), torch.ones(4)), dfw.LpBall(1), "
            f"{setting}={spoilt}, method={str(method)!r}, max_steps=20)"
        )
        names, target = {*rule[1], setting, "method"}, rule[0]
    return BadCall(seed, index, text, target, names)


def _pick(rng: np.random.Generator, table: dict[str, dict[str, str]]) -> tuple[str, dict[str, str]]:
    name = list(table)[rng.integers(len(table))]
    return name, table[name]


def _call(
    rng: np.random.Generator, name: str, valid: dict[str, str], spoilt: bool, few: bool = False
) -> str:
    """The call with its right arguments, some of them left out, or with one or two odd ones."""
    arguments = dict(valid)
    if few or rng.random() < 0.3:
        needed = (
            "P",
            "q",
            "A",
            "b",
            "fn",
            "shape",
            "vertex",
            "constraint",
            "sets",
            "sizes",
            "groups",
            "k",
            "n",
            "z",
            "p",
            "normal",
            "level",
            "row_sums",
            "column_sums",
            "Q",
            "*sets",
            "*problem",
        )
        arguments = {k: v for k, v in arguments.items() if k in needed and k in valid}
        if name == "dfw.L1Box" or "z" in valid:
            arguments = dict(valid)
    if spoilt and valid:
        for _ in range(1 if rng.random() < 0.7 else 2):
            arguments[list(valid)[rng.integers(len(valid))]] = odd(rng)
        if rng.random() < 0.02:
            arguments["wieght"] = "1.0"
    starred = [v for k, v in arguments.items() if k.startswith("*")]
    if starred:  # Smooth(fn, *params, shape=...)
        keywords = [f"{k}={v}" for k, v in arguments.items() if k != "fn" and not k.startswith("*")]
        first = [arguments.get("fn", "None")] if "fn" in valid else []
        return f"{name}({', '.join([*first, *starred, *keywords])})"
    return f"{name}({', '.join(f'{k}={v}' for k, v in arguments.items())})"


def odd(rng: np.random.Generator) -> str:
    """An argument that is hardly ever right, as text."""
    if rng.random() < 0.45:
        return ODD[rng.integers(len(ODD))]
    shape, value = SHAPES[rng.integers(len(SHAPES))], VALUES[rng.integers(len(VALUES))]
    kind = TYPES[rng.integers(len(TYPES))]
    if kind in ("int64", "bool"):
        value = str(int(rng.integers(-1, 3))) if kind == "int64" else "True"
    if kind in ("float16", "bfloat16") and value == "1e30":
        value = "1e4"  # torch makes no tensor of what the dtype cannot hold
    if rng.random() < 0.07:  # without values, so that it cannot be made sparse
        return f"torch.full({shape}, {value}, dtype=torch.{kind}, device='meta')"
    text = f"torch.full({shape}, {value}, dtype=torch.{kind})"
    if rng.random() < 0.08:
        return text + ".to_sparse()"
    if rng.random() < 0.1 and kind.startswith(("float", "complex")):
        return text + ".requires_grad_()"
    return text


PYTHONS = (
    "unexpected keyword",
    "missing",
    "positional argument",
    "multiple values",
    "required keyword",
)


def judge_call(call: BadCall) -> Failure | None:
    """Make the call; None if the outcome is one of those that are allowed."""

    def failure(kind: str, message: str) -> Failure:
        about = call.text
        return Failure(kind, call.target, "", "", about, call.seed, call.index, None, message)

    try:
        with warnings.catch_warnings(), limited(SECONDS):
            warnings.simplefilter("ignore")
            try:
                result = call.run()
            except TimeoutError as error:
                return failure("hang", str(error))
            except ValueError as error:
                text = str(error)
                named = any(
                    re.search(rf"(?<!\w){re.escape(n.strip('*'))}(?!\w)", text) for n in call.names
                )
                if named:
                    return None
                return failure("unnamed", f"ValueError that names no argument: {text[:200]}")
            except TypeError as error:
                if any(words in str(error) for words in PYTHONS) and "torch" not in str(error):
                    return None
                return failure("raw error", f"TypeError: {str(error)[:200]}")
            except Exception as error:
                return failure("raw error", f"{type(error).__name__}: {str(error)[:200]}")
            return _valid(result, failure)
    except TimeoutError as error:  # between two lines of ours
        return failure("hang", str(error))


def _valid(result: Any, failure: Callable[[str, str], Failure]) -> Failure | None:
    """A result has numbers, or a status that says why not."""
    x = getattr(result, "x", result)
    if not isinstance(x, torch.Tensor):
        return failure("result", f"returned {type(x).__name__}")
    if x.device.type == "meta" or not x.is_floating_point():
        return failure("result", f"returned {x.dtype} on {x.device}")
    status = getattr(result, "status", None)
    if status is None:
        return None
    rows = x.detach().reshape(status.numel(), -1) if x.numel() else x.new_zeros(0, 1)
    wrong = (status.reshape(-1)[: len(rows)] == 0) & ~torch.isfinite(rows).all(-1)
    if bool(wrong.any()):
        return failure("result", "CONVERGED with an x that is not finite")
    return None
