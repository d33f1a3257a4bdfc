"""Few-shot examples, the training loop, and files of fitted tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.coop import CoOpConfig
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import create_method, method_config, method_entries
from cliquetta.methods.state import load_method, read_header
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.separable import TWO, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS

SHORT = CoOpConfig(context_length=3, epochs=2)


def test_equal_seeds_fit_equally_and_touch_nothing_else() -> None:
    before = torch.get_rng_state()
    one = fit_method("coop", TINY, TWO, make_examples(2), SHORT, seed=0).fitted[
        "context"
    ]
    two = fit_method("coop", TINY, TWO, make_examples(2), SHORT, seed=0).fitted[
        "context"
    ]
    other = fit_method("coop", TINY, TWO, make_examples(2), SHORT, seed=1).fitted[
        "context"
    ]
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    assert not one.requires_grad
    assert all(p.grad is None and not p.requires_grad for p in TINY.parameters())


@pytest.mark.parametrize(
    "name", ["coop", "cocoop", "maple", "tip_adapter", "tip_adapter_f"]
)
def test_a_file_brings_the_fitted_method_back(tmp_path: Path, name: str) -> None:
    config = method_config(name, options={} if name == "tip_adapter" else {"epochs": 1})
    adapter = fit_method(name, TINY, TWO, make_examples(2), config)
    path = tmp_path / "deep" / "fitted.safetensors"
    adapter.save(path, notes={"dataset": "mine"})
    loaded = load_method(path, TINY)
    assert (loaded.name, loaded.config, loaded.prompts.names) == (
        name,
        config,
        TWO.names,
    )
    assert read_header(path)["notes"] == {"dataset": "mine"}
    tensors = adapter.fitted
    images = make_images(2, seed=5)[0]
    assert all(torch.equal(loaded.fitted[key], value) for key, value in tensors.items())
    # the cache of Tip-Adapter knows its own classes only
    for prompts in (
        [TWO] if name.startswith("tip") else [TWO, ClassPrompts(("deer", "frog"))]
    ):
        direct = (
            create_method(name, TINY, prompts, config, fitted=tensors)
            .predict(images)
            .logits
        )
        assert torch.equal(
            load_method(path, TINY, prompts).predict(images).logits, direct
        )
    assert [file.name for file in path.parent.iterdir()] == ["fitted.safetensors"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "coop",
            {
                "class_specific": True,
                "context_init": "a photo of a",
                "epochs": 1,
                "lr": 0.1,
            },
        ),
        ("tip_adapter", {}),
    ],
)
def test_tensors_of_a_class_follow_it(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    examples = FewShot(TINY_IMAGES, torch.arange(10) // 2)
    config = method_config(name, options=options)
    adapter = fit_method(name, TINY, TINY_PROMPTS, examples, config)
    adapter.save(tmp_path / "fitted")
    some = ClassPrompts(("ship", "cat"), TINY_PROMPTS.templates)
    full = (
        load_method(tmp_path / "fitted", TINY, TINY_PROMPTS).predict(TINY_IMAGES).logits
    )
    part = load_method(tmp_path / "fitted", TINY, some).predict(TINY_IMAGES).logits
    torch.testing.assert_close(part, full[:, [3, 1]])
    with pytest.raises(ValueError, match="deer"):
        load_method(tmp_path / "fitted", TINY, ClassPrompts(("ship", "deer")))
    with pytest.raises(ValueError, match="fit"):
        create_method(name, TINY, some, config, fitted=adapter.fitted)


def test_a_file_of_other_weights_is_refused_but_another_dtype_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "coop.safetensors"
    adapter = fit_method("coop", TINY, TWO, make_examples(2), SHORT)
    adapter.save(path)
    with pytest.raises(ValueError, match="weights"):
        load_method(path, build_tiny_clip(seed=1), TWO)
    half = build_tiny_clip().bfloat16()
    assert half.fingerprint != TINY.fingerprint
    logits = load_method(path, half, TWO).predict(make_images(1, seed=0)[0]).logits
    assert torch.isfinite(logits).all()
    half.id = "another"
    with pytest.raises(ValueError, match="another"):
        load_method(path, half, TWO)


def test_tensors_are_needed_where_a_method_is_fitted_and_refused_elsewhere() -> None:
    few_shot = [entry.name for entry in method_entries() if entry.fit is not None]
    assert few_shot == ["cocoop", "coop", "maple", "tip_adapter", "tip_adapter_f"]
    nothing: dict[str, Tensor] = {}
    for name in few_shot:
        for fitted in (None, nothing):
            with pytest.raises(UserError, match="fit"):
                create_method(name, TINY, TWO, fitted=fitted)
    with pytest.raises(UserError, match="fit"):
        create_method("zero_shot", TINY, TWO, fitted=nothing)
    with pytest.raises(UserError, match="few-shot"):
        fit_method("zero_shot", TINY, TWO, make_examples(1))
    with pytest.raises(TypeError, match="CoOpConfig"):
        fit_method("coop", TINY, TWO, make_examples(1), method_config("maple"))


def test_examples_that_do_not_fit_the_model_or_the_classes_are_refused() -> None:
    images, labels = make_images(1, seed=0)
    fixed = ClassPrompts(TWO.names, features=torch.ones(2, 24))
    for prompts, few_shot, message in (
        (TWO, FewShot(images[..., :16, :16], labels), "preprocess"),
        (TWO, FewShot(images, labels + 1), "2 classes"),
        (fixed, FewShot(images, labels), "text features"),
    ):
        with pytest.raises(UserError, match=message):
            fit_method("coop", TINY, prompts, few_shot, SHORT)
    assert (
        "keys" in fit_method("tip_adapter", TINY, fixed, FewShot(images, labels)).fitted
    )
