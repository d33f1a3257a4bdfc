"""``cliquetta datasets``: what can be evaluated, and the shifts to put it under."""

from __future__ import annotations

import typer

from cliquetta.cli.command import Common, command

_EXAMPLES = """
cliquetta datasets

cliquetta evaluate --dataset bundled@fog:3 --method zero_shot
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
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
            "yours, --root" if entry.needs_root else "in the package",
            entry.summary
            + (f"; splits {', '.join(entry.splits)}" if len(entry.splits) > 1 else ""),
        )
        for entry in entries
    ]
    rows += [(f"{prefix}...", "–", "–", "yours", what) for prefix, (_, what) in YOURS.items()]
    columns = ("dataset", "classes", "images", "files", "what it is")
    common.terminal.table(columns, rows, right=("classes", "images"))
    common.terminal.say(
        f"Shifts go behind an id, as in bundled@fog:3, severity {min(SEVERITIES)} to "
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
