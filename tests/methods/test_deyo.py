"""DeYO against a training loop on the model's own LayerNorms, one image after the other."""

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.deyo import (
    DeYO,
    DeYOConfig,
    join_patches,
    shuffle_patches,
    split_patches,
)
from tests._helpers.live import Live, descend, double_clip, flat
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS

LIVELY = DeYOConfig(entropy_threshold=0.75, plpd_threshold=0.0, lr=0.1)
"""Thresholds that let some of the random tiny CLIP's predictions pass, and stop others."""


def literal_shuffle(image: Tensor, order: Tensor, grid: int) -> Tensor:
    """The picture whose cell ``i`` is the image's cell ``order[i]``, row after row."""
    size = image.shape[-1] // grid

    def cell(index: int) -> tuple[slice, slice]:
        row, column = divmod(index, grid)
        down = slice(row * size, (row + 1) * size)
        across = slice(column * size, (column + 1) * size)
        return down, across

    shuffled = torch.zeros_like(image)
    for index, source in enumerate(order.tolist()):
        down, across = cell(index)
        from_down, from_across = cell(source)
        shuffled[:, down, across] = image[:, from_down, from_across]
    return shuffled


def literal_losses(live: Live, images: Tensor, order: Tensor) -> list[Tensor]:
    """Weighted entropies of the images that pass both filters."""
    chance = math.log(len(live.text))
    losses = []
    for image in images:
        p = live.logits(image[None]).softmax(dim=-1)[0]
        h = -(p * p.log()).sum()
        if h >= LIVELY.entropy_threshold * chance:
            continue
        other = literal_shuffle(image, order, 4)
        q = live.logits(other[None]).softmax(dim=-1)[0]
        drop = (p.max() - q[p.argmax()]).detach()
        if drop <= LIVELY.plpd_threshold:
            continue
        weight = (0.4 * chance - h.detach()).exp() + drop.exp()
        losses.append(h * weight)
    return losses


def test_a_stream_equals_a_training_loop() -> None:
    deyo = DeYO(double_clip(), TINY_PROMPTS, LIVELY, seed=3)
    live = Live()
    early = live.norms[:-2]  # two blocks: only the final norm is late
    optimiser = torch.optim.SGD(early, lr=LIVELY.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    taught = 0
    for images in TINY_IMAGES.split([4, 3, 3]):
        prediction = deyo.predict(images)

        order = torch.randperm(16, generator=generator)
        losses = literal_losses(live, images.double(), order)
        if losses:
            optimiser.param_groups[0]["lr"] = LIVELY.lr * len(images) / 64
            descend(optimiser, torch.stack(losses).mean())

        teaching = prediction.evidence["teaching"]
        assert int(teaching.sum()) == len(losses)
        taught += len(losses)

    # both filters were passed by some and stopped others
    assert 0 < taught < 10
    torch.testing.assert_close(deyo.memory["norms"], flat(live.norms))


@pytest.mark.parametrize("grid", [4, 5])
def test_patches_are_put_together_to_the_size_of_the_image(grid: int) -> None:
    patches = split_patches(TINY_IMAGES, grid)
    side = 32 // grid

    assert patches.shape == (10, grid * grid, 3, side, side)

    together = join_patches(patches, 32)
    assert together.shape == TINY_IMAGES.shape


def test_patches_that_divide_the_image_come_back() -> None:
    patches = split_patches(TINY_IMAGES, 4)
    assert torch.equal(join_patches(patches, 32), TINY_IMAGES)


@pytest.mark.parametrize("grid", [4, 5])
def test_patches_are_shuffled_by_the_generator(grid: int) -> None:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(grid * grid, generator=generator)
    patches = split_patches(TINY_IMAGES, grid)
    expected = join_patches(patches[:, order], 32)

    generator = torch.Generator().manual_seed(1)
    mixed = shuffle_patches(TINY_IMAGES, grid, generator)
    torch.testing.assert_close(mixed, expected)


def test_nothing_is_learned_if_no_image_passes() -> None:
    deyo = DeYO(TINY, TINY_PROMPTS, DeYOConfig(entropy_threshold=0.0))
    deyo.predict(TINY_IMAGES)
    assert torch.equal(deyo.memory["norms"], deyo.tower.start)
