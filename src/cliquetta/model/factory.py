"""Models by name or by path: where each kind of name leads."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import get_args

import torch

from cliquetta.errors import UnknownNameError, UserError, look_up
from cliquetta.model.checkpoints import huggingface, open_clip, releases
from cliquetta.model.checkpoints.hub import DownloadError, Fetcher
from cliquetta.model.checkpoints.local import from_files, read_tensors
from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    State,
    build,
    read_json,
    read_safetensors,
    with_activation,
)
from cliquetta.model.clip import CLIP
from cliquetta.model.config import Activation
from cliquetta.model.names import MICRO_NOTE, ModelName, existing_paths, resolve_name
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import Find, require_tokenizers

_log = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def create_model(
    name: str | Path | Sequence[str | Path],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    image_size: int | None = None,
    activation: Activation | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> CLIP:
    """Load a frozen CLIP.

    >>> create_model("micro").image_size
    32

    Args:
        name: ``micro``; an OpenAI name (``ViT-B/16`` or ``openai:ViT-B/16``);
            ``open_clip:ARCHITECTURE/TAG``; ``hf:OWNER/NAME[@REVISION]``;
            ``hf-hub:OWNER/NAME`` for a hub repository in open_clip's format; or a path:
            a ``.safetensors`` or ``.pt`` file, a folder, a pattern or a list of the
            shards of one checkpoint. A path may stand behind ``openai:``, ``hf:`` or
            ``open_clip:ARCHITECTURE/`` to say which family it belongs to.
        device: A torch device or its name; ``auto`` takes a GPU if there is one.
        dtype: A torch dtype, or ``fp32``, ``bf16`` or ``fp16``.
        image_size: Another resolution; the positions are interpolated.
        activation: Overrules the guess from the checkpoint, which a bare state dict
            leaves open (see ``checkpoints.local.guess_activation``).
        cache_dir: Folder of downloads; by default that of the Hugging Face hub.
        offline: Whether to use only what has been downloaded before.
        on_progress: Called with the bytes of a download, and with their total if the
            server states it.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: No such name or file, a checkpoint that is no CLIP, or a download
            that failed.

    """
    target = pick_device(device)
    kind = pick_dtype(dtype)
    if target.type == "cpu" and not computes_in(kind):
        warnings.warn(
            f"this CPU has no {str(kind).removeprefix('torch.')} arithmetic and emulates it, which "
            "is tens of times slower than float32: use --dtype fp32 (dtype=torch.float32)",
            stacklevel=2,
        )
    if activation is not None and activation not in get_args(Activation):
        raise UnknownNameError("activation", activation, get_args(Activation))

    fetcher = Fetcher(
        None if cache_dir is None else Path(cache_dir), offline, on_progress
    )
    if isinstance(name, (str, Path)):
        checkpoint = _by_name(str(name), activation, fetcher)
    else:
        checkpoint = from_files([Path(path) for path in name], activation=activation)
    if activation is not None:
        checkpoint = with_activation(checkpoint, activation)
    return build(checkpoint, device=target, dtype=kind, image_size=image_size)


def pick_device(device: torch.device | str) -> torch.device:
    """Return the device of a name; ``auto`` is CUDA, else MPS, else the CPU."""
    if device != "auto":
        chosen = torch.device(device)
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if chosen.type == "cuda" and (chosen.index or 0) >= devices:
            raise UserError(
                f"no device {device}: torch sees {devices} CUDA devices; try cpu"
            )
        return chosen

    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as ``bf16``."""
    return dtype if isinstance(dtype, torch.dtype) else look_up("dtype", dtype, _DTYPES)


def _by_name(name: str, activation: Activation | None, fetcher: Fetcher) -> Checkpoint:
    """Read the checkpoint that a name leads to."""
    found = resolve_name(name)
    if found.family == "micro":
        _note_micro()
        with as_file(files("cliquetta.model") / "data" / "micro.safetensors") as path:
            return from_files([path])
    if found.family == "openai":
        return _openai(found, fetcher)
    if found.family == "hf":
        return _hugging_face(found.name, fetcher)
    if found.family == "hf-hub":
        return _open_clip_repo(found.name, f"hf-hub:{found.name}", fetcher)
    if found.family == "open_clip":
        return _open_clip(found, fetcher)
    return from_files(found.paths, activation=activation)


@cache
def _note_micro() -> None:
    """Log once per process what the bundled model is for."""
    _log.warning(MICRO_NOTE)


def _openai(found: ModelName, fetcher: Fetcher) -> Checkpoint:
    """Read one of OpenAI's models from the first source that has it, or from a local file."""
    if found.paths:
        return from_files(found.paths, activation="quick_gelu")
    id = f"openai:{found.name}"
    url, sha256 = releases.address(found.name)

    def from_archive(path: Path) -> Checkpoint:
        return from_files([path], activation="quick_gelu", id=id)

    def from_transformers() -> Checkpoint:
        checkpoint = _hugging_face(str(original), fetcher)
        size = checkpoint.config.vision.image_size
        return replace(checkpoint, id=id, preprocess=Preprocess.openai(size))

    cached = fetcher.cached_file(url, sha256)
    if cached is not None:
        return from_archive(cached)

    # Copies on the hub come first: OpenAI's own address has gone (openai/CLIP#516).
    arch = releases.OPENAI[found.name]
    entry = releases.architecture(arch)
    copy = entry.tags["openai"]
    original = entry.openai.get("hub")
    sources: dict[str, Callable[[], Checkpoint]] = {}
    sources[copy] = lambda: _open_clip_repo(copy, id, fetcher, arch, "openai")
    if original is not None:
        sources[original] = from_transformers
    sources[url] = lambda: from_archive(fetcher.file(url, sha256))
    failures = []
    for source, load in sources.items():
        try:
            return load()
        except (DownloadError, CheckpointError) as error:
            failures.append(f"{source} ({getattr(error, 'reason', error)})")
    remedy = (
        "allow the network" if fetcher.is_offline else "check the network and run again"
    )
    raise DownloadError(
        f"{id} is not in a cache and none of its sources has it: {'; '.join(failures)}; {remedy}, "
        f"or give the path of the file: openai:PATH/{url.rsplit('/', 1)[1]}"
    )


def _hugging_face(name: str, fetcher: Fetcher) -> Checkpoint:
    """Read a ``CLIPModel`` on the hub, or a local folder of one."""
    if paths := existing_paths(name):
        return from_files(paths)
    repo, _, revision = name.partition("@")
    find = partial(fetcher.hub_file, repo, revision=revision or None)
    path = find(huggingface.CONFIG_FILE)
    if path is None:
        raise CheckpointError(
            f"{repo} has no {huggingface.CONFIG_FILE}: try hf-hub:{repo}"
        )

    config = read_json(path)
    huggingface.config_from(config)  # refuse another model before its weights arrive
    if huggingface.has_own_vocabulary(config):
        require_tokenizers()

    index = find(huggingface.INDEX_FILE)
    if index is None:
        state = _first_weights(repo, huggingface.WEIGHT_FILES, find)
    else:
        shards = [find(shard) for shard in huggingface.shard_names(index)]
        state, _ = read_safetensors(path for path in shards if path is not None)
    return huggingface.from_huggingface(state, config, id=f"hf:{name}", find=find)


def _open_clip(found: ModelName, fetcher: Fetcher) -> Checkpoint:
    """Read ``ARCHITECTURE/TAG``, or ``ARCHITECTURE/PATH`` for a local file of that architecture."""
    arch, _, tag = found.name.partition("/")
    if found.paths:
        id = f"open_clip:{arch}/{found.paths[0].name}"
        return from_files(found.paths, id=id, arch=arch)

    repository = releases.repository(arch, tag)
    id = f"open_clip:{found.name}"
    return _open_clip_repo(repository, id, fetcher, arch, tag)


def _open_clip_repo(
    repo: str,
    id: str,
    fetcher: Fetcher,
    arch: str | None = None,
    tag: str | None = None,
) -> Checkpoint:
    """Read a hub repository in open_clip's format."""
    path = fetcher.hub_file(repo, open_clip.CONFIG_FILE)
    config = None if path is None else read_json(path)
    if config is None and arch is None:
        raise CheckpointError(f"{repo} has no {open_clip.CONFIG_FILE}: try hf:{repo}")
    other = open_clip.tokenizer_name(config)
    if other is not None:
        require_tokenizers()

    def find(name: str) -> Path | None:
        path = fetcher.hub_file(repo, name)
        if path is None and other is not None:
            path = fetcher.hub_file(other, name)
        return path

    find_here = partial(fetcher.hub_file, repo)
    state = _first_weights(repo, open_clip.WEIGHT_FILES, find_here)
    return open_clip.from_open_clip(
        state, id=id, arch=arch, tag=tag, config=config, find=find
    )


def _first_weights(repo: str, names: Sequence[str], find: Find) -> State:
    """Read the first file of weights that a repository has."""
    for name in names:
        path = find(name)
        if path is not None:
            state, _, _ = read_tensors([path])
            return state
    raise CheckpointError(
        f"{repo} has no weights that can be read: none of {', '.join(names)}"
    )


def computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a half-precision dtype; of others always."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True

    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and supported())
