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
        self.model = model
        self.score = score
        self.start = model.context("a photo of a").repeat(len(PROMPTS), 1, 1)
        self.old_text = self.start.clone()
        self.visual = visual.clone()
        self.old_visual = visual.repeat(len(PROMPTS), 1, 1, 1)

    def logits(self, views: Tensor, context: Tensor, visual: Tensor) -> Tensor:
        prefix = {1: Prefix(visual[None])}
        images = self.model.encode_image(views, prefix=prefix, normalize=True)
        texts = PROMPTS.texts("a photo of a {}.")
        text = self.model.encode_text(texts, context=context, normalize=True)
        return self.model.scale * images @ text.T

    def next(self, views: Tensor) -> Tensor:
        context = (0.1 * self.old_text + 0.9 * self.start).requires_grad_()
        visual = self.visual.clone().requires_grad_()
        before = self.logits(views, context, visual)
        mean = selected(before).softmax(dim=-1).mean(dim=0)
        optimizer = torch.optim.AdamW([context, visual], lr=5e-3)
        (-(mean * mean.log()).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            after = self.logits(views, context, visual)
            label = int(selected(after).mean(dim=0).argmax())
            self.visual = 0.1 * self.old_visual[label] + 0.9 * visual
            final = self.logits(views[:1], context, self.visual)[0]
            if self.score == "views":
                final = selected(after).mean(dim=0)
            if self.score == "mixed":
                final = 0.5 * selected(before).mean(dim=0) + 0.5 * final
            label = int(final.argmax())
            beta = float(torch.exp(-final[label] / 5000))
            self.old_text[label] = (
                beta * self.old_text[label] + (1 - beta) * context[label]
            )
            self.old_visual[label] = (
                beta * self.old_visual[label] + (1 - beta) * self.visual
            )
            return final.detach()


@pytest.mark.parametrize("score", ["plain", "views", "mixed"])
def test_the_stream_equals_the_paper_in_plain_autograd(score: Any) -> None:
    batch = with_views(6, CONFIG.spec)
    adapter = DART(TINY, PROMPTS, dataclasses.replace(CONFIG, score=score), seed=3)
    literal = Literal(TINY, adapter.memory["visual"], score)
    logits = adapter.predict(batch).logits
    expected = torch.stack([literal.next(views) for views in batch.views])
    assert_near(logits, expected, ADAPTED)
    memory = adapter.state_dict()
    assert_near(memory["retained_context"], literal.old_text, FEATURE)
    assert_near(memory["retained_visual"], literal.old_visual, FEATURE)
    assert_near(memory["visual"], literal.visual, LOGIT)


def test_the_start_of_the_visual_prompt_is_seeded_and_uniform() -> None:
    config = dataclasses.replace(CONFIG, prompt_length=50)
    starts = [DART(TINY, PROMPTS, config, seed=s).memory["visual"] for s in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert starts[0].abs().max() <= 1
    assert starts[0].std().item() == pytest.approx(
        3**-0.5, rel=sampling(0.45, starts[0].numel())
    )


def test_a_block_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        DART(TINY, PROMPTS, dataclasses.replace(CONFIG, block=2))
