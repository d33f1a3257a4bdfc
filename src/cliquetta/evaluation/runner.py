"""Run a method over a stream, score it, and lose nothing when the process dies.

Every so often the method's memory, the scores and the length of the prediction file are saved
together, in one file that is replaced as a whole. A run that is taken up again cuts its predictions
back to that length and continues; what it writes is bit-equal to a run that was never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cliquetta.atomic import exclusive
from cliquetta.data.prepared import FeatureBatch, FeatureStream
from cliquetta.data.stream import Skipped, Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.metrics import Metrics
from cliquetta.evaluation.predictions import PredictionLog
from cliquetta.evaluation.record import (
    PREDICTIONS,
    RECORD,
    STATE,
    Record,
    describe_run,
    environment,
    load_record,
    peak_memory,
    run_id,
)
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.state import fitted_fingerprint, save_state, unpack_state
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import name_of
from cliquetta.types import Batch, Prediction

if TYPE_CHECKING:
    from cliquetta.evaluation.distributed import Team


@dataclass(frozen=True)
class Step:
    """One batch done, for progress bars and reports."""

    number: int
    """Batches done, this one included."""
    batches: int
    images: int
    """Images done."""
    batch: Batch | FeatureBatch
    labels: Tensor
    prediction: Prediction
    accuracy: float | None
    """Top-1 so far in percent, ``None`` without labels."""


@dataclass
class _Progress:
    """Where a run stands; all of it is saved with the method's memory."""

    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    """Spent predicting."""
    written: int = 0
    """Length of the prediction file in bytes."""
    resumed: int = 0
    started: str = ""
    skipped: tuple[Skipped, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the last prediction's evidence."""

    def notes(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> _Progress:
        skipped = tuple(Skipped(**entry) for entry in notes["skipped"])
        return cls(**{**notes, "skipped": skipped})


def evaluate(
    adapter: Adapter,
    stream: Stream | FeatureStream,
    *,
    out: Path | str | None = None,
    preset: str | None = None,
    on_step: Callable[[Step], None] | None = None,
    save_every: int = 100,
    save_seconds: float = 20.0,
    again: bool = False,
    team: Team | None = None,
) -> Record:
    """Predict the whole stream with a reset adapter and score it.

    With ``out`` the run lives in ``out/<id>``: a finished one is returned at once (unless
    ``again``), a broken-off one is continued. State is saved after ``save_every`` batches or
    ``save_seconds``, whichever comes first. Without ``out`` nothing is written. All processes of
    a ``team`` call this together; one of them writes, and the others begin where it does.
    """
    _check(adapter, stream)
    record = plan(adapter, stream, preset)
    if out is None or not (team is None or team.leads):
        begin = None if team is None else team.share(None)
        if isinstance(begin, Record):
            return begin
        run = _Run(adapter, stream, record, None, begin)
        return run.execute(on_step, save_every, save_seconds)
    folder = Path(out) / record.id
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        if again:
            for name in (RECORD, STATE, PREDICTIONS):
                (folder / name).unlink(missing_ok=True)
        elif (folder / RECORD).exists():
            known = load_record(folder)
            if known.status == "finished":
                return known if team is None else team.share(known)
        state = (folder / STATE).read_bytes() if (folder / STATE).exists() else None
        if team is not None:
            team.share(state)
        run = _Run(adapter, stream, record, folder, state)
        return run.execute(on_step, save_every, save_seconds)


def plan(adapter: Adapter, stream: Stream | FeatureStream, preset: str | None = None) -> Record:
    """The record of a run before it runs: its id and its settings."""
    settings = describe_run(
        method=name_of(adapter),
        config=adapter.config,
        seed=adapter.seed,
        model=adapter.model,
        prompts=adapter.prompts,
        stream=stream,
        fitted=fitted_fingerprint(adapter),
    )
    return Record(run_id(settings), settings, preset=preset)


def _check(adapter: Adapter, stream: Stream | FeatureStream) -> None:
    """Refuse pairs that cannot be scored."""
    if isinstance(stream, FeatureStream) and not isinstance(adapter, FeatureLevel):
        raise UserError(
            f"{name_of(adapter)} looks at pixels, not at features only; give it the Stream itself"
        )
    if stream.views != adapter.views:
        raise UserError(
            f"the stream carries views {stream.views}, the method wants {adapter.views}; build "
            "it with Stream(..., views=adapter.views)"
        )
    if len(stream.names) != len(adapter.prompts):
        raise UserError(
            f"{stream.id} labels {len(stream.names)} classes, the method tells "
            f"{len(adapter.prompts)} apart; build it with the prompts of the data set"
        )


def _answer(adapter: Adapter, batch: Batch | FeatureBatch) -> Prediction:
    if isinstance(batch, Batch):
        return adapter.predict(batch)
    assert isinstance(adapter, FeatureLevel)
    return adapter.predict_features(batch.features)


class _Run:
    """One execution of a run, fresh or taken up again from ``state``."""

    def __init__(
        self,
        adapter: Adapter,
        stream: Stream | FeatureStream,
        record: Record,
        folder: Path | None,
        state: bytes | None,
    ) -> None:
        self.adapter = adapter
        self.stream = stream
        self.record = record
        self.folder = folder
        self.state = state
        self.metrics = Metrics(len(adapter.prompts))
        self.progress = _Progress(started=_now())
        self._cuda = adapter.model.device.type == "cuda"

    def execute(
        self, on_step: Callable[[Step], None] | None, save_every: int, save_seconds: float
    ) -> Record:
        """Run to the end of the stream."""
        self.adapter.reset()
        self._resume()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.adapter.model.device)
        self._save_record(self._summary("running"))
        try:
            if self.folder is None:
                self._loop(None, on_step, save_every, save_seconds)
            else:
                with PredictionLog(self.folder / PREDICTIONS, self.progress.written) as log:
                    self._loop(log, on_step, save_every, save_seconds)
                    self._save(log)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._save_record(replace(self._summary("failed"), error=reason))
            raise
        record = self._summary("finished")
        self._save_record(record)
        return record

    def _resume(self) -> None:
        """Take up the saved state, if there is one."""
        if self.state is None:
            return
        source = "the state" if self.folder is None else str(self.folder / STATE)
        saved = unpack_state(self.adapter, self.state, source=source)
        self.metrics.load_state_dict(saved.extra)
        self.progress = _Progress.from_notes(saved.notes)
        self.progress.resumed += 1

    def _loop(
        self,
        log: PredictionLog | None,
        on_step: Callable[[Step], None] | None,
        save_every: int,
        save_seconds: float,
    ) -> None:
        progress, before = self.progress, self.progress.skipped
        saved_at, saved_batch = time.monotonic(), progress.batches
        for batch, labels in self.stream.batches(progress.batches):
            prediction = self._predict(batch)
            self.metrics.update(prediction.logits, labels)
            progress.batches += 1
            progress.images += len(batch)
            progress.skipped = before + tuple(self.stream.skipped)
            if log is not None:
                log.append(batch.keys, labels, prediction.logits)
                late = time.monotonic() - saved_at >= save_seconds
                if late or progress.batches - saved_batch >= save_every:
                    self._save(log)
                    saved_at, saved_batch = time.monotonic(), progress.batches
            if on_step is not None:
                on_step(self._step(batch, labels, prediction))

    def _predict(self, batch: Batch | FeatureBatch) -> Prediction:
        """The method's answer, timed; only the batch goes in, never a label."""
        start = time.perf_counter()
        prediction = _answer(self.adapter, batch)
        if self._cuda:
            torch.cuda.synchronize(self.adapter.model.device)
        self.progress.seconds += time.perf_counter() - start
        plain = {k: v for k, v in prediction.evidence.items() if isinstance(v, int | float | str)}
        self.progress.evidence = plain or self.progress.evidence
        return prediction

    def _step(self, batch: Batch | FeatureBatch, labels: Tensor, prediction: Prediction) -> Step:
        done = self.progress
        return Step(
            done.batches,
            len(self.stream),
            done.images,
            batch,
            labels,
            prediction,
            self.metrics.accuracy,
        )

    def _save(self, log: PredictionLog) -> None:
        """Predictions first, then the state that says how many of them count."""
        assert self.folder is not None
        self.progress.written = log.sync()
        save_state(
            self.adapter,
            self.folder / STATE,
            extra=self.metrics.state_dict(),
            notes=self.progress.notes(),
        )

    def _save_record(self, record: Record) -> None:
        if self.folder is not None:
            record.save(self.folder)

    def _summary(self, status: Any) -> Record:
        done = self.progress
        rate = done.images / done.seconds if done.seconds else 0.0
        return replace(
            self.record,
            status=status,
            environment={
                **environment(self.adapter.model.device),
                "features": "kept" if isinstance(self.stream, FeatureStream) else "encoded",
            },
            metrics=self.metrics.compute(),
            images=done.images,
            skipped=tuple(asdict(entry) for entry in done.skipped),
            throughput={"images_per_second": rate, "seconds": done.seconds},
            peak_memory=peak_memory(self.adapter.model.device),
            notes=done.evidence,
            started=done.started,
            finished=_now() if status == "finished" else "",
            resumed=done.resumed,
        )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
