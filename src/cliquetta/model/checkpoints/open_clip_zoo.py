"""The models that open_clip has released, as far as our towers can hold them.

GELU is open_clip's default; QuickGELU holds for model names that end in ``-quickgelu``, for configs
that say so, and for tags that were trained with it (OpenAI's own, the first LAION-400M B/32,
MetaCLIP, DFN).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cliquetta.errors import UnknownNameError
from cliquetta.model.config import Activation

QUICK = "-quickgelu"


@dataclass(frozen=True)
class Architecture:
    """One model name of open_clip, as far as a file must be checked against it."""

    image_size: int
    patch_size: int | None
    """``None`` for a ResNet."""
    width: int
    tags: Mapping[str, str]
    """Hub repository of each pretrained tag."""
    quick: frozenset[str] = frozenset()
    """Tags that were trained with QuickGELU."""
    preprocess: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tags whose images are prepared in another way than OpenAI's."""


def _laion(shape: str, *tags: str) -> dict[str, str]:
    """Repositories ``laion/CLIP-SHAPE-TAG``, under open_clip's spelling of the tag."""
    return {
        tag.lower().replace("-", "_").replace(".", "_"): f"laion/CLIP-{shape}-{tag}" for tag in tags
    }


def _timm(shape: str, **tags: str) -> dict[str, str]:
    """Repositories ``timm/SHAPE.NAME`` of weights that were first released as files."""
    return {tag: f"timm/{shape}.{name}" for tag, name in tags.items()}


_META = {"metaclip_400m": "metaclip_400m", "metaclip_fullcc": "metaclip_2pt5b"}
_EPOCHS = {"laion400m_e31": "laion400m_e31", "laion400m_e32": "laion400m_e32"}
_QUICK = frozenset({"openai", "metaclip_400m", "metaclip_fullcc", "dfn2b", "dfn5b"})
_HALF = (0.5, 0.5, 0.5)
_SQUASHED = {"dfn5b": {"resize_mode": "squash"}}

SIGLIP_PREPROCESS: Mapping[str, Any] = {"mean": _HALF, "std": _HALF, "resize_mode": "squash"}
_SIGLIP = re.compile(r"ViT-(B|L|SO400M|gopt)-(14|16|32)-SigLIP(2?)(?:-i18n)?(?:-(\d+))?$")
_SIGLIP_WIDTHS = {"B": 768, "L": 1024, "SO400M": 1152, "gopt": 1536}
_TIMM_SHAPES = {"B": "base", "L": "large", "SO400M": "so400m", "gopt": "giantopt"}


def siglip_config(arch: str) -> dict[str, Any]:
    """Fields of open_clip's config of a SigLIP that its weights do not show."""
    match = _SIGLIP.match(arch)
    if match is None:
        raise UnknownNameError("SigLIP of open_clip", arch, _siglips())
    shape, patch, second, size = match.groups()
    size = int(size or 224)
    timm = f"vit_{_TIMM_SHAPES[shape]}_patch{patch}_siglip_{size}"
    return {
        "vision_cfg": {"image_size": size, "timm_model_name": timm},
        "text_cfg": {
            "act_kwargs": {"approximate": "tanh" if second else "none"},
            "hf_tokenizer_name": f"timm/{arch}",
        },
    }


def _siglips() -> dict[str, Architecture]:
    """SigLIP (English and multilingual) and SigLIP 2, at every released resolution."""
    names = [f"ViT-B-16-SigLIP{part}" for part in ("", "-256", "-384", "-512", "-i18n-256")]
    names += ["ViT-L-16-SigLIP-256", "ViT-L-16-SigLIP-384"]
    names += ["ViT-SO400M-14-SigLIP", "ViT-SO400M-14-SigLIP-384", "ViT-SO400M-16-SigLIP-i18n-256"]
    names += ["ViT-B-32-SigLIP2-256", "ViT-B-16-SigLIP2"]
    for shape in ("ViT-B-16", "ViT-L-16", "ViT-SO400M-16"):
        names += [f"{shape}-SigLIP2-{size}" for size in (256, 384, 512)]
    names += ["ViT-SO400M-14-SigLIP2", "ViT-SO400M-14-SigLIP2-378"]
    names += ["ViT-gopt-16-SigLIP2-256", "ViT-gopt-16-SigLIP2-384"]
    found = {}
    for name in names:
        match = _SIGLIP.match(name)
        assert match is not None
        shape, patch, _, size = match.groups()
        found[name] = Architecture(
            int(size or 224),
            int(patch),
            _SIGLIP_WIDTHS[shape],
            {"webli": f"timm/{name}"},
            preprocess={"webli": SIGLIP_PREPROCESS},
        )
    return found


def _worldwide(shape: str, width: int) -> dict[str, Architecture]:
    """MetaCLIP 2 at both of its resolutions."""
    tag, found = "metaclip2_worldwide", {}
    for size in (224, 378):
        repo = f"timm/vit_{'huge' if shape == 'H' else 'gigantic'}_patch14_clip_{size}.{tag}"
        found[f"ViT-{shape}-14-worldwide{'' if size == 224 else '-378'}"] = Architecture(
            size,
            14,
            width,
            {tag: repo},
            frozenset({tag}) if (shape, size) == ("H", 224) else frozenset(),
            {} if size == 224 else {tag: {"resize_mode": "squash"}},
        )
    return found


ARCHITECTURES: Mapping[str, Architecture] = {
    "RN50": Architecture(
        224,
        None,
        64,
        _timm("resnet50_clip", openai="openai", yfcc15m="yfcc15m", cc12m="cc12m"),
        frozenset({"openai", "yfcc15m", "cc12m"}),
    ),
    "RN101": Architecture(
        224,
        None,
        64,
        _timm("resnet101_clip", openai="openai", yfcc15m="yfcc15m"),
        frozenset({"openai", "yfcc15m"}),
    ),
    "RN50x4": Architecture(288, None, 80, _timm("resnet50x4_clip", openai="openai"), _QUICK),
    "RN50x16": Architecture(384, None, 96, _timm("resnet50x16_clip", openai="openai"), _QUICK),
    "RN50x64": Architecture(448, None, 128, _timm("resnet50x64_clip", openai="openai"), _QUICK),
    "ViT-B-32": Architecture(
        224,
        32,
        768,
        _timm("vit_base_patch32_clip_224", openai="openai", laion2b_e16="laion2b_e16")
        | _timm("vit_base_patch32_clip_224", **_EPOCHS, **_META)
        | _laion("ViT-B-32", "laion2B-s34B-b79K", "DataComp.XL-s13B-b90K", "DataComp.M-s128M-b4K"),
        _QUICK | _EPOCHS.keys(),
    ),
    "ViT-B-32-256": Architecture(
        256, 32, 768, {"datacomp_s34b_b86k": "laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K"}
    ),
    "ViT-B-16": Architecture(
        224,
        16,
        768,
        _timm("vit_base_patch16_clip_224", openai="openai", **_EPOCHS, **_META)
        | _laion("ViT-B-16", "laion2B-s34B-b88K", "DataComp.XL-s13B-b90K", "DataComp.L-s1B-b8K")
        | {"dfn2b": "apple/DFN2B-CLIP-ViT-B-16"},
        _QUICK,
    ),
    "ViT-B-16-plus-240": Architecture(
        240, 16, 896, _timm("vit_base_patch16_plus_clip_240", laion400m_e31="laion400m_e31")
    ),
    "ViT-L-14": Architecture(
        224,
        14,
        1024,
        _timm("vit_large_patch14_clip_224", openai="openai", **_EPOCHS, **_META)
        | _laion("ViT-L-14", "laion2B-s32B-b82K", "DataComp.XL-s13B-b90K")
        | {"dfn2b": "apple/DFN2B-CLIP-ViT-L-14", "dfn2b_s39b": "apple/DFN2B-CLIP-ViT-L-14-39B"},
        _QUICK,
        {"laion2b_s32b_b82k": {"mean": _HALF, "std": _HALF}},
    ),
    "ViT-L-14-336": Architecture(
        336, 14, 1024, _timm("vit_large_patch14_clip_336", openai="openai"), _QUICK
    ),
    "ViT-H-14": Architecture(
        224,
        14,
        1280,
        _timm("vit_huge_patch14_clip_224", metaclip_fullcc="metaclip_2pt5b")
        | _timm("vit_huge_patch14_clip_224", metaclip_altogether="metaclip_altogether")
        | _laion("ViT-H-14", "laion2B-s32B-b79K")
        | {"dfn5b": "apple/DFN5B-CLIP-ViT-H-14"},
        _QUICK,
        _SQUASHED,
    ),
    "ViT-H-14-378": Architecture(
        378, 14, 1280, {"dfn5b": "apple/DFN5B-CLIP-ViT-H-14-378"}, _QUICK, _SQUASHED
    ),
    "ViT-g-14": Architecture(
        224, 14, 1408, _laion("ViT-g-14", "laion2B-s12B-b42K", "laion2B-s34B-b88K")
    ),
    "ViT-bigG-14": Architecture(
        224,
        14,
        1664,
        _timm("vit_gigantic_patch14_clip_224", metaclip_fullcc="metaclip_2pt5b")
        | {"laion2b_s39b_b160k": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"},
        _QUICK,
    ),
    **_worldwide("H", 1280),
    **_worldwide("bigG", 1664),
    **_siglips(),
}


def split_name(name: str) -> tuple[str, str]:
    """Architecture and tag of ``ARCHITECTURE/TAG``; unknown ones are refused by name."""
    arch, _, tag = name.partition("/")
    entry = architecture(arch)
    if tag not in entry.tags:
        raise UnknownNameError(f"tag of open_clip:{arch}", tag, entry.tags)
    return arch, tag


def architecture(arch: str) -> Architecture:
    """The entry of an open_clip model name, with or without ``-quickgelu``."""
    plain = arch.removesuffix(QUICK)
    if plain not in ARCHITECTURES:
        raise UnknownNameError("open_clip model", arch, ARCHITECTURES)
    return ARCHITECTURES[plain]


def activation_of(
    arch: str, tag: str | None, config: Mapping[str, Any] | None
) -> Activation | None:
    """QuickGELU if the name, the tag's training or the config says so; else GELU.

    ``None`` for SigLIP, whose towers may differ (see :func:`siglip_config`).
    """
    if _SIGLIP.match(arch):
        return None
    trained = tag is not None and tag in architecture(arch).quick
    stated = bool((config or {}).get("model_cfg", {}).get("quick_gelu", False))
    return "quick_gelu" if arch.endswith(QUICK) or trained or stated else "gelu"
