"""C-TPT: its gradient by plain autograd, and that without dispersion it is TPT."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.ctpt import CTPT, CTPTConfig
from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.literal import assert_gradients
from tests._helpers.live import unit_rows
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, with_views

PROMPTS = ClassPrompts(TINY_NAMES)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return with_views(4, TPTConfig(views=20).spec)


def test_the_gradient_is_that_of_entropy_minus_dispersion(batch: Batch) -> None:
    sentences = PROMPTS.texts("a photo of a {}.")

    def literal_loss(features: Tensor, context: Tensor) -> Tensor:
        text = unit_rows(TINY.encode_text(sentences, context=context))
        p = (TINY.scale * features @ text.T).softmax(dim=-1)
        mean = p.mean(dim=0)
        entropy = -(mean * mean.log()).sum()

        # the mean distance of texts from their centre
        centre = text.mean(dim=0)
        squared = (text - centre).pow(2).sum(dim=1)
        dispersion = squared.sqrt().mean()
        return entropy - 3.0 * dispersion

    config = CTPTConfig(dispersion_weight=3.0, text_chunk=6)
    ctpt = CTPT(TINY, PROMPTS, config)
    assert_gradients(ctpt, batch, literal_loss)


@pytest.fixture(scope="module")
def tpt_logits(batch: Batch) -> Tensor:
    return TPT(TINY, PROMPTS, TPTConfig()).predict(batch).logits


def test_without_dispersion_it_is_tpt(batch: Batch, tpt_logits: Tensor) -> None:
    off = CTPT(TINY, PROMPTS, CTPTConfig(dispersion_weight=0.0))
    logits = off.predict(batch).logits
    assert torch.equal(logits, tpt_logits)


def test_with_dispersion_every_image_is_predicted_otherwise(
    batch: Batch, tpt_logits: Tensor
) -> None:
    on = CTPT(TINY, PROMPTS, CTPTConfig())
    logits = on.predict(batch).logits
    difference = (logits - tpt_logits).abs()
    of_each_image = difference.amax(dim=1)

    assert of_each_image.min() > 1e-3
