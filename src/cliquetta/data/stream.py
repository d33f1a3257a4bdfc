"""Streams: datasets in a seeded order, in batches, with the views that a method asked for.

Labels travel beside the batches and never inside them.
"""

import copy
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.dataset import UNKNOWN, Dataset
from cliquetta.data.loader import ImageGroup, Loaded, Loader
from cliquetta.data.samplers import (
    SAMPLERS,
    Indices,
    LabelledSet,
    SamplerOptions,
    interleave,
)
from cliquetta.data.views import check_spec
from cliquetta.errors import UserError, look_up
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skipped:
    """File that could not be read, and why."""

    key: str
    reason: str


class Stream:
    """Yields ``(Batch, labels)``; labels are -1 where unknown, -2 outside the class list.

    Can start at any batch. Equal arguments give equal streams. A batch has fixed
    positions: an unreadable file leaves its position empty, so the batch is shorter.

    Args:
        dataset: One dataset, or several with one class list (``[a, b, a]``).
        preprocess: The model's preprocessing.
        batch_size: Images per batch.
        order: A key of :data:`cliquetta.data.samplers.SAMPLERS`.
        seed: Decides the order only.
        views: The views that batches carry; they depend on ``view_seed`` and the
            image's key only.
        view_seed: Seed of the views.
        gamma: Of order ``correlated``.
        present: Of order ``uneven``: classes that occur, at least and at most; of
            ``keff``: those of a batch.
        imbalance: Of order ``long-tail``: images of the first class for each of the
            last.
        length: Of order ``long``: images of the stream.
        unknown: A dataset of images outside the class list (``RelabelledDataset(...,
            "outside")``) to interleave with the others, at most as many.
        limit: Images per dataset, at most.
        workers: Processes or threads that read ahead (:mod:`cliquetta.data.loader`): 0
            reads in the caller's thread, ``None`` uses as many as the cores and
            ``device`` suggest.
        device: Where batches are put; the CPU by default.

    Raises:
        UserError: If the arguments do not describe a stream.

    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset],
        preprocess: Preprocess,
        batch_size: int = 64,
        *,
        order: str = "shuffled",
        seed: int = 0,
        views: ViewSpec | None = None,
        view_seed: int = 0,
        gamma: float = 0.1,
        present: tuple[int, int] = (3, 3),
        imbalance: float = 10.0,
        length: int = 10_000,
        unknown: Dataset | None = None,
        limit: int | None = None,
        workers: int | None = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        labelled = (dataset,) if isinstance(dataset, Dataset) else tuple(dataset)
        self.unknown = unknown
        # Images of the last are unknown if there is one.
        self.domains = labelled if unknown is None else (*labelled, unknown)
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.order = order
        self.sampler = look_up("order", order, SAMPLERS)
        self.options = SamplerOptions(
            gamma=gamma,
            present=present,
            imbalance=imbalance,
            length=length,
            limit=limit,
            batch_size=batch_size,
        )
        self.seed = seed
        self.views = views
        self.view_seed = view_seed
        self.workers = workers
        self.device = torch.device(device)
        self._check()

        # Unreadable files met since the last start, in order.
        self.skipped: list[Skipped] = []
        self._reported: set[str] = set()
        self.names = self.domains[0].names
        separator = "+" if self.sampler.interleaves else ">"
        self.id = separator.join(domain.id for domain in labelled)
        if unknown is not None:
            self.id += f" with unknown {unknown.id}"

        rng = np.random.default_rng(seed)
        sets = [LabelledSet(domain.id, _labels(domain)) for domain in self.domains]
        positions = self.sampler.draw(sets[: len(labelled)], self.options, rng)
        if unknown is not None:
            positions = interleave(positions, sets[-1], len(labelled), rng)

        # A part is a dataset in one of its rounds, in which its noise is drawn anew.
        occurrences = np.stack([positions.round, positions.domain])
        kinds, part_of = np.unique(occurrences, axis=1, return_inverse=True)
        rounds, domains = kinds
        self.parts = tuple(
            self.domains[domain].redrawn(round) for round, domain in kinds.T
        )
        self._shown = _Shown(
            parts=self.parts,
            rounds=rounds,
            several=len(self.domains) > 1,
            part_of=part_of.reshape(-1),
            index_of=positions.image,
        )

        # Labels of all parts, and where those of each part begin.
        self._first = np.cumsum([0, *map(len, self.parts)])
        self._labels = np.concatenate([sets[domain].labels for domain in domains])

    def _check(self) -> None:
        """Refuse what cannot be streamed."""
        if not self.domains:
            raise UserError("no dataset to stream")
        if self.unknown is not None and self.order == "keff":
            raise UserError(
                "order 'keff' decides the classes of a batch: leave out unknown ones"
            )
        labelled = len(self.domains) - (self.unknown is not None)
        if self.sampler.interleaves and labelled < 2:
            raise UserError(
                f"order {self.order!r} interleaves several datasets, got one"
            )
        if self.workers is not None and self.workers < 0:
            raise UserError(f"workers is 0 or more, got {self.workers}")
        lower_seed = min(self.seed, self.view_seed)
        if lower_seed < 0:
            raise UserError(f"seeds are 0 or more, got {lower_seed}")
        if self.views is not None:
            check_spec(self.views)
        self._check_datasets()

    def _check_datasets(self) -> None:
        """Refuse datasets that differ in their classes or lack labels that the order needs."""
        first = self.domains[0]
        for domain in self.domains:
            if domain.names != first.names:
                raise UserError(
                    "datasets of one stream share one class list; "
                    f"{domain.id} and {first.id} do not"
                )
        if not self.sampler.needs_labels:
            return
        for domain in self.domains:
            if domain.labels is None:
                raise UserError(
                    f"order {self.order!r} needs labels, {domain.id} has none"
                )

    def listing(self, rows: Sequence[Indices] | None = None) -> "Stream":
        """List all images of all parts, or some ``rows`` of each, in their order; keys as here."""
        if rows is None:
            rows = [np.arange(len(part)) for part in self.parts]
        counts = [len(some) for some in rows]

        listed = copy.copy(self)
        listed._shown = replace(
            self._shown,
            part_of=np.repeat(np.arange(len(rows)), counts),
            index_of=np.concatenate(rows),
        )
        listed.skipped = []
        listed._reported = set()
        return listed

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.images // self.batch_size)

    @property
    def images(self) -> int:
        """Number of images, unreadable ones included."""
        return len(self._shown.index_of)

    def settings(self) -> dict[str, Any]:
        """Return all that decides what is shown and when, as plain JSON types."""
        settings: dict[str, Any] = {
            "datasets": [
                {"id": domain.id, "images": len(domain), "files": domain.fingerprint}
                for domain in self.domains
            ],
            "batch_size": self.batch_size,
            "order": self.order,
            "seed": self.seed,
            "views": None if self.views is None else asdict(self.views),
            "view_seed": None if self.views is None else self.view_seed,
            "dirichlet": None,
            "limit": self.options.limit,
        }
        if self.unknown is not None:
            settings["unknown"] = self.unknown.id

        for name in self.sampler.reads:
            value = getattr(self.options, name)
            if name == "gamma":
                # As records have always called it.
                settings["dirichlet"] = value
            else:
                settings[name] = list(value) if isinstance(value, tuple) else value
        return settings

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches from number ``start`` on."""
        return self.read(self.ranges(start))

    def ranges(self, start: int) -> list[range]:
        """Return the positions of every batch from number ``start`` on."""
        if not 0 <= start <= len(self):
            raise UserError(
                f"the stream has {len(self)} batches, cannot start at {start}"
            )

        size = self.batch_size
        firsts = range(start * size, self.images, size)
        return [range(first, min(first + size, self.images)) for first in firsts]

    def read(self, parts: Sequence[range]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches of any positions of the stream, read ahead while the caller is busy."""
        with closing(self.load(parts)) as loading:
            for part, (batch, loaded) in zip(parts, loading, strict=True):
                readable = [part[row] for row in loaded.positions]
                yield batch, self.labels(readable)

    def load(
        self, parts: Sequence[range]
    ) -> Generator[tuple[Batch, Loaded], None, None]:
        """Yield batches of positions, and which of these could be read."""
        self.skipped = []
        loader = Loader(
            self._shown,
            self.preprocess,
            (self.views,),
            self.view_seed,
            self.workers,
            self.device,
        )
        images = sum(map(len, parts))
        with closing(loader.load(parts, images)) as loading:
            for part, loaded in zip(parts, loading, strict=True):
                keys = [self.key(position) for position in part]
                for row, reason in loaded.unreadable:
                    self._skip(keys[row], reason)
                (batch,) = loaded.batches(keys, (self.views,))
                yield batch, loaded

    def _skip(self, key: str, reason: str) -> None:
        """Note an unreadable file, with a warning the first time."""
        self.skipped.append(Skipped(key, reason))
        if key not in self._reported:
            self._reported.add(key)
            _log.warning("skipped %s: %s", key, reason)

    def origin(self, positions: range) -> tuple[Indices, Indices]:
        """Return the part, and the index of the image in it, at positions of the stream."""
        where = slice(positions.start, positions.stop)
        return self._shown.part_of[where], self._shown.index_of[where]

    def shown(self) -> list[Indices]:
        """Return the images of every part that have a position, in ascending order."""
        images = []
        for number in range(len(self.parts)):
            in_part = self._shown.part_of == number
            images.append(np.unique(self._shown.index_of[in_part]))
        return images

    def key(self, position: int) -> str:
        """Name the image at a position; several datasets: led by the id, ``#n`` if again."""
        return self._shown.key(position)

    def labels(self, positions: Sequence[int]) -> Tensor:
        """Return labels of the images at positions of the stream, -1 where unknown."""
        where = np.asarray(positions, dtype=np.int64)
        firsts = self._first[self._shown.part_of[where]]
        rows = firsts + self._shown.index_of[where]
        return torch.from_numpy(self._labels[rows])


@dataclass(frozen=True, eq=False)
class _Shown:
    """Positions of images in a stream: all that a worker has to know of it."""

    parts: Sequence[Dataset]
    rounds: Indices
    # Whether keys are led by the dataset's id.
    several: bool
    part_of: Indices
    index_of: Indices

    def __call__(self, positions: Sequence[int]) -> list[ImageGroup]:
        """Group the images at some positions by the part that they are in."""
        where = list(positions)
        part_of = self.part_of[where]
        index_of = self.index_of[where]

        # A group for each part, so that arrays are read at once.
        groups = []
        for number in np.unique(part_of):
            rows = np.flatnonzero(part_of == number).tolist()
            group = ImageGroup(
                dataset=self.parts[number],
                indices=index_of[rows].tolist(),
                keys=[self.key(where[row]) for row in rows],
                positions=rows,
            )
            groups.append(group)
        return groups

    def key(self, position: int) -> str:
        """Name the image at a position."""
        number = self.part_of[position]
        part = self.parts[number]
        round = self.rounds[number]

        key = part.keys[self.index_of[position]]
        if round:
            key = f"{key}#{round}"
        return f"{part.id}/{key}" if self.several else key


def _labels(dataset: Dataset) -> Indices:
    """Return labels as an array, -1 throughout where there are none."""
    if dataset.labels is None:
        return np.full(len(dataset), UNKNOWN, dtype=np.int64)
    return dataset.labels.numpy()
