"""Panda against features corrected by hand, and against a training loop around Tent."""

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.panda import Panda, PandaConfig, make_negatives, nearest_divisor
from tests._helpers.live import Live, descend, double_clip, entropies, flat, unit_rows
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS, draw


def cells(image: Tensor, size: int) -> list[bytes]:
    """Every patch of an image, as bytes."""
    pixels = image.numpy()
    patches = []
    for top in range(0, image.shape[1], size):
        for left in range(0, image.shape[2], size):
            patch = pixels[:, top : top + size, left : left + size]
            patches.append(patch.tobytes())
    return patches


def test_negatives_are_patches_of_the_batch_at_their_position() -> None:
    images = draw(10, 3, 32, 32)
    negatives = make_negatives(images, 3, 8, torch.Generator().manual_seed(1))
    # where each patch comes from: its image and its position
    pool = {}
    for row, image in enumerate(images):
        for at, cell in enumerate(cells(image, 4)):
            pool[cell] = (row, at)

    for negative in negatives:
        drawn = [pool[cell] for cell in cells(negative, 4)]
        positions = [at for _, at in drawn]
        assert positions == list(range(64))
        sources = {row for row, _ in drawn}
        assert len(sources) == 9  # all but one


def test_negatives_do_not_depend_on_the_order_of_images() -> None:
    images = draw(10, 3, 32, 32)
    negatives = make_negatives(images, 3, 8, torch.Generator().manual_seed(1))
    again = make_negatives(images.flip(0), 3, 8, torch.Generator().manual_seed(1))

    assert torch.equal(again, negatives)


@pytest.mark.parametrize(
    ("size", "grid"), [(224, 7), (32, 8), (336, 7), (30, 6), (7, 7)]
)
def test_the_grid_divides_the_image(size: int, grid: int) -> None:
    assert nearest_divisor(size, 7) == grid


def test_zero_shot_equals_features_corrected_by_hand() -> None:
    config = PandaConfig(method="zero_shot", offset=0.6, images_per_negative=4)
    panda = Panda(TINY, TINY_PROMPTS, config)
    prediction = panda.predict(TINY_IMAGES).logits

    negatives = make_negatives(TINY_IMAGES, 3, 8, torch.Generator().manual_seed(0))
    common = unit_rows(TINY.encode_image(negatives)).mean(dim=0)
    features = unit_rows(TINY.encode_image(TINY_IMAGES))
    corrected = features - 0.6 * common
    expected = TINY.scale * corrected @ TINY.classifier(TINY_PROMPTS).T

    torch.testing.assert_close(prediction, expected)


def test_tent_learns_through_the_correction() -> None:
    config = PandaConfig(method="tent", options=("lr=2e-3",), offset=0.7)
    panda = Panda(double_clip(), TINY_PROMPTS, config)
    live = Live()
    optimiser = torch.optim.Adam(live.norms, lr=2e-3)
    generator = torch.Generator().manual_seed(0)

    def logits(images: Tensor) -> Tensor:
        negatives = make_negatives(images, 1, 8, generator)
        common = live.logits(negatives).mean(dim=0)
        return live.logits(images) - 0.7 * common

    for images in TINY_IMAGES.split([6, 4]):
        prediction = panda.predict(images).logits
        descend(optimiser, entropies(logits(images)).mean())
        # predicted after the step
        expected = logits(images).detach().float()
        torch.testing.assert_close(prediction, expected)

    torch.testing.assert_close(panda.memory["norms.values"], flat(live.norms))


def test_a_single_image_is_left_as_it_is() -> None:
    image = TINY_IMAGES[:1]
    panda = Panda(TINY, TINY_PROMPTS, PandaConfig(method="zero_shot"))
    zero_shot = create_method("zero_shot", TINY, TINY_PROMPTS)
    expected = zero_shot.predict(image).logits

    torch.testing.assert_close(panda.predict(image).logits, expected)


@pytest.mark.parametrize("method", ["panda", "scap", "dart", "domain_norm"])
def test_methods_that_run_blocks_of_the_tower_themselves_are_refused(
    method: str,
) -> None:
    with pytest.raises(UserError, match="around"):
        Panda(TINY, TINY_PROMPTS, PandaConfig(method=method))
