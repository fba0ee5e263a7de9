"""Puts the commands together, and turns the runtime's own errors into a message and an exit status."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from longstraw.cli.clean import clean
from longstraw.cli.demo import demo
from longstraw.cli.doctor import doctor
from longstraw.cli.plan import plan
from longstraw.cli.probe import probe
from longstraw.cli.report import report
from longstraw.cli.stress import stress
from longstraw.cli.verify import verify
from longstraw.errors import LongstrawError

app = typer.Typer(
    name="longstraw",
    help="Long-context post-training: one prompt, many responses, the exact gradient, little memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Joins the lines of a paragraph; the other modes break them where the source does.
    rich_markup_mode="markdown",
)
app.command()(demo)
app.command()(plan)
app.command()(report)
app.command()(verify)
app.command()(doctor)
app.command()(probe)
app.command()(clean)
app.command()(stress)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"longstraw {version('longstraw')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Entry point. Exit status 0; 1 if `verify` found a difference or `plan` no fit; 2 for a mistake of the user's."""
    try:
        app()
    except LongstrawError as error:
        Console(stderr=True, highlight=False).print(f"longstraw: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
