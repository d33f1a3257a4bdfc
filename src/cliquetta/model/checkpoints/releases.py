"""Models of OpenAI and open_clip, as far as our towers can hold them: a table in JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from cliquetta.errors import look_up
from cliquetta.model.config import Activation

_QUICK = "-quickgelu"
_PUBLISHED = "https://openaipublic.azureedge.net/clip/models"
_HALF = (0.5, 0.5, 0.5)
SIGLIP_PREPROCESS: Mapping[str, Any] = {
    "mean": _HALF,
    "std": _HALF,
    "resize_mode": "squash",
}


@dataclass(frozen=True)
class Architecture:
    """Model name of open_clip, as far as a file must be checked against it."""

    image_size: int
    # `None` for a ResNet.
    patch_size: int | None
    width: int
    # Hub repository of each pretrained tag.
    tags: Mapping[str, str]
    # Tags that were trained with it; open_clip's default is GELU.
    quick_gelu: Sequence[str] = ()
    # By tag, if unusual.
    preprocess: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Config of a SigLIP that its weights do not show.
    siglip: dict[str, Any] | None = None
    # Of OpenAI's: name, hash, repository.
    openai: Mapping[str, str] = field(default_factory=dict)


_TABLE = files("cliquetta.model") / "data" / "releases.json"
ARCHITECTURES = {
    name: Architecture(**entry)
    for name, entry in json.loads(_TABLE.read_text(encoding="utf-8")).items()
}
# open_clip's name of each of OpenAI's models.
OPENAI = {
    entry.openai["name"]: name for name, entry in ARCHITECTURES.items() if entry.openai
}

_SIGLIP_SIZES = {
    "base-patch16": (224, 256, 384, 512),
    "large-patch16": (256, 384),
    "so400m-patch14": (224, 384),
}
_SIGLIP_2_SIZES = {
    "base-patch32": (256,),
    "base-patch16": (224, 256, 384, 512),
    "large-patch16": (256, 384, 512),
    "so400m-patch14": (224, 384),
    "so400m-patch16": (256, 384, 512),
    "giant-opt-patch16": (256, 384),
}
_META = "facebook/metaclip-2-worldwide"
# Repositories of SigLIP, SigLIP 2 and MetaCLIP 2, with the side of the images that each
# takes.
HUGGING_FACE: Mapping[str, int] = {
    **{
        f"google/siglip-{k}-{s}": s for k, sizes in _SIGLIP_SIZES.items() for s in sizes
    },
    "google/siglip-base-patch16-256-multilingual": 256,
    **{
        f"google/siglip2-{k}-{s}": s
        for k, sizes in _SIGLIP_2_SIZES.items()
        for s in sizes
    },
    **{
        f"{_META}-{k}": 224
        for k in ("s16", "m16", "b32", "b16", "l14", "huge-quickgelu", "giant")
    },
    **{f"{_META}-{k}-384": 384 for k in ("b32", "b16")},
    **{f"{_META}-{k}-378": 378 for k in ("huge", "giant")},
    **{f"facebook/metaclip-2-mt5-worldwide-{k}": 224 for k in ("s16", "m16", "b32")},
}


def address(name: str) -> tuple[str, str]:
    """Return where OpenAI published ``name``, and the SHA-256 of the file, a part of that."""
    sha256 = ARCHITECTURES[OPENAI[name]].openai["sha256"]
    file = re.sub("[/@]", "-", name)
    return f"{_PUBLISHED}/{sha256}/{file}.pt", sha256


def siglip_config(arch: str) -> dict[str, Any]:
    """Return the fields of open_clip's config of a SigLIP that its weights do not show."""
    configs = {
        name: entry.siglip for name, entry in ARCHITECTURES.items() if entry.siglip
    }
    return look_up("SigLIP of open_clip", arch, configs)


def architecture(arch: str) -> Architecture:
    """Find the entry of an open_clip model name, with or without ``-quickgelu``."""
    return look_up("open_clip model", arch.removesuffix(_QUICK), ARCHITECTURES)


def repository(arch: str, tag: str) -> str:
    """Find the hub repository of a release."""
    return look_up(f"tag of open_clip:{arch}", tag, architecture(arch).tags)


def preprocess_of(arch: str, tag: str | None) -> Mapping[str, Any]:
    """Return the ``preprocess_cfg`` of a release where it is not OpenAI's."""
    entry = architecture(arch)
    return SIGLIP_PREPROCESS if entry.siglip else entry.preprocess.get(tag or "", {})


def activation_of(
    arch: str, tag: str | None, config: Mapping[str, Any] | None
) -> Activation | None:
    """Return QuickGELU if the name, the tag's training or the config asks for it; else GELU."""
    entry = architecture(arch)
    if entry.siglip:
        return None  # its towers may differ (see `siglip_config`)
    stated = bool((config or {}).get("model_cfg", {}).get("quick_gelu", False))
    is_quick = stated or arch.endswith(_QUICK) or tag in entry.quick_gelu
    return "quick_gelu" if is_quick else "gelu"
