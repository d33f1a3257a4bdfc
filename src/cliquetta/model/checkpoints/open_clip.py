"""open_clip's checkpoints: OpenAI's key names, a config; what ours do not have is refused."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cliquetta.model.checkpoints import openai, releases
from cliquetta.model.checkpoints.openai import Conventions
from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    with_tokenizer,
)
from cliquetta.model.config import Activation, CLIPConfig, ResNetConfig
from cliquetta.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess
from cliquetta.model.tokenizer import Find

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")

# Settings that change nothing at inference, or that are read here or from the weights.
_KEYS = {
    "model_cfg": {
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "init_logit_scale",
        "init_logit_bias",
        "custom_text",
    },
    "vision_cfg": {
        "image_size",
        "layers",
        "width",
        "head_width",
        "mlp_ratio",
        "patch_size",
        "patch_dropout",
        "norm_kwargs",
        "output_tokens",
    },
    "text_cfg": {
        "context_length",
        "vocab_size",
        "width",
        "heads",
        "layers",
        "mlp_ratio",
        "norm_kwargs",
        "output_tokens",
        "pad_id",
        "hf_tokenizer_name",
        "eos_id",
    },
}
# Settings of SigLIP alone, whose weights are recognised before its config is read.
_SIGLIP_KEYS = {
    "timm_model_name",
    "timm_model_pretrained",
    "timm_pool",
    "timm_proj",
    "no_causal_mask",
    "proj_bias",
    "pool_type",
    "act_kwargs",
    "tokenizer_kwargs",
}
# Values that switch a setting off.
_HARMLESS: Any = (None, False, 0, {}, "tok", "argmax", "learnable", "linear", "default")
# Texts are read at their end token, as by `Conventions.text_end`.
_POOL_AT_END = ("pool_type", "eos")
# Models that share open_clip's file format, by the beginning of a key.
_OTHER_MODELS = {
    "text_decoder.": "a CoCa model (it has a caption decoder)",
    "visual.trunk.": "a model with a timm image tower (EVA, ConvNeXt, ...)",
    "visual.attn_pool.": "a model with an attentional pooler (CoCa, CLIPA)",
    "transformer.embeddings.": (
        "a model with a Hugging Face text tower (RoBERTa, mT5, ...)"
    ),
    "visual.patch_embed.": "an EVA image tower",
}


def from_open_clip(
    state: Mapping[str, Tensor],
    *,
    id: str,
    find: Find,
    activation: Activation | None = None,
    arch: str | None = None,
    tag: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Make a checkpoint of open_clip (or OpenAI) weights, with what its config file adds.

    ``activation`` overrules the config; without either it is GELU. ``arch`` and
    ``tag``, if any, add what that release needs.
    """
    if activation is None and arch is not None:
        activation = releases.activation_of(arch, tag, config)
    weights = openai.clean(state)
    refuse_other_models(weights)
    is_siglip = openai.is_siglip_state(weights)
    if is_siglip and config is None:
        if arch is None:
            raise CheckpointError(
                f"these are the weights of a SigLIP: put {CONFIG_FILE} beside them, or name the "
                "architecture: open_clip:ViT-B-16-SigLIP/PATH"
            )
        config = {"model_cfg": releases.siglip_config(arch)}

    conventions = _conventions_from(config, activation, is_siglip=is_siglip)
    shapes = openai.config_from(weights, conventions)
    if arch is not None:
        _check_architecture(shapes, arch)
    if config is not None:
        _check_config(shapes, config)

    values = dict(releases.SIGLIP_PREPROCESS) if is_siglip else {}
    if arch is not None:
        values |= releases.preprocess_of(arch, tag)
    values |= (config or {}).get("preprocess_cfg", {})
    preprocess = preprocess_from(shapes.vision.image_size, values)

    checkpoint = Checkpoint(shapes, openai.rename(weights), id, preprocess)
    return with_tokenizer(checkpoint, find if tokenizer_name(config) else None)


def tokenizer_name(config: Mapping[str, Any] | None) -> str | None:
    """Return the hub repository whose tokenizer a config names; ``None`` for CLIP's own."""
    model = (config or {}).get("model_cfg") or {}
    text = model.get("text_cfg") or {}
    name = text.get("hf_tokenizer_name")
    return str(name) if name else None


def refuse_other_models(state: Mapping[str, Tensor]) -> None:
    """Refuse models that share open_clip's file format but not CLIP's towers."""
    if openai.is_siglip_state(state):
        return
    for sign, kind in _OTHER_MODELS.items():
        if any(key.removeprefix("text.").startswith(sign) for key in state):
            raise CheckpointError(
                f"not supported: {kind}; load it with open_clip and pass it to cliquetta.from_model"
            )
    for key in state:
        if key.endswith((".ls_1.gamma", ".ls_2.gamma")):
            raise CheckpointError(f"not supported: a tower with layer scale ({key})")


def _conventions_from(
    config: Mapping[str, Any] | None, activation: Activation | None, *, is_siglip: bool
) -> Conventions:
    """Read the conventions of a config; refuse one that asks for what our towers do not have."""
    if config is None:
        return Conventions(activation or "gelu")
    model = config.get("model_cfg")
    if not isinstance(model, Mapping) or "vision_cfg" not in model:
        raise CheckpointError(f"{CONFIG_FILE} has no model_cfg with a vision_cfg")

    vision = model["vision_cfg"]
    text = model.get("text_cfg") or {}
    _check_section("model_cfg", model, is_siglip=is_siglip)
    _check_section("vision_cfg", vision, is_siglip=is_siglip)
    _check_section("text_cfg", text, is_siglip=is_siglip)

    text_norm = text.get("norm_kwargs") or {}
    if is_siglip:
        tanh = (text.get("act_kwargs") or {}).get("approximate") == "tanh"
        return Conventions(
            activation or openai.siglip_activation(vision.get("timm_model_name", "")),
            text_heads=text.get("heads"),
            vision_eps=1e-6,
            text_eps=text_norm.get("eps", 1e-6),
            text_activation=activation or ("gelu_tanh" if tanh else "gelu"),
            image_size=vision.get("image_size"),
        )

    # A ResNet lists its layers by stage and has no heads here.
    vision_heads = None
    if not isinstance(vision.get("layers"), list):
        vision_heads = vision.get("width", 768) // vision.get("head_width", 64)
    vision_norm = vision.get("norm_kwargs") or {}
    return Conventions(
        activation or ("quick_gelu" if model.get("quick_gelu", False) else "gelu"),
        vision_heads=vision_heads,
        text_heads=text.get("heads"),
        vision_eps=vision_norm.get("eps", 1e-5),
        text_eps=text_norm.get("eps", 1e-5),
        text_end=text.get("eos_id", 2) if text.get("pool_type") == "eos" else None,
    )


def _check_section(section: str, values: Mapping[str, Any], *, is_siglip: bool) -> None:
    """Refuse settings of a section that are neither read nor harmless."""
    readable = _KEYS[section] | (_SIGLIP_KEYS if is_siglip else set())
    for key, value in values.items():
        if key in readable or value in _HARMLESS or (key, value) == _POOL_AT_END:
            continue
        raise CheckpointError(
            f"not supported: {section}.{key} = {value!r} in {CONFIG_FILE}; load the model "
            "with open_clip and pass it to cliquetta.from_model"
        )


def _check_architecture(shapes: CLIPConfig, arch: str) -> None:
    """Refuse a file that is not of the named architecture, whatever its grid of positions."""
    entry = releases.architecture(arch)
    vision = shapes.vision
    patch = None if isinstance(vision, ResNetConfig) else vision.patch_size
    if vision.width == entry.width and patch == entry.patch_size:
        return
    raise CheckpointError(
        f"a checkpoint of another shape: {arch} is {entry.width} wide with patches of "
        f"{entry.patch_size}, this one is {vision.width} wide with patches of {patch}"
    )


def _check_config(shapes: CLIPConfig, config: Mapping[str, Any]) -> None:
    """Refuse weights that are not those of the config file."""
    model = config["model_cfg"]
    for section, key, actual in (
        (model, "embed_dim", shapes.embed_dim),
        (model["vision_cfg"], "width", shapes.vision.width),
    ):
        stated = section.get(key, actual)
        if stated != actual:
            raise CheckpointError(
                f"a checkpoint of another shape: {CONFIG_FILE} says {key} = {stated}, the weights "
                f"have {actual}"
            )


def preprocess_from(size: int, values: Mapping[str, Any]) -> Preprocess:
    """Read a ``preprocess_cfg``; OpenAI's values where it is silent."""
    return Preprocess(
        size,
        mean=tuple(values.get("mean") or OPENAI_MEAN),
        std=tuple(values.get("std") or OPENAI_STD),
        interpolation=values.get("interpolation") or "bicubic",
        resize="squash" if values.get("resize_mode") == "squash" else "shorter",
    )
