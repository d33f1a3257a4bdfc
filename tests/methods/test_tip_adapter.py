"""Tip-Adapter and Tip-Adapter-F against plain numpy, and their search on a validation split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.tip_adapter import (
    TipAdapter,
    TipAdapterConfig,
    TipAdapterFConfig,
    build_keys,
)
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.arrays import Array, softmax, unit
from tests._helpers.separable import FULL_IMAGE, TWO, make_examples, make_images
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import FEATURE, LOGIT


def features_of(images: Tensor) -> Array:
    return unit(TINY.encode_image(images).double().numpy())


def numpy_logits(
    prompts: ClassPrompts, images: Tensor, cached: FewShot, alpha: float, beta: float
) -> Array:
    """One image, one key at a time."""
    features = features_of(images)
    keys = features_of(cached.images)
    text = TINY.classifier(prompts).double().numpy()
    logits = TINY.scale * features @ text.T

    for row, f in zip(logits, features, strict=True):
        for key, label in zip(keys, cached.labels, strict=True):
            affinity = np.exp(-beta * (1 - f @ key))
            row[label] += alpha * affinity
    return logits


def test_keys_are_unit_means_of_raw_features() -> None:
    examples = make_examples(2)
    config = TipAdapterConfig(augmentations=6)
    keys = build_keys(TINY, examples, config, np.random.default_rng(5)).numpy()

    crops = examples.crops(
        np.arange(len(examples)),
        TINY,
        np.random.default_rng(5),
        scale=config.crop_scale,
        count=6,
    )
    raw = np.stack([TINY.encode_image(views).double().numpy() for views in crops])
    expected = unit(raw.mean(axis=1))

    np.testing.assert_allclose(keys, expected, atol=FEATURE)
    # means of unit features would be others
    mean_of_units = unit(raw).mean(axis=1)

    assert np.abs(keys - unit(mean_of_units)).max() > 1e-3


def test_logits_are_those_of_plain_numpy() -> None:
    config = TipAdapterConfig(alpha=2.5, beta=3.5, crop_scale=FULL_IMAGE)
    examples = make_examples(3)
    adapter = fit_method("tip_adapter", TINY, TINY_PROMPTS, examples, config)
    images, _ = make_images(4, seed=9)
    actual = adapter.predict(images).logits
    expected = numpy_logits(TINY_PROMPTS, images, examples, alpha=2.5, beta=3.5)

    np.testing.assert_allclose(actual, expected, atol=LOGIT)


def test_the_first_step_of_the_keys_is_adamw_by_hand() -> None:
    """d loss / d F_k = alpha beta sum_b A_bk (G L^T)_bk f_b, with G = (softmax - one-hot) / B."""
    alpha = 3.0
    beta = 2.0
    config = TipAdapterFConfig(
        alpha=alpha, beta=beta, epochs=1, lr=0.01, crop_scale=FULL_IMAGE
    )
    examples = make_examples(4)
    adapter = fit_method("tip_adapter_f", TINY, TWO, examples, config)
    fitted = adapter.fitted["keys"].numpy()

    f = features_of(examples.images)
    y = examples.labels.numpy()
    p = softmax(numpy_logits(TWO, examples.images, examples, alpha, beta))
    one_hot = np.eye(2)[y]
    G = (p - one_hot) / len(y)
    A = np.exp(-beta * (1 - f @ f.T))
    gradient = alpha * beta * (A * G[:, y]).T @ f
    # Adam's first step has the length of the rate; AdamW decays beside it
    step = gradient / (np.abs(gradient) + 1e-4)
    decayed = f * (1 - 0.01 * 0.01)
    expected = decayed - 0.01 * step

    np.testing.assert_allclose(fitted, expected, atol=LOGIT)
    assert np.abs(fitted - f).max() > 5e-3


def validated(seed: int) -> FewShot:
    """Few examples, and a validation split on which the numbers matter."""
    images, labels = make_images(6, seed=seed)
    held = FewShot(images, labels.flip(0) if seed == 21 else labels)
    few = make_examples(2)
    return FewShot(few.images, few.labels, held)


@pytest.mark.parametrize("seed", [20, 21])
def test_the_search_finds_the_best_of_its_grid_on_the_validation_split(
    seed: int,
) -> None:
    config = TipAdapterConfig(
        crop_scale=FULL_IMAGE,
        search=True,
        search_beta=8.0,
        search_alpha=5.0,
        search_steps=(5, 4),
    )
    examples = validated(seed)
    adapter = fit_method("tip_adapter", TINY, TWO, examples, config)

    held = examples.validation
    labels = held.labels.numpy()
    most = -1

    for beta in np.linspace(0.1, 8.0, 5, endpoint=False):
        for alpha in np.linspace(0.1, 5.0, 4, endpoint=False):
            logits = numpy_logits(TWO, held.images, examples, alpha, beta)
            right = (logits.argmax(axis=1) == labels).sum()
            if right > most:  # the first of equals
                most = right
                best = (alpha, beta)

    assert float(adapter.fitted["alpha"]) == pytest.approx(best[0])
    assert float(adapter.fitted["beta"]) == pytest.approx(best[1])
    assert isinstance(adapter, TipAdapter)
    assert (adapter.cache.alpha, adapter.cache.beta) == pytest.approx(best)


@pytest.mark.parametrize("method", ["tip_adapter", "tip_adapter_f"])
def test_nothing_is_chosen_without_a_validation_split(method: str) -> None:
    """The official ImageNet run searches on the test set; ours takes none."""
    config = method_config(method, options={"search": True})
    with pytest.raises(ValueError, match="validation"):
        fit_method(method, TINY, TWO, make_examples(2), config)


def test_the_epoch_is_picked_on_the_validation_split() -> None:
    """Labels of split 21 are swapped, so that training hurts there and an early epoch is best."""
    config = TipAdapterFConfig(
        epochs=6,
        lr=0.1,
        alpha=1.0,
        search=True,
        search_steps=(2, 2),
        crop_scale=FULL_IMAGE,
    )
    examples = validated(21)
    held = examples.validation

    def right_with_keys_of(fit_config: TipAdapterFConfig) -> int:
        """Images of the split that keys of a fit classify rightly."""
        fit = fit_method("tip_adapter_f", TINY, TWO, examples, fit_config)
        adapter = create_method(
            "tip_adapter_f",
            TINY,
            TWO,
            config,
            fitted={"keys": fit.fitted["keys"], "labels": examples.labels},
        )
        logits = adapter.predict(held.images).logits
        right = logits.argmax(-1) == held.labels
        return int(right.sum())

    last_epoch = replace(config, search=False)
    assert right_with_keys_of(config) > right_with_keys_of(last_epoch)


def test_defaults_are_those_of_the_authors_configs() -> None:
    """``augment_epoch: 10``, ``train_epoch: 20``, ``lr: 0.001``, batches of 256."""
    assert TipAdapterConfig().augmentations == 10
    assert TipAdapterFConfig().epochs == 20
    assert TipAdapterFConfig().lr == 1e-3
    assert TipAdapterFConfig().eps == 1e-4
    assert TipAdapterFConfig().batch_size == 256


def test_keys_of_classes_that_are_left_out_go() -> None:
    """Of a cat, a dog and a frog the frog and the cat stay, in this order."""
    fitted = {"keys": torch.eye(3), "labels": torch.tensor([0, 1, 2])}
    left = TipAdapter.for_classes(fitted, ("cat", "dog", "frog"), ("frog", "cat"))
    assert left["labels"].tolist() == [1, 0]
    assert torch.equal(left["keys"], torch.eye(3)[[0, 2]])
