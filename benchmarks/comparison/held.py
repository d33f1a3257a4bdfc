"""Data sets held on the device, and the streams that are cut from them.

Pictures are decoded and corrupted once, pixels and views made once, whatever the number of methods
and seeds that are run on them. Pictures are held in a fixed random order, so that the first n of a
set are a fair sample of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.dataset import ArrayDataset, Dataset
from cliquetta.data.samplers import Domain, SamplerOptions, correlated
from cliquetta.data.stream import Stream
from cliquetta.model.clip import CLIP
from cliquetta.types import Batch, ViewSpec

Indices = npt.NDArray[np.int64]

STREAMS = {
    "iid": "all images in random order",
    "correlated": "classes in bursts, Dirichlet 0.1",
    "uneven": "only some classes occur; the class list stays whole",
    "change": "first half of the set, half of the next one, second half of the set",
    "long": "the set again and again, its noise drawn anew each time",
}
DIRICHLET = 0.1
_PART = 128
"""Pictures that one thread works on at a time."""


class _InMemory(Dataset):
    """Decoded pictures of any size."""

    def __init__(self, source: Dataset, rows: Sequence[int], pictures: list[Image.Image]) -> None:
        assert source.labels is not None
        super().__init__(
            source.id,
            names=source.names,
            keys=[source.keys[row] for row in rows],
            labels=source.labels[list(rows)],
        )
        self.pictures = pictures

    def load(self, index: int) -> Image.Image:
        return self.pictures[index]


def read(source: Dataset, rows: Sequence[int], workers: int) -> Dataset:
    """Some pictures of a data set, decoded, corrupted and kept in memory."""
    assert source.labels is not None
    parts = [list(rows[at : at + _PART]) for at in range(0, len(rows), _PART)]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        if source.arrays([0]) is None:
            return _InMemory(source, rows, list(pool.map(source.load, rows)))
        pictures = np.concatenate(list(pool.map(source.arrays, parts)))
    return ArrayDataset(
        source.id,
        pictures,
        names=source.names,
        keys=[source.keys[row] for row in rows],
        labels=source.labels[list(rows)],
    )


class Held:
    """A labelled set whose pixels lie on the model's device; views follow when asked for."""

    def __init__(
        self,
        id: str,
        draw: Callable[[int], Dataset],
        model: CLIP,
        *,
        limit: int | None,
        cycles: int,
        workers: int,
    ) -> None:
        self.id, self.model, self.workers = id, model, workers
        self.parts: list[Dataset] = []
        for cycle in range(cycles):
            source = draw(cycle)
            rows = np.random.default_rng(cycle).permutation(len(source))[:limit]
            self.parts.append(read(source, rows.tolist(), workers))
        self.pixels = torch.cat([self._read(part, None) for part in self.parts])
        labels = [part.labels for part in self.parts if part.labels is not None]
        self.labels = torch.cat(labels)
        self.keys = tuple(f"{key}#{i}" for i, part in enumerate(self.parts) for key in part.keys)
        self._views: dict[ViewSpec, Tensor] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def views(self, spec: ViewSpec) -> Tensor:
        """Views (n, V, 3, S, S) of all pictures, the same for every method and seed."""
        if spec.kind != "zoom-crop":
            spec = ViewSpec(spec.kind, spec.count)  # zoom means nothing then
        if spec not in self._views:
            self._views = {}  # one kind at a time: they are large
            self._views[spec] = torch.cat([self._read(part, spec) for part in self.parts])
        return self._views[spec]

    def batch(self, rows: Indices, spec: ViewSpec | None) -> Batch:
        """The pictures at ``rows``, in that order."""
        at = torch.from_numpy(rows).to(self.pixels.device)
        views = None if spec is None else self.views(spec)[at]
        return Batch(self.pixels[at], tuple(self.keys[row] for row in rows), views)

    def _read(self, dataset: Dataset, spec: ViewSpec | None) -> Tensor:
        size = 256 if spec is None else 16
        stream = Stream(
            dataset,
            self.model.preprocess,
            size,
            order="given",
            views=spec,
            workers=self.workers,
        )
        parts = []
        for batch, _ in stream:
            pixels = batch.images if spec is None else batch.views
            assert pixels is not None
            parts.append(pixels.to(self.model.device, self.model.dtype))
        return torch.cat(parts)


@dataclass(frozen=True)
class Segment:
    """A stretch of a stream: images of one set, in order."""

    held: Held
    rows: Indices


def cut_stream(
    kind: str, held: Held, other: Held | None, seed: int, *, limit: int | None, present: int
) -> list[Segment]:
    """The stream of ``kind`` over the first ``limit`` pictures; only its order knows labels."""
    generator = np.random.default_rng([seed, 0x57])
    count = len(held) if limit is None else min(limit, len(held))
    labels = held.labels[:count].numpy()
    if kind == "correlated":
        return [
            Segment(held, correlated(Domain(held.id, labels), SamplerOptions(DIRICHLET), generator))
        ]
    if kind == "long":
        ends = np.cumsum([len(part) for part in held.parts])
        rounds = [
            generator.permutation(np.arange(end - len(part), end))
            for part, end in zip(held.parts, ends, strict=True)
        ]
        return [Segment(held, np.concatenate(rounds)[:count])]
    order = generator.permutation(count)
    if kind == "uneven":
        chosen = generator.permutation(np.unique(labels))[:present]
        order = order[np.isin(labels[order], chosen)]
    if kind == "change":
        assert other is not None
        middle = generator.permutation(min(count, len(other)))[: max(1, count // 2)]
        half = count // 2
        return [Segment(held, order[:half]), Segment(other, middle), Segment(held, order[half:])]
    return [Segment(held, order)]
