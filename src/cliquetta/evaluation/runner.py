"""Run a method over a stream, score it, and lose nothing when the process dies.

Every so often the method's memory, the scores and the length of the prediction file are saved
together, in one file that is replaced as a whole. A run that is taken up again cuts its predictions
back to that length and continues; what it writes is bit-equal to a run that was never stopped.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cliquetta.atomic import exclusive
from cliquetta.data.prepared import (
    FeatureBatch,
    FeatureStream,
    HeldStream,
    PreparedStream,
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
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.state import fitted_fingerprint, save_state, unpack_state
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import name_of, require_features_only
from cliquetta.types import Batch, Prediction

if TYPE_CHECKING:
    from cliquetta.evaluation.distributed import Team

AnyStream = Stream | PreparedStream[Any, Any]
AnyBatch = Batch | FeatureBatch
SCORE_SECONDS = 0.2
"""Batches wait this long, at most, to be scored and written together."""


@dataclass(frozen=True)
class Step:
    """One batch done, for progress bars and reports."""

    number: int
    """Batches done, this one included."""
    batches: int
    images: int
    """Images done."""
    batch: AnyBatch
    labels: Tensor
    prediction: Prediction
    score: Callable[[], float | None]

    @property
    def accuracy(self) -> float | None:
        """Top-1 so far in percent, ``None`` without labels; everything so far is then on disk."""
        return self.score()


class Answers:
    """What an independent method said of each image: the seeds of a grid need not ask again.

    Neither order nor company changes such an answer. That the seed does not is checked with the
    first batch of every run, which is always asked; where it does, nothing is recalled.
    """

    def __init__(self) -> None:
        self.logits: dict[str, Tensor] = {}
        self.evidence: Mapping[str, Any] = {}
        self.rate = 0.0
        """Images/s of the run that was asked last."""

    def predict(self, adapter: Adapter, batch: Batch, *, first: bool) -> tuple[Prediction, int]:
        """The prediction of a batch, and how many of its images were not asked again."""
        rows = [at for at, key in enumerate(batch.keys) if first or key not in self.logits]
        if rows:
            keys = tuple(batch.keys[row] for row in rows)
            views = None if batch.views is None else batch.views[rows]
            some = batch if len(rows) == len(batch) else Batch(batch.images[rows], keys, views)
            said = adapter.predict(some)
            logits, self.evidence = said.logits.cpu(), said.evidence
            for key, row in zip(keys, logits, strict=True):
                if not self._agree(self.logits.get(key), row, adapter):
                    self.logits.clear()
            self.logits.update(zip(keys, logits, strict=True))
        return (
            Prediction(torch.stack([self.logits[key] for key in batch.keys]), self.evidence),
            len(batch) - len(rows),
        )

    def _agree(self, before: Tensor | None, now: Tensor, adapter: Adapter) -> bool:
        """Whether an answer is the old one up to rounding."""
        share = 1e-3 if adapter.model.dtype == torch.float32 else 2e-2
        tolerance = share * float(adapter.model.scale)
        return before is None or torch.allclose(before, now, rtol=0, atol=tolerance)


@dataclass
class _Progress:
    """Where a run stands; all of it is saved with the method's memory."""

    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    """Spent predicting."""
    timed: tuple[int, float] = (0, 0.0)
    """Images and seconds without the first batch of a process, in which kernels are chosen."""
    recalled: int = 0
    """Images that :class:`Answers` knew."""
    written: int = 0
    """Length of the prediction file in bytes."""
    resumed: int = 0
    started: str = ""
    skipped: tuple[Skipped, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the last prediction's evidence."""

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> _Progress:
        skipped = tuple(Skipped(**entry) for entry in notes["skipped"])
        return cls(**{**notes, "skipped": skipped})


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
    answers: Answers | None = None,
    team: Team | None = None,
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
        answers: What the method said of these images before, if it treats each image alone.
        team: The processes that call this together; one of them writes, and the others begin
            where it does.

    Returns:
        The record of the finished run.

    Raises:
        UserError: If method and stream do not fit together.

    """
    stream = from_given_features(stream, adapter.model)
    _check(adapter, stream)
    run = _Run(adapter, stream, plan(adapter, stream, preset), answers)
    with run.opened(out, again, evidence, team) as known:
        if known is not None:
            return known
        saved_at, saved_batch = time.monotonic(), run.progress.batches
        for batch, labels in stream.batches(run.progress.batches):
            prediction = run.predict(batch)
            run.keep(batch, labels, prediction)
            late = time.monotonic() - saved_at >= save_seconds
            if late or run.progress.batches - saved_batch >= save_every:
                run.save()
                saved_at, saved_batch = time.monotonic(), run.progress.batches
            step = run.step(batch, labels, prediction)
            if run.evidence is not None:
                run.evidence(step)
            if on_step is not None:
                on_step(step)
    return run.summary("finished", save=True)


def plan(adapter: Adapter, stream: AnyStream, preset: str | None = None) -> Record:
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


def _check(adapter: Adapter, stream: AnyStream) -> None:
    """Refuse pairs that cannot be scored."""
    if isinstance(stream, FeatureStream):
        require_features_only(type(adapter), name_of(adapter), towers=True)
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


class _Run:
    """What one execution of a run holds, fresh or taken up again."""

    def __init__(
        self, adapter: Adapter, stream: AnyStream, record: Record, answers: Answers | None
    ) -> None:
        self.adapter, self.stream, self.record, self.answers = adapter, stream, record, answers
        self.folder: Path | None = None
        self.log: PredictionLog | None = None
        self.evidence: EvidenceLog | None = None
        self.metrics = Metrics(len(adapter.prompts))
        self.progress = _Progress(started=_now())
        self._skipped: tuple[Skipped, ...] = ()
        self._first = True
        self._waiting: list[tuple[AnyBatch, Tensor, Tensor]] = []
        self._scored_at = time.monotonic()
        self._cuda = adapter.model.device.type == "cuda"

    @contextmanager
    def opened(
        self,
        out: Path | str | None,
        again: bool,
        evidence: EvidenceLimits | None,
        team: Team | None,
    ) -> Iterator[Record | None]:
        """The run's folder, locked; gives the record of a run that is finished already.

        What is inside may fail: the record then says so. All is on disk at the end.
        """
        with ExitStack() as stack:
            state = None
            if out is not None and (team is None or team.is_main_process):
                self.folder = Path(out) / self.record.id
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive(self.folder))
                known = self._finished(again, wanted=evidence is not None)
                if known is not None:
                    yield known if team is None else team.share(known)
                    return
                path = self.folder / STATE
                state = path.read_bytes() if path.exists() else None
            if team is not None:
                state = team.share(state)
                if isinstance(state, Record):
                    yield state
                    return
            self._begin(state)
            if self.folder is not None:
                log = PredictionLog(self.folder / PREDICTIONS, self.progress.written)
                self.log = stack.enter_context(log)
                if evidence is not None:
                    assert isinstance(self.stream, Stream)  # features have nothing to show
                    shown = EvidenceLog(self.folder / FOLDER, self.adapter, self.stream, evidence)
                    stack.callback(setattr, self.adapter, "explain", False)
                    self.evidence = shown
            try:
                self.summary("running", save=True)
                yield None
                self.save()
            except Exception as error:
                self.summary("failed", save=True, error=f"{type(error).__name__}: {error}")
                raise

    def _finished(self, again: bool, *, wanted: bool) -> Record | None:
        """The record of a finished run; the traces of one that is to be run again are removed."""
        assert self.folder is not None
        known = load_record(self.folder) if (self.folder / RECORD).exists() else None
        done = known is not None and known.status == "finished"
        lacking = wanted and not has_evidence(self.folder)
        if known is not None and done:
            try:
                verify_predictions(known, self.folder)
            except DamagedRunError as error:
                warnings.warn(f"{error}; running it again", stacklevel=2)
                again = True
        if again or (done and lacking):
            for name in (RECORD, STATE, PREDICTIONS):
                (self.folder / name).unlink(missing_ok=True)
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
            return None
        return known if done else None

    def _begin(self, state: bytes | None) -> None:
        """Start afresh, or take up the saved state."""
        self.adapter.reset()
        if state is not None:
            source = "the state" if self.folder is None else str(self.folder / STATE)
            saved = unpack_state(self.adapter, state, source=source)
            self.metrics.load_state_dict(saved.extra)
            self.progress = _Progress.from_notes(saved.notes)
            self.progress.resumed += 1
        self._skipped = self.progress.skipped
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.adapter.model.device)

    def predict(self, batch: AnyBatch) -> Prediction:
        """The method's answer, timed; only the batch goes in, never a label."""
        start, recalled = time.perf_counter(), 0
        if self.answers is not None and isinstance(batch, Batch) and len(batch):
            prediction, recalled = self.answers.predict(self.adapter, batch, first=self._first)
        elif isinstance(batch, Batch):
            prediction = self.adapter.predict(batch)
        else:
            assert isinstance(self.adapter, FeatureLevel)
            prediction = self.adapter.predict_features(batch.features)
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
        """Count a batch; it is scored and written at once if the last time was long ago."""
        self.progress.batches += 1
        self.progress.images += len(batch)
        self.progress.skipped = self._skipped + tuple(self.stream.skipped)
        self._waiting.append((batch, labels, prediction.logits))
        if time.monotonic() - self._scored_at >= SCORE_SECONDS:
            self._score()

    def _score(self) -> None:
        """Score and write what is waiting."""
        if self._waiting:
            batches, labels, logits = zip(*self._waiting, strict=True)
            self._waiting = []
            known, scores = torch.cat(labels), torch.cat([part.cpu() for part in logits])
            self.metrics.update(scores, known, [len(part) for part in labels])
            if self.log is not None:
                keys = [key for batch in batches for key in batch.keys]
                self.log.append(keys, known, scores)
        self._scored_at = time.monotonic()

    def accuracy(self) -> float | None:
        """Top-1 so far in percent."""
        self._score()
        return self.metrics.accuracy

    def step(self, batch: AnyBatch, labels: Tensor, prediction: Prediction) -> Step:
        """What observers are told."""
        done = self.progress
        total = len(self.stream)
        return Step(done.batches, total, done.images, batch, labels, prediction, self.accuracy)

    def save(self) -> None:
        """Predictions first, then the state that says how many of them count."""
        self._score()
        if self.folder is None or self.log is None:
            return
        self.progress.written = self.log.sync()
        save_state(
            self.adapter,
            self.folder / STATE,
            extra=self.metrics.state_dict(),
            notes=asdict(self.progress),
        )

    def summary(self, status: Any, *, save: bool = False, error: str = "") -> Record:
        """The record as things stand."""
        self._score()
        done = self.progress
        images, seconds = done.timed if done.timed[0] else (done.images, done.seconds)
        rate = images / seconds if seconds else 0.0
        if self.answers is not None and done.recalled:
            rate = self.answers.rate
        elif self.answers is not None and status == "finished":
            self.answers.rate = rate
        throughput = {"images_per_second": rate, "seconds": done.seconds}
        kept = "kept" if isinstance(self.stream, FeatureStream) else "encoded"
        where = {**environment(self.adapter.model.device), "features": kept}
        where["pixels"] = "held" if isinstance(self.stream, HeldStream) else "read"
        record = replace(
            self.record,
            status=status,
            environment=where,
            metrics=self.metrics.compute(),
            images=done.images,
            skipped=tuple(asdict(entry) for entry in done.skipped),
            throughput=throughput | ({"recalled": done.recalled} if done.recalled else {}),
            peak_memory=peak_memory(self.adapter.model.device),
            notes=done.evidence,
            started=done.started,
            finished=_now() if status == "finished" else "",
            resumed=done.resumed,
            error=error,
        )
        if status == "finished" and self.folder is not None:
            record = replace(record, predictions=fingerprint_predictions(self.folder))
        if save and self.folder is not None:
            record.save(self.folder)
        return record


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
