"""SigLIP in open_clip's format: an image tower of timm, a text tower of open_clip's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cliquetta.model.checkpoints import openai
from cliquetta.model.checkpoints.openai import Conventions
from cliquetta.model.checkpoints.state import CheckpointError, State
from cliquetta.model.config import Activation, CLIPConfig, VisionConfig

SIGN = "visual.trunk.attn_pool.latent"
"""The weight by which such a checkpoint is told from others with a timm image tower."""

_EXACT_GELU = re.compile(
    r"vit_(base_patch16_siglip_\d+|large_patch16_siglip_(256|384)|so400m_patch14_siglip_\d+)$"
)
_NAMES = (
    (r"^visual\.trunk\.patch_embed\.proj\.", "visual.patch."),
    (r"^visual\.trunk\.norm\.", "visual.head.ln_1."),
    (r"^visual\.trunk\.attn_pool\.proj\.", "visual.head.out."),
    (r"^visual\.trunk\.attn_pool\.norm\.", "visual.head.ln_2."),
    (r"^visual\.trunk\.attn_pool\.", "visual.head."),
    (r"^visual\.trunk\.blocks\.", "visual.blocks."),
    (r"^text_projection\.bias$", "text.projection_bias"),
    (r"\.norm1\.", ".ln_1."),
    (r"\.norm2\.", ".ln_2."),
    (r"\.attn\.qkv\.", ".qkv."),
    (r"\.attn\.proj\.", ".out."),
    (r"\.mlp\.fc1\.", ".fc."),
    (r"\.mlp\.fc2\.", ".proj."),
)


def vision_activation(timm_name: str) -> Activation:
    """The GELU of a timm model: exact in the first ports, the trained approximation in others."""
    return "gelu" if _EXACT_GELU.match(timm_name) else "gelu_tanh"


def config_from(state: Mapping[str, Tensor], conventions: Conventions) -> CLIPConfig:
    """The shapes of cleaned weights."""
    try:
        kernel, positions = (
            state[f"visual.trunk.{name}"] for name in ("patch_embed.proj.weight", "pos_embed")
        )
        width, patch = kernel.shape[0], kernel.shape[-1]
        side = openai.square_side(positions.shape[1])
        stated = conventions.image_size or 0
        vision = VisionConfig(
            image_size=stated if stated // patch == side else side * patch,
            patch_size=patch,
            width=width,
            layers=openai.count(state, "visual.trunk.blocks."),
            heads=conventions.vision_heads or openai.default_heads(width),
            hidden=state["visual.trunk.blocks.0.mlp.fc1.weight"].shape[0],
            activation=conventions.activation,
            eps=conventions.vision_eps,
            pooling="attention",
        )
        heads = conventions.text_heads or openai.default_heads(
            state["positional_embedding"].shape[1]
        )
        text = openai.text_config(state, replace(conventions, text_heads=heads))
    except KeyError as error:
        raise CheckpointError(
            f"not a whole SigLIP checkpoint: {error.args[0]} is missing"
        ) from None
    text = replace(text, causal=False, start_tokens=0, projection_bias=True)
    return CLIPConfig(width, vision, text, sigmoid=True)


def rename(state: Mapping[str, Tensor]) -> State:
    """Cleaned weights under our key names."""
    state = dict(state)
    out: State = {}
    for kind in ("weight", "bias"):
        parts = [state.pop(f"visual.trunk.attn_pool.{part}.{kind}", None) for part in ("q", "kv")]
        found = [part for part in parts if part is not None]
        if len(found) == 2:
            out[f"visual.head.qkv.{kind}"] = torch.cat(found)
    for theirs, ours in (
        (SIGN, "visual.head.probe"),
        ("visual.trunk.pos_embed", "visual.position"),
    ):
        if theirs in state:
            out[ours] = state.pop(theirs).squeeze(0)
    if "visual.head.probe" in out:
        out["visual.head.probe"] = out["visual.head.probe"].squeeze(0)
    if "text_projection.weight" in state:
        out["text.projection"] = state.pop("text_projection.weight").T
    for key in list(state):
        name = key
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        if name != key:
            out[name] = state.pop(key)
    return out | openai.rename(state)
