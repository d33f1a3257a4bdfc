"""One visitor of the web app: a method, what it has seen, and what it answered.

Nothing here knows of widgets. Labels of the bundled stream stay on this side of the contract.
"""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cliquetta.app.evidence import cache_counts
from cliquetta.app.records import Row, Shown, Tally
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.corruptions import CORRUPTIONS
from cliquetta.data.stream import Stream
from cliquetta.methods._shared.state import pack_state, unpack_state
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.batches import check_views, out_of_time
from cliquetta.serve.deadline import Deadline, OutOfTimeError
from cliquetta.serve.decoding import Refused, Upload, decode
from cliquetta.serve.errors import invalid, too_large
from cliquetta.serve.factory import is_out_of_memory
from cliquetta.serve.limits import Limits
from cliquetta.types import Batch

STREAM = "bundled"
NO_SHIFT = "none"
SHIFTS = (NO_SHIFT, *CORRUPTIONS)
PLAIN = "zero_shot"

_COLUMNS = (
    *("batch", "image", "zero_shot", "zero_shot_probability"),
    *("prediction", "probability", "label", "error"),
)


@dataclass(frozen=True)
class Choices:
    """What a session is built from; another choice is another session."""

    model: str
    method: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class StreamChoice:
    """The bundled pictures and what is done to them; may change while a method goes on."""

    shift: str = "motion_blur"
    severity: int = 4
    batch_size: int = 16

    @property
    def id(self) -> str:
        """The data set's id."""
        return STREAM if self.shift == NO_SHIFT else f"{STREAM}@{self.shift}:{self.severity}"


def app_limits(given: Mapping[str, str]) -> Limits:
    """The limits of the app: those of the service, but for what fits several photographs."""
    return Limits.from_text({"body_bytes": str(128 * 2**20), **given})


def read_classes(text: str, limits: Limits) -> tuple[str, ...]:
    """Class names as typed, one a line or with commas between; checked against the limits."""
    parts = text.replace(",", "\n").splitlines()
    names = tuple(part.strip() for part in parts if part.strip())
    if not names:
        raise invalid("no class names: type at least one, separated by commas or lines")
    if len(names) > limits.classes:
        raise too_large(f"{len(names)} class names, at most {limits.classes} are taken")
    if any(len(name) > limits.class_length for name in names):
        raise too_large(f"a class name may have {limits.class_length} characters")
    return names


class AppSession:
    """A method at work for one visitor. A batch that fails leaves it as it was."""

    def __init__(self, models: Mapping[str, CLIP], choices: Choices, limits: Limits) -> None:
        self.id = uuid.uuid4().hex
        self.choices = choices
        self.limits = limits
        model = models[choices.model]
        prompts = ClassPrompts(choices.classes)
        with self._bounded():
            self.plain: Adapter = create_method(PLAIN, model, prompts)
            self.adapter: Adapter = create_method(choices.method, model, prompts)
        size = sum(value.nbytes for value in self.adapter.state_dict().values())
        if size > limits.state_bytes:
            raise too_large(
                f"{choices.method} would remember {size:,} bytes of these classes, at most "
                f"{limits.state_bytes:,} are allowed: type fewer"
            )
        self.adapter.explain = True
        self._begin()

    def _begin(self) -> None:
        self.tally = Tally()
        self.rows: list[Row | Refused] = []
        self.last: Shown | None = None
        self.batches = 0
        self._place = 0
        self._files: tuple[Path, ...] = ()
        self._next_file = 0

    def reset(self) -> None:
        """Forget everything: the next batch is the first one again."""
        self.adapter.reset()
        self._begin()

    def next_of_stream(self, choice: StreamChoice) -> Shown:
        """Predict the next pictures of the bundled stream.

        Places go on when the shift changes in mid-stream: no picture comes twice.
        """
        if choice.batch_size > self.limits.images:
            raise too_large(f"at most {self.limits.images} images a batch")
        adapter = self.adapter
        check_views(adapter, choice.batch_size, self.limits)
        dataset = get_dataset(choice.id)
        stream = Stream(
            dataset,
            adapter.model.preprocess,
            choice.batch_size,
            views=adapter.views,
            view_seed=adapter.seed,
        )
        end = min(self._place + choice.batch_size, stream.images)
        if self._place >= end:
            raise invalid(f"all {stream.images:,} images were shown: reset to begin again")
        with self._bounded():
            batch, labels = next(stream.read([range(self._place, end)]))
            truths = [dataset.names[label] for label in labels.tolist()]
            names = self.choices.classes
            shown = self._predict(
                batch, batch.keys, [truth if truth in names else None for truth in truths], ()
            )
        self._place = end
        return self._keep(shown)

    def next_of_files(self, files: Sequence[Path], batch_size: int) -> Shown:
        """Predict the next ``batch_size`` of these images; other images begin a new round."""
        most = self.limits.images
        if not files:
            raise invalid("no images: drop some, or choose the bundled stream")
        if len(files) > most or batch_size > most:
            raise too_large(f"{max(len(files), batch_size)} images, at most {most} are taken")
        start = self._next_file if tuple(files) == self._files else 0
        if start >= len(files):
            raise invalid("all of these images were predicted: drop others, or reset")
        part = files[start : start + batch_size]
        check_views(self.adapter, len(part), self.limits)
        uploads = self._read(part)
        with self._bounded() as deadline:
            decoded = decode(
                uploads,
                self.adapter.model.preprocess,
                views=self.adapter.views,
                seed=self.adapter.seed,
                max_pixels=self.limits.image_pixels,
                check=deadline.check,
            )
            names = [uploads[place].name for place in decoded.places]
            shown = self._predict(decoded.batch, names, [None] * len(names), decoded.refused)
        self._files, self._next_file = tuple(files), start + len(part)
        return self._keep(shown)

    def _read(self, files: Sequence[Path]) -> list[Upload]:
        size = sum(file.stat().st_size for file in files)
        if size > self.limits.body_bytes:
            raise too_large(
                f"this batch has {size:,} bytes, at most {self.limits.body_bytes:,} are read: "
                "take fewer images a batch"
            )
        return [Upload(file.name, file.read_bytes()) for file in files]

    def _predict(
        self,
        batch: Batch,
        names: Sequence[str],
        truths: Sequence[str | None],
        refused: tuple[Refused, ...],
    ) -> Shown:
        before = self.plain.predict(Batch(batch.images, batch.keys)).probabilities.max(dim=-1)
        prediction = self.adapter.predict(batch)
        if not bool(prediction.logits.isfinite().all()):
            raise invalid("the method's answer is not a number for these images")
        after = prediction.probabilities.max(dim=-1)
        classes = self.choices.classes
        answers = zip(
            before.indices.tolist(),
            before.values.tolist(),
            after.indices.tolist(),
            after.values.tolist(),
            strict=True,
        )
        rows = tuple(
            Row(self.batches + 1, name, classes[c], p, classes[d], q, truth)
            for name, truth, (c, p, d, q) in zip(names, truths, answers, strict=True)
        )
        pictures = self.adapter.model.preprocess.unnormalise(batch.images).cpu().numpy()
        return Shown(rows, refused, batch.images, pictures, prediction)

    def _keep(self, shown: Shown) -> Shown:
        """Count a batch that went well."""
        self.batches += 1
        self.tally.add(shown.rows, cache_counts(self.adapter))
        self.rows += [*shown.rows, *shown.refused]
        self.last = shown
        return shown

    @contextmanager
    def _bounded(self) -> Iterator[Deadline]:
        """Limit time; whatever goes wrong, the method's memory is as it was."""
        adapter = getattr(self, "adapter", None)
        memory = None if adapter is None else adapter.state_dict()
        try:
            with Deadline(self.limits.batch_seconds) as deadline:
                yield deadline
        except BaseException as error:
            if adapter is not None and memory is not None:
                adapter.load_state_dict(memory)
            if isinstance(error, OutOfTimeError):
                raise out_of_time(self.limits) from None
            if isinstance(error, Exception) and is_out_of_memory(error):
                raise too_large("not enough memory: fewer images or classes") from error
            raise

    def predictions_csv(self) -> bytes:
        """All answers so far as a table."""
        file = io.StringIO(newline="")
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for row in self.rows:
            if isinstance(row, Refused):
                table.writerow(["", row.name, "", "", "", "", "", row.reason])
                continue
            before = [row.before, f"{row.before_probability:.6f}"]
            after = [row.after, f"{row.after_probability:.6f}"]
            table.writerow([row.batch, row.name, *before, *after, row.truth or "", ""])
        return file.getvalue().encode()

    def state(self) -> bytes:
        """What the method has learned, as ``cliquetta predict --state`` and the service take it."""
        return pack_state(self.adapter, notes={"images": self.tally.images})

    def load_state(self, data: bytes) -> int:
        """Go on from a state; returns how many images it had seen. Counters start at zero."""
        if len(data) > self.limits.state_bytes:
            raise too_large(f"a state may have {self.limits.state_bytes:,} bytes")
        notes: Mapping[str, Any] = unpack_state(self.adapter, data, source="the file").notes
        self._begin()
        images = notes.get("images", 0)
        return images if isinstance(images, int) else 0
