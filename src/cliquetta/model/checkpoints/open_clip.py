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

_KEYS = {
    "model_cfg": "embed_dim vision_cfg text_cfg quick_gelu init_logit_scale init_logit_bias "
    "custom_text",
    "vision_cfg": "image_size layers width head_width mlp_ratio patch_size patch_dropout "
    "norm_kwargs output_tokens",
    "text_cfg": "context_length vocab_size width heads layers mlp_ratio norm_kwargs output_tokens "
    "pad_id hf_tokenizer_name eos_id",
}
"""Settings that change nothing at inference, or that are read here or from the weights."""
_SIGLIP_KEYS = "timm_model_name timm_model_pretrained timm_pool timm_proj no_causal_mask proj_bias "
_SIGLIP_KEYS += "pool_type act_kwargs tokenizer_kwargs"
"""Settings of SigLIP alone, whose weights are recognised before its config is read."""
_HARMLESS: Any = (None, False, 0, {}, "tok", "argmax", "learnable", "linear", "default")


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
    """The checkpoint of open_clip (or OpenAI) weights, with what its config file adds.

    ``activation`` overrules the config; without either it is GELU. ``arch`` and
    ``tag``, where known, add what that release is known for.
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
    """The hub repository whose tokenizer a config names; ``None`` for CLIP's own."""
    name = (((config or {}).get("model_cfg") or {}).get("text_cfg") or {}).get(
        "hf_tokenizer_name"
    )
    return str(name) if name else None


def refuse_other_models(state: Mapping[str, Tensor]) -> None:
    """Refuse models that share open_clip's file format but not CLIP's towers."""
    if openai.is_siglip_state(state):
        return
    for kind, sign in (
        ("a CoCa model (it has a caption decoder)", "text_decoder."),
        ("a model with a timm image tower (EVA, ConvNeXt, ...)", "visual.trunk."),
        ("a model with an attentional pooler (CoCa, CLIPA)", "visual.attn_pool."),
        (
            "a model with a Hugging Face text tower (RoBERTa, mT5, ...)",
            "transformer.embeddings.",
        ),
        ("an EVA image tower", "visual.patch_embed."),
    ):
        if any(key.removeprefix("text.").startswith(sign) for key in state):
            raise CheckpointError(
                f"not supported: {kind}; load it with open_clip and pass it to cliquetta.from_model"
            )
    scaled = next(
        (key for key in state if key.endswith((".ls_1.gamma", ".ls_2.gamma"))), None
    )
    if scaled is not None:
        raise CheckpointError(f"not supported: a tower with layer scale ({scaled})")


def _conventions_from(
    config: Mapping[str, Any] | None, activation: Activation | None, *, is_siglip: bool
) -> Conventions:
    """The conventions of a config file, refused where it asks for what our towers do not have."""
    if config is None:
        return Conventions(activation or "gelu")
    model = config.get("model_cfg")
    if not isinstance(model, Mapping) or "vision_cfg" not in model:
        raise CheckpointError(f"{CONFIG_FILE} has no model_cfg with a vision_cfg")
    vision, text = model["vision_cfg"], model.get("text_cfg") or {}
    sections = {"model_cfg": model, "vision_cfg": vision, "text_cfg": text}
    for part, values in sections.items():
        known = [*_KEYS[part].split(), *(_SIGLIP_KEYS.split() if is_siglip else ())]
        for key, value in values.items():
            if not (
                (key, value) == ("pool_type", "eos")
                or key in known
                or value in _HARMLESS
            ):
                raise CheckpointError(
                    f"not supported: {part}.{key} = {value!r} in {CONFIG_FILE}; load the model "
                    "with open_clip and pass it to cliquetta.from_model"
                )
    text_eps = (text.get("norm_kwargs") or {}).get("eps", 1e-6 if is_siglip else 1e-5)
    if is_siglip:
        tanh = (text.get("act_kwargs") or {}).get("approximate") == "tanh"
        return Conventions(
            activation or openai.siglip_activation(vision.get("timm_model_name", "")),
            text_heads=text.get("heads"),
            vision_eps=1e-6,
            text_eps=text_eps,
            text_activation=activation or ("gelu_tanh" if tanh else "gelu"),
            image_size=vision.get("image_size"),
        )
    is_vit = not isinstance(vision.get("layers"), list)
    return Conventions(
        activation or ("quick_gelu" if model.get("quick_gelu", False) else "gelu"),
        vision_heads=vision.get("width", 768) // vision.get("head_width", 64)
        if is_vit
        else None,
        text_heads=text.get("heads"),
        vision_eps=(vision.get("norm_kwargs") or {}).get("eps", 1e-5),
        text_eps=text_eps,
        text_end=text.get("eos_id", 2) if text.get("pool_type") == "eos" else None,
    )


def _check_architecture(shapes: CLIPConfig, arch: str) -> None:
    """Refuse a file that is not of the named architecture, whatever its grid of positions."""
    entry, vision = releases.architecture(arch), shapes.vision
    patch = None if isinstance(vision, ResNetConfig) else vision.patch_size
    if (vision.width, patch) != (entry.width, entry.patch_size):
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
    """The preprocessing of a ``preprocess_cfg``; OpenAI's where it is silent."""
    return Preprocess(
        size,
        mean=tuple(values.get("mean") or OPENAI_MEAN),
        std=tuple(values.get("std") or OPENAI_STD),
        interpolation=values.get("interpolation") or "bicubic",
        resize="squash" if values.get("resize_mode") == "squash" else "shorter",
    )
