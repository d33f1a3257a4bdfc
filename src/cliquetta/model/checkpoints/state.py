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
    """Checkpoint that cannot be used; the message names the cause and the remedy."""


def read_safetensors(paths: Iterable[Path]) -> tuple[State, dict[str, str]]:
    """Read tensors, not quantised, and metadata of one file or the shards of one checkpoint."""
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
    """Read the object in a JSON file."""
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
    """Apply all substitutions of a table of patterns to a key, in order."""
    for pattern, ours in table:
        key = re.sub(pattern, ours, key)
    return key


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to 8 bits per row of the first axis: int8 codes, one float32 scale per row."""
    rows = weight.detach().float().flatten(1)
    peak = rows.abs().amax(dim=1)

    # A row of zeros has no peak to divide by.
    scale = torch.where(peak > 0, peak, 1.0) / _LEVELS

    # The grid is symmetric around zero.
    levels = (rows / scale[:, None]).round().clamp(-_LEVELS, _LEVELS)
    codes = levels.to(torch.int8)
    return codes.view(weight.shape), scale


def quantise_state(state: Mapping[str, Tensor]) -> State:
    """Quantise matrices to ``X.int8`` and ``X.scale``; vectors and positions become float32."""
    out: State = {}
    for key, tensor in state.items():
        if tensor.ndim < 2 or "position" in key:
            out[key] = tensor.float() if tensor.is_floating_point() else tensor
        else:
            codes, scale = quantise(tensor)
            out[key + _CODES] = codes
            out[key + _SCALES] = scale
    return out


def dequantise(state: Mapping[str, Tensor]) -> State:
    """Restore ``X`` = ``X.int8`` times ``X.scale`` per row, float32; other tensors stay."""
    out: State = {}
    for key, tensor in state.items():
        if key.endswith(_CODES):
            name = key.removesuffix(_CODES)
            scale = state.get(name + _SCALES)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise CheckpointError(
                    f"{key} has no scale per row: {name + _SCALES} is missing"
                )

            ones = [1] * (tensor.ndim - 1)
            out[name] = tensor.float() * scale.float().view(-1, *ones)
            continue

        # A scale alone is a tensor like any other.
        codes = key.removesuffix(_SCALES) + _CODES
        if not key.endswith(_SCALES) or codes not in state:
            out[key] = tensor
    return out


@dataclass(frozen=True)
class Checkpoint:
    """Model before it is built, whatever family it came from."""

    config: CLIPConfig
    # Weights under our key names, not quantised.
    state: Mapping[str, Tensor]
    id: str
    preprocess: Preprocess
    # `None`: CLIP's own, or none that came with the weights.
    tokenizer: TextTokenizer | None = None


def build(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    image_size: int | None = None,
    share: bool = False,
) -> CLIP:
    """Build the model of a checkpoint.

    ``share`` uses its tensors in place if device and dtype allow.
    """
    if image_size is not None and image_size != checkpoint.config.vision.image_size:
        checkpoint = _at_size(checkpoint, image_size)
    state = checkpoint.state
    # Nothing is initialised: every weight comes from the checkpoint.
    with torch.device("meta"):
        model = CLIP(
            checkpoint.config,
            id=checkpoint.id,
            preprocess=checkpoint.preprocess,
            tokenizer=checkpoint.tokenizer,
        )
    wanted = model.state_dict()
    _check_fit(state, wanted, checkpoint.id)
    weights = {}
    for key in wanted:
        weight = state[key]
        if weight.is_floating_point():
            _check_finite(key, weight, checkpoint.id)
            kind = dtype
        else:
            kind = weight.dtype
        weights[key] = weight.to(device=device, dtype=kind, copy=not share)
        if not share:
            weights[key] = weights[key].contiguous()

    # exp(logit_scale) is the temperature of all logits: 16 bits would shift it by up to
    # 1 %.
    for key in {"logit_scale", "logit_bias"} & wanted.keys():
        weights[key] = state[key].to(device, torch.float32)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _check_finite(key: str, weight: Tensor, name: str) -> None:
    """Refuse weights that are not finite."""
    # The sum is a cheap first look; it may overflow where no weight is infinite.
    suspect = not weight.sum(dtype=torch.float32).isfinite()
    if suspect and not weight.isfinite().all():
        raise CheckpointError(
            f"{name} is damaged or its training diverged: {key} holds numbers that are not finite"
        )


def _at_size(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """Resample the grid of positions (bicubic) for images of another side."""
    vision = checkpoint.config.vision
    if isinstance(vision, VisionConfig):
        step = vision.patch_size
        first = vision.class_tokens
        key = "visual.position"
    else:
        step = 32
        first = 1
        key = "visual.attnpool.positional_embedding"
    if image_size < step or image_size % step:
        raise UserError(
            f"image_size is a multiple of {step} for {checkpoint.id}: {image_size}"
        )

    # Positions of patches (old * old, D) as a map (1, D, old, old).
    positions = checkpoint.state[key].float()
    width = positions.shape[1]
    old = vision.image_size // step
    new = image_size // step
    grid = positions[first:].T.reshape(1, width, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True)
    resized = torch.cat([positions[:first], grid.reshape(width, -1).T])
    return replace(
        checkpoint,
        config=replace(
            checkpoint.config, vision=replace(vision, image_size=image_size)
        ),
        state={**checkpoint.state, key: resized},
        preprocess=replace(checkpoint.preprocess, size=image_size),
    )


def with_activation(checkpoint: Checkpoint, activation: Activation) -> Checkpoint:
    """Change the activation in both towers; a ResNet has none to change."""
    config = checkpoint.config
    if isinstance(config.vision, VisionConfig):
        config = replace(config, vision=replace(config.vision, activation=activation))

    if config.text is not None:
        config = replace(config, text=replace(config.text, activation=activation))
    return replace(checkpoint, config=config)


def with_tokenizer(checkpoint: Checkpoint, find: Find | None) -> Checkpoint:
    """Add the tokenizer that ``find`` finds, if any; ``None`` if CLIP's will do."""
    text = checkpoint.config.text
    if text is None:
        return checkpoint
    if find is None:
        if is_clip_vocabulary(text.vocab_size):
            return checkpoint
        raise CheckpointError(
            f"not supported: a text tower of {text.vocab_size} words; CLIP's vocabulary has 49408"
        )
    tokenizer = find_tokenizer(find, text)
    if tokenizer is None:
        return checkpoint

    text = replace(text, start_tokens=len(tokenizer.prefix))
    config = replace(checkpoint.config, text=text)
    return replace(checkpoint, config=config, tokenizer=tokenizer)


def finish_scalars(state: State) -> State:
    """Bring scalars into one shape; an image tower alone gets the scale that CLIPs end at."""
    for key in ("logit_scale", "logit_bias"):
        if key in state:
            state[key] = state[key].reshape(())

    if "logit_scale" not in state and "text.tokens.weight" not in state:
        state["logit_scale"] = torch.tensor(100.0).log()
    return state


def _check_fit(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str
) -> None:
    """Refuse weights that are missing, of another shape, or too many, by name."""
    # Wrong shapes first: they say most about what the file is.
    problems = []
    for key, weight in wanted.items():
        if key in state and state[key].shape != weight.shape:
            shape = tuple(state[key].shape)
            problems.append(f"{key} is {shape}, expected {tuple(weight.shape)}")

    problems += [f"{key} is missing" for key in wanted if key not in state]
    problems += [f"{key} is unexpected" for key in state if key not in wanted]

    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{name} is a checkpoint of another shape than its config or weights say: "
            f"{'; '.join(problems[:3])}{more}"
        )
