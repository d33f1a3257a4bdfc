"""C-TPT: the dispersion by hand, the loss by plain autograd, and that texts spread."""

import pytest
import torch

from cliquetta.data.views import attach_views
from cliquetta.methods.ctpt import CTPT, CTPTConfig
from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.model.clip import encode_views
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES
from tests._helpers.tolerance import FEATURE, LOGIT, SUM

PROMPTS = ClassPrompts(TINY_NAMES)


@pytest.fixture(scope="module")
def batch() -> Batch:
    plain = Batch(TINY_IMAGES[:4], ("a", "b", "c", "d"))
    return attach_views(plain, TPTConfig(views=20).spec, seed=0)


def test_the_gradient_is_that_of_entropy_minus_dispersion(batch: Batch) -> None:
    adapter = CTPT(TINY, PROMPTS, CTPTConfig(dispersion_weight=3.0, text_chunk=6))
    assert batch.views is not None
    features = encode_views(TINY, batch.views, chunk=64)[:, :3]
    context = adapter.template.start.repeat(4, 1, 1)
    losses, gradients = adapter.gradient(features, context, adapter.template.features(context))
    for b in range(4):
        leaf = TINY.context("a photo of a").requires_grad_()
        text = TINY.encode_text(PROMPTS.texts("a photo of a {}."), context=leaf)
        text = text / text.pow(2).sum(dim=1, keepdim=True).sqrt()
        p = (TINY.scale * features[b] @ text.T).softmax(dim=-1).mean(dim=0)
        spread = sum((t - text.mean(dim=0)).pow(2).sum().sqrt() for t in text) / len(text)
        loss = -(p * p.log()).sum() - 3.0 * spread
        assert losses[b].item() == pytest.approx(loss.item(), rel=FEATURE)
        (gradient,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(gradients[b], gradient, atol=SUM, rtol=LOGIT)


def test_without_dispersion_it_is_tpt_and_with_it_is_not(batch: Batch) -> None:
    tpt = TPT(TINY, PROMPTS, TPTConfig()).predict(batch).logits
    off = CTPT(TINY, PROMPTS, CTPTConfig(dispersion_weight=0.0)).predict(batch).logits
    on = CTPT(TINY, PROMPTS, CTPTConfig()).predict(batch).logits
    assert torch.equal(off, tpt)
    assert (on - tpt).abs().amax(dim=1).min() > 1e-3
