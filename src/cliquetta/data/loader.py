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
from cliquetta.data.nvjpeg import ChunkNote, Jpeg, JpegDecoder, open_or_read
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

# Images that a worker reads at a time; fewer where they have views.
CHUNK = 16
# Images that are worth the start of processes, a second or two.
PROCESSES_FROM = 1024
# Chunks that wait to be gathered beside those that threads are reading.
_AHEAD = 4
# Readers beside a model on the CPU, which needs the cores itself.
_THREADS = 2

Job = TypeVar("Job")


@dataclass(frozen=True)
class Chunk(Generic[Job]):
    """Jobs of a batch that a worker reads at a time."""

    jobs: Sequence[Job]
    # Number of the first in the batch.
    first: int
    batch_size: int


class ImageGroup(NamedTuple):
    """Images of one dataset among those of a chunk."""

    dataset: Dataset
    indices: Sequence[int]
    keys: Sequence[str]
    # Their numbers in the chunk.
    positions: Sequence[int]


@dataclass(frozen=True)
class Loaded:
    """Images of a batch that could be read, and why others could not."""

    # Their numbers in the batch.
    positions: Sequence[int]
    # (B, ...), for every kind of views: pixels, or what they are made of.
    images: Sequence[Tensor]
    unreadable: Sequence[tuple[int, str]]
    # When the images are on a GPU.
    arrived: torch.cuda.Event | None = None

    def batches(
        self, keys: Sequence[str], views: Sequence[ViewSpec | None]
    ) -> list[Batch]:
        """Make a batch for every kind of views; ``keys`` are those of all images."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.images[0].device)
            stream.wait_event(self.arrived)
            for images in self.images:
                images.record_stream(stream)

        names = tuple(keys[position] for position in self.positions)
        batches = []
        for kind, images in zip(views, self.images, strict=True):
            if kind is None:
                batches.append(Batch(images, names))
            else:
                batches.append(Batch(images[:, 0], names, images))
        return batches


def default_workers(device: torch.device | None) -> int:
    """Return how many workers read images for a model on a device."""
    return usable_cores() if _is_cuda(device) else _THREADS


def expect_images(device: torch.device | str, workers: int | None) -> None:
    """Begin with what takes long before images can be read for a GPU, while a model is loaded."""
    if _is_cuda(torch.device(device)) and workers != 0:
        with suppress(OSError):  # without processes threads will read
            start_server()


@dataclass(frozen=True)
class Loader(Generic[Job]):
    """Loads images into batches."""

    # Find the image of each job; runs in a worker.
    find: Callable[[Sequence[Job]], Sequence[ImageGroup]]
    preprocess: Preprocess
    views: Sequence[ViewSpec | None]
    seed: int
    # 0: in the caller's thread; `None`: those of `default_workers`.
    workers: int | None = None
    # Where pixels are wanted; `None` leaves bytes as they are.
    device: torch.device | None = None
    # Images are in the memory of this process, so threads have to read them.
    local: bool = False
    # Of JPEG files, which threads only read; not for views.
    decoder: JpegDecoder | None = None

    def load(
        self, batches: Iterable[Sequence[Job]], count: int
    ) -> Generator[Loaded, None, None]:
        """Load the images of some batches, ``count`` in all, ahead of the caller."""
        workers = default_workers(self.device) if self.workers is None else self.workers
        with closing(self._read_ahead(batches, count, workers)) as reading:
            chunks: Iterator[Made] = reading
            if self.decoder is not None:
                chunks = map(self.decoder.complete, reading)

            # While the caller works on one batch, a thread gathers and sends the next.
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
        """Yield results of :meth:`read` for all chunks, in order."""
        views = [1 if kind is None else kind.count for kind in self.views]
        step = max(1, CHUNK // max(views))
        chunks = (
            Chunk(batch[first : first + step], first=first, batch_size=len(batch))
            for batch in batches
            for first in range(0, len(batch), step)
        )

        # Threads are enough beside a model on the CPU, unless the caller asks for a
        # number of workers.
        may_start = workers > 0 and self.decoder is None and not self.local
        wanted = self.workers is not None or _is_cuda(self.device)
        if may_start and wanted and count >= PROCESSES_FROM:
            room = step * self._bytes_per_image()
            return map_in_processes(self.read, chunks, workers=workers, room=room)

        # Views make batches large: threads read none of them ahead.
        ahead = workers if any(self.views) else workers + _AHEAD
        return map_ahead(self.read, chunks, workers=workers, ahead=max(1, ahead))

    def _bytes_per_image(self) -> int:
        """Count the bytes that :meth:`read` makes of an image; AugMix makes float32."""
        pictures = 0
        for kind in self.views:
            if kind is None:
                pictures += 1
            else:
                pictures += kind.count * (4 if kind.kind == "augmix" else 1)
        return pictures * 3 * self.preprocess.size**2

    def read(self, chunk: Chunk[Job]) -> Made:
        """Decode, resize and crop, or read for the decoder; runs in a worker."""
        made: dict[int, list[Array]] = {}
        jpegs: dict[int, Jpeg] = {}
        unreadable: list[tuple[int, str]] = []
        for group in self.find(chunk.jobs):
            arrays = group.dataset.arrays(group.indices)
            for row, position in enumerate(group.positions):
                number = chunk.first + position
                try:
                    if arrays is None:
                        image = self._open(group.dataset, group.indices[row])
                    else:
                        image = Image.fromarray(arrays[row])
                except ImageError as error:
                    unreadable.append((number, error.reason))
                    continue
                if isinstance(image, Jpeg):
                    jpegs[number] = image
                else:
                    made[number] = self._prepare(image, group.keys[row])
        readable = sorted(made)
        note = ChunkNote(
            readable=readable,
            unreadable=unreadable,
            last=chunk.first + len(chunk.jobs) == chunk.batch_size,
            batch_size=chunk.batch_size,
            jpegs=jpegs,
        )

        # From lists per image to one array per kind of views.
        kinds = zip(*(made[number] for number in readable), strict=True)
        return tuple(np.stack(pictures) for pictures in kinds), note

    def _open(self, dataset: Dataset, index: int) -> Image.Image | Jpeg:
        """Decode an image, or read its file if the decoder takes it."""
        if self.decoder is None:
            return dataset.load(index)
        return open_or_read(dataset, index)

    def _prepare(self, image: Image.Image, key: str) -> list[Array]:
        """Resize and crop an image, for every kind of views."""
        arrays = []
        for kind in self.views:
            if kind is None:
                arrays.append(np.asarray(self.preprocess.picture(image)))
            else:
                views = image_views(image, key, kind, self.seed, self.preprocess)
                arrays.append(views.numpy())
        return arrays

    def _gather(self, reading: Iterator[Made]) -> Loaded | None:
        """Gather the chunks of the next batch and send it on its way to the device."""
        # One buffer for each kind of views, pinned if a GPU waits for it.
        buffers: list[Tensor] = []
        positions: list[int] = []
        unreadable: list[tuple[int, str]] = []
        for arrays, note in reading:
            if arrays and not buffers:
                buffers = [self._buffer(array, note.batch_size) for array in arrays]

            filled = len(positions)
            positions += note.readable
            unreadable += note.unreadable

            # Arrays are valid until the next item only: copy them.
            for buffer, array in zip(buffers, arrays, strict=False):
                buffer.numpy()[filled : len(positions)] = array

            if note.last:
                images = [buffer[: len(positions)] for buffer in buffers]
                loaded = Loaded(positions, images or self._nothing(), unreadable)
                return self._send(loaded)
        return None

    def _buffer(self, array: Array, batch_size: int) -> Tensor:
        """Allocate memory for a batch of images such as those of ``array``."""
        return torch.empty(
            (batch_size, *array.shape[1:]),
            dtype=torch.from_numpy(array[:0]).dtype,
            pin_memory=_is_cuda(self.device),
        )

    def _nothing(self) -> list[Tensor]:
        """Make batches in which no file could be read."""
        size = self.preprocess.size
        images = []
        for kind in self.views:
            views = () if kind is None else (kind.count,)
            shape = (0, *views, size, size, 3)
            images.append(torch.empty(shape, dtype=torch.uint8))
        return images

    def _send(self, loaded: Loaded) -> Loaded:
        """Make pixels on the device; a GPU copies them beside the work that it has."""
        device = self.device
        if device is None:
            return loaded
        if not _is_cuda(device):
            return replace(loaded, images=self._pixels(loaded.images, device))

        # The copy runs beside the work on the current stream, which waits for it
        # later.
        side = side_stream(device)
        with torch.cuda.stream(side):
            images = self._pixels(loaded.images, device)
        return replace(loaded, images=images, arrived=side.record_event())

    def _pixels(self, images: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copy images to the device and normalise them there."""
        pixels = []
        for made in images:
            sent = made.to(device, non_blocking=_is_cuda(device))
            pixels.append(to_pixels(sent, self.preprocess))
        return pixels


def _is_cuda(device: torch.device | None) -> bool:
    """Whether a device is a GPU of CUDA."""
    return device is not None and device.type == "cuda"
