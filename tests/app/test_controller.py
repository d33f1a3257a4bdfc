"""The buttons: sessions of visitors, refusals, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cliquetta.app import pages as app_pages
from cliquetta.app.controller import FILES, Controller, read_classes
from cliquetta.app.session import AppSession
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.stream import Stream
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.settings import Limits, Settings
from tests._helpers.building import assert_same_state
from tests.app.conftest import FORM, NAMES, Press, photos


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" ,\n", "no class names"),
        ("a,b,c", "3 class names"),
        ("x" * 20, "10 characters"),
    ],
)
def test_class_names_are_checked(
    text: str, words: str, tiny_clip: CLIP, tmp_path: Path
) -> None:
    limits = Limits(classes=2, class_length=10)
    controller = Controller(Settings({"tiny": tiny_clip}, limits=limits), tmp_path)
    session, pages = controller.next_batch(None, replace(FORM, classes=text), "class")
    assert session is None and words in pages.notice
    assert read_classes("tabby cat, dog\n\nship,") == ["tabby cat", "dog", "ship"]


def test_visitors_do_not_meet(press: Press) -> None:
    shifts = ("fog", "snow")
    alone = []
    for shift in shifts:
        session, _ = press(shift=shift)
        alone.append(press(session, shift=shift)[1].predictions)
    sessions = [press(shift=shift)[0] for shift in shifts]
    mixed = [
        press(one, shift=shift)[1] for one, shift in zip(sessions, shifts, strict=True)
    ]
    assert [pages.predictions for pages in mixed] == alone and alone[0] != alone[1]


def test_another_method_starts_over_and_says_so(
    controller: Controller, press: Press
) -> None:
    session, _ = press()
    same, _ = press(session, shift="snow")
    assert same is session and same.batches == 2
    controller.files(session)
    other, pages = press(session, method="tda")
    assert other is not session and other.batches == 1
    assert "starts over" in pages.notice
    assert (
        list(controller.folder.iterdir()) == []
    )  # the old session's files went with it
    last, pages = press(other, method="tda", classes="cat,truck")
    assert last is not other and last.batches == 1
    assert "tda learns about its classes only: it starts over" in pages.notice


def test_other_classes_keep_the_stream_and_what_was_learned(
    press: Press, tiny_clip: CLIP
) -> None:
    form = {"method": "domain_norm", "batch_size": 64}
    names = ("cat", "truck", "ship")
    first, _ = press(**form)
    learned = first.adapter.state_dict()
    other, pages = press(first, **form, classes="cat, truck, ship")
    assert (first.batches, other.batches) == (1, 2)
    assert "what was learned about the images is kept" in pages.notice
    # the same as the library: an adapter with the old state, then the next images of
    # the stream
    adapter = create_method("domain_norm", tiny_clip, ClassPrompts(NAMES))
    adapter.load_state_dict(learned)
    assert adapter.memory["domains.0.norms.steps"] > 0
    adapter = adapter.with_classes(names)
    stream = Stream(get_dataset("bundled@fog:3"), tiny_clip.preprocess, 64)
    batch, labels = next(stream.read([range(64, 128)]))
    best = adapter.predict(batch).probabilities.max(dim=-1)
    shown = other.last
    assert shown is not None and {row.after for row in shown.rows} <= set(names)
    assert [row.name for row in shown.rows] == list(batch.keys)
    assert [row.after_probability for row in shown.rows] == best.values.tolist()
    # scores of different lists are not mixed; the table has both
    assert other.tally.images == 64
    assert other.tally.labelled == sum(
        stream.names[i] in names for i in labels.tolist()
    )
    assert len(other.predictions_csv().splitlines()) == 129


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": ""}, "no class names"),
        ({"source": FILES}, "no images"),
        ({"classes": "cat,truck", "source": FILES}, "no images"),  # after the change
        ({"method": "coop"}, "unknown method"),
        ({"shift": "rain"}, "unknown shift"),
        ({"batch_size": 999}, "at most 256"),
    ],
)
def test_refusals_keep_what_was_shown_and_learned(
    press: Press, change: dict[str, Any], words: str
) -> None:
    session, pages = press()
    learned = session.adapter.state_dict()
    again, refusal = press(session, **change)
    assert words in refusal.notice and "alert" in refusal.notice
    assert again is session and refusal.predictions == pages.predictions
    assert session.info.classes == list(NAMES) and session.batches == 1
    assert_same_state(session.adapter, learned)


def test_a_defect_is_no_trace_on_the_page(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(AppSession, "next_of_stream", fail)
    session, pages = controller.next_batch(None, FORM, "class")
    assert session is None
    assert "secret" not in pages.notice and "failed on the server" in pages.notice


def test_files_come_and_go(controller: Controller, press: Press) -> None:
    assert "run a batch first" in controller.files(None)[1]
    session, _ = press()
    (table, state), refusal = controller.files(session)
    assert "ready" in refusal and Path(table).read_bytes() == session.predictions_csv()
    fresh, pages = controller.load_state(None, FORM, Path(state), "class")
    assert fresh is not None and "has seen 6 images" in pages.notice
    assert_same_state(fresh.adapter, session.adapter.state_dict())
    form = replace(FORM, method="tda")
    unchanged, pages = controller.load_state(fresh, form, Path(state), "class")
    assert unchanged is fresh and "another method" in pages.notice
    (damaged := Path(state).with_name("damaged")).write_bytes(b"0123456789")
    unchanged, pages = controller.load_state(fresh, FORM, damaged, "class")
    assert unchanged is fresh and "readable state" in pages.notice
    controller.forget(session)
    assert not Path(state).exists()


def test_reset_starts_over(controller: Controller, press: Press) -> None:
    session, first = press()
    press(session)
    reset, pages = controller.reset(session)
    assert pages.predictions == app_pages.NOTHING_YET
    again = press(reset)[1]
    assert (again.notice, again.predictions) == (first.notice, first.predictions)


def test_widgets_give_paths_and_any_number(press: Press, tmp_path: Path) -> None:
    files = [str(path) for path in photos(tmp_path, range(2))]
    session, _ = press(source=FILES, batch_size=0.0, files=files)
    assert [row.name for row in session.rows] == ["photo0.png"]
