"""From images to rows: batches with the views that methods ask for, and methods over them."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from cliquetta.data.features import FeatureDataset
from cliquetta.data.images import Decode
from cliquetta.data.inputs import ImageLike, name_images
from cliquetta.data.listing import Entry, ImageList, find_listed
from cliquetta.data.loader import Loaded, Loader
from cliquetta.data.nvjpeg import JpegDecoder
from cliquetta.data.prepared import AnyBatch, FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.data.views import to_pixels
from cliquetta.inference.rows import Row, RowFormat
from cliquetta.methods.base import Adapter, NonFiniteError
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.registry import require_features_only
from cliquetta.methods.state import load_state, pack_state, unpack_state
from cliquetta.model.clip import CLIP
from cliquetta.model.cuda import side_stream
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, Prediction, ViewSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """The images of a batch as they are listed, and the columns that were given for each."""

    images: Sequence[Entry]
    columns: Sequence[Row]


@dataclass(frozen=True)
class ReadBatch:
    """A batch as it was read: every image of the list, and the pixels of those that are readable.

    Methods that want the same views share a :class:`Batch`.
    """

    keys: Sequence[str]
    columns: Sequence[Row]
    by_views: Mapping[ViewSpec | None, AnyBatch]
    unreadable: Mapping[str, str]  # why, by key


@dataclass(frozen=True)
class Reader:
    """Turns images into batches."""

    preprocess: Preprocess
    views: tuple[ViewSpec | None, ...]
    batch_size: int
    seed: int
    workers: int | None = 0
    device: torch.device | None = None  # where pixels are wanted; `None`: bytes, for `develop`
    model: CLIP | None = None  # what given features are of; images are read without it
    decode: Decode = "exact"

    def stream(self, dataset: FeatureDataset, views: ViewSpec | None) -> FeatureStream:
        """Given features in their order, if the model and the views of a method fit them."""
        assert self.model is not None
        stream = Stream(dataset, self.preprocess, self.batch_size, order="sequential", views=views)
        return FeatureStream(stream, self.model)

    def batches(self, source: ImageSource, start: int, stop: int) -> Iterator[ReadBatch]:
        """The batches of the images from ``start`` up to ``stop``."""
        if isinstance(source.images, FeatureDataset):
            yield from self._features(source.images.part(start, stop))
            return
        begun: deque[Segment] = deque()

        def listed() -> Iterator[Sequence[Entry]]:
            for first in range(start, stop, self.batch_size):
                begun.append(source.segment(first, min(first + self.batch_size, stop)))
                yield begun[-1].images

        loader = self._loader(local=source.local)
        with closing(loader.load(listed(), stop - start)) as loaded:
            for read in loaded:
                yield self._batch(begun.popleft(), read)

    def read(self, segment: Segment) -> ReadBatch:
        """One batch, in this thread."""
        (loaded,) = self._loader(local=True).load([segment.images], len(segment.images))
        return self._batch(segment, loaded)

    def develop(self, read: ReadBatch, device: torch.device) -> ReadBatch:
        """A batch of bytes as one of pixels."""
        made: dict[ViewSpec | None, AnyBatch] = {}
        for views, batch in read.by_views.items():
            assert isinstance(batch, Batch)
            both = batch.images if batch.views is None else batch.views
            pixels = to_pixels(both.to(device), self.preprocess)
            plain = pixels if batch.views is None else pixels[:, 0]
            made[views] = Batch(plain, batch.keys, None if batch.views is None else pixels)
        return replace(read, by_views=made)

    def _loader(self, *, local: bool) -> Loader[Entry]:
        decode = "exact" if any(self.views) else self.decode  # crops of a part need all its pixels
        find = partial(find_listed, shorter=self.preprocess.size if decode == "fast" else None)
        decoder = None
        if decode == "gpu" and self.device is not None:
            decoder = JpegDecoder(self.preprocess, self.device)
        settings = (self.preprocess, self.views, self.seed, self.workers, self.device, local)
        return Loader(find, *settings, decoder)

    def _batch(self, segment: Segment, loaded: Loaded) -> ReadBatch:
        keys = [image.path for image in segment.images]
        batches = loaded.batches(keys, self.views)
        by_views: dict[ViewSpec | None, AnyBatch] = dict(zip(self.views, batches, strict=True))
        unreadable = {keys[at]: reason for at, reason in loaded.unreadable}
        for key, reason in unreadable.items():
            _log.warning("skipped %s: %s", key, reason)
        return ReadBatch(keys, segment.columns, by_views, unreadable)

    def _features(self, dataset: FeatureDataset) -> Iterator[ReadBatch]:
        streams = [self.stream(dataset, views).batches() for views in self.views]
        for batches in zip(*streams, strict=True):
            by_views = dict(zip(self.views, (batch for batch, _ in batches), strict=True))
            keys = batches[0][0].keys
            yield ReadBatch(keys, [{}] * len(keys), by_views, {})


class ImageSource:
    """Files of a list, or images in memory, as datasets of consecutive images."""

    def __init__(
        self, images: ImageList | FeatureDataset | Sequence[ImageLike], row_format: RowFormat
    ) -> None:
        self.images = images
        self.row_format = row_format
        self._names = [] if isinstance(images, ImageList | FeatureDataset) else name_images(images)
        self.columns: dict[str, str] = {}  # of input tables, and what the output calls them
        used = {"path", "error", *row_format.columns()}
        for name in images.columns if isinstance(images, ImageList) else ():
            while (shown := self.columns.get(name, name)) in used:
                self.columns[name] = f"input_{shown}"
            self.columns[name] = shown
            used.add(shown)

    @property
    def local(self) -> bool:
        """Whether other processes cannot see the images."""
        return not isinstance(self.images, ImageList) or self.images.in_memory

    def segment(self, start: int, stop: int) -> Segment:
        """Some images, and the columns that were given for each."""
        assert not isinstance(self.images, FeatureDataset)
        if not isinstance(self.images, ImageList):
            named = zip(self._names[start:stop], self.images[start:stop], strict=True)
            pictures = [Entry(name, {}, image=image) for name, image in named]
            return Segment(pictures, [{}] * len(pictures))
        entries = self.images.entries(start, stop)
        shown = self.columns.items()
        columns = [{new: e.columns.get(name, "") for name, new in shown} for e in entries]
        return Segment([entry._replace(columns={}) for entry in entries], columns)

    def table_columns(self) -> dict[str, type]:
        """All columns of the output table, in order."""
        given = dict.fromkeys(self.columns.values(), str)
        return {"path": str, **given, **self.row_format.columns(), "error": str}


# --- methods over batches -------------------------------------------------------------------------


States = Mapping[str, bytes]  # the packed state of every method, by name
Health = dict[str, dict[str, int | float | str]]  # by method: how adaptation is doing, a verdict


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
    busy: float = 0.0  # seconds in which the methods worked
    classes_changed: bool = False  # whether `load` found a state of another class list
    last: dict[str, Prediction] = field(default_factory=dict)  # of methods with a verdict

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

        def make_rows() -> list[Row]:
            with nullcontext() if side is None else torch.cuda.stream(side):
                if side is not None and predicted is not None:
                    side.wait_event(predicted)
                made = dict(zip(keys, self.row_format.rows(predictions), strict=True))
            none, rows = dict.fromkeys(self.row_format.columns()), list[Row]()
            for key, columns in listed:
                path = os.fsencode(key).decode("utf-8", "backslashreplace")  # if it is not UTF-8
                cells = made.get(key, none)
                rows.append({"path": path, **columns, **cells, "error": unreadable.get(key, "")})
            return rows

        self.busy += time.perf_counter() - begun
        return make_rows

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
            rest = (
                "what was learned about the images stays, what was counted per class starts again"
            )
            warnings.warn(f"{state} was saved with another class list: {rest}", stacklevel=2)
        return int(saved.notes.get("images", 0))

    def save(self, state: Path, images: int) -> None:
        """Write the state file with the number of images it has seen."""
        (adapter,) = self.adapters.values()
        adapter.save(state, notes={"images": images})
