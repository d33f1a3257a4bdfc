"""Few-shot methods from labelled images to a file, and from the file to an adapter.

>>> few_shot = FewShot.from_dataset(dataset, 16, model.preprocess)      # doctest: +SKIP
>>> tensors = fit_method("coop", model, prompts, few_shot)              # doctest: +SKIP
>>> save_fitted(path, "coop", None, tensors, model=model, prompts=prompts)  # doctest: +SKIP
>>> adapter = create_fitted(path, model, other_classes)   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.config import current_names
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitStep,
    FitTask,
    OnStep,
    refuse_fixed_text,
)
from cliquetta.methods.building.support_set import FewShot
from cliquetta.methods.registry import (
    MethodEntry,
    create_method,
    get_method,
    list_methods,
    method_config,
)
from cliquetta.methods.state import plain_config
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts, as_prompts
from cliquetta.tensor_file import pack, unpack
from cliquetta.version import installed_version

__all__ = [
    "FewShot",
    "FitStep",
    "Fitted",
    "create_fitted",
    "fit_method",
    "load_fitted",
    "save_fitted",
]

FORMAT = "cliquetta-fitted-1"


@dataclass(frozen=True)
class Fitted:
    """A file of :func:`save_fitted`, read and checked."""

    method: str
    config: Any
    names: tuple[str, ...]
    """Class names that it was fitted on."""
    model: str
    weights: str
    dtype: str
    tensors: Mapping[str, Tensor]
    notes: Mapping[str, Any]
    """What the writer added: dataset, shots, seed."""


def fit_method(
    name: str,
    model: CLIP,
    prompts: ClassPrompts,
    few_shot: FewShot,
    config: Any = None,
    *,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> dict[str, Tensor]:
    """Fit a few-shot method on labelled images; equal arguments give equal tensors.

    Args:
        name: A few-shot method, such as ``coop``.
        model: The CLIP to fit it to.
        prompts: Class names and templates.
        few_shot: The labelled images.
        config: The method's config; its defaults if not given.
        seed: Of the training's random draws.
        on_step: Called after every training step; a training-free method has none.

    Returns:
        The tensors that its adapter is built from, for :func:`save_fitted`.

    Raises:
        UserError: Not a few-shot method, or images and classes that do not fit together.

    """
    entry = _few_shot_entry(name)
    config = _config(entry, config)
    model.require(entry.adapter.needs, by=entry.name)
    refuse_fixed_text(entry.adapter, prompts)
    _check_examples(few_shot, model, prompts)
    if few_shot.validation is not None:
        _check_examples(few_shot.validation, model, prompts)
    assert entry.fit is not None  # _few_shot_entry saw to it
    return dict(entry.fit(FitTask(model, prompts, few_shot, seed, on_step), config))


def save_fitted(
    path: Path | str,
    method: str,
    config: Any,
    tensors: Mapping[str, Tensor],
    *,
    model: CLIP,
    prompts: ClassPrompts,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write fitted tensors with what they belong to; the file is replaced whole or not at all.

    Args:
        path: The file, by custom ``.safetensors``.
        method: Name of the method.
        config: What it was fitted with; ``None`` is its default.
        tensors: What :func:`fit_method` returned.
        model: The CLIP that it was fitted to.
        prompts: The classes that it was fitted on.
        notes: JSON types of your own, kept in the file.

    """
    entry = _few_shot_entry(method)
    header = {
        "format": FORMAT,
        "method": method,
        "config": plain_config(_config(entry, config)),
        "names": list(prompts.names),
        "model": model.id,
        "weights": model.fingerprint,
        "dtype": str(model.dtype),
        "versions": {"cliquetta": installed_version(), "torch": torch.__version__},
        "notes": dict(notes or {}),
    }
    write_atomically(Path(path), pack(tensors, header))


def load_fitted(path: Path | str) -> Fitted:
    """Read a file of :func:`save_fitted`; anything else is refused."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} is not a readable fitted file ({error})") from error
    tensors, header = unpack(data, source=str(path), kind="fitted file")
    if header.get("format") != FORMAT:
        raise UserError(f"{path} was not written by `cliquetta fit`")
    method = header["method"]
    return Fitted(
        method=method,
        config=method_config(
            method, options=current_names(get_method(method).config, header["config"])
        ),
        names=tuple(header["names"]),
        model=header["model"],
        weights=header["weights"],
        dtype=header["dtype"],
        tensors=tensors,
        notes=header["notes"],
    )


def create_fitted(
    path: Path | str, model: CLIP, classes: ClassPrompts | Sequence[str], seed: int = 0
) -> Adapter:
    """Build the adapter of a fitted file.

    Args:
        path: A file of :func:`save_fitted` or ``cliquetta fit``.
        model: The CLIP that it was fitted to.
        classes: Class names, or a :class:`ClassPrompts` with templates. They may differ from those
            of the fit; methods that know their classes one by one (Tip-Adapter, class-specific
            CoOp) take any selection of them.
        seed: Of the method's own random draws.

    Returns:
        An adapter that predicts.

    Raises:
        UserError: Not such a file, another model, or classes that the method does not know.

    """
    prompts = as_prompts(classes)
    fitted = load_fitted(path)
    # Weights of another dtype hash differently although they are the same model's.
    same = fitted.weights == model.fingerprint or fitted.dtype != str(model.dtype)
    if fitted.model != model.id or not same:
        raise UserError(
            f"{path} was fitted on {fitted.model} (weights {fitted.weights}), this is {model.id} "
            f"({model.fingerprint}): what was learned means nothing there; fit again"
        )
    adapter = get_method(fitted.method).adapter
    assert issubclass(adapter, FewShotAdapter)  # save_fitted wrote no other
    tensors = adapter.for_classes(fitted.tensors, fitted.names, prompts.names)
    return create_method(fitted.method, model, prompts, fitted.config, seed=seed, fitted=tensors)


def _few_shot_entry(name: str) -> MethodEntry:
    entry = get_method(name)
    if entry.fit is None:
        known = ", ".join(other.name for other in list_methods() if other.fit is not None)
        raise UserError(f"{name} needs no fitting; few-shot methods are {known}")
    return entry


def _config(entry: MethodEntry, config: Any) -> Any:
    if config is None:
        return entry.config()
    if not isinstance(config, entry.config):
        raise TypeError(
            f"{entry.name} takes a {entry.config.__name__}, got {type(config).__name__}"
        )
    return config


def _check_examples(few_shot: FewShot, model: CLIP, prompts: ClassPrompts) -> None:
    if few_shot.images.shape[-1] != model.image_size:
        raise UserError(
            f"few-shot images are {few_shot.images.shape[-1]} pixels wide, {model.id} takes "
            f"{model.image_size}: make them with FewShot.from_dataset(..., model.preprocess)"
        )
    highest = int(few_shot.labels.max())
    if highest >= len(prompts):
        raise UserError(
            f"a few-shot image has label {highest}, the class list holds {len(prompts)} names"
        )
