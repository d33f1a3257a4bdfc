"""Run a method over a stream, score it, and lose nothing when the process dies.

Every so often the method's memory, the scores and the length of the prediction file are saved
together, in one file that is replaced as a whole. A run that is taken up again cuts its predictions
back to that length and continues; what it writes is bit-equal to a run that was never stopped.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.atomic import exclusive
from cliquetta.data.prepared import (
    AnyBatch,
    AnyStream,
    FeatureStream,
    HeldStream,
    from_given_features,
)
from cliquetta.data.stream import Skipped, Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.evidence_log import FOLDER, EvidenceLimits, EvidenceLog, has_evidence
from cliquetta.evaluation.metrics import Metrics
from cliquetta.evaluation.predictions import (
    PREDICTIONS,
    DamagedRunError,
    PredictionLog,
    fingerprint_predictions,
)
from cliquetta.evaluation.progress import RunProgress, Step, now
from cliquetta.evaluation.record import (
    RECORD,
    STATE,
    Record,
    describe_run,
    environment,
    load_record,
    peak_memory,
    run_id,
    verify_predictions,
)
from cliquetta.inference.predictor import predict_batch
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import require_features_only
from cliquetta.methods.state import fitted_fingerprint, unpack_state
from cliquetta.types import Batch, Prediction

SCORE_SECONDS = 0.2
"""Batches wait this long, at most, to be scored and written together."""


def evaluate(
    adapter: Adapter,
    stream: AnyStream,
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
    """Predict the whole stream with a reset adapter and score it.

    Args:
        adapter: The method.
        stream: Images with labels, with the views that the method wants.
        out: Folder of runs; this one lives in ``out/<id>``. A finished one is returned at once, a
            broken-off one is continued. ``None`` writes nothing.
        preset: Name of the settings that the adapter's config was made from, for the record.
        on_step: Is called after every batch.
        save_every: Batches after which state is saved, or
        save_seconds: seconds, whichever comes first.
        again: Run a finished one again.
        evidence: Keep what reports show, too; needs ``out``. A run that was finished without is
            run again.
        cache: Earlier predictions of these images, if the method treats each image alone.

    Returns:
        The record of the finished run.

    Raises:
        UserError: If method and stream do not fit together.

    """
    stream = from_given_features(stream, adapter.model)
    _check(adapter, stream)
    run = Execution(adapter, stream, plan(adapter, stream, preset), cache)
    with run.opened(out, again, evidence) as known:
        if known is not None:
            return known
        saved_at, saved_batch = time.monotonic(), run.progress.batches
        for batch, labels in stream.batches(run.progress.batches):
            prediction = run.predict(batch)
            run.keep(batch, labels, prediction)
            step = run.step(batch, labels, prediction)
            if run.evidence is not None:
                run.evidence(step)
            late = time.monotonic() - saved_at >= save_seconds
            if late or run.progress.batches - saved_batch >= save_every:
                run.save()
                saved_at, saved_batch = time.monotonic(), run.progress.batches
            if on_step is not None:
                on_step(step)
    return run.summary("finished", save=True)


def plan(adapter: Adapter, stream: AnyStream, preset: str | None = None) -> Record:
    """The record of a run before it runs: its id and its settings."""
    settings = describe_run(
        method=adapter.name,
        config=adapter.config,
        seed=adapter.seed,
        model=adapter.model,
        prompts=adapter.prompts,
        stream=stream,
        fitted=fitted_fingerprint(adapter),
    )
    return Record(run_id(settings), settings, preset=preset)


def _check(adapter: Adapter, stream: AnyStream) -> None:
    """Refuse pairs that cannot be scored."""
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


class Scorer:
    """The metrics of a run and, where it has a folder, the file of its predictions."""

    def __init__(self, classes: int) -> None:
        self.metrics = Metrics(classes)
        self.log: PredictionLog | None = None
        self._waiting: list[tuple[Sequence[str], Tensor, Tensor]] = []
        self._flushed_at = time.monotonic()

    def add(self, keys: Sequence[str], labels: Tensor, logits: Tensor) -> None:
        """Take a batch; it is scored and written at once if the last time was long ago."""
        self._waiting.append((keys, labels, logits))
        if time.monotonic() - self._flushed_at >= SCORE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Score and write what is waiting."""
        if self._waiting:
            keys, labels, logits = zip(*self._waiting, strict=True)
            self._waiting = []
            known, scores = torch.cat(labels), torch.cat([part.cpu() for part in logits])
            self.metrics.update(scores, known, [len(part) for part in labels])
            if self.log is not None:
                self.log.append([key for part in keys for key in part], known, scores)
        self._flushed_at = time.monotonic()

    def accuracy(self) -> float | None:
        """Top-1 so far in percent."""
        self.flush()
        return self.metrics.accuracy


class PredictionCache:
    """The predictions of an independent method, by image.

    Neither order nor batch changes such a prediction. That the seed does not either is checked on
    the first batch of every run, which is always computed; where it does, the cache is emptied.
    """

    def __init__(self) -> None:
        self.logits: dict[str, Tensor] = {}
        self.evidence: Mapping[str, Any] = {}
        self.rate = 0.0
        """Images/s of the last run that computed its predictions."""

    def predict(self, adapter: Adapter, batch: Batch, *, first: bool) -> tuple[Prediction, int]:
        """The prediction of a batch, and how many of its images came from the cache."""
        rows = [at for at, key in enumerate(batch.keys) if first or key not in self.logits]
        if rows:
            keys = tuple(batch.keys[row] for row in rows)
            views = None if batch.views is None else batch.views[rows]
            some = batch if len(rows) == len(batch) else Batch(batch.images[rows], keys, views)
            said = adapter.predict(some)
            logits, self.evidence = said.logits.cpu(), said.evidence
            for key, row in zip(keys, logits, strict=True):
                if not _agree(self.logits.get(key), row, adapter):
                    self.logits.clear()
            self.logits.update(zip(keys, logits, strict=True))
        return (
            Prediction(torch.stack([self.logits[key] for key in batch.keys]), self.evidence),
            len(batch) - len(rows),
        )


def _agree(before: Tensor | None, now: Tensor, adapter: Adapter) -> bool:
    """Whether logits are the old ones up to rounding."""
    share = 1e-3 if adapter.model.dtype == torch.float32 else 2e-2
    tolerance = share * float(adapter.model.scale)
    return before is None or torch.allclose(before, now, rtol=0, atol=tolerance)


class Execution:
    """One execution of a run, fresh or resumed."""

    def __init__(
        self, adapter: Adapter, stream: AnyStream, record: Record, cache: PredictionCache | None
    ) -> None:
        self.adapter, self.stream, self.record, self.cache = adapter, stream, record, cache
        self.folder: Path | None = None
        self.evidence: EvidenceLog | None = None
        self.scorer = Scorer(len(adapter.prompts))
        self.progress = RunProgress()
        self._skipped: tuple[Skipped, ...] = ()
        self._first = True
        self._cuda = adapter.model.device.type == "cuda"

    @contextmanager
    def opened(
        self, out: Path | str | None, again: bool, evidence: EvidenceLimits | None
    ) -> Iterator[Record | None]:
        """The run's folder, locked; gives the record of a run that is finished already.

        What is inside may fail: the record then says so. All is on disk at the end.
        """
        with ExitStack() as stack:
            known: Record | bytes | None = None
            if out is not None:
                self.folder = Path(out) / self.record.id
                stack.enter_context(exclusive(self.folder))
                known = _found(self.folder, again=again, with_evidence=evidence is not None)
            if isinstance(known, Record):
                yield known
                return
            self._begin(known)
            if self.folder is not None:
                log = PredictionLog(self.folder / PREDICTIONS, self.progress.written)
                self.scorer.log = stack.enter_context(log)
                if evidence is not None:
                    assert isinstance(self.stream, Stream)  # features have nothing to show
                    shown = EvidenceLog(
                        *(self.folder / FOLDER, self.adapter, self.stream, evidence),
                        done=self.progress.batches,
                    )
                    stack.callback(setattr, self.adapter, "collect_evidence", False)
                    self.evidence = shown
            try:
                self.summary("running", save=True)
                yield None
                self.save()
            except Exception as error:
                self.summary("failed", save=True, error=f"{type(error).__name__}: {error}")
                raise

    def _begin(self, state: bytes | None) -> None:
        """Start afresh, or take up the saved state."""
        self.adapter.reset()
        if state is not None:
            source = "the state" if self.folder is None else str(self.folder / STATE)
            saved = unpack_state(self.adapter, state, source=source)
            self.scorer.metrics.load_state_dict(saved.extra)
            self.progress = RunProgress.from_notes(saved.notes)
            self.progress.resumed += 1
        self._skipped = self.progress.skipped
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.adapter.model.device)

    def predict(self, batch: AnyBatch) -> Prediction:
        """The method's answer, timed; only the batch goes in, never a label."""
        start, recalled = time.perf_counter(), 0
        if self.cache is not None and isinstance(batch, Batch) and len(batch):
            prediction, recalled = self.cache.predict(self.adapter, batch, first=self._first)
        else:
            prediction = predict_batch(self.adapter, batch)
        if self._cuda:
            torch.cuda.synchronize(self.adapter.model.device)
        took, progress = time.perf_counter() - start, self.progress
        progress.seconds += took
        progress.recalled += recalled
        if not self._first and not recalled:
            images, seconds = progress.timed
            progress.timed = (images + len(batch), seconds + took)
        self._first = False
        plain = {k: v for k, v in prediction.evidence.items() if isinstance(v, int | float | str)}
        progress.evidence = plain or progress.evidence
        return prediction

    def keep(self, batch: AnyBatch, labels: Tensor, prediction: Prediction) -> None:
        """Count a batch and hand it to the scorer."""
        self.progress.batches += 1
        self.progress.images += len(batch)
        self.progress.skipped = self._skipped + tuple(self.stream.skipped)
        self.scorer.add(batch.keys, labels, prediction.logits)

    def step(self, batch: AnyBatch, labels: Tensor, prediction: Prediction) -> Step:
        """The step that observers get."""
        done, total, score = self.progress, len(self.stream), self.scorer.accuracy
        return Step(done.batches, total, done.images, batch, labels, prediction, score)

    def save(self) -> None:
        """Predictions first, then the state that says how many of them count."""
        self.scorer.flush()
        if self.folder is None or self.scorer.log is None:
            return
        self.progress.written = self.scorer.log.sync()
        extra, notes = self.scorer.metrics.state_dict(), asdict(self.progress)
        self.adapter.save(self.folder / STATE, extra=extra, notes=notes)

    def summary(self, status: Any, *, save: bool = False, error: str = "") -> Record:
        """The record as things stand."""
        self.scorer.flush()
        done = self.progress
        rate = done.images_per_second
        if self.cache is not None and done.recalled:
            rate = self.cache.rate
        elif self.cache is not None and status == "finished":
            self.cache.rate = rate
        throughput = {"images_per_second": rate, "seconds": done.seconds}
        kept = "kept" if isinstance(self.stream, FeatureStream) else "encoded"
        where = {**environment(self.adapter.model.device), "features": kept}
        where["pixels"] = "held" if isinstance(self.stream, HeldStream) else "read"
        record = replace(
            self.record,
            status=status,
            environment=where,
            metrics=self.scorer.metrics.compute(),
            images=done.images,
            skipped=tuple(asdict(entry) for entry in done.skipped),
            throughput=throughput | ({"recalled": done.recalled} if done.recalled else {}),
            peak_memory=peak_memory(self.adapter.model.device),
            notes=done.evidence,
            started=done.started,
            finished=now() if status == "finished" else "",
            resumed=done.resumed,
            error=error,
        )
        if status == "finished" and self.folder is not None:
            record = replace(record, predictions=fingerprint_predictions(self.folder))
        if save and self.folder is not None:
            record.save(self.folder)
        return record


def _found(folder: Path, *, again: bool, with_evidence: bool) -> Record | bytes | None:
    """The record of a finished run, or the state of a broken-off one.

    The traces of a run that is to be run again are removed.
    """
    known = load_record(folder) if (folder / RECORD).exists() else None
    done = known is not None and known.status == "finished"
    lacking = with_evidence and not has_evidence(folder)
    if known is not None and done:
        try:
            verify_predictions(known, folder)
        except DamagedRunError as error:
            warnings.warn(f"{error}; running it again", stacklevel=2)
            again = True
    if again or (done and lacking):
        for name in (RECORD, STATE, PREDICTIONS):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        return None
    if done:
        return known
    state = folder / STATE
    return state.read_bytes() if state.exists() else None
