"""SCAP's engine and its oracle side by side."""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.methods.scap.cliques import Cliques
from cliquetta.methods.scap.released import Rules
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction
from tests._helpers.scenes import NAMES
from tests.reference.scap_equations import ReferenceSettings
from tests.reference.scap_reference import ReferenceResult, ReferenceSCAP


@dataclass(frozen=True)
class VariedConfig(SCAPConfig):
    """A config with single rules of the released code, which no preset has."""

    varied: Rules = field(default_factory=Rules)

    @property
    def rules(self) -> Rules:
        return self.varied


def scap_config(**options: Any) -> SCAPConfig:
    """A config from fields of :class:`SCAPConfig` and of :class:`Rules`."""
    names = {field.name for field in fields(Rules)}
    rules = {name: options.pop(name) for name in names & options.keys()}
    return (
        VariedConfig(**options, varied=Rules(**rules))
        if rules
        else SCAPConfig(**options)
    )


@dataclass
class Pair:
    """The engine and the oracle, equally set up."""

    engine: SCAP
    oracle: ReferenceSCAP

    def step(self, images: Tensor) -> tuple[Prediction, ReferenceResult]:
        """Both on one batch."""
        return self.engine.predict(Batch(images)), self.oracle.predict(images)


def pair(
    model: CLIP,
    options: dict[str, Any],
    *,
    names: tuple[str, ...] = NAMES,
    templates: tuple[str, ...] = ("a photo of a {}.",),
    seed: int = 0,
) -> Pair:
    """Engine and oracle with the same options (``blocks`` of one is the oracle's block)."""
    prompts = ClassPrompts(names, templates)
    engine = SCAP(model, prompts, scap_config(**options), seed=seed)
    engine.collect_evidence = True
    start = (
        engine.memory["start_prompt"],
        model.context(templates[0].split("{}")[0].strip()),
    )
    return Pair(
        engine, ReferenceSCAP(model, prompts, ReferenceSettings(**options), *start)
    )


def listed(cliques: Cliques) -> list[tuple[int, frozenset[int]]]:
    """The engine's cliques as the oracle writes them."""
    return [
        (int(label), frozenset(row.nonzero()[:, 0].tolist()))
        for label, row in zip(cliques.classes, cliques.members, strict=True)
    ]
