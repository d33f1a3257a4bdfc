"""Defaults and presets of all methods against a transcription that names where each value is from.

A value that differs here was changed by accident, or its source was read again: then
change the table, too, and say where the new value stands. Four kinds of sources, best
first:

* ``code``: read in the configuration of the authors' repository at the named commit;
* ``facts``: our fact sheets of 2026-11-15 and 2026-11-16, written from papers and
  authors' code before the methods were;
* ``page``: only ``docs/methods/NAME.md`` says that it is the authors', or nobody else
  can: no code of theirs is known, or it could not be read here;
* ``ours``: no value of the authors; chosen here.
"""

from dataclasses import asdict
from typing import Any

import pytest

from cliquetta.methods.building.few_shot import SGDTraining
from cliquetta.methods.building.registry import get_method, list_methods

Settings = dict[str, Any]
BySource = dict[str, Settings]

# Views, as TPT, C-TPT, MTA and Zero make them: "V-rrc" of the fact sheet.
CROPS = {"views": 64, "view_kind": "resized-crop", "view_min_area": 0.08}
# What the commands of the authors leave open: memory, and a zoom that only zoom crops
# read.
VIEWS_OURS = {"view_zoom": 1.15, "chunk": 256}
ADAM = {"betas": (0.9, 0.999)}
ADAMW = {"weight_decay": 0.01}

DEFAULTS: dict[str, BySource] = {
    "batclip": {
        "code sarthaxxxxx/BATCLIP ba2e338, imagenet_c/ours.yaml": {
            "lr": 5e-4,
            "betas": (0.9, 0.999),
            "weight_decay": 0.01,
        },
        "facts methods 6: LayerNorms of both encoders": {"adapt_text": True},
    },
    "bca": {
        "page: walawalagoose/TTABC 65eae15, a port": {
            "likelihood_threshold": 0.05,
            "likelihood_count": 20_000,
            "prior_threshold": 0.65,
            "prior_count": 1,
        },
    },
    "clipartt": {
        "facts methods 3.12": {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "steps": 10,
            "topk": 3,
            "temperature": 0.01,
            "template": "a photo of a {}",
            "detach_targets": False,
        },
    },
    "cliptta": {
        "page: MarcLafon/cliptta f4221f4, CIFAR-10-C": {
            "lr": 1e-4,
            "steps": 10,
            "memory_shots": 4,
            "memory_drawn": 40,
        },
        "page: the loss as printed": {"diversity_weight": 1.0},
        "page: Adam of PyTorch": ADAM,
    },
    "cocoop": {
        "facts methods 3.3": {
            "epochs": 10,
            "batch_size": 1,
            "lr": 2e-3,
            "warmup_epochs": 1,
            "warmup_lr": 1e-5,
            "context_init": "a photo of a",
            "context_length": 4,
        },
        "facts methods 3.2: the same repository": {
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "crop_scale": (0.08, 1.0),
        },
        "facts methods 3.3: 512 to 32": {"hidden_dim": None},
        "ours": {"crop_pool": None, "text_chunk": 2048},
    },
    "coop": {
        "facts methods 3.2": {
            "epochs": None,
            "batch_size": 32,
            "lr": 2e-3,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "warmup_epochs": 1,
            "warmup_lr": 1e-5,
            "crop_scale": (0.08, 1.0),
            "context_length": 16,
            "context_init": "",
            "class_specific": False,
            "class_position": "end",
        },
        "ours": {"crop_pool": None},
    },
    "ctpt": {
        "facts methods 3.7": {"dispersion_weight": 50.0},
        "facts methods 3.6: as TPT": {
            **CROPS,
            **ADAMW,
            "selection_fraction": 0.1,
            "lr": 5e-3,
            "steps": 1,
        },
        "ours": {**VIEWS_OURS, "text_chunk": 1024},
    },
    "dart": {
        "facts methods 3.8": {
            **ADAMW,
            "views": 64,
            "view_kind": "zoom-crop",
            "selection_fraction": 0.1,
            "lr": 5e-3,
            "block": 1,
            "prompt_length": 1,
            "retained_weight": 0.1,
            "ema_scale": 5000.0,
            "score": "plain",
        },
        "ours": {**VIEWS_OURS, "view_min_area": 0.08, "text_chunk": 1024},
    },
    "deyo": {
        "code Jhyun17/DeYO 3d7d289, exp_deyo.sh with vitbase_timm": {
            "entropy_threshold": 0.5,
            "entropy_margin": 0.4,
            "plpd_threshold": 0.2,
        },
        "code Jhyun17/DeYO 3d7d289, main.py": {"lr": 1e-3, "momentum": 0.9},
        "page": {"patch_grid": 4},
    },
    "dmn": {
        "facts methods 6": {
            "views": 32,
            "selection_fraction": 0.1,
            "capacity": 50,
            "beta": 5.5,
        },
        "page": {"view_kind": "resized-crop", "view_min_area": 0.5},
        "ours: the authors search it on test labels": {"memory_weight": 1.0},
        "ours": VIEWS_OURS,
    },
    "domain_norm": {
        "page: Eq. 12": {"lr": 0.012, "lr_floor": 0.25},
        "page: Learning": {"window": 64, "settled_steps": 32, "settled_every": 256},
        "page: Eq. 11": {"diversity": 1.0},
        "page: Eq. 8": {"evenness_limits": (0.72, 0.92)},
        "page: Class frequencies": {"prior": "estimated"},
        "page: Eq. 10": {"recent_images": 16.0},
        "page: Encoding and domain": {"domains": 4, "domain_threshold": 0.6},
    },
    "dota": {
        "code skylineeeeen/DOTA bc67d44, configs/vit/imagenet.yaml": {
            "initial_variance": 0.002,
            "shrinkage": 0.0001,
            "weight_per_count": 0.005,
            "largest_weight": 0.2,
        },
        "page": {
            "views": 1,
            "view_kind": "augmix",
            "view_min_area": 0.08,
            "selection_fraction": 0.1,
        },
        "ours": VIEWS_OURS,
    },
    "dpe": {
        "facts methods appendix C: ImageNet": {
            "alpha": 6.0,
            "beta": 5.0,
            "lr": 6e-4,
            "alignment_weight": 0.5,
        },
        "facts methods 6": {
            "capacity": 3,
            "weight_decay": 0.1,
            "scored": "plain",
            "update_threshold": 0.1,
        },
        "facts rivals audit": {"views": 64},
        "page": {
            "view_kind": "augmix",
            "view_min_area": 0.08,
            "selection_fraction": 0.1,
        },
        "ours": VIEWS_OURS,
    },
    "ecalp": {
        "code Yushu-Li/ECALP 96ddf0b, main.py": {
            "text_neighbours": 3,
            "image_neighbours": 8,
            "gamma": 10.0,
            "steps": 3,
        },
        "ours: the authors keep all": {"capacity": 2048},
    },
    "maple": {
        "facts methods 3.4: base to novel": {
            "epochs": 5,
            "batch_size": 4,
            "lr": 3.5e-3,
            "depth": 9,
            "context_length": 2,
            "context_init": "a photo of a",
        },
        "facts methods 3.2: the same trainer": {
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "warmup_epochs": 1,
            "warmup_lr": 1e-5,
            "crop_scale": (0.08, 1.0),
        },
    },
    "mint": {
        "code baowenxuan/Mint ebadf37, cfg/CIFAR100C/Mint.yaml": {
            "lr": 0.007,
            "text_weight": 10_000,
        },
        "page: Adam of PyTorch": ADAM,
    },
    "moon": {"page: no code of the authors is known": {"neighbours": 3, "rounds": 10}},
    "mta": {
        "facts methods 3.9": {
            **CROPS,
            "neighbour_fraction": 0.3,
            "affinity_weight": 4.0,
            "entropy_weight": 0.2,
            "iterations": 5,
            "tolerance": 1e-6,
        },
        "ours": VIEWS_OURS,
    },
    "oga": {
        "code cfuchs2023/OGA b91d449, OGA_core.py": {"capacity": 8},
        "page": {"likelihood_weight": 0.05, "divisor": "capacity"},
    },
    "onzeta": {
        "code idstcv/OnZeta befef06, main_online.py: cr, cw, alpha, beta, tau_i / tau_t": {
            "dual_lr": 20.0,
            "proxy_lr": 0.5,
            "balance": 1.0,
            "vision_weight": 0.8,
            "vision_temperature": 4.0,
        },
        "ours: the length of the stream is not known": {"horizon": 1000},
    },
    "panda": {
        "facts rivals audit": {
            "method": "tent",
            "offset": 0.2,
            "images_per_negative": 10,
            "predict_after": True,
        },
        "page": {"patch_grid": 7},
        "ours": {"options": ()},
    },
    "ramen": {
        "code baowenxuan/Ramen ef0fdc7, cfg/CIFAR100C/Ramen.yaml": {
            "lr": 0.01,
            "neighbours": 5,
            "distance_weight": 5.0,
        },
        "ours: images of all classes together": {"capacity": 1024},
    },
    "sar": {
        "code mr-eggplant/SAR 20f6e24, main.py": {
            "lr": 1e-3,
            "momentum": 0.9,
            "entropy_threshold": 0.4,
        },
        "code mr-eggplant/SAR 20f6e24, sar.py": {
            "reset_threshold": 0.2,
            "reset_decay": 0.9,
        },
        "facts methods 6": {"radius": 0.05},
    },
    "scap": {
        "facts methods 4a: stated in the paper": {
            "topk": 3,
            "concentration": 1.0,
            "lr": 3e-3,
            "capacity": 6,
            "neighbours": 3,
            "bandwidth": 0.3,
            "retention": True,
            "modalities": "both",
            "clique_combination": "concat",
            "retained_combination": "concat",
        },
        "facts methods 4c: left open by the paper": {
            "threshold": 0.8,
            "blocks": (1,),
            "prompt_length": 1,
            "text_mix": 0.5,
            "steps": 1,
            "propagation": 0.3,
            "views": 1,
            "variant": "paper",
        },
        "facts methods 1.5 and 4c: views of the released code, on ImageNet-A": {
            "view_kind": "zoom-crop",
            "view_zoom": 410 / 224,
            "selection_fraction": 0.1,
        },
    },
    "stata": {
        "facts methods 6": {"anchor_weight": 1.0, "neighbours": 3, "rounds": 10},
        "facts methods 6: as TransCLIP": {
            "gaussian_temperature": 50.0,
            "inner_steps": 5,
        },
    },
    "subtta": {
        "facts rivals audit": {"rank": 256},
        "page: zhichenz98/SubTTA_EMNLP26 3baa2a2, ImageNet-C": {
            "lr": 5e-4,
            "momentum": 0.5,
        },
        "page: AdamW of PyTorch": {**ADAM, **ADAMW},
    },
    "tda": {
        "facts methods appendix C: ImageNet": {
            "positive_alpha": 2.0,
            "positive_beta": 5.0,
            "positive_capacity": 3,
            "negative_alpha": 0.117,
            "negative_beta": 1.0,
            "negative_capacity": 2,
            "entropy_window": (0.2, 0.5),
            "probability_window": (0.03, 1.0),
        },
        "facts methods 3.10": {
            "views": 1,
            "view_kind": "augmix",
            "view_min_area": 0.08,
            "selection_fraction": 0.1,
        },
        "ours": VIEWS_OURS,
    },
    "tent": {
        "facts methods 6: the reference implementation for CLIP": {"lr": 1e-3},
        "page: Adam of PyTorch": ADAM,
    },
    "tip_adapter": {
        "facts methods 3.5: ImageNet": {
            "alpha": 1.17,
            "beta": 1.0,
            "augmentations": 10,
            "crop_scale": (0.5, 1.0),
            "search_beta": 7.0,
            "search_alpha": 3.0,
            "search_steps": (200, 20),
        },
        "ours: a search needs labels": {"search": False},
    },
    "tip_adapter_f": {
        "facts methods 3.5: ImageNet": {
            "alpha": 1.17,
            "beta": 1.0,
            "augmentations": 10,
            "crop_scale": (0.5, 1.0),
            "search_beta": 7.0,
            "search_alpha": 3.0,
            "search_steps": (200, 20),
            "epochs": 20,
            "batch_size": 256,
            "lr": 1e-3,
            "eps": 1e-4,
        },
        "page: AdamW of PyTorch": ADAMW,
        "ours: a search needs labels": {"search": False},
    },
    "tps": {
        "code elaine-sui/TPS 556db0f, args.py": {
            "views": 64,
            "selection_fraction": 0.1,
            "lr": 5e-3,
            "steps": 1,
        },
        "code elaine-sui/TPS 556db0f: AdamW of PyTorch": ADAMW,
        "page": {"view_kind": "resized-crop", "view_min_area": 0.08},
        "ours": VIEWS_OURS,
    },
    "tpt": {
        "facts methods 3.6": {
            **CROPS,
            **ADAMW,
            "selection_fraction": 0.1,
            "lr": 5e-3,
            "steps": 1,
        },
        "ours": {**VIEWS_OURS, "text_chunk": 1024},
    },
    "transclip": {
        "facts methods 6": {
            "text_weight": 1.0,
            "gaussian_temperature": 50.0,
            "neighbours": 3,
            "init_images": 8,
            "rounds": 10,
            "inner_steps": 5,
        },
    },
    "watt": {
        "facts methods 6": {"lr": 1e-3, "mode": "sequential", "steps": 2, "rounds": 5},
        "facts methods 1.3: WATT-8": {
            "templates": (
                "a photo of a {}",
                "itap of a {}",
                "a bad photo of the {}.",
                "a origami {}.",
                "a photo of the large {}.",
                "a {} in a video game.",
                "art of the {}.",
                "a photo of the small {}.",
            ),
        },
        "facts methods 3.12: the loss of CLIPArTT": {**ADAM, "temperature": 0.01},
    },
    "zero": {
        "facts methods 3.11": {**CROPS, "selection_fraction": 0.3},
        "ours: the paper's vote, not the code's": {"vote": "hard"},
        "ours": VIEWS_OURS,
    },
    "zero_shot": {"ours: no scaling": {"temperature": 1.0}},
}

# "code skylineeeeen/DOTA bc67d44, configs/vit": epsilon, rho, eta; views: the method's
# page.
DOTA = """
imagenet         0.0001   0.005   0.2  1
imagenet-a       0.0001   0.02    0.5  64
imagenet-r       0.0001   0.0025  0.3  64
imagenet-sketch  0.0001   0.03    0.8  64
imagenet-v2      0.0001   0.01    0.1  64
caltech101       0.002    0.02    0.3  1
dtd              0.0001   0.02    0.3  1
eurosat          0.0001   0.05    3.0  1
aircraft         0.0001   0.01    0.2  1
food101          0.00004  0.01    0.1  1
flowers102       0.0001   0.02    0.2  1
pets             0.0001   0.02    0.3  1
cars             0.0001   0.01    0.3  1
sun397           0.0001   0.01    0.2  1
ucf101           0.0001   0.02    0.4  1
"""

# "facts methods appendix C": alpha, beta of the positive cache; views: 3.10.
TDA = """
imagenet         2.0    5.0   1
imagenet-a       2.0    5.0   64
imagenet-v2      1.0    8.0   64
imagenet-r       1.0    8.0   64
imagenet-sketch  2.363  7.45  64
caltech101       5.0    5.0   1
dtd              2.0    3.0   1
eurosat          4.0    8.0   1
aircraft         2.0    2.0   1
food101          1.0    1.0   1
flowers102       1.0    5.0   1
pets             2.0    7.0   1
cars             1.0    7.0   1
sun397           2.0    3.0   1
ucf101           3.0    8.0   1
"""

# "facts methods appendix C": alpha, beta, lr, alignment; views and what is scored:
# rivals audit.
DPE = """
imagenet         6.0   5.0   0.0006   0.5  64  plain
imagenet-a       6.0   5.0   0.0003   2.5  64  confident
imagenet-v2      3.0   8.0   0.0005   0.5  64  plain
imagenet-r       3.0   8.0   0.0006   0.0  64  plain
imagenet-sketch  7.0   7.45  0.0006   0.2  64  plain
caltech101       15.0  5.0   0.0006   0.2  1   plain
dtd              6.0   3.0   0.0006   0.2  1   plain
eurosat          3.0   8.0   0.00005  0.2  1   plain
aircraft         6.0   2.0   0.0006   0.2  1   plain
food101          3.0   1.0   0.0002   0.2  1   plain
flowers102       2.5   5.0   0.0001   0.2  1   plain
pets             4.0   7.0   0.00005  0.2  1   plain
cars             3.0   7.0   0.0001   1.5  1   plain
sun397           6.0   3.0   0.0002   0.2  1   plain
ucf101           9.0   8.0   0.0004   0.2  1   plain
"""

# "facts methods 3.5", 16 shots: alpha, beta, ends of the search for beta and alpha.
TIP_ADAPTER = """
imagenet    1.17  1.0  7.0   3.0
pets        1.17  1.0  7.0   3.0
food101     1.17  1.0  10.0  10.0
sun397      1.17  1.0  12.0  10.0
caltech101  3.0   1.0  12.0  5.0
cars        3.0   1.0  20.0  10.0
ucf101      3.0   1.0  7.0   3.0
dtd         2.0   1.0  13.0  13.0
eurosat     2.0   1.0  12.0  10.0
aircraft    5.0   1.0  30.0  30.0
flowers102  10.0  1.0  50.0  50.0
"""


def rows(table: str, *fields: str) -> dict[str, Settings]:
    """Presets of a table: name, then a value of each field."""
    presets: dict[str, Settings] = {}
    for line in table.strip().splitlines():
        name, *values = line.split()
        presets[name] = {
            field: text if text.isalpha() else float(text)
            for field, text in zip(fields, values, strict=True)
        }
    return presets


TIP_PRESETS = rows(TIP_ADAPTER, "alpha", "beta", "search_beta", "search_alpha")

PRESETS: dict[str, dict[str, Settings]] = {
    # code sarthaxxxxx/BATCLIP ba2e338, cifar10_c/ours.yaml
    "batclip": {"cifar10": {"lr": 1e-3}},
    # page: MarcLafon/cliptta f4221f4
    "cliptta": {"cifar100-c": {"memory_shots": 16, "memory_drawn": 128}},
    # facts methods 3.2: the protocol of transfer
    "coop": {"imagenet": {"epochs": 50, "context_init": "a photo of a"}},
    # facts methods 3.7: the two scripts
    "ctpt": {
        "fine-grained": {"view_kind": "augmix", "dispersion_weight": 50.0},
        "shift": {"view_kind": "augmix", "dispersion_weight": 20.0},
    },
    # facts methods 1.5: shorter side before a crop of 224
    "dart": {
        "imagenet-a": {"view_zoom": 410 / 224},
        "imagenet-r": {"view_zoom": 235 / 224},
        "imagenet-sketch": {"view_zoom": 245 / 224},
        "imagenet-v2": {"view_zoom": 256 / 224},
    },
    # code Jhyun17/DeYO 3d7d289, exp_deyo.sh with resnet50_bn_torch
    "deyo": {"mild": {"plpd_threshold": 0.3}},
    # page
    "dmn": {"fine-grained": {"view_kind": "augmix"}},
    "dota": rows(DOTA, "shrinkage", "weight_per_count", "largest_weight", "views"),
    "dpe": rows(DPE, "alpha", "beta", "lr", "alignment_weight", "views", "scored"),
    # facts methods 3.4
    "maple": {
        "base_to_novel": {"epochs": 5, "lr": 3.5e-3, "depth": 9},
        "cross_dataset": {"epochs": 2, "lr": 2.6e-3, "depth": 3},
    },
    # code baowenxuan/Mint ebadf37, cfg/ImageNetC5K/Mint.yaml
    "mint": {"imagenet-c": {"lr": 0.015}},
    # page: the paper writes the mean
    "oga": {"paper": {"divisor": "entries"}},
    # facts rivals audit
    "panda": {"zero_shot": {"method": "zero_shot", "offset": 0.6}},
    # code baowenxuan/Ramen ef0fdc7, cfg/*/Ramen.yaml: topk, beta
    "ramen": {
        "cifar10-c": {"lr": 0.01, "neighbours": 50, "distance_weight": 5.0},
        "cifar100-c": {"lr": 0.01, "neighbours": 5, "distance_weight": 5.0},
        "imagenet-c": {"lr": 0.01, "neighbours": 1, "distance_weight": 0.0},
        "domainnet": {"lr": 0.01, "neighbours": 10, "distance_weight": 5.0},
    },
    # facts methods 4b and 4c; the script of ImageNet-A
    "scap": {
        "paper": {},
        "paper-views": {"views": 64},
        "paper-crops": {"views": 64, "view_kind": "resized-crop"},
        "released": {
            "topk": 1,
            "threshold": 0.65,
            "text_mix": 0.6,
            "concentration": 100 / 512,
            "lr": 5e-3,
            "capacity": 10,
            "views": 64,
            "variant": "released",
        },
    },
    # page: zhichenz98/SubTTA_EMNLP26 3baa2a2
    "subtta": {"cifar10-c": {"lr": 1e-3, "momentum": 0.1}, "cifar100-c": {"rank": 64}},
    "tda": {
        **rows(TDA, "positive_alpha", "positive_beta", "views"),
        "views": {"views": 64},  # facts methods 3.10
    },
    "tip_adapter": TIP_PRESETS,
    # facts methods 3.5: 100 epochs on EuroSAT
    "tip_adapter_f": {
        **TIP_PRESETS,
        "eurosat": {**TIP_PRESETS["eurosat"], "epochs": 100},
    },
    # page
    "tps": {"fine-grained": {"view_kind": "augmix"}},
    # facts methods 3.6
    "tpt": {"fine-grained": {"view_kind": "augmix"}},
    # facts methods 6; the rate: page
    "watt": {
        "parallel": {"mode": "parallel", "rounds": 50},
        "large-images": {"lr": 1e-4},
    },
}


def transcribed(method: str) -> Settings:
    """All defaults of a method, whatever their source."""
    merged: Settings = {}
    for settings in DEFAULTS[method].values():
        merged |= settings
    return merged


def test_every_method_is_in_the_table() -> None:
    assert sorted(DEFAULTS) == list_methods()


@pytest.mark.parametrize("method", DEFAULTS)
def test_defaults_are_the_transcribed_ones(method: str) -> None:
    actual = asdict(get_method(method).config())
    wrong = []

    for source, settings in DEFAULTS[method].items():
        for field, value in settings.items():
            if actual.get(field) != value:
                says = f"{field} is {actual.get(field)!r}, but {value!r} by {source}"
                wrong.append(says)

    assert not wrong, f"{method}: {'; '.join(wrong)}"

    unpinned = set(actual) - set(transcribed(method))

    assert unpinned == set(), "an option whose default nothing here tells"


@pytest.mark.parametrize("method", DEFAULTS)
def test_presets_are_the_transcribed_ones(method: str) -> None:
    """Each sets what the table says, and leaves the others at the defaults."""
    presets = get_method(method).presets
    expected = PRESETS.get(method, {})

    assert set(presets) == set(expected)
    for name, settings in expected.items():
        assert asdict(presets[name]) == transcribed(method) | settings, name


def test_no_value_is_told_twice() -> None:
    for method, sources in DEFAULTS.items():
        fields: list[str] = []
        for settings in sources.values():
            fields += settings
        assert len(fields) == len(set(fields)), method


def test_sources_are_of_the_four_kinds() -> None:
    kinds = {
        source.split()[0].removesuffix(":")
        for told in DEFAULTS.values()
        for source in told
    }
    assert kinds == {"code", "facts", "page", "ours"}


@pytest.mark.parametrize(
    ("shots", "epochs"), [(1, 50), (2, 100), (4, 100), (8, 200), (16, 200)]
)
def test_coop_trains_as_long_as_its_authors(shots: int, epochs: int) -> None:
    """Fact sheet of methods, 3.2: 200 epochs for 16 and 8 shots, 100 for 4 and 2, 50 for 1."""
    assert SGDTraining().epochs_for(shots) == epochs
