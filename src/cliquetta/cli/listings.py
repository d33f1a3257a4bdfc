"""``cliquetta methods``, ``models`` and ``datasets``: what is known by name."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.checks import check_methods
from cliquetta.cli.command import Common
from cliquetta.cli.console import Terminal
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.methods.building.registry import MethodEntry

METHODS = """
cliquetta methods
cliquetta methods zero_shot
"""
MODELS = """
cliquetta models
cliquetta models '*ViT-B-16*'
"""
DATASETS = """
cliquetta datasets
cliquetta evaluate --dataset bundled@fog:3 --method zero_shot
"""


def methods(
    common: Common,
    name: Annotated[
        str | None, typer.Argument(help="Show the config of this method.")
    ] = None,
) -> None:
    """List the methods, or show config, presets and paper of one."""
    check_methods(name)

    from cliquetta.methods.building.registry import get_method, method_entries

    if name is not None:
        _show(get_method(name), common.terminal)
        return
    rows = []
    for entry in method_entries():
        row = (
            entry.name,
            entry.adapter.batch_dependence.value,
            "yes" if entry.fit is not None else "",
            str(len(entry.presets) or ""),
            entry.summary,
        )
        rows.append(row)
    columns = ("method", "batch", "few-shot", "presets", "description")
    common.terminal.table(columns, rows, right=("presets",))
    common.terminal.say(
        "`cliquetta methods NAME` shows the config and paper of a method."
    )
    common.terminal.document([_summary(entry) for entry in method_entries()])


def _summary(entry: "MethodEntry") -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "paper": entry.paper,
        "batch_dependence": entry.adapter.batch_dependence.value,
        "needs": sorted(entry.adapter.needs),
        "is_few_shot": entry.fit is not None,
        "presets": list(entry.presets),
        "tuned_by_authors": sorted(entry.tuned_by_authors),
    }


def _show(entry: "MethodEntry", terminal: Terminal) -> None:
    from cliquetta.methods.building.config import config_fields
    from cliquetta.methods.building.state import plain_config

    fields = config_fields(entry.config)
    terminal.say(f"{entry.name}: {entry.summary}")
    if entry.paper:
        terminal.say(entry.paper)
    terminal.say(f"Batch dependence: {entry.adapter.batch_dependence.value}.")
    if entry.adapter.needs:
        terminal.say(
            f"Requires of the model: {', '.join(sorted(entry.adapter.needs))}."
        )
    rows = [(f.name, f.type, _plain(f.default), f.doc) for f in fields]
    if rows:
        title = "Config (--set KEY=VALUE)"
        terminal.table(("field", "type", "default", "description"), rows, title=title)

    # Of a preset only what it changes is shown.
    usual = vars(entry.config())
    presets = []
    for name, config in entry.presets.items():
        changes = []
        for field, value in vars(config).items():
            if value != usual[field]:
                changes.append(f"{field}={_plain(value)}")
        tuned = "yes" if name in entry.tuned_by_authors else ""
        presets.append((name, ", ".join(changes) or "nothing", tuned))
    if presets:
        columns = ("preset", "differs from the defaults in", "tuned by authors")
        terminal.table(columns, presets, title="Presets (--preset NAME)")

    defaults = plain_config(entry.config())
    options = [dataclasses.asdict(f) | {"default": defaults[f.name]} for f in fields]
    values = {name: plain_config(config) for name, config in entry.presets.items()}
    terminal.document(_summary(entry) | {"options": options, "preset_values": values})


def _plain(value: Any) -> str:
    """Write a value as ``--set`` takes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def models(
    common: Common,
    pattern: Annotated[
        str, typer.Argument(help="Only names that match (wildcard *).")
    ] = "*",
) -> None:
    """List the models that load by name."""
    from cliquetta.model.names import list_models

    entries = list_models(pattern)
    if not entries:
        raise UserError(f"no model matches {pattern!r}: `cliquetta models` lists all")
    rows = []
    for entry in entries:
        able = "all" if entry.is_vit else "zero_shot and caches"
        weights = "bundled" if entry.is_bundled else "downloaded on first use"
        rows.append((entry.name, entry.source, str(entry.image_size), able, weights))
    columns = ("model", "source", "pixels", "methods", "weights")
    common.terminal.table(columns, rows, right=("pixels",))
    common.terminal.say(
        "Also: a .safetensors or .pt file, a directory, hf:OWNER/NAME, hf-hub:OWNER/NAME, "
        "open_clip:ARCHITECTURE/FILE."
    )
    common.terminal.document([dataclasses.asdict(entry) for entry in entries])


def datasets(common: Common) -> None:
    """List the known datasets and shifts."""
    from cliquetta.data.catalogue import YOURS, list_datasets
    from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES

    entries = list_datasets()
    rows = []
    for entry in entries:
        images = f"{entry.expected['images']:,}" if "images" in entry.expected else "–"
        files = "--root" if entry.needs_root else "bundled"
        splits = f"; splits {', '.join(entry.splits)}" if len(entry.splits) > 1 else ""
        summary = entry.summary + splits
        rows.append((entry.id, f"{entry.classes:,}", images, files, summary))
    for prefix, (_, what) in YOURS.items():
        rows.append((f"{prefix}...", "–", "–", "your own", what))
    columns = ("dataset", "classes", "images", "files", "description")
    common.terminal.table(columns, rows, right=("classes", "images"))
    common.terminal.say(
        f"A shift is appended to an id, as in bundled@fog:3, with severity {min(SEVERITIES)} to "
        f"{max(SEVERITIES)}: {', '.join(sorted(CORRUPTIONS))}."
    )
    plain = [dict(vars(entry)) for entry in entries]
    for values in plain:
        del values["build"]
    common.terminal.document(
        {
            "datasets": plain,
            "shifts": sorted(CORRUPTIONS),
            "severities": list(SEVERITIES),
        }
    )
