"""Runs: recorded completely, scored from logits, and not hurt by a kill at any moment."""

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cliquetta.atomic import exclusive
from cliquetta.data.stream import Stream
from cliquetta.errors import BusyError
from cliquetta.evaluation.predictions import (
    PREDICTIONS,
    DamagedRunError,
    load_predictions,
)
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.record import STATE, Run, find_runs, list_records, load_record
from cliquetta.evaluation.runner import WARM_UP, evaluate
from cliquetta.methods.building.state import read_header
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction
from tests._helpers.streaming import Drift, DriftConfig, made_up_dataset


def test_a_record_is_complete(drift: Drift, stream: Stream, tmp_path: Path) -> None:
    record = evaluate(drift, stream, out=tmp_path, preset="paper")
    assert load_record(tmp_path / record.id) == record == list_records(tmp_path)[0]
    assert (record.status, record.method, record.dataset) == (
        "finished",
        "Drift",
        "made-up",
    )
    assert record.settings["model"]["fingerprint"] == drift.model.fingerprint
    assert record.settings["prompts"]["fingerprint"] == drift.prompts.fingerprint
    assert (
        record.settings["stream"]["datasets"][0]["files"]
        == stream.domains[0].fingerprint
    )
    assert record.settings["config"] == {"rate": 0.1, "views": 0}
    assert record.settings["preprocessing"]["size"] == 32
    assert (record.preset, record.images) == ("paper", 50)
    # PyPI's CUDA builds leave the suffix of their version out of their metadata.
    assert torch.__version__.startswith(record.environment["versions"]["torch"])
    assert record.throughput["images_per_second"] > 0
    assert record.peak_memory["host"] > 1e6
    assert record.notes == {"path": "drift"}
    assert record.started <= record.finished
    header = read_header(tmp_path / record.id / STATE)
    assert (header["method"], header["notes"]["batches"]) == ("Drift", len(stream))


def test_predictions_and_scores_come_from_the_logits(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, stream: Stream, tmp_path: Path
) -> None:
    adapter = ZeroShot(tiny_clip, tiny_prompts, ZeroShotConfig())
    record = evaluate(adapter, stream, out=tmp_path)
    keys: list[str] = []
    stated: list[int] = []
    predicted = []
    for batch, labels in stream:
        keys += batch.keys
        stated += labels.tolist()
        predicted.append(adapter.predict(batch).probabilities)

    result = load_predictions(tmp_path / record.id)
    assert list(result.keys) == keys
    assert result.labels.tolist() == stated
    best = torch.cat(predicted).topk(5)
    assert np.array_equal(result.classes, best.indices.numpy())
    assert np.array_equal(result.probabilities, best.values.numpy())
    assert record.metrics["top1"] == pytest.approx(100 * result.correct.mean())


def test_the_method_never_sees_a_label(
    drift: Drift, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(batch: object) -> Prediction:  # of nothing else
        assert isinstance(batch, Batch)
        return Drift.predict(drift, batch)

    monkeypatch.setattr(drift, "predict", predict)
    assert evaluate(drift, stream).images == 50


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_predictions_are_named_and_run_again(
    run: Any, tmp_path: Path, damage: str
) -> None:
    record = run()
    path = tmp_path / record.id / PREDICTIONS
    complete = path.read_bytes()
    assert record.predictions["bytes"] == len(complete)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            complete[:-30] if damage == "cut" else complete.replace(b"5", b"6", 1)
        )
    for read in (
        lambda: Run(record, path.parent).predictions,
        lambda: find_runs([tmp_path]),
    ):
        with pytest.raises(DamagedRunError, match=record.id):
            read()
    with pytest.warns(UserWarning, match="again"):
        again = run()
    assert path.read_bytes() == complete
    assert (again.status, again.predictions) == ("finished", record.predictions)


@pytest.mark.parametrize("save_every", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_that_broke_off_continues_bit_equally(
    run: Any, tmp_path: Path, stop: int, save_every: int
) -> None:
    def interrupt(step: Step) -> None:
        if step.number == stop:
            raise InterruptedError("at a batch")

    complete = run(out=tmp_path / "complete")
    out = tmp_path / "broken"
    with pytest.raises(InterruptedError):
        run(out=out, on_step=interrupt, save_every=save_every)
    broken = load_record(out / complete.id)
    assert broken.status == "failed"
    assert broken.error == "InterruptedError: at a batch"

    record = run(out=out, save_every=save_every)
    assert record.resumed == (stop >= save_every)
    assert record.metrics == complete.metrics
    assert record.images == complete.images
    name = f"{complete.id}/{PREDICTIONS}"
    expected = (tmp_path / "complete" / name).read_bytes()
    assert (out / name).read_bytes() == expected


def test_predictions_can_be_read_while_they_are_written(
    run: Any, tmp_path: Path
) -> None:
    lengths = []

    def look(step: Step) -> None:
        assert step.accuracy is not None  # whoever asks finds all of it on disk
        (folder,) = tmp_path.iterdir()
        lengths.append(len(load_predictions(folder)))
        assert load_record(folder).status == "running"

    once = [8, 16, 24, 32, 40, 48, 50]
    for _ in range(2):  # the second time it is not run
        run(on_step=look)
        assert lengths == once
    run(on_step=look, again=True)
    assert lengths == 2 * once


def test_two_processes_cannot_share_a_run(run: Any, tmp_path: Path) -> None:
    record = run()
    with exclusive(tmp_path / record.id), pytest.raises(BusyError):
        run(again=True)
    assert run() == record


def test_a_stream_and_a_method_that_do_not_fit_are_refused(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, stream: Stream
) -> None:
    with pytest.raises(ValueError, match="views"):
        evaluate(Drift(tiny_clip, tiny_prompts, DriftConfig(views=4)), stream)
    with pytest.raises(ValueError, match="5 classes"):
        evaluate(
            ZeroShot(tiny_clip, ClassPrompts(("cat", "dog")), ZeroShotConfig()), stream
        )


def test_an_unlabelled_stream_is_predicted_without_scores(
    drift: Drift, tiny_clip: CLIP, tmp_path: Path
) -> None:
    stream = Stream(
        made_up_dataset(labelled=False), tiny_clip.preprocess, batch_size=16
    )
    record = evaluate(drift, stream, out=tmp_path)
    assert record.metrics == {"labelled": 0}
    assert (load_predictions(tmp_path / record.id).labels == -1).all()


def test_a_stream_that_is_sorted_by_class_is_warned_of(
    drift: Drift, tiny_clip: CLIP, tiny_prompts: ClassPrompts
) -> None:
    """Where order tells something: not shuffled, not without memory, not without labels."""
    preprocess = tiny_clip.preprocess
    listed = Stream(made_up_dataset(), preprocess, batch_size=16, order="sequential")
    with pytest.warns(UserWarning, match="class by class"):
        evaluate(drift, listed)
    unlabelled = made_up_dataset(labelled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(drift, Stream(made_up_dataset(), preprocess, batch_size=16))
        evaluate(
            drift, Stream(unlabelled, preprocess, batch_size=16, order="sequential")
        )
        evaluate(ZeroShot(tiny_clip, tiny_prompts, ZeroShotConfig()), listed)


class SlowStart(ZeroShot):
    """Zero-shot whose first batches take a tenth of a second longer."""

    batches_seen = 0

    def _predict(self, batch: Batch) -> Prediction:
        self.batches_seen += 1
        if self.batches_seen <= WARM_UP:
            time.sleep(0.1)
        return super()._predict(batch)


def test_the_rate_leaves_the_warm_up_out(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, stream: Stream
) -> None:
    assert len(stream) > WARM_UP
    adapter = SlowStart(tiny_clip, tiny_prompts, ZeroShotConfig())
    record = evaluate(adapter, stream)
    seconds = record.throughput["seconds"]
    assert seconds > 0.1 * WARM_UP
    with_warm_up = record.images / seconds
    assert record.throughput["images_per_second"] > 2 * with_warm_up
