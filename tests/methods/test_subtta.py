"""SubTTA's distance against principal angles, its gradient and steps against autograd."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.subtta import (
    SubTTA,
    SubTTAConfig,
    chordal_distance,
    principal_directions,
)
from tests._helpers.live import Live, descend, double_clip, flat, unit_rows
from tests._helpers.tiny_world import TINY_IMAGES, TINY_PROMPTS, draw


def random_products(seed: int) -> Tensor:
    x = draw(9, 7, seed=seed)
    return x.T @ x


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_distance_is_that_of_principal_angles(skipped: int) -> None:
    products = random_products(0)
    basis = principal_directions(random_products(1), 3, skipped)
    distance, _ = chordal_distance(products, basis, skipped)

    vectors = torch.linalg.svd(products).Vh
    cosines = torch.linalg.svdvals(basis @ vectors[skipped : skipped + 3].T)
    squared_sines = 1 - cosines**2

    torch.testing.assert_close(distance, squared_sines.sum())


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_space_is_at_no_distance_from_itself(skipped: int) -> None:
    products = random_products(0)
    vectors = torch.linalg.svd(products).Vh
    distance, _ = chordal_distance(products, vectors[skipped : skipped + 3], skipped)

    assert abs(float(distance)) < 1e-12


def literal_variance(features: Tensor, labels: list[int]) -> Tensor:
    """Variance between classes: that of all less that within each."""
    classes = torch.tensor(labels)
    centre = features.mean(0)
    total = features.new_zeros(())

    for feature, label in zip(features, labels, strict=True):
        own = features[classes == label].mean(0)
        from_all = ((feature - centre) ** 2).sum()
        from_own = ((feature - own) ** 2).sum()
        total = total + from_all - from_own
    return total / len(labels)


def test_a_stream_equals_two_steps_per_batch() -> None:
    config = SubTTAConfig(momentum=0.3)
    subtta = SubTTA(double_clip(), TINY_PROMPTS, config)
    live = Live()
    text = live.text
    centred = text - text.mean(0)
    vectors = torch.linalg.svd(centred, full_matrices=False).Vh
    basis = vectors[1 : len(text) - 1]
    optimiser = torch.optim.AdamW(live.norms, lr=config.lr, weight_decay=0.01)
    average = torch.cov(text.T)

    for images in TINY_IMAGES.split([6, 4]):
        # first step: the images' principal directions towards those of the texts
        covariance = torch.cov(live.model.encode_image(images).T)
        average = 0.3 * average.detach() + 0.7 * covariance
        directions = torch.linalg.eigh(average).eigenvectors  # torch's own derivative
        spanned = directions[:, -len(basis) - 1 : -1]
        likeness = (basis @ spanned).square().sum() / len(basis)
        descend(optimiser, -likeness / 0.7)

        # second step: classes apart, inside of the texts' space
        projected = live.model.encode_image(images) @ basis.T @ basis
        features = unit_rows(projected)
        labels = (features @ text.T).argmax(dim=-1).tolist()
        assert len(set(labels)) > 1
        descend(optimiser, -literal_variance(features, labels))

        torch.testing.assert_close(subtta.predict(images).logits, live.predict(images))

    torch.testing.assert_close(subtta.memory["norms.values"], flat(live.norms))


def test_one_predicted_class_is_not_separated() -> None:
    """A single image has no covariance either: AdamW's decay alone moves the norms."""
    config = SubTTAConfig(weight_decay=0.0)
    subtta = SubTTA(double_clip(), TINY_PROMPTS, config)
    image = TINY_IMAGES[:1]
    expected = Live().predict(image)

    torch.testing.assert_close(subtta.predict(image).logits, expected)
