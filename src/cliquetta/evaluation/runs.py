"""Runs found on disk: their records, their predictions, and what makes two of them alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cliquetta.data.samplers import RENAMED
from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import Predictions
from cliquetta.evaluation.record import (
    RECORD,
    Record,
    digest,
    list_records,
    load_predictions,
    load_record,
)


@dataclass(frozen=True)
class Run:
    """A record and the folder it lies in."""

    record: Record
    folder: Path

    @cached_property
    def predictions(self) -> Predictions:
        """The answers for every image."""
        return load_predictions(self.folder)

    @property
    def name(self) -> str:
        """Method and preset."""
        preset = self.record.preset
        return self.record.method + (f":{preset}" if preset else "")

    @property
    def protocol(self) -> dict[str, str]:
        """What must be equal within a column, in words that can be shown."""
        settings = self.record.settings
        prompts = settings["prompts"]
        templates = prompts["templates"]
        shown = repr(templates[0]) if len(templates) == 1 else f"{len(templates)} templates"
        return {
            "preprocessing": settings["preprocessing"]["fingerprint"],
            "class names": f"{prompts['classes']} names {prompts['names']}",
            "templates": f"{shown} {prompts['fingerprint']}",
            "images": self._images(),
        }

    def _images(self) -> str:
        """Which images were shown; the order decides where only some of them were."""
        stream = self.record.settings["stream"]
        order = {"order": self.order, "dirichlet": stream["dirichlet"], **self._own_order()}
        some = stream["limit"] or self._own_order()
        chosen = [stream["limit"], *order.values()] if some else []
        number = f"{stream['limit']} of " if stream["limit"] else ""
        total = sum(domain["images"] for domain in stream["datasets"])
        return f"{number}{total} {digest([[d['files'] for d in stream['datasets']], chosen])}"

    @property
    def order(self) -> str:
        """The order of the stream, by its name of today."""
        order = str(self.record.settings["stream"]["order"])
        return RENAMED.get(order, order)

    def _own_order(self) -> dict[str, Any]:
        """Settings that only some orders have."""
        stream = self.record.settings["stream"]
        return {name: stream[name] for name in ("present", "length") if name in stream}

    @property
    def conditions(self) -> dict[str, Any]:
        """What a row is run with, beside the method's own config; shown where rows differ in it."""
        model, stream = self.record.settings["model"], self.record.settings["stream"]
        return {
            "model": model["id"],
            "weights": model["fingerprint"],
            "dtype": model["dtype"],
            "batch_size": stream["batch_size"],
            "order": self.order,
            "dirichlet": stream["dirichlet"],
            **self._own_order(),
        }

    @property
    def setting(self) -> dict[str, Any]:
        """The method's config, and what it was fitted from."""
        return {**self.record.settings["config"], "fitted": self.record.settings["fitted"]}

    @property
    def row(self) -> str:
        """Equal for runs that differ in data set and seed only."""
        return json.dumps([self.name, self.setting, self.conditions], sort_keys=True)


def find_runs(paths: Iterable[Path | str]) -> tuple[list[Run], list[Run]]:
    """The finished and the unfinished runs in folders of runs, folders of one, or record files."""
    found: dict[str, Run] = {}
    for path in map(Path, paths):
        folder = path.parent if path.name == RECORD else path
        if (folder / RECORD).exists():
            runs = [Run(load_record(folder), folder)]
        elif folder.is_dir():
            runs = [Run(record, folder / record.id) for record in list_records(folder)]
        else:
            raise UserError(f"no such folder: {path}")
        if not runs:
            raise UserError(f"no runs in {path}: `cliquetta evaluate --out {path}` makes some")
        for run in runs:
            if found.setdefault(run.record.id, run).record.status != "finished":
                found[run.record.id] = run
    finished = [run for run in found.values() if run.record.status == "finished"]
    return finished, [run for run in found.values() if run.record.status != "finished"]
