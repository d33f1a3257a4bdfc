"""``cliquetta``: the command and its sub-commands."""

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
    serve,
    sessions,
)
from cliquetta.cli.command import add_command

_WITHOUT_MODEL = ("compare", "report", "methods", "models", "datasets")
app = typer.Typer(
    name="cliquetta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose columns leave no room for descriptions in 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Check datasets.")
sessions_app = typer.Typer(
    no_args_is_help=True, help="Manage the sessions of a service."
)
for _name, _function, _examples in (
    ("demo", demo.demo, demo.EXAMPLES),
    ("predict", predict.predict, predict.EXAMPLES),
    ("evaluate", evaluate.evaluate, evaluate.EXAMPLES),
    ("compare", compare.compare, compare.EXAMPLES),
    ("report", report.report, report.EXAMPLES),
    ("ablate", ablate.ablate, ablate.EXAMPLES),
    ("fit", fit.fit, fit.EXAMPLES),
    ("export", export.export, export.EXAMPLES),
    ("methods", listings.methods, listings.METHODS),
    ("models", listings.models, listings.MODELS),
    ("datasets", listings.datasets, listings.DATASETS),
    ("serve", serve.serve, serve.SERVE),
    ("app", serve.show, serve.APP),
):
    add_command(
        app,
        _name,
        _function,
        _examples,
        compute=_name not in _WITHOUT_MODEL,
        plugins=_name == "methods",
    )
add_command(data_app, "doctor", data.doctor, data.EXAMPLES)
add_command(
    sessions_app, "list", sessions.list_all, sessions.LIST_EXAMPLES, compute=False
)
add_command(
    sessions_app, "delete", sessions.delete, sessions.DELETE_EXAMPLES, compute=False
)
add_command(
    sessions_app, "export", sessions.export, sessions.EXPORT_EXAMPLES, compute=False
)
add_command(
    sessions_app,
    "import",
    sessions.import_files,
    sessions.IMPORT_EXAMPLES,
    compute=False,
)
app.add_typer(data_app, name="data")
app.add_typer(sessions_app, name="sessions")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cliquetta {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Adapt CLIP while it predicts, on your own images."""
    del version


def main() -> None:
    """Run the installed command."""
    app()
