"""The models that open_clip has released, as far as our towers can hold them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cliquetta.errors import UnknownNameError, look_up
from cliquetta.model.config import Activation

_QUICK = "-quickgelu"
_QUICK_TAGS = frozenset({"openai", "yfcc15m", "cc12m", "dfn2b", "dfn5b"})
_QUICK_TAGS |= {"metaclip_400m", "metaclip_fullcc"}
_QUICK_RELEASES = frozenset({"ViT-B-32/laion400m_e31", "ViT-B-32/laion400m_e32"})
_QUICK_RELEASES |= {"ViT-H-14-worldwide/metaclip2_worldwide"}
"""Tags and releases that were trained with QuickGELU; open_clip's default is GELU."""

_ON_TIMM = """
RN50 224 - 64 resnet50_clip openai yfcc15m cc12m
RN101 224 - 64 resnet101_clip openai yfcc15m
RN50x4 288 - 80 resnet50x4_clip openai
RN50x16 384 - 96 resnet50x16_clip openai
RN50x64 448 - 128 resnet50x64_clip openai
ViT-B-32 224 32 768 vit_base_patch32_clip_224 openai laion2b_e16 laion400m_e31 laion400m_e32 \
metaclip_400m metaclip_fullcc
ViT-B-32-256 256 32 768 -
ViT-B-16 224 16 768 vit_base_patch16_clip_224 openai laion400m_e31 laion400m_e32 metaclip_400m \
metaclip_fullcc
ViT-B-16-plus-240 240 16 896 vit_base_patch16_plus_clip_240 laion400m_e31
ViT-L-14 224 14 1024 vit_large_patch14_clip_224 openai laion400m_e31 laion400m_e32 metaclip_400m \
metaclip_fullcc
ViT-L-14-336 336 14 1024 vit_large_patch14_clip_336 openai
ViT-H-14 224 14 1280 vit_huge_patch14_clip_224 metaclip_fullcc metaclip_altogether
ViT-H-14-378 378 14 1280 -
ViT-g-14 224 14 1408 -
ViT-bigG-14 224 14 1664 vit_gigantic_patch14_clip_224 metaclip_fullcc
ViT-H-14-worldwide 224 14 1280 vit_huge_patch14_clip_224 metaclip2_worldwide
ViT-H-14-worldwide-378 378 14 1280 vit_huge_patch14_clip_378 metaclip2_worldwide
ViT-bigG-14-worldwide 224 14 1664 vit_gigantic_patch14_clip_224 metaclip2_worldwide
ViT-bigG-14-worldwide-378 378 14 1664 vit_gigantic_patch14_clip_378 metaclip2_worldwide
"""
"""By line: model, image and patch size, width, its name on the hub of timm, and tags there."""

_ELSEWHERE = """
ViT-B-32 laion2b_s34b_b79k laion/CLIP-ViT-B-32-laion2B-s34B-b79K
ViT-B-32 datacomp_xl_s13b_b90k laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K
ViT-B-32 datacomp_m_s128m_b4k laion/CLIP-ViT-B-32-DataComp.M-s128M-b4K
ViT-B-32-256 datacomp_s34b_b86k laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K
ViT-B-16 laion2b_s34b_b88k laion/CLIP-ViT-B-16-laion2B-s34B-b88K
ViT-B-16 datacomp_xl_s13b_b90k laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K
ViT-B-16 datacomp_l_s1b_b8k laion/CLIP-ViT-B-16-DataComp.L-s1B-b8K
ViT-B-16 dfn2b apple/DFN2B-CLIP-ViT-B-16
ViT-L-14 laion2b_s32b_b82k laion/CLIP-ViT-L-14-laion2B-s32B-b82K
ViT-L-14 datacomp_xl_s13b_b90k laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K
ViT-L-14 dfn2b apple/DFN2B-CLIP-ViT-L-14
ViT-L-14 dfn2b_s39b apple/DFN2B-CLIP-ViT-L-14-39B
ViT-H-14 laion2b_s32b_b79k laion/CLIP-ViT-H-14-laion2B-s32B-b79K
ViT-H-14 dfn5b apple/DFN5B-CLIP-ViT-H-14
ViT-H-14-378 dfn5b apple/DFN5B-CLIP-ViT-H-14-378
ViT-g-14 laion2b_s12b_b42k laion/CLIP-ViT-g-14-laion2B-s12B-b42K
ViT-g-14 laion2b_s34b_b88k laion/CLIP-ViT-g-14-laion2B-s34B-b88K
ViT-bigG-14 laion2b_s39b_b160k laion/CLIP-ViT-bigG-14-laion2B-39B-b160k
"""
_SIGLIPS = """
ViT-B-16-SigLIP ViT-B-16-SigLIP-256 ViT-B-16-SigLIP-384 ViT-B-16-SigLIP-512 ViT-B-16-SigLIP-i18n-256
ViT-L-16-SigLIP-256 ViT-L-16-SigLIP-384 ViT-SO400M-14-SigLIP ViT-SO400M-14-SigLIP-384
ViT-SO400M-16-SigLIP-i18n-256 ViT-B-32-SigLIP2-256 ViT-B-16-SigLIP2 ViT-B-16-SigLIP2-256
ViT-B-16-SigLIP2-384 ViT-B-16-SigLIP2-512 ViT-L-16-SigLIP2-256 ViT-L-16-SigLIP2-384
ViT-L-16-SigLIP2-512 ViT-SO400M-16-SigLIP2-256 ViT-SO400M-16-SigLIP2-384 ViT-SO400M-16-SigLIP2-512
ViT-SO400M-14-SigLIP2 ViT-SO400M-14-SigLIP2-378 ViT-gopt-16-SigLIP2-256 ViT-gopt-16-SigLIP2-384
"""
_SIGLIP = re.compile(r"ViT-(B|L|SO400M|gopt)-(14|16|32)-SigLIP(2?)(?:-i18n)?(?:-(\d+))?$")
_SIGLIP_SHAPES = {"B": "base", "L": "large", "SO400M": "so400m", "gopt": "giantopt"}
_SIGLIP_WIDTHS = {"B": 768, "L": 1024, "SO400M": 1152, "gopt": 1536}

_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_SQUASH = {"resize_mode": "squash"}
SIGLIP_PREPROCESS: Mapping[str, Any] = {**_HALF, **_SQUASH}
_PREPROCESS: Mapping[str, Mapping[str, Any]] = {
    "ViT-L-14/laion2b_s32b_b82k": _HALF,
    "ViT-H-14/dfn5b": _SQUASH,
    "ViT-H-14-378/dfn5b": _SQUASH,
    "ViT-H-14-worldwide-378/metaclip2_worldwide": _SQUASH,
    "ViT-bigG-14-worldwide-378/metaclip2_worldwide": _SQUASH,
}
"""Releases whose images are prepared in another way than OpenAI's."""


@dataclass(frozen=True)
class Architecture:
    """One model name of open_clip, as far as a file must be checked against it."""

    image_size: int
    patch_size: int | None  # `None` for a ResNet
    width: int
    tags: dict[str, str]  # hub repository of each pretrained tag


def _read_tables() -> dict[str, Architecture]:
    models = {}
    for line in _ON_TIMM.strip().splitlines():
        name, size, patch, width, shape, *tags = line.split()
        repos = {tag: f"timm/{shape}.{tag}" for tag in tags}
        if "metaclip_fullcc" in repos:  # of 2.5 billion pairs, as timm calls it
            repos["metaclip_fullcc"] = f"timm/{shape}.metaclip_2pt5b"
        patch_size = None if patch == "-" else int(patch)
        models[name] = Architecture(int(size), patch_size, int(width), repos)
    for line in _ELSEWHERE.strip().splitlines():
        name, tag, repo = line.split()
        models[name].tags[tag] = repo
    for name in _SIGLIPS.split():
        letter, patch_size, _, image_size = _parse_siglip(name)
        repos = {"webli": f"timm/{name}"}
        models[name] = Architecture(image_size, patch_size, _SIGLIP_WIDTHS[letter], repos)
    return models


def _parse_siglip(name: str) -> tuple[str, int, bool, int]:
    """Letter of the shape, patch size, whether it is SigLIP 2, and image size."""
    match = _SIGLIP.match(name)
    if match is None:
        raise UnknownNameError("SigLIP of open_clip", name, _SIGLIPS.split())
    return match[1], int(match[2]), match[3] == "2", int(match[4] or 224)


ARCHITECTURES: Mapping[str, Architecture] = _read_tables()


def siglip_config(arch: str) -> dict[str, Any]:
    """Fields of open_clip's config of a SigLIP that its weights do not show."""
    shape, patch, is_second, size = _parse_siglip(arch)
    timm = f"vit_{_SIGLIP_SHAPES[shape]}_patch{patch}_siglip_{size}"
    approximate = "tanh" if is_second else "none"
    text_cfg = {"act_kwargs": {"approximate": approximate}, "hf_tokenizer_name": f"timm/{arch}"}
    return {"vision_cfg": {"image_size": size, "timm_model_name": timm}, "text_cfg": text_cfg}


def architecture(arch: str) -> Architecture:
    """The entry of an open_clip model name, with or without ``-quickgelu``."""
    return look_up("open_clip model", arch.removesuffix(_QUICK), ARCHITECTURES)


def repository(arch: str, tag: str) -> str:
    """The hub repository of a release."""
    return look_up(f"tag of open_clip:{arch}", tag, architecture(arch).tags)


def preprocess_of(arch: str, tag: str | None) -> Mapping[str, Any]:
    """The image preparation of a release where it is not OpenAI's, as a ``preprocess_cfg``."""
    if _SIGLIP.match(arch):
        return SIGLIP_PREPROCESS
    return _PREPROCESS.get(f"{arch.removesuffix(_QUICK)}/{tag}", {})


def activation_of(
    arch: str, tag: str | None, config: Mapping[str, Any] | None
) -> Activation | None:
    """QuickGELU if the name, the tag's training or the config asks for it; else GELU."""
    if _SIGLIP.match(arch):
        return None  # its towers may differ (see `siglip_config`)
    trained = tag in _QUICK_TAGS or f"{arch}/{tag}" in _QUICK_RELEASES
    stated = bool((config or {}).get("model_cfg", {}).get("quick_gelu", False))
    return "quick_gelu" if arch.endswith(_QUICK) or trained or stated else "gelu"
