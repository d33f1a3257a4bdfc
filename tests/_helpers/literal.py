"""Both towers written out: one sequence, one head, one token rule at a time, nothing fused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from cliquetta.methods.building.few_shot import SGDTraining
from cliquetta.methods.fit import fit_method
from cliquetta.methods.tpt import TPT
from cliquetta.model.block import Block
from cliquetta.model.clip import CLIP, encode_views
from cliquetta.types import Batch
from tests._helpers.separable import FULL_IMAGE, make_examples, make_images
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import ADAPTED, DOUBLE, FEATURE, LOGIT, STEP, SUM


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def block_output(x: Tensor, block: Block, *, causal: bool) -> Tensor:
    """Hidden states (T, D) after one block."""
    T, D = x.shape
    wide = norm(x, block.ln_1) @ block.qkv.weight.T + block.qkv.bias
    size = D // block.heads
    heads = []
    for head in range(block.heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = (wide[:, i * D : (i + 1) * D][:, part] for i in range(3))
        scores = q @ k.T / size**0.5
        if causal:
            later = torch.arange(T)[None, :] > torch.arange(T)[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        heads.append(scores.exp() / scores.exp().sum(dim=-1, keepdim=True) @ v)
    x = x + torch.cat(heads, dim=-1) @ block.out.weight.T + block.out.bias
    u = norm(x, block.ln_2) @ block.fc.weight.T + block.fc.bias
    return x + (u * torch.sigmoid(1.702 * u)) @ block.proj.weight.T + block.proj.bias


def words(model: CLIP, text: str) -> list[Tensor]:
    """The embedding of every token of a text."""
    return [model.text.tokens.weight[i] for i in model.tokenizer.encode(text)]


def text_feature(model: CLIP, inside: Sequence[Tensor], deep: Sequence[Tensor] = ()) -> Tensor:
    """Unit feature (E,) of a sequence of embeddings (D,) between the start and the end token."""
    tower, tokenizer = model.text, cast("Any", model.tokenizer)
    embed = tower.tokens.weight
    x = torch.stack([embed[tokenizer.start], *inside, embed[tokenizer.end]])
    x = x + tower.position[: len(x)]
    for index, block in enumerate(tower.blocks):
        if 0 < index <= len(deep):
            prompt = deep[index - 1]
            x = torch.cat([x[:1], prompt, x[1 + len(prompt) :]])
        x = block_output(x, block, causal=True)
    feature = norm(x[-1], tower.ln_final) @ tower.projection
    return feature / feature.norm()


def image_feature(model: CLIP, pixels: Tensor, layers: list[Tensor]) -> Tensor:
    """Unit feature (E,) of one image (3, S, S) with tokens ``layers[j]`` at the end of block j."""
    tower: Any = model.visual
    p = tower.config.patch_size
    side = tower.config.image_size // p
    kernel = tower.patch.weight.flatten(1)
    patches = [
        kernel @ pixels[:, r * p : (r + 1) * p, c * p : (c + 1) * p].flatten()
        for r in range(side)
        for c in range(side)
    ]
    x = torch.stack([tower.class_token, *patches]) + tower.position
    x = norm(torch.cat([x, layers[0]]), tower.ln_pre)
    for index, block in enumerate(tower.blocks):
        if 0 < index < len(layers):
            x = torch.cat([x[: -len(layers[index])], layers[index]])
        x = block_output(x, block, causal=False)
    feature = norm(x[0], tower.ln_post) @ tower.projection
    return feature / feature.norm()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax at the labels."""
    picked = torch.stack([row[label] for row, label in zip(logits, labels, strict=True)])
    return (logits.exp().sum(dim=-1).log() - picked).mean()


def assert_gradients(
    adapter: TPT, batch: Batch, literal_loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Losses and gradients of images tuned at once are those of one image at a time."""
    features = encode_views(TINY, cast("Tensor", batch.views), chunk=64)[:, :3]
    context = adapter.template.start.repeat(len(features), 1, 1)
    losses, gradients = adapter.gradient(features, context, adapter.template.features(context))
    for one, actual, gradient in zip(features, losses, gradients, strict=True):
        leaf = TINY.context("a photo of a").requires_grad_()
        loss = literal_loss(one, leaf)
        torch.testing.assert_close(actual, loss, atol=0, rtol=FEATURE)
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(gradient, expected, atol=SUM, rtol=LOGIT)


Literal = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Logits (B, N) from parameters and pixels."""


def assert_same_logits(ours: Literal, literal: Literal, start: Mapping[str, Tensor]) -> None:
    """A float64 function has the logits of a literal one, and its gradients by all parameters."""
    images, labels = make_images(2, seed=0)
    fast, slow = (
        {name: value.double().clone().requires_grad_() for name, value in start.items()}
        for _ in range(2)
    )
    actual, expected = ours(fast, images.double()), literal(slow, images.double())
    torch.nn.functional.cross_entropy(actual, labels).backward()
    cross_entropy(expected, labels).backward()
    torch.testing.assert_close(actual, expected, atol=STEP, rtol=DOUBLE)
    for name in (name for name, value in start.items() if value.numel()):
        torch.testing.assert_close(fast[name].grad, slow[name].grad, atol=STEP, rtol=STEP)
        assert slow[name].grad.abs().max() > 1e-6, name


def assert_first_step(
    name: str, config: SGDTraining, literal: Literal, start: Mapping[str, Tensor]
) -> None:
    """One epoch of four whole images is a step of SGD with weight decay."""
    config = replace(config, epochs=1, warmup_epochs=0, batch_size=4, crop_scale=FULL_IMAGE)
    examples = make_examples(2)
    fitted = fit_method(name, TINY, TINY_PROMPTS, examples, config, seed=4).fitted
    learned = {name: value.clone().requires_grad_() for name, value in start.items()}
    cross_entropy(literal(learned, examples.images), examples.labels).backward()
    for part, value in learned.items():
        step = value.grad + config.weight_decay * value.detach()
        moved = value.detach() - config.lr * step
        torch.testing.assert_close(fitted[part], moved, atol=FEATURE, rtol=ADAPTED)
