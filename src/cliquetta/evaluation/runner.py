"""Run a method over a stream, score it, and lose nothing when the process dies.

Every so often the method's memory, the scores and the length of the prediction file are
saved together, in one file that is replaced atomically. A resumed run cuts its
predictions back to that length and continues; what it writes is bit-equal to a run that
was never stopped.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cliquetta.atomic import exclusive
from cliquetta.data.dataset import Dataset
from cliquetta.data.labels import comes_class_by_class
from cliquetta.data.prepared import (
    AnyBatch,
    AnyStream,
    FeatureStream,
    HeldStream,
    from_given_features,
)
from cliquetta.data.stream import Skipped, Stream
from cliquetta.data.torch_data import LabelledTorchImages, TorchImages, is_torch_data
from cliquetta.errors import UserError
from cliquetta.evaluation.evidence_log import (
    FOLDER,
    EvidenceLimits,
    EvidenceLog,
    has_evidence,
)
from cliquetta.evaluation.metrics import Metrics
from cliquetta.evaluation.predictions import (
    PREDICTIONS,
    DamagedRunError,
    PredictionLog,
    fingerprint_predictions,
)
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.record import (
    RECORD,
    STATE,
    Record,
    environment,
    load_record,
    peak_memory,
    plan,
    verify_predictions,
)
from cliquetta.inference.predictor import predict_batch
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.registry import require_features_only
from cliquetta.methods.building.state import unpack_state
from cliquetta.types import Batch, Prediction

WARM_UP = 3
"""Batches of a process's part of a run that its rate leaves out: kernels are loaded and
recorded in them, which the first method would pay for the others."""
# batches wait this long, at most, to be scored and written together
SCORE_SECONDS = 0.2


def evaluate(
    adapter: Adapter,
    stream: AnyStream | Dataset | TorchDataset[Any] | DataLoader[Any],
    *,
    out: Path | str | None = None,
    preset: str | None = None,
    on_step: Callable[[Step], None] | None = None,
    save_every: int = 100,
    save_seconds: float = 20.0,
    again: bool = False,
    evidence: EvidenceLimits | None = None,
    cache: PredictionCache | None = None,
) -> Record:
    """Predict a stream with a reset adapter and score it.

    Args:
        adapter: The method.
        stream: Images with labels, with the views that the method wants. A dataset,
            also your own torch ``Dataset`` of (image, label), is shown in an order
            shuffled by the method's seed, 64 images per batch; a ``DataLoader`` in its
            own order and batches. Labels are names of the method's classes or their
            numbers.
        out: Folder of runs; this one lives in ``out/<id>``. A finished one is returned
            at once, an interrupted one is continued. ``None`` writes nothing.
        preset: Name of the settings that the adapter's config was made from, for the
            record.
        on_step: Is called after every batch.
        save_every: Batches after which state is saved, or
        save_seconds: seconds, whichever comes first.
        again: Run a finished one again.
        evidence: Keep what reports show, too; needs ``out``. A run that was finished
            without is run again.
        cache: Earlier predictions of these images, if the method treats each image
            alone.

    Returns:
        The record of the finished run.

    Raises:
        UserError: If method and stream do not fit together.

    """
    images = as_stream(stream, adapter)
    warn_of_sorted_classes(images, adapter)
    stream = from_given_features(images, adapter.model)
    if isinstance(stream, FeatureStream):
        require_features_only(type(adapter), adapter.name, towers=True)
    if stream.views != adapter.views:
        raise UserError(
            f"the stream carries views {stream.views}, the method wants {adapter.views}; build "
            "it with Stream(..., views=adapter.views)"
        )
    if len(stream.names) != len(adapter.prompts):
        raise UserError(
            f"{stream.id} labels {len(stream.names)} classes, the method tells "
            f"{len(adapter.prompts)} apart; build it with the prompts of the dataset"
        )
    run = Execution(adapter, stream, plan(adapter, stream, preset), cache)
    with run.opened(out, again=again, evidence=evidence) as finished:
        if finished is not None:
            return finished
        saved_at = time.monotonic()
        saved_batch = run.progress.batches
        for batch, labels in stream.batches(run.progress.batches):
            step = run.advance(batch, labels)
            late = time.monotonic() - saved_at >= save_seconds
            if late or step.number - saved_batch >= save_every:
                run.save()
                saved_at = time.monotonic()
                saved_batch = step.number
            if on_step is not None:
                on_step(step)
    return run.write_record("finished")


def as_stream(data: Any, adapter: Adapter) -> AnyStream:
    """Return a stream of whatever a user wants to have scored.

    Raises:
        UserError: It is neither a stream nor a dataset.

    """
    if not isinstance(adapter, Adapter):
        raise UserError(
            f"evaluate takes a method first, got {type(adapter).__name__}: build it with "
            "create_method(name, model, classes)"
        )
    if isinstance(data, Stream | FeatureStream | HeldStream):
        return data
    order = "shuffled"
    batch_size = 64
    if is_torch_data(data):
        if isinstance(data, DataLoader):
            order = "sequential"
            batch_size = data.batch_size or batch_size
        images = TorchImages(data, adapter.model.preprocess)
        data = LabelledTorchImages(images, adapter.prompts.names)
    if not isinstance(data, Dataset):
        raise UserError(
            "evaluate takes a Stream, a dataset (get_dataset, or torch's, of (image, label) "
            f"pairs) or a DataLoader, got {type(data).__name__}"
        )
    return Stream(
        data,
        adapter.model.preprocess,
        batch_size,
        order=order,
        seed=adapter.seed,
        views=adapter.views,
        view_seed=adapter.seed,
        device=adapter.model.device,
    )


def warn_of_sorted_classes(stream: AnyStream, adapter: Adapter) -> None:
    """Warn where a method that adapts is shown one class after the other, as listed."""
    plain = stream if isinstance(stream, Stream) else stream.stream
    if (
        adapter.batch_dependence is BatchDependence.INDEPENDENT
        or plain.order != "sequential"
    ):
        return
    labels = plain.labels(range(plain.images)).tolist()
    if comes_class_by_class(labels):
        warnings.warn(
            f"{stream.id} lists its images class by class, and order sequential shows them so: "
            f"{adapter.name} may learn the classes from the order, and its accuracy say nothing "
            "about mixed images; use order shuffled unless your images come like that",
            stacklevel=3,
        )


class PredictionCache:
    """The predictions of an independent method, by image.

    Neither order nor batch changes such a prediction. That the seed does not either is
    checked on the first batch of every run, which is always computed; where it does,
    the cache is emptied.
    """

    def __init__(self) -> None:
        self.logits: dict[str, Tensor] = {}
        self.evidence: Mapping[str, Any] = {}
        self.rate = 0.0  # images/s of the last run that computed its predictions

    def predict(
        self, adapter: Adapter, batch: Batch, *, first: bool
    ) -> tuple[Prediction, int]:
        """Predict a batch; also returns how many of its images came from the cache."""
        # The first batch is always computed: it checks that the seed changes nothing.
        missing = [
            row for row, key in enumerate(batch.keys) if first or key not in self.logits
        ]
        if missing:
            self._compute(adapter, batch, missing)
        logits = torch.stack([self.logits[key] for key in batch.keys])
        prediction = Prediction(logits, self.evidence, names=adapter.prompts.names)
        return prediction, len(batch) - len(missing)

    def _compute(self, adapter: Adapter, batch: Batch, rows: Sequence[int]) -> None:
        """Predict some rows of a batch; where one differs from before, forget all others."""
        keys = tuple(batch.keys[row] for row in rows)
        if len(rows) < len(batch):
            views = None if batch.views is None else batch.views[rows]
            batch = Batch(batch.images[rows], keys, views)
        computed = adapter.predict(batch)
        self.evidence = computed.evidence
        logits = computed.logits.cpu()

        # Another batch rounds differently.
        tolerance = 1e-3 if adapter.model.dtype == torch.float32 else 2e-2
        tolerance *= float(adapter.model.scale)
        for key, row in zip(keys, logits, strict=True):
            before = self.logits.get(key, row)
            if not torch.allclose(before, row, rtol=0, atol=tolerance):
                self.logits.clear()
        self.logits.update(zip(keys, logits, strict=True))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass
class RunProgress:
    """Counters of a run; all of them are saved with the method's memory."""

    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    timed: tuple[int, float] = (0, 0.0)  # images, seconds: without a process's warm-up
    recalled: int = 0  # images whose prediction came from the cache
    written: int = 0  # length of the prediction file in bytes
    resumed: int = 0
    started: str = field(default_factory=_now)
    skipped: tuple[Skipped, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """plain values, of the last batch"""


class Execution:
    """One execution of a run, fresh or resumed: predicts, scores and writes."""

    def __init__(
        self,
        adapter: Adapter,
        stream: AnyStream,
        record: Record,
        cache: PredictionCache | None,
    ) -> None:
        self.adapter = adapter
        self.stream = stream
        self.record = record
        self.cache = cache
        self.folder: Path | None = None
        self.log: PredictionLog | None = None
        self.evidence: EvidenceLog | None = None
        self.metrics = Metrics(len(adapter.prompts))
        self.progress = RunProgress()
        # files skipped before the run was resumed
        self._earlier: tuple[Skipped, ...] = ()
        self._waiting: list[tuple[Sequence[str], Tensor, Tensor]] = []
        self._flushed_at = time.monotonic()
        self._done_here = 0  # batches that this process has predicted
        self._device = adapter.model.device

    @contextmanager
    def opened(
        self, out: Path | str | None, *, again: bool, evidence: EvidenceLimits | None
    ) -> Iterator[Record | None]:
        """Lock the run's folder; give the record of a finished run. Failures are recorded."""
        with ExitStack() as stack:
            if out is not None:
                self.folder = Path(out) / self.record.id
                stack.enter_context(exclusive(self.folder))
                finished = _finished(
                    self.folder, again=again, with_evidence=evidence is not None
                )
                if finished is not None:
                    yield finished
                    return
            self._begin()
            if self.folder is not None:
                self.log = PredictionLog(
                    self.folder / PREDICTIONS, self.progress.written
                )
                stack.enter_context(closing(self.log))
                if evidence is not None:
                    # Features have nothing to show.
                    assert isinstance(self.stream, Stream)
                    self.evidence = EvidenceLog(
                        self.folder / FOLDER,
                        self.adapter,
                        self.stream,
                        evidence,
                        done=self.progress.batches,
                    )
                    stack.callback(setattr, self.adapter, "collect_evidence", False)
            try:
                self.write_record("running")
                yield None
                self.save()
            except Exception as error:
                self.write_record("failed", error=f"{type(error).__name__}: {error}")
                raise

    def _begin(self) -> None:
        """Reset the method, or restore what was saved of an interrupted run."""
        self.adapter.reset()
        state = None if self.folder is None else self.folder / STATE
        if state is not None and state.exists():
            saved = unpack_state(self.adapter, state.read_bytes(), source=str(state))
            self.metrics.load_state_dict(saved.extra)
            skipped = [Skipped(**entry) for entry in saved.notes["skipped"]]
            self._earlier = tuple(skipped)
            self.progress = RunProgress(**saved.notes)
            self.progress.skipped = self._earlier
            self.progress.resumed += 1
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def advance(self, batch: AnyBatch, labels: Tensor) -> Step:
        """Predict a batch and count it; labels are for the scores only."""
        prediction = self._predict(batch)
        progress = self.progress
        progress.batches += 1
        progress.images += len(batch)
        progress.skipped = self._earlier + tuple(self.stream.skipped)
        self._waiting.append((batch.keys, labels, prediction.logits))
        if time.monotonic() - self._flushed_at >= SCORE_SECONDS:
            self._flush()
        step = Step(
            number=progress.batches,
            batches=len(self.stream),
            images=progress.images,
            batch=batch,
            labels=labels,
            prediction=prediction,
            score=self._accuracy,
        )
        if self.evidence is not None:
            self.evidence(step)
        return step

    def _predict(self, batch: AnyBatch) -> Prediction:
        """Predict and time; only the batch goes in, never a label."""
        recalled = 0
        start = time.perf_counter()
        if self.cache is not None and isinstance(batch, Batch) and len(batch):
            prediction, recalled = self.cache.predict(
                self.adapter, batch, first=self._done_here == 0
            )
        else:
            prediction = predict_batch(self.adapter, batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.perf_counter() - start

        progress = self.progress
        progress.seconds += took
        progress.recalled += recalled

        # What a new process computes first is slower, and a cache faster.
        if self._done_here >= WARM_UP and not recalled:
            images, seconds = progress.timed
            progress.timed = (images + len(batch), seconds + took)
        self._done_here += 1

        # Reports show the last batch's evidence, as far as it is plain.
        plain = {}
        for name, value in prediction.evidence.items():
            if isinstance(value, int | float | str):
                plain[name] = value
        progress.evidence = plain or progress.evidence
        return prediction

    def _flush(self) -> None:
        """Score and write what is waiting."""
        if self._waiting:
            keys: list[str] = []
            label_parts = []
            logit_parts = []
            for batch_keys, batch_labels, batch_logits in self._waiting:
                keys += batch_keys
                label_parts.append(batch_labels)
                logit_parts.append(batch_logits.cpu())
            self._waiting = []
            labels = torch.cat(label_parts)
            logits = torch.cat(logit_parts)
            self.metrics.update(logits, labels, [len(part) for part in label_parts])
            if self.log is not None:
                self.log.append(keys, labels, logits)
        self._flushed_at = time.monotonic()

    def _accuracy(self) -> float | None:
        self._flush()
        return self.metrics.accuracy

    def save(self) -> None:
        """Save predictions first, then the state that says how many of them count."""
        self._flush()
        if self.folder is not None and self.log is not None:
            self.progress.written = self.log.sync()
            self.adapter.save(
                self.folder / STATE,
                extra=self.metrics.state_dict(),
                notes=asdict(self.progress),
            )

    def write_record(self, status: Any, *, error: str = "") -> Record:
        """Write the record as things stand, if there is a folder."""
        self._flush()
        done = self.progress
        finished = status == "finished"
        throughput = {"images_per_second": self._rate(), "seconds": done.seconds}
        if done.recalled:
            throughput["recalled"] = done.recalled
        if self.cache is not None and finished:
            self.cache.rate = throughput["images_per_second"]

        from_features = isinstance(self.stream, FeatureStream)
        held = isinstance(self.stream, HeldStream)
        record = replace(
            self.record,
            status=status,
            environment={
                **environment(self._device),
                "features": "kept" if from_features else "encoded",
                "pixels": "held" if held else "read",
            },
            metrics=self.metrics.compute(),
            images=done.images,
            skipped=tuple(asdict(entry) for entry in done.skipped),
            throughput=throughput,
            peak_memory=peak_memory(self._device),
            notes=done.evidence,
            started=done.started,
            finished=_now() if finished else "",
            resumed=done.resumed,
            error=error,
        )
        if self.folder is not None:
            if finished:
                record = replace(
                    record, predictions=fingerprint_predictions(self.folder)
                )
            record.save(self.folder)
        return record

    def _rate(self) -> float:
        """Measure images per second; an earlier run's where predictions came from its cache."""
        done = self.progress
        if self.cache is not None and done.recalled:
            return self.cache.rate
        images, seconds = done.timed if done.timed[0] else (done.images, done.seconds)
        return images / seconds if seconds else 0.0


def _finished(folder: Path, *, again: bool, with_evidence: bool) -> Record | None:
    """Return the record of a finished run; one that is to be run again is deleted."""
    record = load_record(folder) if (folder / RECORD).exists() else None
    if record is not None and record.status == "finished":
        try:
            verify_predictions(record, folder)
            if not again and (has_evidence(folder) or not with_evidence):
                return record
        except DamagedRunError as error:
            warnings.warn(f"{error}; running it again", stacklevel=2)
        again = True
    if again:
        for name in (RECORD, STATE, PREDICTIONS):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return None
