"""Images on their way to the model, the same way for every command.

Workers decode, resize and crop to bytes (:mod:`.workers`). A thread of this process gathers the
bytes of a batch in pinned memory and sends them to the device on a stream of their own, while the
last batch is computed there; on the device they become normalised pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.dataset import Dataset
from cliquetta.data.images import ImageError
from cliquetta.data.views import image_views, to_pixels
from cliquetta.data.workers import (
    Array,
    Made,
    map_ahead,
    map_in_processes,
    start_server,
    usable_cores,
)
from cliquetta.model.cuda import side_stream
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

CHUNK = 16
"""Images that a worker reads at a time; fewer where they have views."""
PROCESSES_FROM = 1024
"""Images that are worth the start of worker processes, which takes a second or two."""
_AHEAD = 4
"""Chunks that wait to be gathered beside those that threads are reading."""
_THREADS = 2
"""Readers beside a model on the CPU, which needs the cores itself."""

Job = TypeVar("Job")


@dataclass(frozen=True)
class ImageGroup:
    """Images of one dataset among those of a chunk."""

    dataset: Dataset
    indices: Sequence[int]
    keys: Sequence[str]
    positions: Sequence[int]
    """Their numbers in the chunk."""


@dataclass(frozen=True)
class Loaded:
    """The images of a batch that could be read, and why others could not."""

    positions: Sequence[int]
    """Their numbers in the batch."""
    images: Sequence[Tensor]
    """(B, ...), for every kind of views: pixels, or what they are made of."""
    unreadable: Sequence[tuple[int, str]]
    arrived: torch.cuda.Event | None = None
    """When the images are on a GPU."""

    def batches(self, keys: Sequence[str], views: Sequence[ViewSpec | None]) -> list[Batch]:
        """A batch for every kind of views; ``keys`` are those of all images."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.images[0].device)
            stream.wait_event(self.arrived)
            for images in self.images:
                images.record_stream(stream)
        names = tuple(keys[position] for position in self.positions)
        return [
            Batch(images, names) if kind is None else Batch(images[:, 0], names, images)
            for kind, images in zip(views, self.images, strict=True)
        ]


def default_workers(device: torch.device | None) -> int:
    """Workers that read images for a model on a device."""
    return usable_cores() if _is_cuda(device) else _THREADS


def expect_images(device: torch.device | str, workers: int | None) -> None:
    """Begin with what takes long before images can be read for a GPU, while a model is loaded."""
    if _is_cuda(torch.device(device)) and workers != 0:
        with suppress(OSError):  # without processes threads will read
            start_server()


@dataclass(frozen=True)
class Chunk(Generic[Job]):
    """Consecutive jobs of a batch."""

    jobs: Sequence[Job]
    first: int
    """Number of the first in the batch."""
    size: int
    """Jobs of the batch."""


@dataclass(frozen=True)
class Loader(Generic[Job]):
    """Loads images into batches."""

    find: Callable[[Sequence[Job]], Sequence[ImageGroup]]
    """The images that some jobs, one for each image, stand for; is called by the workers."""
    preprocess: Preprocess
    views: Sequence[ViewSpec | None]
    seed: int
    """Seed of views."""
    workers: int | None = None
    """0: in the caller's thread; ``None``: as many as :func:`default_workers` says."""
    device: torch.device | None = None
    """Where pixels are wanted; ``None`` leaves bytes as they are."""
    local: bool = False
    """Whether images are in the memory of this process only, where threads have to read them."""

    def load(self, batches: Iterable[Sequence[Job]], count: int) -> Iterator[Loaded]:
        """The images of some batches, ``count`` in all, read ahead of the caller."""
        workers = default_workers(self.device) if self.workers is None else self.workers
        with closing(self._read_ahead(batches, count, workers)) as reading:
            # While the caller works on one batch, a thread gathers and sends the next.
            loading = map_ahead(
                lambda _: self._gather(reading), repeat(None), workers=min(1, workers), ahead=1
            )
            with closing(loading):
                for loaded in loading:
                    if loaded is None:
                        return
                    yield loaded

    def _read_ahead(
        self, batches: Iterable[Sequence[Job]], count: int, workers: int
    ) -> Generator[Made, None, None]:
        """Results of :meth:`read` for all chunks, in order."""
        step = max(1, CHUNK // max(1 if kind is None else kind.count for kind in self.views))
        chunks = (
            Chunk(batch[first : first + step], first, len(batch))
            for batch in batches
            for first in range(0, len(batch), step)
        )
        # Threads are enough beside a model on the CPU, unless a number of workers is given.
        processes = self.workers is not None or _is_cuda(self.device)
        if workers and processes and count >= PROCESSES_FROM and not self.local:
            room = step * sum(map(self._bytes, self.views))
            return map_in_processes(self.read, chunks, workers=workers, room=room)
        # Of views, which make batches large, threads read no more than they hold in their hands.
        ahead = workers + (0 if any(self.views) else _AHEAD)
        return map_ahead(self.read, chunks, workers=workers, ahead=max(1, ahead))

    def _bytes(self, kind: ViewSpec | None) -> int:
        """Bytes of one image with its views."""
        pixels = 3 * self.preprocess.size**2
        if kind is None:
            return pixels
        return kind.count * pixels * (4 if kind.kind == "augmix" else 1)

    def read(self, chunk: Chunk[Job]) -> Made:
        """Decode, resize and crop; runs in a worker."""
        found: dict[int, list[Array]] = {}
        unreadable: list[tuple[int, str]] = []
        for group in self.find(chunk.jobs):
            dataset, arrays = group.dataset, group.dataset.arrays(group.indices)
            rows = zip(group.positions, group.indices, group.keys, strict=True)
            for row, (position, index, key) in enumerate(rows):
                try:
                    image = dataset.load(index) if arrays is None else Image.fromarray(arrays[row])
                except ImageError as error:
                    unreadable.append((chunk.first + position, error.reason))
                    continue
                found[position] = [self._of_image(image, key, kind) for kind in self.views]
        made = [found[position] for position in sorted(found)]
        stacked = tuple(map(np.stack, zip(*made, strict=True))) if made else ()
        positions = [chunk.first + position for position in sorted(found)]
        return stacked, (positions, unreadable, (chunk.first, len(chunk.jobs), chunk.size))

    def _of_image(self, image: Image.Image, key: str, kind: ViewSpec | None) -> Array:
        if kind is None:
            return np.asarray(self.preprocess.picture(image))
        return image_views(image, key, kind, self.seed, self.preprocess).numpy()

    def _gather(self, reading: Iterator[Made]) -> Loaded | None:
        """The next batch, of the chunks that it was read in, on its way to the device."""
        buffers: list[Tensor] = []
        positions: list[int] = []
        unreadable: list[tuple[int, str]] = []
        for arrays, (own, missing, (first, count, size)) in reading:
            buffers = buffers or [self._buffer(size, array) for array in arrays]
            for buffer, array in zip(buffers, arrays, strict=bool(arrays)):
                buffer.numpy()[len(positions) : len(positions) + len(own)] = array
            positions += own
            unreadable += missing
            if first + count == size:
                images = [buffer[: len(positions)] for buffer in buffers]
                return self._send(Loaded(positions, images or self._nothing(), unreadable))
        return None

    def _buffer(self, size: int, array: Array) -> Tensor:
        kind = torch.from_numpy(array[:0]).dtype
        return torch.empty(size, *array.shape[1:], dtype=kind, pin_memory=_is_cuda(self.device))

    def _nothing(self) -> list[Tensor]:
        """Batches in which no file could be read."""
        size = self.preprocess.size
        return [
            torch.empty(0, *([] if kind is None else [kind.count]), size, size, 3).byte()
            for kind in self.views
        ]

    def _send(self, loaded: Loaded) -> Loaded:
        """Pixels on the device; a GPU copies them beside the work that it has."""
        device = self.device
        if device is None:
            return loaded
        if not _is_cuda(device):
            images = [to_pixels(images.to(device), self.preprocess) for images in loaded.images]
            return replace(loaded, images=images)
        side = side_stream(device)
        with torch.cuda.stream(side):
            images = [
                to_pixels(images.to(device, non_blocking=True), self.preprocess)
                for images in loaded.images
            ]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(side)
        return replace(loaded, images=images, arrived=arrived)


def _is_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
