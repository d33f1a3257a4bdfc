"""Models by name or by path: where each kind of name leads."""

from __future__ import annotations

import fnmatch
import glob
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import get_args

import torch

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.checkpoints import huggingface, open_clip, open_clip_zoo, openai
from cliquetta.model.checkpoints.hub import DownloadError, Fetcher
from cliquetta.model.checkpoints.local import (
    PICKLED,
    from_files,
    read_json,
    read_tensors,
    shard_names,
)
from cliquetta.model.checkpoints.state import (
    Checkpoint,
    CheckpointError,
    State,
    build,
    read_safetensors,
    with_activation,
)
from cliquetta.model.clip import CLIP
from cliquetta.model.config import Activation
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.pretrained_tokenizer import require_tokenizers

MICRO = "micro"
MICRO_NOTE = (
    "micro is a small model for demonstration; for photographs use a full CLIP, such as "
    "openai:ViT-B/16"
)
_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class ModelEntry:
    """One name that :func:`create_model` knows without being given a path."""

    name: str
    source: str
    """Who released it, and where it comes from."""
    image_size: int
    is_vit: bool
    """Whether it takes visual prompts; ResNets only encode."""
    is_bundled: bool = False


def list_models(pattern: str = "*") -> list[ModelEntry]:
    """The known names that match a shell pattern, such as ``*B-16*``; any path or hub id loads."""
    openai_architectures = {
        name: open_clip_zoo.architecture(openai.architecture_name(name)) for name in openai.NAMES
    }
    entries = [ModelEntry(MICRO, "bundled", 32, is_vit=True, is_bundled=True)]
    entries += [
        ModelEntry(f"openai:{name}", "OpenAI", arch.image_size, arch.patch_size is not None)
        for name, arch in openai_architectures.items()
    ]
    hub = {repo: openai_architectures[name].image_size for name, repo in openai.HUB.items()}
    entries += [
        ModelEntry(f"hf:{repo}", "Hugging Face", size, is_vit=True)
        for repo, size in {**hub, **huggingface.RELEASES}.items()
    ]
    entries += [
        ModelEntry(f"open_clip:{name}/{tag}", repo, arch.image_size, arch.patch_size is not None)
        for name, arch in open_clip_zoo.ARCHITECTURES.items()
        for tag, repo in sorted(arch.tags.items())
    ]
    return [entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern)]


NO_MODEL = (
    "no model: name one, such as ViT-B/16 for photographs; micro, which comes with the package, is "
    "a toy for images of 32 pixels"
)
"""Says so where a model is needed and none was named: there is no default to predict with."""


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

    ``name`` is ``micro``; an OpenAI name (``ViT-B/16`` or ``openai:ViT-B/16``);
    ``open_clip:ARCHITECTURE/TAG``; ``hf:OWNER/NAME[@REVISION]``; ``hf-hub:OWNER/NAME`` for a hub
    repository in open_clip's format; or a path: a ``.safetensors`` or ``.pt`` file, a folder, a
    pattern or a list of the shards of one checkpoint. A path may stand behind ``openai:``, ``hf:``
    or ``open_clip:ARCHITECTURE/`` to say which family it belongs to.

    ``device`` may be ``auto``; ``dtype`` a torch dtype or ``fp32``, ``bf16``, ``fp16``.
    ``image_size`` loads at another resolution, its positions interpolated. ``activation``
    overrules what the checkpoint is taken for: a bare state dict does not tell (see
    ``checkpoints.local.guess_activation``). ``on_progress`` sees the bytes of a download.
    """
    target, kind = pick_device(device), pick_dtype(dtype)
    if target.type == "cpu" and not computes_in(kind):
        warnings.warn(
            f"this CPU has no {str(kind).removeprefix('torch.')} arithmetic and emulates it, which "
            "is tens of times slower than float32: use --dtype fp32 (dtype=torch.float32)",
            stacklevel=2,
        )
    if activation is not None and activation not in get_args(Activation):
        raise UnknownNameError("activation", activation, get_args(Activation))
    fetcher = Fetcher(None if cache_dir is None else Path(cache_dir), offline, on_progress)
    if isinstance(name, (str, Path)):
        checkpoint = _by_name(str(name), activation, fetcher)
    else:
        checkpoint = from_files([Path(path) for path in name], activation=activation)
    if activation is not None:
        checkpoint = with_activation(checkpoint, activation)
    return build(checkpoint, device=target, dtype=kind, image_size=image_size)


def pick_device(device: torch.device | str) -> torch.device:
    """The device of a name; ``auto`` is CUDA, else MPS, else the CPU."""
    if device != "auto":
        chosen = torch.device(device)
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if chosen.type == "cuda" and (chosen.index or 0) >= devices:
            raise UserError(f"no device {device}: torch sees {devices} CUDA devices; try cpu")
        return chosen
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of a name such as ``bf16``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise UnknownNameError("dtype", dtype, _DTYPES)
    return _DTYPES[dtype]


def _by_name(name: str, activation: Activation | None, fetcher: Fetcher) -> Checkpoint:
    """The checkpoint that a name leads to."""
    family, _, rest = name.partition(":")
    if name == MICRO:
        _note_micro()
        with as_file(files("cliquetta.model") / "data" / "micro.safetensors") as path:
            return from_files([path])
    if family == "openai":
        return _openai(rest, activation or "quick_gelu", fetcher)
    if family == "hf":
        return _hugging_face(rest, fetcher)
    if family == "hf-hub":
        return _open_clip_repo(rest, name, activation, fetcher)
    if family == "open_clip":
        return _open_clip(rest, activation, fetcher)
    if family == "local-dir":
        return from_files([Path(rest)], activation=activation)
    if name in openai.NAMES:
        return _openai(name, activation or "quick_gelu", fetcher)
    paths = _existing(name)
    if paths:
        return from_files(paths, activation=activation)
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".safetensors", *PICKLED)):
        raise CheckpointError(f"no such file or folder: {name}")
    known = [entry.name for entry in list_models()]
    raise UnknownNameError("model", name, [*known[:14], *openai.NAMES, "a path"])


@cache
def _note_micro() -> None:
    """Say once per process what the bundled model is for."""
    _log.warning(MICRO_NOTE)


def _existing(name: str) -> list[Path]:
    """The files or the folder at a path or shell pattern; nothing if there are none."""
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path)))]  # noqa: PTH207  (absolute too)


def _openai(name: str, activation: Activation, fetcher: Fetcher) -> Checkpoint:
    """One of OpenAI's models, or a local file that is one."""
    if name in openai.NAMES:
        return _openai_release(name, activation, fetcher)
    paths = _existing(name)
    if paths:
        return from_files(paths, activation=activation)
    raise UnknownNameError("OpenAI model", name, [*openai.NAMES, "a path"])


def _openai_release(name: str, activation: Activation, fetcher: Fetcher) -> Checkpoint:
    """One of OpenAI's models, from the first source that has it.

    An archive that was downloaded before needs no network. OpenAI's own address has gone
    (openai/CLIP#516), so that the copies on the hub come before it.
    """
    id, (url, sha256) = f"openai:{name}", openai.address(name)

    def from_archive(path: Path) -> Checkpoint:
        return open_clip.from_open_clip(read_tensors([path])[0], id=id, activation=activation)

    cached = fetcher.cached_file(url, sha256)
    if cached is not None:
        return from_archive(cached)
    arch = openai.architecture_name(name)
    copy = open_clip_zoo.architecture(arch).tags["openai"]
    sources: dict[str, Callable[[], Checkpoint]] = {
        copy: lambda: _open_clip_repo(copy, id, activation, fetcher, arch, "openai")
    }
    if name in openai.HUB:
        sources[openai.HUB[name]] = lambda: _as_openai(_hugging_face(openai.HUB[name], fetcher), id)
    sources[url] = lambda: from_archive(fetcher.file(url, sha256))
    failures = []
    for source, load in sources.items():
        try:
            return load()
        except DownloadError as error:
            failures.append(f"{source} ({error.reason})")
        except CheckpointError as error:
            failures.append(f"{source} ({error})")
    remedy = "allow the network" if fetcher.is_offline else "check the network and run again"
    raise DownloadError(
        f"{id} is not in a cache and none of its sources answers: {'; '.join(failures)}; {remedy}, "
        f"or give the path of the file: openai:PATH/{url.rsplit('/', 1)[1]}"
    )


def _as_openai(checkpoint: Checkpoint, id: str) -> Checkpoint:
    """A copy in another format under its own name, with OpenAI's preprocessing."""
    size = checkpoint.config.vision.image_size
    return replace(checkpoint, id=id, preprocess=Preprocess.openai(size))


def _hugging_face(name: str, fetcher: Fetcher) -> Checkpoint:
    """A ``CLIPModel`` on the hub, or a local folder of one."""
    if _existing(name):
        return from_files(_existing(name))
    repo, _, revision = name.partition("@")
    config = fetcher.hub_file(repo, huggingface.CONFIG_FILE, revision or None)
    if config is None:
        raise CheckpointError(f"{repo} has no {huggingface.CONFIG_FILE}: try hf-hub:{repo}")
    values = read_json(config)
    huggingface.config_from(values)  # refuse another model before its weights arrive
    if huggingface.has_own_vocabulary(values):
        require_tokenizers()

    def find(name: str) -> Path | None:
        return fetcher.hub_file(repo, name, revision or None)

    preprocessor, index = find(huggingface.PREPROCESS_FILE), find(huggingface.INDEX_FILE)
    if index is not None:
        found = [find(shard) for shard in shard_names(index)]
        state = read_safetensors([path for path in found if path is not None])[0]
    else:
        state = _first_weights(repo, huggingface.WEIGHT_FILES, revision or None, fetcher)
    return huggingface.from_huggingface(
        state,
        values,
        id=f"hf:{name}",
        preprocessor=None if preprocessor is None else read_json(preprocessor),
        find=find,
    )


def _open_clip(name: str, activation: Activation | None, fetcher: Fetcher) -> Checkpoint:
    """``ARCHITECTURE/TAG``, or ``ARCHITECTURE/PATH`` for a local file of that architecture."""
    arch, _, rest = name.partition("/")
    open_clip_zoo.architecture(arch)
    paths = _existing(rest) if rest else []
    if paths:
        id = f"open_clip:{arch}/{paths[0].name}"
        return from_files(paths, activation=activation, id=id, arch=arch)
    arch, tag = open_clip_zoo.split_name(name)
    repo = open_clip_zoo.architecture(arch).tags[tag]
    return _open_clip_repo(repo, f"open_clip:{name}", activation, fetcher, arch, tag)


def _open_clip_repo(
    repo: str,
    id: str,
    activation: Activation | None,
    fetcher: Fetcher,
    arch: str | None = None,
    tag: str | None = None,
) -> Checkpoint:
    """A hub repository in open_clip's format."""
    path = fetcher.hub_file(repo, open_clip.CONFIG_FILE)
    config = None if path is None else read_json(path)
    if config is None and arch is None:
        raise CheckpointError(f"{repo} has no {open_clip.CONFIG_FILE}: try hf:{repo}")
    if activation is None and arch is not None:
        activation = open_clip_zoo.activation_of(arch, tag, config)
    if open_clip.tokenizer_name(config) is not None:
        require_tokenizers()
    state = _first_weights(repo, open_clip.WEIGHT_FILES, None, fetcher)

    def find(name: str) -> Path | None:
        other = open_clip.tokenizer_name(config)
        found = fetcher.hub_file(repo, name)
        return fetcher.hub_file(other, name) if found is None and other else found

    return open_clip.from_open_clip(
        state, id=id, activation=activation, arch=arch, tag=tag, config=config, find=find
    )


def _first_weights(
    repo: str, names: Sequence[str], revision: str | None, fetcher: Fetcher
) -> State:
    """The weights of a repository, from the first of the files that it has."""
    for name in names:
        path = fetcher.hub_file(repo, name, revision)
        if path is not None:
            return read_tensors([path])[0]
    raise CheckpointError(f"{repo} has no weights that can be read: none of {', '.join(names)}")


def computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a half-precision dtype; of others always."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and supported())
