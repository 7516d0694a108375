"""The ``dfw`` command line: one registered function per subcommand, each from its own module.

A command's module may import typer and rich, but torch and matplotlib only inside the command:
it is imported for ``dfw --help`` too, which should be quick. The command returns its exit code.
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main", "missing_packages"]

EXTRA = ("typer", "rich", "matplotlib")  # what the extra `cli` installs


def main() -> None:
    """Run ``dfw``; without the packages of the extra, say how to install them."""
    missing = missing_packages()
    if missing:
        sys.exit(
            f"dfw needs {', '.join(missing)}, which the library itself does not; install with\n\n"
            "    pip install 'dfwlayer[cli]'"
        )
    # what is measured, and what is found, is to be the same in every run
    os.environ.setdefault("DFWLAYER_COMPILED", "wait")
    build_app()()


def missing_packages() -> list[str]:
    """Those packages of the extra that cannot be imported here."""
    return [name for name in EXTRA if find_spec(name) is None]


def build_app() -> "typer.Typer":
    """The app with its subcommands. A new one is a function from its own module and a line here."""
    import typer

    from dfwlayer_bench.bench.command import bench
    from dfwlayer_bench.demo.command import demo
    from dfwlayer_bench.export.command import export
    from dfwlayer_bench.fuzz.command import fuzz
    from dfwlayer_bench.options import ListCommand
    from dfwlayer_bench.reproduce.command import reproduce_app
    from dfwlayer_bench.robotics.command import robotics_app
    from dfwlayer_bench.scaling.command import scaling

    app = typer.Typer(
        name="dfw",
        help="Constrained convex optimisation as a differentiable PyTorch layer.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        # standalone mode drops a returned value, and commands return their exit code
        result_callback=_exit,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Print the version and exit.", callback=_version, is_eager=True
            ),
        ] = False,
    ) -> None: ...

    app.command()(demo)
    app.command(cls=ListCommand)(bench)
    app.command()(fuzz)
    app.command()(scaling)
    app.command(cls=ListCommand)(export)
    app.add_typer(reproduce_app(), name="reproduce")
    app.add_typer(robotics_app(), name="robotics")
    return app


def _version(wanted: bool) -> None:
    if not wanted:
        return
    import typer

    from dfwlayer import __version__

    typer.echo(f"dfwlayer {__version__}")
    raise typer.Exit


def _exit(code: int | None, **_: object) -> None:
    """Leave with the exit code a command returned."""
    import typer

    raise typer.Exit(code or 0)
