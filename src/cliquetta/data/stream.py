"""A stream: datasets in a seeded order, in batches, with the views that a method asked for.

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
    """A file that could not be read, and why."""

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
            "outside")``) to strew among the others, at most as many.
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
        shown = (dataset,) if isinstance(dataset, Dataset) else tuple(dataset)
        self.unknown = unknown
        # images of the last are unknown if there is one
        self.domains = shown if unknown is None else (*shown, unknown)
        self.preprocess, self.batch_size = preprocess, batch_size
        self.order, self.sampler = order, look_up("order", order, SAMPLERS)
        self.options = SamplerOptions(
            gamma, present, imbalance, length, limit, batch_size
        )
        self.seed, self.views, self.view_seed = seed, views, view_seed
        self.workers, self.device = workers, torch.device(device)
        self._check()
        self.skipped: list[
            Skipped
        ] = []  # unreadable files met since the last start, in order
        self._reported: set[str] = set()
        self.names = self.domains[0].names
        joined = ("+" if self.sampler.interleaves else ">").join(
            domain.id for domain in shown
        )
        self.id = joined if unknown is None else f"{joined} with unknown {unknown.id}"
        rng = np.random.default_rng(seed)
        sets = [LabelledSet(domain.id, _labels(domain)) for domain in self.domains]
        positions = self.sampler.draw(sets[: len(shown)], self.options, rng)
        if unknown is not None:
            positions = interleave(positions, sets[-1], len(shown), rng)
        rounds = np.stack([positions.round, positions.domain])
        kinds, part_of = np.unique(rounds, axis=1, return_inverse=True)
        # the datasets as they are shown: one for every dataset and round
        self.parts = tuple(
            self.domains[domain].redrawn(round) for round, domain in kinds.T
        )
        several = len(self.domains) > 1
        self._shown = _Shown(
            self.parts, kinds[0], several, part_of.reshape(-1), positions.image
        )
        self._first = np.cumsum(
            [0, *map(len, self.parts)]
        )  # of each part, in the labels of all
        self._labels = np.concatenate([sets[domain].labels for domain in kinds[1]])

    def _check(self) -> None:
        """Refuse what cannot be streamed."""
        if not self.domains:
            raise UserError("no dataset to stream")
        if self.unknown is not None and self.order == "keff":
            raise UserError(
                "order 'keff' decides the classes of a batch: leave out unknown ones"
            )
        if (
            self.sampler.interleaves
            and len(self.domains) - (self.unknown is not None) < 2
        ):
            raise UserError(
                f"order {self.order!r} interleaves several datasets, got one"
            )
        if self.workers is not None and self.workers < 0:
            raise UserError(f"workers is 0 or more, got {self.workers}")
        if self.seed < 0 or self.view_seed < 0:
            raise UserError(
                f"seeds are 0 or more, got {min(self.seed, self.view_seed)}"
            )
        if self.views is not None:
            check_spec(self.views)
        first = self.domains[0]
        for domain in self.domains[1:]:
            if domain.names != first.names:
                reason = f"{domain.id} and {first.id} do not"
                raise UserError(
                    f"datasets of one stream share one class list; {reason}"
                )
        unlabelled = [domain.id for domain in self.domains if domain.labels is None]
        if self.sampler.needs_labels and unlabelled:
            raise UserError(
                f"order {self.order!r} needs labels, {unlabelled[0]} has none"
            )

    def listing(self, rows: Sequence[Indices] | None = None) -> "Stream":
        """All images of all parts, or some ``rows`` of each, as they are listed; keys as here."""
        rows = [np.arange(len(part)) for part in self.parts] if rows is None else rows
        part_of = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
        listed = copy.copy(self)
        listed._shown = replace(
            self._shown, part_of=part_of, index_of=np.concatenate(rows)
        )
        listed.skipped, listed._reported = [], set()
        return listed

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.images // self.batch_size)

    @property
    def images(self) -> int:
        """Number of images, unreadable ones included."""
        return len(self._shown.index_of)

    def settings(self) -> dict[str, Any]:
        """Everything that decides what is shown and when, as plain JSON types."""
        options = {name: getattr(self.options, name) for name in self.sampler.reads}
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
            "dirichlet": options.pop("gamma", None),  # as records have always called it
            "limit": self.options.limit,
            **({} if self.unknown is None else {"unknown": self.unknown.id}),
            **{
                name: list(v) if isinstance(v, tuple) else v
                for name, v in options.items()
            },
        }

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[Batch, Tensor]]:
        """Batches from number ``start`` on."""
        return self.read(self.ranges(start))

    def ranges(self, start: int) -> list[range]:
        """The positions of every batch from number ``start`` on."""
        if not 0 <= start <= len(self):
            raise UserError(
                f"the stream has {len(self)} batches, cannot start at {start}"
            )
        firsts = range(start * self.batch_size, self.images, self.batch_size)
        return [range(i, min(i + self.batch_size, self.images)) for i in firsts]

    def read(self, parts: Sequence[range]) -> Iterator[tuple[Batch, Tensor]]:
        """Batches of any positions of the stream, read ahead while the caller is busy with one."""
        with closing(self.load(parts)) as loading:
            for part, (batch, loaded) in zip(parts, loading, strict=True):
                yield batch, self.labels([part[row] for row in loaded.positions])

    def load(
        self, parts: Sequence[range]
    ) -> Generator[tuple[Batch, Loaded], None, None]:
        """Batches of positions, and which of these could be read."""
        self.skipped = []
        loader = Loader(
            self._shown,
            self.preprocess,
            (self.views,),
            self.view_seed,
            self.workers,
            self.device,
        )
        with closing(loader.load(parts, sum(map(len, parts)))) as loading:
            for part, loaded in zip(parts, loading, strict=True):
                keys = [self.key(position) for position in part]
                for row, reason in loaded.unreadable:
                    self.skipped.append(Skipped(keys[row], reason))
                    if keys[row] not in self._reported:
                        self._reported.add(keys[row])
                        _log.warning("skipped %s: %s", keys[row], reason)
                (batch,) = loaded.batches(keys, (self.views,))
                yield batch, loaded

    def origin(self, positions: range) -> tuple[Indices, Indices]:
        """Number of the part, and index of the image in it, at positions of the stream."""
        where = slice(positions.start, positions.stop)
        return self._shown.part_of[where], self._shown.index_of[where]

    def shown(self) -> list[Indices]:
        """The images of every part that have a position in the stream, in ascending order."""
        part_of, index_of = self._shown.part_of, self._shown.index_of
        return [
            np.unique(index_of[part_of == number]) for number in range(len(self.parts))
        ]

    def key(self, position: int) -> str:
        """Name of the image at a position; several datasets: led by the id, ``#n`` if again."""
        return self._shown.key(position)

    def labels(self, positions: Sequence[int]) -> Tensor:
        """Labels of the images at positions of the stream, -1 where unknown."""
        rows = np.asarray(positions, dtype=np.int64)
        firsts = self._first[self._shown.part_of[rows]]
        return torch.from_numpy(self._labels[firsts + self._shown.index_of[rows]])


@dataclass(frozen=True, eq=False)
class _Shown:
    """Positions of images in a stream: all that a worker has to know of it."""

    parts: Sequence[Dataset]
    rounds: Indices
    several: bool  # whether keys are led by the dataset's id
    part_of: Indices
    index_of: Indices

    def __call__(self, positions: Sequence[int]) -> list[ImageGroup]:
        """The images at some positions, by the part that they are in."""
        part_of, index_of = (
            self.part_of[list(positions)],
            self.index_of[list(positions)],
        )
        groups = []
        for number in np.unique(part_of):
            rows = np.flatnonzero(part_of == number).tolist()
            keys = [self.key(positions[row]) for row in rows]
            groups.append(
                ImageGroup(self.parts[number], index_of[rows].tolist(), keys, rows)
            )
        return groups

    def key(self, position: int) -> str:
        """Name of the image at a position."""
        number = self.part_of[position]
        part, round = self.parts[number], self.rounds[number]
        key = part.keys[self.index_of[position]] + (f"#{round}" if round else "")
        return f"{part.id}/{key}" if self.several else key


def _labels(dataset: Dataset) -> Indices:
    """Labels as an array, -1 throughout where there are none."""
    if dataset.labels is None:
        return np.full(len(dataset), UNKNOWN, dtype=np.int64)
    return dataset.labels.numpy()
