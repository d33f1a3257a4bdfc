"""Images on their way to the model, the same way for every command.

Workers decode, resize and crop to bytes (:mod:`.workers`). A thread of this process
gathers the bytes of a batch in pinned memory and sends them to the device on a stream
of their own, while the last batch is computed there; on the device they become
normalised pixels.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.dataset import Dataset
from cliquetta.data.images import ImageError
from cliquetta.data.nvjpeg import Jpeg, JpegDecoder, open_or_read
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

CHUNK = 16  # images that a worker reads at a time; fewer where they have views
PROCESSES_FROM = 1024  # images that are worth the start of processes, a second or two
_AHEAD = 4  # chunks that wait to be gathered beside those that threads are reading
_THREADS = 2  # readers beside a model on the CPU, which needs the cores itself

Job = TypeVar("Job")
Chunk = tuple[
    Sequence[Job], int, int
]  # jobs in a row, number of the first, jobs of their batch


class ImageGroup(NamedTuple):
    """Images of one dataset among those of a chunk."""

    dataset: Dataset
    indices: Sequence[int]
    keys: Sequence[str]
    positions: Sequence[int]  # their numbers in the chunk


@dataclass(frozen=True)
class Loaded:
    """The images of a batch that could be read, and why others could not."""

    positions: Sequence[int]  # their numbers in the batch
    images: Sequence[
        Tensor
    ]  # (B, ...), for every kind of views: pixels, or what they are made of
    unreadable: Sequence[tuple[int, str]]
    arrived: torch.cuda.Event | None = None  # when the images are on a GPU

    def batches(
        self, keys: Sequence[str], views: Sequence[ViewSpec | None]
    ) -> list[Batch]:
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
class Loader(Generic[Job]):
    """Loads images into batches."""

    find: Callable[
        [Sequence[Job]], Sequence[ImageGroup]
    ]  # the image of each job, for workers
    preprocess: Preprocess
    views: Sequence[ViewSpec | None]
    seed: int
    workers: int | None = None
    """0: in the caller's thread; `None`: those of `default_workers`"""
    device: torch.device | None = None
    """where pixels are wanted; `None` leaves bytes as they are"""
    local: bool = False
    """images are in the memory of this process, so threads have to read them"""
    decoder: JpegDecoder | None = None
    """of JPEG files, which threads only read; not for views"""

    def load(
        self, batches: Iterable[Sequence[Job]], count: int
    ) -> Generator[Loaded, None, None]:
        """The images of some batches, ``count`` in all, read ahead of the caller."""
        workers = default_workers(self.device) if self.workers is None else self.workers
        with closing(self._read_ahead(batches, count, workers)) as reading:
            # While the caller works on one batch, a thread gathers and sends the next.
            chunks = (
                reading if self.decoder is None else map(self.decoder.complete, reading)
            )
            loading = map_ahead(
                lambda _: self._gather(chunks),
                repeat(None),
                workers=min(1, workers),
                ahead=1,
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
        step = max(
            1, CHUNK // max(1 if kind is None else kind.count for kind in self.views)
        )
        chunks = (
            (batch[first : first + step], first, len(batch))
            for batch in batches
            for first in range(0, len(batch), step)
        )
        # Threads are enough beside a model on the CPU, unless a number of workers is
        # given.
        processes = self.decoder is None and (
            self.workers is not None or _is_cuda(self.device)
        )
        if workers and processes and count >= PROCESSES_FROM and not self.local:
            bytes_of = [
                1 if kind is None else kind.count * (4 if kind.kind == "augmix" else 1)
                for kind in self.views
            ]
            room = step * sum(bytes_of) * 3 * self.preprocess.size**2
            return map_in_processes(self.read, chunks, workers=workers, room=room)
        # Of views, which make batches large, threads read no more than they hold in
        # their hands.
        ahead = workers + (0 if any(self.views) else _AHEAD)
        return map_ahead(self.read, chunks, workers=workers, ahead=max(1, ahead))

    def read(self, chunk: Chunk[Job]) -> Made:
        """Decode, resize and crop, or read for the decoder; runs in a worker."""
        (jobs, first, size), by_pillow = chunk, self.decoder is None
        made: dict[int, list[Array]] = {}
        jpegs: dict[int, Jpeg] = {}
        unreadable: list[tuple[int, str]] = []
        for dataset, indices, keys, positions in self.find(jobs):
            arrays = dataset.arrays(indices)
            numbers = (first + position for position in positions)
            for row, (number, index, key) in enumerate(
                zip(numbers, indices, keys, strict=True)
            ):
                try:
                    if arrays is not None:
                        image: Image.Image | Jpeg = Image.fromarray(arrays[row])
                    else:
                        image = (
                            dataset.load(index)
                            if by_pillow
                            else open_or_read(dataset, index)
                        )
                except ImageError as error:
                    unreadable.append((number, error.reason))
                    continue
                if isinstance(image, Jpeg):
                    jpegs[number] = image
                    continue
                made[number] = [
                    np.asarray(self.preprocess.picture(image))
                    if kind is None
                    else image_views(
                        image, key, kind, self.seed, self.preprocess
                    ).numpy()
                    for kind in self.views
                ]
        readable = sorted(made)
        stacked = tuple(
            map(np.stack, zip(*(made[number] for number in readable), strict=True))
        )
        return stacked, (readable, unreadable, (first, len(jobs), size), jpegs)

    def _gather(self, reading: Iterator[Made]) -> Loaded | None:
        """The next batch, of the chunks that it was read in, on its way to the device."""
        buffers: list[Tensor] = []
        positions: list[int] = []
        unreadable: list[tuple[int, str]] = []
        for arrays, (own, missing, (first, count, size), _) in reading:
            if arrays and not buffers:
                kinds = [
                    (array.shape[1:], torch.from_numpy(array[:0]).dtype)
                    for array in arrays
                ]
                pin = _is_cuda(self.device)
                buffers = [
                    torch.empty(size, *s, dtype=kind, pin_memory=pin)
                    for s, kind in kinds
                ]
            for buffer, array in zip(buffers, arrays, strict=False):
                buffer.numpy()[len(positions) : len(positions) + len(own)] = array
            positions += own
            unreadable += missing
            if first + count == size:
                images = [buffer[: len(positions)] for buffer in buffers]
                return self._send(
                    Loaded(positions, images or self._nothing(), unreadable)
                )
        return None

    def _nothing(self) -> list[Tensor]:
        """Batches in which no file could be read."""
        size = self.preprocess.size
        return [
            torch.empty(
                0, *([] if kind is None else [kind.count]), size, size, 3
            ).byte()
            for kind in self.views
        ]

    def _send(self, loaded: Loaded) -> Loaded:
        """Pixels on the device; a GPU copies them beside the work that it has."""
        device = self.device
        if device is None:
            return loaded

        def pixels() -> list[Tensor]:
            sent = (
                images.to(device, non_blocking=_is_cuda(device))
                for images in loaded.images
            )
            return [to_pixels(images, self.preprocess) for images in sent]

        if not _is_cuda(device):
            return replace(loaded, images=pixels())
        side = side_stream(device)
        with torch.cuda.stream(side):
            images = pixels()
        return replace(loaded, images=images, arrived=side.record_event())


def _is_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
