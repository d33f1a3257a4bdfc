"""From images to rows: batches with the views that methods ask for, and methods over them."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from cliquetta.data.features import FeatureDataset
from cliquetta.data.inputs import ImageLike, name_images
from cliquetta.data.labels import FOLDER, LabelReader, check_labels
from cliquetta.data.listing import Entry, ImageList, find_listed
from cliquetta.data.loader import Loaded, Loader
from cliquetta.data.nvjpeg import JpegDecoder
from cliquetta.data.prepared import AnyBatch, FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.data.torch_data import TorchImages
from cliquetta.data.views import to_pixels
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.rows import LABEL, ZERO_SHOT, RowFormat
from cliquetta.inference.tables import Row
from cliquetta.methods.building.base import Adapter, NonFiniteError
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.registry import create_method, require_features_only
from cliquetta.methods.building.state import load_state, pack_state, unpack_state
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
    options: PredictOptions
    device: torch.device | None = None
    """where pixels are wanted; `None`: bytes, for `develop`"""
    model: CLIP | None = None  # what given features are of; images are read without it

    def stream(self, dataset: FeatureDataset, views: ViewSpec | None) -> FeatureStream:
        """Return given features in their order, if the model and a method's views fit them."""
        assert self.model is not None
        size = self.options.batch_size
        stream = Stream(dataset, self.preprocess, size, order="sequential", views=views)
        return FeatureStream(stream, self.model)

    def batches(
        self, source: ImageSource, start: int, stop: int
    ) -> Iterator[ReadBatch]:
        """Yield the batches of the images from ``start`` up to ``stop``."""
        if isinstance(source.images, FeatureDataset):
            yield from self._features(source.images.part(start, stop))
            return
        size = self.options.batch_size
        begun: deque[Segment] = deque()

        def listed() -> Iterator[Sequence[Entry]]:
            for first in range(start, stop, size):
                segment = source.segment(first, min(first + size, stop))
                begun.append(segment)
                yield segment.images

        loader = self._loader(local=source.local)
        with closing(loader.load(listed(), stop - start)) as loaded:
            for read in loaded:
                yield self._batch(begun.popleft(), read)

    def read(self, segment: Segment) -> ReadBatch:
        """Read one batch in this thread."""
        (loaded,) = self._loader(local=True).load([segment.images], len(segment.images))
        return self._batch(segment, loaded)

    def develop(self, read: ReadBatch, device: torch.device) -> ReadBatch:
        """Turn a batch of bytes into one of pixels."""
        made: dict[ViewSpec | None, AnyBatch] = {}
        for views, batch in read.by_views.items():
            assert isinstance(batch, Batch)
            both = batch.images if batch.views is None else batch.views
            pixels = to_pixels(both.to(device), self.preprocess)
            if batch.views is None:
                made[views] = Batch(pixels, batch.keys)
            else:
                made[views] = Batch(pixels[:, 0], batch.keys, pixels)
        return replace(read, by_views=made)

    def _loader(self, *, local: bool) -> Loader[Entry]:
        # crops of a part need all pixels of an image
        decode = "exact" if any(self.views) else self.options.decode
        shorter = self.preprocess.size if decode == "fast" else None
        decoder = None
        if decode == "gpu" and self.device is not None:
            decoder = JpegDecoder(self.preprocess, self.device)
        return Loader(
            partial(find_listed, shorter=shorter),
            self.preprocess,
            self.views,
            self.options.seed,
            workers=self.options.workers,
            device=self.device,
            local=local,
            decoder=decoder,
        )

    def _batch(self, segment: Segment, loaded: Loaded) -> ReadBatch:
        keys = [image.path for image in segment.images]
        batches = loaded.batches(keys, self.views)
        by_views: dict[ViewSpec | None, AnyBatch] = dict(
            zip(self.views, batches, strict=True)
        )
        unreadable = {}
        for position, reason in loaded.unreadable:
            key = keys[position]
            unreadable[key] = reason
            _log.warning("skipped %s: %s", key, reason)
        return ReadBatch(
            keys=keys,
            columns=segment.columns,
            by_views=by_views,
            unreadable=unreadable,
        )

    def _features(self, dataset: FeatureDataset) -> Iterator[ReadBatch]:
        streams = [self.stream(dataset, views).batches() for views in self.views]
        for batches in zip(*streams, strict=True):
            by_views = dict(
                zip(self.views, (batch for batch, _ in batches), strict=True)
            )
            keys = batches[0][0].keys
            yield ReadBatch(keys, [{}] * len(keys), by_views, {})


class ImageSource:
    """Files of a list, or images in memory, as segments of consecutive images.

    Args:
        images: The list, or the images.
        row_format: The columns of the output, from which those of input tables must
            differ.
        labels: Labels of images in memory, by their numbers in the list.

    Raises:
        UserError: Labels are asked for and none of them names a class.

    """

    def __init__(
        self,
        images: ImageList | FeatureDataset | Sequence[ImageLike],
        row_format: RowFormat,
        labels: Sequence[str] = (),
    ) -> None:
        self.images = images
        self.row_format = row_format
        self._names: Sequence[str] = ()
        if isinstance(images, TorchImages):
            self._names = images.names
        elif not isinstance(images, ImageList | FeatureDataset):
            self._names = name_images(images)
        self._stated = labels
        self._labels = self._read_labels()
        self.columns = self._name_columns()

    def _read_labels(self) -> LabelReader | None:
        """Return what reads the labels of the list, if labels are asked for."""
        if not self.row_format.labelled:
            return None
        names = self.row_format.classes
        stated = Counter(self._stated)
        if isinstance(self.images, ImageList):
            stated = self.images.labels()
        reader = LabelReader(names, stated)
        readable: Counter[str] = Counter()
        for label, count in stated.items():
            if name := self._read_label(reader, label):
                readable[name] += count
        check_labels(stated, readable, names)
        return reader

    def _read_label(self, reader: LabelReader, stated: str) -> str:
        by_folder = self.row_format.options.label_source == FOLDER
        return reader.read_folder(stated) if by_folder else reader.read(stated)

    def _name_columns(self) -> dict[str, str]:
        """Return the columns of input tables, and what the output calls them."""
        given = self.images.columns if isinstance(self.images, ImageList) else ()
        used = {"path", "error", *self.row_format.columns()}
        if self.row_format.labelled:
            used.add(LABEL)
        columns: dict[str, str] = {}
        for name in given:
            if name == LABEL == self.row_format.options.label_source:
                # the output has it under the same name, as the class list spells it
                continue
            shown = name
            while shown in used:
                shown = f"input_{shown}"
            columns[name] = shown
            used.add(shown)
        return columns

    @property
    def local(self) -> bool:
        """Whether other processes cannot see the images."""
        return not isinstance(self.images, ImageList) or self.images.in_memory

    def segment(self, start: int, stop: int) -> Segment:
        """Return some images, and the columns that were given for each."""
        assert not isinstance(self.images, FeatureDataset)
        if isinstance(self.images, ImageList):
            entries = self.images.entries(start, stop)
        else:
            entries = self._in_memory(start, stop)
        images = []
        columns = []
        for entry in entries:
            columns.append(self._columns_of(entry))
            # workers need the image, not what tables say about it
            images.append(entry._replace(columns={}, folder="", label=""))
        return Segment(images, columns)

    def _in_memory(self, start: int, stop: int) -> list[Entry]:
        assert not isinstance(self.images, ImageList | FeatureDataset)
        names = self._names[start:stop]
        images = self.images[start:stop]
        labels = self._stated[start:stop] or [""] * len(names)
        return [
            Entry(name, {}, image=image, label=label)
            for name, image, label in zip(names, images, labels, strict=True)
        ]

    def _columns_of(self, entry: Entry) -> Row:
        columns: Row = {
            shown: entry.columns.get(name, "") for name, shown in self.columns.items()
        }
        if self._labels is not None:
            columns[LABEL] = self._read_label(self._labels, entry.label)
        return columns

    def table_columns(self) -> dict[str, type]:
        """Return all columns of the output table, in order."""
        columns: dict[str, type] = {"path": str}
        columns |= dict.fromkeys(self.columns.values(), str)
        if self._labels is not None:
            columns[LABEL] = str
        columns |= self.row_format.columns()
        columns["error"] = str
        return columns


# --- methods over batches -------------------------------------------------------------------------


States = Mapping[str, bytes]  # the packed state of every method, by name
Health = dict[str, dict[str, int | float | str]]  # by method: how adaptation is doing
# the figure that a method's evidence has if it tells how adaptation is doing
HEALTH = "confidence"


def predict_batch(adapter: Adapter, batch: AnyBatch) -> Prediction:
    """Predict a batch, of images or of their features."""
    if isinstance(batch, Batch):
        return adapter.predict(batch)
    assert isinstance(adapter, FeatureLevel)
    return adapter.predict_features(batch.features)


@dataclass
class Predictor:
    """Methods that predict the same images side by side."""

    adapters: Mapping[str, Adapter]
    options: PredictOptions
    busy: float = 0.0  # seconds in which the methods worked
    classes_changed: bool = False  # whether `load` found a state of another class list
    last: dict[str, Prediction] = field(
        default_factory=dict
    )  # of methods with health figures

    def __post_init__(self) -> None:
        for adapter in self.adapters.values():
            adapter.enable(
                reject=self.options.reject, calibrate=self.options.calibration
            )

    @cached_property
    def row_format(self) -> RowFormat:
        """The columns of the output."""
        first = next(iter(self.adapters.values()))
        return RowFormat(tuple(self.adapters), first.prompts.names, self.options)

    @cached_property
    def plain(self) -> Adapter | None:
        """Plain CLIP, where it stands beside the methods."""
        if not self.row_format.adds_zero_shot:
            return None
        first = next(iter(self.adapters.values()))
        return create_method(
            ZERO_SHOT, first.model, first.prompts, seed=self.options.seed
        )

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
        views = tuple(
            dict.fromkeys(adapter.views for adapter in self.adapters.values())
        )
        return Reader(
            model.preprocess, views, self.options, device=model.device, model=model
        )

    def check(self, dataset: FeatureDataset) -> None:
        """Refuse features that a method cannot take, before anything is written."""
        for name, adapter in self.adapters.items():
            require_features_only(type(adapter), name, towers=True)
        for views in self.reader.views:
            self.reader.stream(dataset, views)

    def rows(self, read: ReadBatch) -> list[Row]:
        """Predict a batch, which the methods learn from, and return one row per image."""
        return self.predict_deferred(read)()

    def predict_deferred(self, read: ReadBatch) -> Callable[[], list[Row]]:
        """Let the methods learn from a batch; the result makes its rows later, in any thread."""
        begun = time.perf_counter()
        predictions = {
            name: self._predict(name, adapter, read.by_views[adapter.views])
            for name, adapter in self.adapters.items()
        }
        first_batch = next(iter(read.by_views.values()))
        zero_shot = None
        if self.plain is not None:
            zero_shot = predict_batch(self.plain, first_batch)
        keys = first_batch.keys
        # on a GPU rows wait for the predictions alone, not for the next batch
        logits = next(iter(predictions.values())).logits
        side = side_stream(logits.device) if logits.is_cuda else None
        predicted = (
            torch.cuda.current_stream(logits.device).record_event() if side else None
        )

        def make_rows() -> list[Row]:
            with nullcontext() if side is None else torch.cuda.stream(side):
                if side is not None and predicted is not None:
                    side.wait_event(predicted)
                cells = self.row_format.rows(predictions, zero_shot)
            return self._complete_rows(read, dict(zip(keys, cells, strict=True)))

        self.busy += time.perf_counter() - begun
        return make_rows

    def _complete_rows(self, read: ReadBatch, made: Mapping[str, Row]) -> list[Row]:
        """Return a row for every image of a batch: what is given, predicted, or went wrong."""
        none: Row = dict.fromkeys(self.row_format.columns())
        rows: list[Row] = []
        for key, columns in zip(read.keys, read.columns, strict=True):
            # a path need not be UTF-8
            row: Row = {"path": os.fsencode(key).decode("utf-8", "backslashreplace")}
            row |= columns
            row |= made.get(key, none)
            row["error"] = read.unreadable.get(key, "")
            rows.append(row)
        return rows

    def _predict(self, name: str, adapter: Adapter, batch: AnyBatch) -> Prediction:
        try:
            prediction = predict_batch(adapter, batch)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{name}, batch from {batch.keys[0]!r} on: {error}"
            ) from error
        if HEALTH in prediction.evidence:
            self.last[name] = prediction
        return prediction

    def states(self) -> States:
        """Pack what the methods have learned."""
        return {name: pack_state(adapter) for name, adapter in self.adapters.items()}

    def restore(self, states: States) -> None:
        """Continue from :meth:`states`."""
        for name, adapter in self.adapters.items():
            unpack_state(adapter, states[name], source=f"the state of {name}")

    def load(self, state: Path | None) -> int:
        """Continue from a state file if there is one; return how many images it has seen.

        Under another class list a method may keep what it has learned apart from the
        classes.
        """
        if state is None or not state.exists():
            return 0
        (adapter,) = self.adapters.values()
        saved = load_state(adapter, state, other_classes=True)
        self.classes_changed |= saved.classes_changed
        if saved.classes_changed:
            rest = (
                "what was learned about the images stays, "
                "what was counted per class starts again"
            )
            warnings.warn(
                f"{state} was saved with another class list: {rest}", stacklevel=2
            )
        return int(saved.notes.get("images", 0))

    def save(self, state: Path, images: int) -> None:
        """Write the state file with the number of images it has seen."""
        (adapter,) = self.adapters.values()
        adapter.save(state, notes={"images": images})
