"""Learn what a controller cares about, by differentiating through model-predictive control.

A cart on a rail (position and velocity, pushed by a force) is driven to a target. At every instant
the controller plans 20 instants ahead,

    minimise Σ xᵀdiag(w)x + ρu²   subject to   |u| ≤ 1, |velocity| ≤ 0.6, position ≥ −0.1

and does the first thing of its plan. The plan is a quadratic program over the forces, the states
being linear functions of them; bounds on states are rows G u ≤ h that depend on where the cart is.
An expert has weights of its own. They are found from its decisions by gradient descent, through the
program.

    python examples/mpc.py [FOLDER]   writes FOLDER/mpc.png
"""

import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dfwlayer import Polyhedron, Quadratic, solve

QUICK = "DFW_QUICK" in os.environ
STEPS, SITUATIONS, LENGTH = (15, 8, 20) if QUICK else (100, 24, 45)
HORIZON, DT = 20, 0.2
FORCE, SPEED, WALL = 1.0, 0.6, -0.1
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

STEP = torch.tensor([[1.0, DT], [0.0, 1.0]])  # x ↦ STEP x + PUSH u
PUSH = torch.tensor([DT**2 / 2, DT])

# x_{k+1} = STEP^{k+1} x_0 + Σ_{j ≤ k} STEP^{k−j} PUSH u_j for the whole horizon
POWERS = [torch.linalg.matrix_power(STEP, k) for k in range(HORIZON + 1)]
FREE = torch.stack(POWERS[1:])  # (20, 2, 2), what becomes of x_0
FORCED = torch.zeros(HORIZON, 2, HORIZON)  # (20, 2, 20), and of the forces
for k in range(HORIZON):
    for j in range(k + 1):
        FORCED[k, :, j] = POWERS[k - j] @ PUSH
VELOCITIES, POSITIONS = FORCED[:, 1], FORCED[:, 0]
ROWS = torch.cat((VELOCITIES, -VELOCITIES, -POSITIONS))  # of G


def plan(weights: Tensor, state: Tensor) -> Tensor:  # (3,), (B, 2) -> (B, 20)
    """The forces of the best plan from each state; weights of position, velocity and force."""
    drift = (FREE @ state[:, None, :, None]).squeeze(-1)  # (B, 20, 2), where it goes by itself
    weighted = weights[:2, None] * FORCED
    P = 2 * torch.einsum("kin,kim->nm", FORCED, weighted) + 2 * weights[2] * torch.eye(HORIZON)
    q = 2 * torch.einsum("kin,bki->bn", weighted, drift)
    h = torch.cat((SPEED - drift[..., 1], SPEED + drift[..., 1], drift[..., 0] - WALL), -1)
    sol = solve(Quadratic(P, q), Polyhedron(ROWS, h, lower=-FORCE, upper=FORCE))
    assert (sol.status == 0).all(), sol
    return sol.x


def drive(weights: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states and forces of closed loops from these states: (B, T + 1, 2), (B, T)."""
    states, forces = [state], []
    with torch.no_grad():
        for _ in range(LENGTH):
            forces.append(plan(weights, states[-1])[:, 0])
            states.append(states[-1] @ STEP.T + forces[-1][:, None] * PUSH)
    return torch.stack(states, 1), torch.stack(forces, 1)


expert = torch.tensor([1.0, 0.15, 0.05])
situations = torch.stack((2.5 * torch.rand(SITUATIONS), torch.rand(SITUATIONS) - 0.5), -1)
decisions = plan(expert, situations).detach()

guess = torch.tensor([1.0, 1.0, 1.0]).log().requires_grad_()  # of the logarithms
first = guess.detach().exp()
optimiser = torch.optim.Adam([guess], lr=0.15)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
errors, ways = [], []
for _ in range(STEPS):
    weights = guess.exp() / guess[0].exp()  # only their ratios count: the position's weight is 1
    error = (plan(weights, situations) - decisions).square().mean()
    optimiser.zero_grad()
    error.backward()
    optimiser.step()
    schedule.step()
    errors.append(error.item())
    ways.append(weights.detach())
learned = ways[-1]
print(f"error of the plans: {errors[0]:.1e} at first, {errors[-1]:.1e} at last")
print(f"weights of the expert {expert.tolist()}, learned {[round(v, 4) for v in learned.tolist()]}")
assert errors[-1] < errors[0] / (3 if QUICK else 1000), "nothing was learned"

begin = torch.tensor([[2.5, 0.0]])
controllers = {"expert": expert, "at first": first, "learned": learned}
runs = {name: drive(weights, begin) for name, weights in controllers.items()}
for states, forces in runs.values():
    assert forces.abs().max() <= FORCE + 1e-9
    assert states[..., 1].abs().max() <= SPEED + 1e-9
    assert states[..., 0].min() >= WALL - 1e-9
styles = {
    "expert": {"color": "0.6", "lw": 5, "alpha": 0.6, "solid_capstyle": "round"},
    "at first": {"color": "tab:orange", "lw": 1.5, "ls": "--"},
    "learned": {"color": "tab:blue", "lw": 1.5},
}
figure, axes = plt.subplots(1, 4, figsize=(13, 3), layout="tight")
time = DT * torch.arange(LENGTH + 1)
for name, (states, forces) in runs.items():
    axes[0].plot(time, states[0, :, 0], label=name, **styles[name])
    axes[1].plot(time, states[0, :, 1], **styles[name])
    axes[2].step(time[:-1], forces[0], where="post", **styles[name])
panels = {"position": (WALL,), "velocity": (-SPEED, SPEED), "force": (-FORCE, FORCE)}
for axis, (title, limits) in zip(axes, panels.items(), strict=False):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("time", fontsize=9)
    for limit in limits:
        axis.axhline(limit, color="tab:red", lw=0.8, ls=":")
axes[0].legend(fontsize=8, frameon=False)
for place, name, color in ((1, "velocity", "tab:green"), (2, "force", "tab:purple")):
    axes[3].semilogy([w[place] for w in ways], label=name, color=color)
    axes[3].axhline(expert[place], color="0.6", ls=":", zorder=0)
axes[3].set_title("weights while learning", fontsize=10)
axes[3].set_xlabel("step", fontsize=9)
axes[3].legend(fontsize=8, frameon=False)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "mpc.png", dpi=80)
print(f"wrote {folder / 'mpc.png'}")
