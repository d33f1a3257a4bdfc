"""Features once: a stream of features that were encoded earlier, in the place of pixels.

Tables (:mod:`cliquetta.data.feature_cache`) are tied to the model's weights, the preprocessing,
the views and their seed, and the images; whichever of them changes, another table is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.dataset import Dataset
from cliquetta.data.feature_cache import Block, FeatureTable, Layout, open_table
from cliquetta.data.stream import Skipped, Stream
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP, encode_views
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import ViewSpec

VIEWS_AT_ONCE = 256
"""Views in the image tower at once, and in a block of a table."""

OnEncode = Callable[[str, int, int], None]
"""Id of the data set, images encoded, images in all."""


@dataclass(frozen=True)
class FeatureBatch:
    """Unit features (B, V, E) of images, and their names."""

    features: Tensor
    keys: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)


class FeatureStream:
    """``stream``, image for image, as features; they are encoded when first asked for.

    Predictions from them are those from pixels up to rounding: an image goes through the tower
    in the company of others than in its batch.
    """

    def __init__(
        self, stream: Stream, model: CLIP, root: Path, *, on_encode: OnEncode | None = None
    ) -> None:
        self.stream = stream
        self.model = model
        self.root = root
        self.on_encode = on_encode
        self.skipped: list[Skipped] = []
        """Unreadable files met since the last start, in order."""
        self._tables: dict[str, FeatureTable] = {}

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.stream)

    @property
    def names(self) -> tuple[str, ...]:
        """The class list that labels index."""
        return self.stream.names

    @property
    def id(self) -> str:
        """Ids of the data sets, as in :attr:`Stream.id`."""
        return self.stream.id

    @property
    def views(self) -> ViewSpec | None:
        """The views whose features batches carry."""
        return self.stream.views

    @property
    def preprocess(self) -> Preprocess:
        """How pixels were prepared."""
        return self.stream.preprocess

    def settings(self) -> dict[str, Any]:
        """Those of the stream: where features come from changes no prediction."""
        return self.stream.settings()

    def batches(self, start: int = 0) -> Iterator[tuple[FeatureBatch, Tensor]]:
        """Batches from number ``start`` on."""
        stream, size = self.stream, self.stream.batch_size
        if not 0 <= start <= len(self):
            raise UserError(f"the stream has {len(self)} batches, cannot start at {start}")
        self.skipped = []
        tables = [self._table(number) for number in range(len(stream.domains))]
        for first in range(start * size, stream.images, size):
            yield self._gather(range(first, min(first + size, stream.images)), tables)

    def _gather(self, places: range, tables: Sequence[FeatureTable]) -> tuple[FeatureBatch, Tensor]:
        """The batch at some places; unreadable images leave theirs empty."""
        stream = self.stream
        domains, rows = stream.origin(places)
        read = np.ones(len(places), dtype=bool)
        for at, place in enumerate(places):
            reason = tables[domains[at]].unreadable.get(int(rows[at]))
            if reason is not None:
                read[at] = False
                self.skipped.append(Skipped(stream.key(place), reason))
        kept = [place for place, there in zip(places, read, strict=True) if there]
        domains, rows = domains[read], rows[read]
        features = np.empty((len(kept), *tables[0].features.shape[1:]), dtype=np.float32)
        for number in np.unique(domains):
            own = domains == number
            features[own] = tables[number].take(rows[own])
        labels = torch.tensor([stream.label(place) for place in kept], dtype=torch.int64)
        keys = tuple(stream.key(place) for place in kept)
        return FeatureBatch(torch.from_numpy(features), keys), labels

    def _table(self, number: int) -> FeatureTable:
        """The features of one data set of the stream."""
        domain = self.stream.domains[number]
        if domain.id not in self._tables:
            layout = self._layout(domain)
            self._tables[domain.id] = open_table(
                self.root,
                layout,
                lambda blocks: self._encode(number, blocks),
                title=domain.id,
                on_progress=self._progress(domain.id),
            )
        return self._tables[domain.id]

    def _layout(self, domain: Dataset) -> Layout:
        stream, model = self.stream, self.model
        count = 1 if stream.views is None else stream.views.count
        shared = stream.views is not None and len(stream.domains) > 1
        depends_on = {
            "model": model.fingerprint,
            "dtype": str(model.dtype),
            "preprocessing": stream.preprocess.fingerprint,
            "images": [domain.fingerprint, domain.contents()],
            "views": None if stream.views is None else asdict(stream.views),
            "view_seed": None if stream.views is None else stream.view_seed,
            # Views are drawn from keys, which carry the id when there are several data sets.
            "keys": domain.id if shared else None,
        }
        rows = max(1, VIEWS_AT_ONCE // count)
        return Layout(depends_on, (len(domain), count, model.embed_dim), rows)

    def _progress(self, id: str) -> Callable[[int, int], None] | None:
        tell = self.on_encode
        return None if tell is None else lambda done, total: tell(id, done, total)

    def _encode(self, number: int, blocks: Sequence[range]) -> Iterator[Block]:
        """Features of rows of one data set, read in the order in which it lists them."""
        stream = self.stream
        listing = Stream(
            stream.domains,
            stream.preprocess,
            order="given",
            views=stream.views,
            view_seed=stream.view_seed,
            workers=stream.workers,
            pin=stream.pin,
        )
        before = sum(len(domain) for domain in stream.domains[:number])
        places = [range(before + rows.start, before + rows.stop) for rows in blocks]
        for part, (batch, _) in zip(places, listing.read(places), strict=True):
            views = batch.images[:, None] if batch.views is None else batch.views
            wanted = {listing.key(place): at for at, place in enumerate(part)}
            features = np.zeros((len(part), views.shape[1], self.model.embed_dim), np.float32)
            if len(batch):
                views = views.to(self.model.device, non_blocking=True)
                encoded = encode_views(self.model, views, chunk=VIEWS_AT_ONCE)
                features[[wanted[key] for key in batch.keys]] = encoded.float().cpu().numpy()
            unreadable = {
                part.start - before + wanted[entry.key]: entry.reason
                for entry in listing.skipped
                if entry.key in wanted
            }
            yield Block(features, unreadable)
