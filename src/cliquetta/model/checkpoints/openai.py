"""OpenAI's checkpoints: key names, which are open_clip's, too, and what their shapes tell."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cliquetta.model.checkpoints.state import (
    CheckpointError,
    State,
    finish_scalars,
    rename_key,
)
from cliquetta.model.config import (
    Activation,
    CLIPConfig,
    ResNetConfig,
    TextConfig,
    VisionConfig,
)

# scalars that OpenAI's archives carry beside the weights
SETTINGS = ("input_resolution", "context_length", "vocab_size")

_RENAMES = (
    (r"^visual\.conv1\.weight$", "visual.patch.weight"),
    (r"^visual\.class_embedding$", "visual.class_token"),
    (r"^visual\.positional_embedding$", "visual.position"),
    (r"^visual\.proj$", "visual.projection"),
    (r"^visual\.transformer\.resblocks\.", "visual.blocks."),
    (r"^transformer\.resblocks\.", "text.blocks."),
    (r"^token_embedding\.", "text.tokens."),
    (r"^positional_embedding$", "text.position"),
    (r"^ln_final\.", "text.ln_final."),
    (r"^text_projection(\.weight)?$", "text.projection"),
    (r"^text_projection\.bias$", "text.projection_bias"),
    (r"\.attn\.in_proj_(weight|bias)$", r".qkv.\1"),
    (r"\.attn\.out_proj\.", ".out."),
    (r"\.mlp\.c_fc\.", ".fc."),
    (r"\.mlp\.c_proj\.", ".proj."),
    (
        r"^visual\.trunk\.patch_embed\.proj\.",
        "visual.patch.",
    ),  # SigLIP's image towers are timm's
    (r"^visual\.trunk\.pos_embed$", "visual.position"),
    (r"^visual\.trunk\.norm\.", "visual.head.ln_1."),
    (r"^visual\.trunk\.attn_pool\.latent$", "visual.head.probe"),
    (r"^visual\.trunk\.attn_pool\.proj\.", "visual.head.out."),
    (r"^visual\.trunk\.attn_pool\.norm\.", "visual.head.ln_2."),
    (r"^visual\.trunk\.attn_pool\.", "visual.head."),
    (r"^visual\.trunk\.blocks\.", "visual.blocks."),
    (r"\.norm([12])\.", r".ln_\1."),
    (r"\.attn\.qkv\.", ".qkv."),
    (r"\.attn\.proj\.", ".out."),
    (r"\.mlp\.fc1\.", ".fc."),
    (r"\.mlp\.fc2\.", ".proj."),
)
_TURNED = ("visual.proj_t", "text_projection.weight")  # stored with outputs first
_EXACT_GELU = re.compile(
    r"vit_(base_patch16_siglip_\d+|large_patch16_siglip_(256|384)|so400m_patch14_siglip_\d+)$"
)


@dataclass(frozen=True)
class Conventions:
    """Properties of the towers that the shapes of the weights do not show."""

    activation: Activation = "quick_gelu"
    vision_heads: int | None = None  # `None`: see `_default_heads`
    text_heads: int | None = None
    vision_eps: float = 1e-5
    text_eps: float = 1e-5
    text_activation: Activation | None = None  # `None`: that of the image tower
    text_end: int | None = None
    """the token at which a text is read; `None` is the highest"""
    image_size: int | None = None
    """where patches do not fill the image, its stated side"""


def siglip_activation(timm_name: str) -> Activation:
    """The GELU of a timm image tower: exact in the first ports, the trained one in others."""
    return "gelu" if _EXACT_GELU.match(timm_name) else "gelu_tanh"


def is_siglip_state(state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has the pooling head of timm's SigLIP."""
    return "visual.trunk.attn_pool.latent" in state


def clean(state: Mapping[str, Tensor]) -> State:
    """The weights alone, with one name and one orientation each."""
    custom = (
        "text.token_embedding.weight" in state
    )  # open_clip's models with a separate tower
    out: State = {}
    for key, tensor in state.items():
        name = key.removeprefix("text.") if custom else key
        if name in SETTINGS or name.split(".")[-1] in ("attn_mask", "position_ids"):
            continue
        turned = tensor.T if name in _TURNED else tensor
        out["visual.proj" if name == "visual.proj_t" else name] = turned
    return out


def rename(state: Mapping[str, Tensor]) -> State:
    """Cleaned weights under our key names; those of a ResNet are the same."""
    state = dict(state)
    for kind in ("weight", "bias"):
        q, kv = (f"visual.trunk.attn_pool.{part}.{kind}" for part in ("q", "kv"))
        if q in state and kv in state:
            state[f"visual.head.qkv.{kind}"] = torch.cat([state.pop(q), state.pop(kv)])
    is_resnet = "visual.attnpool.c_proj.weight" in state
    out: State = {}
    for key, tensor in state.items():
        same = is_resnet and key.startswith("visual.")
        out[key if same else rename_key(key, _RENAMES)] = tensor
    if is_siglip_state(state):
        out["visual.position"] = out["visual.position"].flatten(0, 1)
        out["visual.head.probe"] = out["visual.head.probe"].flatten()
    return finish_scalars(out)


def config_from(state: Mapping[str, Tensor], conventions: Conventions) -> CLIPConfig:
    """The shapes of cleaned weights."""
    vision: VisionConfig | ResNetConfig
    try:
        text = (
            _text_config(state, conventions)
            if "token_embedding.weight" in state
            else None
        )
        if is_siglip_state(state):
            vision = _vision_config(state, conventions, pooling="attention")
            embed_dim = vision.width
        elif "visual.class_embedding" in state:
            vision = _vision_config(state, conventions)
            embed_dim = state["visual.proj"].shape[1]
        elif "visual.attnpool.c_proj.weight" in state:
            vision = _resnet_config(state)
            embed_dim = state["visual.attnpool.c_proj.weight"].shape[0]
        else:
            parts = ", ".join(sorted({key.split(".")[0] for key in state})[:6])
            raise CheckpointError(
                f"no image tower of a CLIP in this checkpoint; it holds {parts}"
            )
    except KeyError as error:
        raise CheckpointError(
            f"an incomplete checkpoint: {error.args[0]} is missing"
        ) from None
    sigmoid = is_siglip_state(state) or "logit_bias" in state
    return CLIPConfig(embed_dim, vision, text, sigmoid)


def _vision_config(
    state: Mapping[str, Tensor],
    conventions: Conventions,
    pooling: Literal["class", "attention"] = "class",
) -> VisionConfig:
    if pooling == "class":
        kernel, blocks = state["visual.conv1.weight"], "visual.transformer.resblocks."
        patches, hidden = (
            len(state["visual.positional_embedding"]) - 1,
            "mlp.c_fc.weight",
        )
    else:
        kernel, blocks = (
            state["visual.trunk.patch_embed.proj.weight"],
            "visual.trunk.blocks.",
        )
        patches, hidden = state["visual.trunk.pos_embed"].shape[1], "mlp.fc1.weight"
    width, patch = kernel.shape[0], kernel.shape[-1]
    side, stated = _square_side(patches), conventions.image_size or 0
    return VisionConfig(
        image_size=stated if stated // patch == side else side * patch,
        patch_size=patch,
        width=width,
        layers=_count(state, blocks),
        heads=conventions.vision_heads or _default_heads(width),
        hidden=state[f"{blocks}0.{hidden}"].shape[0],
        activation=conventions.activation,
        eps=conventions.vision_eps,
        pooling=pooling,
    )


def _resnet_config(state: Mapping[str, Tensor]) -> ResNetConfig:
    width = state["visual.layer1.0.conv1.weight"].shape[0]
    a, b, c, d = (_count(state, f"visual.layer{stage}.") for stage in range(1, 5))
    side = _square_side(len(state["visual.attnpool.positional_embedding"]) - 1)
    return ResNetConfig(side * 32, width, (a, b, c, d), heads=width * 32 // 64)


def _text_config(state: Mapping[str, Tensor], conventions: Conventions) -> TextConfig:
    vocab_size, width = state["token_embedding.weight"].shape
    is_siglip = is_siglip_state(state)
    return TextConfig(
        context_length=state["positional_embedding"].shape[0],
        vocab_size=vocab_size,
        width=width,
        layers=_count(state, "transformer.resblocks."),
        heads=conventions.text_heads
        or (_default_heads(width) if is_siglip else max(1, width // 64)),
        hidden=state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        activation=conventions.text_activation or conventions.activation,
        eps=conventions.text_eps,
        end=conventions.text_end,
        causal=not is_siglip,
        start_tokens=0 if is_siglip else 1,
        projection_bias=is_siglip,
    )


def _default_heads(width: int) -> int:
    """A head per 64 channels, and 16 beyond 1024, as every release has it."""
    return max(1, width // 64) if width <= 1024 else 16


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({k[len(prefix) :].split(".")[0] for k in state if k.startswith(prefix)})


def _square_side(patches: int) -> int:
    side = math.isqrt(patches)
    if side * side != patches:
        raise CheckpointError(f"{patches} patch positions are no square: not supported")
    return side
