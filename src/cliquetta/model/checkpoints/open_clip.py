"""open_clip's checkpoints: OpenAI's key names, its own config file.

Its config can describe more than CLIP's towers; whatever ours do not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from cliquetta.model.checkpoints import openai, timm_siglip
from cliquetta.model.checkpoints.open_clip_zoo import SIGLIP_PREPROCESS, architecture, siglip_config
from cliquetta.model.checkpoints.openai import Conventions
from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    check_vocabulary,
    dequantise,
    with_tokenizer,
)
from cliquetta.model.config import Activation, CLIPConfig, ResNetConfig
from cliquetta.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")

# Settings that change nothing at inference, or that are read here or from the weights.
_VISION_KEYS = frozenset(
    {"image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size", "patch_dropout"}
    | {"norm_kwargs", "output_tokens"}
)
_TEXT_KEYS = frozenset(
    {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "norm_kwargs"}
    | {"output_tokens", "pad_id", "hf_tokenizer_name", "eos_id"}
)
_TOP_KEYS = frozenset({"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_scale"})
_TOP_KEYS |= {"custom_text", "init_logit_bias"}
# Those of SigLIP; that the weights are its own is known by then.
_SIGLIP_KEYS = frozenset({"timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj"})
_SIGLIP_KEYS |= {"no_causal_mask", "proj_bias", "pool_type", "act_kwargs", "tokenizer_kwargs"}
_HARMLESS: tuple[object, ...] = (
    None,
    False,
    0,
    "tok",
    "argmax",
    "learnable",
    "linear",
    "default",
    {},
)


def from_open_clip(
    state: Mapping[str, Tensor],
    *,
    id: str,
    activation: Activation | None = None,
    arch: str | None = None,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
    find: Callable[[str], Path | None] = lambda name: None,
) -> Checkpoint:
    """The checkpoint of open_clip (or OpenAI) weights, with what its config file adds.

    ``activation`` overrules the config; without either it is GELU. ``arch`` and ``tag``, where
    known, add what that release is known for. ``find`` looks for the tokenizer of a model with a
    vocabulary of its own.
    """
    weights = openai.clean(dequantise(state))
    refuse_other_models(weights)
    family = timm_siglip if timm_siglip.SIGN in weights else openai
    config = config or _config_of(arch, family is timm_siglip)
    conventions = conventions_from(config, activation, siglip=family is timm_siglip)
    shapes = family.config_from(weights, conventions)
    if arch is not None:
        _check_architecture(shapes, arch)
    if config is not None:
        _check_config(shapes, config)
    known = architecture(arch).preprocess.get(tag or "", {}) if arch is not None else {}
    if family is timm_siglip:
        known = SIGLIP_PREPROCESS
    values = {**known, **(config or {}).get("preprocess_cfg", {})}
    preprocess = preprocess_from(shapes.vision.image_size, values)
    checkpoint = Checkpoint(shapes, family.rename(weights), id, preprocess)
    if tokenizer_name(config) is not None:
        return with_tokenizer(checkpoint, find)
    check_vocabulary(shapes.text)
    return checkpoint


def tokenizer_name(config: Mapping[str, Any] | None) -> str | None:
    """The hub repository whose tokenizer a config names; ``None`` for CLIP's own."""
    name = (((config or {}).get("model_cfg") or {}).get("text_cfg") or {}).get("hf_tokenizer_name")
    return str(name) if name else None


def _config_of(arch: str | None, siglip: bool) -> dict[str, Any] | None:
    """Config of a SigLIP by its name, where there is no config file."""
    if not siglip:
        return None
    if arch is None:
        raise CheckpointError(
            f"these are the weights of a SigLIP: put {CONFIG_FILE} beside them, or name the "
            "architecture: open_clip:ViT-B-16-SigLIP/PATH"
        )
    return {"model_cfg": siglip_config(arch)}


def refuse_other_models(state: Mapping[str, Tensor]) -> None:
    """Models that share open_clip's file format but not CLIP's towers."""
    if timm_siglip.SIGN in state:
        return
    for what, sign in (
        ("a CoCa model (it has a caption decoder)", "text_decoder."),
        ("a model with a timm image tower (EVA, ConvNeXt, ...)", "visual.trunk."),
        ("a model with an attentional pooler (CoCa, CLIPA)", "visual.attn_pool."),
        ("a model with a Hugging Face text tower (RoBERTa, mT5, ...)", "transformer.embeddings."),
        ("an EVA image tower", "visual.patch_embed."),
    ):
        if any(key.removeprefix("text.").startswith(sign) for key in state):
            raise CheckpointError(
                f"not supported: {what}; load it with open_clip and pass it to cliquetta.from_model"
            )
    scaled = next((key for key in state if key.endswith((".ls_1.gamma", ".ls_2.gamma"))), None)
    if scaled is not None:
        raise CheckpointError(f"not supported: a tower with layer scale ({scaled})")


def conventions_from(
    config: Mapping[str, Any] | None, activation: Activation | None, *, siglip: bool = False
) -> Conventions:
    """The conventions of a config file, refused where it asks for what our towers do not have."""
    if config is None:
        return Conventions(activation or "gelu")
    model = config.get("model_cfg")
    if not isinstance(model, Mapping) or "vision_cfg" not in model:
        raise CheckpointError(f"{CONFIG_FILE} has no model_cfg with a vision_cfg")
    vision, text = model["vision_cfg"], model.get("text_cfg") or {}
    for part, values, known in (
        ("model_cfg", model, _TOP_KEYS),
        ("vision_cfg", vision, _VISION_KEYS),
        ("text_cfg", text, _TEXT_KEYS),
    ):
        for key, value in values.items():
            allowed = known | (_SIGLIP_KEYS if siglip else frozenset())
            if (key, value) == ("pool_type", "eos") or key in allowed or value in _HARMLESS:
                continue
            raise CheckpointError(
                f"not supported: {part}.{key} = {value!r} in {CONFIG_FILE}; load the model with "
                "open_clip and pass it to cliquetta.from_model"
            )
    if siglip:
        tanh = (text.get("act_kwargs") or {}).get("approximate") == "tanh"
        return Conventions(
            activation or timm_siglip.vision_activation(vision.get("timm_model_name", "")),
            text_heads=text.get("heads"),
            vision_eps=1e-6,
            text_eps=(text.get("norm_kwargs") or {}).get("eps", 1e-6),
            text_activation=activation or ("gelu_tanh" if tanh else "gelu"),
            image_size=vision.get("image_size"),
        )
    stated: Activation = "quick_gelu" if model.get("quick_gelu", False) else "gelu"
    is_vit = not isinstance(vision.get("layers"), list)
    return Conventions(
        activation or stated,
        vision_heads=vision.get("width", 768) // vision.get("head_width", 64) if is_vit else None,
        text_heads=text.get("heads"),
        vision_eps=(vision.get("norm_kwargs") or {}).get("eps", 1e-5),
        text_eps=(text.get("norm_kwargs") or {}).get("eps", 1e-5),
        text_end=text.get("eos_id", 2) if text.get("pool_type") == "eos" else None,
    )


def _check_architecture(shapes: CLIPConfig, arch: str) -> None:
    """The file is of the named architecture, whatever its grid of positions."""
    entry, vision = architecture(arch), shapes.vision
    patch = None if isinstance(vision, ResNetConfig) else vision.patch_size
    if (vision.width, patch) != (entry.width, entry.patch_size):
        raise CheckpointError(
            f"a checkpoint of another shape: {arch} is {entry.width} wide with patches of "
            f"{entry.patch_size}, this one is {vision.width} wide with patches of {patch}"
        )


def _check_config(shapes: CLIPConfig, config: Mapping[str, Any]) -> None:
    """The weights are those that the config file describes."""
    model = config["model_cfg"]
    for key, found in (("embed_dim", shapes.embed_dim), ("width", shapes.vision.width)):
        stated = (model if key == "embed_dim" else model["vision_cfg"]).get(key, found)
        if stated != found:
            raise CheckpointError(
                f"a checkpoint of another shape: {CONFIG_FILE} says {key} = {stated}, the weights "
                f"have {found}"
            )


def preprocess_from(size: int, values: Mapping[str, Any]) -> Preprocess:
    """The preprocessing of a ``preprocess_cfg``; OpenAI's where it is silent."""
    mode: Literal["squash", "shorter"]
    mode = "squash" if values.get("resize_mode") == "squash" else "shorter"
    return Preprocess(
        size,
        mean=tuple(values.get("mean") or OPENAI_MEAN),
        std=tuple(values.get("std") or OPENAI_STD),
        interpolation=values.get("interpolation") or "bicubic",
        resize=mode,
    )
