"""CLIP's towers written out: one sequence at a time, through torch's own attention.

An independent reading of the model for the tests: it shares with the package only the
names of the weights. Everything is differentiable.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests._helpers.tolerance import FEATURE


def norm(x: Tensor, w: Any, at: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{at}.weight"], w[f"{at}.bias"], eps)


def linear(x: Tensor, w: Any, at: str) -> Tensor:
    return F.linear(x, w[f"{at}.weight"], w[f"{at}.bias"])


def block(
    x: Tensor, w: Any, at: Any, config: Any, *, prefix: Any = None, causal: bool = False
) -> Tensor:
    """Hidden states (T, D) after the block at ``at``."""
    keys = values = normed = norm(x, w, f"{at}.ln_1", config.eps)
    if prefix is not None:
        keys, values = (torch.cat([prefix[:, part], normed]) for part in (0, 1))
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    names |= {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}
    weights = {theirs: w[f"{at}.{ours}"] for theirs, ours in names.items()}
    hidden = (
        torch.ones(len(x), len(keys)).triu(1 + len(keys) - len(x)).bool()
        if causal
        else None
    )
    attention = nn.MultiheadAttention(x.shape[1], config.heads)
    x = (
        x
        + functional_call(
            attention, weights, (normed, keys, values), {"attn_mask": hidden}
        )[0]
    )
    inner = linear(norm(x, w, f"{at}.ln_2", config.eps), w, f"{at}.fc")
    quick = config.activation == "quick_gelu"
    inner = inner * torch.sigmoid(1.702 * inner) if quick else F.gelu(inner)
    return x + linear(inner, w, f"{at}.proj")


def image_features(
    model: Any,
    pixels: Tensor,
    *,
    prefix: Any = None,
    tokens: Any = (),
    position: str = "end",
) -> Any:
    """Features (E,) of one image (3, S, S).

    ``prefix`` maps a block to (P, 2, D); ``tokens`` lists (p, D) per block.
    """
    w = dict(model.state_dict())
    config = model.config.vision
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
    x = norm(x, w, "visual.ln_pre", config.eps)
    for index in range(config.layers):
        if 0 < index < len(tokens):
            x = torch.cat([x[:first], tokens[index], x[first + len(tokens[index]) :]])
        own = None if prefix is None else prefix.get(index)
        x = block(x, w, f"visual.blocks.{index}", config, prefix=own)
    pooled = norm(x[0], w, "visual.ln_post", config.eps)
    return pooled @ w["visual.projection"]


def all_features(features: Any, model: Any, inputs: Any, **options: Any) -> Any:
    """Features of all inputs, one at a time; a function in ``options`` gives the row's own."""
    return torch.stack(
        [
            features(
                model,
                one,
                **{k: v(i) if callable(v) else v for k, v in options.items()},
            )
            for i, one in enumerate(inputs)
        ]
    )


def text_features(
    model: Any, ids: Any, *, context: Any = None, positions: Any = None, deep: Any = ()
) -> Any:
    """Features (E,) of one row of ids (L,), all of it, padding included."""
    w = dict(model.state_dict())
    config = model.config.text
    rows = [w["text.tokens.weight"][i] for i in ids]
    if context is not None:
        indices = range(1, len(context) + 1) if positions is None else positions
        for index, vector in zip(indices, context, strict=True):
            rows[int(index)] = vector
    x = torch.stack(rows) + w["text.position"][: len(rows)]
    for index in range(config.layers):
        if 0 < index <= len(deep):
            prompt = deep[index - 1]
            x = torch.cat([x[:1], prompt, x[1 + len(prompt) :]])
        x = block(x, w, f"text.blocks.{index}", config, causal=True)
    end = int(ids.argmax())
    pooled = norm(x[end], w, "text.ln_final", config.eps)
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
