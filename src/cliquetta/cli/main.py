"""``cliquetta``: the command and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from cliquetta import __version__
from cliquetta.cli import (
    ablate,
    compare,
    data,
    datasets,
    demo,
    evaluate,
    export,
    fit,
    methods,
    models,
    predict,
    report,
    reproduce,
    serve,
    sessions,
)
from cliquetta.cli import app as web_app

app = typer.Typer(
    name="cliquetta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    demo,
    predict,
    evaluate,
    compare,
    report,
    reproduce,
    ablate,
    fit,
    export,
    methods,
    models,
    datasets,
    data,
    serve,
    sessions,
    web_app,
):
    module.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cliquetta {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Adapt CLIP while it predicts, on your own images."""
    del version


def main() -> None:
    """Entry point of the installed command."""
    app()
