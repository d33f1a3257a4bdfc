"""The web app without its widgets: sessions, what they show, what they refuse."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request
from starlette.testclient import TestClient
from typer.testing import CliRunner

from cliquetta.app import pages as app_pages
from cliquetta.app import server as app_server
from cliquetta.app import session as app_session
from cliquetta.app.controller import FILES, STREAM, Controller, Form, make_form, read_classes
from cliquetta.app.server import POLICY, server_settings, token_auth
from cliquetta.app.session import AppSession, StreamChoice
from cliquetta.cli.main import app as command
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import ArrayDataset
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError
from cliquetta.methods.registry import create_method
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.auth import Tokens
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.server import open_port
from cliquetta.serve.settings import Limits, Settings
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import picture
from tests._helpers.tolerance import SUM

NAMES = ("airplane", "automobile", "bird", "cat", "frog", "truck")
FOG = StreamChoice("fog", 3, 6)
Make = Callable[..., AppSession]


@pytest.fixture
def make(tiny_clip: CLIP) -> Make:
    def build(method: str = "tent", limits: Limits | None = None) -> AppSession:
        settings = Settings({"tiny": tiny_clip}, limits=limits or Limits())
        return AppSession(settings, SessionRequest(classes=list(NAMES), method=method))

    return build


@pytest.fixture
def controller(tiny_clip: CLIP, tmp_path: Path) -> Controller:
    return Controller(Settings({"tiny": tiny_clip}), tmp_path)


def photos(folder: Path, seeds: range) -> list[Path]:
    paths = [folder / f"photo{seed}.png" for seed in seeds]
    for seed, path in zip(seeds, paths, strict=True):
        path.write_bytes(picture(seed))
    return paths


def answers(shown: Any) -> list[tuple[str, float]]:
    return [(row.after, row.after_probability) for row in shown.rows]


FORM = Form("tiny", "tent", ",".join(NAMES), STREAM, FOG)


# --- sessions -------------------------------------------------------------------------------------


def test_answers_are_those_of_the_library(make: Make, tiny_clip: CLIP) -> None:
    session = make("tent")
    prompts = ClassPrompts(NAMES)
    adapter = create_method("tent", tiny_clip, prompts)
    classifier = tiny_clip.classifier(prompts)
    stream = Stream(get_dataset("bundled@fog:3"), tiny_clip.preprocess, 6)
    for (batch, labels), _ in zip(stream, range(2), strict=False):
        shown = session.next_of_stream(FOG)
        after = adapter.predict(batch).probabilities.max(dim=-1)
        before = (tiny_clip.encode_image(batch.images, normalize=True) @ classifier.T).argmax(-1)
        assert [row.name for row in shown.rows] == list(batch.keys)
        assert [row.after for row in shown.rows] == [NAMES[i] for i in after.indices]
        assert [row.after_probability for row in shown.rows] == after.values.tolist()
        assert [row.before for row in shown.rows] == [NAMES[i] for i in before]
        names = stream.names
        expected = [names[i] if names[i] in NAMES else None for i in labels.tolist()]
        assert [row.truth for row in shown.rows] == expected


def test_labels_are_counted_and_never_change_an_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = make("tda")
    first = [honest.next_of_stream(replace(FOG, shift="none")) for _ in range(2)]
    rows = [row for shown in first for row in shown.rows if row.truth is not None]
    tally = honest.tally
    assert 0 < tally.labelled == len(rows) < tally.images == 12
    right = [sum(getattr(row, side) == row.truth for row in rows) for side in ("before", "after")]
    assert [tally.right["before"], tally.right["after"]] == right
    assert tally.curve[-1] == (len(rows), right[0] / len(rows), right[1] / len(rows))
    base = get_dataset("bundled")
    assert isinstance(base, ArrayDataset) and base.labels is not None
    false = ArrayDataset(
        base.id, base.images, names=base.names, keys=base.keys, labels=base.labels.flip(0)
    )
    monkeypatch.setattr(app_session, "get_dataset", lambda id: false)
    misled = make("tda")
    second = [misled.next_of_stream(replace(FOG, shift="none")) for _ in range(2)]
    for one, other in zip(first, second, strict=True):
        assert answers(one) == answers(other)
        assert [row.truth for row in one.rows] != [row.truth for row in other.rows]


def test_a_change_of_shift_goes_on_where_the_stream_was(make: Make) -> None:
    session = make("zero_shot")
    seen = [row.name for row in session.next_of_stream(FOG).rows]
    seen += [row.name for row in session.next_of_stream(StreamChoice("snow", 5, 9)).rows]
    assert len(set(seen)) == 15
    session._position = 1999
    assert len(session.next_of_stream(FOG).rows) == 1
    with pytest.raises(ServiceError, match="reset to begin again"):
        session.next_of_stream(FOG)
    session.reset()
    assert [row.name for row in session.next_of_stream(FOG).rows] == seen[:6]


def test_bad_files_are_named_and_the_others_predicted(make: Make, tmp_path: Path) -> None:
    good = photos(tmp_path, range(4))
    text, cut, large = (tmp_path / name for name in ("notes.txt", "cut.png", "large.png"))
    text.write_text("no picture")
    cut.write_bytes(picture(9)[:60])
    large.write_bytes(picture(1, size=64))
    mixed, alone = make(limits=Limits(image_pixels=32 * 32)), make()
    shown = mixed.next_of_files([good[0], text, *good[1:], cut, large], 16)
    assert answers(shown) == answers(alone.next_of_files(good, 16))
    reasons = {entry.name: entry.reason for entry in shown.refused}
    assert "not an image" in reasons["notes.txt"] and "truncated" in reasons["cut.png"]
    assert "too large" in reasons["large.png"]
    table = list(csv.DictReader(io.StringIO(mixed.predictions_csv().decode())))
    assert len(table) == 7
    assert [row["image"] for row in table if row["error"]] == list(reasons)
    fine = [row for row in table if not row["error"]]
    assert [row["prediction"] for row in fine] == [label for label, _ in answers(shown)]
    assert all(0 < float(row["probability"]) <= 1 for row in fine)


def test_files_are_taken_in_rounds(make: Make, tmp_path: Path) -> None:
    files = photos(tmp_path, range(5))
    session = make()
    sizes = [len(session.next_of_files(files, 2).rows) for _ in range(3)]
    assert sizes == [2, 2, 1]
    with pytest.raises(ServiceError, match="add others"):
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
    with pytest.raises(ServiceError) as refusal:
        session.next_of_files(photos(tmp_path, range(3)), 2)
    assert words in refusal.value.message
    assert session.batches == 0
    for name, value in session.adapter.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_failing_batch_leaves_everything_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, untroubled = make(), make()
    first = session.next_of_stream(FOG), untroubled.next_of_stream(FOG)
    assert answers(first[0]) == answers(first[1])
    predict = session.adapter._predict

    def fail(batch: Batch) -> Prediction:
        predict(batch)  # learns
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(session.adapter, "_predict", fail)
        with pytest.raises(ServiceError, match="not enough memory"):
            session.next_of_stream(FOG)
    assert answers(session.next_of_stream(FOG)) == answers(untroubled.next_of_stream(FOG))


def test_a_state_goes_on_in_another_session(make: Make, tmp_path: Path) -> None:
    files = photos(tmp_path, range(8))
    whole, later = make("tent"), make("tent")
    whole.next_of_files(files[:4], 4)
    assert later.load_state(whole.state()) == 4
    fresh = answers(make("tent").next_of_files(files[4:], 4))
    continued = answers(later.next_of_files(files[4:], 4))
    assert continued == answers(whole.next_of_files(files[4:], 4)) != fresh
    with pytest.raises(ValueError, match="another method"):
        make("tda").load_state(whole.state())
    with pytest.raises(ValueError, match="readable state"):
        later.load_state(b"0123456789")


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


def test_photographs_fit_and_every_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Limits] = []
    monkeypatch.setitem(sys.modules, "cliquetta.app.interface", ModuleType("interface"))
    monkeypatch.setattr(app_server, "serve", lambda given, **_: started.append(given.limits))
    run = CliRunner().invoke
    assert run(command, ["app", "--device", "cpu"]).exit_code == 0
    assert run(command, ["app", "--device", "cpu", "--limit", "body_bytes=7"]).exit_code == 0
    assert started[0].body_bytes > Limits().body_bytes and started[1].body_bytes == 7
    refused = run(command, ["app", "--limit", "image=3"])
    assert refused.exit_code == 2 and "did you mean 'images'" in refused.output


# --- evidence -------------------------------------------------------------------------------------


def test_caches_are_counted_class_by_class(make: Make) -> None:
    scap, tda, tent = make("scap"), make("tda"), make("tent")
    for session in (scap, tda, tent):
        session.next_of_stream(FOG)
    (retained,) = scap.tally.counts[-1].values()
    assert retained.held == tuple(scap.adapter.memory["count"].tolist())
    assert retained.capacity == scap.adapter.config.capacity and sum(retained.held) > 0
    caches = tda.tally.counts[-1]
    assert set(caches) == {"positive entries", "negative entries"}
    held = caches["positive entries"].held
    predicted = [row.before for row in tda.last.rows] if tda.last else []
    assert list(held) == [min(3, predicted.count(name)) for name in NAMES]
    assert tent.adapter.cache_counts() == {}


@pytest.mark.parametrize("kind", ["class", "rollout"])
def test_attention_is_that_of_the_passes_that_were_scored(make: Make, kind: Any) -> None:
    session = make("scap")
    session.next_of_stream(FOG)
    shown = session.next_of_stream(FOG)
    adapter: Any = session.adapter
    tower, (block,) = adapter.visual.tower, adapter.config.blocks
    evidence = shown.prediction.evidence
    width = evidence["passes"].width
    assert evidence["prompt_mask"].any()
    for place in range(len(shown.rows)):
        maps = app_pages.attention_maps(adapter, shown.pixels, shown.prediction, place, kind)
        masks = evidence["prompt_mask"][place * width : (place + 1) * width]
        prompts = evidence["prompts"][place * width : (place + 1) * width]
        passes = [(p, m) for p, m in zip(prompts, masks, strict=True) if m.any()]
        assert len(maps) == 1 + len(passes) and maps[0].to_prompts == maps[0].moved == 0
        image = shown.pixels[place : place + 1]
        for entry, found in zip([None, *passes], maps, strict=True):
            prefix = None
            if entry is not None:
                own = entry[0][entry[1]]  # prompts of this pass alone, nothing masked
                tokens = own.view(-1, *adapter.memory["start_prompt"].shape)[:, 0]
                prefix = {block: Prefix(tokens.reshape(1, -1, *tokens.shape[2:]), None)}
            weights = tower.attention(image, [block], prefix=prefix)[block]
            row = weights.mean(dim=1)[0, 0]
            if kind == "rollout":  # one prompted block, the last: half stays where it was
                row = row / 2
            np.testing.assert_allclose(found.grid.ravel(), row[-16:], atol=SUM)
            assert found.to_prompts == pytest.approx(float(row[:-17].sum()), abs=SUM)


def test_methods_without_evidence_say_so(make: Make) -> None:
    session = make("tent")
    assert app_pages.cliques_page(session) == app_pages.NOTHING_YET
    session.next_of_stream(FOG)
    assert "forms no cliques" in app_pages.cliques_page(session)
    assert "keeps no cache" in app_pages.memory_page(session)
    assert "plain attention only" in app_pages.attention_page(session, 0, "class")


def test_galleries_show_every_clique_with_class_size_and_loss(make: Make) -> None:
    session = make("scap")
    shown = session.next_of_stream(FOG)
    page = app_pages.cliques_page(session)
    cliques = describe(shown.prediction)["cliques"]
    assert cliques
    heads = re.findall(r"<b>(\w+)</b> · (\d+) images? · loss ([\d.-]+) → ([\d.-]+)", page)
    assert heads == [
        (
            NAMES[c["class"]],
            str(c["size"]),
            f"{c['before']['total']:.3f}",
            f"{c['after']['total']:.3f}",
        )
        for c in cliques
    ]
    assert page.count("<img") == sum(c["size"] for c in cliques)


def test_pages_mark_changes_and_hold_no_markup_of_a_visitor(
    tiny_clip: CLIP, tmp_path: Path
) -> None:
    evil = ("<script>a</script>", "'onerror='b", "cat")
    request = SessionRequest(classes=list(evil), method="tent")
    session = AppSession(Settings({"tiny": tiny_clip}), request)
    path = tmp_path / "<b>x.png"
    path.write_bytes(picture(1))
    shown = session.next_of_files([path, tmp_path / "<i>.png"][:1], 4)
    changed = replace(shown.rows[0], before=evil[0], after=evil[1])
    session.last = replace(shown, rows=(changed,))
    page = app_pages.predictions_page(session)
    assert page.count("cq-changed") == 1 and "changed</span>" in page
    assert "cq-changed" not in app_pages._card(replace(changed, after=evil[0]), "", "tent")
    told = app_pages.notice("<u>", bad=True, items=["<s>"])
    for text in (page, told, app_pages.attention_page(session, 0, "class")):
        assert not re.search(r"<(script|b>x|u>|s>)", text) and "='b" not in text


# --- the controller -------------------------------------------------------------------------------


def test_visitors_do_not_meet(controller: Controller) -> None:
    forms = FORM, replace(FORM, stream=replace(FOG, shift="snow"))
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
    same, _ = controller.next_batch(
        session, replace(FORM, stream=replace(FOG, shift="snow")), "class"
    )
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
    form = replace(FORM, method="domain_norm", stream=replace(FOG, batch_size=64))
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
        (replace(FORM, stream=replace(FOG, shift="rain")), "unknown shift"),
        (replace(FORM, stream=replace(FOG, batch_size=999)), "at most 256"),
    ):
        again, told = controller.next_batch(session, form, "class")
        assert words in told.notice and "alert" in told.notice
        assert again is session and told.predictions == pages.predictions
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
    (table, state), told = controller.files(session)
    assert "ready" in told and Path(table).read_bytes() == session.predictions_csv()
    fresh, pages = controller.load_state(None, FORM, Path(state), "class")
    assert fresh is not None and "has seen 6 images" in pages.notice
    for name, value in session.adapter.state_dict().items():
        torch.testing.assert_close(fresh.adapter.state_dict()[name], value, rtol=0, atol=0)
    kept, pages = controller.load_state(fresh, replace(FORM, method="tda"), Path(state), "class")
    assert kept is fresh and "another method" in pages.notice
    controller.forget(session)
    assert not Path(state).exists()


def test_reset_starts_over(controller: Controller) -> None:
    session, first = controller.next_batch(None, FORM, "class")
    controller.next_batch(session, FORM, "class")
    session, pages = controller.reset(session)
    assert pages.predictions == app_pages.NOTHING_YET
    again = controller.next_batch(session, FORM, "class")[1]
    assert (again.notice, again.predictions) == (first.notice, first.predictions)


def test_widgets_become_a_form() -> None:
    form = make_form("m", "tent", "a,b", FILES, "fog", 3.0, 16.0, ["/x/a.png"])
    assert form == Form("m", "tent", "a,b", FILES, StreamChoice("fog", 3, 16), (Path("/x/a.png"),))
    assert make_form("m", "tent", "a", STREAM, "fog", 3, 0, None).stream.batch_size == 1


# --- authentication ------------------------------------------------------------


@pytest.fixture
def visit(tiny_clip: CLIP) -> Callable[..., TestClient]:
    def build(limits: Limits | None = None, host: str = "127.0.0.1:7860") -> TestClient:
        settings = Settings({"tiny": tiny_clip}, limits=limits or Limits())
        server = FastAPI(**server_settings(settings))
        server.get("/")(lambda: "page")
        server.post("/login")(lambda: "in")

        @server.post("/gradio_api/upload")
        async def upload(request: Request) -> int:
            return len(await request.body())

        return TestClient(server, base_url=f"http://{host}")

    return build


def test_only_known_hosts_and_own_pages_are_answered(visit: Callable[..., TestClient]) -> None:
    http = visit()
    answer = http.get("/", headers={"Origin": "http://127.0.0.1:7860"})
    assert answer.status_code == 200 and answer.headers["Content-Security-Policy"] == POLICY
    assert http.get("/openapi.json").status_code == 404
    assert visit(host="evil.example").get("/").status_code == 403
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for path in ("/login", "/gradio_api/upload"):
            assert http.post(path, headers=headers).status_code == 403


def test_logins_are_slowed_and_uploads_are_bounded(visit: Callable[..., TestClient]) -> None:
    http = visit(Limits(upload_bytes=10_000, wrong_token_rate=0.001))
    assert [http.post("/login").status_code for _ in range(12)] == [200] * 10 + [429, 429]
    path = "/gradio_api/upload"
    sent = [http.post(path, content=b"x" * 4000).status_code for _ in range(3)]
    assert sent == [200, 200, 429]
    told = http.post(path, content=b"x" * 4000)
    assert "within an hour" in told.text and "Retry-After" in told.headers
    assert http.get("/").status_code == 200


APP = """
import sys, time, types
from pathlib import Path
fake = types.ModuleType("cliquetta.app.interface")
def launch(controller, **_):
    (controller.folder / "upload.png").write_bytes(b"x")
    print(controller.folder, flush=True)
    time.sleep(60)
fake.launch = launch
sys.modules["cliquetta.app.interface"] = fake
from cliquetta.app import server
from cliquetta.serve.server import open_port
from cliquetta.serve.settings import Settings
with open_port("127.0.0.1", 0) as free:
    port = free.getsockname()[1]
server.serve(Settings({"any": None}, methods={}), host="127.0.0.1", port=port)
"""


@pytest.mark.slow
def test_uploads_are_deleted_when_the_app_stops_and_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(Path(sys.modules["cliquetta"].__path__[0]).parent)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": source}
    command = [sys.executable, "-c", APP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        folder = Path(running.stdout.readline().strip())
        assert str(running.pid) in folder.name and (folder / "upload.png").exists()
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            left = folder.with_name(folder.name.replace(str(running.pid), str(ended.pid)))
        left.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        app_server.delete_left_uploads()  # as the next start does
        assert folder.exists() and not left.exists()
        running.terminate()
    assert running.returncode == 0 and not folder.exists()


def test_a_port_in_use_is_said_before_any_address(tiny_clip: CLIP) -> None:
    with open_port("127.0.0.1", 0) as taken, pytest.raises(UserError, match="in use"):
        port = taken.getsockname()[1]
        app_server.serve(Settings({"tiny": tiny_clip}), host="127.0.0.1", port=port)


def test_tokens_are_passwords() -> None:
    opens = token_auth(Tokens(["0123456789abcdef"]))
    assert opens("anybody", "0123456789abcdef")
    assert not opens("anybody", "0123456789abcdeX") and not opens("anybody", "")


def test_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cliquetta.app.interface", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(command, ["app"])
    assert result.exit_code == 2
    assert "cliquetta[app]" in " ".join(result.output.split())
