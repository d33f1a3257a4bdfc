"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.errors import UserError

if TYPE_CHECKING:  # what loads torch is imported when it is needed: `--help` does without
    from cliquetta.methods.base import Adapter
    from cliquetta.model.clip import CLIP
    from cliquetta.prompts.classes import ClassPrompts

Model = Annotated[str, typer.Option(help="Model name (see `cliquetta models`) or path.")]
Preset = Annotated[str | None, typer.Option(help="Preset of the method's config.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a config field: KEY=VALUE (repeatable)."),
]
Fitted = Annotated[
    Path | None, typer.Option(help="File written by `cliquetta fit`, instead of --method.")
]
Templates = Annotated[
    list[str] | None,
    typer.Option(help="Prompt with {}, file of prompts, or known set: openai-80 (repeatable)."),
]
Root = Annotated[Path | None, typer.Option(help="Root directory of your datasets.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Workers = Annotated[int, typer.Option(min=0, help="Threads that decode images.")]


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """``key=value`` pairs of ``--set``."""
    pairs = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, got {setting!r}")
        pairs[key.strip()] = value.strip()
    return pairs


@dataclass(frozen=True)
class MethodChoice:
    """A method with its settings, or a fitted file that holds both."""

    name: str
    config: Any
    fitted: Path | None = None

    def build(self, model: CLIP, prompts: ClassPrompts, seed: int) -> Adapter:
        """The adapter for a model and a class list."""
        from cliquetta.methods._shared.fewshot_io import create_fitted
        from cliquetta.methods.registry import create_method

        if self.fitted is not None:
            return create_fitted(self.fitted, model, prompts, seed=seed)
        return create_method(self.name, model, prompts, self.config, seed=seed)


def read_method(
    name: str | None, preset: str | None, settings: Sequence[str], fitted: Path | None
) -> MethodChoice:
    """The method that was asked for, or the default; a fitted file brings its settings along."""
    from cliquetta.methods._shared.fewshot_io import load_fitted
    from cliquetta.methods.registry import DEFAULT_METHOD, method_config

    if fitted is None:
        name = name or DEFAULT_METHOD
        return MethodChoice(name, method_config(name, preset, read_settings(settings)))
    if preset is not None or settings:
        raise UserError(f"{fitted} was fitted with its settings: leave out --preset and --set")
    found = load_fitted(fitted)
    if name not in (None, found.method):
        raise UserError(f"{fitted} was fitted for {found.method}: leave out --method {name}")
    return MethodChoice(found.method, found.config, fitted)


def split_list(given: str, what: str) -> list[str]:
    """The parts of ``a,b,c``, each once; empty lists are refused."""
    parts = list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    if not parts:
        raise UserError(f"no {what} given")
    return parts
