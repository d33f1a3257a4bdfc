"""A list of images, or images in memory, as batches with the views that methods ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from PIL import Image

from cliquetta.data.batch import ImageLike, to_picture
from cliquetta.data.dataset import Dataset
from cliquetta.data.features import FeatureDataset
from cliquetta.data.listing import ListedImages, Listing
from cliquetta.data.prepared import AnyBatch, AnyStream, from_given_features
from cliquetta.data.stream import Stream
from cliquetta.evaluation.answers import Answers
from cliquetta.evaluation.table_files import Row
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import ViewSpec

_SEGMENT = 64
"""Batches that are read as one dataset."""

Segment = tuple[Dataset, Sequence[Row]]
"""Consecutive images, and the columns that were given for each."""


@dataclass(frozen=True)
class ReadBatch:
    """A batch as it was read: every image of the list, and the pixels of those that are readable.

    Methods that want the same views share a :class:`Batch`.
    """

    keys: Sequence[str]
    columns: Sequence[Row]
    by_views: Mapping[ViewSpec | None, AnyBatch]
    unreadable: Mapping[str, str]
    """Why, by key."""


@dataclass(frozen=True)
class Reader:
    """How images become batches."""

    preprocess: Preprocess
    views: tuple[ViewSpec | None, ...]
    batch_size: int
    seed: int
    workers: int = 0
    pin: bool = False
    model: CLIP | None = None
    """What given features are of; images are read without it."""

    def stream(self, dataset: Dataset, views: ViewSpec | None) -> AnyStream:
        """A dataset, of images or of features, in its order."""
        stream = Stream(
            dataset,
            self.preprocess,
            self.batch_size,
            order="sequential",
            views=views,
            view_seed=self.seed,
            workers=self.workers,
            pin=self.pin,
        )
        return stream if self.model is None else from_given_features(stream, self.model)

    def batches(self, source: ImageSource, start: int, stop: int) -> Iterator[ReadBatch]:
        """The batches of the images from ``start`` up to ``stop``."""
        step = _SEGMENT * self.batch_size
        for begin in range(start, stop, step):
            yield from self.read(source.segment(begin, min(begin + step, stop)))

    def read(self, segment: Segment) -> Iterator[ReadBatch]:
        """The batches of a segment."""
        dataset, columns = segment
        streams = {views: self.stream(dataset, views) for views in self.views}
        seen = place = 0
        with ExitStack() as stack:
            started = [stack.enter_context(closing(s.batches())) for s in streams.values()]  # type: ignore[type-var]
            for batches in zip(*started, strict=True):
                by_views = dict(zip(streams, (batch for batch, _ in batches), strict=True))
                fresh = next(iter(streams.values())).skipped[seen:]
                seen += len(fresh)
                end = place + self.batch_size
                unreadable = {entry.key: entry.reason for entry in fresh}
                yield ReadBatch(dataset.keys[place:end], columns[place:end], by_views, unreadable)
                place = end


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

    def segment(self, start: int, stop: int) -> Segment:
        """The dataset of some images, and the columns that were given for each."""
        if isinstance(self.images, FeatureDataset):
            return self.images.part(start, stop), [{}] * (stop - start)
        if not isinstance(self.images, Listing):
            pictures = _Pictures(self.images[start:stop], start)
            return pictures, [{} for _ in pictures.keys]
        entries = self.images.entries(start, stop)
        shown = self.columns.items()
        columns = [{new: e.columns.get(name, "") for name, new in shown} for e in entries]
        return ListedImages(entries), columns

    def table_columns(self) -> dict[str, type]:
        """All columns of the output table, in order."""
        given = dict.fromkeys(self.columns.values(), str)
        return {"path": str, **given, **self.answers.columns(), "error": str}


class _Pictures(Dataset):
    """Images in memory, named by their place."""

    def __init__(self, images: Sequence[ImageLike], start: int) -> None:
        keys = [str(start + place) for place in range(len(images))]
        super().__init__("images", names=(), keys=keys, labels=None)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB."""
        return to_picture(self.images[index])[1]
