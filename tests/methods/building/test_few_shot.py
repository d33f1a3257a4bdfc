"""The training loop, its draws, and adapters made from fitted tensors."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import create_method, method_config
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


def test_epochs_that_are_set_do_not_depend_on_the_shots() -> None:
    # without: tests/methods/test_authors_settings.py
    config = SGDTraining(epochs=7)
    assert config.epochs_for(1) == 7
    assert config.epochs_for(16) == 7


@pytest.mark.parametrize(("name", "options"), FITS)
def test_fitting_beats_zero_shot_on_held_out_images(
    name: str, options: dict[str, Any]
) -> None:
    config = method_config(name, None, options)
    fitted = fit_method(name, TINY, TWO, make_examples(), config)
    zero_shot = create_method("zero_shot", TINY, TWO)

    assert accuracy(fitted) > accuracy(zero_shot) + 0.25


def test_the_schedule_is_a_warm_up_and_a_cosine_per_epoch() -> None:
    config = SGDTraining(lr=0.2, warmup_lr=0.01)
    rates = [config.lr_at(epoch, 4) for epoch in range(4)]
    after_a_quarter = 0.1 * (1 + math.cos(math.pi / 4))
    after_a_half = 0.1

    assert rates == pytest.approx([0.01, 0.2, after_a_quarter, after_a_half])


def test_an_epoch_shows_every_image_once() -> None:
    generator = np.random.default_rng(0)
    batches = list(epoch_batches(10, 4, generator, drop_last=False))

    assert [len(rows) for rows in batches] == [4, 4, 2]

    rows = np.concatenate(batches)
    assert sorted(rows.tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("images", "sizes"),
    [(10, [4, 4]), (3, [3])],
    ids=["after full ones", "unless it is the only one"],
)
def test_an_epoch_drops_a_short_batch(images: int, sizes: list[int]) -> None:
    generator = np.random.default_rng(0)
    batches = epoch_batches(images, 4, generator, drop_last=True)
    assert [len(rows) for rows in batches] == sizes


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
    start = {"x": torch.tensor([1.0, -2.0])}
    learned = learn(
        start,
        lambda learned, pixels: learned["x"].expand(len(pixels), 2),
        task,
        config,
    )

    x = np.array([1.0, -2.0])
    velocity = np.zeros(2)
    last_rate = 0.05 * (1 + math.cos(math.pi / 3))

    for rate in (0.3, 0.1, last_rate):
        p = np.exp(x) / np.exp(x).sum()
        # half of the images are of each class
        gradient = p - 0.5
        velocity = 0.5 * velocity + gradient + 0.2 * x
        x = x - rate * velocity

    np.testing.assert_allclose(learned["x"], x, rtol=FEATURE)
    reported = [(step.step, step.steps, step.epoch) for step in steps]
    assert reported == [(1, 3, 0), (2, 3, 1), (3, 3, 2)]

    first_loss = 1.5 + math.log(1 + math.exp(-3))
    assert steps[0].loss == pytest.approx(first_loss)


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
        "batch_size": 4,
    }
    config = method_config(name, options=options)
    with_pool = replace(config, crop_pool=3)
    fresh = fit_method(name, TINY, TWO, make_examples(2), config).fitted
    pooled = fit_method(name, TINY, TWO, make_examples(2), with_pool).fitted

    for key, value in fresh.items():
        torch.testing.assert_close(pooled[key], value, atol=LOGIT, rtol=ADAPTED)
    learned = fresh["context"] - TINY.context("a photo of a")

    assert learned.abs().max() > 1e-3


def test_a_pool_is_encoded_once_and_every_image_gets_crops_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of its own: an undone patch stays an attribute of the instance
    model = build_tiny_clip()
    examples = make_examples(3)

    # five crops of each of the six images, drawn as a fit of seed 7 draws them
    rng = np.random.default_rng([7, 0xF0])
    crops = examples.crops(np.arange(6), model, rng, scale=(0.3, 1.0), count=5)
    pool = torch.stack([model.encode_image(crop, normalize=True) for crop in crops])

    config = TextTraining(crop_pool=5, crop_scale=(0.3, 1.0))
    draw = example_draw(FitTask(model, TWO, examples, seed=7), config)
    monkeypatch.setattr(model, "encode_image", lambda *_: pytest.fail("encoded again"))

    rows = np.array([4, 0, 3])
    generator = np.random.default_rng(0)
    seen: set[tuple[int, int]] = set()
    for _ in range(40):
        drawn = draw(rows, generator)
        distances = (drawn[:, None] - pool[rows]).abs().amax(dim=-1)
        distance, nearest = distances.min(dim=1)
        assert distance.max() < FEATURE
        seen |= set(enumerate(nearest.tolist()))

    assert len(seen) == len(rows) * 5


@pytest.mark.parametrize(
    "context",
    [torch.zeros(4, 31), torch.zeros(2, 4, 32), torch.full((16, 32), torch.nan)],
    ids=["another width", "fewer classes", "not finite"],
)
def test_tensors_of_another_shape_or_that_are_not_finite_are_refused(
    context: Tensor,
) -> None:
    with pytest.raises(UserError, match="fitted"):
        create_method("coop", TINY, TWO, fitted={"context": context})
