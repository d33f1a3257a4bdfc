"""``cliquetta datasets``: the known datasets and shifts."""

from __future__ import annotations

import typer

from cliquetta.cli.command import Common, command

_EXAMPLES = """
cliquetta datasets

cliquetta evaluate --dataset bundled@fog:3 --method zero_shot
"""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "datasets", examples=_EXAMPLES, compute=False)(datasets)


def datasets(common: Common) -> None:
    """List the known datasets and shifts."""
    from cliquetta.data.catalogue import YOURS, list_datasets
    from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES

    entries = list_datasets()
    rows = [
        (
            entry.id,
            f"{entry.classes:,}",
            f"{entry.expected['images']:,}" if "images" in entry.expected else "–",
            "--root" if entry.needs_root else "bundled",
            entry.summary
            + (f"; splits {', '.join(entry.splits)}" if len(entry.splits) > 1 else ""),
        )
        for entry in entries
    ]
    rows += [(f"{prefix}...", "–", "–", "your own", what) for prefix, (_, what) in YOURS.items()]
    columns = ("dataset", "classes", "images", "files", "description")
    common.terminal.table(columns, rows, right=("classes", "images"))
    common.terminal.say(
        f"A shift is appended to an id, as in bundled@fog:3, with severity {min(SEVERITIES)} to "
        f"{max(SEVERITIES)}: {', '.join(sorted(CORRUPTIONS))}."
    )
    common.terminal.document(
        {
            "datasets": [
                {
                    "id": entry.id,
                    "summary": entry.summary,
                    "classes": entry.classes,
                    "expected": dict(entry.expected),
                    "splits": dict(entry.splits),
                    "source": entry.source,
                    "needs_root": entry.needs_root,
                }
                for entry in entries
            ],
            "shifts": sorted(CORRUPTIONS),
            "severities": list(SEVERITIES),
        }
    )
