"""Finished cells of a comparison on disk, and the tables made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comparison.tables import group_settings, markdown, summarise


class Log:
    """Finished cells, one line each, kept over restarts; tables are written from all of them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.cells: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "cells.jsonl"
            for line in path.read_text().splitlines() if path.exists() else []:
                cell = json.loads(line)
                self.cells[cell["key"]] = cell
            results = folder / "results.json"
            if results.exists():
                self.skipped.update(json.loads(results.read_text())["not_run"])

    def add(self, cell: dict[str, Any]) -> None:
        """Keep a finished cell for good."""
        self.cells[cell["key"]] = cell
        for what in (cell["method"], f"{cell['method']} on {cell['set']}"):
            self.skipped.pop(what, None)
        if self.folder is not None:
            with (self.folder / "cells.jsonl").open("a") as file:
                file.write(json.dumps(cell) + "\n")

    def tables(self) -> str:
        """All tables as Markdown; also written to ``results.md`` and ``results.json``."""
        groups = group_settings(list(self.cells.values()))
        text: list[str] = []
        rows: dict[str, list[dict[str, Any]]] = {}
        for setting, cells in groups.items():
            made = dict.fromkeys(str(cell["made"]) for cell in cells)
            text += [f"## {setting}\n", markdown(cells, self.skipped), "", *made, ""]
            methods = dict.fromkeys(cell["method"] for cell in cells)
            rows[setting] = [
                summarise([c for c in cells if c["method"] == name]) for name in methods
            ]
        if self.folder is not None:
            (self.folder / "results.md").write_text("\n".join(text))
            values = {"settings": rows, "not_run": self.skipped}
            (self.folder / "results.json").write_text(json.dumps(values, indent=1))
        return "\n".join(text)
