"""Fit a few-shot method on labelled images."""

from collections.abc import Sequence
from typing import Any

from cliquetta.errors import UserError
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitTask,
    OnStep,
    refuse_fixed_text,
)
from cliquetta.methods.building.registry import (
    create_method,
    get_method,
    method_entries,
    own_config,
)
from cliquetta.methods.building.support_set import FewShot
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts, as_prompts


def fit_method(
    name: str,
    model: CLIP,
    classes: ClassPrompts | Sequence[str],
    few_shot: FewShot,
    config: Any = None,
    *,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> FewShotAdapter:
    """Fit a few-shot method on labelled images; equal arguments give equal tensors.

    Args:
        name: A few-shot method, such as ``coop``.
        model: The CLIP to fit it to.
        classes: Class names, or a :class:`ClassPrompts` with templates.
        few_shot: The labelled images.
        config: The method's config; its defaults if not given.
        seed: Of the training's random draws.
        on_step: Called after every training step; a training-free method has none.

    Returns:
        An adapter that predicts; after :meth:`Adapter.save`, :func:`load_method` builds
        it again.

    Raises:
        UserError: Not a few-shot method, or images and classes that do not fit
            together.

    """
    entry = get_method(name)
    if entry.fit is None:
        few_shot_methods = [
            other.name for other in method_entries() if other.fit is not None
        ]
        raise UserError(
            f"{name} needs no fitting; few-shot methods are {', '.join(few_shot_methods)}"
        )
    config = own_config(entry, config)
    prompts = as_prompts(classes)
    model.require(entry.adapter.needs, by=entry.name)
    refuse_fixed_text(entry.adapter, prompts)
    _check_examples(few_shot, model, prompts)
    task = FitTask(model, prompts, few_shot, seed, on_step)
    fitted = entry.fit(task, config)
    adapter = create_method(name, model, prompts, config, seed=seed, fitted=fitted)
    assert isinstance(adapter, FewShotAdapter)  # no other method is fitted
    return adapter


def _check_examples(few_shot: FewShot, model: CLIP, prompts: ClassPrompts) -> None:
    """Refuse images of another size, and labels beyond the classes."""
    width = few_shot.images.shape[-1]
    if width != model.image_size:
        raise UserError(
            f"few-shot images are {width} pixels wide, {model.id} takes "
            f"{model.image_size}: make them with FewShot.from_dataset(..., model.preprocess)"
        )
    highest = int(few_shot.labels.max())
    if highest >= len(prompts):
        raise UserError(
            f"a few-shot image has label {highest}, there are {len(prompts)} classes"
        )
    if few_shot.validation is not None:
        _check_examples(few_shot.validation, model, prompts)
