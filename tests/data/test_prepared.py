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


@pytest.mark.parametrize("method", feature_level())
def test_methods_predict_from_features_as_from_pixels(
    method: str, tiny_clip: CLIP, tiny_prompts: ClassPrompts, tmp_path: Path
) -> None:
    adapter = build(method, tiny_clip, tiny_prompts)
    data = [made_up_dataset(30, id="a"), made_up_dataset(25, id="b", seed=1)]
    for domains in (data[:1], data):
        settings: Any = {"seed": 3, "views": adapter.views, "view_seed": 5, "limit": 40}
        stream = Stream(domains, tiny_clip.preprocess, 8, **settings)
        pixels = evaluate(adapter, stream, out=tmp_path / "pixels")
        stored = FeatureStream(stream, tiny_clip, tmp_path / "cache")
        features = evaluate(adapter, stored, out=tmp_path / "features")
        assert features.id == pixels.id and features.environment["features"] == "kept"
        ours = load_predictions(tmp_path / "features" / features.id)
        theirs = load_predictions(tmp_path / "pixels" / pixels.id)
        assert ours.keys == theirs.keys
        np.testing.assert_allclose(
            ours.probabilities, theirs.probabilities, atol=FEATURE
        )


@pytest.mark.parametrize("shape", [(2, 4, 23), (2, 23), (24,), (2, 0, 24)])
def test_features_of_the_wrong_shape_are_refused(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, shape: tuple[int, ...]
) -> None:
    adapter = build("tda", tiny_clip, tiny_prompts)
    with pytest.raises(ValueError, match=r"\(B, V, 24\)"):
        adapter.predict_features(torch.zeros(shape))
    assert adapter.predict_features(torch.zeros(0, 1, 24)).logits.shape == (0, 5)


def watch(model: CLIP, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that pass a model's tower together."""
    passed, encode = list[int](), model.encode_image

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
    model, other, data = build_tiny_clip(), build_tiny_clip(seed=1), made_up_dataset()
    first, second = watch(model, monkeypatch), watch(other, monkeypatch)
    streams = [
        Stream(data, model.preprocess),
        Stream(
            made_up_dataset(seed=1), model.preprocess
        ),  # the same list, other pictures
        Stream(data, replace(model.preprocess, mean=(0.0, 0.0, 0.0))),
        Stream(data, model.preprocess, views=FEW_VIEWS),
        Stream(data, model.preprocess, views=FEW_VIEWS, view_seed=1),
        Stream(data, model.preprocess, views=replace(FEW_VIEWS, kind="zoom-crop")),
        Stream(data, model.preprocess, 8, seed=1),  # shares those of the first
    ]
    for _ in range(2):
        for stream in streams:
            run_through(stream, model, tmp_path)
    assert sum(first) == 3 * 50 + 3 * 200
    run_through(streams[0], other, tmp_path)
    assert sum(second) == 50


@pytest.fixture
def photos(tmp_path: Path) -> FileDataset:
    """Ten files, of which the fourth is no picture."""
    paths = numbered_photos(tmp_path, 10, [3])
    keys = [path.name for path in paths]
    return FileDataset("photos", paths, names=TINY_NAMES, keys=keys, labels=[0, 1] * 5)


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
        assert record.skipped == pixels.skipped and record.images == 9
        assert record.metrics["top1"] == pixels.metrics["top1"]
    assert caplog.text.count("3.png") == 1


def test_repaired_files_are_read_again(
    photos: FileDataset, tiny_clip: CLIP, tmp_path: Path
) -> None:
    stream = Stream(photos, tiny_clip.preprocess, 10)
    assert [len(keys) for keys in run_through(stream, tiny_clip, tmp_path)] == [9]
    shutil.copy(photos.paths[0], photos.paths[3])
    assert [len(keys) for keys in run_through(stream, tiny_clip, tmp_path)] == [10]
