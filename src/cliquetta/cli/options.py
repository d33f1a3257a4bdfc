"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import Bounds
from cliquetta.errors import UserError

if TYPE_CHECKING:  # what loads torch is imported when it is needed: `--help` does without
    from cliquetta.evaluation.grid import RunSpec

Model = Annotated[str, "Model name (see `cliquetta models`) or path."]
Preset = Annotated[str | None, "Preset of the method's config."]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override a config field: KEY=VALUE (repeatable).")
]
Fitted = Annotated[Path | None, "File written by `cliquetta fit`, instead of --method."]
Templates = Annotated[
    list[str] | None, "Prompt with {}, file of prompts, or known set: openai-80 (repeatable)."
]
Root = Annotated[Path | None, "Root directory of your datasets."]
BatchSize = Annotated[int, Bounds(1), "Images per batch."]
Workers = Annotated[
    int | None,
    Bounds(0),
    "Processes that decode images; 0: none (default: one per core for a GPU, else two threads).",
]
Seeds = Annotated[str, "Seeds of order, views and methods: 0,1,2."]
Out = Annotated[Path, "Output directory; completed runs are reused."]
Limit = Annotated[int | None, Bounds(1), "Use at most N images per dataset."]
RUNS = Path("runs")


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """``key=value`` pairs of ``--set``."""
    pairs = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, got {setting!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def read_cells(
    base: RunSpec,
    method: str | None,
    fitted: Path | None,
    settings: Sequence[str],
    preset: str | None = None,
) -> list[RunSpec]:
    """One spec for every method asked for, its config checked; the default method if none is."""
    from cliquetta.evaluation.grid import with_fitted, with_method, with_options
    from cliquetta.methods.registry import DEFAULT_METHOD

    names = [] if method is None else split_list(method, "methods")
    if len(names) > 1 and (settings or fitted or preset):
        raise UserError(f"--set, --preset and --fitted are for one method, got {', '.join(names)}")
    if fitted is not None:
        cell = with_fitted(base, fitted)
        if settings or preset or ":" in "".join(names):
            raise UserError(f"{fitted} was fitted with its settings: leave out presets and --set")
        if names not in ([], [cell.method]):
            raise UserError(f"{fitted} was fitted for {cell.method}: leave out --method {names[0]}")
        return [cell]
    suffix = f":{preset}" if preset else ""
    cells = [with_method(base, f"{name}{suffix}") for name in names or [DEFAULT_METHOD]]
    if settings:
        own = dict(cells[0].options) | read_settings(settings)
        cells = [with_options(cells[0], own)]
    return cells


def read_seeds(given: str) -> list[int]:
    """The integers of ``0,1,2``."""
    try:
        return [int(seed) for seed in split_list(given, "seeds")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers such as 0,1,2, got {given!r}") from None


def read_shard(given: str) -> tuple[int, int]:
    """``(i, n)`` of ``i/n``, counted from 1."""
    first, _, second = given.partition("/")
    shard = (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)
    if not 1 <= shard[0] <= shard[1]:
        raise UserError(f"--shard takes I/N such as 2/8, got {given!r}")
    return shard


def split_list(given: str, what: str) -> list[str]:
    """The parts of ``a,b,c``, each once; empty lists are refused."""
    parts = list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    if not parts:
        raise UserError(f"no {what} given")
    return parts
