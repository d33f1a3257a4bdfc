"""A stream: data sets in a seeded order, in batches, with the views that a method asked for.

Labels travel beside the batches and never inside them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.dataset import UNKNOWN, Dataset, UInt8Array
from cliquetta.data.images import ImageError
from cliquetta.data.loader import map_ahead
from cliquetta.data.samplers import Indices, correlated, interleaved
from cliquetta.data.views import array_views, check_spec, image_views, preprocess_arrays
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

Order = Literal["shuffled", "given", "correlated", "mixed"]
ORDERS = {
    "shuffled": "at random; several data sets follow one another",
    "given": "as listed by the data set",
    "correlated": "classes in bursts (Dirichlet); several data sets follow one another",
    "mixed": "images of several data sets interleaved at random",
}

# The unit of work of a loader thread. Fixed, so that results do not depend on their number.
_CHUNK = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skipped:
    """A file that could not be read, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class _Chunk:
    """What a loader thread hands over: pixels (and views) by place, and what it could not read."""

    pixels: dict[int, Tensor]
    views: dict[int, Tensor]
    skipped: list[Skipped]


_Assembled = tuple[Batch, Tensor, Sequence[Skipped]]


class Stream:
    """Yields ``(Batch, labels)``; labels are -1 where unknown. Can start at any batch.

    ``dataset`` may be a sequence of data sets with one class list (``[a, b, a]``): they follow one
    another, or are interleaved if ``order`` is ``mixed``. Equal arguments give equal streams;
    ``seed`` decides the order only, views depend on ``view_seed`` and the image's key only.
    A batch has fixed places: an unreadable file leaves its place empty, so the batch is shorter.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset],
        preprocess: Preprocess,
        batch_size: int = 64,
        *,
        order: Order = "shuffled",
        seed: int = 0,
        views: ViewSpec | None = None,
        view_seed: int = 0,
        dirichlet: float = 0.1,
        limit: int | None = None,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        self.domains = (dataset,) if isinstance(dataset, Dataset) else tuple(dataset)
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.order = order
        self.seed = seed
        self.views = views
        self.view_seed = view_seed
        self.dirichlet = dirichlet
        self.limit = limit
        self.workers = workers
        self.pin = pin
        self._check()
        self.skipped: list[Skipped] = []
        """Unreadable files met since the last start, in order."""
        self._reported: set[str] = set()
        self._domain_of, self._index_of = self._arrange()

    def _check(self) -> None:
        """Refuse what cannot be streamed."""
        if not self.domains:
            raise UserError("no data set to stream")
        if self.order not in ORDERS:
            raise UnknownNameError("order", self.order, ORDERS)
        if self.order == "mixed" and len(self.domains) < 2:
            raise UserError("order 'mixed' interleaves several data sets, got one")
        for name, value in (("batch_size", self.batch_size), ("limit", self.limit)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.seed < 0 or self.view_seed < 0:
            raise UserError(f"seeds are 0 or more, got {min(self.seed, self.view_seed)}")
        if not self.dirichlet > 0:
            raise UserError(f"dirichlet must be above 0, got {self.dirichlet}")
        if self.pin and not torch.cuda.is_available():
            raise UserError("pinned memory needs CUDA; set pin=False")
        if self.views is not None:
            check_spec(self.views)
        first = self.domains[0]
        for domain in self.domains[1:]:
            if domain.names != first.names:
                raise UserError(
                    f"data sets of one stream share one class list; {domain.id} and {first.id} "
                    "do not"
                )
        unlabelled = [domain.id for domain in self.domains if domain.labels is None]
        if self.order == "correlated" and unlabelled:
            raise UserError(f"order 'correlated' needs labels, {unlabelled[0]} has none")

    def _arrange(self) -> tuple[Indices, Indices]:
        """Domain and image index of every place of the stream."""
        generator = np.random.default_rng(self.seed)
        orders = [self._order_of(domain, generator)[: self.limit] for domain in self.domains]
        turns = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
        indices = np.concatenate(orders)
        if self.order == "mixed":
            turns = interleaved([len(order) for order in orders], generator)
            queues = [iter(order) for order in orders]
            indices = np.array([next(queues[turn]) for turn in turns], dtype=np.int64)
        return turns, indices

    def _order_of(self, domain: Dataset, generator: np.random.Generator) -> Indices:
        if self.order == "given":
            return np.arange(len(domain), dtype=np.int64)
        if self.order == "correlated" and domain.labels is not None:
            return correlated(domain.labels.numpy(), self.dirichlet, generator)
        return generator.permutation(len(domain))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.images // self.batch_size)

    @property
    def images(self) -> int:
        """Number of images, unreadable ones included."""
        return len(self._index_of)

    @property
    def names(self) -> tuple[str, ...]:
        """The class list that labels index."""
        return self.domains[0].names

    @property
    def id(self) -> str:
        """Ids of the data sets in their order, ``a>b>a``; ``a+b`` when interleaved."""
        return ("+" if self.order == "mixed" else ">").join(domain.id for domain in self.domains)

    def settings(self) -> dict[str, Any]:
        """Everything that decides what is shown and when, as plain JSON types."""
        return {
            "datasets": [
                {"id": domain.id, "images": len(domain), "files": domain.fingerprint}
                for domain in self.domains
            ],
            "batch_size": self.batch_size,
            "order": self.order,
            "seed": self.seed,
            "views": None if self.views is None else asdict(self.views),
            "view_seed": self.view_seed if self.views is not None else None,
            "dirichlet": self.dirichlet if self.order == "correlated" else None,
            "limit": self.limit,
        }

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[Batch, Tensor]]:
        """Batches from number ``start`` on."""
        if not 0 <= start <= len(self):
            raise UserError(f"the stream has {len(self)} batches, cannot start at {start}")
        ends = range(start * self.batch_size, self.images, self.batch_size)
        return self.read([range(i, min(i + self.batch_size, self.images)) for i in ends])

    def read(self, parts: Sequence[range]) -> Iterator[tuple[Batch, Tensor]]:
        """Batches of any places of the stream, read ahead while the caller is busy with one."""
        self.skipped = []
        chunks = [part[i : i + _CHUNK] for part in parts for i in range(0, len(part), _CHUNK)]
        # While the caller works on one batch, one is put together and one is being read; of views,
        # which make batches large, no more than the threads hold in their hands.
        most = max((-(-len(part) // _CHUNK) for part in parts), default=0)
        ahead = max(1, self.workers + (0 if self.views is not None else most))
        reading = map_ahead(self._read, chunks, workers=self.workers, ahead=ahead)
        with closing(reading) as loaded:  # a caller that stops early stops the threads too

            def put_together(part: range) -> _Assembled:
                return self._assemble([next(loaded) for _ in range(0, len(part), _CHUNK)])

            one = min(1, self.workers)
            with closing(map_ahead(put_together, parts, workers=one, ahead=1)) as batches:
                for batch, labels, skipped in batches:
                    self._report(skipped)
                    yield batch, labels

    def origin(self, places: range) -> tuple[Indices, Indices]:
        """Number of the data set, and index of the image in it, at places of the stream."""
        part = slice(places.start, places.stop)
        return self._domain_of[part], self._index_of[part]

    def key(self, place: int) -> str:
        """Name of the image at a place of the stream; with several data sets their id leads it."""
        domain = self.domains[self._domain_of[place]]
        key = domain.keys[self._index_of[place]]
        return key if len(self.domains) == 1 else f"{domain.id}/{key}"

    def label(self, place: int) -> int:
        """Label of the image at a place of the stream, or -1."""
        labels = self.domains[self._domain_of[place]].labels
        return UNKNOWN if labels is None else int(labels[self._index_of[place]])

    def _read(self, places: range) -> _Chunk:
        """Decode, preprocess and augment the images at ``places``; runs in a loader thread."""
        chunk = _Chunk({}, {}, [])
        turns = self._domain_of[places.start : places.stop]
        for turn in np.unique(turns):
            rows = [place for place in places if self._domain_of[place] == turn]
            arrays = self.domains[turn].arrays(self._index_of[rows].tolist())
            if arrays is None:
                self._read_files(self.domains[turn], rows, chunk)
            else:
                self._read_arrays(arrays, rows, chunk)
        return chunk

    def _read_files(self, domain: Dataset, rows: Sequence[int], chunk: _Chunk) -> None:
        for place in rows:
            key = self.key(place)
            try:
                image = domain.load(int(self._index_of[place]))
            except ImageError as error:
                chunk.skipped.append(Skipped(key, error.reason))
                continue
            if self.views is None:
                chunk.pixels[place] = self.preprocess(image)
            else:
                views = image_views(image, key, self.views, self.view_seed, self.preprocess)
                chunk.pixels[place], chunk.views[place] = views[0], views

    def _read_arrays(self, arrays: UInt8Array, rows: Sequence[int], chunk: _Chunk) -> None:
        if self.views is None:
            chunk.pixels.update(zip(rows, preprocess_arrays(arrays, self.preprocess), strict=True))
            return
        keys = [self.key(place) for place in rows]
        views = array_views(arrays, keys, self.views, self.view_seed, self.preprocess)
        chunk.pixels.update(zip(rows, views[:, 0], strict=True))
        chunk.views.update(zip(rows, views, strict=True))

    def _report(self, skipped: Sequence[Skipped]) -> None:
        """Count unreadable files, and tell of each once."""
        for entry in skipped:
            self.skipped.append(entry)
            if entry.key not in self._reported:
                self._reported.add(entry.key)
                _log.warning("skipped %s: %s", entry.key, entry.reason)

    def _assemble(self, chunks: Sequence[_Chunk]) -> _Assembled:
        """One batch of the chunks that it was read in."""
        pixels = {place: image for chunk in chunks for place, image in chunk.pixels.items()}
        places = sorted(pixels)
        size = self.preprocess.size
        images = torch.stack([pixels[p] for p in places]) if places else _nothing(3, size, size)
        views = None
        if self.views is not None:
            made = {place: view for chunk in chunks for place, view in chunk.views.items()}
            shape = (self.views.count, 3, size, size)
            views = torch.stack([made[p] for p in places]) if places else _nothing(*shape)
        if self.pin:
            images, views = images.pin_memory(), None if views is None else views.pin_memory()
        labels = torch.tensor([self.label(place) for place in places], dtype=torch.int64)
        skipped = [entry for chunk in chunks for entry in chunk.skipped]
        return Batch(images, tuple(self.key(place) for place in places), views), labels, skipped


def _nothing(*shape: int) -> Tensor:
    """A batch in which no file could be read."""
    return torch.empty(0, *shape)
