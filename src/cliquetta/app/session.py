"""One visitor of the web app: a session of the service and its predictions, without widgets.

Labels of the bundled stream never reach the method.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.stream import Stream
from cliquetta.evaluation.tables import to_csv
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.explanation import CacheCount
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import pack_state, unpack_state
from cliquetta.serve.batches import CHEAPER, check_views, predict_finite, predict_images
from cliquetta.serve.errors import invalid, too_large
from cliquetta.serve.factory import change_classes, create_session
from cliquetta.serve.limits import bounded
from cliquetta.serve.schema import (
    ClassesRequest,
    ImageProblem,
    SessionInfo,
    SessionRequest,
    Upload,
)
from cliquetta.serve.settings import Settings
from cliquetta.types import Batch, Prediction

_COLUMNS = (
    "batch",
    "image",
    "zero_shot",
    "zero_shot_probability",
    "prediction",
    "probability",
    "label",
    "error",
)


@dataclass(frozen=True)
class Row:
    """One image: the predictions of plain CLIP and of the method, and the truth where known."""

    batch: int
    name: str
    before: str
    before_probability: float
    after: str
    after_probability: float
    truth: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the method's prediction differs from plain CLIP's."""
        return self.before != self.after


@dataclass(frozen=True)
class Shown:
    """One batch and everything that is shown about it."""

    rows: tuple[Row, ...]
    refused: tuple[ImageProblem, ...]
    pixels: Tensor  # (B, 3, S, S) as the model saw them
    pictures: npt.NDArray[np.uint8]  # pictures (B, S, S, 3) of the pixels
    prediction: Prediction


@dataclass
class Tally:
    """Right predictions so far, and the same after every batch."""

    images: int = 0
    labelled: int = 0
    right: dict[str, int] = field(default_factory=lambda: {"before": 0, "after": 0})
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Labelled images so far, and the share that plain CLIP and the method got right."""
    counts: list[Mapping[str, CacheCount]] = field(default_factory=list)
    """Entries of the method's cache after every batch."""

    def add(self, rows: Sequence[Row], counts: Mapping[str, CacheCount]) -> None:
        """Count one batch."""
        self.images += len(rows)
        self.counts.append(counts)
        labelled = [row for row in rows if row.truth is not None]
        if not labelled:
            return
        self.labelled += len(labelled)
        for row in labelled:
            self.right["before"] += row.before == row.truth
            self.right["after"] += row.after == row.truth
        before = self.right["before"] / self.labelled
        after = self.right["after"] / self.labelled
        self.curve.append((self.labelled, before, after))


class AppSession:
    """A method at work for one visitor. A batch that fails leaves it as it was."""

    def __init__(self, settings: Settings, request: SessionRequest) -> None:
        self.id = uuid.uuid4().hex
        self.settings = settings
        self.limits = settings.limits
        info, adapter = create_session(request, settings, self.id)
        self._use(info, adapter)
        self._begin()

    def _use(self, info: SessionInfo, adapter: Adapter) -> None:
        """Take a method, with plain CLIP beside it."""
        self.info = info
        self.adapter = adapter
        self.plain = create_method("zero_shot", adapter.model, adapter.prompts)
        adapter.collect_evidence = True

    def with_classes(self, classes: Sequence[str]) -> AppSession:
        """Copy the session with other classes: images and what was learned of them go on.

        The score starts again, since predictions among other classes cannot be
        compared.
        """
        request = ClassesRequest(classes=list(classes))
        info, adapter = change_classes(request, self.info, self.adapter, self.settings)
        other = copy.copy(self)
        other._use(info, adapter)
        other.rows = list(self.rows)
        other.tally = Tally()
        return other

    def _begin(self) -> None:
        """Start with no image shown."""
        self.tally = Tally()
        self.rows: list[Row | ImageProblem] = []
        self.last: Shown | None = None
        self.batches = 0
        self._position = 0
        self._files: tuple[Path, ...] = ()
        self._next_file = 0

    def reset(self) -> None:
        """Forget everything: the next batch is the first one again."""
        self.adapter.reset()
        self._begin()

    def next_of_stream(self, id: str, batch_size: int) -> Shown:
        """Predict the next images of a dataset.

        Positions continue when its shift changes in mid-stream: no image comes twice.
        """
        self._check_count(batch_size)
        adapter = self.adapter
        check_views(adapter, batch_size, self.limits)
        dataset = get_dataset(id)
        # The bundled images in the order of the dataset: positions are indices.
        stream = Stream(
            dataset,
            adapter.model.preprocess,
            batch_size,
            views=adapter.views,
            view_seed=adapter.seed,
        )
        end = min(self._position + batch_size, stream.images)
        if self._position >= end:
            raise invalid(
                f"all {stream.images:,} images were shown: reset to begin again"
            )
        with self._undone_on_error(), bounded(self.limits.batch_seconds, CHEAPER):
            batch, labels = next(stream.read([range(self._position, end)]))
            prediction = predict_finite(adapter, batch)
            truths: list[str | None] = []
            for label in labels.tolist():
                name = dataset.names[label]
                truths.append(name if name in self.info.classes else None)
            result = self._record(batch, prediction, batch.keys, truths)
        self._position = end
        return result

    def next_of_files(self, files: Sequence[Path], batch_size: int) -> Shown:
        """Predict the next ``batch_size`` of these images; other images begin a new round."""
        if not files:
            raise invalid("no images: add some, or choose the bundled stream")
        self._check_count(max(len(files), batch_size))
        start = self._next_file if tuple(files) == self._files else 0
        if start >= len(files):
            raise invalid("all of these images were predicted: add others, or reset")
        part = files[start : start + batch_size]

        # The service reads no larger batch from anybody.
        size = sum(file.stat().st_size for file in part)
        most = self.limits.body_bytes
        if size > most:
            raise too_large(
                f"this batch has {size:,} bytes, at most {most:,} are read: use fewer images per "
                "batch"
            )
        uploads = [Upload(name=file.name, data=file.read_bytes()) for file in part]
        with self._undone_on_error():
            result = predict_images(self.adapter, uploads, self.limits)
            names = [uploads[index].name for index in result.positions]
            shown = self._record(
                result.batch,
                result.prediction,
                names,
                truths=[None] * len(names),
                refused=result.refused,
            )
        self._files = tuple(files)
        self._next_file = start + len(part)
        return shown

    def _check_count(self, images: int) -> None:
        if images > self.limits.images:
            raise too_large(
                f"{images} images, at most {self.limits.images} are accepted"
            )

    def _record(
        self,
        batch: Batch,
        prediction: Prediction,
        names: Sequence[str],
        truths: Sequence[str | None],
        refused: tuple[ImageProblem, ...] = (),
    ) -> Shown:
        """Count a batch that succeeded, beside the predictions of plain CLIP."""
        plain = self.plain.predict(Batch(batch.images, batch.keys))
        shares_before, before = (best[:, 0].tolist() for best in plain.topk())
        shares_after, after = (best[:, 0].tolist() for best in prediction.topk())
        classes = self.info.classes
        rows = []
        for index, name in enumerate(names):
            row = Row(
                batch=self.batches + 1,
                name=name,
                before=classes[before[index]],
                before_probability=shares_before[index],
                after=classes[after[index]],
                after_probability=shares_after[index],
                truth=truths[index],
            )
            rows.append(row)

        # From here on nothing can fail: the batch counts.
        pictures = self.adapter.model.preprocess.unnormalise(batch.images)
        self.tally.add(rows, self.adapter.cache_counts())
        self.batches += 1
        self.rows += [*rows, *refused]
        self.last = Shown(
            rows=tuple(rows),
            refused=refused,
            pixels=batch.images,
            pictures=pictures.cpu().numpy(),
            prediction=prediction,
        )
        return self.last

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Restore the method's memory where a batch fails."""
        memory = self.adapter.state_dict()
        try:
            yield
        except BaseException:
            self.adapter.load_state_dict(memory)
            raise

    def predictions_csv(self) -> bytes:
        """Write all predictions so far as a table."""
        rows: list[list[object]] = []
        for row in self.rows:
            if isinstance(row, ImageProblem):
                unpredicted = [None] * (len(_COLUMNS) - 3)
                rows.append([None, row.name, *unpredicted, row.reason])
                continue
            cells = [
                row.batch,
                row.name,
                row.before,
                f"{row.before_probability:.6f}",
                row.after,
                f"{row.after_probability:.6f}",
                row.truth,
                None,
            ]
            rows.append(cells)
        return to_csv(_COLUMNS, rows).encode()

    def state(self) -> bytes:
        """Write a state file for ``cliquetta predict --state`` and the service."""
        return pack_state(self.adapter, notes={"images": self.tally.images})

    def load_state(self, data: bytes) -> int:
        """Continue from a state; returns how many images it had seen. Counters start at zero."""
        state = unpack_state(self.adapter, data, source="the file")
        images = state.notes.get("images", 0)
        self._begin()
        return images if isinstance(images, int) else 0
