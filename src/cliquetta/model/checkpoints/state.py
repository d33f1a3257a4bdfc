"""Weights as named tensors: read without running code, quantised or not, fitted into a model."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.model.config import Activation, CLIPConfig, VisionConfig
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import (
    Find,
    TextTokenizer,
    find_tokenizer,
    is_clip_vocabulary,
)

State = dict[str, Tensor]

_CODES = ".int8"
_SCALES = ".scale"
_LEVELS = 127


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the cause and the remedy."""


def read_safetensors(paths: Iterable[Path]) -> tuple[State, dict[str, str]]:
    """Tensors, not quantised, and metadata of one file or of the shards of one checkpoint."""
    state: State = {}
    metadata: dict[str, str] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                metadata.update(file.metadata() or {})
                for key in file.keys():  # noqa: SIM118  (not a mapping)
                    if key in state:
                        raise CheckpointError(
                            f"{key} is in {path.name} and in another shard: give the files of one "
                            "checkpoint only"
                        )
                    state[key] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file: {error}"
            ) from None
    return dequantise(state), metadata


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, expected an object"
        )
    return values


def rename_key(key: str, table: Iterable[tuple[str, str]]) -> str:
    """A key after all substitutions of a table of patterns, in order."""
    for pattern, ours in table:
        key = re.sub(pattern, ours, key)
    return key


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8 bits per row of the first axis: int8 codes and one float32 scale per row."""
    rows = weight.detach().float().flatten(1)
    peak = rows.abs().amax(dim=1)
    scale = torch.where(peak > 0, peak, 1.0) / _LEVELS
    codes = (rows / scale[:, None]).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return codes.view(weight.shape), scale


def quantise_state(state: Mapping[str, Tensor]) -> State:
    """Matrices and kernels as ``X.int8`` and ``X.scale``; vectors, positions, scalars float32."""
    out: State = {}
    for key, tensor in state.items():
        if tensor.ndim < 2 or "position" in key:
            out[key] = tensor.float() if tensor.is_floating_point() else tensor
        else:
            out[key + _CODES], out[key + _SCALES] = quantise(tensor)
    return out


def dequantise(state: Mapping[str, Tensor]) -> State:
    """Weights ``X`` = ``X.int8`` times ``X.scale`` per row, float32; the other tensors as is."""
    out: State = {}
    for key, tensor in state.items():
        if key.endswith(_CODES):
            name = key.removesuffix(_CODES)
            scale = state.get(name + _SCALES)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise CheckpointError(
                    f"{key} has no scale per row: {name + _SCALES} is missing"
                )
            out[name] = tensor.float() * scale.float().view(
                -1, *[1] * (tensor.ndim - 1)
            )
        elif not (
            key.endswith(_SCALES) and key.removesuffix(_SCALES) + _CODES in state
        ):
            out[key] = tensor
    return out


@dataclass(frozen=True)
class Checkpoint:
    """A model before it is built, whatever family it came from."""

    config: CLIPConfig
    state: Mapping[str, Tensor]  # weights under our key names, not quantised
    id: str
    preprocess: Preprocess
    tokenizer: TextTokenizer | None = None
    """`None`: CLIP's own, or none that came with the weights"""


def build(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    image_size: int | None = None,
    share: bool = False,
) -> CLIP:
    """The model of a checkpoint; ``share`` uses its tensors in place if device and dtype allow."""
    if image_size is not None and image_size != checkpoint.config.vision.image_size:
        checkpoint = _at_size(checkpoint, image_size)
    state, id = checkpoint.state, checkpoint.id
    preprocess, tokenizer = checkpoint.preprocess, checkpoint.tokenizer
    with torch.device(
        "meta"
    ):  # nothing is initialised: every weight comes from the checkpoint
        model = CLIP(
            checkpoint.config, id=id, preprocess=preprocess, tokenizer=tokenizer
        )
    wanted = model.state_dict()
    _check_fit(state, wanted, id)
    weights = {}
    for key in wanted:
        weight = state[key]
        is_float = weight.is_floating_point()
        # the sum is a cheap first look; it may overflow where no weight is infinite
        suspect = is_float and not weight.sum(dtype=torch.float32).isfinite()
        if suspect and not weight.isfinite().all():
            raise CheckpointError(
                f"{id} is damaged or its training diverged: {key} holds numbers that are not finite"
            )
        kind = dtype if is_float else None
        weights[key] = weight.to(device=device, dtype=kind, copy=not share)
        if not share:
            weights[key] = weights[key].contiguous()
    # exp(logit_scale) is the temperature of all logits: 16 bits would shift it by up to
    # 1 %.
    for key in {"logit_scale", "logit_bias"} & wanted.keys():
        weights[key] = state[key].to(device, torch.float32)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _at_size(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """The checkpoint for images of another side: its grid of positions resampled (bicubic)."""
    vision = checkpoint.config.vision
    if isinstance(vision, VisionConfig):
        step, first, key = vision.patch_size, vision.class_tokens, "visual.position"
    else:
        step, first, key = 32, 1, "visual.attnpool.positional_embedding"
    if image_size < step or image_size % step:
        raise UserError(
            f"image_size is a multiple of {step} for {checkpoint.id}: {image_size}"
        )
    positions = checkpoint.state[key].float()
    old, new = vision.image_size // step, image_size // step
    grid = positions[first:].T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True)
    resized = torch.cat([positions[:first], grid.reshape(positions.shape[1], -1).T])
    return replace(
        checkpoint,
        config=replace(
            checkpoint.config, vision=replace(vision, image_size=image_size)
        ),
        state={**checkpoint.state, key: resized},
        preprocess=replace(checkpoint.preprocess, size=image_size),
    )


def with_activation(checkpoint: Checkpoint, activation: Activation) -> Checkpoint:
    """The checkpoint with another activation in both towers; a ResNet has none to change."""
    config = checkpoint.config
    if isinstance(config.vision, VisionConfig):
        config = replace(config, vision=replace(config.vision, activation=activation))
    if config.text is not None:
        config = replace(config, text=replace(config.text, activation=activation))
    return replace(checkpoint, config=config)


def with_tokenizer(checkpoint: Checkpoint, find: Find | None) -> Checkpoint:
    """The checkpoint with the tokenizer that ``find`` finds, if any; ``None`` if CLIP's will do."""
    text = checkpoint.config.text
    if text is not None and find is None and not is_clip_vocabulary(text.vocab_size):
        raise CheckpointError(
            f"not supported: a text tower of {text.vocab_size} words; CLIP's vocabulary has 49408"
        )
    tokenizer = None if text is None or find is None else find_tokenizer(find, text)
    if text is None or tokenizer is None:
        return checkpoint
    text = replace(text, start_tokens=len(tokenizer.prefix))
    return replace(
        checkpoint, config=replace(checkpoint.config, text=text), tokenizer=tokenizer
    )


def finish_scalars(state: State) -> State:
    """Scalars in one shape; an image tower alone gets the scale that CLIPs end at."""
    for key in {"logit_scale", "logit_bias"} & state.keys():
        state[key] = state[key].reshape(())
    if "logit_scale" not in state and "text.tokens.weight" not in state:
        state["logit_scale"] = torch.tensor(100.0).log()
    return state


def _check_fit(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str
) -> None:
    """Refuse weights that are missing, of another shape, or too many, by name."""
    problems = [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(weight.shape)}"
        for key, weight in wanted.items()
        if key in state and state[key].shape != weight.shape
    ]
    problems += [f"{key} is missing" for key in wanted if key not in state]
    problems += [f"{key} is unexpected" for key in state if key not in wanted]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{name} is a checkpoint of another shape than its config or weights say: "
            f"{'; '.join(problems[:3])}{more}"
        )
