"""The contract of every registered method; a new one is tested here without a line of code."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.methods.building import base
from cliquetta.methods.building.base import Adapter, NonFiniteError
from cliquetta.methods.building.checks import (
    CHECKS,
    Build,
    bad_pixels_teach_nothing,
    logits_are_finite_float32,
    logits_of,
    stream_of,
)
from cliquetta.methods.building.config import MethodConfig, config_fields
from cliquetta.methods.building.registry import (
    MethodEntry,
    create_method,
    get_method,
    method_config,
    method_entries,
)
from cliquetta.methods.building.state import load_state
from cliquetta.types import Batch
from tests._helpers.building import assert_same_state, build_adapter
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import ADAPTED, LOGIT

SAME: dict[str, Any] = {"atol": ADAPTED, "rtol": LOGIT}
"""Logits on a scale of 10 that differ by the order of floating-point sums only."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_methods_pass_the_checks_of_plug_ins(
    build: Build, batch: Batch, check: Any
) -> None:
    check(build, batch, **SAME)


def test_pixels_that_are_checked_late_teach_nothing_either(
    build: Build, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CHECKED_LATE", {"cpu"})
    bad_pixels_teach_nothing(build, batch)


ADDED = {"tda": 30.0, "tip_adapter": 10.0, "tip_adapter_f": 10.0}
"""The most that a cache adds to CLIP's logits, for methods that add one."""
UNADAPTED: dict[str, dict[str, Any]] = {
    "batclip": {},
    "clipartt": {"lr": 1e-12},
    "dmn": {"memory_weight": 1e-12},
    "mta": {"views": 1},
    "scap": {"threshold": 2.0},
    "tda": {"positive_alpha": 0.0, "negative_alpha": 0.0},
    "tent": {},
    "tip_adapter": {"alpha": 0.0},
    "tip_adapter_f": {"alpha": 0.0},
    "tpt": {"lr": 0.0},
    "ctpt": {"lr": 0.0},
    "watt": {"lr": 1e-12, "templates": ("a photo of a {}.", "a sketch of a {}.")},
    "zero_shot": {},
}  # Settings under which the first batch of a method is zero-shot CLIP's.


def is_log_probabilities(logits: Tensor) -> bool:
    sums = logits.logsumexp(dim=-1)
    return bool(sums.abs().max() < LOGIT)


def test_logits_are_log_probabilities_or_on_clips_scale(
    entry: MethodEntry, adapter: Adapter, batch: Batch
) -> None:
    added = ADDED.get(entry.name, 0.0)
    largest = TINY.scale + added
    parts = stream_of(batch)
    for logits in logits_of(adapter, parts):
        on_scale = logits.abs().max() <= largest + 1e-3
        assert is_log_probabilities(logits) or on_scale


@pytest.mark.parametrize(("name", "options"), UNADAPTED.items(), ids=UNADAPTED)
def test_logits_that_were_not_adapted_are_those_of_zero_shot_clip(
    name: str, options: dict[str, Any], batch: Batch
) -> None:
    config = method_config(name, options=options)
    adapter = build_adapter(get_method(name), TINY, TINY_PROMPTS, config)
    (logits,) = logits_of(adapter, [batch])

    features = TINY.encode_image(batch.images, normalize=True)
    texts = TINY.classifier(TINY_PROMPTS)
    expected = TINY.scale * features @ texts.T
    if is_log_probabilities(logits):
        expected = expected.log_softmax(dim=-1)

    torch.testing.assert_close(logits, expected, **SAME)


def diverging(config: Any) -> Iterator[Any]:
    """The config with each of its learning rates far too high."""
    for field in dataclasses.fields(config):
        if not field.name.endswith("lr"):
            continue
        if not isinstance(getattr(config, field.name), float):
            continue
        yield dataclasses.replace(config, **{field.name: 1e30})


RATES = [entry for entry in method_entries() if list(diverging(entry.config()))]


@pytest.mark.parametrize("entry", RATES, ids=lambda entry: entry.name)
def test_a_rate_that_diverges_never_gives_or_keeps_what_is_not_finite(
    entry: MethodEntry, batch: Batch
) -> None:
    for config in diverging(entry.config()):
        adapter = build_adapter(entry, TINY, TINY_PROMPTS, config)
        for part in stream_of(batch) * 3:
            before = adapter.state_dict()
            try:
                logits = adapter.predict(part).logits
            except NonFiniteError:
                assert_same_state(adapter, before)
            else:
                assert logits.isfinite().all()
        for name, value in adapter.state_dict().items():
            assert not value.isnan().any(), name


def test_half_precision_weights_give_float32_logits(
    entry: MethodEntry, batch: Batch
) -> None:
    model = build_tiny_clip().to(torch.bfloat16)

    def build() -> Adapter:
        return build_adapter(entry, model, TINY_PROMPTS)

    logits_are_finite_float32(build, batch)


def test_pixels_of_another_size_are_refused(adapter: Adapter) -> None:
    with pytest.raises(ValueError, match="preprocess"):
        adapter.predict(Batch(torch.zeros(1, 3, 40, 40), ("a",)))


def test_missing_views_are_attached(adapter: Adapter, batch: Batch) -> None:
    actual = adapter.predict(batch).logits

    with_views = batch
    if adapter.views is not None:
        preprocess = adapter.model.preprocess
        with_views = attach_views(batch, adapter.views, seed=0, preprocess=preprocess)
    adapter.reset()
    expected = adapter.predict(with_views).logits

    assert torch.equal(actual, expected)


def test_config_is_a_frozen_dataclass_of_plain_values(entry: MethodEntry) -> None:
    config = entry.config()
    assert issubclass(entry.config, MethodConfig)
    assert config.__dataclass_params__.frozen
    # what cannot be hashed is no plain value
    assert hash(config) == hash(entry.config())


def test_method_and_settings_are_documented(entry: MethodEntry) -> None:
    assert entry.summary
    for field in config_fields(entry.config):
        assert field.doc, field.name


def test_presets_are_configs_of_the_method(entry: MethodEntry) -> None:
    for name, preset in entry.presets.items():
        assert isinstance(preset, entry.config), name
    assert entry.tuned_by_authors <= entry.presets.keys()


def test_a_config_of_another_type_is_refused(entry: MethodEntry) -> None:
    with pytest.raises(TypeError, match=entry.config.__name__):
        create_method(entry.name, TINY, TINY_PROMPTS, config=object())


def test_an_unknown_option_names_the_nearest(entry: MethodEntry) -> None:
    for field in dataclasses.fields(entry.config):
        options = {f"{field.name}z": 1}
        with pytest.raises(UnknownNameError, match=f"'{field.name}'"):
            method_config(entry.name, options=options)

    # where none is near, the method is named
    with pytest.raises(UnknownNameError, match=entry.name):
        method_config(entry.name, options={"qqqq": 1})


def test_a_batch_cannot_hold_labels(entry: MethodEntry) -> None:
    fields = {field.name for field in dataclasses.fields(Batch)}
    assert fields == {"images", "keys", "views"}

    taken = list(inspect.signature(entry.adapter.predict).parameters)
    assert taken == ["self", "images", "errors", "channel_order"]


def test_another_class_list_keeps_what_does_not_depend_on_it(
    entry: MethodEntry, adapter: Adapter, batch: Batch, tmp_path: Path
) -> None:
    adapter.predict(batch)
    adapter.save(tmp_path / "state")
    before = adapter.state_dict()
    names = adapter.prompts.names[3:0:-1]

    if before and not adapter.class_free & set(before):
        with pytest.raises(UserError, match="classes"):
            adapter.with_classes(names)
        return

    # what does not depend on the classes is as before, all else as in a new adapter
    other = adapter.with_classes(names)
    shared = {name: before[name] for name in adapter.class_free & set(before)}

    assert shared or not before

    new = other._rebuild(other.prompts).state_dict()
    assert_same_state(other, {**new, **shared})

    # a saved state gives the same
    after = other.state_dict()

    if before:
        fresh = adapter.with_classes(names)
        fresh.reset()
        loaded = load_state(fresh, tmp_path / "state", other_classes=True)
        assert loaded.classes_changed
        assert_same_state(fresh, after)

    logits = other.predict(batch).logits
    assert logits.shape == (len(batch), 3)
    assert bool(logits.isfinite().all())
