"""``cliquetta``: the command and its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from cliquetta import __version__
from cliquetta.cli import (
    ablate,
    compare,
    data,
    demo,
    evaluate,
    export,
    fit,
    listings,
    predict,
    report,
    reproduce,
    serve,
    sessions,
)
from cliquetta.cli.command import command

app = typer.Typer(
    name="cliquetta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose columns leave no room for descriptions in 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Check datasets.")
sessions_app = typer.Typer(no_args_is_help=True, help="List and delete the sessions of a service.")
command(app, "demo", examples=demo.EXAMPLES)(demo.demo)
command(app, "predict", examples=predict.EXAMPLES)(predict.predict)
command(app, "evaluate", examples=evaluate.EXAMPLES)(evaluate.evaluate)
command(app, "compare", examples=compare.EXAMPLES, compute=False)(compare.compare)
command(app, "report", examples=report.EXAMPLES, compute=False)(report.report)
command(app, "reproduce", examples=reproduce.EXAMPLES)(reproduce.reproduce)
command(app, "ablate", examples=ablate.EXAMPLES)(ablate.ablate)
command(app, "fit", examples=fit.EXAMPLES)(fit.fit)
command(app, "export", examples=export.EXAMPLES)(export.export)
command(app, "methods", examples=listings.METHODS, compute=False)(listings.methods)
command(app, "models", examples=listings.MODELS, compute=False)(listings.models)
command(app, "datasets", examples=listings.DATASETS, compute=False)(listings.datasets)
command(data_app, "doctor", examples=data.EXAMPLES, compute=False)(data.doctor)
command(app, "serve", examples=serve.SERVE)(serve.serve)
command(sessions_app, "list", examples=sessions.LIST_EXAMPLES, compute=False)(sessions.list_all)
command(sessions_app, "delete", examples=sessions.DELETE_EXAMPLES, compute=False)(sessions.delete)
command(app, "app", examples=serve.APP)(serve.show)
app.add_typer(data_app, name="data")
app.add_typer(sessions_app, name="sessions")


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
