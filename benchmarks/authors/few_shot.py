"""Methods fitted on labelled images: CoOp, CoCoOp, MaPLe, Tip-Adapter."""

import collections
import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.authors.support import (
    Repository,
    Row,
    WordTokenizer,
    compare,
    compare_values,
    inputs,
    micro,
    openai_clip,
    run_text,
    synthetic,
    tokenize,
)
from cliquetta import CLIP, ClassPrompts, create_method
from cliquetta.methods.building.few_shot import FitTask
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import method_config
from cliquetta.methods.building.support_set import FewShot

EPOCHS = 3
BATCHES = 4
SIZE = 16
RATES = {"coop": 2e-3, "cocoop": 2e-3, "maple": 3.5e-3}


def coop(
    repository: Repository, openai: Repository, dassl: Repository
) -> Iterator[Row]:
    """Context of five words, trained with Dassl's optimiser and schedule."""
    yield _train("coop", repository, openai, dassl)


def cocoop(
    repository: Repository, openai: Repository, dassl: Repository
) -> Iterator[Row]:
    """Context and meta-network, trained with Dassl's optimiser and schedule."""
    yield _train("cocoop", repository, openai, dassl)


def maple(repository: Repository, dassl: Repository) -> Iterator[Row]:
    """Coupled prompts in four blocks, trained with Dassl's optimiser and schedule."""
    yield _train("maple", repository, repository, dassl)


def _train(
    name: str, repository: Repository, openai: Repository, dassl: Repository
) -> Row:
    """Both train on the same batches from the same start; compared on a held-out batch."""
    model = micro()
    data = inputs(BATCHES + 1, SIZE, shift="defocus_blur:5")
    *training, test = data.batches
    network = _network(name, repository, openai, model, data.names)
    learner = network.prompt_learner
    start = {
        key: value.detach().clone() for key, value in _START[name](learner).items()
    }
    _dassl_training(
        network, name, dassl, list(zip(training, data.labels, strict=False))
    )
    with torch.no_grad():
        theirs = network.eval()(test.images)

    images = torch.cat([batch.images for batch in training])
    few_shot = FewShot(images, torch.cat(list(data.labels[:BATCHES])))
    options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": SIZE, "lr": RATES[name]}
    if name == "coop":
        options["context_length"] = 5
    config = method_config(name, options=options)
    prompts = ClassPrompts(data.names)
    with _same_batches(name, start):
        fitted = fit_method(name, model, prompts, few_shot, config).fitted
    ours = (
        create_method(name, model, prompts, config, fitted=fitted).predict(test).logits
    )
    return compare(f"{EPOCHS} epochs of {BATCHES} batches of {SIZE}", ours, theirs)


def _network(
    name: str,
    repository: Repository,
    openai: Repository,
    model: CLIP,
    names: tuple[str, ...],
) -> Any:
    """The authors' ``CustomCLIP`` around our weights; only its prompt learner learns."""
    widths = {
        "768": str(model.config.vision.width),
        "512": str(model.config.text.width),
    }
    space = run_text(
        repository.text(
            f"trainers/{name}.py",
            "class TextEncoder",
            "@TRAINER_REGISTRY",
            patches=widths,
        ),
        clip=SimpleNamespace(tokenize=tokenize(model)),
        _tokenizer=WordTokenizer(model),
        OrderedDict=collections.OrderedDict,
        copy=copy,
    )
    extra: tuple[Any, ...] = ()
    if name == "maple":
        depths = dict.fromkeys(
            ("vision_depth", "language_depth", "vision_ctx", "language_ctx"), 0
        )
        extra = ({"trainer": "MaPLe", **depths, "maple_length": 2},)
    settings = SimpleNamespace(
        TRAINER=SimpleNamespace(
            COOP=SimpleNamespace(
                N_CTX=5, CTX_INIT="", CSC=False, CLASS_TOKEN_POSITION="end"
            ),
            COCOOP=SimpleNamespace(N_CTX=4, CTX_INIT="a photo of a", PREC="fp32"),
            MAPLE=SimpleNamespace(N_CTX=2, CTX_INIT="a photo of a", PROMPT_DEPTH=9),
        ),
        INPUT=SimpleNamespace(SIZE=(model.image_size, model.image_size)),
    )
    settings.TRAINER.MAPLE.PROMPT_DEPTH = min(9, model.config.text.layers)
    torch.manual_seed(0)
    network = space["CustomCLIP"](
        settings, list(names), openai_clip(model, openai, *extra)
    )
    for parameter, value in network.named_parameters():
        value.requires_grad_("prompt_learner" in parameter)
    return network


def _coop_start(learner: Any) -> dict[str, Tensor]:
    return {"context": learner.ctx}


def _cocoop_start(learner: Any) -> dict[str, Tensor]:
    first = learner.meta_net.linear1
    second = learner.meta_net.linear2
    result = {"down.weight": first.weight, "down.bias": first.bias}
    return {
        "context": learner.ctx,
        **result,
        "up.weight": second.weight,
        "up.bias": second.bias,
    }


def _maple_start(learner: Any) -> dict[str, Tensor]:
    maps = [learner.proj, *learner.compound_prompt_projections]
    return {
        "context": learner.ctx,
        "deep": torch.stack(list(learner.compound_prompts_text)),
        "map.weight": torch.stack([layer.weight for layer in maps]),
        "map.bias": torch.stack([layer.bias for layer in maps]),
    }


_START: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "coop": _coop_start,
    "cocoop": _cocoop_start,
    "maple": _maple_start,
}
"""Start values of the authors' learner, under the names of our fitted tensors."""


def _dassl_training(
    network: Any, name: str, dassl: Repository, batches: list[Any]
) -> None:
    """SGD with Dassl's cosine schedule and constant warm-up."""
    verbose = {
        "__init__(optimizer, last_epoch, verbose)": "__init__(optimizer, last_epoch)",
        "optimizer, successor, warmup_epoch, last_epoch, verbose": (
            "optimizer, successor, warmup_epoch, last_epoch"
        ),
    }
    build = run_text(dassl.text("dassl/optim/lr_scheduler.py", patches=verbose))
    optimizer = torch.optim.SGD(
        network.prompt_learner.parameters(),
        lr=RATES[name],
        momentum=0.9,
        weight_decay=5e-4,
    )
    settings = SimpleNamespace(
        LR_SCHEDULER="cosine",
        STEPSIZE=(-1,),
        GAMMA=0.1,
        MAX_EPOCH=EPOCHS,
        WARMUP_EPOCH=1,
        WARMUP_RECOUNT=True,
        WARMUP_TYPE="constant",
        WARMUP_CONS_LR=1e-5,
    )
    schedule = build["build_lr_scheduler"](optimizer, settings)
    network.train()
    for _ in range(EPOCHS):
        for batch, labels in batches:
            if name == "coop":
                loss = F.cross_entropy(network(batch.images), labels)
            else:
                loss = network(batch.images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()


def _same_batches(name: str, start: dict[str, Tensor]) -> Any:
    """Our fitting from the authors' start, on their batches in their order, without crops."""
    shared = importlib.import_module("cliquetta.methods.building.few_shot")
    module = importlib.import_module(f"cliquetta.methods.{name}")

    def epoch_batches(*_: Any, **__: Any) -> Iterator[Any]:
        return (np.arange(i * SIZE, (i + 1) * SIZE) for i in range(BATCHES))

    def pixels(task: FitTask, _: Any) -> Any:
        return lambda rows, _: task.few_shot.images[torch.from_numpy(rows)]

    def features(task: FitTask, config: Any) -> Any:
        draw = pixels(task, config)
        return lambda rows, _: task.model.encode_image(draw(rows, _), normalize=True)

    stack = mock.patch.multiple(
        shared, epoch_batches=epoch_batches, crop_draw=pixels, feature_draw=features
    )
    if name == "coop":
        learn = shared.learn
        own = mock.patch.multiple(
            module,
            initial_context=lambda *_: start["context"],
            learn=lambda _, *rest: learn(start, *rest),
        )
    else:
        own = mock.patch.multiple(module, initial_parameters=lambda *_: start)
    return _Both(stack, own)


class _Both:
    """Two patches at once."""

    def __init__(self, *patches: Any) -> None:
        self.patches = patches

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def tip_adapter(repository: Repository) -> Iterator[Row]:
    """Keys of the cache model, searched strengths and logits on held-out features."""
    from cliquetta.methods import tip_adapter as ours_module

    patches = {"import clip\n": "", "from tqdm import tqdm": "tqdm = lambda x: x"}
    space = run_text(repository.text("utils.py", patches=patches))
    # Their counting of hits does not run under the installed numpy; the number is the
    # same.
    space["cls_acc"] = lambda logits, labels, topk=1: (
        100.0 * float((logits.argmax(dim=1) == labels).float().mean())
    )
    N = 12
    E = 64
    shots = 4
    data = synthetic((N, E, 600, 1), noise=1.0)
    labels = torch.arange(N).repeat_interleave(shots)
    generator = torch.Generator().manual_seed(0)
    raw = [
        (data.text[labels] + 0.2 * torch.randn(N * shots, E, generator=generator))
        * (0.5 + torch.rand(N * shots, 1, generator=generator))
        for _ in range(10)
    ]
    settings = {
        "load_cache": False,
        "augment_epoch": 10,
        "cache_dir": tempfile.mkdtemp(),
    }
    settings |= {
        "shots": shots,
        "search_hp": True,
        "search_scale": [7, 3],
        "search_step": [40, 10],
    }
    crops = iter(raw)

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(next(crops), labels)])

    encoder = SimpleNamespace(encode_image=torch.clone)
    keys, values = space["build_cache_model"](settings, encoder, Loader())
    config = ours_module.TipAdapterConfig(search=True, search_steps=(40, 10))
    with mock.patch.object(
        ours_module, "crop_features", lambda *_, **__: torch.stack(raw, 1)
    ):
        ours_keys = ours_module.build_keys(None, None, config, None)  # type: ignore[arg-type]
    yield compare_values("keys", ours_keys, keys.T)

    held = data.views[:200, 0]
    truth = data.labels[:200]
    test = data.views[200:, 0]
    validation = ours_module.Validation(held, 100.0 * held @ data.text.T, truth)
    hot = F.one_hot(labels).float()
    cache = ours_module.TipCache(ours_keys, hot, config.alpha, config.beta)
    alpha, beta = ours_module.search_strengths(validation, cache, config)
    result = space["search_hp"](
        settings, keys, values, held, truth, data.text.T.contiguous()
    )
    strengths = torch.tensor([beta, alpha])
    yield compare_values("searched beta and alpha", strengths, torch.tensor(result))

    theirs = 100.0 * test @ data.text.T
    theirs = (
        theirs + (-(result[0] - result[0] * test @ keys)).exp() @ values * result[1]
    )
    model = micro(scale=100.0)
    model.embed_dim = E
    fitted = {"keys": ours_keys, "labels": labels}
    fitted |= {"alpha": torch.tensor(alpha), "beta": torch.tensor(beta)}
    adapter: Any = create_method("tip_adapter", model, data.prompts, fitted=fitted)
    yield compare("logits of 400 images", adapter.predict_features(test).logits, theirs)
