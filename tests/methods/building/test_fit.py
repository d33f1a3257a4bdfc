"""Few-shot examples, the training loop, and files of fitted tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import (
    create_method,
    method_config,
    method_entries,
)
from cliquetta.methods.building.state import load_method, read_header
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.coop import CoOpConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.separable import TWO, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS

SHORT = CoOpConfig(context_length=3, epochs=2)


def fit_context(seed: int) -> Tensor:
    """What CoOp learns from two examples per class."""
    adapter = fit_method("coop", TINY, TWO, make_examples(2), SHORT, seed=seed)
    return adapter.fitted["context"]


def test_equal_seeds_fit_equally() -> None:
    first = fit_context(seed=0)
    assert torch.equal(first, fit_context(seed=0))
    assert not torch.equal(first, fit_context(seed=1))


def test_a_fit_touches_neither_the_model_nor_torchs_random_numbers() -> None:
    before = torch.get_rng_state()
    context = fit_context(seed=0)

    assert torch.equal(before, torch.get_rng_state())
    assert not context.requires_grad
    for parameter in TINY.parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad


def fitted_file(name: str, folder: Path) -> tuple[Path, Adapter]:
    """A file of a method that was fitted for one epoch, and the adapter."""
    options = {} if name == "tip_adapter" else {"epochs": 1}
    config = method_config(name, options=options)
    adapter = fit_method(name, TINY, TWO, make_examples(2), config)
    path = folder / "deep" / "fitted.safetensors"
    adapter.save(path, notes={"dataset": "mine"})
    return path, adapter


FEW_SHOT = ["coop", "cocoop", "maple", "tip_adapter", "tip_adapter_f"]


@pytest.mark.parametrize("name", FEW_SHOT)
def test_a_file_brings_the_fitted_method_back(tmp_path: Path, name: str) -> None:
    path, adapter = fitted_file(name, tmp_path)
    assert [file.name for file in path.parent.iterdir()] == ["fitted.safetensors"]
    assert read_header(path)["notes"] == {"dataset": "mine"}

    loaded = load_method(path, TINY)
    assert loaded.name == name
    assert loaded.config == adapter.config
    assert loaded.prompts.names == TWO.names
    for key, value in adapter.fitted.items():
        assert torch.equal(loaded.fitted[key], value), key


# the cache of Tip-Adapter knows its own classes only
OTHERS = ClassPrompts(("deer", "frog"))


LISTS = [(name, TWO) for name in FEW_SHOT] + [(name, OTHERS) for name in FEW_SHOT[:3]]


@pytest.mark.parametrize(("name", "prompts"), LISTS)
def test_a_file_predicts_for_a_class_list(
    tmp_path: Path, name: str, prompts: ClassPrompts
) -> None:
    path, adapter = fitted_file(name, tmp_path)
    loaded = load_method(path, TINY, prompts)
    direct = create_method(
        name,
        TINY,
        prompts,
        adapter.config,
        fitted=adapter.fitted,
    )

    images, _ = make_images(2, seed=5)
    actual = loaded.predict(images).logits
    expected = direct.predict(images).logits
    assert torch.equal(actual, expected)


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
    """Ship and cat are the fourth and the second of the classes that were fitted."""
    examples = FewShot(TINY_IMAGES, torch.arange(10) // 2)
    config = method_config(name, options=options)
    adapter = fit_method(name, TINY, TINY_PROMPTS, examples, config)
    path = tmp_path / "fitted"
    adapter.save(path)

    all_classes = load_method(path, TINY, TINY_PROMPTS)
    full = all_classes.predict(TINY_IMAGES).logits
    some = ClassPrompts(("ship", "cat"), TINY_PROMPTS.templates)
    part = load_method(path, TINY, some).predict(TINY_IMAGES).logits

    torch.testing.assert_close(part, full[:, [3, 1]])
    unknown = ClassPrompts(("ship", "deer"))
    with pytest.raises(ValueError, match="deer"):
        load_method(path, TINY, unknown)
    with pytest.raises(ValueError, match="fit"):
        create_method(name, TINY, some, config, fitted=adapter.fitted)


def test_few_shot_methods_are_known() -> None:
    few_shot = {entry.name for entry in method_entries() if entry.fit is not None}
    assert few_shot == set(FEW_SHOT)


@pytest.mark.parametrize("name", FEW_SHOT)
@pytest.mark.parametrize("fitted", [None, {}], ids=["no tensors", "none of them"])
def test_tensors_are_needed_where_a_method_is_fitted(
    name: str, fitted: dict[str, Tensor] | None
) -> None:
    with pytest.raises(UserError, match="fit"):
        create_method(name, TINY, TWO, fitted=fitted)


def test_tensors_are_refused_where_a_method_is_not_fitted() -> None:
    nothing: dict[str, Tensor] = {}
    with pytest.raises(UserError, match="fit"):
        create_method("zero_shot", TINY, TWO, fitted=nothing)


def test_a_method_that_learns_from_no_examples_is_not_fitted() -> None:
    with pytest.raises(UserError, match="few-shot"):
        fit_method("zero_shot", TINY, TWO, make_examples(1))


def test_the_config_of_another_method_is_refused() -> None:
    with pytest.raises(TypeError, match="CoOpConfig"):
        fit_method("coop", TINY, TWO, make_examples(1), method_config("maple"))


FIXED = ClassPrompts(TWO.names, features=torch.ones(2, 24))


def test_examples_of_another_size_are_refused() -> None:
    images, labels = make_images(1, seed=0)
    smaller = images[..., :16, :16]
    few_shot = FewShot(smaller, labels)

    with pytest.raises(UserError, match="preprocess"):
        fit_method("coop", TINY, TWO, few_shot, SHORT)


def test_labels_beyond_the_class_list_are_refused() -> None:
    images, labels = make_images(1, seed=0)
    few_shot = FewShot(images, labels + 1)
    with pytest.raises(UserError, match="2 classes"):
        fit_method("coop", TINY, TWO, few_shot, SHORT)


def test_fixed_text_is_refused_where_text_is_learned() -> None:
    images, labels = make_images(1, seed=0)
    few_shot = FewShot(images, labels)

    with pytest.raises(UserError, match="text features"):
        fit_method("coop", TINY, FIXED, few_shot, SHORT)
    assert "keys" in fit_method("tip_adapter", TINY, FIXED, few_shot).fitted


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
