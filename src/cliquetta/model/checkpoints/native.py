"""Our own checkpoint: one safetensors file with the config in its header, plain or in 8 bits."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.model.checkpoints.state import Checkpoint, CheckpointError, quantise_state
from cliquetta.model.clip import CLIP
from cliquetta.model.config import CLIPConfig, ResNetConfig, TextConfig, VisionConfig
from cliquetta.model.preprocess import Preprocess
from cliquetta.tensor_file import pack_raw

FORMAT = "cliquetta-clip"


def save_model(model: CLIP, path: str | Path, *, quantise: bool = False) -> None:
    """Write ``model`` to ``path``: never half a file, whatever happens in between.

    ``quantise`` stores matrices in 8 bits with one scale per row, a quarter of the size.
    """
    if model.is_wrapped:
        raise UserError(f"{model.id} is wrapped: save it with the library that it comes from")
    state: Mapping[str, Tensor] = model.state_dict()
    if quantise:
        state = quantise_state(state)
    metadata = {"format": FORMAT, "id": model.id, "config": json.dumps(asdict(model.config))}
    metadata["preprocess"] = json.dumps(model.preprocess.to_dict())
    write_atomically(Path(path), pack_raw(state, metadata))
    Path(path).chmod(0o644)  # a temporary file is private


def from_native(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
    """The checkpoint of a native file's tensors and header."""
    try:
        config = config_from(json.loads(metadata["config"]))
        preprocess = Preprocess.from_dict(json.loads(metadata["preprocess"]))
        name = metadata["id"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the header of this {FORMAT} file is damaged: {error!r}") from None
    return Checkpoint(config, state, name, preprocess)


def config_from(values: Mapping[str, Any]) -> CLIPConfig:
    """The config of ``dataclasses.asdict(config)``, possibly read back from JSON."""
    vision, text = dict(values["vision"]), values["text"]
    tower: VisionConfig | ResNetConfig
    if "patch_size" in vision:
        tower = VisionConfig(**vision)
    else:
        tower = ResNetConfig(**{**vision, "layers": tuple(vision["layers"])})
    text = None if text is None else TextConfig(**text)
    return CLIPConfig(values["embed_dim"], tower, text, sigmoid=values.get("sigmoid", False))
