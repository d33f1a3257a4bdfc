"""OpenAI's checkpoints: names, addresses, key names, and what their shapes tell.

open_clip kept these key names, so its checkpoints pass through here as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cliquetta.model.checkpoints.state import CheckpointError, State, finish_scalars
from cliquetta.model.config import Activation, CLIPConfig, ResNetConfig, TextConfig, VisionConfig

_BASE = "https://openaipublic.azureedge.net/clip/models"
_FILES = {
    "RN50": "afeb0e10f9e5a86da6080e35cf09123aca3b358a0c3e3b6c78a7b63bc04b6762/RN50.pt",
    "RN101": "8fa8567bab74a42d41c5915025a8e4538c3bdbe8804a470a72f30b0d94fab599/RN101.pt",
    "RN50x4": "7e526bd135e493cef0776de27d5f42653e6b4c8bf9e0f653bb11773263205fdd/RN50x4.pt",
    "RN50x16": "52378b407f34354e150460fe41077663dd5b39c54cd0bfd2b27167a4a06ec9aa/RN50x16.pt",
    "RN50x64": "be1cfb55d75a9666199fb2206c106743da0f6468c9d327f3e0d0a543a9919d9c/RN50x64.pt",
    "ViT-B/32": "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af/ViT-B-32.pt",
    "ViT-B/16": "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f/ViT-B-16.pt",
    "ViT-L/14": "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836/ViT-L-14.pt",
    "ViT-L/14@336px": (
        "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02/ViT-L-14-336px.pt"
    ),
}
HUB = {
    "ViT-B/32": "openai/clip-vit-base-patch32",
    "ViT-B/16": "openai/clip-vit-base-patch16",
    "ViT-L/14": "openai/clip-vit-large-patch14",
    "ViT-L/14@336px": "openai/clip-vit-large-patch14-336",
}
"""OpenAI's own repositories on the Hugging Face hub, in the format of transformers."""
NAMES = tuple(_FILES)
"""OpenAI's names for its models."""

_SETTINGS = ("input_resolution", "context_length", "vocab_size")
"""Scalars that OpenAI's archives carry beside the weights."""

_NAMES = (
    (r"^visual\.conv1\.weight$", "visual.patch.weight"),
    (r"^visual\.class_embedding$", "visual.class_token"),
    (r"^visual\.positional_embedding$", "visual.position"),
    (r"^visual\.proj$", "visual.projection"),
    (r"^visual\.transformer\.resblocks\.", "visual.blocks."),
    (r"^transformer\.resblocks\.", "text.blocks."),
    (r"^token_embedding\.", "text.tokens."),
    (r"^positional_embedding$", "text.position"),
    (r"^ln_final\.", "text.ln_final."),
    (r"^text_projection$", "text.projection"),
    (r"\.attn\.in_proj_(weight|bias)$", r".qkv.\1"),
    (r"\.attn\.out_proj\.", ".out."),
    (r"\.mlp\.c_fc\.", ".fc."),
    (r"\.mlp\.c_proj\.", ".proj."),
)


@dataclass(frozen=True)
class Conventions:
    """Properties of the towers that the shapes of the weights do not show."""

    activation: Activation = "quick_gelu"
    vision_heads: int | None = None
    """``None``: a head per 64 channels, and 16 beyond 1024 channels, as every release has it."""
    text_heads: int | None = None
    vision_eps: float = 1e-5
    text_eps: float = 1e-5
    text_activation: Activation | None = None
    """``None``: that of the image tower."""
    text_end: int | None = None
    """The token at which a text is read; ``None`` is the highest."""
    image_size: int | None = None
    """Where patches do not fill the image, its stated side."""


def address(name: str) -> tuple[str, str]:
    """Address where OpenAI published ``name``, and SHA-256 of the file (a part of the address)."""
    return f"{_BASE}/{_FILES[name]}", _FILES[name].split("/")[0]


def architecture_name(name: str) -> str:
    """open_clip's name of one of OpenAI's models: ``ViT-L-14-336`` for ``ViT-L/14@336px``."""
    return name.replace("/", "-").replace("@336px", "-336")


def is_openai_state(state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict was taken from one of OpenAI's archives: it carries its settings."""
    return all(key in state for key in _SETTINGS)


def clean(state: Mapping[str, Tensor]) -> State:
    """The weights alone, with one name and one orientation each."""
    custom = "text.token_embedding.weight" in state  # open_clip's models with a separate tower
    out: State = {}
    for key, tensor in state.items():
        name = key.removeprefix("text.") if custom else key
        if name in _SETTINGS or name.split(".")[-1] in ("attn_mask", "position_ids"):
            continue
        if name == "visual.proj_t":
            name, tensor = "visual.proj", tensor.T
        out[name] = tensor
    return out


def rename(state: Mapping[str, Tensor]) -> State:
    """Cleaned OpenAI weights under our key names; those of a ResNet are the same."""
    is_vit = "visual.class_embedding" in state
    out: State = {}
    for key, tensor in state.items():
        name = key
        if is_vit or not key.startswith("visual."):
            for pattern, ours in _NAMES:
                name = re.sub(pattern, ours, name)
        out[name] = tensor
    return finish_scalars(out)


def config_from(state: Mapping[str, Tensor], conventions: Conventions) -> CLIPConfig:
    """The shapes of cleaned OpenAI weights."""
    try:
        text = text_config(state, conventions) if "token_embedding.weight" in state else None
        sigmoid = "logit_bias" in state
        if "visual.class_embedding" in state:
            embed_dim = state["visual.proj"].shape[1]
            return CLIPConfig(embed_dim, _vision_config(state, conventions), text, sigmoid)
        if "visual.attnpool.c_proj.weight" in state:
            embed_dim = state["visual.attnpool.c_proj.weight"].shape[0]
            return CLIPConfig(embed_dim, _resnet_config(state), text, sigmoid)
    except KeyError as error:
        raise CheckpointError(f"not a whole CLIP checkpoint: {error.args[0]} is missing") from None
    found = ", ".join(sorted({key.split(".")[0] for key in state})[:6])
    raise CheckpointError(f"no image tower of a CLIP in this checkpoint; it holds {found}")


def _vision_config(state: Mapping[str, Tensor], conventions: Conventions) -> VisionConfig:
    kernel = state["visual.conv1.weight"]
    width, patch = kernel.shape[0], kernel.shape[-1]
    blocks = "visual.transformer.resblocks."
    return VisionConfig(
        image_size=square_side(len(state["visual.positional_embedding"]) - 1) * patch,
        patch_size=patch,
        width=width,
        layers=count(state, blocks),
        heads=conventions.vision_heads or default_heads(width),
        hidden=state[f"{blocks}0.mlp.c_fc.weight"].shape[0],
        activation=conventions.activation,
        eps=conventions.vision_eps,
    )


def _resnet_config(state: Mapping[str, Tensor]) -> ResNetConfig:
    width = state["visual.layer1.0.conv1.weight"].shape[0]
    stages = [count(state, f"visual.layer{stage}.") for stage in range(1, 5)]
    return ResNetConfig(
        image_size=square_side(len(state["visual.attnpool.positional_embedding"]) - 1) * 32,
        width=width,
        layers=(stages[0], stages[1], stages[2], stages[3]),
        heads=width * 32 // 64,
    )


def text_config(state: Mapping[str, Tensor], conventions: Conventions) -> TextConfig:
    """The shapes of the text tower."""
    vocab_size, width = state["token_embedding.weight"].shape
    return TextConfig(
        context_length=state["positional_embedding"].shape[0],
        vocab_size=vocab_size,
        width=width,
        layers=count(state, "transformer.resblocks."),
        heads=conventions.text_heads or max(1, width // 64),
        hidden=state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        activation=conventions.text_activation or conventions.activation,
        eps=conventions.text_eps,
        end=conventions.text_end,
    )


def default_heads(width: int) -> int:
    """A head per 64 channels, and 16 beyond 1024, as every release has it."""
    return max(1, width // 64) if width <= 1024 else 16


def count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Count the numbered modules behind ``prefix``."""
    return len({k[len(prefix) :].split(".")[0] for k in state if k.startswith(prefix)})


def square_side(patches: int) -> int:
    """Side of a square grid of patches."""
    side = math.isqrt(patches)
    if side * side != patches:
        raise CheckpointError(f"{patches} patch positions are no square: not supported")
    return side
