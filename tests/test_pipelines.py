"""The pipeline: transformers' shape and scores, a state between calls, images from anywhere."""

import json
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import cliquetta
from cliquetta.data.images import ImageError
from cliquetta.data.remote import fetch_image
from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.pipelines import TEMPLATE, ImageScores, LabelScores
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.building import assert_same_state
from tests._helpers.serve_setup import picture
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tolerance import FEATURE, LOGIT, SUM
from tests._helpers.transformers_models import (
    save_siglip,
    tiny_siglip,
    tiny_transformers,
)
from tests.model.test_tokenizer import their_tokenizer

LABELS = list(TINY_NAMES)
TASK = "zero-shot-image-classification"


PICTURES = [Image.open(BytesIO(picture(seed, size=40))) for seed in range(6)]


@pytest.fixture
def build(tiny_clip: CLIP) -> Any:
    def call(method: str = "tent", **more: Any) -> Any:
        return cliquetta.pipeline(TASK, model=tiny_clip, method=method, **more)

    return call


def test_zero_shot_gives_what_transformers_gives(tmp_path: Path) -> None:
    library: Any = transformers  # its overloads know no image processor of Pillow
    processor = getattr(library, "CLIPImageProcessorPil", library.CLIPImageProcessor)
    crop = {"height": 32, "width": 32}
    tokenizer = their_tokenizer(tmp_path)
    tokenizer.model_max_length = 77
    theirs = library.pipeline(
        TASK,
        model=tiny_transformers(),
        tokenizer=tokenizer,
        image_processor=processor(size={"shortest_edge": 32}, crop_size=crop),
        device="cpu",
    )
    theirs.model.save_pretrained(tmp_path / "model")
    theirs.image_processor.save_pretrained(tmp_path / "model")
    source = f"hf:{tmp_path / 'model'}"
    classify = cliquetta.pipeline(TASK, model=source, method="zero_shot", device="cpu")
    labels = ["cat", "old ship", "frog"]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (PICTURES[0], {}),
        (PICTURES[:3], {"hypothesis_template": "a drawing of the {}"}),
        ([PICTURES[1]], {}),
    ]
    for given, options in cases:
        ours = classify(given, candidate_labels=labels, **options)
        expected = theirs(given, candidate_labels=labels, **options)
        assert json.loads(json.dumps(ours)) == ours and len(ours) == len(expected)
        if not isinstance(given, list):
            ours, expected = [ours], [expected]
        for mine, other in zip(ours, expected, strict=True):
            assert [sorted(entry) for entry in mine] == [
                sorted(entry) for entry in other
            ]
            assert [entry["label"] for entry in mine] == [
                entry["label"] for entry in other
            ]
            scores = [entry["score"] for entry in other]
            assert [entry["score"] for entry in mine] == pytest.approx(
                scores, abs=LOGIT
            )


def test_state_lasts_between_calls(build: Any, tiny_clip: CLIP) -> None:
    classify = build(batch_size=3)
    actual = [*classify(PICTURES[:3], LABELS), classify(PICTURES[3])]
    method = create_method("tent", tiny_clip, ClassPrompts(tuple(LABELS), (TEMPLATE,)))
    batches = (PICTURES[:3], [PICTURES[3]])
    expected = torch.cat([method.predict(batch).probabilities for batch in batches])
    for result, row in zip(actual, expected, strict=True):
        by_label = {entry["label"]: entry["score"] for entry in result}
        assert [by_label[label] for label in LABELS] == pytest.approx(
            row.tolist(), abs=SUM
        )
    assert classify.images_seen == 4


def test_other_labels_keep_what_was_learned(build: Any) -> None:
    classify = build()
    classify(PICTURES, LABELS)
    norms = classify.adapter.memory["norms.values"].clone()
    assert not torch.equal(
        norms, build()._build(ClassPrompts(("a", "b"))).memory["norms.values"]
    )
    result = classify(PICTURES[0], ["cat", "horse"])
    assert {entry["label"] for entry in result} == {"cat", "horse"}
    assert (
        classify.adapter.memory["norms.steps"] == 2
    )  # one per call: it went on from there
    forgetful = build("tda")
    forgetful(PICTURES, LABELS)
    with pytest.warns(UserWarning, match="starts again"):
        forgetful(PICTURES[0], ["cat", "horse"])


def test_save_load_reset(build: Any, tmp_path: Path) -> None:
    classify = build()
    with pytest.raises(UserError, match="nothing"):
        classify.save(tmp_path / "state")
    first = classify(PICTURES[0], LABELS, "a {}")
    classify.save(tmp_path / "state")
    expected = classify(PICTURES[1])
    other = build()
    other.load(tmp_path / "state")
    assert other.images_seen == 1
    assert other(PICTURES[1]) == expected  # labels and template came with the file
    other.reset()
    assert other.images_seen == 0 and other(PICTURES[0]) == first
    with pytest.raises(UserError, match="another method"):
        build("tda").load(tmp_path / "state")
    other.adapter.save(tmp_path / "bare")
    with pytest.raises(UserError, match="pipeline"):
        other.load(tmp_path / "bare")


def test_images_of_none_of_the_labels(
    build: Any, tiny_clip: CLIP, tmp_path: Path
) -> None:
    plain = build()(PICTURES, candidate_labels=LABELS)
    assert [result.rejected for result in plain] == [None] * len(PICTURES)
    complete, first, second = (build(reject=0.5, batch_size=2) for _ in range(3))
    wanted = complete(PICTURES, candidate_labels=LABELS)
    begun = first(PICTURES[:4], candidate_labels=LABELS)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    actual = [*begun, *second(PICTURES[4:])]
    shown = [(result.rejected, result.rejection_score) for result in actual]
    assert shown == [(result.rejected, result.rejection_score) for result in wanted]
    assert {True, False} == {result.rejected for result in wanted}
    page = wanted.show()._repr_html_()
    assert page.count("none of these") == sum(result.rejected for result in wanted)
    with pytest.raises(UserError, match="below 1"):
        build(reject=2)


def test_one_image_gives_scores_and_several_a_list(build: Any) -> None:
    classify = build("zero_shot", device=-1)
    expected = classify(PICTURES[0], LABELS)
    for several in ([PICTURES[0]], iter([PICTURES[0]]), np.asarray(PICTURES[0])[None]):
        assert classify(several) == [expected]
    assert classify([]) == []
    assert classify(PICTURES[0], top_k=2) == expected[:2]
    by_one = classify(PICTURES[:3], batch_size=1, timeout=5.0)
    for alone, together in zip(by_one, classify(PICTURES[:3]), strict=True):
        assert [entry["label"] for entry in alone] == [
            entry["label"] for entry in together
        ]


def test_a_call_that_fails_changes_nothing(build: Any, tmp_path: Path) -> None:
    classify = build(batch_size=2)
    classify(PICTURES, LABELS)
    before = classify.adapter.state_dict()
    for given, options in (
        ([*PICTURES, tmp_path / "gone.png"], {}),
        ([*PICTURES, tmp_path / "gone.png"], {"candidate_labels": ["cat", "horse"]}),
        (PICTURES, {"candidate_labels": ["cat"]}),
        (PICTURES, {"candidate_labels": ["cat", "cat"]}),
        (PICTURES, {"hypothesis_template": "no place"}),
        ("http://127.0.0.1/a.png", {}),
        (3, {}),
    ):
        with pytest.raises((UserError, TypeError)):
            classify(given, **options)
        assert classify.adapter.prompts.names == tuple(LABELS)
        assert classify.images_seen == len(PICTURES)
        assert_same_state(classify.adapter, before)


def test_bad_requests_end_early(build: Any, tiny_clip: CLIP) -> None:
    with pytest.raises(UserError, match="zero-shot-image"):
        cliquetta.pipeline("zero-shot-classification", model=tiny_clip)
    with pytest.raises(UserError, match="method"):
        build("tents")
    with pytest.raises(UserError, match="no labels"):
        build()(PICTURES[0])
    for bad in (
        lambda: build(batch_size=0),
        lambda: build()(PICTURES, LABELS, batch_size=-1),
    ):
        with pytest.raises(UserError, match="one image"):
            bad()
    with pytest.raises(UserError, match="allow_urls=True"):
        build()("https://127.0.0.1/a.png", LABELS)


def test_notebooks_show_scores(build: Any) -> None:
    classify = build()
    assert repr(classify) == (
        "<zero-shot-image-classification: tent on tiny, no labels yet, learned from 0 images>"
    )
    results = classify(PICTURES[:2], ["<b>cat</b>", "ship"])
    assert "2 labels, learned from 2 images" in repr(classify)
    assert isinstance(results, ImageScores) and isinstance(results[0], LabelScores)
    page = results.show()._repr_html_()
    assert page.count('<img src="data:image/webp;base64,') == 2
    assert "&lt;b&gt;cat" in page and "<b>cat" not in page
    assert "<img" not in results._repr_html_() and "ship" in results[0]._repr_html_()
    assert repr(results[0]) == repr(list(results[0]))


def test_a_progress_bar_on_request(
    build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    classify = build("zero_shot", batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classify(PICTURES, LABELS)
        assert not capsys.readouterr().err
        classify(PICTURES, LABELS, progress=True)
    assert "6/6" in capsys.readouterr().err


class Site(BaseHTTPRequestHandler):
    """One image, and the ways in which a server can be a nuisance."""

    replies: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {
        "/a.png": (200, {}, picture(0)),
        "/gone": (404, {}, b""),
        "/moved": (302, {"Location": "/a.png"}, b""),
        "/file": (302, {"Location": "file:///etc/passwd"}, b""),
        "/claims": (200, {"Content-Length": str(10**9)}, b"x"),
        "/large": (200, {}, b"x" * 10**6),
        "/slow": (200, {}, b"x"),
    }

    def do_GET(self) -> None:
        status, headers, body = self.replies[self.path]
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        for _ in range(50 if self.path == "/slow" else 1):
            self.wfile.write(body)
            time.sleep(0.1 if self.path == "/slow" else 0)

    def log_message(self, *given: object) -> None:
        """Be quiet."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_urls_where_they_are_allowed(build: Any, site: str) -> None:
    classify = build("zero_shot", allow_urls=True)
    expected = classify(picture(0), LABELS)
    assert classify(f"{site}/a.png") == expected
    assert classify([f"{site}/moved"])[0] == expected
    assert "<img" in classify(f"{site}/a.png").show()._repr_html_()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/gone", "replies 404"),
        ("/large", "too large"),
        ("/claims", "too large"),
        ("/slow", "within 0.5 seconds"),
        ("/file", "not allowed|redirects to|cannot be fetched|unknown url"),
    ],
)
def test_urls_have_limits(site: str, path: str, sentence: str) -> None:
    with pytest.raises(ImageError, match=sentence):
        fetch_image(site + path, seconds=0.5, max_bytes=10**5)


def test_the_model_of_a_user(tiny_clip: CLIP) -> None:
    theirs = tiny_transformers("quick_gelu")
    classify = cliquetta.pipeline(TASK, model=theirs, method="zero_shot")
    best = classify(PICTURES[0], LABELS, "a photo of a {}.")[0]
    assert classify.model is not tiny_clip and best["label"] in LABELS
    (row,) = cliquetta.predict(
        PICTURES[0], LABELS, model=theirs, method="zero_shot"
    ).rows
    assert row["prediction"] == best["label"]
    method = cliquetta.create_method("zero_shot", theirs, LABELS)
    assert LABELS[int(method.predict(PICTURES[0]).logits.argmax())] == best["label"]
    with pytest.raises(UserError, match="create_model"):
        cliquetta.from_model("ViT-B/16")  # type: ignore[arg-type]


def test_sigmoid_models_score_labels_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")  # SigLIP with a projection
    theirs = tiny_siglip()
    save_siglip(theirs, tmp_path)
    classify = cliquetta.pipeline(
        TASK, model=f"hf:{tmp_path}", method="zero_shot", device="cpu"
    )
    result = classify(PICTURES[0], LABELS)
    model = classify.model
    texts = [TEMPLATE.format(label) for label in LABELS]
    with torch.no_grad():
        pixels = model.preprocess.batch([PICTURES[0]])
        logits = theirs(
            pixel_values=pixels, input_ids=model.tokenizer(texts)
        ).logits_per_image[0]
    expected = dict(zip(LABELS, logits.sigmoid().tolist(), strict=True))
    assert {entry["label"]: entry["score"] for entry in result} == pytest.approx(
        expected, abs=FEATURE
    )
    adapting = cliquetta.pipeline(TASK, model=model, method="tent")(PICTURES[0], LABELS)
    assert sum(entry["score"] for entry in adapting) == pytest.approx(1)


def test_arrays_of_opencv_are_turned(build: Any) -> None:
    arrays = [np.asarray(image)[:, :, ::-1] for image in PICTURES]
    expected = build()(PICTURES, LABELS)
    assert build()(arrays, LABELS, channel_order="bgr") == expected
    assert build()(arrays, LABELS) != expected
