"""Presets run, views are scored, and settings that mean nothing or do not fit are named."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.registry import create_method, get_method, method_config
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
    assert method_config("scap") == PRESETS["paper"] == SCAPConfig()
    assert method_config("scap", "paper-views").views == 64
    assert all(vars(RULES["released"]).values()), "a rule that the released code shares"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_run_from_the_registry(name: str) -> None:
    views = min(4, PRESETS[name].views)
    config = method_config("scap", name, {"views": str(views)})
    assert config == dataclasses.replace(PRESETS[name], views=views)
    adapter = create_method("scap", TINY, TINY_PROMPTS, config)
    assert (adapter.views is None) == (views == 1)
    batch = Batch(TINY_IMAGES, tuple("abcdefghij"))
    for _ in range(2):
        out = adapter.predict(batch)
        assert out.logits.isfinite().all()
        assert len(describe(out)["images"]) == len(TINY_IMAGES)
    assert len(out.evidence["cliques"]) > 0


def test_views_are_scored_with_the_prompts_of_their_image_and_the_confident_averaged() -> (
    None
):
    """Each view as an image of its own, in the same batch and memory."""
    config = SCAPConfig(threshold=0.4, views=3, selection_fraction=0.67)
    views = torch.cat([BATCHES[0][:, None], VIEWS[:, :2]], dim=1)
    # of one view, only what is scored changes: mining, learning and matching see the
    # plain images
    actual, *each = (
        SCAP(MODEL, PROMPTS, config).predict(Batch(BATCHES[0], views=some)).logits
        for some in (views, *views.split(1, dim=1))
    )
    plain = SCAP(MODEL, PROMPTS, dataclasses.replace(config, views=1)).predict(
        BATCHES[0]
    )
    assert_near(each[0], plain.logits, FEATURE)
    for j, logits in enumerate(torch.stack(each, dim=1)):
        p = logits.softmax(dim=-1)
        order = (-(p * p.log()).sum(dim=1)).argsort()
        assert_near(actual[j], logits[order[:2]].mean(dim=0), FEATURE)


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
    messages = [str(warning.message) for warning in seen]
    assert messages == [
        f"scap.{name} has no effect beside the other settings" for name in idle
    ]


def test_a_template_without_words_is_warned_of() -> None:
    prompts = ClassPrompts(NAMES, ("{} texture.", "art of the {}."))
    with pytest.warns(UserWarning, match="{} texture."):
        adapter = SCAP(MODEL, prompts, SCAPConfig(threshold=0.4))
    evidence = adapter.predict(BATCHES[0]).evidence
    assert evidence["text_prompts"] == "'{} texture.' has no words before the name"
    assert SCAP(MODEL, PROMPTS, SCAPConfig())._text_prompts() == "learned"


# --- models and class lists that do not fit -----------------------------------------------------


def test_prompts_that_cannot_be_learned_are_refused_and_others_learned() -> None:
    fixed = ClassPrompts(NAMES, features=MODEL.classifier(PROMPTS))
    bare = ClassPrompts(NAMES, ("{} texture.",))
    for prompts, config, message in (
        (PROMPTS, SCAPConfig(blocks=(1, 3)), "blocks"),
        (fixed, SCAPConfig(), "modalities"),
        (bare, SCAPConfig(modalities="text"), "words"),
    ):
        with pytest.raises(UserError, match=message):
            SCAP(MODEL, prompts, config)
    for prompts, config in (
        (fixed, SCAPConfig(modalities="image", threshold=0.4)),
        (bare, SCAPConfig(threshold=0.4, steps=2)),
    ):
        out = SCAP(MODEL, prompts, config).predict(BATCHES[0])
        assert len(out.evidence["cliques"])
        assert out.logits.isfinite().all()


def test_a_resnet_learns_text_alone() -> None:
    vision = ResNetConfig(32, 8, (1, 1, 1, 1), 4)
    text = TextConfig(
        24, 512 + 256 + 2, width=24, layers=2, heads=2, hidden=48, merges=256
    )
    model = initialise(CLIP(CLIPConfig(16, vision, text), id="resnet"), 0)
    with pytest.raises(MissingCapabilityError):
        SCAP(model, PROMPTS, SCAPConfig())
    adapter = SCAP(model, PROMPTS, SCAPConfig(modalities="text", threshold=-1.0))
    first = adapter.predict(draw(4, 3, 32, 32).float())
    second = adapter.predict(draw(4, 3, 32, 32).float())
    assert torch.isfinite(second.logits).all()
    assert int(adapter.memory["text_seen"]) == 2 * len(first.evidence["cliques"]) > 0


def test_parts_that_a_model_lacks_are_named_all_at_once() -> None:
    """Beside the missing part, the method that needs it."""
    text = TextConfig(
        24, 512 + 256 + 2, width=24, layers=2, heads=2, hidden=48, merges=256
    )
    resnet = ResNetConfig(32, 8, (1, 1, 1, 1), 4)
    vit = MODEL.config.vision
    context = "a text tower that takes learned context"
    prefix = "a ViT image tower that takes key/value prefixes"
    both = SCAPConfig()
    text_alone = SCAPConfig(modalities="text")
    for vision, own_text, config, missing in (
        (resnet, text, both, prefix),
        (vit, None, both, context),
        (vit, None, text_alone, context),
        (resnet, None, both, f"{context} and {prefix}"),
    ):
        model = CLIP(CLIPConfig(16, vision, own_text), id="part")
        with pytest.raises(
            MissingCapabilityError, match=f"scap needs {missing}, which part does"
        ):
            SCAP(model, PROMPTS, config)


def test_the_start_is_uniform_between_minus_one_and_one() -> None:
    """Section 4.1: "initialized using a uniform distribution in the range (-1, 1)"."""
    adapters = [SCAP(MODEL, PROMPTS, SCAPConfig(), seed=seed) for seed in range(8)]
    starts = torch.cat(
        [adapter.memory["start_prompt"].flatten() for adapter in adapters]
    )
    n = len(starts)
    assert starts.abs().max() <= 1
    # Of n draws the largest is below 1 - 30 / n with a chance of exp(-15).
    assert starts.max() > 1 - 30 / n
    assert starts.min() < -1 + 30 / n
    deviation = 1 / math.sqrt(3)
    assert abs(float(starts.mean())) < sampling(deviation, n)
    # The mean square is 1/3; a square has the variance 1/5 - 1/9.
    assert abs(float(starts.square().mean()) - 1 / 3) < sampling(
        math.sqrt(1 / 5 - 1 / 9), n
    )
