"""Numbers of images that runs repair and break, kept in records that leave their predictions."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.predictions import (
    PREDICTIONS,
    Predictions,
    load_predictions,
    paired_test,
)
from cliquetta.evaluation.record import Record


def add_changes(records: Sequence[Record], out: Path) -> list[Record]:
    """Add ``repaired`` and ``broken`` to the metrics of runs that lie in a folder of runs.

    They count images against zero-shot on the same stream and texts. Runs without
    predictions there, and those without such a run of zero-shot, stay as they are.
    """
    loaded: dict[str, Predictions] = {}
    for record in records:
        if (out / record.id / PREDICTIONS).exists():
            loaded[record.id] = load_predictions(out / record.id)

    # Zero-shot is paired by its stream: views and method may differ.
    baselines = {
        stream_key(record): record.id
        for record in records
        if record.method == BASELINE and record.id in loaded
    }
    counted = []
    for record in records:
        baseline = baselines.get(stream_key(record))
        if record.method != BASELINE and baseline is not None and record.id in loaded:
            test = paired_test([(loaded[baseline], loaded[record.id])])
            changes = {"repaired": test.repaired, "broken": test.broken}
            record = replace(record, metrics={**record.metrics, **changes})
        counted.append(record)
    return counted


def stream_key(record: Record) -> str:
    """Describe the images, their order and the texts of a run: equal for runs to be paired."""
    settings = record.settings
    stream = dict(settings["stream"])
    # Methods look at different views of the same images.
    del stream["views"], stream["view_seed"]
    return json.dumps([stream, settings["prompts"], record.seed], sort_keys=True)
