"""Methods of 2024 and 2025 on features: OnZeta, TPS, DPE, DOTA, StatA, ECALP, OGA."""

import operator
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from benchmarks.authors.support import (
    Recorder,
    Repository,
    Row,
    Synthetic,
    compare,
    feature_method,
    run_text,
    synthetic,
)

CLIP = SimpleNamespace(encode_image=torch.clone)
"""Stands for the image tower where features are given instead of images."""


def _batches(
    name: str, data: Synthetic, preset: str | None, size: int, **options: Any
) -> Tensor:
    """Our probabilities of all images, ``size`` at a time."""
    adapter = feature_method(name, data, preset, **options)
    parts = [adapter.predict_features(part) for part in data.views.split(size)]
    return torch.cat([part.probabilities for part in parts])


def _loader(data: Synthetic) -> list[tuple[list[Tensor], Tensor]]:
    """Every image as a list of its views, as authors' loaders give them."""
    pairs = zip(data.views, data.labels, strict=True)
    return [(list(views[:, None]), label[None]) for views, label in pairs]


def onzeta(repository: Repository) -> Iterator[Row]:
    """The loop over images of ``main``, with the length of the stream as our horizon."""
    loop = textwrap.dedent(
        repository.text(
            "main_online.py", "        for i in range(n):", "        acc1, acc5 = acc"
        )
    )
    for shape in ((50, 64, 600, 1), (10, 256, 300, 1)):
        data, (N, _, n, _) = synthetic(shape), shape
        text = data.text.T.contiguous()
        space = run_text(
            f"def run(image_feat, text_classifier, w, rho, idx, text_label, combo_label):\n"
            f"{textwrap.indent(loop, '    ')}",
            args=SimpleNamespace(
                cw=0.5, cr=20, alpha=1, beta=0.8, tau_t=0.01, tau_i=0.04
            ),
            n=n,
            num_class=N,
        )
        theirs = torch.zeros(n, N)
        rest = (torch.arange(n), torch.zeros(n, N), theirs)
        space["run"](data.views[:, 0], text, text.clone(), torch.zeros(N), *rest)
        ours = _batches("onzeta", data, None, 37, horizon=n)
        yield compare(f"{N} classes, stream of {n}", ours, theirs)


def tps(repository: Repository) -> Iterator[Row]:
    """``test_time_tuning`` with their ``Shifter`` and the forward pass of their model."""
    text = repository.text(
        "run_utils.py", "def select_confident_samples", "def log_results"
    )
    tuning = ("def run_shift_iter", "def main(args)")
    text += repository.text("shift_classification.py", *tuning)
    text += repository.text("model/shifter.py", "class Shifter")
    forward = ("    @torch.enable_grad()\n    def forward", "def get_shift_model")
    text += "\n" + textwrap.dedent(
        repository.text("model/learnable_shift.py", *forward)
    )
    space = run_text(text)
    identity = SimpleNamespace(
        scale=lambda x: x, step=lambda o: o.step(), update=lambda: None
    )
    for steps in (1, 3):
        data = synthetic((50, 64, 60, 64), view_noise=1.0)
        predictions = []
        for views in data.views:
            shifter = space["Shifter"](64, num_classes=50, per_label=True)
            model = SimpleNamespace(
                text_shift=True,
                text_shifter=shifter,
                dtype=torch.float32,
                logit_scale=torch.tensor(100.0).log(),
                get_text_features=lambda test, text=data.text: F.normalize(
                    text, dim=-1
                ),
                get_img_features=lambda x: x,
            )

            def call(x: Tensor, test: bool = False, model: Any = model) -> Any:
                return space["forward"](model, x, test)

            optimizer = torch.optim.AdamW(shifter.parameters(), 5e-3)
            args = SimpleNamespace(tta_steps=steps, selection_p=0.1)
            space["test_time_tuning"](call, views, optimizer, identity, args)
            predictions.append(call(views[:1], True).detach())
        ours = (
            feature_method("tps", data, steps=steps).predict_features(data.views).logits
        )
        yield compare(f"{steps} steps, 64 views", ours, torch.cat(predictions))


def dpe(repository: Repository) -> Iterator[Row]:
    """``run_test_dpe`` with four of the authors' configs."""
    from info_nce import InfoNCE

    text = repository.text("utils.py", "def get_entropy", "def clip_classifier")
    text += repository.text("utils.py", "def get_clip_logits", "def get_preprocess")
    text += repository.text("main_dpe.py", "def InfoNCELoss", "def visualize_cache")
    text += repository.text("main_dpe.py", "def cache_key_value", "def main()")
    recorder = Recorder()
    space = run_text(text, operator=operator, InfoNCE=InfoNCE, **recorder.names)
    space["cls_acc"] = recorder.cls_acc
    names = {"imagenet": "I", "imagenet_a": "A", "imagenet_s": "S", "dtd": "dtd"}
    presets = {"imagenet": "imagenet", "imagenet_a": "imagenet-a"}
    for name, letter in names.items():
        config = yaml.safe_load(repository.text(f"configs/{name}.yaml"))
        views = 64 if len(letter) == 1 else 1
        data = synthetic((20, 64, 80, views), view_noise=0.8)
        settings = (config["positive"], config["learning_rate"])
        weights = data.text.T.contiguous()
        space["run_test_dpe"](*settings, _loader(data), CLIP, weights, letter)
        preset = {**presets, "imagenet_s": "imagenet-sketch"}.get(name, name)
        adapter = feature_method("dpe", data, preset)
        ours = torch.cat(
            [adapter.predict_features(p).logits for p in data.views.split(33)]
        )
        yield compare(f"{name}, {views} views", ours, recorder.take())


def dota(repository: Repository) -> Iterator[Row]:
    """``run_test_dota`` with four of the authors' configs."""
    text = repository.text("utils.py", "def get_entropy", "def clip_classifier")
    text += repository.text(
        "utils.py", "def get_clip_logits_aug", "def get_ood_preprocess"
    )
    text += repository.text("dota.py", "class DOTA", "def get_arguments")
    text += repository.text("dota.py", "def run_test_dota", "def main()")
    recorder = Recorder()
    space = run_text(text, **recorder.names)
    space["cls_acc"] = recorder.cls_acc
    presets = {
        "imagenet": "imagenet",
        "imagenet_a": "imagenet-a",
        "imagenet_s": "imagenet-sketch",
    }
    for name, preset in {**presets, "eurosat": "eurosat"}.items():
        config = yaml.safe_load(repository.text(f"configs/vit/{name}.yaml"))
        views = 64 if "_" in name else 1
        data = synthetic((20, 64, 300 if views == 1 else 80, views))
        first = torch.full((64, 20), 0.001)
        gaussians = space["DOTA"](
            config, input_shape=64, num_classes=20, clip_weights=first
        )
        weights, log = data.text.T.contiguous(), SimpleNamespace(info=lambda *_: None)
        space["run_test_dota"](config, _loader(data), CLIP, weights, gaussians, log)
        ours = _batches("dota", data, preset, 37)
        yield compare(f"{name}, {views} views", ours, recorder.take().softmax(dim=1))


def stata(repository: Repository) -> Iterator[Row]:
    """``StatA_solver``, one batch."""
    solver = run_text(repository.text("solvers/StatA.py", "def get_zero_shot"))[
        "StatA_solver"
    ]
    for shape in ((20, 64, 64, 1), (50, 128, 500, 1), (10, 256, 64, 1)):
        data = synthetic(shape, noise=0.8)
        _, theirs = solver(
            data.views[:, 0], data.labels, data.text.T[None].contiguous()
        )
        ours = feature_method("stata", data).predict_features(data.views).probabilities
        yield compare(f"{shape[0]} classes, a batch of {shape[2]}", ours, theirs)


def ecalp(repository: Repository) -> Iterator[Row]:
    """``iterative_label_propagation``, one image after the other: normalised scores."""
    scaled = (
        "torch.Tensor(pred*10000).unsqueeze(0).to(image_features.device).softmax(dim=1)"
    )
    path = "utils/iterative_label_propagation.py"
    for shape in ((20, 64, 250, 1), (50, 128, 200, 1)):
        space = run_text(repository.text(path, patches={scaled: "pred"}))
        data = synthetic(shape)
        stream = data.views[:, 0]
        theirs = []
        for i, image in enumerate(stream):
            seen = torch.cat([stream[: i + 1], image[None]])
            scores = space["iterative_label_propagation"](
                seen, data.text, 3, 8, 8, 10.0, 1.0
            )
            theirs.append(scores / scores.sum())
        zero_shot = (100 * stream @ data.text.T).softmax(dim=1)
        ours = (_batches("ecalp", data, None, 37) - 1e-3 * zero_shot) / 0.999
        reason = (
            "around the ninth image their table of neighbours, updated in place, forgets one; and "
            "of a tie between an image and its copy either may be taken"
        )
        case = f"{shape[0]} classes, stream of {shape[2]}, scores"
        yield compare(case, ours, torch.stack(theirs), reason=reason)


def oga(repository: Repository) -> Iterator[Row]:
    """``GaussAdapt``, with shrinkage of the covariance and, in a full cache, without."""
    space = run_text(
        repository.text("OGA/OGA_core.py", patches={"torch.float16": "torch.float32"})
    )
    for shape, size in (
        ((20, 64, 400, 1), 32),
        ((20, 64, 200, 1), 1),
        ((50, 64, 900, 1), 64),
    ):
        data = synthetic(shape)
        model = space["GaussAdapt"](data.text.clone())
        theirs = []
        for batch in data.views[:, 0].split(size):
            logits = 100 * batch @ data.text.T
            shares = logits.softmax(dim=1)
            labels = shares.argmax(dim=1)
            model.update_memory(
                batch, logits, shares, model.get_entropy(shares), labels, tau=0.05
            )
            scores = model.get_log_probs(batch)
            theirs.append(model.get_MAP(shares, scores, tau=0.05, simplex_p=True)[0])
        ours = _batches("oga", data, None, size)
        full = shape[0] * 8 > 4 * shape[1]
        case = f"{shape[0]} classes, batches of {size}, {'full' if full else 'small'} cache"
        yield compare(case, ours, torch.cat(theirs))
