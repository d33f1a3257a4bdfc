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

# Scalars that OpenAI's archives carry beside the weights.
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
    # SigLIP's image towers are timm's.
    (r"^visual\.trunk\.patch_embed\.proj\.", "visual.patch."),
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
# Matrices that are stored with outputs first.
_TURNED = ("visual.proj_t", "text_projection.weight")
_EXACT_GELU = re.compile(
    r"vit_(base_patch16_siglip_\d+|large_patch16_siglip_(256|384)|so400m_patch14_siglip_\d+)$"
)


@dataclass(frozen=True)
class Conventions:
    """Properties of the towers that the shapes of the weights do not show."""

    activation: Activation = "quick_gelu"
    # `None`: see `_default_heads`.
    vision_heads: int | None = None
    text_heads: int | None = None
    vision_eps: float = 1e-5
    text_eps: float = 1e-5
    # `None`: that of the image tower.
    text_activation: Activation | None = None
    # The token at which a text is read; `None` is the highest.
    text_end: int | None = None
    # Where patches do not fill the image, its stated side.
    image_size: int | None = None


def siglip_activation(timm_name: str) -> Activation:
    """Name the GELU of a timm image tower: exact in the first ports, tanh's in others."""
    return "gelu" if _EXACT_GELU.match(timm_name) else "gelu_tanh"


def is_siglip_state(state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has the pooling head of timm's SigLIP."""
    return "visual.trunk.attn_pool.latent" in state


def clean(state: Mapping[str, Tensor]) -> State:
    """Return the weights alone, with one name and one orientation each."""
    # open_clip's models with a separate tower.
    separate = "text.token_embedding.weight" in state
    out: State = {}
    for key, tensor in state.items():
        name = key.removeprefix("text.") if separate else key
        if name in SETTINGS or name.split(".")[-1] in ("attn_mask", "position_ids"):
            continue
        if name in _TURNED:
            tensor = tensor.T
        if name == "visual.proj_t":
            name = "visual.proj"
        out[name] = tensor
    return out


def rename(state: Mapping[str, Tensor]) -> State:
    """Put cleaned weights under our key names; those of a ResNet are the same."""
    # timm keeps queries apart from keys and values.
    state = dict(state)
    for kind in ("weight", "bias"):
        q = f"visual.trunk.attn_pool.q.{kind}"
        kv = f"visual.trunk.attn_pool.kv.{kind}"
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
    """Read the shapes of cleaned weights."""
    vision: VisionConfig | ResNetConfig
    text = None
    try:
        if "token_embedding.weight" in state:
            text = _text_config(state, conventions)

        if is_siglip_state(state):
            vision = _siglip_vision_config(state, conventions)
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
    state: Mapping[str, Tensor], conventions: Conventions
) -> VisionConfig:
    """Read the shapes of OpenAI's ViT."""
    blocks = "visual.transformer.resblocks."
    return _build_vision_config(
        conventions,
        kernel=state["visual.conv1.weight"],
        patches=len(state["visual.positional_embedding"]) - 1,
        layers=_count(state, blocks),
        hidden=state[f"{blocks}0.mlp.c_fc.weight"].shape[0],
        pooling="class",
    )


def _siglip_vision_config(
    state: Mapping[str, Tensor], conventions: Conventions
) -> VisionConfig:
    """Read the shapes of timm's ViT, as SigLIP has it."""
    blocks = "visual.trunk.blocks."
    return _build_vision_config(
        conventions,
        kernel=state["visual.trunk.patch_embed.proj.weight"],
        patches=state["visual.trunk.pos_embed"].shape[1],
        layers=_count(state, blocks),
        hidden=state[f"{blocks}0.mlp.fc1.weight"].shape[0],
        pooling="attention",
    )


def _build_vision_config(
    conventions: Conventions,
    *,
    kernel: Tensor,
    patches: int,
    layers: int,
    hidden: int,
    pooling: Literal["class", "attention"],
) -> VisionConfig:
    """Combine shapes and conventions of a ViT."""
    width = kernel.shape[0]
    patch = kernel.shape[-1]
    side = _square_side(patches)

    # A stated side counts where patches do not fill the image.
    stated = conventions.image_size or 0
    return VisionConfig(
        image_size=stated if stated // patch == side else side * patch,
        patch_size=patch,
        width=width,
        layers=layers,
        heads=conventions.vision_heads or _default_heads(width),
        hidden=hidden,
        activation=conventions.activation,
        eps=conventions.vision_eps,
        pooling=pooling,
    )


def _resnet_config(state: Mapping[str, Tensor]) -> ResNetConfig:
    """Read the shapes of a ResNet."""
    width = state["visual.layer1.0.conv1.weight"].shape[0]
    positions = len(state["visual.attnpool.positional_embedding"])
    side = _square_side(positions - 1)
    return ResNetConfig(
        image_size=side * 32,
        width=width,
        layers=(
            _count(state, "visual.layer1."),
            _count(state, "visual.layer2."),
            _count(state, "visual.layer3."),
            _count(state, "visual.layer4."),
        ),
        heads=width * 32 // 64,
    )


def _text_config(state: Mapping[str, Tensor], conventions: Conventions) -> TextConfig:
    """Read the shapes of the text tower."""
    vocab_size, width = state["token_embedding.weight"].shape
    is_siglip = is_siglip_state(state)
    heads = _default_heads(width) if is_siglip else max(1, width // 64)
    return TextConfig(
        context_length=state["positional_embedding"].shape[0],
        vocab_size=vocab_size,
        width=width,
        layers=_count(state, "transformer.resblocks."),
        heads=conventions.text_heads or heads,
        hidden=state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        activation=conventions.text_activation or conventions.activation,
        eps=conventions.text_eps,
        end=conventions.text_end,
        causal=not is_siglip,
        start_tokens=0 if is_siglip else 1,
        projection_bias=is_siglip,
    )


def _default_heads(width: int) -> int:
    """Count a head per 64 channels, and 16 beyond 1024, as every release has it."""
    return max(1, width // 64) if width <= 1024 else 16


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Count the blocks whose weights begin with a prefix."""
    blocks = set()
    for key in state:
        if key.startswith(prefix):
            blocks.add(key[len(prefix) :].split(".")[0])
    return len(blocks)


def _square_side(patches: int) -> int:
    """Return the side of a square of patches."""
    side = math.isqrt(patches)
    if side * side != patches:
        raise CheckpointError(f"{patches} patch positions are no square: not supported")
    return side
