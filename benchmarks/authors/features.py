"""Methods that work on features: TDA, DMN, MTA, Zero, TransCLIP."""

import operator
import textwrap
from collections.abc import Iterator
from dataclasses import replace
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
    inputs,
    micro,
    predict,
    run_text,
    synthetic,
)
from cliquetta import ClassPrompts, create_method
from cliquetta.methods.building.registry import method_config
from cliquetta.types import ViewSpec


def tda(repository: Repository) -> Iterator[Row]:
    """``run_test_tda`` with four of the authors' configs."""
    text = repository.text("utils.py", "def get_entropy", "def get_ood_preprocess")
    text += repository.text("tda_runner.py", "def update_cache", "def main()")
    recorder = Recorder()
    space = run_text(text, operator=operator, **recorder.names)
    space["cls_acc"] = recorder.cls_acc
    presets = {"imagenet": None, "oxford_pets": "pets", "imagenet_s": "imagenet-sketch"}
    for name, preset in {**presets, "eurosat": "eurosat"}.items():
        config = yaml.safe_load(repository.text(f"configs/{name}.yaml"))
        for shape in ((50, 64, 600, 1), (8, 32, 300, 1), (50, 64, 120, 64)):
            data = synthetic(shape)
            loader: list[Any] = [
                (list(v[:, None]), y[None])
                for v, y in zip(data.views, data.labels, strict=True)
            ]
            if shape[3] == 1:
                loader = [(view[0], label) for view, label in loader]
            space["run_test_tda"](
                *(config["positive"], config["negative"], loader),
                *(SimpleNamespace(encode_image=torch.clone), data.text.T.contiguous()),
            )
            adapter = feature_method("tda", data, preset, views=shape[3])
            parts = torch.split(data.views, 37)
            ours = torch.cat([adapter.predict_features(part).logits for part in parts])
            case = f"{name}, {shape[0]} classes, {shape[3]} views"
            yield compare(case, ours, recorder.take())


def mta(repository: Repository) -> Iterator[Row]:
    """``solve_mta`` on synthetic and on the bundled model's features."""
    solve = run_text(repository.text("mta.py"))["solve_mta"]
    settings = SimpleNamespace(lambda_y=0.2, lambda_q=4.0)
    for shape, spread in (
        ((50, 64, 60, 64), 0.5),
        ((10, 256, 60, 64), 1.5),
        ((100, 512, 20, 64), 0.3),
    ):
        data = synthetic(shape, view_noise=spread)
        predictions = [
            solve(
                lambda v, features=True, text=data.text: (v, text, torch.tensor(100.0)),
                *(views, settings),
            )
            for views in data.views
        ]
        ours = feature_method("mta", data, views=64).predict_features(data.views).logits
        yield compare(f"synthetic, {shape[0]} classes", ours, torch.cat(predictions))
    yield from _on_views(
        "mta",
        lambda views, text, scale: solve(
            lambda v, features=True: (v, text, scale), views, settings
        ),
    )


def zero(repository: Repository) -> Iterator[Row]:
    """``zero`` with its tie-breaking."""
    text = repository.text("ttas/base.py", "def confidence_filter")
    text += "\n" + repository.text("utils/tools.py", "def break_sample_tie")
    method = repository.text(
        "ttas/zero.py", "    @torch.no_grad()\n    def zero", "    def forward"
    )
    run = run_text(text + "\n" + textwrap.dedent(method))["zero"]

    def predict(views: Tensor, classes: Tensor, scale: Tensor) -> Tensor:
        model = SimpleNamespace(get_image_features=lambda v: v, temp=1 / scale)
        output: Tensor = run(
            SimpleNamespace(z_txt=classes, model=model, gamma=0.3), views
        )
        return output

    for shape, spread in (
        ((50, 64, 200, 64), 0.7),
        ((200, 64, 200, 64), 3.0),
        ((1000, 64, 100, 64), 6.0),
    ):
        data = synthetic(shape, noise=spread, view_noise=spread)
        theirs = torch.cat(
            [predict(v, data.text, torch.tensor(100.0)) for v in data.views]
        )
        ours = (
            feature_method("zero", data, views=64).predict_features(data.views).logits
        )
        yield compare(
            f"synthetic, {shape[0]} classes, decisions",
            *map(_decisions, (ours, theirs)),
        )
    for row in _on_views("zero", predict):
        yield replace(
            row, case=f"{row.case}, decisions", difference=1 - row.agreement, scale=1.0
        )


def _decisions(logits: Tensor) -> Tensor:
    """One-hot predictions: votes and our logits of them are on different scales."""
    return F.one_hot(logits.argmax(dim=1), logits.shape[1]).float()


def _on_views(name: str, predict: Any) -> Iterator[Row]:
    """Both on 64 views of bundled images, encoded by our tower."""
    model = micro()
    for shift in ("gaussian_noise:3", "defocus_blur:3"):
        data = inputs(1, 16, shift=shift, views=ViewSpec("resized-crop", 64))
        prompts = ClassPrompts(data.names)
        adapter = create_method(
            name, model, prompts, method_config(name, options={"views": 64})
        )
        text = model.classifier(prompts)
        scale = torch.tensor(model.scale)
        rows = []
        for batch in data.batches:
            assert batch.views is not None
            rows += [
                predict(model.encode_image(v, normalize=True), text, scale)
                for v in batch.views
            ]
        yield compare(f"bundled {shift}", predict(adapter, data), torch.cat(rows))


def dmn(repository: Repository) -> Iterator[Row]:
    """The memory of ``DualMem`` and its prediction beside the text's."""
    text = repository.text(
        "dmn_main.py", "def select_confident_samples", "def get_searched_param"
    )
    space = run_text(text)
    options = SimpleNamespace(
        indice=None, shared_param=False, mapping="bias", position="all"
    )
    for shape, capacity in (
        ((20, 64, 200, 32), 50),
        ((20, 64, 200, 32), 5),
        ((10, 256, 200, 1), 50),
    ):
        data = synthetic(shape, noise=0.7)
        N, E, _, V = shape
        net = space["DualMem"](args=options, beta=5.5, feat_dim=E, class_num=N)
        model = SimpleNamespace(
            text_feat=data.text,
            logit_scale=torch.tensor(100.0).log(),
            memory_size=capacity,
            fixed_global_feat_vanilla=data.text.clone()[:, None],
            image_feature_memory=torch.zeros(N, capacity, E),
            image_prediction_mem=torch.zeros(N, capacity, N),
            image_entropy_mem=torch.zeros(N, capacity),
            image_feature_count=torch.zeros(N, 1).long(),
        )
        plain = []
        remembered = []
        with torch.no_grad():
            for views in data.views:
                model.image_features_global = views
                shares = net.get_text_prediction(model)
                sure = (
                    space["select_confident_samples"](shares, 0.1)[0]
                    if V > 1
                    else shares
                )
                net.init_pred = sure.mean(0, keepdim=True)
                net.update_memory_bank(model, None)
                plain.append(shares[:1])
                remembered.append(net.get_image_pred(model))
        for weight in (1.0, 0.3, 10.0):
            theirs = (torch.cat(plain) + weight * torch.cat(remembered)) / (1 + weight)
            adapter = feature_method(
                "dmn", data, views=V, capacity=capacity, memory_weight=weight
            )
            parts = torch.split(data.views, 33)
            ours = torch.cat([adapter.predict_features(part).logits for part in parts])
            case = f"{N} classes, {V} views, capacity {capacity}, weight {weight}"
            yield compare(case, ours.softmax(dim=1), theirs)


def transclip(repository: Repository) -> Iterator[Row]:
    """The zero-shot solver, whole datasets and batches."""
    folder = "TransCLIP_solver"
    text = repository.text(f"{folder}/TransCLIP_utils.py") + "\n"
    text += repository.text(
        f"{folder}/TransCLIP.py",
        patches={"from .TransCLIP_utils import *": "cls_acc = lambda *_: 0.0"},
    )
    solver = run_text(text)["TransCLIP_solver"]

    def solve(features: Tensor, classes: Tensor) -> Tensor:
        # The number of classes is read off the labels: they must name all of them.
        labels = torch.arange(len(features)) % len(classes)
        nothing = (None, None, None, None)
        output: Tensor = solver(
            *nothing, features, labels, classes.T.contiguous(), verbose=False
        )[0]
        return output

    for shape in ((20, 64, 600, 1), (50, 128, 1000, 1), (10, 256, 64, 1)):
        data: Synthetic = synthetic(shape, noise=0.8)
        ours = (
            feature_method("transclip", data).predict_features(data.views).probabilities
        )
        yield compare(
            f"synthetic, {shape[0]} classes", ours, solve(data.views[:, 0], data.text)
        )
    model = micro(scale=100.0)
    for size, count in ((64, 8), (512, 1)):
        batches = inputs(count, size)
        prompts = ClassPrompts(batches.names)
        classes = model.classifier(prompts)
        features = [
            model.encode_image(b.images, normalize=True) for b in batches.batches
        ]
        theirs = torch.cat([solve(part, classes) for part in features])
        ours = predict(create_method("transclip", model, prompts), batches).softmax(
            dim=1
        )
        yield compare(f"bundled, batches of {size}", ours, theirs)
