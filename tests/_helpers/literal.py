"""Learned prompts against literal towers: logits, gradients and the first step of a fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.few_shot import SGDTraining
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.tpt import TPT
from cliquetta.model.clip import CLIP, encode_views
from cliquetta.types import Batch
from tests._helpers.literal_towers import text_features
from tests._helpers.separable import FULL_IMAGE, make_examples, make_images
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import ADAPTED, DOUBLE, FEATURE, LOGIT, STEP, SUM


def words(model: CLIP, text: str) -> list[Tensor]:
    """The embedding of every token of a text."""
    return [model.text.tokens.weight[i] for i in model.tokenizer.encode(text)]


def text_feature(
    model: CLIP, inside: Sequence[Tensor], deep: Sequence[Tensor] = ()
) -> Tensor:
    """Unit feature (E,) of a sequence of embeddings (D,) between the start and the end token."""
    (ids,) = model.tokenizer([" ".join("x" for _ in inside)])
    feature = text_features(model, ids, context=torch.stack([*inside]), deep=deep)
    return F.normalize(feature, dim=0)


def assert_gradients(
    adapter: TPT, batch: Batch, literal_loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Losses and gradients of images tuned at once are those of one image at a time."""
    features = encode_views(TINY, cast("Tensor", batch.views), chunk=64)[:, :3]
    context = adapter.template.start.repeat(len(features), 1, 1)
    losses, gradients = adapter.gradient(
        features, context, adapter.template.features(context)
    )
    for one, actual, gradient in zip(features, losses, gradients, strict=True):
        leaf = TINY.context("a photo of a").requires_grad_()
        loss = literal_loss(one, leaf)
        torch.testing.assert_close(actual, loss, atol=0, rtol=FEATURE)
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(gradient, expected, atol=SUM, rtol=LOGIT)


Literal = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits (B, N) from parameters and pixels."""


def assert_same_logits(
    ours: Literal, literal: Literal, start: Mapping[str, Tensor]
) -> None:
    """A float64 function has the logits of a literal one, and its gradients by all parameters."""
    images, labels = make_images(2, seed=0)
    fast, slow = (
        {name: value.double().clone().requires_grad_() for name, value in start.items()}
        for _ in range(2)
    )
    actual = ours(fast, images.double())
    expected = literal(slow, images.double())
    F.cross_entropy(actual, labels).backward()
    F.cross_entropy(expected, labels).backward()
    torch.testing.assert_close(actual, expected, atol=STEP, rtol=DOUBLE)
    for name in (name for name, value in start.items() if value.numel()):
        torch.testing.assert_close(
            fast[name].grad, slow[name].grad, atol=STEP, rtol=STEP
        )
        assert slow[name].grad.abs().max() > 1e-6, name


def assert_first_step(
    name: str, config: SGDTraining, literal: Literal, start: Mapping[str, Tensor]
) -> None:
    """One epoch of four uncropped images is a step of SGD with weight decay."""
    config = replace(
        config, epochs=1, warmup_epochs=0, batch_size=4, crop_scale=FULL_IMAGE
    )
    examples = make_examples(2)
    fitted = fit_method(name, TINY, TINY_PROMPTS, examples, config, seed=4).fitted
    learned = {name: value.clone().requires_grad_() for name, value in start.items()}
    F.cross_entropy(literal(learned, examples.images), examples.labels).backward()
    for part, value in learned.items():
        step = value.grad + config.weight_decay * value.detach()
        moved = value.detach() - config.lr * step
        torch.testing.assert_close(fitted[part], moved, atol=FEATURE, rtol=ADAPTED)
