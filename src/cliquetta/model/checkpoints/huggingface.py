"""Checkpoints of transformers: ``CLIPModel``, ``MetaClip2Model`` and ``SiglipModel``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    State,
    finish_scalars,
    read_json,
    rename_key,
    with_tokenizer,
)
from cliquetta.model.config import Activation, CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess
from cliquetta.model.tokenizer import CLIP_END, Find

CONFIG_FILE = "config.json"
PREPROCESS_FILE = "preprocessor_config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_ACTIVATIONS: Mapping[str, Activation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# By Pillow's numbers.
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
_HALF = (0.5, 0.5, 0.5)
# Of early configs; transformers then pools at the highest id, the end token.
_LEGACY_END = 2

# transformers' defaults, for configs that state only what differs.
_CLIP = {
    "num_hidden_layers": 12,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_TEXT = {
    **_CLIP,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "eos_token_id": CLIP_END,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
}
_VISION = {
    **_CLIP,
    "image_size": 224,
    "patch_size": 32,
    "projection_dim": 512,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
}
_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
}
_SIGLIP_TEXT = {**_SIGLIP, "vocab_size": 32000, "max_position_embeddings": 64}
_SIGLIP_VISION = {**_SIGLIP, "image_size": 224, "patch_size": 16}

_RENAMES = (
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_token"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual.patch."),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.position"),
    (r"^vision_model\.encoder\.layers\.", "visual.blocks."),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),  # spelt so over there
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^vision_model\.head\.layernorm\.", "visual.head.ln_2."),
    (r"^vision_model\.head\.", "visual.head."),
    (r"^visual_projection\.weight$", "visual.projection"),
    (r"^text_model\.embeddings\.token_embedding\.", "text.tokens."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "text.position"),
    (r"^text_model\.encoder\.layers\.", "text.blocks."),
    (r"^text_model\.final_layer_norm\.", "text.ln_final."),
    (r"^(text_projection|text_model\.head)\.weight$", "text.projection"),
    (r"^text_model\.head\.bias$", "text.projection_bias"),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.self_attn\.q_proj\.", ".qkv."),
    (r"\.attention\.in_proj_", ".qkv."),
    (r"\.(attention|self_attn)\.out_proj\.", ".out."),
    (r"\.mlp\.fc1\.", ".fc."),
    (r"\.mlp\.fc2\.", ".proj."),
)


def from_huggingface(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    id: str,
    find: Find = lambda name: None,
) -> Checkpoint:
    """Make a checkpoint of one of these models, or of a ``CLIPVisionModelWithProjection``."""
    shapes = config_from(config)
    path = find(PREPROCESS_FILE)
    values = {} if path is None else read_json(path)

    preprocess = preprocess_from(
        shapes.vision.image_size, values, is_siglip=shapes.sigmoid
    )
    checkpoint = Checkpoint(shapes, rename(state), id, preprocess)
    return with_tokenizer(checkpoint, find if has_own_vocabulary(config) else None)


def shard_names(index: Path) -> list[str]:
    """List the files that a ``model.safetensors.index.json`` names."""
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(
        isinstance(file, str) for file in file_of.values()
    ):
        raise CheckpointError(
            f"{index} has no 'weight_map' with the file of every weight"
        )
    return sorted(set(file_of.values()))


def has_own_vocabulary(config: Mapping[str, Any]) -> bool:
    """Whether text is tokenised by a file that comes with the weights."""
    return config.get("model_type") in ("siglip", "metaclip_2")


def config_from(config: Mapping[str, Any]) -> CLIPConfig:
    """Read our shapes of a ``config.json``."""
    kind = config.get("model_type")
    if kind == "clip_vision_model":
        vision = {**_VISION, **config}
        return CLIPConfig(vision["projection_dim"], _vision_config(vision), None)
    if kind == "siglip2":
        raise CheckpointError(
            "not supported: SigLIP 2 with variable resolution (NaFlex); use one of fixed "
            "resolution, such as hf:google/siglip2-base-patch16-256"
        )
    if kind == "siglip":
        return _siglip_config(config)
    if kind not in ("clip", "metaclip_2"):
        raise CheckpointError(
            f"not supported: a Hugging Face model of type {kind!r} (only 'clip', 'metaclip_2' and "
            "'siglip' are); load it with its own library and pass it to cliquetta.from_model"
        )

    text = {**_TEXT, **_tower_section(config, "text")}
    vision = {**_VISION, **_tower_section(config, "vision")}

    end = text["eos_token_id"]
    if kind == "clip" and end not in (_LEGACY_END, CLIP_END, None):
        message = f"not supported: text that ends with token {end}; CLIP's end token is {CLIP_END}"
        raise CheckpointError(message)
    words = _text_config(text, end=end if kind == "metaclip_2" else None)
    return CLIPConfig(config.get("projection_dim", 512), _vision_config(vision), words)


def _siglip_config(config: Mapping[str, Any]) -> CLIPConfig:
    """Read our shapes of a SigLIP."""
    text = {**_SIGLIP_TEXT, **_section(config, "text_config")}
    vision = {**_SIGLIP_VISION, **_section(config, "vision_config")}
    if not vision.get("vision_use_head", True):
        raise CheckpointError(
            "not supported: a SigLIP image tower without its pooling head"
        )
    image = replace(_vision_config(vision), pooling="attention")
    words = _text_config(text, end=None)
    words = replace(words, causal=False, start_tokens=0, projection_bias=True)
    return CLIPConfig(vision["hidden_size"], image, words, sigmoid=True)


def _tower_section(config: Mapping[str, Any], tower: str) -> dict[str, Any]:
    """Return what a config states of a tower.

    Early configs keep what was really set in a second dictionary.
    """
    stated = _section(config, f"{tower}_config")
    early = _section(config, f"{tower}_config_dict")
    return {**stated, **early}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one of the objects in a config; empty if it is missing or ``null``."""
    values = config.get(name)
    if values is not None and not isinstance(values, Mapping):
        raise CheckpointError(
            f"{CONFIG_FILE} is not a config of transformers: its {name!r} is a "
            f"{type(values).__name__}, expected an object"
        )
    return values or {}


def rename(state: Mapping[str, Tensor]) -> State:
    """Put weights under our key names: projections fused and turned, buffers dropped."""
    out: State = {}
    for key, tensor in state.items():
        if key.endswith(".position_ids") or ".k_proj." in key or ".v_proj." in key:
            continue
        name = rename_key(key, _RENAMES)
        if ".q_proj." in key:
            out[name] = _fuse_projections(state, key)
        else:
            out[name] = tensor.T if name.endswith(".projection") else tensor
    if "visual.head.probe" in out:
        out["visual.head.probe"] = out["visual.head.probe"].flatten()

        # The norm before the head: ours is part of it.
        for kind in ("weight", "bias"):
            if f"visual.ln_post.{kind}" in out:
                out[f"visual.head.ln_1.{kind}"] = out.pop(f"visual.ln_post.{kind}")
    return finish_scalars(out)


def _fuse_projections(state: Mapping[str, Tensor], key: str) -> Tensor:
    """Join projections of queries (``key``), keys and values to one matrix."""
    parts = []
    for letter in "qkv":
        name = key.replace(".q_proj.", f".{letter}_proj.")
        if name not in state:
            raise CheckpointError(f"an incomplete checkpoint: {name} is missing")
        parts.append(state[name])
    return torch.cat(parts)


def _tower(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that both towers have."""
    name = values["hidden_act"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"not supported: hidden_act {name!r}, only {names}")
    return {
        "width": values["hidden_size"],
        "layers": values["num_hidden_layers"],
        "heads": values["num_attention_heads"],
        "hidden": values["intermediate_size"],
        "activation": _ACTIVATIONS[name],
        "eps": values["layer_norm_eps"],
    }


def _vision_config(values: Mapping[str, Any]) -> VisionConfig:
    """Read the shapes of an image tower."""
    return VisionConfig(
        image_size=values["image_size"],
        patch_size=values["patch_size"],
        **_tower(values),
    )


def _text_config(values: Mapping[str, Any], *, end: int | None) -> TextConfig:
    """Read the shapes of a text tower."""
    return TextConfig(
        context_length=values["max_position_embeddings"],
        vocab_size=values["vocab_size"],
        end=end,
        **_tower(values),
    )


def preprocess_from(
    size: int, values: Mapping[str, Any], *, is_siglip: bool = False
) -> Preprocess:
    """Read a ``preprocessor_config.json``; what it leaves out is the family's."""
    _check_type(values, "image_mean", (list, tuple), "list of three numbers")
    _check_type(values, "image_std", (list, tuple), "list of three numbers")
    _check_type(values, "resample", int, "number")

    # A height and a width are the target itself; an edge is that of the shorter side,
    # then cropped.
    stated = values.get("size")
    squash = "height" in stated if isinstance(stated, Mapping) else is_siglip
    interpolation: Any = _FILTERS.get(values.get("resample") or 3, "bicubic")
    return Preprocess(
        size,
        mean=tuple(values.get("image_mean") or (_HALF if is_siglip else OPENAI_MEAN)),
        std=tuple(values.get("image_std") or (_HALF if is_siglip else OPENAI_STD)),
        interpolation=interpolation,
        resize="squash" if squash else "shorter",
        crop_rounding="floor",
    )


def _check_type(values: Mapping[str, Any], name: str, kind: Any, words: str) -> None:
    """Refuse a value of another type."""
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise CheckpointError(
            f"{PREPROCESS_FILE} says {name} = {value!r}, expected a {words}"
        )
