"""Presets run, views are scored, and settings that mean nothing or do not fit are named."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method, get_method, method_config
from cliquetta.methods.scap import PRESETS, SCAP, SCAPConfig
from cliquetta.methods.scap.evidence import describe
from cliquetta.methods.scap.released import RULES
from cliquetta.model.clip import CLIP, MissingCapabilityError, initialise
from cliquetta.model.config import CLIPConfig, ResNetConfig, TextConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS, draw
from tests._helpers.tolerance import FEATURE, assert_near, sampling

MODEL = build_model(0)
PROMPTS = ClassPrompts(NAMES, ("a photo of a {}.", "art of the {}."))
BATCHES = make_batches(5, 3, 8)
BATCHES[0][1] = BATCHES[0][0]  # equal rows of one set: duplicates to drop, or not
VIEWS = draw(8, 3, 3, 16, 16)


def test_the_registry_knows_the_presets() -> None:
    assert dict(get_method("scap").presets) == dict(PRESETS)
    assert list(PRESETS) == ["paper", "paper-views", "paper-crops", "released"]
    assert PRESETS["paper"] == SCAPConfig()
    assert method_config("scap") == SCAPConfig()
    assert method_config("scap", "paper-views").views == 64

    released = vars(RULES["released"])
    assert all(released.values()), "a rule that the released code shares"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_run_from_the_registry(name: str) -> None:
    views = min(4, PRESETS[name].views)
    config = method_config("scap", name, {"views": str(views)})

    assert config == dataclasses.replace(PRESETS[name], views=views)

    adapter = create_method("scap", TINY, TINY_PROMPTS, config)
    assert (adapter.views is None) == (views == 1)

    batch = Batch(TINY_IMAGES, tuple("abcdefghij"))
    for _ in range(2):
        prediction = adapter.predict(batch)
        assert prediction.logits.isfinite().all()
        described = describe(prediction)
        assert len(described["images"]) == len(TINY_IMAGES)

    assert len(prediction.evidence["cliques"]) > 0


def test_views_are_scored_with_the_prompts_of_their_image_and_the_confident_averaged() -> (
    None
):
    """Each view as an image of its own, in the same batch and memory."""
    config = SCAPConfig(threshold=0.4, views=3, selection_fraction=0.67)
    images = BATCHES[0]
    views = torch.cat([images[:, None], VIEWS[:, :2]], dim=1)

    # of one view, only what is scored changes: mining, learning and matching see the
    # plain images
    def predict(views: Tensor) -> Tensor:
        return SCAP(MODEL, PROMPTS, config).predict(Batch(images, views=views)).logits

    each = torch.cat([predict(view)[:, None] for view in views.split(1, dim=1)], dim=1)
    one_view = dataclasses.replace(config, views=1)
    plain = SCAP(MODEL, PROMPTS, one_view).predict(images).logits

    assert_near(each[:, 0], plain, FEATURE)

    for actual, logits in zip(predict(views), each, strict=True):
        p = logits.softmax(dim=-1)
        entropy = -(p * p.log()).sum(dim=1)
        two_surest = entropy.argsort()[:2]
        assert_near(actual, logits[two_surest].mean(dim=0), FEATURE)


# --- settings that mean nothing -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, []),
        ({"variant": "released", "neighbours": 5}, ["neighbours"]),
        ({"neighbours": 5}, []),
        ({"view_zoom": 1.2}, ["view_zoom"]),
        ({"views": 8, "view_kind": "augmix", "view_zoom": 1.2}, ["view_zoom"]),
        ({"views": 8, "view_zoom": 1.2}, []),
        ({"retention": False, "capacity": 3}, ["capacity"]),
        ({"modalities": "image", "text_mix": 0.2}, ["text_mix"]),
        ({"modalities": "text", "blocks": (2,)}, ["blocks"]),
    ],
    ids=str,
)
def test_settings_without_effect_are_named(
    options: dict[str, Any], idle: list[str]
) -> None:
    config = SCAPConfig(**options)
    assert config.without_effect() == idle

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SCAP(MODEL, PROMPTS, config)

    says = "has no effect beside the other settings"
    expected = [f"scap.{name} {says}" for name in idle]

    assert [str(warning.message) for warning in seen] == expected


FIXED = ClassPrompts(NAMES, features=MODEL.classifier(PROMPTS))


BARE = ClassPrompts(NAMES, ("{} texture.",))
"""Class texts without a word in front of the name, where a context could be."""


@pytest.mark.parametrize(
    ("prompts", "config", "message"),
    [
        (PROMPTS, SCAPConfig(blocks=(1, 3)), "blocks"),
        (FIXED, SCAPConfig(), "modalities"),
        (BARE, SCAPConfig(modalities="text"), "words"),
    ],
    ids=["no such block", "fixed text", "no words before the name"],
)
def test_prompts_that_cannot_be_learned_are_refused(
    prompts: ClassPrompts, config: SCAPConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        SCAP(MODEL, prompts, config)


@pytest.mark.parametrize(
    ("prompts", "config"),
    [
        (FIXED, SCAPConfig(modalities="image", threshold=0.4)),
        (BARE, SCAPConfig(threshold=0.4, steps=2)),
    ],
    ids=["fixed text", "no words before the name"],
)
def test_prompts_of_images_are_learned_beside_text_that_is_not(
    prompts: ClassPrompts, config: SCAPConfig
) -> None:
    prediction = SCAP(MODEL, prompts, config).predict(BATCHES[0])
    assert len(prediction.evidence["cliques"]) > 0
    assert prediction.logits.isfinite().all()


SMALL_TEXT = TextConfig(
    24, 512 + 256 + 2, width=24, layers=2, heads=2, hidden=48, merges=256
)


RESNET = ResNetConfig(32, 8, (1, 1, 1, 1), 4)


def test_a_template_without_words_is_warned_of() -> None:
    prompts = ClassPrompts(NAMES, ("{} texture.", "art of the {}."))
    with pytest.warns(UserWarning, match="{} texture."):
        adapter = SCAP(MODEL, prompts, SCAPConfig(threshold=0.4))
    evidence = adapter.predict(BATCHES[0]).evidence

    assert evidence["text_prompts"] == "'{} texture.' has no words before the name"
    assert SCAP(MODEL, PROMPTS, SCAPConfig())._text_prompts() == "learned"


# --- models and class lists that do not fit -----------------------------------------------------


def test_a_resnet_learns_text_alone() -> None:
    config = CLIPConfig(16, RESNET, SMALL_TEXT)
    model = initialise(CLIP(config, id="resnet"), 0)
    adapter = SCAP(model, PROMPTS, SCAPConfig(modalities="text", threshold=-1.0))
    images = draw(4, 3, 32, 32).float()
    first = adapter.predict(images)
    cliques = len(first.evidence["cliques"])

    assert cliques > 0

    second = adapter.predict(images)
    assert second.logits.isfinite().all()
    assert int(adapter.memory["text_seen"]) == 2 * cliques


VIT = MODEL.config.vision


CONTEXT = "a text tower that takes learned context"


PREFIX = "a ViT image tower that takes key/value prefixes"


@pytest.mark.parametrize(
    ("vision", "text", "config", "missing"),
    [
        (RESNET, SMALL_TEXT, SCAPConfig(), PREFIX),
        (VIT, None, SCAPConfig(), CONTEXT),
        (VIT, None, SCAPConfig(modalities="text"), CONTEXT),
        (RESNET, None, SCAPConfig(), f"{CONTEXT} and {PREFIX}"),
    ],
    ids=["a ResNet", "no text tower", "no text tower, text alone", "neither"],
)
def test_parts_that_a_model_lacks_are_named_all_at_once(
    vision: Any, text: Any, config: SCAPConfig, missing: str
) -> None:
    """Beside the missing part, the method that needs it."""
    model = CLIP(CLIPConfig(16, vision, text), id="part")
    says = f"scap needs {missing}, which part does"
    with pytest.raises(MissingCapabilityError, match=says):
        SCAP(model, PROMPTS, config)


def test_the_start_is_uniform_between_minus_one_and_one() -> None:
    """Section 4.1: "initialized using a uniform distribution in the range (-1, 1)"."""
    starts = []
    for seed in range(8):
        adapter = SCAP(MODEL, PROMPTS, SCAPConfig(), seed=seed)
        starts.append(adapter.memory["start_prompt"].flatten())
    values = torch.cat(starts)
    n = len(values)

    assert values.abs().max() <= 1
    # Of n draws the largest is below 1 - 30 / n with a chance of exp(-15).
    assert values.max() > 1 - 30 / n
    assert values.min() < -1 + 30 / n

    deviation = 1 / math.sqrt(3)
    assert abs(float(values.mean())) < sampling(deviation, n)

    # The mean square is 1/3; a square has the variance 1/5 - 1/9.
    deviation_of_squares = math.sqrt(1 / 5 - 1 / 9)
    off = float(values.square().mean()) - 1 / 3

    assert abs(off) < sampling(deviation_of_squares, n)
