"""The two worlds of ``accuracy.py``: a model, sets under shift, and what may be fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import real_sets

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.corruptions import CORRUPTIONS, STANDARD
from cliquetta.data.dataset import Dataset
from cliquetta.data.shifts import Shift, ShiftedDataset, parse_dataset_id
from cliquetta.methods._shared.support_set import FewShot
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

SHOTS = 16
MICRO_SHIFTS = (
    "gaussian_noise",
    "defocus_blur",
    "contrast",
    "jpeg_compression",
    "fog",
    "pixelate",
    "greyscale",
    "motion_blur",
)
MICRO_DEVELOPMENT = MICRO_SHIFTS[:4]
CLEAN = "clean"


class World(Protocol):
    """What a comparison is run on."""

    model: CLIP
    views: int
    """Views that view methods get unless told otherwise."""

    def sets(self, wanted: Sequence[str], severities: Sequence[int]) -> list[str]:
        """Ids of the sets that words such as ``default`` stand for."""
        ...

    def draw(self, id: str, cycle: int) -> Dataset:
        """The set, its noise drawn from ``cycle``."""
        ...

    def kind(self, id: str) -> str:
        """``dev`` (settings may be chosen on it), ``report`` or ``clean``."""
        ...

    def prompts(self, dataset: Dataset) -> ClassPrompts:
        """The class list of a set, as text or as fixed features."""
        ...

    @property
    def examples(self) -> FewShot | None:
        """Labelled training images for few-shot methods, if there are any."""
        ...


class MicroWorld:
    """The bundled model on the bundled pictures."""

    views = 16

    def __init__(self, device: str, dtype: str) -> None:
        self.model = create_model("micro", device=device, dtype=dtype)
        self.base = get_dataset("bundled")

    def sets(self, wanted: Sequence[str], severities: Sequence[int]) -> list[str]:
        """``default``, ``all15``, ``all17``, ``clean``, ``name`` or ``name:severity``."""
        groups = {"default": MICRO_SHIFTS, "all15": STANDARD, "all17": tuple(CORRUPTIONS)}
        found: list[str] = []
        for word in wanted or ["default"]:
            for name in groups.get(word, (word,)):
                plain = name == CLEAN or ":" in name
                found += [name] if plain else [f"{name}:{severity}" for severity in severities]
        for id in found:
            self.draw(id, 0)  # an unknown name is refused before the first run
        return list(dict.fromkeys(found))

    def draw(self, id: str, cycle: int) -> Dataset:
        """The bundled test pictures under the shift."""
        if id == CLEAN:
            return self.base
        name, _, severity = id.partition(":")
        return ShiftedDataset(self.base, Shift(name, int(severity)), seed=cycle)

    def kind(self, id: str) -> str:
        """Which role a set has."""
        if id == CLEAN:
            return "clean"
        return "dev" if id.partition(":")[0] in MICRO_DEVELOPMENT else "report"

    def prompts(self, dataset: Dataset) -> ClassPrompts:
        """The ten names in their template."""
        return dataset.prompts

    @cached_property
    def examples(self) -> FewShot:
        """16 clean training pictures a class."""
        train = get_dataset("bundled-fewshot")
        return FewShot.from_dataset(train, SHOTS, self.model.preprocess)


def real_kind(id: str) -> str:
    """Role of a set of the real tower; a development corruption stays one on any pictures."""
    base, shift = parse_dataset_id(id)
    name = base.partition("/")[0]
    if name in real_sets.DEVELOPMENT or (shift is not None and shift.name in MICRO_DEVELOPMENT):
        return "dev"
    return "clean" if name in real_sets.CLEAN and shift is None else "report"


class RealWorld:
    """OpenAI's ViT-B/16 image tower with fixed text on real pictures."""

    views = 64
    examples = None

    def __init__(self, shared: Path, real: Path | None, device: str, dtype: str) -> None:
        self.data = real_sets.RealSets(shared, real)
        self.model = self.data.tower(device=device, dtype=dtype)

    def sets(self, wanted: Sequence[str], severities: Sequence[int]) -> list[str]:
        """``default`` or ids of :mod:`real_sets`; severities are written behind ids here."""
        del severities
        found: list[str] = []
        for word in wanted or ["default"]:
            found += real_sets.DEFAULT_SETS if word == "default" else [word]
        for id in found:
            self.data.get(id)
        return list(dict.fromkeys(found))

    def draw(self, id: str, cycle: int) -> Dataset:
        """The set of an id."""
        return self.data.get(id, seed=cycle)

    def kind(self, id: str) -> str:
        """Which role a set has."""
        return real_kind(id)

    def prompts(self, dataset: Dataset) -> ClassPrompts:
        """Names with embeddings of the text bank."""
        return self.data.prompts(dataset.names)
