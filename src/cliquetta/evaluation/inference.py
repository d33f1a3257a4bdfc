"""Methods over a list of images: batches in, rows out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cliquetta.data.batch import ImageLike, to_picture
from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.features import FeatureDataset
from cliquetta.data.listing import Listing
from cliquetta.data.prepared import FeatureBatch, from_given_features
from cliquetta.data.stream import Stream
from cliquetta.evaluation.answers import Answers
from cliquetta.evaluation.table_files import Row, shown_path
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.state import load_state, save_state
from cliquetta.methods.base import Adapter, NonFiniteError
from cliquetta.methods.registry import require_features_only

_SEGMENT = 64
"""Batches that are read as one dataset."""


class ImageSource:
    """Files of a list, or images in memory, as datasets of consecutive images."""

    def __init__(
        self, images: Listing | FeatureDataset | Sequence[ImageLike], answers: Answers
    ) -> None:
        self.images = images
        self.answers = answers
        self.columns: dict[str, str] = {}
        """Columns of input tables and what they are called in the output."""
        taken = {"path", "error", *answers.columns()}
        for name in images.columns if isinstance(images, Listing) else ():
            while (shown := self.columns.get(name, name)) in taken:
                self.columns[name] = f"input_{shown}"
            self.columns[name] = shown
            taken.add(shown)

    def segment(self, start: int, stop: int) -> tuple[Dataset, list[Row]]:
        """The dataset of some images, and the columns that were given for each."""
        if isinstance(self.images, FeatureDataset):
            return self.images.part(start, stop), [{}] * (stop - start)
        if not isinstance(self.images, Listing):
            pictures = _Pictures(self.images[start:stop], start, self.answers.classes)
            return pictures, [{} for _ in pictures.keys]
        entries = self.images.entries(start, stop)
        files = FileDataset(
            "files", [e[0] for e in entries], names=self.answers.classes, labels=None
        )
        shown = self.columns.items()
        return files, [{new: row.get(name, "") for name, new in shown} for _, row in entries]

    def table_columns(self) -> dict[str, type]:
        """All columns of the output table, in order."""
        given = dict.fromkeys(self.columns.values(), str)
        return {"path": str, **given, **self.answers.columns(), "error": str}


class _Pictures(Dataset):
    """Images in memory, named by their place."""

    def __init__(self, images: Sequence[ImageLike], start: int, names: Sequence[str]) -> None:
        keys = [str(start + place) for place in range(len(images))]
        super().__init__("images", names=names, keys=keys, labels=None)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB."""
        return to_picture(self.images[index])[1]


@dataclass
class Predictor:
    """Methods over a list of images: batches in, rows out."""

    adapters: Mapping[str, Adapter]
    answers: Answers
    batch_size: int
    seed: int
    workers: int
    on_progress: Callable[[int, int, int], None] | None

    def check(self, dataset: FeatureDataset) -> None:
        """Refuse features that a method cannot take, before anything is written."""
        for name, adapter in self.adapters.items():
            require_features_only(type(adapter), name, towers=True)
            from_given_features(self._stream(dataset, adapter), adapter.model)

    def _stream(self, dataset: Dataset, adapter: Adapter) -> Stream:
        return Stream(
            dataset,
            adapter.model.preprocess,
            self.batch_size,
            order="sequential",
            views=adapter.views,
            view_seed=self.seed,
            workers=self.workers,
            pin=adapter.model.device.type == "cuda",
        )

    def run(self, source: ImageSource, start: int, stop: int, origin: int) -> Iterator[list[Row]]:
        """The rows of each batch from image ``start`` up to ``stop`` of a run from ``origin``."""
        skipped, step = 0, _SEGMENT * self.batch_size
        for begin in range(start, stop, step):
            dataset, columns = source.segment(begin, min(begin + step, stop))
            place = 0
            for answers, unreadable in self._segment(dataset):
                rows = []
                for _ in range(min(self.batch_size, len(dataset) - place)):
                    key = dataset.keys[place]
                    row = {"path": shown_path(key), **columns[place], **answers.get(key, {})}
                    rows.append(row | {"error": unreadable.get(key, "")})
                    place += 1
                skipped += len(unreadable)
                yield rows
                if self.on_progress is not None:
                    self.on_progress(begin + place - origin, stop - origin, skipped)

    def _segment(self, dataset: Dataset) -> Iterator[tuple[dict[str, Row], dict[str, str]]]:
        """Answers and reasons of unreadable files, by key, batch by batch.

        Methods that want the same views share a stream.
        """
        streams = {
            adapter.views: from_given_features(self._stream(dataset, adapter), adapter.model)
            for adapter in self.adapters.values()
        }
        seen = 0
        with ExitStack() as stack:
            started = [stack.enter_context(closing(s.batches())) for s in streams.values()]  # type: ignore[type-var]
            for batches in zip(*started, strict=True):
                by_views = dict(zip(streams, (batch for batch, _ in batches), strict=True))
                keys = batches[0][0].keys
                logits = {
                    name: self._logits(name, adapter, by_views[adapter.views])
                    for name, adapter in self.adapters.items()
                }
                fresh = next(iter(streams.values())).skipped[seen:]
                seen += len(fresh)
                rows = dict(zip(keys, self.answers.rows(logits), strict=True))
                yield rows, {entry.key: entry.reason for entry in fresh}

    def _logits(self, name: str, adapter: Adapter, batch: Any) -> torch.Tensor:
        try:
            if isinstance(batch, FeatureBatch):
                assert isinstance(adapter, FeatureLevel)
                return adapter.predict_features(batch.features).logits
            return adapter.predict(batch).logits
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}, batch from {batch.keys[0]!r} on: {error}") from error

    def load(self, state: Path | None) -> int:
        """Continue from a state file if there is one; returns how many images it has seen.

        Of a state of another class list a method may keep what it has learned apart from the
        classes.
        """
        if state is None or not state.exists():
            return 0
        (adapter,) = self.adapters.values()
        saved = load_state(adapter, state, other_classes=True)
        if saved.classes_changed:
            warnings.warn(
                f"{state} was saved with another class list: what was learned about the images is "
                "kept, what was counted per class starts again",
                stacklevel=2,
            )
        return int(saved.notes.get("images", 0))

    def save(self, state: Path | None, images: int) -> None:
        """Write the state file, if one is wanted, with the number of images it has seen."""
        if state is not None:
            (adapter,) = self.adapters.values()
            save_state(adapter, state, notes={"images": images})
