"""Methods as the contract tests build them; a method that needs more extends this."""

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import (
    MethodEntry,
    create_method,
    method_config,
)
from cliquetta.methods.building.support_set import FewShot
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import build_tiny_clip, make_tiny_images

_FEWER_STEPS: dict[str, dict[str, Any]] = {"watt": {"rounds": 1, "steps": 1}}
"""WATT takes 80 steps per batch, which the contract does not depend on: eight show the same."""


def build_adapter(
    entry: MethodEntry,
    model: CLIP,
    prompts: ClassPrompts,
    config: Any = None,
    *,
    seed: int = 0,
) -> Adapter:
    """A fresh adapter, by default with the method's own config; few-shot ones come fitted."""
    config = config or method_config(entry.name, options=_FEWER_STEPS.get(entry.name))
    fitted = None if entry.fit is None else fitted_tensors(entry.name, prompts.names)
    return create_method(entry.name, model, prompts, config, seed=seed, fitted=fitted)


@cache
def fitted_tensors(method: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Fit a few-shot method to the ten tiny images in one epoch."""
    config = method_config(method)
    if hasattr(config, "epochs"):
        config = dataclasses.replace(config, epochs=1)
    images = make_tiny_images()
    labels = torch.arange(len(images)) // 2 % len(names)
    examples = FewShot(images, labels)
    return dict(
        fit_method(
            method, build_tiny_clip(), ClassPrompts(names), examples, config
        ).fitted
    )


def assert_same_state(adapter: Adapter, before: dict[str, Tensor]) -> None:
    for name, value in adapter.state_dict().items():
        assert value.equal(before[name]), name
