"""Streams whose images were prepared once: pixels held on the device, or features encoded earlier.

Both read every part of a stream once, as it is listed, into a table, and gather batches
from it. Predictions are those from a plain :class:`Stream`; from features, up to
rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.dataset import Dataset
from cliquetta.data.feature_cache import (
    FeatureBlock,
    FeatureTable,
    TableLayout,
    open_table,
)
from cliquetta.data.samplers import Indices
from cliquetta.data.stream import Skipped, Stream
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP, encode_views
from cliquetta.prompts.features import FloatArray
from cliquetta.types import Batch

# Views that are read or encoded at once, and in a block of a table.
VIEWS_AT_ONCE = 256

# Task and dataset, images done, images in all.
OnPrepare = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FeatureBatch:
    """Unit features (B, V, E) of images, and their names."""

    features: Tensor
    keys: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)


class PixelTable(NamedTuple):
    """Preprocessed images of a part on the model's device, with their views if there are any."""

    # (n, 3, S, S), or (n, V, 3, S, S) with views.
    pixels: Tensor
    # (n,) which images of the part, in ascending order.
    rows: Indices
    unreadable: dict[int, str]

    def take(self, rows: Indices) -> Tensor:
        """Return the pixels of some images of the part."""
        positions = torch.from_numpy(np.searchsorted(self.rows, rows))
        return self.pixels[positions.to(self.pixels.device)]


B = TypeVar("B", Batch, FeatureBatch)


class PreparedStream(ABC, Generic[B]):
    """``stream``, image for image, from tables."""

    def __init__(
        self, stream: Stream, model: CLIP, on_prepare: OnPrepare | None = None
    ) -> None:
        self.stream = stream
        self.model = model
        self.names = stream.names
        self.id = stream.id
        self.views = stream.views
        self.preprocess = stream.preprocess
        self.settings = stream.settings  # where images come from changes no prediction
        self.count = _views_per_image(stream)
        self.on_prepare = on_prepare
        # Unreadable files met since the last start, in order.
        self.skipped: list[Skipped] = []

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.stream)

    def batches(self, start: int = 0) -> Iterator[tuple[B, Tensor]]:
        """Yield batches from number ``start`` on."""
        ranges = self.stream.ranges(start)
        self.skipped = []
        tables = [self._table(number) for number in range(len(self.stream.parts))]
        for positions in ranges:
            yield self._read_batch(positions, tables)

    def _read_batch(
        self, positions: range, tables: Sequence[FeatureTable | PixelTable]
    ) -> tuple[B, Tensor]:
        """Gather a batch; an unreadable image leaves its position empty."""
        # Where each image lies: its part, and its row there.
        parts, rows = self.stream.origin(positions)
        readable = []
        for offset, position in enumerate(positions):
            part = int(parts[offset])
            reason = tables[part].unreadable.get(int(rows[offset]))
            if reason is None:
                readable.append(offset)
            else:
                self.skipped.append(Skipped(self.stream.key(position), reason))

        # An empty list would index by float64.
        offsets = np.array(readable, dtype=np.int64)
        values = _gather(tables, parts[offsets], rows[offsets])
        places = [positions[offset] for offset in readable]
        keys = tuple(self.stream.key(position) for position in places)
        return self._batch(values, keys), self.stream.labels(places)

    @abstractmethod
    def _table(self, number: int) -> FeatureTable | PixelTable:
        """Return the table of one part of the stream."""

    @abstractmethod
    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> B:
        """Make the batch of some rows of the tables."""

    def _report(self, what: str, done: int, total: int) -> None:
        """Tell the caller how many images are prepared."""
        if self.on_prepare is not None:
            self.on_prepare(what, done, total)

    def _shape(self, part: Dataset) -> dict[str, Any]:
        """Name everything that the pixels and views of a part depend on."""
        stream = self.stream
        shared = stream.views is not None and len(stream.domains) > 1
        return {
            "preprocessing": stream.preprocess.fingerprint,
            "images": [part.fingerprint, part.contents()],
            "views": None if stream.views is None else asdict(stream.views),
            "view_seed": None if stream.views is None else stream.view_seed,
            # Views are drawn from keys, which carry the id when there are several
            # datasets.
            "keys": part.id if shared else None,
        }

    def _read(
        self,
        number: int,
        blocks: Sequence[range],
        rows: Sequence[Indices] | None = None,
    ) -> Iterator[tuple[Batch, Indices, dict[int, str]]]:
        """Read blocks of a part as it is listed, or of some ``rows`` of every part.

        Yields what was read, at which rows of the block, and why others were not, by row
        of the part.
        """
        listed = self.stream.parts if rows is None else rows
        before = sum(len(part) for part in listed[:number])

        # Where the blocks lie among the images of all parts.
        positions = [
            range(before + block.start, before + block.stop) for block in blocks
        ]

        loading = self.stream.listing(rows).load(positions)
        for block, (batch, loaded) in zip(blocks, loading, strict=True):
            unreadable = {
                block.start + row: reason for row, reason in loaded.unreadable
            }
            yield batch, np.array(loaded.positions, dtype=np.int64), unreadable


def _gather(
    tables: Sequence[FeatureTable | PixelTable], parts: Indices, rows: Indices
) -> Tensor:
    """Gather rows of the tables that ``parts`` numbers."""
    # Without an image, the first table says what shape nothing has.
    numbers = np.unique(parts).tolist() or [0]
    pieces = []
    for number in numbers:
        values = tables[number].take(rows[parts == number])
        pieces.append(torch.as_tensor(values))

    # One table gives the rows in their order; several are interleaved.
    first = pieces[0]
    if len(pieces) == 1:
        return first

    gathered = first.new_empty((len(parts), *first.shape[1:]))
    for number, piece in zip(numbers, pieces, strict=True):
        places = torch.from_numpy(parts == number)
        gathered[places.to(first.device)] = piece
    return gathered


AnyStream = Stream | PreparedStream[Any]
AnyBatch = Batch | FeatureBatch


class FeatureStream(PreparedStream[FeatureBatch]):
    """Features instead of pixels; they are encoded when first asked for.

    Tables (:mod:`cliquetta.data.feature_cache`) are tied to the model's weights, the
    preprocessing, the views and their seed, and the images; whichever of them changes,
    another table is made.
    """

    def __init__(
        self,
        stream: Stream,
        model: CLIP,
        root: Path | None = None,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        super().__init__(stream, model, on_prepare)
        self.root = root
        self._tables: dict[int, FeatureTable] = {}

        # Datasets of features need no table on disk.
        for number, part in enumerate(stream.parts):
            features = part.features(range(len(part)))
            if features is not None:
                self._tables[number] = self._check_features(part, features)

    def _check_features(self, part: Dataset, features: FloatArray) -> FeatureTable:
        """Make a table of a dataset of features, if the model and the method can take it."""
        _, views, width = features.shape
        if width != self.model.embed_dim:
            raise UserError(
                f"{part.id} holds features of width {width}, "
                f"{self.model.id} works with {self.model.embed_dim}: "
                "give text features of the model that made them, or that model"
            )

        count = self.count
        if views < count:
            raise UserError(
                f"{part.id} holds {views} {'view' if views == 1 else 'views'} of each "
                f"image, the method wants {count}: "
                f"give features (N, {count}, {width}), or set views=1"
            )
        return FeatureTable(features[:, :count], {})

    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> FeatureBatch:
        """Make a batch of features."""
        return FeatureBatch(values, keys)

    def _table(self, number: int) -> FeatureTable:
        """Return the table of a part, encoded if there is none."""
        part = self.stream.parts[number]
        if number in self._tables:
            return self._tables[number]
        assert self.root is not None, "features that are encoded need a folder"

        # The table depends on the weights and on all that decides the pixels.
        model = {"model": self.model.fingerprint, "dtype": str(self.model.dtype)}
        layout = TableLayout(
            model | self._shape(part),
            shape=(len(part), self.count, self.model.embed_dim),
            rows=max(1, VIEWS_AT_ONCE // self.count),
        )
        table = open_table(
            self.root,
            layout,
            lambda blocks: self._encode(number, blocks),
            title=part.id,
            on_progress=lambda done, all: self._report(f"encode {part.id}", done, all),
        )
        self._tables[number] = table
        return table

    def _encode(self, number: int, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        """Encode blocks of one part."""
        width = self.model.embed_dim
        batches = self._read(number, blocks)
        for block, (batch, rows, unreadable) in zip(blocks, batches, strict=True):
            # The plain image is a view, too: (B, V, 3, S, S).
            views = batch.images[:, None] if batch.views is None else batch.views
            features = np.zeros((len(block), views.shape[1], width), np.float32)

            # Rows of unreadable images stay zero.
            if len(batch):
                views = views.to(self.model.device, non_blocking=True)
                encoded = encode_views(self.model, views, chunk=VIEWS_AT_ONCE)
                features[rows] = encoded.float().cpu().numpy()
            yield FeatureBlock(features, unreadable)


def from_given_features(stream: AnyStream, model: CLIP) -> AnyStream:
    """Return the stream, of features if that is what its datasets hold."""
    if not isinstance(stream, Stream):
        return stream
    holds = [part.features([0]) is not None for part in stream.parts]
    if all(holds):
        return FeatureStream(stream, model)
    if any(holds):
        raise UserError(
            f"{stream.id}: datasets of images and of features cannot be mixed"
        )
    return stream


def held_rows(stream: Stream) -> list[Indices]:
    """Return the images of every part that are held.

    All are, unless a stream shows less than half of them.
    """
    images = []
    for part, rows in zip(stream.parts, stream.shown(), strict=True):
        few = 2 * len(rows) < len(part)
        images.append(rows if few else np.arange(len(part), dtype=np.int64))
    return images


def _views_per_image(stream: Stream) -> int:
    """Count the views of an image, 1 where there is only the plain one."""
    return 1 if stream.views is None else stream.views.count


def _bytes_per_image(stream: Stream, model: CLIP) -> int:
    """Count the bytes of an image and its views in the model's dtype."""
    values = _views_per_image(stream) * 3 * stream.preprocess.size**2
    return values * model.dtype.itemsize


@dataclass
class PixelStore:
    """Tables that the runs of a grid share; the oldest are dropped where room is needed."""

    # Bytes.
    room: int
    _tables: dict[str, PixelTable] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def bytes_of(stream: Stream, model: CLIP) -> int:
        """Count the bytes of a stream: all of its parts at once, in the model's dtype."""
        return sum(map(len, held_rows(stream))) * _bytes_per_image(stream, model)

    def fits(self, stream: Stream, model: CLIP) -> bool:
        """Whether a stream can be held."""
        return self.bytes_of(stream, model) <= self.room

    def get(self, key: str, size: int, make: Callable[[], PixelTable]) -> PixelTable:
        """Return the table of a key, made if there is none; that used last is dropped last."""
        table = self._tables.pop(key, None)
        if table is None:
            self._make_room(size)
            table = make()

        # Behind all others: what is used last is dropped last.
        self._tables[key] = table
        return table

    def _make_room(self, size: int) -> None:
        """Drop tables, that used first foremost, until ``size`` more bytes fit."""
        used = sum(table.pixels.nbytes for table in self._tables.values())
        while self._tables and used + size > self.room:
            oldest = self._tables.pop(next(iter(self._tables)))
            used -= oldest.pixels.nbytes


class HeldStream(PreparedStream[Batch]):
    """Pixels (and views) that are read, corrupted and preprocessed once for all runs of a grid."""

    def __init__(
        self,
        stream: Stream,
        model: CLIP,
        store: PixelStore,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        super().__init__(stream, model, on_prepare)
        self.store = store
        self._rows = held_rows(stream)

    def _table(self, number: int) -> PixelTable:
        """Return the table of a part, read if no run has it."""
        # Some of the images only, where a stream needs few.
        rows = self._rows[number]
        model = self.model
        shape = self._shape(self.stream.parts[number])

        # All that decides the pixels, so that runs share tables.
        key = f"{shape} {model.dtype} {model.device} {hash(rows.tobytes())}"
        size = len(rows) * _bytes_per_image(self.stream, model)
        return self.store.get(key, size, lambda: self._hold(number))

    def _hold(self, number: int) -> PixelTable:
        """Read and preprocess a part."""
        # The table of this part, zero where an image cannot be read.
        rows = self._rows[number]
        count = len(rows)
        size = self.preprocess.size
        views = () if self.views is None else (self.count,)
        pixels = torch.zeros(
            (count, *views, 3, size, size),
            dtype=self.model.dtype,
            device=self.model.device,
        )

        step = max(1, VIEWS_AT_ONCE // self.count)
        blocks = [
            range(first, min(first + step, count)) for first in range(0, count, step)
        ]

        unreadable: dict[int, str] = {}
        batches = self._read(number, blocks, self._rows)
        for block, (batch, positions, missing) in zip(blocks, batches, strict=True):
            # Reasons are noted by row of the part, not of what is held.
            for position, reason in missing.items():
                unreadable[int(rows[position])] = reason
            if len(batch):
                images = batch.images if batch.views is None else batch.views
                held = torch.from_numpy(positions + block.start).to(pixels.device)
                pixels[held] = images.to(pixels.device, pixels.dtype)
            self._report(f"read {self.stream.parts[number].id}", block.stop, count)
        return PixelTable(pixels, rows, unreadable)

    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> Batch:
        """Make a batch of pixels."""
        if self.views is None:
            return Batch(values, keys)
        return Batch(values[:, 0], keys, values)
