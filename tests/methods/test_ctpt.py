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
    def literal_loss(features: Tensor, context: Tensor) -> Tensor:
        text = TINY.encode_text(PROMPTS.texts("a photo of a {}."), context=context)
        text = unit_rows(text)
        p = (TINY.scale * features @ text.T).softmax(dim=-1).mean(dim=0)
        entropy = -(p * p.log()).sum()
        centre = text.mean(dim=0)
        distances = [(t - centre).pow(2).sum().sqrt() for t in text]
        dispersion = torch.stack(distances).mean()
        return entropy - 3.0 * dispersion

    config = CTPTConfig(dispersion_weight=3.0, text_chunk=6)
    assert_gradients(CTPT(TINY, PROMPTS, config), batch, literal_loss)


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
    difference = (on.predict(batch).logits - tpt_logits).abs()
    assert difference.amax(dim=1).min() > 1e-3
