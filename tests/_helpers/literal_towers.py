"""CLIP's towers written out: one sequence, one head at a time, no fused operation.

An independent reading of the model for the tests: it shares with the package only the names of
the weights. Everything is differentiable.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tests._helpers.tolerance import FEATURE


def norm(x: Tensor, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def activate(x: Tensor, name: str) -> Any:
    if name == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def block(
    x: Tensor, w: Any, at: Any, config: Any, *, prefix: Any = None, causal: bool = False
) -> Any:
    """Hidden states (T, D) after the block at ``at``."""
    D = x.shape[1]
    size = D // config.heads
    normed = norm(x, w[f"{at}.ln_1.weight"], w[f"{at}.ln_1.bias"], config.eps)
    keys_from = values_from = normed
    if prefix is not None:
        keys_from = torch.cat([prefix[:, 0], normed])
        values_from = torch.cat([prefix[:, 1], normed])
    extra = len(keys_from) - len(x)
    weight, bias = w[f"{at}.qkv.weight"], w[f"{at}.qkv.bias"]
    heads = []
    for head in range(config.heads):
        part = slice(head * size, (head + 1) * size)
        q = normed @ weight[:D][part].T + bias[:D][part]
        k = keys_from @ weight[D : 2 * D][part].T + bias[D : 2 * D][part]
        v = values_from @ weight[2 * D :][part].T + bias[2 * D :][part]
        scores = q @ k.T / math.sqrt(size)
        if causal:
            hidden = torch.ones(len(x), len(x)).triu(1).bool()
            scores[:, extra:][hidden] = -math.inf
        exponents = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        heads.append(exponents / exponents.sum(dim=1, keepdim=True) @ v)
    x = x + torch.cat(heads, dim=1) @ w[f"{at}.out.weight"].T + w[f"{at}.out.bias"]
    normed = norm(x, w[f"{at}.ln_2.weight"], w[f"{at}.ln_2.bias"], config.eps)
    hidden = activate(normed @ w[f"{at}.fc.weight"].T + w[f"{at}.fc.bias"], config.activation)
    return x + hidden @ w[f"{at}.proj.weight"].T + w[f"{at}.proj.bias"]


def image_features(
    model: Any, pixels: Tensor, *, prefix: Any = None, tokens: Any = (), position: str = "end"
) -> Any:
    """Features (E,) of one image (3, S, S).

    ``prefix`` maps a block to (P, 2, D); ``tokens`` lists (p, D) per block.
    """
    w, config = dict(model.state_dict()), model.config.vision
    patches = []
    size = config.patch_size
    for top in range(0, config.image_size, size):
        for left in range(0, config.image_size, size):
            patch = pixels[:, top : top + size, left : left + size]
            patches.append((w["visual.patch.weight"] * patch).sum(dim=(1, 2, 3)))
    x = torch.stack([w["visual.class_token"], *patches]) + w["visual.position"]
    first = len(x) if position == "end" else 1  # of the tokens
    if tokens:
        x = torch.cat([x[:first], tokens[0], x[first:]])
    x = norm(x, w["visual.ln_pre.weight"], w["visual.ln_pre.bias"], config.eps)
    for index in range(config.layers):
        if 0 < index < len(tokens):
            x = torch.cat([x[:first], tokens[index], x[first + len(tokens[index]) :]])
        own = None if prefix is None else prefix.get(index)
        x = block(x, w, f"visual.blocks.{index}", config, prefix=own)
    pooled = norm(x[0], w["visual.ln_post.weight"], w["visual.ln_post.bias"], config.eps)
    return pooled @ w["visual.projection"]


def all_features(features: Any, model: Any, inputs: Any, **options: Any) -> Any:
    """Features of all inputs, one at a time; a function in ``options`` gives the row's own."""
    return torch.stack(
        [
            features(model, one, **{k: v(i) if callable(v) else v for k, v in options.items()})
            for i, one in enumerate(inputs)
        ]
    )


def text_features(
    model: Any, ids: Any, *, context: Any = None, positions: Any = None, deep: Any = ()
) -> Any:
    """Features (E,) of one row of ids (L,), all of it, padding included."""
    w, config = dict(model.state_dict()), model.config.text
    rows = [w["text.tokens.weight"][i] for i in ids]
    if context is not None:
        places = range(1, len(context) + 1) if positions is None else positions
        for place, vector in zip(places, context, strict=True):
            rows[int(place)] = vector
    x = torch.stack(rows) + w["text.position"][: len(rows)]
    for index in range(config.layers):
        if 0 < index <= len(deep):
            prompt = deep[index - 1]
            x = torch.cat([x[:1], prompt, x[1 + len(prompt) :]])
        x = block(x, w, f"text.blocks.{index}", config, causal=True)
    end = int(ids.argmax())
    pooled = norm(x[end], w["text.ln_final.weight"], w["text.ln_final.bias"], config.eps)
    return pooled @ w["text.projection"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(ours: Tensor, literal: Tensor, inputs: list[Tensor]) -> None:
    """Equal outputs and equal gradients, through a loss that weighs every output differently."""
    torch.testing.assert_close(ours, literal, atol=FEATURE, rtol=FEATURE)
    weights = draw(*ours.shape, seed=9)
    actual = torch.autograd.grad((ours * weights).sum(), inputs)
    wanted = torch.autograd.grad((literal * weights).sum(), inputs)
    for a, b in zip(actual, wanted, strict=True):
        assert b.abs().max() > 1e-3  # a gradient that vanishes would prove nothing
        torch.testing.assert_close(a, b, atol=FEATURE, rtol=FEATURE)
