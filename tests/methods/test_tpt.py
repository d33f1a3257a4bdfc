"""TPT against one image at a time with plain autograd, and against finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.methods.tpt import TPT, TPTConfig
from cliquetta.model.clip import CLIP, encode_views
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES
from tests._helpers.tolerance import FEATURE, LOGIT, SUM, assert_near

CONFIG = TPTConfig(views=20, selection_fraction=0.25)
ONE = ClassPrompts((*TINY_NAMES, "polar bear in the snow"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    plain = Batch(TINY_IMAGES[:4], ("a", "b", "c", "d"))
    return attach_views(plain, CONFIG.spec, seed=0)


def literal_loss(model: CLIP, prompts: ClassPrompts, features: Tensor, context: Tensor) -> Tensor:
    """Marginal entropy of one image's kept views (K, E), by its definition."""
    total = model.encode_text(prompts.texts(prompts.templates[0]), context=context, normalize=True)
    for template in prompts.templates[1:]:
        total = total + model.encode_text(prompts.texts(template), normalize=True)
    mean = (model.scale * features @ F.normalize(total, dim=-1).T).softmax(dim=-1).mean(dim=0)
    return -(mean * mean.log()).sum()


def literal_tpt(
    model: CLIP, prompts: ClassPrompts, views: Tensor, config: TPTConfig
) -> tuple[Tensor, Tensor]:
    """Logits and gradient of one image: every step as the paper tells it, AdamW by its formula."""
    features = model.encode_image(views, normalize=True)
    p = (model.scale * features @ model.classifier(prompts).T).softmax(dim=-1)
    order = sorted(range(len(views)), key=lambda v: float(-(p[v] * p[v].log()).sum()))
    selected = features[order[: int(config.selection_fraction * len(views))]]
    context = model.context("a photo of a").requires_grad_()
    (gradient,) = torch.autograd.grad(literal_loss(model, prompts, selected, context), context)
    moved = context * (1 - config.lr * config.weight_decay)
    moved = moved - config.lr * gradient / (gradient.abs() + 1e-8)
    total = model.encode_text(prompts.texts(prompts.templates[0]), context=moved, normalize=True)
    for template in prompts.templates[1:]:
        total = total + model.encode_text(prompts.texts(template), normalize=True)
    return (model.scale * features[0] @ F.normalize(total, dim=-1).T).detach(), gradient


@pytest.mark.parametrize("rows", [1, 7, 1024])
@pytest.mark.parametrize("templates", [1, 2])
def test_many_images_at_once_equal_the_paper_one_at_a_time(
    batch: Batch, rows: int, templates: int
) -> None:
    prompts = ClassPrompts(ONE.names, ("a photo of a {}.", "{}, sketched")[:templates])
    config = TPTConfig(views=20, selection_fraction=0.25, text_chunk=rows, chunk=rows)
    logits = TPT(TINY, prompts, config).predict(batch).logits
    assert batch.views is not None
    expected = torch.stack([literal_tpt(TINY, prompts, v, config)[0] for v in batch.views])
    assert_near(logits, expected, LOGIT)


def test_every_image_has_its_own_gradient(batch: Batch) -> None:
    adapter = TPT(TINY, ONE, CONFIG)
    assert batch.views is not None
    features = encode_views(TINY, batch.views, chunk=64)[:, :3]
    context = adapter.template.start.repeat(4, 1, 1)
    losses, gradients = adapter.gradient(features, context, adapter.template.features(context))
    for b in range(4):
        leaf = TINY.context("a photo of a").requires_grad_()
        loss = literal_loss(TINY, ONE, features[b], leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert losses[b].item() == pytest.approx(loss.item(), rel=FEATURE)
        torch.testing.assert_close(gradients[b], gradient, atol=SUM, rtol=LOGIT)


def test_text_goes_through_the_tower_twice_per_image(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = TPT(TINY, ONE, CONFIG)
    tower = TINY.require_text()
    plain, rows = tower.encode, []

    def spy(embeddings: Tensor, *args: Tensor, **options: tuple[Tensor, ...]) -> Tensor:
        rows.append(len(embeddings))
        return plain(embeddings, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tower, "encode", spy)
    adapter.predict(batch)
    assert sum(rows) == 2 * len(batch) * len(ONE)  # once to learn, once to score
