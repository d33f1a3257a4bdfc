"""Names of models: where each leads. Checked before torch is imported, so errors come at once."""

import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.checkpoints import releases

Family = Literal["micro", "openai", "hf", "hf-hub", "open_clip", "files"]

MICRO = "micro"
MICRO_NOTE = (
    "micro is a small model for demonstration; for photographs use a full CLIP, such as "
    "openai:ViT-B/16"
)
NO_MODEL = (
    "no model: name one, such as ViT-B/16 for photographs; micro, which comes with the package, is "
    "a toy for images of 32 pixels"
)
"""The error where a model is needed and none was named: there is no default to predict with."""
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of checkpoints that torch pickled."""
_BUNDLED_DATA = re.compile(r"bundled(-fewshot)?(@[^>+/]*)?")


@dataclass(frozen=True)
class ModelEntry:
    """Name that :func:`~cliquetta.create_model` loads without a path."""

    name: str
    source: str
    """who released it, and where it comes from"""
    image_size: int
    is_vit: bool
    """whether it takes visual prompts; ResNets only encode"""
    is_bundled: bool = False


@dataclass(frozen=True)
class ModelName:
    """Family and files of a model, found by its name."""

    family: Family
    name: str
    """within the family: ``ViT-B/16``, ``OWNER/NAME@REVISION``, ``ARCHITECTURE/TAG``"""
    paths: tuple[Path, ...] = ()
    """files or a folder to read instead of a download"""


def list_models(pattern: str = "*") -> list[ModelEntry]:
    """Return the names that match a shell pattern; any path or hub id loads as well.

    Args:
        pattern: Such as ``*B-16*``.

    Returns:
        An entry with ``name``, ``source``, ``image_size`` and more for each, the
        bundled one first.

    """
    entries = [ModelEntry(MICRO, "bundled", 32, is_vit=True, is_bundled=True)]

    # Repositories of transformers, OpenAI's copies first.
    sizes: dict[str, int] = {}
    for name, architecture in releases.OPENAI.items():
        arch = releases.architecture(architecture)
        entries.append(_entry(f"openai:{name}", "OpenAI", arch))
        if "hub" in arch.openai:
            sizes[arch.openai["hub"]] = arch.image_size

    sizes |= releases.HUGGING_FACE
    for repo, size in sizes.items():
        entries.append(ModelEntry(f"hf:{repo}", "Hugging Face", size, is_vit=True))

    # All releases of open_clip that our towers can hold.
    for name, arch in releases.ARCHITECTURES.items():
        for tag, repo in sorted(arch.tags.items()):
            entries.append(_entry(f"open_clip:{name}/{tag}", repo, arch))
    return [entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern)]


def _entry(name: str, source: str, arch: releases.Architecture) -> ModelEntry:
    """Describe a model of an architecture."""
    is_vit = arch.patch_size is not None
    return ModelEntry(name, source, arch.image_size, is_vit)


def resolve_name(name: str) -> ModelName:
    """Find out where the name of a model leads, without reading or downloading anything.

    >>> resolve_name("ViT-B-16").name  # as open_clip spells it
    'ViT-B/16'
    >>> resolve_name("openai/clip-vit-base-patch16").family  # as transformers does
    'hf'

    Args:
        name: What :func:`~cliquetta.create_model` takes.

    Returns:
        The family, the name within it, and the files where these are local.

    Raises:
        UserError: No such name or file.

    """
    family, colon, rest = name.partition(":")
    if name == MICRO:
        return ModelName("micro", MICRO)
    if name in releases.OPENAI:
        return ModelName("openai", name)
    if colon and family == "openai":
        return _openai(rest)
    if colon and family == "hf":
        return ModelName("hf", rest, existing_paths(rest))
    if colon and family == "hf-hub":
        return ModelName("hf-hub", rest)
    if colon and family == "open_clip":
        return _open_clip(rest)
    if colon and family == "local-dir":
        return ModelName("files", rest, (Path(rest),))

    # A path, or a name without its family.
    paths = existing_paths(name)
    if paths:
        return ModelName("files", name, paths)
    starts_as_path = name.startswith(("/", "./", "../", "~"))
    if starts_as_path or name.endswith((".safetensors", *PICKLED)):
        raise UserError(f"no such file or folder: {name}")
    return _by_other_spelling(name)


def check_model(name: str) -> None:
    """Raise a :class:`UserError` unless the name, or every shard of ``a,b``, leads somewhere."""
    shards = name.split(",")
    for shard in shards:
        resolve_name(shard)


def choose_model(named: str | None, datasets: Sequence[str]) -> str:
    """Choose the model that was named; micro only where all data are the bundled images.

    >>> choose_model(None, ["bundled@fog:3"])
    'micro'

    Args:
        named: What the user gave, if anything.
        datasets: Ids of all datasets, also ``a>b`` and ``a+b``.

    Returns:
        The name of a model.

    Raises:
        UserError: None was named, and a dataset is not bundled: micro reads 32 pixels.

    """
    if named is not None:
        return named
    parts = [part for dataset in datasets for part in re.split("[>+]", dataset)]
    others = [part for part in parts if not _BUNDLED_DATA.fullmatch(part)]
    if others or not parts:
        raise UserError(NO_MODEL)
    return MICRO


def existing_paths(name: str) -> tuple[Path, ...]:
    """Return the files or the folder at a path or shell pattern; nothing if there are none."""
    path = Path(name).expanduser()
    if path.exists():
        return (path,)
    matches = sorted(glob.glob(str(path)))  # noqa: PTH207  (absolute patterns too)
    return tuple(Path(match) for match in matches)


def _openai(name: str) -> ModelName:
    """Resolve one of OpenAI's models, or a local file of one."""
    if name in releases.OPENAI:
        return ModelName("openai", name)
    paths = existing_paths(name)
    if paths:
        return ModelName("openai", name, paths)
    spelled = _openai_name(name)
    if spelled is not None:
        return ModelName("openai", spelled)
    raise UnknownNameError("OpenAI model", name, [*releases.OPENAI, "a path"])


def _open_clip(name: str) -> ModelName:
    """Resolve ``ARCHITECTURE/TAG``, or ``ARCHITECTURE/PATH`` for a local file."""
    arch, _, rest = name.partition("/")
    releases.architecture(arch)
    paths = existing_paths(rest) if rest else ()
    if not paths:
        releases.repository(arch, rest)
    return ModelName("open_clip", name, paths)


def _openai_name(spelled: str) -> str | None:
    """Return OpenAI's name of an architecture in open_clip's spelling: ``ViT-B-16``."""
    names = {architecture: name for name, architecture in releases.OPENAI.items()}
    return names.get(spelled)


def _by_other_spelling(name: str) -> ModelName:
    """Resolve a name as open_clip or transformers users type it, where its meaning is clear."""
    spelled = _openai_name(name)
    if spelled is not None:
        return ModelName("openai", spelled)
    names = [entry.name for entry in list_models()]
    for family in ("hf", "open_clip"):
        if f"{family}:{name}" in names:
            return resolve_name(f"{family}:{name}")
    for architecture in releases.ARCHITECTURES.values():
        if name in architecture.tags.values():
            return ModelName("hf-hub", name)

    if name in releases.ARCHITECTURES:
        tags = sorted(releases.ARCHITECTURES[name].tags)
        if len(tags) == 1:
            return resolve_name(f"open_clip:{name}/{tags[0]}")
        raise UserError(
            f"{name} is an architecture of open_clip with several sets of weights: name one, such "
            f"as open_clip:{name}/{tags[0]}; `cliquetta models '*{name}/*'` lists them"
        )

    is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    if is_repository and not name.startswith(("ViT", "RN")):
        raise UserError(
            f"unknown model {name!r}: there is no such path; a repository of the Hugging Face hub "
            f"is written hf:{name}, one in open_clip's format hf-hub:{name}"
        )
    raise UnknownNameError("model", name, [*names[:14], *releases.OPENAI, "a path"])
