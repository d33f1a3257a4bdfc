"""Methods that adapt LayerNorms: Tent, BATCLIP, CLIPArTT, WATT."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.authors.support import (
    Inputs,
    Repository,
    Row,
    compare,
    inputs,
    micro,
    openai_clip,
    predict,
    run_text,
    stand_in,
    tokenize,
)
from cliquetta import CLIP, ClassPrompts, create_method
from cliquetta.methods.registry import method_config


def cosine_logits(clip: Any, images: Tensor, texts: Tensor, scale: float) -> Tensor:
    """CLIP's logits of images and tokens under whatever its weights are now."""
    with torch.no_grad():
        image = nn.functional.normalize(clip.encode_image(images), dim=-1)
        text = nn.functional.normalize(clip.encode_text(texts), dim=-1)
        return scale * image @ text.T


def clipartt(repository: Repository) -> Iterator[Row]:
    """``Tent.forward`` with CLIPArTT's targets, ten steps, reset before each batch."""
    model, data = micro(), inputs(2, 16)
    prompts = ClassPrompts(data.names, ("a photo of a {}",))
    clip = openai_clip(model, repository).requires_grad_(True)
    stand_in("clip", tokenize=tokenize(model))
    stand_in("models", lame=stand_in("models.lame"))
    theirs_module = repository.module("models/tent.py", "clipartt_tent")
    clip.visual = theirs_module.configure_model(clip.visual, "ViT-B/32")
    parameters, _ = theirs_module.collect_params(clip.visual, "ViT-B/32")
    optimizer = torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    adapted = theirs_module.Tent(clip, optimizer, steps=10, method="clipartt", episodic=True)
    tokens, classes = model.tokenizer(prompts.texts("a photo of a {}")), list(data.names)
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
    model, data = micro(), inputs(2, 16)
    prompts = ClassPrompts(data.names, ("a photo of a {}",))
    for mode in ("sequential", "parallel"):
        clip = openai_clip(model, repository)
        stand_in("clip", tokenize=tokenize(model), load=lambda *_, clip=clip: (clip, None))
        stand_in("utils", misc=repository.module("utils/misc.py", "utils.misc"))
        module = repository.module("adapt/watt.py", "watt_adapt")
        folder = str(repository.folder / "templates.yaml")
        method = module.WATT("micro", 1e-3, type=mode, l=2, m=2, temps_dir=folder, device="cpu")
        theirs = []
        for batch in data.batches:
            method.reset()
            method.adapt(batch.images, list(data.names))
            templates = method.all_templates
            text = method.extract_text_embeddings(list(data.names), templates, average=True).T
            with torch.no_grad():
                image = nn.functional.normalize(method.model.encode_image(batch.images), dim=-1)
                theirs.append(model.scale * image @ text.T)
        config = method_config("watt", options={"mode": mode, "rounds": 2})
        ours = predict(create_method("watt", model, prompts, config), data)
        yield compare(f"{mode}, 2 rounds, 2 batches of 16", ours, torch.cat(theirs))


def _batclip_settings(adaptation: str, optimizer: str, lr: float, decay: float) -> Any:
    """The part of the authors' config tree that their classes read."""
    space = SimpleNamespace
    return space(
        MODEL=space(EPISODIC=False, RESET_AFTER_NUM_UPDATES=0, ADAPTATION=adaptation, ARCH="micro"),
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
    folder = str(repository.folder / "classification")
    stand_in("models")
    stand_in("models.model", ResNetDomainNet126=type("ResNetDomainNet126", (), {}))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("utils", "methods")]:
        del sys.modules[name]
    transforms = stand_in("torchvision.transforms", Compose=type("Compose", (), {}))
    stand_in("torchvision", transforms=transforms)
    stand_in("methods", __path__=[f"{folder}/methods"])
    if folder not in sys.path:
        sys.path.insert(0, folder)


def batclip(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``OURS``: five batches of 32 in a row."""
    _batclip_package(repository)
    from methods.ours import OURS  # type: ignore[import-not-found]

    model, data = micro(), inputs(5, 32)
    settings = _batclip_settings("ours", "AdamW", 5e-4, 0.01)
    clip = _zero_shot_clip(repository, settings, model, data, openai_clip(model, openai))
    method = OURS(settings, clip, len(data.names))
    theirs = torch.cat([method(batch.images) for batch in data.batches])
    ours = predict(create_method("batclip", model, ClassPrompts(data.names)), data)
    yield compare("5 batches of 32", ours, theirs)


def tent(repository: Repository, batclip: Repository, openai: Repository) -> Iterator[Row]:
    """``Tent`` of its authors, on the LayerNorms of the image tower, five batches of 32."""
    model, data = micro(), inputs(5, 32)
    settings = _batclip_settings("tent", "Adam", 1e-3, 0.0)
    clip = openai_clip(model, openai)
    encode = clip.encode_image
    clip.encode_image = lambda images: encode(images.float())
    wrapped = _zero_shot_clip(batclip, settings, model, data, clip).requires_grad_(False)
    parameters = []
    for module in wrapped.model.visual.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
            parameters += [module.weight, module.bias]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    method = repository.module("tent.py", "tent_of_its_authors").Tent(
        wrapped, optimizer, steps=1, episodic=False
    )
    theirs = torch.cat([method(batch.images).detach() for batch in data.batches])
    ours = predict(create_method("tent", model, ClassPrompts(data.names)), data)
    yield compare("5 batches of 32", ours, theirs)
