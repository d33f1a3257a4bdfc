"""TPT against one image at a time with plain autograd."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.literal import assert_gradients
from tests._helpers.live import surest
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, with_views
from tests._helpers.tolerance import LOGIT, assert_near

CONFIG = TPTConfig(views=20, selection_fraction=0.25)
ONE = ClassPrompts((*TINY_NAMES, "polar bear in the snow"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return with_views(4, CONFIG.spec)


def literal_logits(prompts: ClassPrompts, features: Tensor, context: Tensor) -> Tensor:
    """Logits of features under a context in the first template."""
    first, *others = prompts.templates
    learned = prompts.texts(first)
    total = TINY.encode_text(learned, context=context, normalize=True)
    # the other templates stay as they are
    for template in others:
        texts = prompts.texts(template)
        encoded = TINY.encode_text(texts, normalize=True)
        total = total + encoded
    text = F.normalize(total, dim=-1)
    return TINY.scale * features @ text.T


def literal_loss(prompts: ClassPrompts, features: Tensor, context: Tensor) -> Tensor:
    """Marginal entropy of one image's selected views (K, E), by its definition."""
    logits = literal_logits(prompts, features, context)
    mean = logits.softmax(dim=-1).mean(dim=0)
    return -(mean * mean.log()).sum()


def literal_tpt(prompts: ClassPrompts, views: Tensor, config: TPTConfig) -> Tensor:
    """Logits of one image: every step as in the paper, AdamW by its formula."""
    # the confident views
    features = TINY.encode_image(views, normalize=True)
    text = TINY.classifier(prompts)
    logits = TINY.scale * features @ text.T
    selected = features[surest(logits, config.selection_fraction)]

    # one step of the context
    context = TINY.context("a photo of a").requires_grad_()
    loss = literal_loss(prompts, selected, context)
    (gradient,) = torch.autograd.grad(loss, context)
    step = gradient / (gradient.abs() + 1e-8)
    decayed = context * (1 - config.lr * config.weight_decay)
    moved = decayed - config.lr * step

    # the image itself under the learned context
    return literal_logits(prompts, features[0], moved).detach()


@pytest.mark.parametrize("rows", [1, 7, 1024])
@pytest.mark.parametrize("templates", [1, 2])
def test_many_images_at_once_equal_the_paper_one_at_a_time(
    batch: Batch, rows: int, templates: int
) -> None:
    both = ("a photo of a {}.", "{}, sketched")
    prompts = ClassPrompts(ONE.names, both[:templates])
    config = replace(CONFIG, text_chunk=rows, chunk=rows)
    logits = TPT(TINY, prompts, config).predict(batch).logits

    assert batch.views is not None

    expected = [literal_tpt(prompts, views, config) for views in batch.views]
    assert_near(logits, torch.stack(expected), LOGIT)


def test_every_image_has_its_own_gradient(batch: Batch) -> None:
    assert_gradients(TPT(TINY, ONE, CONFIG), batch, partial(literal_loss, ONE))


def test_text_goes_through_the_tower_twice_per_image(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = TPT(TINY, ONE, CONFIG)
    tower = TINY.require_text()
    plain = tower.encode
    rows = []

    def spy(embeddings: Tensor, *args: Tensor, **options: tuple[Tensor, ...]) -> Tensor:
        rows.append(len(embeddings))
        return plain(embeddings, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tower, "encode", spy)
    adapter.predict(batch)

    assert sum(rows) == 2 * len(batch) * len(ONE)  # once to learn, once to score
