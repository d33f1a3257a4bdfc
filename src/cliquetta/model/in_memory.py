"""Models that are already in memory: those of open_clip, transformers, or any that encodes images.

A model whose towers are ours under other names becomes one of ours, with its weights
where they are. Any other is wrapped (:mod:`.wrapped`), and can do what its own
functions can.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cliquetta.errors import UserError
from cliquetta.model.checkpoints import huggingface, open_clip, openai
from cliquetta.model.checkpoints.openai import Conventions
from cliquetta.model.checkpoints.releases import SIGLIP_PREPROCESS
from cliquetta.model.checkpoints.state import Checkpoint, CheckpointError, build
from cliquetta.model.clip import CLIP, to_float32
from cliquetta.model.config import Activation
from cliquetta.model.processors import RowTokenizer, preprocess_from, stated_preprocess
from cliquetta.model.tokenizer import CLIP_END
from cliquetta.model.wrapped import (
    IMAGE_ENCODERS,
    TEXT_ENCODERS,
    WrappedCLIP,
    find_encoder,
)


def from_model(
    model: nn.Module,
    *,
    preprocess: Any = None,
    tokenizer: Any = None,
    id: str | None = None,
) -> CLIP:
    """Adapt a model that you hold.

    A model of open_clip (or OpenAI's ``clip``), or a ``CLIPModel``, ``MetaClip2Model``
    or ``SiglipModel`` of transformers, gets our towers with its own weights: shared
    where their layout is the same, copied where transformers keeps apart what is one
    matrix here. One image and one text are encoded by both to make sure that they
    agree. Any other module with ``encode_image`` or ``get_image_features`` is wrapped,
    and put into evaluation mode, with a warning if it was not: methods that need
    features or LayerNorms run, the others say what is missing. Device and precision
    stay those of the model.

    Args:
        model: The model.
        preprocess: How images are prepared: a :class:`Preprocess`, transforms of
            torchvision (as ``open_clip.create_model_and_transforms`` returns them), or
            an image processor of transformers; ``None`` takes what the model says of
            itself.
        tokenizer: ``open_clip.get_tokenizer(...)`` or a tokenizer of transformers;
            ``None`` is CLIP's own, where the vocabulary is CLIP's.
        id: A name for records and saved states; by default that of the model or of its
            class.

    Returns:
        A model for :func:`cliquetta.create_method`.

    Raises:
        UserError: The model encodes no images, or preprocessing or tokenizer do not fit
            it.

    """
    if isinstance(model, CLIP):
        return model
    if isinstance(model, str | os.PathLike):
        raise UserError(
            f"from_model takes a model that you hold; by its name or path it is loaded with "
            f"cliquetta.create_model({str(model)!r})"
        )
    if find_encoder(model, IMAGE_ENCODERS) is None:
        raise UserError(
            f"{type(model).__name__} encodes no images: it has neither encode_image nor "
            "get_image_features"
        )
    name = id or getattr(model, "name_or_path", "") or type(model).__name__

    # Modules get their mode back where our towers share the weights.
    training = [module for module in model.modules() if module.training]
    model.eval()
    native = _native(model, name)
    if native is None and training:
        warnings.warn(
            f"{name} was in training mode: it is now in evaluation mode", stacklevel=2
        )
    for module in training:
        module.training = native is not None
    if native is None:
        if preprocess is None:
            rule = stated_preprocess(model, name)
        else:
            rule = preprocess_from(preprocess)
        return WrappedCLIP(model, name, rule, tokenizer)
    if preprocess is not None:
        rule = preprocess_from(preprocess)
        if rule.size != native.image_size:
            raise UserError(
                f"the preprocessing makes images of {rule.size} pixels, {name} takes "
                f"{native.image_size}"
            )
        native.preprocess = rule
    if tokenizer is not None and native.text is not None:
        text = native.text.config
        rows = RowTokenizer(tokenizer, text.context_length, text.vocab_size)
        native.set_tokenizer(rows.simplest())
    return native


def _native(model: nn.Module, name: str) -> CLIP | None:
    """Build our towers of the model's weights, if they compute what it computes."""
    try:
        checkpoint = _of_transformers(model, name) or _of_open_clip(model, name)
        if checkpoint is None:
            return None

        # Device and precision stay those of the model.
        weight = next(w for w in model.parameters() if w.ndim > 1)
        native = build(checkpoint, device=weight.device, dtype=weight.dtype, share=True)
    except CheckpointError:
        return None
    if not _agree(native, model):
        warnings.warn(
            f"{name} has the weights of a CLIP but computes other features: it is wrapped, and "
            "methods that learn prompts cannot run on it",
            stacklevel=4,
        )
        return None
    return native


def _of_transformers(model: nn.Module, name: str) -> Checkpoint | None:
    """Make a checkpoint of a model of transformers, or nothing of any other."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "get_image_features"):
        return None
    # With any vocabulary: text may come as ids.
    shapes = huggingface.config_from(config.to_dict())
    preprocess = huggingface.preprocess_from(
        shapes.vision.image_size, {}, is_siglip=shapes.sigmoid
    )
    return Checkpoint(shapes, huggingface.rename(model.state_dict()), name, preprocess)


def _of_open_clip(model: nn.Module, name: str) -> Checkpoint | None:
    """Make a checkpoint of a model of open_clip, or nothing of any other."""
    weights = openai.clean(model.state_dict())
    open_clip.refuse_other_models(weights)
    is_siglip = openai.is_siglip_state(weights)
    try:
        conventions = _conventions_of(model, is_siglip=is_siglip)
    except (AttributeError, KeyError, IndexError, TypeError):  # built of other modules
        return None

    shapes = openai.config_from(weights, conventions)
    stated = getattr(model.visual, "preprocess_cfg", None)
    if stated is None:
        stated = SIGLIP_PREPROCESS if is_siglip else {}

    preprocess = open_clip.preprocess_from(shapes.vision.image_size, stated)
    return Checkpoint(shapes, openai.rename(weights), name, preprocess)


def _conventions_of(model: Any, *, is_siglip: bool) -> Conventions:
    """Read from the modules of open_clip's model what its weights do not show."""
    text = getattr(model, "text", model)  # some keep a tower of its own
    text_block = text.transformer.resblocks[0]
    pooling = getattr(text, "pool_type", getattr(model, "text_pool_type", "argmax"))
    end = getattr(text, "eos_id", getattr(model, "text_eos_id", None))

    side = getattr(model.visual, "image_size", None)
    text_activation = _activation(text_block.mlp.gelu)
    common = Conventions(
        text_activation,
        text_heads=text_block.attn.num_heads,
        text_eps=text_block.ln_1.eps,
        text_activation=text_activation,
        text_end=end if pooling == "eos" else None,
        image_size=side[0] if isinstance(side, Sequence) else side,
    )

    if is_siglip:
        block = model.visual.trunk.blocks[0]
        activation = block.mlp.act
        norm = block.norm1
    elif hasattr(model.visual, "transformer"):
        block = model.visual.transformer.resblocks[0]
        activation = block.mlp.gelu
        norm = block.ln_1
    else:  # a ResNet
        return common
    return replace(
        common,
        activation=_activation(activation),
        vision_heads=block.attn.num_heads,
        vision_eps=norm.eps,
    )


def _activation(module: nn.Module) -> Activation:
    """Name the activation that a module computes."""
    if "tanh" in repr(module).lower():
        return "gelu_tanh"
    names: Mapping[str, Activation] = {"QuickGELU": "quick_gelu", "GELU": "gelu"}
    return names[type(module).__name__]


@torch.no_grad()
def _agree(native: CLIP, model: nn.Module) -> bool:
    """Whether both encode one random image, and one random text, alike."""
    draw = torch.Generator().manual_seed(0)
    size = native.image_size
    noise = torch.randn(1, 3, size, size, generator=draw)
    pixels = noise.to(native.device, native.dtype)

    encode_image = find_encoder(model, IMAGE_ENCODERS)
    assert encode_image is not None
    if not _are_close(native.encode_image(pixels), encode_image(pixels), native.dtype):
        return False

    text = native.config.text
    encode_text = find_encoder(model, TEXT_ENCODERS)
    if text is None or encode_text is None:
        return True

    # Ids of words: special tokens come first and last.
    highest = min(CLIP_END, text.vocab_size - 1)

    ids = torch.randint(8, highest, (1, text.context_length), generator=draw)
    if text.causal:
        ids[:, text.context_length // 2] = highest if text.end is None else text.end
    ids = ids.to(native.device)
    return _are_close(native.encode_text(ids), encode_text(ids), native.dtype)


def _are_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether features are equal up to the rounding of the towers' dtype."""
    if ours.shape != theirs.shape:
        return False
    allowed = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    theirs = to_float32(theirs)
    return float((ours - theirs).norm() / theirs.norm()) < allowed
