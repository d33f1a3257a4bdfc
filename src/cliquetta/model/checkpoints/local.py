"""Checkpoints on disk: which family a file or folder is of, how it is read, and our own format.

Ours is one safetensors file with the config in its header, plain or in 8 bits.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.model.checkpoints import huggingface, open_clip, openai
from cliquetta.model.checkpoints.pickled import read_pt
from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    State,
    dequantise,
    quantise_state,
    read_json,
    read_safetensors,
)
from cliquetta.model.clip import CLIP
from cliquetta.model.config import (
    Activation,
    CLIPConfig,
    ResNetConfig,
    TextConfig,
    VisionConfig,
)
from cliquetta.model.names import PICKLED
from cliquetta.model.preprocess import Preprocess
from cliquetta.tensor_file import pack_raw

FORMAT = "cliquetta-clip"


def from_files(
    paths: Sequence[Path],
    *,
    activation: Activation | None = None,
    id: str | None = None,
    arch: str | None = None,
) -> Checkpoint:
    """Read a local checkpoint: a folder, a file, or the shards of one checkpoint.

    ``activation``, or open_clip's name of the architecture, settles what a bare state
    dict leaves open (see :func:`guess_activation`).
    """
    if not paths:
        raise CheckpointError("no files of a checkpoint were given")
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"no such file or folder: {path}")
    first = paths[0]
    if not id:
        id = first.name if len(paths) == 1 else first.resolve().parent.name
    folder = first.parent
    if first.is_dir():
        folder = first
        paths = _weights_in(folder)
    state, metadata, is_archive = read_tensors(paths)

    def find(name: str) -> Path | None:
        return folder / name if (folder / name).exists() else None

    if metadata.get("format") == FORMAT:
        return from_native(state, metadata)
    if any(key.startswith(("vision_model.", "text_model.")) for key in state):
        config_file = find(huggingface.CONFIG_FILE)
        if config_file is None:
            raise CheckpointError(
                f"{paths[0].name} has the key names of transformers: put its "
                f"{huggingface.CONFIG_FILE} beside it"
            )
        config = read_json(config_file)
        return huggingface.from_huggingface(state, config, id=id, find=find)

    config_file = find(open_clip.CONFIG_FILE)
    settings = None if config_file is None else read_json(config_file)
    is_stated = activation or arch or settings is not None
    if not is_stated and not openai.is_siglip_state(state):
        activation = guess_activation(
            state, metadata, paths[0].name, is_archive=is_archive
        )
    return open_clip.from_open_clip(
        state, id=id, activation=activation, arch=arch, config=settings, find=find
    )


def guess_activation(
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    name: str,
    *,
    is_archive: bool,
) -> Activation:
    """Guess the activation that a local file with OpenAI's key names was trained with.

    It is QuickGELU: certainly for OpenAI's TorchScript archives, state dicts with their
    settings (``input_resolution``) and where header or name says OpenAI or quickgelu,
    else with a warning.
    """
    words = " ".join([name, *metadata.values()]).lower().replace("_", "")
    is_stated = is_archive or "openai" in words or "quickgelu" in words
    if not (is_stated or all(key in state for key in openai.SETTINGS)):
        warnings.warn(
            f"{name} does not say whether it needs QuickGELU (OpenAI) or GELU (most open_clip "
            "models); QuickGELU is assumed. Say which with activation='gelu' or 'quick_gelu', or "
            f"name the family: open_clip:ARCHITECTURE/{name}",
            stacklevel=5,
        )
    return "quick_gelu"


def _weights_in(folder: Path) -> list[Path]:
    """List the files of the one checkpoint in a folder; names of known libraries come first."""
    index = folder / huggingface.INDEX_FILE
    if index.exists():
        return [folder / name for name in huggingface.shard_names(index)]
    for name in (huggingface.WEIGHT_FILES[0], open_clip.WEIGHT_FILES[0]):
        if (folder / name).exists():
            return [folder / name]

    if shards := sorted(folder.glob("*.safetensors")):
        return shards

    pickled = [path for path in folder.iterdir() if path.suffix in PICKLED]
    if len(pickled) == 1:
        return pickled
    content = "no .safetensors or .pt file"
    if pickled:
        content = f"{len(pickled)} pickled files: name one"
    raise CheckpointError(f"{folder} holds {content}")


def read_tensors(paths: Sequence[Path]) -> tuple[State, dict[str, str], bool]:
    """Read tensors, header and whether they came from a TorchScript archive."""
    if all(path.suffix == ".safetensors" for path in paths):
        state, metadata = read_safetensors(paths)
        return state, metadata, False

    if len(paths) == 1 and paths[0].suffix in PICKLED:
        state, is_archive = read_pt(paths[0])
        return dequantise(state), {}, is_archive

    names = ", ".join(path.name for path in paths[:3])
    raise CheckpointError(
        f"{names}: give one .pt file, or .safetensors files of one checkpoint"
    )


def save_model(model: CLIP, path: str | Path, *, quantise: bool = False) -> None:
    """Write ``model`` to ``path``: never half a file, whatever happens in between.

    ``quantise`` stores matrices in 8 bits with one scale per row, a quarter of the
    size.
    """
    if model.is_wrapped:
        raise UserError(
            f"{model.id} is wrapped: save it with the library that it comes from"
        )
    state: Mapping[str, Tensor] = model.state_dict()
    if quantise:
        state = quantise_state(state)
    metadata = {
        "format": FORMAT,
        "id": model.id,
        "config": json.dumps(asdict(model.config)),
        "preprocess": json.dumps(model.preprocess.to_dict()),
    }
    write_atomically(Path(path), pack_raw(state, metadata))


def from_native(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
    """Make a checkpoint of a native file's tensors and header."""
    try:
        config = _config_from(json.loads(metadata["config"]))
        preprocess = Preprocess.from_dict(json.loads(metadata["preprocess"]))
        name = metadata["id"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the header of this {FORMAT} file is damaged: {error!r}"
        ) from None
    return Checkpoint(config, state, name, preprocess)


def _config_from(values: Mapping[str, Any]) -> CLIPConfig:
    """Read ``dataclasses.asdict(config)``, possibly by way of JSON."""
    vision = dict(values["vision"])
    tower: VisionConfig | ResNetConfig
    if "patch_size" in vision:
        tower = VisionConfig(**vision)
    else:
        vision["layers"] = tuple(vision["layers"])
        tower = ResNetConfig(**vision)
    text = None
    if values["text"] is not None:
        text = TextConfig(**values["text"])
    sigmoid = values.get("sigmoid", False)
    return CLIPConfig(values["embed_dim"], tower, text, sigmoid=sigmoid)
