"""The buttons: sessions of visitors, refusals, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.app import pages as app_pages
from cliquetta.app.controller import FILES, Controller, read_classes
from cliquetta.app.session import AppSession
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.stream import Stream
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.settings import Limits, Settings
from tests.app.conftest import FORM, NAMES, photos


@pytest.mark.parametrize(
    ("text", "words"),
    [(" ,\n", "no class names"), ("a,b,c", "3 class names"), ("x" * 20, "10 characters")],
)
def test_class_names_are_checked(text: str, words: str, tiny_clip: CLIP, tmp_path: Path) -> None:
    limits = Limits(classes=2, class_length=10)
    controller = Controller(Settings({"tiny": tiny_clip}, limits=limits), tmp_path)
    session, pages = controller.next_batch(None, replace(FORM, classes=text), "class")
    assert session is None and words in pages.notice
    assert read_classes("tabby cat, dog\n\nship,") == ["tabby cat", "dog", "ship"]


def test_visitors_do_not_meet(controller: Controller) -> None:
    forms = FORM, replace(FORM, shift="snow")
    alone = []
    for form in forms:
        session, _ = controller.next_batch(None, form, "class")
        session, pages = controller.next_batch(session, form, "class")
        alone.append(pages.predictions)
    sessions = [controller.next_batch(None, form, "class")[0] for form in forms]
    mixed = [controller.next_batch(s, f, "class")[1] for s, f in zip(sessions, forms, strict=True)]
    assert [pages.predictions for pages in mixed] == alone and alone[0] != alone[1]


def test_another_method_starts_over_and_says_so(controller: Controller) -> None:
    session, pages = controller.next_batch(None, FORM, "class")
    same, _ = controller.next_batch(session, replace(FORM, shift="snow"), "class")
    assert same is session and same is not None and same.batches == 2
    controller.files(session)
    other, pages = controller.next_batch(session, replace(FORM, method="tda"), "class")
    assert other is not session and other is not None and other.batches == 1
    assert "starts over" in pages.notice
    assert list(controller.folder.iterdir()) == []  # the old session's files went with it
    form = replace(FORM, method="tda", classes="cat,truck")
    last, pages = controller.next_batch(other, form, "class")
    assert last is not other and last is not None and last.batches == 1
    assert "tda learns about its classes only: it starts over" in pages.notice


def test_other_classes_keep_the_stream_and_what_was_learned(
    controller: Controller, tiny_clip: CLIP
) -> None:
    form = replace(FORM, method="domain_norm", batch_size=64)
    first, _ = controller.next_batch(None, form, "class")
    assert first is not None
    learned = first.adapter.state_dict()
    names = ("cat", "truck", "ship")
    other, pages = controller.next_batch(first, replace(form, classes="cat, truck, ship"), "class")
    assert other is not None and other.batches == 2 and first.batches == 1
    assert "what was learned about the images is kept" in pages.notice
    shown = other.last
    assert shown is not None and {row.after for row in shown.rows} <= set(names)
    # the same as the library: an adapter with the old state, then the next images of the stream
    adapter = create_method("domain_norm", tiny_clip, ClassPrompts(NAMES))
    adapter.load_state_dict(learned)
    assert adapter.memory["domains.0.norms.steps"] > 0
    adapter = adapter.with_classes(names)
    stream = Stream(get_dataset("bundled@fog:3"), tiny_clip.preprocess, 64)
    batch, labels = next(stream.read([range(64, 128)]))
    best = adapter.predict(batch).probabilities.max(dim=-1)
    assert [row.name for row in shown.rows] == list(batch.keys)
    assert [row.after_probability for row in shown.rows] == best.values.tolist()
    # scores of different lists are not mixed; the table has both
    assert other.tally.images == 64
    assert other.tally.labelled == sum(stream.names[i] in names for i in labels.tolist())
    assert len(other.predictions_csv().splitlines()) == 129


def test_refusals_keep_what_was_shown_and_learned(controller: Controller) -> None:
    session, pages = controller.next_batch(None, FORM, "class")
    assert session is not None
    learned = session.adapter.state_dict()
    for form, words in (
        (replace(FORM, classes=""), "no class names"),
        (replace(FORM, classes="cat,cat"), "given twice"),
        (replace(FORM, source=FILES), "no images"),
        (replace(FORM, classes="cat,truck", source=FILES), "no images"),  # after the change
        (replace(FORM, model="huge"), "unknown model"),
        (replace(FORM, method="coop"), "unknown method"),
        (replace(FORM, shift="rain"), "unknown shift"),
        (replace(FORM, batch_size=999), "at most 256"),
    ):
        again, refusal = controller.next_batch(session, form, "class")
        assert words in refusal.notice and "alert" in refusal.notice
        assert again is session and refusal.predictions == pages.predictions
        assert session.info.classes == list(NAMES) and session.batches == 1
        assert all(torch.equal(v, learned[n]) for n, v in session.adapter.state_dict().items())


def test_a_defect_is_no_trace_on_the_page(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(AppSession, "next_of_stream", fail)
    session, pages = controller.next_batch(None, FORM, "class")
    assert session is None
    assert "secret" not in pages.notice and "failed on the server" in pages.notice


def test_files_come_and_go(controller: Controller, tmp_path: Path) -> None:
    assert "run a batch first" in controller.files(None)[1]
    session, _ = controller.next_batch(None, FORM, "class")
    assert session is not None
    (table, state), refusal = controller.files(session)
    assert "ready" in refusal and Path(table).read_bytes() == session.predictions_csv()
    fresh, pages = controller.load_state(None, FORM, Path(state), "class")
    assert fresh is not None and "has seen 6 images" in pages.notice
    for name, value in session.adapter.state_dict().items():
        torch.testing.assert_close(fresh.adapter.state_dict()[name], value, rtol=0, atol=0)
    unchanged, pages = controller.load_state(
        fresh, replace(FORM, method="tda"), Path(state), "class"
    )
    assert unchanged is fresh and "another method" in pages.notice
    controller.forget(session)
    assert not Path(state).exists()


def test_reset_starts_over(controller: Controller) -> None:
    session, first = controller.next_batch(None, FORM, "class")
    controller.next_batch(session, FORM, "class")
    session, pages = controller.reset(session)
    assert pages.predictions == app_pages.NOTHING_YET
    again = controller.next_batch(session, FORM, "class")[1]
    assert (again.notice, again.predictions) == (first.notice, first.predictions)


def test_widgets_give_paths_and_any_number(controller: Controller, tmp_path: Path) -> None:
    files = [str(path) for path in photos(tmp_path, range(2))]
    form = replace(FORM, source=FILES, batch_size=0.0, files=files)
    session, _ = controller.next_batch(None, form, "class")
    assert session is not None and [row.name for row in session.rows] == ["photo0.png"]
