"""Streams from features: the predictions of pixels, encoded once and after any change anew."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cliquetta.data.dataset import FileDataset
from cliquetta.data.prepared import FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.registry import (
    create_method,
    method_config,
    method_entries,
)
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import ViewSpec
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tolerance import FEATURE
from tests._helpers.trees import numbered_photos

FEW_VIEWS = ViewSpec("resized-crop", 4)


def feature_level() -> list[str]:
    plain = [entry for entry in method_entries() if entry.fit is None]
    return [entry.name for entry in plain if issubclass(entry.adapter, FeatureLevel)]


def build(method: str, model: CLIP, prompts: ClassPrompts) -> FeatureLevel:
    config = method_config(method)
    if hasattr(config, "views"):
        config = replace(config, views=4)
    adapter = create_method(method, model, prompts, config)
    assert isinstance(adapter, FeatureLevel)
    return adapter


@pytest.mark.parametrize("count", [1, 2], ids=["one dataset", "two datasets"])
@pytest.mark.parametrize("method", feature_level())
def test_methods_predict_from_features_as_from_pixels(
    method: str,
    count: int,
    tiny_clip: CLIP,
    tiny_prompts: ClassPrompts,
    tmp_path: Path,
) -> None:
    adapter = build(method, tiny_clip, tiny_prompts)
    data = [made_up_dataset(30, id="a"), made_up_dataset(25, id="b", seed=1)]
    stream = Stream(
        data[:count],
        tiny_clip.preprocess,
        8,
        seed=3,
        views=adapter.views,
        view_seed=5,
        limit=40,
    )
    from_pixels = evaluate(adapter, stream, out=tmp_path / "pixels")
    stored = FeatureStream(stream, tiny_clip, tmp_path / "cache")
    from_features = evaluate(adapter, stored, out=tmp_path / "features")
    assert from_features.id == from_pixels.id
    assert from_features.environment["features"] == "kept"

    ours = load_predictions(tmp_path / "features" / from_features.id)
    theirs = load_predictions(tmp_path / "pixels" / from_pixels.id)
    assert ours.keys == theirs.keys
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=FEATURE)


@pytest.mark.parametrize("shape", [(2, 4, 23), (2, 23), (24,), (2, 0, 24)], ids=str)
def test_features_of_the_wrong_shape_are_refused(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, shape: tuple[int, ...]
) -> None:
    adapter = build("tda", tiny_clip, tiny_prompts)
    features = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"\(B, V, 24\)"):
        adapter.predict_features(features)


def test_features_of_no_images_are_predicted(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts
) -> None:
    adapter = build("tda", tiny_clip, tiny_prompts)
    no_images = torch.zeros(0, 1, 24)
    assert adapter.predict_features(no_images).logits.shape == (0, 5)


def watch(model: CLIP, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that pass a model's tower together."""
    passed: list[int] = []
    encode = model.encode_image

    def counted(pixels: torch.Tensor, **options: Any) -> torch.Tensor:
        passed.append(len(pixels))
        return encode(pixels, **options)

    monkeypatch.setattr(model, "encode_image", counted)
    return passed


def run_through(stream: Stream, model: CLIP, folder: Path) -> list[tuple[str, ...]]:
    return [batch.keys for batch, _ in FeatureStream(stream, model, folder).batches()]


def test_what_features_depend_on_makes_new_ones_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build_tiny_clip()
    passed = watch(model, monkeypatch)
    data = made_up_dataset()
    same_list_other_pictures = made_up_dataset(seed=1)
    other_mean = replace(model.preprocess, mean=(0.0, 0.0, 0.0))
    other_views = replace(FEW_VIEWS, kind="zoom-crop")
    streams = [
        Stream(data, model.preprocess),
        Stream(same_list_other_pictures, model.preprocess),
        Stream(data, other_mean),
        Stream(data, model.preprocess, views=FEW_VIEWS),
        Stream(data, model.preprocess, views=FEW_VIEWS, view_seed=1),
        Stream(data, model.preprocess, views=other_views),
        Stream(data, model.preprocess, 8, seed=1),  # shares those of the first
    ]
    for _ in range(2):
        for stream in streams:
            run_through(stream, model, tmp_path)
    assert sum(passed) == 3 * 50 + 3 * 200

    # another model encodes the pictures of the first stream anew
    other = build_tiny_clip(seed=1)
    passed_other = watch(other, monkeypatch)
    run_through(streams[0], other, tmp_path)
    assert sum(passed_other) == 50


@pytest.fixture
def photos(tmp_path: Path) -> FileDataset:
    """Ten files, of which the fourth is no picture."""
    paths = numbered_photos(tmp_path, 10, [3])
    return FileDataset(
        "photos",
        paths,
        names=TINY_NAMES,
        keys=[path.name for path in paths],
        labels=[0, 1] * 5,
    )


def test_unreadable_files_are_remembered_and_counted(
    photos: FileDataset,
    tiny_clip: CLIP,
    tiny_prompts: ClassPrompts,
    tmp_path: Path,
    caplog: Any,
) -> None:
    adapter = build("zero_shot", tiny_clip, tiny_prompts)
    stream = Stream(photos, tiny_clip.preprocess, 4, seed=1)
    pixels = evaluate(adapter, stream)
    caplog.clear()
    for _ in range(2):
        stored = FeatureStream(
            Stream(photos, tiny_clip.preprocess, 4, seed=1), tiny_clip, tmp_path
        )
        record = evaluate(adapter, stored)
        assert record.skipped == pixels.skipped
        assert record.images == 9
        assert record.metrics["top1"] == pixels.metrics["top1"]
    assert caplog.text.count("3.png") == 1


def test_repaired_files_are_read_again(
    photos: FileDataset, tiny_clip: CLIP, tmp_path: Path
) -> None:
    stream = Stream(photos, tiny_clip.preprocess, 10)
    (readable,) = run_through(stream, tiny_clip, tmp_path)
    assert len(readable) == 9
    shutil.copy(photos.paths[0], photos.paths[3])
    (repaired,) = run_through(stream, tiny_clip, tmp_path)
    assert len(repaired) == 10
