"""Features that were encoded elsewhere: every way in gives what the model itself would."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import cliquetta
from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.registry import method_config, method_entries
from cliquetta.model.clip import CLIP
from cliquetta.model.wrapped import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tolerance import LOGIT
from tests._helpers.trees import table_rows

LABELS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.fixture(scope="module")
def text(tiny_clip: CLIP) -> Tensor:
    return tiny_clip.classifier(ClassPrompts(TINY_NAMES))


@pytest.fixture(scope="module")
def images(tiny_clip: CLIP, tiny_images: Tensor) -> Tensor:
    """Not of length one, as an API may return them."""
    return 3 * tiny_clip.encode_image(tiny_images)


def save(path: Path, features: Tensor, **lists: Any) -> Path:
    """Features and lists of names or numbers in a file of any kind."""
    if path.suffix == ".npy":
        np.save(path, features.numpy())
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {
            name: np.array(value) for name, value in lists.items()
        }
        np.savez(path, features=features.numpy(), **arrays)
    else:
        expected_names = {name: json.dumps(value) for name, value in lists.items()}
        save_file({"features": features.contiguous()}, path, metadata=expected_names)
    return path


def predictions(given: Any, text: Any, **options: Any) -> list[tuple[str, float]]:
    options = {"method": "tda", "batch_size": 4, "classes": TINY_NAMES, **options}
    rows = predict(given, text_features=text, **options).rows
    return [(row["prediction"], row["probability"]) for row in rows]


def written(path: Path) -> list[tuple[str, float]]:
    return [(row["prediction"], float(row["probability"])) for row in table_rows(path)]


WORKS = [
    entry.name
    for entry in method_entries()
    if issubclass(entry.adapter, FeatureLevel)
    and not entry.adapter.needs
    and entry.fit is None
]


@pytest.mark.parametrize("name", WORKS)
def test_features_give_what_images_give(
    name: str, tiny_clip: CLIP, tiny_images: Tensor, images: Tensor, text: Tensor
) -> None:
    """With one view per image; the model's own scale is 10."""
    options = {} if name not in ("zero", "mta", "tps", "dpe", "dmn") else {"views": 1}
    config = method_config(name, options=options)
    seen = cliquetta.create_method(name, tiny_clip, TINY_NAMES, config)
    prompts = ClassPrompts(TINY_NAMES, features=text)
    model = FeaturesOnly(24, scale=tiny_clip.scale)
    given = cliquetta.create_method(name, model, prompts, config)
    unit = torch.nn.functional.normalize(images, dim=-1)
    assert isinstance(given, FeatureLevel)
    for rows in (slice(0, 4), slice(4, 10)):
        actual = given.predict_features(unit[rows])
        expected = seen.predict(tiny_images[rows])
        torch.testing.assert_close(
            actual.logits, expected.logits, atol=LOGIT, rtol=LOGIT
        )


def test_every_way_in_gives_the_same_predictions(
    images: Tensor, text: Tensor, tmp_path: Path
) -> None:
    frame = pd.DataFrame(
        {"path": [f"{i}.jpg" for i in range(10)], "vector": list(images.numpy())}
    )
    lists = {"keys": [f"{i}.jpg" for i in range(10)], "labels": LABELS}
    expected = predictions(images, text)
    assert len({name for name, _ in expected}) > 1
    for given in (
        images.numpy(),
        images.to(torch.float64).numpy(),
        torch.stack(
            [images, images.roll(1, 0)], dim=1
        ),  # the first view is the plain one
        frame,
        *(
            save(tmp_path / f"f{end}", images, **lists)
            for end in (".npy", ".npz", ".safetensors")
        ),
    ):
        assert predictions(given, text.numpy()) == expected
    for end in (".npy", ".npz", ".safetensors"):
        names = {"names": list(TINY_NAMES)[::-1]} if end != ".npy" else {}
        rows = text if end == ".npy" else text.flip(0)
        file = save(tmp_path / f"text{end}", rows, **names)
        assert predictions(images, file) == expected
    run = predict(frame, TINY_NAMES, text_features=text, method="tda")
    assert [row["path"] for row in run.rows] == list(frame["path"])


def test_a_loaded_model_encodes_the_class_names(
    tiny_clip: CLIP, images: Tensor
) -> None:
    run = predict(images, TINY_NAMES, model=tiny_clip, method="zero_shot")
    expected = tiny_clip.scale * torch.nn.functional.normalize(images, dim=-1)
    expected = expected @ tiny_clip.classifier(ClassPrompts(TINY_NAMES)).T
    expected_names = [TINY_NAMES[i] for i in expected.argmax(dim=1).tolist()]
    assert [row["prediction"] for row in run.rows] == expected_names


def test_state_is_continued_and_the_file_is_complete(
    images: Tensor, text: Tensor, tmp_path: Path
) -> None:
    uninterrupted = predictions(images, text)
    state = tmp_path / "state.safetensors"
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for file, rows in zip(files, (slice(0, 4), slice(4, 10)), strict=True):
        predictions(images[rows], text, state=state, out=file)
    assert [row for file in files for row in written(file)] == uninterrupted
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "a.csv",
        "b.csv",
        state.name,
    }


def test_bad_features_are_refused_and_nothing_is_written(
    images: Tensor, text: Tensor, tmp_path: Path
) -> None:
    nan = images.clone()
    zero = images.clone()
    zero_text = text.clone()
    nan[7, 3], zero[2], zero_text[1] = torch.nan, 0, 0
    ragged = pd.DataFrame({"features": [[1.0, 2.0], [1.0]]})
    others = r".*moon.*tda.*zero_shot"
    for features, texts, options, sentence in (
        (images[:, :20], text, {}, "width 20, features-24 works with 24"),
        (nan, text, {}, "1 of 10 rows that are not finite .* row 7"),
        (zero, text, {}, "all zeros, the first is row 2"),
        (images, zero_text, {}, "text_features has 1 of 5 rows that are all zeros"),
        (images, text[:3], {}, "3 text features without names for 5 class names"),
        (images[0], text, {}, r"features holds \(24,\) float32"),
        (ragged, text, {}, "differ in width"),
        (images[:0], text, {}, r"holds \(0, 24\)"),
        (Path("gone.npz"), text, {}, "there is no gone.npz"),
        (
            images,
            text[:1],
            {"classes": ["airplane"]},
            r"one class, 'airplane'.*at least two",
        ),
        (images, text, {"group_by": "camera"}, "no groups, no cluster"),
        (images, text, {"method": "zero"}, "1 view of each image, the method wants 64"),
        (
            images,
            text,
            {"method": "domain_norm"},
            f"domain_norm needs images and a model{others}",
        ),
        (images, text, {"method": "tent"}, f"tent needs images and a model{others}"),
        (images, text, {"method": "tpt"}, f"tpt needs images and a model{others}"),
    ):
        with pytest.raises(UserError, match=sentence):
            files = {"out": tmp_path / "out.csv", "state": tmp_path / "state"}
            predictions(features, texts, **files, **options)
        assert not list(tmp_path.iterdir())


def test_the_commands(run: Any, images: Tensor, text: Tensor, tmp_path: Path) -> None:
    photos = save(tmp_path / "photos.npz", images, labels=LABELS)
    classes = save(tmp_path / "classes.npz", text, names=list(TINY_NAMES))
    features = ("--text-features", classes)
    out = tmp_path / "out.csv"
    ask = ("predict", "--features", photos, *features)
    assert run(*ask, "--batch-size", 4, "--method", "tda", "--out", out).code == 0
    assert written(out) == predictions(images, text)
    evaluate = ("evaluate", "--dataset", f"features:{photos}", *features)
    order = ("--method", "tda", "--order", "sequential", "--batch-size", 4, "--json")
    _, tda = json.loads(run(*evaluate, *order, "--out", tmp_path / "runs").stdout)
    labels = [TINY_NAMES.index(name) for name, _ in written(out)]
    right = sum(a == b for a, b in zip(labels, LABELS, strict=True))
    assert tda["images"] == 10 and tda["metrics"]["top1"] == pytest.approx(10.0 * right)
    for words, sentence in (
        (ask, "methods that run on features are"),
        (("predict", *features), ""),
        (("predict", photos, "--features", photos), ""),
        ((*evaluate, "--method", "tent"), "tent needs images and a model"),
        ((*evaluate, "--method", "tda", "--evidence"), "leave out --evidence"),
        ((*evaluate, "--method", "tda", "--features", photos), "--dataset features:"),
        (
            ("evaluate", "--dataset", f"features:{photos}@fog:3", *features),
            "needs images",
        ),
    ):
        assert run(*words, "--out", tmp_path / "refused").refuses(sentence)
    assert not (tmp_path / "refused").exists()


def test_text_features_beside_an_image_tower_replace_its_texts(
    run: Any, photos: Path, tiny_file: Path, text: Tensor, tmp_path: Path
) -> None:
    """Its own features change nothing; with the rows of two classes swapped, so are answers."""
    names = list(TINY_NAMES)
    same = save(tmp_path / "same.npz", text, names=names)
    swapped = save(
        tmp_path / "swapped.npz", text, names=[names[1], names[0], *names[2:]]
    )

    def predicted(*words: Any) -> list[tuple[str, float]]:
        out = tmp_path / "out.csv"
        ask = (
            "predict",
            photos,
            "--model",
            tiny_file,
            "--method",
            "tda",
            "--overwrite",
        )
        assert run(*ask, "--out", out, *words).code == 0
        return written(out)

    by_tower = predicted("--classes", ",".join(names))
    by_file = predicted("--text-features", same)
    assert [name for name, _ in by_file] == [name for name, _ in by_tower]
    assert [p for _, p in by_file] == pytest.approx([p for _, p in by_tower], abs=1e-5)
    other = {names[0]: names[1], names[1]: names[0]}
    expected = [other.get(name, name) for name, _ in by_tower]
    assert [name for name, _ in predicted("--text-features", swapped)] == expected
    some = predicted("--text-features", same, "--classes", ",".join(names[:2]))
    assert {name for name, _ in some} <= set(names[:2])
    python = predict([photos], text_features=same, model=str(tiny_file), method="tda")
    assert [row["prediction"] for row in python.rows] == [name for name, _ in by_file]


def test_text_features_that_do_not_fit_the_tower_are_refused(
    run: Any, photos: Path, tiny_file: Path, text: Tensor, tmp_path: Path
) -> None:
    narrow = save(tmp_path / "narrow.npz", text[:, :3], names=list(TINY_NAMES))
    ask = ("predict", photos, "--out", tmp_path / "out.csv", "--text-features", narrow)
    assert run(*ask, "--model", tiny_file).refuses("text features are 3 wide")
    assert run(*ask).refuses("no model: name one")
    assert not (tmp_path / "out.csv").exists()
