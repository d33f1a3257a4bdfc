"""C-TPT: its gradient by plain autograd, and that without dispersion it is TPT."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.ctpt import CTPT, CTPTConfig
from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.literal import assert_gradients
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, with_views

PROMPTS = ClassPrompts(TINY_NAMES)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return with_views(4, TPTConfig(views=20).spec)


def test_the_gradient_is_that_of_entropy_minus_dispersion(batch: Batch) -> None:
    def literal_loss(features: Tensor, context: Tensor) -> Tensor:
        text = TINY.encode_text(PROMPTS.texts("a photo of a {}."), context=context)
        text = text / text.pow(2).sum(dim=1, keepdim=True).sqrt()
        p = (TINY.scale * features @ text.T).softmax(dim=-1).mean(dim=0)
        spread = sum((t - text.mean(dim=0)).pow(2).sum().sqrt() for t in text) / len(
            text
        )
        return -(p * p.log()).sum() - 3.0 * spread

    config = CTPTConfig(dispersion_weight=3.0, text_chunk=6)
    assert_gradients(CTPT(TINY, PROMPTS, config), batch, literal_loss)


def test_without_dispersion_it_is_tpt_and_with_it_is_not(batch: Batch) -> None:
    tpt = TPT(TINY, PROMPTS, TPTConfig()).predict(batch).logits
    off = CTPT(TINY, PROMPTS, CTPTConfig(dispersion_weight=0.0)).predict(batch).logits
    on = CTPT(TINY, PROMPTS, CTPTConfig()).predict(batch).logits
    assert torch.equal(off, tpt)
    assert (on - tpt).abs().amax(dim=1).min() > 1e-3
