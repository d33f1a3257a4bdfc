"""Methods over batches of images: batches in, rows out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from cliquetta.data.features import FeatureDataset
from cliquetta.data.images import Decode
from cliquetta.data.prepared import AnyBatch
from cliquetta.inference.reading import ReadBatch, Reader
from cliquetta.inference.rows import Row, RowFormat, shown_path
from cliquetta.methods.base import Adapter, NonFiniteError
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.registry import require_features_only
from cliquetta.methods.state import load_state, pack_state, unpack_state
from cliquetta.model.cuda import side_stream
from cliquetta.types import Batch, Prediction

States = Mapping[str, bytes]
"""The packed state of every method, by name."""
Health = dict[str, dict[str, int | float | str]]
"""By method: figures of how adaptation is doing, with a verdict."""


def predict_batch(adapter: Adapter, batch: AnyBatch) -> Prediction:
    """The prediction of a method for a batch, of images or of their features."""
    if isinstance(batch, Batch):
        return adapter.predict(batch)
    assert isinstance(adapter, FeatureLevel)
    return adapter.predict_features(batch.features)


@dataclass
class Predictor:
    """Methods that predict the same images side by side."""

    adapters: Mapping[str, Adapter]
    row_format: RowFormat
    batch_size: int
    seed: int
    workers: int | None
    decode: Decode = "exact"
    busy: float = 0.0
    """Seconds in which the methods worked."""
    classes_changed: bool = False
    """Whether :meth:`load` found a state of another class list."""
    last: dict[str, Prediction] = field(default_factory=dict)
    """The last prediction of every method whose evidence has a verdict."""

    def __post_init__(self) -> None:
        for adapter in self.adapters.values():
            adapter.enable(reject=self.row_format.reject, calibrate=self.row_format.calibrate)

    @property
    def health(self) -> Health:
        """Health figures of every method after its last batch."""
        return {
            name: self.adapters[name].summarize(prediction)
            for name, prediction in self.last.items()
        }

    @cached_property
    def reader(self) -> Reader:
        """The reader of the batches that the methods want."""
        model = next(iter(self.adapters.values())).model
        views = tuple(dict.fromkeys(adapter.views for adapter in self.adapters.values()))
        settings = (self.batch_size, self.seed, self.workers, model.device, model, self.decode)
        return Reader(model.preprocess, views, *settings)

    def check(self, dataset: FeatureDataset) -> None:
        """Refuse features that a method cannot take, before anything is written."""
        for name, adapter in self.adapters.items():
            require_features_only(type(adapter), name, towers=True)
        for views in self.reader.views:
            self.reader.stream(dataset, views)

    def rows(self, read: ReadBatch) -> list[Row]:
        """One row per image of a batch; the methods learn from it."""
        return self.ask(read)()

    def ask(self, read: ReadBatch) -> Callable[[], list[Row]]:
        """Let the methods learn from a batch; the result makes its rows later, in any thread."""
        begun = time.perf_counter()
        predictions = {
            name: self._predict(name, adapter, read.by_views[adapter.views])
            for name, adapter in self.adapters.items()
        }
        keys = next(iter(read.by_views.values())).keys
        listed, unreadable = list(zip(read.keys, read.columns, strict=True)), read.unreadable
        logits = next(iter(predictions.values())).logits
        side = side_stream(logits.device) if logits.is_cuda else None
        predicted = torch.cuda.current_stream(logits.device).record_event() if side else None

        def rows() -> list[Row]:
            with nullcontext() if side is None else torch.cuda.stream(side):
                if side is not None and predicted is not None:
                    side.wait_event(predicted)
                made = dict(zip(keys, self.row_format.rows(predictions), strict=True))
            none = dict.fromkeys(self.row_format.columns())
            return [
                {"path": shown_path(key), **columns, **made.get(key, none)}
                | {"error": unreadable.get(key, "")}
                for key, columns in listed
            ]

        self.busy += time.perf_counter() - begun
        return rows

    def _predict(self, name: str, adapter: Adapter, batch: AnyBatch) -> Prediction:
        try:
            prediction = predict_batch(adapter, batch)
            if "verdict" in prediction.evidence:
                self.last[name] = prediction
            return prediction
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}, batch from {batch.keys[0]!r} on: {error}") from error

    def states(self) -> States:
        """Pack what the methods have learned."""
        return {name: pack_state(adapter) for name, adapter in self.adapters.items()}

    def restore(self, states: States) -> None:
        """Continue from :meth:`states`."""
        for name, adapter in self.adapters.items():
            unpack_state(adapter, states[name], source=f"the state of {name}")

    def load(self, state: Path | None) -> int:
        """Continue from a state file if there is one; returns how many images it has seen.

        Under another class list a method may keep what it has learned apart from the classes.
        """
        if state is None or not state.exists():
            return 0
        (adapter,) = self.adapters.values()
        saved = load_state(adapter, state, other_classes=True)
        self.classes_changed |= saved.classes_changed
        if saved.classes_changed:
            warnings.warn(
                f"{state} was saved with another class list: what was learned about the images is "
                "kept, what was counted per class starts again",
                stacklevel=2,
            )
        return int(saved.notes.get("images", 0))

    def save(self, state: Path, images: int) -> None:
        """Write the state file with the number of images it has seen."""
        (adapter,) = self.adapters.values()
        adapter.save(state, notes={"images": images})
