"""Methods that tune prompts on each test image: TPT, C-TPT, DART."""

import copy
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.authors.support import (
    Inputs,
    Repository,
    Row,
    WordTokenizer,
    compare,
    inputs,
    micro,
    openai_clip,
    predict,
    run_text,
    tokenize,
)
from cliquetta import ClassPrompts, create_method
from cliquetta.methods.building.registry import method_config
from cliquetta.types import ViewSpec

VIEWS = 20


def tpt(repository: Repository) -> Iterator[Row]:
    """``test_time_tuning`` for one step and for three."""
    yield from (_tune(repository, "tpt", steps) for steps in (1, 3))


def ctpt(repository: Repository) -> Iterator[Row]:
    """``test_time_tuning`` with the dispersion term, for one step and for three."""
    yield from (_tune(repository, "ctpt", steps) for steps in (1, 3))


def _tune(repository: Repository, name: str, steps: int) -> Row:
    model = micro()
    data = inputs(3, 8, views=ViewSpec("resized-crop", VIEWS))
    clip = openai_clip(model, repository)

    space = run_text(
        repository.text("clip/custom_clip.py", "class TextEncoder", "def get_coop"),
        List=list,
        Tuple=tuple,
        _tokenizer=WordTokenizer(model),
        DOWNLOAD_ROOT="",
        tokenize=tokenize(model),
        load=lambda *_, **__: (copy.deepcopy(clip), model.embed_dim, None),
    )
    network = space["ClipTestTimeTuning"](
        "cpu", list(data.names), None, arch="micro", n_ctx=4, ctx_init="a_photo_of_a"
    )
    for parameter, value in network.named_parameters():
        value.requires_grad_("prompt_learner" in parameter)
    network.l2_norm_cal = name == "ctpt"
    tuning = run_text(
        repository.text(
            "tpt_classification.py", "def select_confident_samples", "def main("
        )
    )["test_time_tuning"]
    settings = SimpleNamespace(
        cocoop=False,
        tta_steps=steps,
        selection_p=0.1,
        lr=5e-3,
        run_type="tpt_ctpt" if name == "ctpt" else "tpt",
        two_step=False,
        lambda_term=50.0,
    )
    optimizer = torch.optim.AdamW(network.prompt_learner.parameters(), settings.lr)
    start = copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    theirs = []
    for views in _views(data):
        with torch.no_grad():
            network.reset()
        optimizer.load_state_dict(start)
        settings.image = views[:1]
        tuning(network, views, optimizer, scaler, settings)
        with torch.no_grad():
            theirs.append(network(views[:1]))
    config = method_config(name, options={"views": VIEWS, "steps": steps})
    ours = predict(create_method(name, model, ClassPrompts(data.names), config), data)
    return compare(
        f"{steps} steps, 24 images of {VIEWS} views", ours, torch.cat(theirs)
    )


def _views(data: Inputs) -> Iterator[Any]:
    for batch in data.batches:
        assert batch.views is not None
        yield from batch.views


def dart(repository: Repository, openai: Repository) -> Iterator[Row]:
    """``test_time_adapt_eval`` with both running means, image after image."""
    model = micro()
    data = inputs(2, 6, views=ViewSpec("zoom-crop", VIEWS))
    width = str(model.config.vision.width)
    to_cpu = {"768": width, '"cuda"': '"cpu"', "'cuda'": "'cpu'"}
    clip = openai_clip(model, openai)
    space = run_text(
        repository.text(
            "clip/my_clip_CSTP.py",
            "class ClipTestTimeTuning",
            "# get_coop(",
            patches=to_cpu,
        ),
        load=lambda *_, **__: (clip, None, None),
        tokenize=tokenize(model),
        DOWNLOAD_ROOT="",
        checkpoint=None,
    )
    settings = _dart_settings()
    network = space["ClipTestTimeTuning"](
        settings, "cpu", list(data.names), arch="micro"
    )
    network.init_text_prompts(list(data.names))
    for name, value in network.named_parameters():
        value.requires_grad_(name in ("image_prompts", "text_prompts_a"))
    patches = {".cuda(args.gpu, non_blocking=True)": ""}
    text = repository.text(
        "main.py", "def select_confident_samples", "def main()", patches=patches
    )
    text += repository.text(
        "main.py",
        "def test_time_adapt_eval",
        "if __name__ == '__main__'",
        patches=patches,
    )
    loop = run_text(text, time=time)
    theirs: list[Any] = []
    silent = ("cal_clip", "cal_aug", "cal_trained_aug", "cal_acc", "logger_nums")
    loop["aug_tools"] = SimpleNamespace(
        **{name: lambda *_, **__: None for name in silent},
        cal_trained=lambda logits: theirs.append(logits.detach().clone()),
        target=None,
    )
    means = repository.module("utils/ema.py", "dart_ema")
    config = method_config("dart", options={"views": VIEWS, "lr": settings.lr})
    prompts = ClassPrompts(data.names, ("a photo of a {}",))
    adapter = create_method("dart", model, prompts, config)
    network.image_prompts.data.copy_(adapter.memory["visual"][None])
    optimizer = torch.optim.AdamW(
        [network.text_prompts_a, network.image_prompts], settings.lr
    )
    start = copy.deepcopy(optimizer.state_dict())
    visual = network.image_prompts.unsqueeze(0).repeat(len(data.names), 1, 1, 1, 1)
    loop["test_time_adapt_eval"](
        [
            ([view[None] for view in views], torch.zeros(1).long())
            for views in _views(data)
        ],
        *(
            network,
            None,
            optimizer,
            start,
            torch.amp.GradScaler("cpu", enabled=False),
            settings,
        ),
        means.Text_EMA("text_prompts_a", network.text_prompts_a, settings, 0.99),
        means.Image_EMA("image_prompts", visual, settings, 0.995),
    )
    yield compare(
        f"12 images of {VIEWS} views", predict(adapter, data), torch.cat(theirs)
    )


def _dart_settings() -> SimpleNamespace:
    """The options of the authors' ImageNet-A script."""
    return SimpleNamespace(
        image_prompts=True,
        image_prompt_layer=[1],
        prefix_tuning=True,
        arch="ViT-B/16",
        CSTP=1,
        ctx_init="a-photo-of-a-CLS",
        n_ctx=4,
        learnable_text="a",
        share_prompts=0,
        test_sets="A",
        cocoop=False,
        tta_steps=1,
        selection_p=0.1,
        myclip=True,
        tpt=True,
        gpu=0,
        reset_image_prompts=False,
        lr=5e-3,
        text_prompt_ema=True,
        text_prompt_ema_weight=False,
        text_prompt_ema_one=False,
        text_prompt_ema_one_weight=True,
        text_prompt_ema_one_weight_h=5000,
        text_prompt_ema_w=0.1,
        text_prompt_ema_decay=0.99,
        image_prompt_ema=4,
        image_prompt_ema_h=5000,
        image_prompt_ema_w=0.1,
        image_prompt_ema_decay=0.995,
        print_freq=10**9,
    )
