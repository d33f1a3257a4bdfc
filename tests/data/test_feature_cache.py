"""Features once: the same answers as from pixels; neither damage nor company hurts the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cliquetta.data import feature_cache
from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.feature_cache import FEATURES, TABLE, FeatureBlock, TableLayout, open_table
from cliquetta.data.prepared import FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.registry import create_method, method_config, method_entries
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import ViewSpec
from tests._helpers.streaming import Drift, DriftConfig, made_up_dataset
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip
from tests._helpers.tolerance import FEATURE

LAYOUT = TableLayout({"of": "squares"}, (50, 1, 4), rows=8)
FEW_VIEWS = ViewSpec("resized-crop", 4)


class Squares:
    """Row i is i squared; counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[range] = []

    def __call__(self, blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        for rows in blocks:
            self.asked.append(rows)
            values = np.array(rows, dtype=np.float32)[:, None, None] ** 2
            yield FeatureBlock(np.tile(values, (1, 1, 4)), {7: "torn"} if 7 in rows else {})


def squares() -> np.ndarray:
    return np.tile(np.arange(50, dtype=np.float32)[:, None, None] ** 2, (1, 1, 4))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a finished table."""
    open_table(tmp_path, LAYOUT, Squares())
    return tmp_path / LAYOUT.name


def test_a_table_is_made_once(made: Path) -> None:
    encode = Squares()
    table = open_table(made.parent, LAYOUT, encode)
    assert encode.asked == []
    assert isinstance(table.features, np.memmap)
    np.testing.assert_array_equal(table.features, squares())
    assert table.unreadable == {7: "torn"}


def test_another_layout_is_another_table(made: Path) -> None:
    for other in (replace(LAYOUT, depends_on={"of": "cubes"}), replace(LAYOUT, rows=16)):
        encode = Squares()
        open_table(made.parent, other, encode)
        assert sum(map(len, encode.asked)) == 50


@pytest.mark.parametrize("byte", [-1, -400, 200])
def test_a_flipped_bit_costs_its_block_only(
    made: Path, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray((made / FEATURES).read_bytes())
    data[byte] ^= 0x10
    (made / FEATURES).write_bytes(data)
    encode = Squares()
    np.testing.assert_array_equal(open_table(made.parent, LAYOUT, encode).features, squares())
    assert len(encode.asked) == 1
    assert "1 of 7 blocks" in caplog.text
    assert "damaged" in caplog.text


DAMAGES: list[tuple[str, Any]] = [
    *((FEATURES, size) for size in (0, 5, 128, 500)),
    *((TABLE, text) for text in ("", "{", "[]", '{"blocks": [[0]]}', '{"blocks": 3}')),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_cut_or_damaged_file_is_made_again(made: Path, name: str, damage: Any) -> None:
    if isinstance(damage, int):
        os.truncate(made / name, damage)
    else:
        (made / name).write_text(damage)
    table = open_table(made.parent, LAYOUT, Squares())
    np.testing.assert_array_equal(table.features, squares())
    assert table.unreadable == {7: "torn"}


def test_a_foreign_file_and_a_changed_note_are_noticed(made: Path) -> None:
    np.save(made / FEATURES, np.zeros((50, 1, 5), np.float32))
    np.testing.assert_array_equal(open_table(made.parent, LAYOUT, Squares()).features, squares())
    stated = json.loads((made / TABLE).read_text())
    stated["blocks"][0][2] = [[6, "torn"]]
    (made / TABLE).write_text(json.dumps(stated))
    assert open_table(made.parent, LAYOUT, Squares()).unreadable == {7: "torn"}


def test_an_interrupted_build_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SAVE_SECONDS", 0.0)
    progress: list[tuple[int, int]] = []

    def die(done: int, total: int) -> None:
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_table(tmp_path, LAYOUT, Squares(), on_progress=die)
    encode = Squares()
    table = open_table(tmp_path, LAYOUT, encode, on_progress=lambda *now: progress.append(now))
    np.testing.assert_array_equal(table.features, squares())
    assert encode.asked[0].start == 24  # three blocks were written down, the fourth was not
    assert progress[-1] == (50, 50)


def test_a_block_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    def wrong(blocks: Sequence[range]) -> Iterator[FeatureBlock]:
        yield FeatureBlock(np.zeros((3, 1, 4), np.float32))

    with pytest.raises(ValueError, match="a block of 8 rows"):
        open_table(tmp_path, LAYOUT, wrong)


def build_and_count(folder: Path, asked: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    encode = Squares()
    table = open_table(folder, LAYOUT, encode)
    asked.put((len(encode.asked), bool((table.features == squares()).all())))


def test_two_processes_share_one_table(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    asked = context.Queue()
    both = [context.Process(target=build_and_count, args=(tmp_path, asked)) for _ in range(2)]
    for process in both:
        process.start()
    answers = sorted(asked.get(timeout=20) for _ in both)
    for process in both:
        process.join()
    assert answers == [(0, True), (7, True)]


# --- streams ------------------------------------------------------------------------------------


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


def stream_for(adapter: FeatureLevel, data: Dataset | list[Dataset], model: CLIP) -> Stream:
    return Stream(data, model.preprocess, 8, seed=3, views=adapter.views, view_seed=5, limit=40)


@pytest.mark.parametrize("method", feature_level())
def test_methods_answer_from_features_as_from_pixels(
    method: str, tiny_clip: CLIP, tiny_prompts: ClassPrompts, tmp_path: Path
) -> None:
    adapter = build(method, tiny_clip, tiny_prompts)
    data = [made_up_dataset(30, id="a"), made_up_dataset(25, id="b", seed=1)]
    for domains in (data[:1], data):
        stream = stream_for(adapter, domains, tiny_clip)  # type: ignore[arg-type]
        pixels = evaluate(adapter, stream, out=tmp_path / "pixels")
        kept = FeatureStream(stream, tiny_clip, tmp_path / "cache")
        features = evaluate(adapter, kept, out=tmp_path / "features")
        assert features.id == pixels.id
        assert features.environment["features"] == "kept"
        ours = load_predictions(tmp_path / "features" / features.id)
        theirs = load_predictions(tmp_path / "pixels" / pixels.id)
        assert ours.keys == theirs.keys
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=FEATURE)


def test_a_method_that_looks_at_pixels_is_refused(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tmp_path: Path
) -> None:
    adapter = Drift(tiny_clip, tiny_prompts, DriftConfig())
    stream = FeatureStream(Stream(made_up_dataset(), tiny_clip.preprocess), tiny_clip, tmp_path)
    with pytest.raises(ValueError, match="needs images and a model"):
        evaluate(adapter, stream)


@pytest.mark.parametrize("shape", [(2, 4, 23), (2, 23), (24,), (2, 0, 24)])
def test_features_of_the_wrong_shape_are_refused(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"\(B, V, 24\)"):
        build("tda", tiny_clip, tiny_prompts).predict_features(torch.zeros(shape))


def test_no_images_no_logits(tiny_clip: CLIP, tiny_prompts: ClassPrompts) -> None:
    adapter = build("zero", tiny_clip, tiny_prompts)
    assert adapter.predict_features(torch.zeros(0, 4, 24)).logits.shape == (0, 5)


class Counting:
    """Counts images that pass a model's tower."""

    def __init__(self, model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images = 0
        encode = model.encode_image

        def counted(pixels: torch.Tensor, **options: Any) -> torch.Tensor:
            self.images += len(pixels)
            return encode(pixels, **options)

        monkeypatch.setattr(model, "encode_image", counted)


def run_through(stream: Stream, model: CLIP, folder: Path) -> list[tuple[str, ...]]:
    return [batch.keys for batch, _ in FeatureStream(stream, model, folder).batches()]


def test_orders_seeds_and_batch_sizes_share_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, data = build_tiny_clip(), made_up_dataset()
    tower = Counting(model, monkeypatch)
    for seed, size in ((0, 8), (1, 8), (1, 50)):
        run_through(Stream(data, model.preprocess, size, seed=seed), model, tmp_path)
    assert tower.images == 50


def test_whatever_features_depend_on_makes_new_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, data = build_tiny_clip(), made_up_dataset()
    other = build_tiny_clip(seed=1)
    tower, second = Counting(model, monkeypatch), Counting(other, monkeypatch)
    streams = [
        Stream(data, model.preprocess),
        Stream(made_up_dataset(seed=1), model.preprocess),  # the same list, other pictures
        Stream(data, replace(model.preprocess, mean=(0.0, 0.0, 0.0))),
        Stream(data, model.preprocess, views=FEW_VIEWS),
        Stream(data, model.preprocess, views=FEW_VIEWS, view_seed=1),
        Stream(data, model.preprocess, views=replace(FEW_VIEWS, kind="zoom-crop")),
    ]
    for _ in range(2):
        for stream in streams:
            run_through(stream, model, tmp_path)
    assert tower.images == 3 * 50 + 3 * 200
    run_through(streams[0], other, tmp_path)
    assert second.images == 50


@pytest.fixture
def photos(tmp_path: Path) -> FileDataset:
    """Ten files, of which the fourth is no picture."""
    pictures = made_up_dataset(10).images
    paths = [tmp_path / f"{i}.png" for i in range(10)]
    for path, picture in zip(paths, pictures, strict=True):
        Image.fromarray(picture).save(path)
    paths[3].write_bytes(b"no picture")
    keys = [path.name for path in paths]
    return FileDataset("photos", paths, names=TINY_NAMES, keys=keys, labels=[0, 1] * 5)


def test_unreadable_files_are_remembered_and_counted(
    photos: FileDataset, tiny_clip: CLIP, tiny_prompts: ClassPrompts, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    adapter = build("zero_shot", tiny_clip, tiny_prompts)
    stream = Stream(photos, tiny_clip.preprocess, 4, seed=1)
    pixels = evaluate(adapter, stream)
    caplog.clear()
    for _ in range(2):
        kept = FeatureStream(Stream(photos, tiny_clip.preprocess, 4, seed=1), tiny_clip, tmp_path)
        record = evaluate(adapter, kept)
        assert record.skipped == pixels.skipped
        assert record.images == 9
        assert record.metrics["top1"] == pixels.metrics["top1"]
    assert caplog.text.count("3.png") == 1


def test_a_repaired_file_is_read_again(
    photos: FileDataset, tiny_clip: CLIP, tmp_path: Path
) -> None:
    stream = Stream(photos, tiny_clip.preprocess, 10)
    (keys,) = run_through(stream, tiny_clip, tmp_path)
    assert len(keys) == 9
    shutil.copy(photos.paths[0], photos.paths[3])
    (keys,) = run_through(stream, tiny_clip, tmp_path)
    assert len(keys) == 10


def test_a_run_on_features_can_be_taken_up_again(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tmp_path: Path
) -> None:
    adapter = build("tda", tiny_clip, tiny_prompts)
    kept = FeatureStream(stream_for(adapter, made_up_dataset(), tiny_clip), tiny_clip, tmp_path)
    whole = evaluate(adapter, kept, out=tmp_path / "whole")

    def die(step: Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(adapter, kept, out=tmp_path / "broken", on_step=die, save_every=1)
    again = evaluate(adapter, kept, out=tmp_path / "broken")
    assert again.resumed == 1
    paths = [tmp_path / name / whole.id / "predictions.jsonl" for name in ("whole", "broken")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
