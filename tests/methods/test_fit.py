"""Few-shot examples, the training loop, and files of fitted tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import ArrayDataset
from cliquetta.methods.building.few_shot import (
    FitStep,
    FitTask,
    SGDTraining,
    TextTraining,
    epoch_batches,
    feature_draw,
    learn,
)
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.coop import CoOpConfig
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import create_method, method_config, method_entries
from cliquetta.methods.state import load_method, read_header
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.separable import TWO, WHOLE, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tolerance import ADAPTED, FEATURE, LOGIT

SHORT = CoOpConfig(context_length=3, epochs=2)


def test_shots_are_drawn_per_class_and_by_seed() -> None:
    dataset, preprocess = get_dataset("bundled-fewshot"), Preprocess(32)
    first, again, other = (FewShot.from_dataset(dataset, 4, preprocess, seed) for seed in (0, 0, 1))
    assert first.labels.bincount().tolist() == [4] * 10
    assert first.shots == 4
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    everything = FewShot.from_dataset(dataset, 16, preprocess)
    pictures = torch.from_numpy(np.array(dataset.arrays(range(160)))).permute(0, 3, 1, 2)
    assert torch.equal(everything.images, pictures)
    assert torch.equal(everything.labels, dataset.labels)  # type: ignore[arg-type]


def test_pictures_of_another_size_are_preprocessed_alike() -> None:
    dataset = get_dataset("bundled-fewshot")
    few = FewShot.from_dataset(dataset, 1, Preprocess(40))
    row = int((dataset.labels == few.labels[3]).nonzero()[0])
    candidates = [
        torch.from_numpy(np.array(Preprocess(40).picture(dataset.load(i)))).permute(2, 0, 1)
        for i in range(row, row + 16)
    ]
    assert any(torch.equal(few.images[3], picture) for picture in candidates)


def test_too_many_shots_missing_labels_and_other_classes_are_refused() -> None:
    dataset, preprocess = get_dataset("bundled-fewshot"), Preprocess(32)
    with pytest.raises(ValueError, match="16 images of 'airplane', 17 were asked"):
        FewShot.from_dataset(dataset, 17, preprocess)
    blank = np.zeros((2, 32, 32, 3), np.uint8)
    unlabelled = ArrayDataset("mine", blank, names=("a",), keys=("1", "2"), labels=None)
    with pytest.raises(ValueError, match="mine has no labels"):
        FewShot.from_dataset(unlabelled, 1, preprocess)
    labelled = ArrayDataset("mine", blank, names=("a",), keys=("1", "2"), labels=[0, 0])
    with pytest.raises(ValueError, match="share one class list"):
        FewShot.from_dataset(dataset, 1, preprocess, validation=labelled)
    held = FewShot.from_dataset(dataset, 1, preprocess, validation=dataset).validation
    assert held is not None
    assert len(held) == 160


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 8, 9), torch.zeros(2, dtype=torch.int64), "n, 3, S, S"),
        (torch.zeros(2, 3, 8, 8), torch.zeros(3, dtype=torch.int64), "need 2 labels"),
        (torch.zeros(2, 3, 8, 8), torch.zeros(2), "int64"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), "uint8"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64), "at least one"),
        (torch.zeros(1, 3, 8, 8), torch.tensor([-1]), "must all have a label"),
    ],
)
def test_examples_are_checked_at_the_door(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FewShot(images, labels)


def test_crops_of_pictures_and_of_their_pixels_agree(tiny_clip: CLIP) -> None:
    pictures = FewShot.from_dataset(get_dataset("bundled-fewshot"), 1, tiny_clip.preprocess)
    rows = np.arange(10)
    pixels = FewShot(pictures.pixels(rows, tiny_clip), pictures.labels)
    a, b = (
        few.crops(rows, tiny_clip, np.random.default_rng(3), scale=(0.3, 1.0), count=3)
        for few in (pictures, pixels)
    )
    assert a.shape == (10, 3, 3, 32, 32)
    torch.testing.assert_close(a, b, atol=0.03, rtol=0)  # 8-bit rounding
    assert not torch.equal(a[:, 0], a[:, 1])
    whole = pictures.crops(rows, tiny_clip, np.random.default_rng(3), scale=WHOLE)[:, 0]
    plain = pixels.images
    same = (whole == plain).flatten(1).all(1) | (whole == plain.flip(-1)).flatten(1).all(1)
    assert same.all()


def test_the_schedule_is_a_warm_up_and_a_cosine_per_epoch() -> None:
    config = SGDTraining(lr=0.2, warmup_lr=0.01)
    rates = [config.lr_at(epoch, 4) for epoch in range(4)]
    expected = [0.01, 0.2, 0.1 * (1 + math.cos(math.pi / 4)), 0.1]
    assert rates == pytest.approx(expected)
    assert [config.epochs_for(shots) for shots in (1, 2, 4, 8, 16)] == [50, 100, 100, 200, 200]
    assert replace(config, epochs=7).epochs_for(16) == 7


def test_an_epoch_shows_every_image_once_and_drops_a_short_batch() -> None:
    generator = np.random.default_rng(0)
    whole = [rows.tolist() for rows in epoch_batches(10, 4, generator, drop_last=False)]
    assert [len(rows) for rows in whole] == [4, 4, 2]
    assert sorted(row for rows in whole for row in rows) == list(range(10))
    assert [len(r) for r in epoch_batches(10, 4, generator, drop_last=True)] == [4, 4]
    assert [len(r) for r in epoch_batches(3, 4, generator, drop_last=True)] == [3]


def test_the_loop_is_torch_sgd_with_momentum(tiny_clip: CLIP) -> None:
    """Three epochs on a quadratic, against the recurrence written out."""
    config = SGDTraining(
        epochs=3, lr=0.1, momentum=0.5, weight_decay=0.2, warmup_lr=0.3, crop_scale=WHOLE
    )
    steps: list[FitStep] = []
    found = learn(
        {"x": torch.tensor([1.0, -2.0])},
        lambda learned, pixels, labels: (learned["x"] ** 2).sum() / 2,
        FitTask(tiny_clip, TWO, make_examples(2), on_step=steps.append),
        config,
    )["x"]
    x, velocity = np.array([1.0, -2.0]), np.zeros(2)
    for rate in (0.3, 0.1, 0.05 * (1 + math.cos(math.pi / 3))):
        velocity = 0.5 * velocity + x + 0.2 * x
        x = x - rate * velocity
    np.testing.assert_allclose(found, x, rtol=FEATURE)
    assert [(s.step, s.steps, s.epoch) for s in steps] == [(1, 3, 0), (2, 3, 1), (3, 3, 2)]
    assert steps[0].loss == pytest.approx(2.5)


def test_a_loss_that_is_no_number_stops_the_fit(tiny_clip: CLIP) -> None:
    with pytest.raises(ArithmeticError, match="lower lr"):
        learn(
            {"x": torch.ones(1)},
            lambda learned, pixels, labels: learned["x"].sum() * math.nan,
            FitTask(tiny_clip, TWO, make_examples(1)),
            SGDTraining(epochs=1),
        )


@pytest.mark.parametrize("name", ["coop", "cocoop"])
def test_a_pool_of_whole_images_fits_as_fresh_ones_do(tiny_clip: CLIP, name: str) -> None:
    """Whole images that look the same in the mirror leave nothing to a crop's chance."""
    options = {"context_init": "a photo of a", "crop_scale": WHOLE, "epochs": 4, "lr": 0.1}
    config = method_config(name, options={**options, "batch_size": 4})
    fresh, pooled = (
        fit_method(name, tiny_clip, TWO, make_examples(2), replace(config, crop_pool=pool)).fitted
        for pool in (None, 3)
    )
    for key, value in fresh.items():
        torch.testing.assert_close(pooled[key], value, atol=LOGIT, rtol=ADAPTED)
    moved = fresh["context"] - tiny_clip.context("a photo of a")
    assert moved.abs().max() > 1e-3


def test_a_pool_is_encoded_once_and_every_image_gets_crops_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_tiny_clip()  # of its own: an undone patch stays an attribute of the instance
    examples, config = make_examples(3), TextTraining(crop_pool=5, crop_scale=(0.3, 1.0))
    rng = np.random.default_rng([7, 0xF0])
    crops = examples.crops(np.arange(6), model, rng, scale=(0.3, 1.0), count=5)
    pool = torch.stack([model.encode_image(crop, normalize=True) for crop in crops])
    draw = feature_draw(FitTask(model, TWO, examples, seed=7), config)
    monkeypatch.setattr(model, "encode_image", lambda *_: pytest.fail("encoded again"))
    rows, generator, seen = np.array([4, 0, 3]), np.random.default_rng(0), set()
    for _ in range(40):
        far = (draw(rows, generator)[:, None] - pool[rows]).abs().amax(dim=-1)
        assert far.amin(dim=1).max() < FEATURE
        seen |= set(enumerate(far.argmin(dim=1).tolist()))
    assert len(seen) == 3 * 5


def test_equal_seeds_fit_equally_and_leave_the_world_alone(tiny_clip: CLIP) -> None:
    before = torch.get_rng_state()
    one, two, other = (
        fit_method("coop", tiny_clip, TWO, make_examples(2), SHORT, seed=seed).fitted["context"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    assert not one.requires_grad
    assert all(p.grad is None and not p.requires_grad for p in tiny_clip.parameters())


@pytest.mark.parametrize("name", ["coop", "cocoop", "maple", "tip_adapter", "tip_adapter_f"])
def test_a_file_brings_the_fitted_method_back(tiny_clip: CLIP, tmp_path: Path, name: str) -> None:
    options = {} if name == "tip_adapter" else {"epochs": 1}
    config = method_config(name, options=options)
    adapter = fit_method(name, tiny_clip, TWO, make_examples(2), config)
    path = tmp_path / "deep" / "fitted.safetensors"
    adapter.save(path, notes={"dataset": "mine"})
    loaded = load_method(path, tiny_clip)
    assert (loaded.name, loaded.config, loaded.prompts.names) == (name, config, TWO.names)
    assert read_header(path)["notes"] == {"dataset": "mine"}
    tensors = adapter.fitted
    assert all(torch.equal(loaded.fitted[key], value) for key, value in tensors.items())
    batch = Batch(make_images(2, seed=5)[0])
    direct = create_method(name, tiny_clip, TWO, config, fitted=tensors).predict(batch).logits
    assert torch.equal(load_method(path, tiny_clip, TWO).predict(batch).logits, direct)
    assert [file.name for file in path.parent.iterdir()] == ["fitted.safetensors"]


def test_a_file_of_other_weights_is_refused_but_another_dtype_is_not(
    tiny_clip: CLIP, tmp_path: Path
) -> None:
    path = tmp_path / "coop.safetensors"
    adapter = fit_method("coop", tiny_clip, TWO, make_examples(2), SHORT)
    adapter.save(path)
    with pytest.raises(ValueError, match="fit again"):
        load_method(path, build_tiny_clip(seed=1), TWO)
    half = build_tiny_clip().bfloat16()
    assert half.fingerprint != tiny_clip.fingerprint
    logits = load_method(path, half, TWO).predict(Batch(make_images(1, seed=0)[0])).logits
    assert torch.isfinite(logits).all()
    half.id = "another"
    with pytest.raises(ValueError, match="this is another"):
        load_method(path, half, TWO)


def test_tensors_are_needed_where_a_method_is_fitted_and_refused_elsewhere(tiny_clip: CLIP) -> None:
    few_shot = [entry.name for entry in method_entries() if entry.fit is not None]
    assert few_shot == ["cocoop", "coop", "maple", "tip_adapter", "tip_adapter_f"]
    for name in few_shot:
        with pytest.raises(ValueError, match=f"cliquetta fit --method {name}"):
            create_method(name, tiny_clip, TWO)
        with pytest.raises(ValueError, match="lack"):
            create_method(name, tiny_clip, TWO, fitted={})
    with pytest.raises(ValueError, match="without `fitted`"):
        create_method("zero_shot", tiny_clip, TWO, fitted={})
    with pytest.raises(ValueError, match="few-shot methods are cocoop, coop"):
        fit_method("zero_shot", tiny_clip, TWO, make_examples(1))
    with pytest.raises(TypeError, match="CoOpConfig"):
        fit_method("coop", tiny_clip, TWO, make_examples(1), method_config("maple"))


def test_tensors_of_another_shape_are_refused(tiny_clip: CLIP) -> None:
    with pytest.raises(ValueError, match=r"takes \(any, 32\)"):
        create_method("coop", tiny_clip, TWO, fitted={"context": torch.zeros(4, 31)})
    with pytest.raises(ValueError, match="'context' is"):
        create_method("coop", tiny_clip, TWO, fitted={"context": torch.zeros(2, 4, 32)})


def test_tensors_that_are_not_finite_are_refused(tiny_clip: CLIP) -> None:
    context = torch.zeros(16, 32)
    context[3, 4] = torch.nan
    with pytest.raises(ValueError, match="not finite: fit again"):
        create_method("coop", tiny_clip, TWO, fitted={"context": context})


def test_examples_that_do_not_fit_the_model_or_the_classes_are_refused(tiny_clip: CLIP) -> None:
    images, labels = make_images(1, seed=0)
    with pytest.raises(ValueError, match=r"model\.preprocess"):
        fit_method("coop", tiny_clip, TWO, FewShot(images[..., :16, :16], labels), SHORT)
    with pytest.raises(ValueError, match="holds 2 names"):
        fit_method("coop", tiny_clip, TWO, FewShot(images, labels + 1), SHORT)
    fixed = ClassPrompts(TWO.names, features=torch.ones(2, 24))
    with pytest.raises(ValueError, match="not fixed text features"):
        fit_method("coop", tiny_clip, fixed, FewShot(images, labels), SHORT)
    assert "keys" in fit_method("tip_adapter", tiny_clip, fixed, FewShot(images, labels)).fitted
