"""How the contract tests build a method: the one place to extend when a method needs more."""

from __future__ import annotations

from cliquetta.data.views import attach_views
from cliquetta.methods.contract import Adapter, Batch
from cliquetta.methods.registry import MethodEntry, create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts


def build_adapter(
    entry: MethodEntry, model: CLIP, prompts: ClassPrompts, *, seed: int = 0
) -> Adapter:
    """A fresh adapter with the method's own defaults."""
    return create_method(entry.name, model, prompts, seed=seed)


def prepare(adapter: Adapter, batch: Batch) -> Batch:
    """The batch as the adapter wants it: with views, if it asks for them."""
    if adapter.views is None:
        return batch
    return attach_views(batch, adapter.views, seed=0, preprocess=adapter.model.preprocess)
