"""Checkpoints of transformers: ``CLIPModel``, ``MetaClip2Model`` and ``SiglipModel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    State,
    check_vocabulary,
    dequantise,
    finish_scalars,
    with_tokenizer,
)
from cliquetta.model.config import Activation, CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess
from cliquetta.model.tokenizer import CLIP_END

CONFIG_FILE = "config.json"
PREPROCESS_FILE = "preprocessor_config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_SIGLIP_SIZES = {"base-patch16": (224, 256, 384, 512), "large-patch16": (256, 384)}
_SIGLIP_SIZES |= {"so400m-patch14": (224, 384)}
_SIGLIP_2_SIZES = {"base-patch32": (256,), "base-patch16": (224, 256, 384, 512)}
_SIGLIP_2_SIZES |= {"large-patch16": (256, 384, 512), "so400m-patch14": (224, 384)}
_SIGLIP_2_SIZES |= {"so400m-patch16": (256, 384, 512), "giant-opt-patch16": (256, 384)}
_META = "facebook/metaclip-2-worldwide"
RELEASES: Mapping[str, int] = {
    **{f"google/siglip-{k}-{s}": s for k, sizes in _SIGLIP_SIZES.items() for s in sizes},
    "google/siglip-base-patch16-256-multilingual": 256,
    **{f"google/siglip2-{k}-{s}": s for k, sizes in _SIGLIP_2_SIZES.items() for s in sizes},
    **{f"{_META}-{k}": 224 for k in ("s16", "m16", "b32", "b16", "l14", "huge-quickgelu", "giant")},
    **{f"{_META}-{k}-384": 384 for k in ("b32", "b16")},
    **{f"{_META}-{k}-378": 378 for k in ("huge", "giant")},
    **{f"facebook/metaclip-2-mt5-worldwide-{k}": 224 for k in ("s16", "m16", "b32")},
}
"""Repositories of SigLIP, SigLIP 2 and MetaCLIP 2, with the side of the images that each takes."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_HALF = (0.5, 0.5, 0.5)
_LEGACY_END = 2
"""Early configs name 2; transformers then pools at the highest id, which is the end token."""

# transformers' defaults, for configs that state only what differs.
_TEXT = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": CLIP_END,
}
_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 512,
}
_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_SIGLIP_TEXT = {**_SIGLIP, "vocab_size": 32000, "max_position_embeddings": 64}
_SIGLIP_VISION = {**_SIGLIP, "image_size": 224, "patch_size": 16}

_NAMES = {
    "vision_model.embeddings.class_embedding": "visual.class_token",
    "vision_model.embeddings.patch_embedding.weight": "visual.patch.weight",
    "vision_model.embeddings.patch_embedding.bias": "visual.patch.bias",
    "vision_model.embeddings.position_embedding.weight": "visual.position",
    "text_model.embeddings.token_embedding.weight": "text.tokens.weight",
    "text_model.embeddings.position_embedding.weight": "text.position",
    "text_model.head.bias": "text.projection_bias",
}
_PARTS = (
    ("vision_model.encoder.layers.", "visual.blocks."),
    ("vision_model.pre_layrnorm.", "visual.ln_pre."),  # spelt so over there
    ("vision_model.post_layernorm.", "visual.ln_post."),
    ("text_model.encoder.layers.", "text.blocks."),
    ("text_model.final_layer_norm.", "text.ln_final."),
    (".layer_norm1.", ".ln_1."),
    (".layer_norm2.", ".ln_2."),
    ("vision_model.head.", "visual.head."),
    (".head.layernorm.", ".head.ln_2."),
    (".attention.in_proj_", ".qkv."),
    (".attention.out_proj.", ".out."),
    (".self_attn.out_proj.", ".out."),
    (".mlp.fc1.", ".fc."),
    (".mlp.fc2.", ".proj."),
)


def from_huggingface(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    id: str,
    preprocessor: Mapping[str, Any] | None = None,
    find: Callable[[str], Path | None] = lambda name: None,
) -> Checkpoint:
    """The checkpoint of one of these models, or of a ``CLIPVisionModelWithProjection``.

    ``find`` looks beside the weights for the tokenizer of a model with a vocabulary of its own.
    """
    shapes = config_from(config)
    preprocess = preprocess_from(config, preprocessor or {})
    checkpoint = Checkpoint(shapes, rename(dequantise(state)), id, preprocess)
    if has_own_vocabulary(config):
        return with_tokenizer(checkpoint, find)
    check_vocabulary(shapes.text)
    return checkpoint


def has_own_vocabulary(config: Mapping[str, Any]) -> bool:
    """Whether text is tokenised by a file that comes with the weights."""
    return config.get("model_type") in ("siglip", "metaclip_2")


def config_from(config: Mapping[str, Any]) -> CLIPConfig:
    """Our shapes of a ``config.json``."""
    kind = config.get("model_type")
    if kind == "clip_vision_model":
        vision = {**_VISION, **config}
        return CLIPConfig(vision["projection_dim"], _vision_config(vision), None)
    if kind == "siglip":
        return _siglip_config(config)
    if kind == "siglip2":
        raise CheckpointError(
            "not supported: SigLIP 2 with variable resolution (NaFlex); use one of fixed "
            "resolution, such as hf:google/siglip2-base-patch16-256"
        )
    if kind not in ("clip", "metaclip_2"):
        raise CheckpointError(
            f"not supported: a Hugging Face model of type {kind!r} (only 'clip', 'metaclip_2' and "
            "'siglip' are); load it with its own library and pass it to cliquetta.from_model"
        )
    # Early configs keep what was really set in a second dictionary.
    text = {**_TEXT, **_section(config, "text_config"), **_section(config, "text_config_dict")}
    vision = {**_VISION, **_section(config, "vision_config")}
    vision |= _section(config, "vision_config_dict")
    return CLIPConfig(
        embed_dim=config.get("projection_dim", 512),
        vision=_vision_config(vision),
        text=_text_config(text, end=text["eos_token_id"] if kind == "metaclip_2" else None),
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One of the objects in a config; empty if it is missing or ``null``."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{CONFIG_FILE} is not a config of transformers: its {name!r} is a "
            f"{type(found).__name__}, expected an object"
        )
    return found


def _siglip_config(config: Mapping[str, Any]) -> CLIPConfig:
    """The shapes of a ``SiglipModel``; SigLIP 2 of fixed resolution is one."""
    text = {**_SIGLIP_TEXT, **_section(config, "text_config"), "eos_token_id": None}
    vision = {**_SIGLIP_VISION, **_section(config, "vision_config")}
    if not vision.get("vision_use_head", True):
        raise CheckpointError("not supported: a SigLIP image tower without its pooling head")
    tower = _text_config(text, end=None)
    return CLIPConfig(
        embed_dim=vision["hidden_size"],
        vision=replace(_vision_config(vision), pooling="attention"),
        text=replace(tower, causal=False, start_tokens=0, projection_bias=True),
        sigmoid=True,
    )


def rename(state: Mapping[str, Tensor]) -> State:
    """The weights under our key names: projections fused and turned, buffers dropped."""
    out: State = {}
    for key, tensor in state.items():
        if key.endswith(".position_ids"):
            continue
        if ".self_attn.q_proj." in key:
            out[_name(key.replace(".self_attn.q_proj.", ".qkv."))] = _fused(state, key)
        elif ".self_attn.k_proj." in key or ".self_attn.v_proj." in key:
            continue
        elif key in (
            "visual_projection.weight",
            "text_projection.weight",
            "text_model.head.weight",
        ):
            tower = key.partition("_")[0]
            out[f"{tower}.projection"] = tensor.T
        else:
            out[_name(key)] = tensor
    if "visual.head.probe" in out:
        out["visual.head.probe"] = out["visual.head.probe"].flatten()
        for kind in ("weight", "bias"):
            if f"visual.ln_post.{kind}" in out:  # the norm before the head: ours is part of it
                out[f"visual.head.ln_1.{kind}"] = out.pop(f"visual.ln_post.{kind}")
    return finish_scalars(out)


def _name(key: str) -> str:
    if key in _NAMES:
        return _NAMES[key]
    for theirs, ours in _PARTS:
        key = key.replace(theirs, ours)
    return key


def _fused(state: Mapping[str, Tensor], key: str) -> Tensor:
    """Query, key and value projections in one."""
    names = [key.replace(".q_proj.", f".{letter}_proj.") for letter in "qkv"]
    missing = [name for name in names if name not in state]
    if missing:
        raise CheckpointError(f"not a whole CLIP checkpoint: {missing[0]} is missing")
    return torch.cat([state[name] for name in names])


def _tower(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that both towers have."""
    return {
        "width": values["hidden_size"],
        "layers": values["num_hidden_layers"],
        "heads": values["num_attention_heads"],
        "hidden": values["intermediate_size"],
        "activation": _activation(values),
        "eps": values["layer_norm_eps"],
    }


def _vision_config(values: Mapping[str, Any]) -> VisionConfig:
    return VisionConfig(
        image_size=values["image_size"], patch_size=values["patch_size"], **_tower(values)
    )


def _text_config(values: Mapping[str, Any], *, end: int | None) -> TextConfig:
    if end is None and values["eos_token_id"] not in (_LEGACY_END, CLIP_END, None):
        raise CheckpointError(
            f"not supported: text that ends with token {values['eos_token_id']}; CLIP's end token "
            f"is {CLIP_END}"
        )
    return TextConfig(
        context_length=values["max_position_embeddings"],
        vocab_size=values["vocab_size"],
        **_tower(values),
        end=end,
    )


def _activation(values: Mapping[str, Any]) -> Activation:
    name = values["hidden_act"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"not supported: hidden_act {name!r}, only {known}")
    return _ACTIVATIONS[name]


def preprocess_from(config: Mapping[str, Any], values: Mapping[str, Any]) -> Preprocess:
    """The preprocessing of a ``preprocessor_config.json``; what it leaves out is the family's."""
    is_siglip = config.get("model_type") == "siglip"
    return preprocess_of_size(config_from(config).vision.image_size, values, is_siglip=is_siglip)


def preprocess_of_size(
    image_size: int, values: Mapping[str, Any], *, is_siglip: bool = False
) -> Preprocess:
    """The preprocessing of an image processor's settings, for a model of a known size."""
    for name, kinds in (
        ("image_mean", (list, tuple)),
        ("image_std", (list, tuple)),
        ("resample", (int,)),
    ):
        value = values.get(name)
        if value is not None and not isinstance(value, kinds):
            raise CheckpointError(
                f"{PREPROCESS_FILE} says {name} = {value!r}, expected a "
                f"{'number' if kinds == (int,) else 'list of three numbers'}"
            )
    size = values.get("size")
    # A height and a width are the target itself; an edge is that of the shorter side, then cropped.
    squash = "height" in size if isinstance(size, Mapping) else is_siglip
    return Preprocess(
        image_size,
        mean=tuple(values.get("image_mean") or (_HALF if is_siglip else OPENAI_MEAN)),
        std=tuple(values.get("image_std") or (_HALF if is_siglip else OPENAI_STD)),
        interpolation=cast(Any, _FILTERS.get(values.get("resample") or 3, "bicubic")),
        resize="squash" if squash else "shorter",
        crop_rounding="floor",
    )
