"""Methods that adapt LayerNorms: Tent and those of 2023 to 2026 after it."""

import copy
import importlib
import logging
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn

from benchmarks.authors.support import (
    Inputs,
    Repository,
    Row,
    compare,
    inputs,
    micro,
    openai_clip,
    package,
    predict,
    run_text,
    stand_in,
    tokenize,
)
from cliquetta import CLIP, ClassPrompts, create_method
from cliquetta.methods.building.registry import method_config

PHOTO = ("a photo of a {}.",)
SEVEN = (
    *(
        "itap of a {}.",
        "a bad photo of the {}.",
        "a origami {}.",
        "a photo of the large {}.",
    ),
    *("a {} in a video game.", "art of the {}.", "a photo of the small {}."),
)
"""OpenAI's seven templates, which Mint and Ramen are run with."""

STUBS = ("Run", "TriggerWandbSyncHook", "threshold_otsu", "TSNE")
"""Imports of CLIPTTA's base class for logs and plots, and for open sets."""


def cosine_logits(clip: Any, images: Tensor, texts: Tensor, scale: float) -> Tensor:
    """CLIP's logits of images and tokens under whatever its weights are now."""
    with torch.no_grad():
        image = nn.functional.normalize(clip.encode_image(images), dim=-1)
        text = nn.functional.normalize(clip.encode_text(texts), dim=-1)
        return scale * image @ text.T


def clipartt(repository: Repository) -> Iterator[Row]:
    """``Tent.forward`` with CLIPArTT's targets, ten steps, reset before each batch."""
    model = micro()
    data = inputs(2, 16)
    prompts = ClassPrompts(data.names, ("a photo of a {}",))
    clip = openai_clip(model, repository).requires_grad_(True)
    stand_in("clip", tokenize=tokenize(model))
    stand_in("models", lame=stand_in("models.lame"))
    theirs_module = repository.module("models/tent.py", "clipartt_tent")
    clip.visual = theirs_module.configure_model(clip.visual, "ViT-B/32")
    parameters, _ = theirs_module.collect_params(clip.visual, "ViT-B/32")
    optimizer = torch.optim.Adam(
        parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0
    )
    adapted = theirs_module.Tent(
        clip, optimizer, steps=10, method="clipartt", episodic=True
    )
    tokens = model.tokenizer(prompts.texts("a photo of a {}"))
    classes = list(data.names)
    theirs = []
    for batch in data.batches:
        adapted.reset()
        dataset = SimpleNamespace(classes=classes)
        adapted(batch.images, tokens, dataset, "cpu", K=3, target_method=1)
        theirs.append(cosine_logits(adapted.model, batch.images, tokens, model.scale))
    ours = predict(create_method("clipartt", model, prompts), data)
    yield compare("10 steps, 2 batches of 16", ours, torch.cat(theirs))


def watt(repository: Repository) -> Iterator[Row]:
    """Sequential and parallel averaging, two rounds."""
    model = micro()
    data = inputs(2, 16)
    prompts = ClassPrompts(data.names, ("a photo of a {}",))
    for mode in ("sequential", "parallel"):
        clip = openai_clip(model, repository)
        stand_in(
            "clip", tokenize=tokenize(model), load=lambda *_, clip=clip: (clip, None)
        )
        stand_in("utils", misc=repository.module("utils/misc.py", "utils.misc"))
        module = repository.module("adapt/watt.py", "watt_adapt")
        folder = str(repository.folder / "templates.yaml")
        method = module.WATT(
            "micro", 1e-3, type=mode, l=2, m=2, temps_dir=folder, device="cpu"
        )
        theirs = []
        for batch in data.batches:
            method.reset()
            method.adapt(batch.images, list(data.names))
            templates = method.all_templates
            text = method.extract_text_embeddings(
                list(data.names), templates, average=True
            ).T
            with torch.no_grad():
                image = nn.functional.normalize(
                    method.model.encode_image(batch.images), dim=-1
                )
                theirs.append(model.scale * image @ text.T)
        config = method_config("watt", options={"mode": mode, "rounds": 2})
        ours = predict(create_method("watt", model, prompts, config), data)
        yield compare(f"{mode}, 2 rounds, 2 batches of 16", ours, torch.cat(theirs))


def _settings(adaptation: str, optimizer: str, lr: float, decay: float) -> Any:
    """The part of the config tree of BATCLIP's benchmark that methods in it read."""
    space = SimpleNamespace
    return space(
        MODEL=space(
            EPISODIC=False,
            RESET_AFTER_NUM_UPDATES=0,
            ADAPTATION=adaptation,
            ARCH="micro",
        ),
        CORRUPTION=space(DATASET="cifar10_c"),
        OPTIM=space(STEPS=1, METHOD=optimizer, LR=lr, BETA=0.9, WD=decay),
        TEST=space(WINDOW_LENGTH=1),
        MIXED_PRECISION=False,
        CLIP=space(
            PROMPT_MODE="custom",
            FREEZE_TEXT_ENCODER=adaptation == "tent",
            PROMPT_TEMPLATE=["a photo of a {}."],
        ),
    )


def _zero_shot_clip(
    repository: Repository, settings: Any, model: CLIP, data: Inputs, clip: Any
) -> Any:
    """Their ``ZeroShotCLIP`` around our weights."""
    text = repository.text(
        "classification/models/model.py",
        "class ZeroShotCLIP",
        "def get_model(",
        patches={"imgs_test.float()": "imgs_test"},
    )
    space = run_text(
        text,
        get_class_names=lambda _: list(data.names),
        get_tokenizer=lambda _: tokenize(model),
        logger=logging.getLogger("authors"),
    )
    return space["ZeroShotCLIP"](settings, clip, "cpu", normalize=lambda images: images)


def _batclip_package(repository: Repository) -> None:
    """Make ``methods`` and ``utils`` of their repository importable."""
    stand_in("models")
    stand_in("models.model", ResNetDomainNet126=type("ResNetDomainNet126", (), {}))
    package(repository, "classification/utils", "utils")
    package(repository, "classification/methods", "methods")
    transforms = stand_in("torchvision.transforms", Compose=type("Compose", (), {}))
    stand_in("torchvision", transforms=transforms)


def batclip(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``OURS``: five batches of 32 in a row."""
    _batclip_package(repository)
    from methods.ours import OURS  # type: ignore[import-not-found]

    model = micro()
    data = inputs(5, 32)
    settings = _settings("ours", "AdamW", 5e-4, 0.01)
    clip = _zero_shot_clip(
        repository, settings, model, data, openai_clip(model, openai)
    )
    method = OURS(settings, clip, len(data.names))
    theirs = torch.cat([method(batch.images) for batch in data.batches])
    ours = predict(create_method("batclip", model, ClassPrompts(data.names)), data)
    yield compare("5 batches of 32", ours, theirs)


def tent(
    repository: Repository, batclip: Repository, openai: Repository
) -> Iterator[Row]:
    """``Tent`` of its authors, on the LayerNorms of the image tower, five batches of 32."""
    model = micro()
    data = inputs(5, 32)
    settings = _settings("tent", "Adam", 1e-3, 0.0)
    clip = openai_clip(model, openai)
    encode = clip.encode_image
    clip.encode_image = lambda images: encode(images.float())
    wrapped = _zero_shot_clip(batclip, settings, model, data, clip).requires_grad_(
        False
    )
    parameters = []
    for module in wrapped.model.visual.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
            parameters += [module.weight, module.bias]
    optimizer = torch.optim.Adam(
        parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0
    )
    method = repository.module("tent.py", "tent_of_its_authors").Tent(
        wrapped, optimizer, steps=1, episodic=False
    )
    theirs = torch.cat([method(batch.images).detach() for batch in data.batches])
    ours = predict(create_method("tent", model, ClassPrompts(data.names)), data)
    yield compare("5 batches of 32", ours, theirs)


class Logits(nn.Module):
    """Their CLIP with fixed texts, as the image classifier that SAR and DeYO adapt."""

    def __init__(self, clip: Any, text: Tensor, scale: float) -> None:
        super().__init__()
        self.visual = clip.visual
        self.text = text
        self.scale = scale

    def forward(self, images: Tensor) -> Tensor:
        return self.score(self.visual(images))

    def score(self, features: Tensor) -> Tensor:
        return self.scale * nn.functional.normalize(features, dim=-1) @ self.text.T

    def early(self) -> list[nn.Parameter]:
        """Gains and biases before the last quarter of the blocks, as ``collect_params`` takes.

        Its names are those of timm's ViT with twelve blocks.
        """
        self.requires_grad_(False)
        blocks = self.visual.transformer.resblocks
        kept = [self.visual.ln_pre, *blocks[: len(blocks) - len(blocks) // 4]]
        norms = [
            m for part in kept for m in part.modules() if isinstance(m, nn.LayerNorm)
        ]
        affine = [p for norm in norms for p in (norm.weight, norm.bias)]
        for parameter in affine:
            parameter.requires_grad_(True)
        return affine


def _logits(
    model: CLIP, data: Inputs, openai: Repository
) -> tuple[Logits, ClassPrompts]:
    prompts = ClassPrompts(data.names, PHOTO)
    return Logits(
        openai_clip(model, openai), model.classifier(prompts), model.scale
    ), prompts


def _ours(
    name: str, model: CLIP, prompts: ClassPrompts, data: Inputs, **options: Any
) -> Tensor:
    config = method_config(name, options=options)
    return predict(create_method(name, model, prompts, config), data)


def sar(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``SAR`` with its ``SAM``; ten classes fall below the threshold of collapse on the way."""
    sam = repository.module("sam.py", "sar_sam")
    text = repository.text(
        "sar.py", "from copy import", patches={"@torch.jit.script": ""}
    )
    module = run_text(text)
    for count, size in ((8, 32), (4, 64), (40, 1)):
        model = micro()
        data = inputs(count, size)
        net, prompts = _logits(model, data, openai)
        rate = (0.001 / 64) * size * (2 if size == 1 else 1)
        optimizer = sam.SAM(net.early(), torch.optim.SGD, lr=rate, momentum=0.9)
        margin = 0.4 * float(torch.tensor(len(data.names)).log())
        method = module["SAR"](net, optimizer, margin_e0=margin)
        theirs = torch.cat([method(batch.images).detach() for batch in data.batches])
        yield compare(
            f"{count} batches of {size}", _ours("sar", model, prompts, data), theirs
        )


def deyo(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``forward_and_adapt_deyo``, one permutation per batch in both."""
    from einops import rearrange

    drawn = "torch.argsort(torch.rand(x_prime.shape[0],x_prime.shape[1]), dim=-1)"
    text = repository.text(
        "methods/deyo.py",
        "@torch.jit.script",
        "def collect_params",
        patches={drawn: "order.expand(len(x_prime), -1)", "@torch.jit.script": ""},
    )
    resize = SimpleNamespace(
        Resize=lambda _: lambda images: images
    )  # 4 cells divide the image
    space = run_text(
        text, rearrange=rearrange, torchvision=SimpleNamespace(transforms=resize)
    )
    args = SimpleNamespace(filter_ent=1, filter_plpd=1, reweight_ent=1, reweight_plpd=1)
    args.aug_type = "patch"
    args.patch_len = 4
    args.plpd_threshold = 0.2
    for count, size in ((8, 32), (4, 64), (40, 1)):
        model = micro()
        data = inputs(count, size)
        net, prompts = _logits(model, data, openai)
        rate = (0.001 / 64) * size * (2 if size == 1 else 1)
        optimizer = torch.optim.SGD(net.early(), rate, momentum=0.9)
        chance = float(torch.tensor(len(data.names)).log())
        generator = torch.Generator().manual_seed(0)
        theirs = []
        for i, batch in enumerate(data.batches):
            space["order"] = torch.randperm(16, generator=generator)
            settings = (net, args, optimizer, 0.5 * chance, 0.4 * chance)
            step = space["forward_and_adapt_deyo"](batch.images, i, *settings)
            theirs.append(step[0].detach())
        ours = _ours("deyo", model, prompts, data)
        yield compare(f"{count} batches of {size}", ours, torch.cat(theirs))


def mint(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``Mint`` on the batches that its script has."""
    model = micro(scale=100.0)
    data = inputs(6, 20)
    stand_in("clip", tokenize=tokenize(model))
    package(repository, "src/methods", "mint_methods")
    module = importlib.import_module("mint_methods.Mint")
    for lr in (7e-3, 1.5e-2):
        clip = openai_clip(model, openai)
        method = module.Mint(clip, list(data.names), {"lr": lr, "prior": 10000})
        theirs = torch.cat([method(batch.images) for batch in data.batches])
        ours = _ours("mint", model, ClassPrompts(data.names, SEVEN), data, lr=lr)
        yield compare(f"6 batches of 20, rate {lr}", ours, theirs)


def panda(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``Tent`` and ``CLIP`` of style Panda, with their negatives in both."""
    model = micro(scale=100.0)
    data = inputs(5, 32)
    stand_in("clip", tokenize=tokenize(model))
    package(repository, "src/methods", "panda_methods")
    size = (
        model.image_size // 8
    )  # their 32 of 224 pixels are 7 patches per side, ours 8
    negatives = importlib.import_module("panda_methods.shuffle").batch_hedge_v6_images
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("Tent", {"lr": 1e-3, "Panda": {"patch_size": size}}, {}),
        ("CLIP", {"patch_size": size}, {"method": "zero_shot", "offset": 0.6}),
    )
    for name, settings, options in cases:
        module = importlib.import_module(f"panda_methods.{name}")
        method = getattr(module, name)(
            openai_clip(model, openai), list(data.names), {"style": "Panda", **settings}
        )
        torch.manual_seed(0)
        theirs = torch.cat([method(batch.images).detach() for batch in data.batches])
        torch.manual_seed(0)
        with mock.patch(
            "cliquetta.methods.panda.make_negatives",
            lambda images, *_: negatives(images, size),
        ):
            ours = _ours(
                "panda", model, ClassPrompts(data.names, PHOTO), data, **options
            )
        yield compare(f"around {name}, 5 batches of 32", ours, theirs)


def ramen(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``Ramen`` with the caches of its authors' configs."""
    model = micro(scale=100.0)
    data = inputs(5, 32)
    stand_in("clip", tokenize=tokenize(model))
    for name in ("models", "methods"):
        package(repository, f"src/{name}", f"ramen_{name}")
    stand_in("models", __path__=[str(repository.folder / "src/models")])
    text = repository.text(
        "src/methods/Ramen.py",
        patches={
            "torch.half": "torch.float32",
            "from .": "from ramen_methods.",
        },
    )
    space = run_text(text, __name__="authors_ramen")
    for preset in ("CIFAR10C", "CIFAR100C", "ImageNetC5K", "DomainNet"):
        config = yaml.safe_load(repository.text(f"cfg/{preset}/Ramen.yaml"))
        args = SimpleNamespace(config=config, max_batch_size=32)
        names = SimpleNamespace(num_classes=len(data.names), classes=list(data.names))
        method = space["Ramen"](openai_clip(model, openai), names, args)
        theirs = torch.cat([method.forward(batch.images) for batch in data.batches])
        options = {"neighbours": config["topk"], "distance_weight": config["beta"]}
        ours = _ours("ramen", model, ClassPrompts(data.names, SEVEN), data, **options)
        reason = "where gradients cancel, rounding decides the sign of a step of 0.01"
        yield compare(f"{preset}, 5 batches of 32", ours, theirs, reason=reason)


class Scaler:
    """A loss scaler as on a GPU: what an earlier step left of gradients fades to nothing."""

    factor = 2.0**16

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= self.factor
        optimizer.step()

    def update(self) -> None:
        pass


def subtta(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``SUBTTA`` in batches larger than the features' width.

    In smaller ones eigenvalues coincide, and torch's derivative of their decomposition
    is NaN.
    """
    folder = "classification"
    text = repository.text(
        f"{folder}/methods/base.py", "class TTAMethod", "def forward_decorator"
    )
    start = "class BatCLIPLoss"
    scaler = {
        "torch.cuda.amp.GradScaler()": "Scaler()",
        "@ADAPTATION_REGISTRY.register()": "",
    }
    method_text = repository.text(f"{folder}/methods/subtta.py", start, patches=scaler)
    noise = "Adam makes whole steps of gradients that are rounding, ours none"
    more = "; of ten texts they take a direction more, which rounding alone decides"
    for rank, reason in ((8, noise), (256, noise + more)):
        model = micro()
        data = inputs(2, 264)
        net, prompts = _logits(model, data, openai)
        clip = SimpleNamespace(logit_scale=torch.tensor(model.scale).log())

        class Wrapped(nn.Module):
            """Their ``ZeroShotCLIP`` reduced to what the method asks of it."""

            def __init__(self, net: Logits, clip: Any) -> None:
                super().__init__()
                self.net = net
                self.model = clip

            def forward(self, images: Tensor, return_features: bool = False) -> Any:
                raw = self.net.visual(images)
                logits = self.net.score(raw)
                return (
                    (logits, None, self.net.text, raw, None)
                    if return_features
                    else logits
                )

        settings = _settings("subtta", "AdamW", 5e-4, 0.01)
        settings.CORRUPTION.DATASET = "imagenet_c"
        settings.SUBTTA = SimpleNamespace(
            REMOVE_FIRST_PC=True,
            SUBSPACE_RANK=rank,
            COV_MOMENTUM=0.5,
            ENT_SCALE=3.0,
            LOSS_TYPE="mint",
        )
        names = {"deepcopy": copy.deepcopy, "time": time, "Scaler": Scaler}
        transforms = SimpleNamespace(Compose=type("Compose", (), {}))
        module = run_text(
            text + "\n" + method_text,
            transforms=transforms,
            logger=mock.Mock(),
            **names,
        )
        method = module["SUBTTA"](settings, Wrapped(net, clip), len(data.names))
        theirs = torch.cat([method(batch.images) for batch in data.batches])
        ours = _ours("subtta", model, prompts, data, rank=rank)
        yield compare(f"rank {rank}, 2 batches of 264", ours, theirs, reason=reason)


def cliptta(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``CLIPTTA`` of the closed set with its class-wise memory, all of which is drawn."""
    for name in ("wandb", "wandb_osh", "skimage", "sklearn"):
        stand_in(name)
    for name in (
        "wandb.wandb_run",
        "wandb_osh.hooks",
        "skimage.filters",
        "sklearn.manifold",
    ):
        stand_in(name, **{member: mock.Mock() for member in STUBS})
    lib = _cliptta_lib(repository)
    for name in ("ttavlm", "ttavlm.methods"):
        stand_in(name, __path__=[str(repository.folder / name.replace(".", "/"))])
    stand_in("ttavlm.lib", **lib)
    sys.modules["ttavlm"].lib = sys.modules["ttavlm.lib"]  # type: ignore[attr-defined]
    stand_in("ttavlm.optimizers", SAM=mock.Mock())
    stand_in("ttavlm.models", __path__=[])
    stand_in("ttavlm.models.clip", tokenize=mock.Mock())
    repository.module("ttavlm/memory/ccm.py", "ttavlm.memory")
    repository.module(
        "ttavlm/methods/abstract_model.py", "ttavlm.methods.abstract_model"
    )
    module = repository.module(
        "ttavlm/methods/cliptta_otsu.py", "ttavlm.methods.cliptta_otsu"
    )
    model = micro()
    data = inputs(3, 32)
    net, prompts = _logits(model, data, openai)
    method = module.CLIPTTA(
        template=list(PHOTO),
        class_names=list(data.names),
        use_memory=True,
        use_softmax_entropy=True,
        save_root="",
        adaptation="cliptta",
        model=net.visual,
        clip_text_encoder=nn.Identity(),
        class_prototypes=net.text,
        class_bias=torch.zeros(()),
        normalize_features=True,
        optimizer_type="adam",
        steps=10,
        logit_scale=model.scale,
        beta_reg=1.0,
        update_alpha=False,
        lr=1e-4,
        num_shots=4,
        sample_size=40,
    )
    method.memory.img_size = model.image_size
    method.memory.reset()
    method.model.dtype = torch.float32
    theirs = torch.cat(
        [model.scale * method([b.images])[0][0].detach() for b in data.batches]
    )
    ours = _ours("cliptta", model, prompts, data)
    yield compare("10 steps, 3 batches of 32", ours, theirs)


def _cliptta_lib(repository: Repository) -> dict[str, Any]:
    """The functions of their ``lib`` that the closed-set method calls."""
    space = run_text(repository.text("ttavlm/lib/softmax_entropy.py"))
    names = ("softmax_entropy", "softmax_mean_entropy", "entropy", "cross_entropy")
    return {"LOGGER": mock.Mock(), **{name: space[name] for name in names}}
