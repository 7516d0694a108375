"""The rivals on layers: those that guess, sample, split, or know one set very well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dfwlayer_bench.baselines.dc3 import DC3, Completion, LinearRule, Training, train
from dfwlayer_bench.baselines.vertex_layers import Perturbed, RegularisedFrankWolfe
from dfwlayer_bench.bench.layers.problems import SIGMA, Posed
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Setting, load
from dfwlayer_bench.systems.rows.from_jax import jax_passes, to_tensor, wide
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = [
    "prepare_dc3",
    "prepare_entmax",
    "prepare_frank_wolfe",
    "prepare_jaxopt",
    "prepare_perturbed",
    "prepare_pinet",
    "prepare_pyepo",
    "prepare_pyepo_perturbed",
]

SAMPLES = 100
SPLITS = (50, 100, 200, 500, 1000, 2000, 5000, 10_000)  # steps of Πnet that are tried
SIGMAS = (0.1, 0.3, 1.0, 3.0)
SMALL = 15  # variables up to which DC3 is trained for a few steps only: problems of a tiny run


def prepare_dc3(posed: Posed) -> Passes:
    """DC3, trained before on problems of the same kind; see `baselines.dc3`.

    The rate of the corrections is 1/L with L = 2‖GZ‖², more than the paper's 1e-7 by far.
    """
    rows = posed.rows
    completion = Completion(rows.A)
    G, h = rows.one_sided()
    rate = 0.5 / float(torch.linalg.matrix_norm(G @ completion.Z, 2)) ** 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = DC3(rows.data.shape[-1], completion, LinearRule(G, h), rate=rate)
    training = Training() if rows.n > SMALL else Training(steps=300)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        data = posed.draw(count, generator)
        return data, data if rows.given == "b" else rows.b.expand(count, -1)

    def value(x: Tensor, data: Tensor) -> Tensor:
        return rows.objective(x, data if rows.given == "q" else rows.q[0])

    steps, seconds = train(layer, draw, value, training)

    def x_of(data: Tensor) -> Tensor:
        found: Tensor = layer(data, rows.split(data)[1])
        return found

    settings: dict[str, Setting] = {
        "trained_on": f"{steps * training.batch} problems of the kind",
        "steps": steps,
        "seconds": round(seconds, 1),
        "batch": training.batch,
        "corrections": layer.steps,
        "rate": float(f"{rate:.1e}"),
        "momentum": layer.momentum,
        "penalty": training.penalty,
    }
    return Passes.of(x_of, rows.data, rows.value, settings)


def prepare_pinet(posed: Posed) -> Passes:
    """Πnet: Douglas-Rachford splitting, implicit gradient by BiCGStab; only projects.

    Its step size is the one of a few that comes closest in 200 steps, and the number of steps the
    first of a few after which x moves by no more than 1e-9 of its size.
    """
    jax, pinet = load("jax"), load("pinet")
    jnp, rows = jax.numpy, posed.rows
    with wide():
        layer = _pinet_layer(pinet, jnp, rows)

        def x_of(data: Any, steps: int, sigma: float) -> Any:
            instance = pinet.ProjectionInstance(x=-data[..., None])
            found = layer.call(y_raw=instance, n_iter=steps, sigma=sigma, n_iter_bwd=200, fpi=False)
            return found[0].x[..., 0]

        data, v = (jnp.asarray(part.numpy()) for part in (rows.q, rows.v))
        sigma = min(SIGMAS, key=lambda s: rows.violation(to_tensor(x_of(data, 200, s))))
        last, chosen = to_tensor(x_of(data, SPLITS[0], sigma)), SPLITS[-1]
        for steps in SPLITS[1:]:
            found = to_tensor(x_of(data, steps, sigma))
            if float((found - last).abs().max()) <= 1e-9 * float(found.abs().max()):
                chosen = steps
                break
            last = found
        forward_of = jax.jit(lambda data: x_of(data, chosen, sigma))

        def functional(data: Any) -> tuple[Any, Any]:
            x = x_of(data, chosen, sigma)
            return (v * x).sum(), x

        both_of = jax.jit(jax.value_and_grad(functional, has_aux=True))

    def forward() -> Tensor:
        with wide():
            return to_tensor(jax.block_until_ready(forward_of(data)))

    def both() -> tuple[Tensor, Tensor]:
        with wide():
            (_, x), gradient = jax.block_until_ready(both_of(data))
        return to_tensor(x), to_tensor(gradient)

    forward(), both()
    settings: dict[str, Setting] = {"n_iter": chosen, "sigma": sigma, "n_iter_bwd": 200}
    return Passes(forward, both, settings)


def _pinet_layer(pinet: Any, jnp: Any, rows: Rows) -> Any:
    """Bounds as a box, other rows as inequalities; a batch of one for everything that is shared."""

    def shared(part: Tensor) -> Any:
        return jnp.asarray(part.unsqueeze(0).numpy())

    parts: dict[str, Any] = {
        "eq_constraint": pinet.EqualityConstraint(shared(rows.A), shared(rows.b.unsqueeze(-1)))
    }
    low, high = (shared(part.unsqueeze(-1)) for part in (rows.low, rows.high))
    if torch.equal(rows.G, torch.eye(rows.n, dtype=rows.G.dtype)):
        box = pinet.BoxConstraintSpecification(lb=low, ub=high)
        parts["box_constraint"] = pinet.BoxConstraint(box)
    else:
        parts["ineq_constraint"] = pinet.AffineInequalityConstraint(shared(rows.G), low, high)
    return pinet.Project(**parts)


def prepare_entmax(posed: Posed) -> Passes:
    """Sparsemax: the projection onto the simplex by sorting, and its derivative."""
    sparsemax = load("entmax").sparsemax
    return Passes.of(
        lambda q: sparsemax(-q, dim=-1), posed.rows.q, posed.rows.value, {"k": "all are sorted"}
    )


def prepare_jaxopt(posed: Posed) -> Passes:
    """jaxopt's projection onto the simplex, mapped and jitted."""
    project = load("jaxopt").projection.projection_simplex
    return jax_passes(lambda q: project(-q), posed.rows.q, posed.rows.v, (), {})


def prepare_frank_wolfe(posed: Posed) -> Passes:
    """The regularised Frank-Wolfe layer of InferOpt, our own; one problem after the other."""
    tol = 1e-12
    layer = RegularisedFrankWolfe(posed.vertex, tol=tol)
    return Passes.of(lambda q: layer(-q), posed.rows.q, posed.rows.value, {"tol": tol})


def prepare_perturbed(posed: Posed) -> Passes:
    """The perturbed layer, our own, all samples by one call of the algorithm."""
    layer = Perturbed(posed.vertex, SIGMA, SAMPLES)
    settings: dict[str, Setting] = {"sigma": SIGMA, "samples": SAMPLES}
    return Passes.of(lambda q: layer(-q), posed.rows.q, posed.rows.value, settings)


def prepare_pyepo(posed: Posed) -> Passes:
    """PyEPO's regularised layer: Frank-Wolfe with away steps, gradient on the active vertices."""
    tol = 1e-12
    layer = load("pyepo.func").regularizedFrankWolfeOpt(_model(posed), lambd=1.0, tol=tol)
    settings: dict[str, Setting] = {"lambd": 1.0, "tol": tol, "max_iter": layer.max_iter}
    return Passes.of(layer, posed.rows.q, posed.rows.value, settings)


def prepare_pyepo_perturbed(posed: Posed) -> Passes:
    """PyEPO's perturbed layer, with its baseline against variance."""
    told: dict[str, Any] = {"n_samples": SAMPLES, "sigma": SIGMA}
    layer = load("pyepo.func").perturbedOpt(_model(posed), **told)
    return Passes.of(layer, posed.rows.q, posed.rows.value, told)


def _model(posed: Posed) -> Any:
    """The algorithm as PyEPO asks for it: one cost, one solution."""
    assert posed.oracle is not None
    oracle = posed.oracle

    def set_cost(model: Any, cost: Any) -> None:
        model.cost = cost

    def solve(model: Any) -> tuple[Any, float]:
        found = oracle(model.cost[None])[0]
        return found, float(found @ model.cost)

    methods = {
        "_getModel": lambda _: (None, list(range(posed.rows.n))),
        "setObj": set_cost,
        "solve": solve,
    }
    return type("Model", (load("pyepo.model.opt").optModel,), methods)()
