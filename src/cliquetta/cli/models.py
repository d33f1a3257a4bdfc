"""``cliquetta models``: the models that load by name."""

from __future__ import annotations

from typing import Annotated

import typer

from cliquetta.cli.command import Common, command
from cliquetta.errors import UserError

_EXAMPLES = """
cliquetta models

cliquetta models '*ViT-B-16*'
"""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "models", examples=_EXAMPLES, compute=False)(models)


def models(
    common: Common,
    pattern: Annotated[str, typer.Argument(help="Only names that match (wildcard *).")] = "*",
) -> None:
    """List the models that load by name; any checkpoint of their families loads by its path."""
    from dataclasses import asdict

    from cliquetta.model.factory import list_models

    entries = list_models(pattern)
    if not entries:
        raise UserError(f"no model matches {pattern!r}: `cliquetta models` lists all")
    rows = [
        (
            entry.name,
            entry.source,
            str(entry.image_size),
            "all" if entry.is_vit else "zero_shot and caches",
            "bundled" if entry.is_bundled else "downloaded on first use",
        )
        for entry in entries
    ]
    columns = ("model", "source", "pixels", "methods", "weights")
    common.terminal.table(columns, rows, right=("pixels",))
    common.terminal.say(
        "Also: a .safetensors or .pt file, a directory, hf:OWNER/NAME, hf-hub:OWNER/NAME, "
        "open_clip:ARCHITECTURE/FILE."
    )
    common.terminal.document([asdict(entry) for entry in entries])
