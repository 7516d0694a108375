"""``dfw robotics``: experts that keep a power limit, and policies that imitate them."""

from __future__ import annotations

import typer

from dfwlayer_bench.options import ListCommand
from dfwlayer_bench.robotics.deploy_command import export_expert
from dfwlayer_bench.robotics.expert.commands import collect, train_expert
from dfwlayer_bench.robotics.gradients.commands import gradients
from dfwlayer_bench.robotics.imitation.commands import evaluate, imitate, run_all

__all__ = ["robotics_app"]


def robotics_app() -> typer.Typer:
    """``dfw robotics`` with one subcommand a stage."""
    app = typer.Typer(
        help="Robots with a power limit: train experts, collect data, imitate, evaluate.",
        no_args_is_help=True,
    )
    app.command("train-expert", cls=ListCommand)(train_expert)
    app.command("collect")(collect)
    app.command("imitate", cls=ListCommand)(imitate)
    app.command("evaluate", cls=ListCommand)(evaluate)
    app.command("gradients", cls=ListCommand)(gradients)
    app.command("export")(export_expert)
    app.command("all", cls=ListCommand)(run_all)
    return app
