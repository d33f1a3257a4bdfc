"""DART against a literal stream in plain autograd."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.dart import DART, DARTConfig
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live import surest
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, with_views
from tests._helpers.tolerance import ADAPTED, FEATURE, LOGIT, assert_near, sampling

CONFIG = DARTConfig(views=12, selection_fraction=0.25)
PROMPTS = ClassPrompts(TINY_NAMES)


def selected(logits: Tensor) -> Tensor:
    """Logits of the confident views."""
    return logits[surest(logits, CONFIG.selection_fraction)]


class Literal:
    """The stream of the paper: complete forward passes, one graph for both towers."""

    def __init__(self, model: CLIP, visual: Tensor, score: str) -> None:
        classes = len(PROMPTS)
        self.model = model
        self.score = score
        self.start = model.context("a photo of a").repeat(classes, 1, 1)
        self.old_text = self.start.clone()
        self.visual = visual.clone()
        self.old_visual = visual.repeat(classes, 1, 1, 1)

    def logits(self, views: Tensor, context: Tensor, visual: Tensor) -> Tensor:
        model = self.model
        prefix = {1: Prefix(visual[None])}
        images = model.encode_image(views, prefix=prefix, normalize=True)
        sentences = PROMPTS.texts("a photo of a {}.")
        texts = model.encode_text(sentences, context=context, normalize=True)
        cosines = images @ texts.T
        return model.scale * cosines

    def next(self, views: Tensor) -> Tensor:
        context = (0.1 * self.old_text + 0.9 * self.start).requires_grad_()
        visual = self.visual.clone().requires_grad_()

        # one step down the marginal entropy of the confident views
        before = selected(self.logits(views, context, visual))
        mean = before.softmax(dim=-1).mean(dim=0)
        optimizer = torch.optim.AdamW([context, visual], lr=5e-3)
        entropy = -(mean * mean.log()).sum()
        entropy.backward()
        optimizer.step()

        with torch.no_grad():
            # the visual prompt of the likeliest class is mixed in
            after = selected(self.logits(views, context, visual)).mean(dim=0)
            label = int(after.argmax())
            self.visual = 0.1 * self.old_visual[label] + 0.9 * visual

            final = self.logits(views[:1], context, self.visual)[0]
            if self.score == "views":
                final = after
            if self.score == "mixed":
                final = 0.5 * before.mean(dim=0) + 0.5 * final

            # the predicted class retains its prompts
            label = int(final.argmax())
            beta = float(torch.exp(-final[label] / 5000))
            self.old_text[label] *= beta
            self.old_text[label] += (1 - beta) * context[label]
            self.old_visual[label] *= beta
            self.old_visual[label] += (1 - beta) * self.visual
            return final.detach()


@pytest.mark.parametrize("score", ["plain", "views", "mixed"])
def test_the_stream_equals_the_paper_in_plain_autograd(score: Any) -> None:
    batch = with_views(6, CONFIG.spec)
    config = dataclasses.replace(CONFIG, score=score)
    adapter = DART(TINY, PROMPTS, config, seed=3)
    literal = Literal(TINY, adapter.memory["visual"], score)

    logits = adapter.predict(batch).logits
    expected = [literal.next(views) for views in batch.views]

    assert_near(logits, torch.stack(expected), ADAPTED)

    memory = adapter.state_dict()
    assert_near(memory["retained_context"], literal.old_text, FEATURE)
    assert_near(memory["retained_visual"], literal.old_visual, FEATURE)
    assert_near(memory["visual"], literal.visual, LOGIT)


def visual_start(seed: int) -> Tensor:
    """A long prompt as it is drawn at the start."""
    config = dataclasses.replace(CONFIG, prompt_length=50)
    return DART(TINY, PROMPTS, config, seed=seed).memory["visual"]


def test_the_start_of_the_visual_prompt_is_seeded() -> None:
    assert torch.equal(visual_start(0), visual_start(0))
    assert not torch.equal(visual_start(0), visual_start(1))


def test_the_start_of_the_visual_prompt_is_uniform_between_minus_one_and_one() -> None:
    start = visual_start(0)
    assert start.abs().max() <= 1

    deviation = 3**-0.5  # of a uniform distribution from -1 to 1
    tolerance = sampling(0.45, start.numel())

    assert start.std().item() == pytest.approx(deviation, rel=tolerance)


def test_a_block_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        DART(TINY, PROMPTS, dataclasses.replace(CONFIG, block=2))
