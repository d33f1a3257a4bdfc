"""Images of every kind are the same images in every way in."""

from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import cliquetta
from cliquetta import UserError, create_method, pipeline
from cliquetta.app.session import AppSession
from cliquetta.data.images import ImageError
from cliquetta.data.inputs import (
    as_batch,
    is_single,
    refuse_unnormalised,
    separate_images,
)
from cliquetta.data.views import image_views, to_pixels
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from cliquetta.serve.client import Client
from cliquetta.serve.schema import BatchResponse, SessionRequest
from cliquetta.serve.settings import Settings
from cliquetta.types import ViewSpec
from tests._helpers.serve_setup import live_service
from tests._helpers.trees import exif_of, noise, random_pixels

NAMES = ("cat", "dog", "ship")
ONE: dict[str, Callable[[Path, CLIP], Any]] = {
    "path": lambda path, _: path,
    "text": lambda path, _: str(path),
    "PIL image": lambda path, _: Image.open(path),
    "array": lambda path, _: np.asarray(Image.open(path)),
    "uint8 tensor": lambda path, _: torch.tensor(np.asarray(Image.open(path))).movedim(
        -1, 0
    ),
    "bytes": lambda path, _: path.read_bytes(),
    "file object": lambda path, _: path.open("rb"),
    "data URI": lambda path, _: (
        f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
    ),
    "preprocessed": lambda path, model: model.preprocess(Image.open(path)),
}
SEVERAL: dict[str, Callable[[list[Path], CLIP], Any]] = {
    "generator": lambda paths, _: (path for path in paths),
    "Path.glob": lambda paths, _: paths[0].parent.glob("a*.png"),
    "glob": lambda paths, _: str(paths[0].parent / "*.png"),
    "DataFrame": lambda paths, _: pandas.DataFrame(
        {"path": [str(path) for path in paths]}
    ),
    "arrays": lambda paths, _: np.stack(
        [np.asarray(Image.open(path)) for path in paths]
    ),
    "preprocessed": lambda paths, model: model.preprocess.batch(
        [Image.open(p) for p in paths]
    ),
    "mixed": lambda paths, _: [Image.open(paths[0]), *map(str, paths[1:])],
}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return noise(tmp_path, [f"a{number}.png" for number in range(3)])


def ask(way: str, images: Any, model: CLIP) -> list[float]:
    """The probability of "cat" of every image, by one of the ways in."""
    if way == "method":
        logits = create_method("zero_shot", model, NAMES).predict(images).logits
        return [float(row.softmax(dim=-1)[0]) for row in logits]
    if way == "predict":
        run = cliquetta.predict(
            images,
            NAMES,
            method="zero_shot",
            model=model,
            all_probabilities=True,
            workers=0,
        )
        return [row["p_cat"] for row in run.rows]
    if way in ("client", "JSON"):
        return ask_service(way, images, model)
    if way == "app":
        request = SessionRequest(classes=list(NAMES), method="zero_shot")
        session = AppSession(Settings({"tiny": model}), request)
        files = images if isinstance(images, list) else [images]
        shown = session.next_of_files(files, len(files))
        return shown.prediction.probabilities[:, 0].tolist()
    classify = pipeline(model=model, method="zero_shot")
    reply = classify(images, NAMES, "a photo of a {}.")
    replies = reply if isinstance(reply[0], list) else [reply]
    return [
        entry["score"]
        for entries in replies
        for entry in entries
        if entry["label"] == "cat"
    ]


def ask_service(way: str, images: Any, model: CLIP) -> list[float]:
    """Likewise by the Python client, or by JSON with base64 or a data URI."""
    with (
        TemporaryDirectory() as folder,
        live_service(Path(folder), model) as address,
        Client(address) as client,
    ):
        session = client.create_session(NAMES, method="zero_shot")
        if way == "client":
            result = session.predict(images)
        else:
            given = images if isinstance(images, list) else [images]
            texts = [
                one if isinstance(one, str) else b64encode(one).decode()
                for one in given
            ]
            body = {"images": [{"data": text} for text in texts]}
            path = f"/v1/sessions/{session.id}/batches"
            result = client.ask(BatchResponse, "POST", path, json=body)
    assert not result.errors
    return [
        s.probability for one in result.predictions for s in one.top if s.label == "cat"
    ]


IN_PYTHON = ("method", "predict", "pipeline")
WAYS = pytest.mark.parametrize("way", IN_PYTHON)


def with_client(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Every kind by every way, but preprocessed pixels, which the client refuses."""
    ways = product((*IN_PYTHON, "client"), kinds)
    return [pair for pair in ways if pair != ("client", "preprocessed")]


@pytest.mark.parametrize(
    ("way", "kind"),
    [*with_client(ONE), ("JSON", "bytes"), ("JSON", "data URI"), ("app", "path")],
)
def test_one_image(way: str, kind: str, paths: list[Path], tiny_clip: CLIP) -> None:
    expected = ask("method", [Image.open(paths[0])], tiny_clip)
    image = ONE[kind](paths[0], tiny_clip)
    result = ask(way, image, tiny_clip)
    assert result == pytest.approx(expected, abs=1e-6)  # tables have six digits

    # A file object has been read to its end: the list gets another one.
    image_in_list = ONE[kind](paths[0], tiny_clip)
    assert ask(way, [image_in_list], tiny_clip) == result


@pytest.mark.parametrize(("way", "kind"), with_client(SEVERAL))
def test_several_images(
    way: str, kind: str, paths: list[Path], tiny_clip: CLIP
) -> None:
    opened = [Image.open(path) for path in paths]
    expected = ask("method", opened, tiny_clip)
    # a pattern may find files in another order
    images = SEVERAL[kind](paths, tiny_clip)
    result = ask(way, images, tiny_clip)
    assert sorted(result) == pytest.approx(sorted(expected), abs=1e-6)


def test_mixed_lists_name_paths(paths: list[Path], tiny_clip: CLIP) -> None:
    first, second, third = paths
    images = [Image.open(first), second, str(third), second]
    run = cliquetta.predict(images, NAMES, model=tiny_clip)
    # an image without a name has its number; one that comes twice, both numbers
    assert [row["path"] for row in run.rows] == [
        "0",
        f"{second} (1)",
        str(third),
        f"{second} (3)",
    ]


def test_without_a_method_domain_norm_predicts(
    paths: list[Path], tiny_clip: CLIP
) -> None:
    run = cliquetta.predict(paths, NAMES, model=tiny_clip)
    assert set(run.classes) == {"domain_norm"}


def test_columns_of_a_frame_are_in_the_table(
    paths: list[Path], tiny_clip: CLIP
) -> None:
    names = [str(path) for path in paths]
    frame = pandas.DataFrame({"path": names, "camera": [1, 2, 2]})
    out = paths[0].with_name("out.csv")
    cliquetta.predict(
        frame,
        NAMES,
        method="zero_shot",
        model=tiny_clip,
        out=out,
        group_by="camera",
    )
    table = pandas.read_csv(out)
    assert table["camera"].tolist() == [1, 2, 2]
    assert table["path"].tolist() == names


@WAYS
@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"a": 1},
        [None],
        np.zeros((4, 4, 3)),
        np.zeros((5,), np.uint8),
        torch.zeros(2, 3, 5, 5),
    ],
)
def test_others_are_refused_with_a_remedy(
    way: str, wrong: Any, tiny_clip: CLIP
) -> None:
    with pytest.raises(UserError, match=r"preprocess|features"):
        ask(way, wrong, tiny_clip)


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*.png")
    with pytest.raises(UserError, match="matches"):
        list(separate_images(pattern, Preprocess(8)))


def test_a_name_with_brackets_is_one_file(tmp_path: Path) -> None:
    odd = tmp_path / "a[1].png"
    Image.new("RGB", (8, 8)).save(odd)
    assert is_single(str(odd))
    assert list(separate_images(str(odd), Preprocess(8))) == [str(odd)]


@WAYS
def test_open_photographs_are_turned_as_files(
    way: str, tmp_path: Path, tiny_clip: CLIP
) -> None:
    # a file whose EXIF data say: turn me by 90 degrees, clockwise
    stored = tmp_path / "stored.png"
    pixels = random_pixels(32, 32, 3)
    Image.fromarray(pixels).save(stored, exif=exif_of(6))

    upright = Image.fromarray(np.rot90(pixels, -1).copy())
    expected = ask(way, upright, tiny_clip)
    assert ask(way, stored, tiny_clip) == expected
    photograph = Image.open(stored)
    assert ask(way, photograph, tiny_clip) == expected
    assert photograph.getexif()[0x0112] == 6  # the user's image is as it was


# --- batches ------------------------------------------------------------------------------------

PREPROCESS = Preprocess(size=16)


def test_views_belong_to_the_image_not_to_its_batch(paths: list[Path]) -> None:
    spec = ViewSpec("resized-crop", 3)
    keys = [path.as_posix() for path in paths]
    batch = as_batch(paths, PREPROCESS, views=spec, seed=4)
    assert batch.keys == tuple(keys)
    for row, key in enumerate(keys):
        views = image_views(Image.open(key), key, spec, 4, PREPROCESS)
        assert torch.equal(batch.views[row], to_pixels(views, PREPROCESS))


def test_views_of_images_without_a_name_do_not_depend_on_the_others(
    paths: list[Path],
) -> None:
    spec = ViewSpec("resized-crop", 3)
    pixels = as_batch(paths, PREPROCESS).images
    for images in ([Image.open(path) for path in paths], pixels):
        complete = as_batch(images, PREPROCESS, views=spec).views
        without_first = as_batch(images[1:], PREPROCESS, views=spec).views
        assert without_first is not None
        assert torch.equal(complete[1:], without_first)


def test_a_batch_with_views_is_taken_as_it_is(paths: list[Path]) -> None:
    spec = ViewSpec("resized-crop", 3)
    batch = as_batch(paths, PREPROCESS, views=spec)
    assert as_batch(batch, PREPROCESS, views=spec) is batch


def test_no_images_are_an_empty_batch() -> None:
    batch = as_batch([], PREPROCESS, views=ViewSpec("augmix", 2))
    assert batch.images.shape == (0, 3, 16, 16)


def test_unreadable_files_and_pixels_of_another_size_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ImageError):
        as_batch([tmp_path / "gone.png"], PREPROCESS)
    with pytest.raises(UserError, match="16, 16"):
        as_batch(torch.zeros(1, 3, 8, 8), PREPROCESS)


def test_normalised_pixels_are_never_taken_for_unnormalised_ones() -> None:
    """Grey, dark, bright and noisy pictures, also in low contrast."""
    openai = Preprocess.openai(32)
    half = replace(openai, mean=(0.5, 0.5, 0.5))
    plain = Preprocess(32, mean=(0, 0, 0), std=(1, 1, 1))
    generator = np.random.default_rng(0)
    for low, high in [(0, 256), (120, 192), (150, 160), (128, 129), (0, 2), (254, 256)]:
        pixels = generator.integers(low, high, (40, 40, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        refuse_unnormalised(openai(picture), openai)
        refuse_unnormalised(half(picture), half)

    refuse_unnormalised(torch.zeros(3, 32, 32), openai)
    # pixels from 0 to 1 are what this one makes
    noise = Image.fromarray(random_pixels(40, 40, 3))
    refuse_unnormalised(plain(noise), plain)


def test_pairs_of_image_and_label_are_told_where_they_belong(paths: list[Path]) -> None:
    pairs: Any = [(Image.open(paths[0]), 1)]
    with pytest.raises(UserError, match="pairs come from a torch Dataset"):
        as_batch(pairs, PREPROCESS)


def test_unnormalised_pixels_of_the_cpu_are_refused() -> None:
    """Bytes divided by 255, as torchvision's ToTensor makes them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (1, 3, 16, 16), generator=generator) / 255
    with pytest.raises(UserError, match="as torchvision's ToTensor makes them"):
        as_batch(pixels, PREPROCESS)
