"""One visitor's session without widgets: predictions, limits, states."""

import csv
import io
from copy import copy
from pathlib import Path

import pytest

from cliquetta.app import session as app_session
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import ArrayDataset
from cliquetta.data.stream import Stream
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.settings import Limits
from cliquetta.types import Batch, Prediction
from tests._helpers.building import assert_same_state
from tests._helpers.serve_setup import picture
from tests.app.conftest import FOG, NAMES, Make, photos, predicted


def test_predictions_are_those_of_the_library(make: Make, tiny_clip: CLIP) -> None:
    session = make("tent")
    prompts = ClassPrompts(NAMES)
    adapter = create_method("tent", tiny_clip, prompts)
    classifier = tiny_clip.classifier(prompts)
    stream = Stream(get_dataset("bundled@fog:3"), tiny_clip.preprocess, 6)
    for (batch, labels), _ in zip(stream, range(2), strict=False):
        shown = session.next_of_stream(*FOG)
        after = adapter.predict(batch).probabilities.max(dim=-1)
        before = (
            tiny_clip.encode_image(batch.images, normalize=True) @ classifier.T
        ).argmax(-1)
        assert [row.name for row in shown.rows] == list(batch.keys)
        assert [row.after for row in shown.rows] == [NAMES[i] for i in after.indices]
        assert [row.after_probability for row in shown.rows] == after.values.tolist()
        assert [row.before for row in shown.rows] == [NAMES[i] for i in before]
        names = stream.names
        expected = [names[i] if names[i] in NAMES else None for i in labels.tolist()]
        assert [row.truth for row in shown.rows] == expected


def test_labels_are_counted_and_never_change_a_prediction(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = make("tda")
    first = [honest.next_of_stream("bundled", 6) for _ in range(2)]
    rows = [row for shown in first for row in shown.rows if row.truth is not None]
    tally = honest.tally
    assert 0 < tally.labelled == len(rows) < tally.images == 12
    before, after = (
        sum(getattr(row, s) == row.truth for row in rows) for s in ("before", "after")
    )
    assert tally.right == {"before": before, "after": after}
    assert tally.curve[-1] == (len(rows), before / len(rows), after / len(rows))
    false = copy(get_dataset("bundled"))
    assert isinstance(false, ArrayDataset) and false.labels is not None
    monkeypatch.setattr(false, "labels", false.labels.flip(0))
    monkeypatch.setattr(app_session, "get_dataset", lambda id: false)
    misled = make("tda")
    second = [misled.next_of_stream("bundled", 6) for _ in range(2)]
    for one, other in zip(first, second, strict=True):
        assert predicted(one) == predicted(other)
        assert [row.truth for row in one.rows] != [row.truth for row in other.rows]


def test_a_change_of_shift_goes_on_where_the_stream_was(make: Make) -> None:
    session = make("zero_shot")
    seen = [row.name for row in session.next_of_stream(*FOG).rows]
    seen += [row.name for row in session.next_of_stream("bundled@snow:5", 9).rows]
    assert len(set(seen)) == 15
    session._position = 1999
    assert len(session.next_of_stream(*FOG).rows) == 1
    with pytest.raises(ServiceError, match="reset"):
        session.next_of_stream(*FOG)
    session.reset()
    assert [row.name for row in session.next_of_stream(*FOG).rows] == seen[:6]


def test_bad_files_are_named_and_the_others_predicted(
    make: Make, tmp_path: Path
) -> None:
    good = photos(tmp_path, range(4))
    text, cut, large = (
        tmp_path / name for name in ("notes.txt", "cut.png", "large.png")
    )
    text.write_text("no picture")
    cut.write_bytes(picture(9)[:60])
    large.write_bytes(picture(1, size=64))
    mixed = make(limits=Limits(image_pixels=32 * 32))
    alone = make()
    shown = mixed.next_of_files([good[0], text, *good[1:], cut, large], 16)
    assert predicted(shown) == predicted(alone.next_of_files(good, 16))
    reasons = {entry.name: entry.reason for entry in shown.refused}
    assert "not an image" in reasons["notes.txt"] and "truncated" in reasons["cut.png"]
    assert "too large" in reasons["large.png"]
    table = list(csv.DictReader(io.StringIO(mixed.predictions_csv().decode())))
    assert len(table) == 7
    assert [row["image"] for row in table if row["error"]] == list(reasons)
    fine = [row for row in table if not row["error"]]
    assert [row["prediction"] for row in fine] == [
        label for label, _ in predicted(shown)
    ]
    assert all(0 < float(row["probability"]) <= 1 for row in fine)


def test_files_are_predicted_in_rounds(make: Make, tmp_path: Path) -> None:
    files = photos(tmp_path, range(5))
    session = make()
    sizes = [len(session.next_of_files(files, 2).rows) for _ in range(3)]
    assert sizes == [2, 2, 1]
    with pytest.raises(ServiceError, match="others"):
        session.next_of_files(files, 2)
    assert len(session.next_of_files(files[:3], 2).rows) == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(images=2), "at most 2"),
        (Limits(body_bytes=100), "fewer images per batch"),
        (Limits(batch_seconds=1e-9), "longer than"),
    ],
)
def test_limits(make: Make, tmp_path: Path, limits: Limits, words: str) -> None:
    session = make()
    session.limits = limits
    before = session.adapter.state_dict()
    with pytest.raises(ServiceError, match=words):
        session.next_of_files(photos(tmp_path, range(3)), 2)
    assert session.batches == 0
    assert_same_state(session.adapter, before)


def test_a_failing_batch_leaves_everything_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make()
    untroubled = make()
    assert predicted(session.next_of_stream(*FOG)) == predicted(
        untroubled.next_of_stream(*FOG)
    )
    predict = session.adapter._predict

    def fail(batch: Batch) -> Prediction:
        predict(batch)  # learns
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(session.adapter, "_predict", fail)
        with pytest.raises(ServiceError, match="memory"):
            session.next_of_stream(*FOG)
    assert predicted(session.next_of_stream(*FOG)) == predicted(
        untroubled.next_of_stream(*FOG)
    )


def test_caches_are_counted_class_by_class(make: Make) -> None:
    scap, tda, tent = (make(method) for method in ("scap", "tda", "tent"))
    for session in (scap, tda, tent):
        session.next_of_stream(*FOG)
    (retained,) = scap.tally.counts[-1].values()
    assert retained.held == tuple(scap.adapter.memory["count"].tolist())
    assert retained.capacity == scap.adapter.config.capacity and sum(retained.held) > 0
    caches = tda.tally.counts[-1]
    assert set(caches) == {"positive entries", "negative entries"}
    held = caches["positive entries"].held
    predicted = [row.before for row in tda.last.rows] if tda.last else []
    assert list(held) == [min(3, predicted.count(name)) for name in NAMES]
    assert tent.adapter.cache_counts() == {}
