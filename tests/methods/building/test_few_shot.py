"""The training loop, its draws, and adapters made from fitted tensors."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.building.few_shot import (
    FitStep,
    FitTask,
    SGDTraining,
    TextTraining,
    epoch_batches,
    example_draw,
    learn,
)
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import create_method, method_config
from tests._helpers.separable import FULL_IMAGE, TWO, accuracy, make_examples
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import ADAPTED, FEATURE, LOGIT

FAST = {"crop_scale": (0.6, 1.0), "batch_size": 8, "lr": 0.05}
WORDS = {
    **FAST,
    "context_init": "a photo of a",
    "epochs": 20,
    "lr": 0.1,
    "batch_size": 32,
}
FITS: list[tuple[str, dict[str, Any]]] = [
    ("cocoop", {**FAST, "epochs": 8, "hidden_dim": 8}),
    ("coop", WORDS),
    ("coop", {**WORDS, "class_specific": True}),
    ("coop", {**WORDS, "context_init": "", "class_position": "middle"}),
    ("maple", {**FAST, "epochs": 10}),
    ("tip_adapter", {}),
    ("tip_adapter_f", {}),
]


@pytest.mark.parametrize(("name", "options"), FITS)
def test_fitting_beats_zero_shot_on_held_out_images(
    name: str, options: dict[str, Any]
) -> None:
    adapter = fit_method(
        name, TINY, TWO, make_examples(), method_config(name, None, options)
    )
    assert accuracy(adapter) > accuracy(create_method("zero_shot", TINY, TWO)) + 0.25


def test_the_schedule_is_a_warm_up_and_a_cosine_per_epoch() -> None:
    config = SGDTraining(lr=0.2, warmup_lr=0.01)
    rates = [config.lr_at(epoch, 4) for epoch in range(4)]
    expected = [0.01, 0.2, 0.1 * (1 + math.cos(math.pi / 4)), 0.1]
    assert rates == pytest.approx(expected)
    assert [config.epochs_for(shots) for shots in (1, 2, 4, 8, 16)] == [
        50,
        100,
        100,
        200,
        200,
    ]
    assert replace(config, epochs=7).epochs_for(16) == 7


def test_an_epoch_shows_every_image_once_and_drops_a_short_batch() -> None:
    generator = np.random.default_rng(0)
    full = [rows.tolist() for rows in epoch_batches(10, 4, generator, drop_last=False)]
    assert [len(rows) for rows in full] == [4, 4, 2]
    assert sorted(row for rows in full for row in rows) == list(range(10))
    assert [len(r) for r in epoch_batches(10, 4, generator, drop_last=True)] == [4, 4]
    assert [len(r) for r in epoch_batches(3, 4, generator, drop_last=True)] == [3]


def test_the_loop_is_torch_sgd_with_momentum() -> None:
    """Three epochs on logits without an image, against the recurrence written out."""
    config = SGDTraining(
        epochs=3,
        lr=0.1,
        momentum=0.5,
        weight_decay=0.2,
        warmup_lr=0.3,
        crop_scale=FULL_IMAGE,
    )
    steps: list[FitStep] = []
    task = FitTask(TINY, TWO, make_examples(2), on_step=steps.append)
    actual = learn(
        {"x": torch.tensor([1.0, -2.0])},
        lambda learned, pixels: learned["x"].expand(len(pixels), 2),
        task,
        config,
    )["x"]
    x = np.array([1.0, -2.0])
    velocity = np.zeros(2)
    for rate in (0.3, 0.1, 0.05 * (1 + math.cos(math.pi / 3))):
        velocity = 0.5 * velocity + np.exp(x) / np.exp(x).sum() - 0.5 + 0.2 * x
        x = x - rate * velocity
    np.testing.assert_allclose(actual, x, rtol=FEATURE)
    assert [(s.step, s.steps, s.epoch) for s in steps] == [
        (1, 3, 0),
        (2, 3, 1),
        (3, 3, 2),
    ]
    assert steps[0].loss == pytest.approx(1.5 + math.log(1 + math.exp(-3)))


def test_a_loss_that_is_no_number_stops_the_fit() -> None:
    with pytest.raises(ArithmeticError):
        FitTask(TINY, TWO, make_examples(1)).report(FitStep(1, 1, 0, math.nan, 0.1))


@pytest.mark.parametrize("name", ["coop", "cocoop"])
def test_a_pool_of_uncropped_images_fits_as_fresh_ones_do(name: str) -> None:
    """Symmetric images without crops leave nothing to chance."""
    options = {
        "context_init": "a photo of a",
        "crop_scale": FULL_IMAGE,
        "epochs": 4,
        "lr": 0.1,
    }
    config = method_config(name, options={**options, "batch_size": 4})
    fresh = fit_method(
        name, TINY, TWO, make_examples(2), replace(config, crop_pool=None)
    ).fitted
    pooled = fit_method(
        name, TINY, TWO, make_examples(2), replace(config, crop_pool=3)
    ).fitted
    for key, value in fresh.items():
        torch.testing.assert_close(pooled[key], value, atol=LOGIT, rtol=ADAPTED)
    assert (fresh["context"] - TINY.context("a photo of a")).abs().max() > 1e-3


def test_a_pool_is_encoded_once_and_every_image_gets_crops_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = (
        build_tiny_clip()
    )  # of its own: an undone patch stays an attribute of the instance
    examples = make_examples(3)
    config = TextTraining(crop_pool=5, crop_scale=(0.3, 1.0))
    rng = np.random.default_rng([7, 0xF0])
    crops = examples.crops(np.arange(6), model, rng, scale=(0.3, 1.0), count=5)
    pool = torch.stack([model.encode_image(crop, normalize=True) for crop in crops])
    draw = example_draw(FitTask(model, TWO, examples, seed=7), config)
    monkeypatch.setattr(model, "encode_image", lambda *_: pytest.fail("encoded again"))
    rows = np.array([4, 0, 3])
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(40):
        far = (draw(rows, generator)[:, None] - pool[rows]).abs().amax(dim=-1)
        assert far.amin(dim=1).max() < FEATURE
        seen |= set(enumerate(far.argmin(dim=1).tolist()))
    assert len(seen) == 3 * 5


def test_tensors_of_another_shape_or_that_are_not_finite_are_refused() -> None:
    for context in (
        torch.zeros(4, 31),
        torch.zeros(2, 4, 32),
        torch.full((16, 32), torch.nan),
    ):
        with pytest.raises(UserError, match="fitted"):
            create_method("coop", TINY, TWO, fitted={"context": context})
