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

VIEWS_AT_ONCE = 256  # views that are read or encoded at once, and in a block of a table

OnPrepare = Callable[
    [str, int, int], None
]  # task and dataset, images done, images in all


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

    pixels: Tensor  # (n, 3, S, S), or (n, V, 3, S, S) with views
    rows: Indices  # (n,) which images of the part, in ascending order
    unreadable: dict[int, str]

    def take(self, rows: Indices) -> Tensor:
        """The pixels of some images of the part."""
        positions = torch.from_numpy(np.searchsorted(self.rows, rows))
        return self.pixels[positions.to(self.pixels.device)]


B = TypeVar("B", Batch, FeatureBatch)


class PreparedStream(ABC, Generic[B]):
    """``stream``, image for image, from tables."""

    def __init__(
        self, stream: Stream, model: CLIP, on_prepare: OnPrepare | None = None
    ) -> None:
        self.stream, self.model = stream, model
        self.names, self.id, self.views = stream.names, stream.id, stream.views
        self.preprocess = stream.preprocess
        self.settings = stream.settings  # where images come from changes no prediction
        self.count = _views_per_image(stream)
        self.on_prepare = on_prepare
        self.skipped: list[
            Skipped
        ] = []  # unreadable files met since the last start, in order

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.stream)

    def batches(self, start: int = 0) -> Iterator[tuple[B, Tensor]]:
        """Batches from number ``start`` on."""
        stream, ranges = self.stream, self.stream.ranges(start)
        self.skipped = []
        tables = [self._table(number) for number in range(len(stream.parts))]
        for positions in ranges:
            parts, rows = stream.origin(positions)
            pairs = zip(parts.tolist(), rows.tolist(), strict=True)
            reasons = [tables[part].unreadable.get(row) for part, row in pairs]
            # an unreadable image leaves its position empty
            readable = [
                p
                for p, reason in zip(positions, reasons, strict=True)
                if reason is None
            ]
            for position, reason in zip(positions, reasons, strict=True):
                if reason is not None:
                    self.skipped.append(Skipped(stream.key(position), reason))
            read = np.array([reason is None for reason in reasons])
            values = _gather(tables, parts[read], rows[read])
            keys = tuple(stream.key(position) for position in readable)
            yield self._batch(values, keys), stream.labels(readable)

    @abstractmethod
    def _table(self, number: int) -> FeatureTable | PixelTable:
        """The table of one part of the stream."""

    @abstractmethod
    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> B:
        """The batch of some rows of the tables."""

    def _report(self, what: str, done: int, total: int) -> None:
        if self.on_prepare is not None:
            self.on_prepare(what, done, total)

    def _shape(self, part: Dataset) -> dict[str, Any]:
        """Everything that the pixels and views of a part depend on."""
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
        """Rows of a part as it is listed: what was read, at which rows of the block; the rest."""
        before = sum(map(len, (self.stream.parts if rows is None else rows)[:number]))
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
    """Rows of the tables that ``parts`` numbers."""
    numbers = np.unique(parts).tolist() or [0]
    pieces = [
        torch.as_tensor(tables[number].take(rows[parts == number]))
        for number in numbers
    ]
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    values = first.new_empty((len(parts), *first.shape[1:]))
    for number, piece in zip(numbers, pieces, strict=True):
        values[torch.from_numpy(parts == number).to(first.device)] = piece
    return values


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
        for number, part in enumerate(stream.parts):
            given = part.features(range(len(part)))
            if given is not None:
                self._tables[number] = self._given(part, given)

    def _given(self, part: Dataset, features: FloatArray) -> FeatureTable:
        """A dataset of features is its own table, if the model and the method can take it."""
        (_, views, width), count = features.shape, self.count
        if width != self.model.embed_dim:
            wanted = f"{self.model.id} works with {self.model.embed_dim}"
            remedy = "give text features of the model that made them, or that model"
            raise UserError(
                f"{part.id} holds features of width {width}, {wanted}: {remedy}"
            )
        if views < count:
            given = f"{views} {'view' if views == 1 else 'views'} of each image"
            remedy = f"give features (N, {count}, {width}), or set views=1"
            raise UserError(
                f"{part.id} holds {given}, the method wants {count}: {remedy}"
            )
        return FeatureTable(features[:, :count], {})

    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> FeatureBatch:
        return FeatureBatch(values, keys)

    def _table(self, number: int) -> FeatureTable:
        part = self.stream.parts[number]
        if number not in self._tables:
            assert self.root is not None, "features that are encoded need a folder"
            model = {"model": self.model.fingerprint, "dtype": str(self.model.dtype)}
            shape = (len(part), self.count, self.model.embed_dim)
            self._tables[number] = open_table(
                self.root,
                TableLayout(
                    model | self._shape(part),
                    shape,
                    max(1, VIEWS_AT_ONCE // self.count),
                ),
                lambda blocks: self._encode(number, blocks),
                title=part.id,
                on_progress=lambda done, all: self._report(
                    f"encode {part.id}", done, all
                ),
            )
        return self._tables[number]

    def _encode(self, number: int, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        """Features of rows of one part."""
        read = self._read(number, blocks)
        for block, (batch, rows, unreadable) in zip(blocks, read, strict=True):
            views = batch.images[:, None] if batch.views is None else batch.views
            features = np.zeros(
                (len(block), views.shape[1], self.model.embed_dim), np.float32
            )
            if len(batch):
                views = views.to(self.model.device, non_blocking=True)
                encoded = encode_views(self.model, views, chunk=VIEWS_AT_ONCE)
                features[rows] = encoded.float().cpu().numpy()
            yield FeatureBlock(features, unreadable)


def from_given_features(stream: AnyStream, model: CLIP) -> AnyStream:
    """The stream, of features if that is what its datasets hold."""
    if not isinstance(stream, Stream):
        return stream
    holds = [part.features([0]) is not None for part in stream.parts]
    if any(holds) and not all(holds):
        raise UserError(
            f"{stream.id}: datasets of images and of features cannot be mixed"
        )
    return FeatureStream(stream, model) if all(holds) else stream


def held_rows(stream: Stream) -> list[Indices]:
    """The images of every part that are held: all, unless a stream shows less than half of them."""
    return [
        rows if 2 * len(rows) < len(part) else np.arange(len(part), dtype=np.int64)
        for part, rows in zip(stream.parts, stream.shown(), strict=True)
    ]


def _views_per_image(stream: Stream) -> int:
    return 1 if stream.views is None else stream.views.count


def _bytes_per_image(stream: Stream, model: CLIP) -> int:
    return (
        _views_per_image(stream) * 3 * stream.preprocess.size**2 * model.dtype.itemsize
    )


@dataclass
class PixelStore:
    """Tables that the runs of a grid share; the oldest are let go of where room is needed."""

    room: int  # bytes
    _tables: dict[str, PixelTable] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def bytes_of(stream: Stream, model: CLIP) -> int:
        """Bytes of a stream: all of its parts at once, in the model's dtype."""
        return sum(map(len, held_rows(stream))) * _bytes_per_image(stream, model)

    def fits(self, stream: Stream, model: CLIP) -> bool:
        """Whether a stream can be held."""
        return self.bytes_of(stream, model) <= self.room

    def get(self, key: str, size: int, make: Callable[[], PixelTable]) -> PixelTable:
        """The table of a key, made if there is none; used last, it is let go of last."""
        table = self._tables.pop(key, None)
        if table is None:
            used = sum(table.pixels.nbytes for table in self._tables.values())
            while self._tables and used + size > self.room:
                used -= self._tables.pop(next(iter(self._tables))).pixels.nbytes
            table = make()
        self._tables[key] = table
        return table


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
        rows = self._rows[number]
        shape = self._shape(self.stream.parts[number])
        key = f"{shape} {self.model.dtype} {self.model.device} {hash(rows.tobytes())}"
        size = len(rows) * _bytes_per_image(self.stream, self.model)
        return self.store.get(key, size, lambda: self._hold(number))

    def _hold(self, number: int) -> PixelTable:
        size, rows = self.preprocess.size, self._rows[number]
        shape = (
            len(rows),
            *([] if self.views is None else [self.count]),
            3,
            size,
            size,
        )
        pixels = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        step, unreadable = max(1, VIEWS_AT_ONCE // self.count), dict[int, str]()
        blocks = [range(i, min(i + step, len(rows))) for i in range(0, len(rows), step)]
        read = self._read(number, blocks, self._rows)
        for block, (batch, own, missing) in zip(blocks, read, strict=True):
            unreadable |= {
                int(rows[position]): reason for position, reason in missing.items()
            }
            if len(batch):
                made = batch.images if batch.views is None else batch.views
                positions = torch.from_numpy(own + block.start).to(pixels.device)
                pixels[positions] = made.to(pixels.device, pixels.dtype)
            self._report(f"read {self.stream.parts[number].id}", block.stop, len(rows))
        return PixelTable(pixels, rows, unreadable)

    def _batch(self, values: Tensor, keys: tuple[str, ...]) -> Batch:
        return (
            Batch(values, keys)
            if self.views is None
            else Batch(values[:, 0], keys, values)
        )
