"""Weights as named tensors: read without running code, quantised or not, fitted into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig
from cliquetta.model.preprocess import Preprocess

State = dict[str, Tensor]

_CODES = ".int8"
_SCALES = ".scale"
_LEVELS = 127


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what was found and what to do."""


def read_safetensors(paths: Sequence[Path]) -> tuple[State, dict[str, str]]:
    """Tensors and metadata of one file, or of the shards of one checkpoint."""
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
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
    return state, metadata


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8 bits per row of the first axis: int8 codes and one float32 scale a row."""
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
                raise CheckpointError(f"{key} has no scale per row: {name + _SCALES} is missing")
            out[name] = tensor.float() * scale.float().view(-1, *[1] * (tensor.ndim - 1))
        elif not (key.endswith(_SCALES) and key.removesuffix(_SCALES) + _CODES in state):
            out[key] = tensor
    return out


def build(
    config: CLIPConfig,
    state: Mapping[str, Tensor],
    *,
    id: str,
    preprocess: Preprocess | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CLIP:
    """A model of ``config`` with ``state`` (our key names) as its weights."""
    with torch.device("meta"):  # nothing is initialised: every weight comes from the checkpoint
        model = CLIP(config, id=id, preprocess=preprocess)
    wanted = model.state_dict()
    check_fit(state, {key: tuple(tensor.shape) for key, tensor in wanted.items()}, id)
    weights = {}
    for key in wanted:
        kind = dtype if state[key].is_floating_point() else None
        weights[key] = state[key].to(device=device, dtype=kind, copy=True).contiguous()
    # exp(logit_scale) is the temperature of all logits: 16 bits would shift it by up to 1 %.
    weights["logit_scale"] = state["logit_scale"].to(device, torch.float32)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def check_fit(
    state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Every wanted weight is there, in its shape, and nothing else; or say what is not."""
    shapes = [
        f"{key} is {tuple(state[key].shape)}, expected {shape}"
        for key, shape in wanted.items()
        if key in state and tuple(state[key].shape) != shape
    ]
    missing = [f"{key} is missing" for key in wanted if key not in state]
    extra = [f"{key} is unexpected" for key in state if key not in wanted]
    problems = shapes + missing + extra
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{name} is a checkpoint of another shape than its config or weights say: "
            f"{'; '.join(problems[:3])}{more}"
        )
