"""CoOp: learned context words in front of the class name, the same for every image.

Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022. The prompt of
class n is [start] [V_1] ... [V_M] [name] [.] [end]; V is fitted by cross-entropy of the
cosine logits, both towers frozen. Once fitted it is a fixed text classifier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.config import Count
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitTask,
    TextTraining,
    learn,
)
from cliquetta.methods.registry import register
from cliquetta.model.clip import CLIP, FrozenModel
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction

ClassPosition = Literal["end", "middle", "front"]
INIT_STD = 0.02
Tokens = tuple[
    Tensor, Tensor
]  # Ids (N, L) of class texts, positions (N, M) of learned tokens.
Learned = Mapping[str, Tensor]  # Learned tensors by name.


@dataclass(frozen=True)
class CoOpConfig(TextTraining):
    """The authors' defaults; ``epochs`` follows the number of shots."""

    context_length: Count = 16
    """Number of context tokens M, if ``context_init`` is empty."""
    context_init: str = ""
    """Words whose embeddings initialise the context, such as ``a photo of a``; they
    then set M. Empty: drawn from a normal distribution of standard deviation 0.02."""
    class_specific: bool = False
    """One context per class instead of one for all; it cannot be used with new class names."""
    class_position: ClassPosition = "end"
    """Where the class name stands: after, in the middle of, or before the context."""


def prompt_tokens(
    model: CLIP, prompts: ClassPrompts, count: int, position: ClassPosition = "end"
) -> Tokens:
    """Token ids (N, L) with room for ``count`` context tokens, and where they stand (N, count)."""
    tokenizer = model.tokenizer
    head = {"end": count, "middle": count // 2, "front": 0}[position]
    first = len(tokenizer.prefix)
    ids = torch.full((len(prompts), tokenizer.context_length), tokenizer.pad)
    positions = torch.zeros(len(prompts), count, dtype=torch.int64)
    for row, text in enumerate(prompts.texts("{}.")):
        name = tokenizer.encode(text)
        length = len(tokenizer.encode(text[:-1]))  # without the full stop
        if position == "end":
            length = len(name)
        tokens = [*tokenizer.prefix, *[0] * head, *name[:length]]
        tail = len(tokens)
        tokens += [*[0] * (count - head), *name[length:], *tokenizer.suffix]
        if len(tokens) > tokenizer.context_length:
            raise UserError(
                f"class {text[:-1]!r} with {count} context tokens takes {len(tokens)} tokens, the "
                f"model's context holds {tokenizer.context_length}: use fewer context tokens"
            )
        ids[row, : len(tokens)] = torch.tensor(tokens)
        positions[row, :head] = torch.arange(first, first + head)
        positions[row, head:] = torch.arange(tail, tail + count - head)
    return ids.to(model.device), positions.to(model.device)


def initial_context(
    model: CLIP, words: str, count: int, generator: torch.Generator
) -> Tensor:
    """Embeddings (M, D) of ``words``, or ``count`` draws from N(0, 0.02^2), float32."""
    if words:
        return model.context(words).float()
    width = model.require_text().config.width
    return INIT_STD * torch.randn(count, width, generator=generator).to(model.device)


def initial_linear(
    inputs: int, outputs: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weight (outputs, inputs) and bias of a linear map, uniform in 1 / sqrt(inputs) as torch's."""
    bound = inputs**-0.5
    weight = torch.rand(outputs, inputs, generator=generator)
    bias = torch.rand(outputs, generator=generator)
    return (2 * weight - 1) * bound, (2 * bias - 1) * bound


def coop_logits(
    model: CLIP, tokens: Tokens, learned: Learned, features: Tensor
) -> Tensor:
    """Scale * cos(image, text with context V): (B, N) of unit image features (B, E)."""
    ids, positions = tokens
    text = model.encode_text(
        ids, context=learned["context"], positions=positions, normalize=True
    )
    return model.scale * features @ text.T


def fit_coop(task: FitTask, config: CoOpConfig) -> dict[str, Tensor]:
    """``context`` (M, D), or (N, M, D) if class-specific."""
    model, prompts = task.model, task.prompts
    generator = torch.Generator().manual_seed(task.seed)
    start = initial_context(
        model, config.context_init, config.context_length, generator
    )
    tokens = prompt_tokens(model, prompts, len(start), config.class_position)
    if config.class_specific:
        start = start.repeat(len(prompts), 1, 1)
        if not config.context_init:
            start = INIT_STD * torch.randn(start.shape, generator=generator).to(
                model.device
            )
    return learn({"context": start}, partial(coop_logits, model, tokens), task, config)


@register(
    "coop",
    tuned={"imagenet": CoOpConfig(context_init="a photo of a", epochs=50)},
    fit=fit_coop,
)
class CoOp(FeatureLevel, FewShotAdapter):
    """Context words learned from a few labelled images."""

    scaled_cosines = True
    needs = frozenset({"text", "text-prompts"})
    config: CoOpConfig

    def _setup(self) -> None:
        model, prompts, config = self.model, self.prompts, self.config
        width = model.require_text().config.width
        rows = (len(prompts),) if config.class_specific else ()
        context = self.tensor("context", *rows, None, width)
        ids, at = prompt_tokens(
            model, prompts, context.shape[-2], config.class_position
        )
        with torch.no_grad():
            self.classifier = model.encode_text(
                ids, context=context, positions=at, normalize=True
            )

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(self.model.scale * features[:, 0] @ self.classifier.T)

    def frozen_model(self) -> FrozenModel:
        """The image tower with the texts of the learned context."""
        return FrozenModel(self.model, self.classifier)

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """A shared context serves any class; class-specific ones serve those fitted."""
        context = fitted["context"]
        if context.ndim == 2:
            return dict(fitted)
        rows = cls.indices_of(known, wanted, by="class-specific CoOp")
        return {**fitted, "context": context[rows]}
