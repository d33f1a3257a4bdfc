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
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import CLIP, FrozenModel
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction

ClassPosition = Literal["end", "middle", "front"]
INIT_STD = 0.02
# Ids (N, L) of class texts, positions (N, M) of learned tokens.
Tokens = tuple[Tensor, Tensor]
# Learned tensors by name.
Learned = Mapping[str, Tensor]


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
    """Leave room for ``count`` context tokens in the class texts.

    Args:
        model: Whose tokenizer splits the class names.
        prompts: The classes.
        count: Number of context tokens.
        position: Where the class name stands among them.

    Returns:
        Token ids (N, L), and where the context tokens stand (N, count).

    """
    tokenizer = model.tokenizer

    # context tokens before the class name and behind it
    before = {"end": count, "middle": count // 2, "front": 0}[position]
    after = count - before

    # padding everywhere
    ids = torch.full((len(prompts), tokenizer.context_length), tokenizer.pad)
    positions = torch.zeros(len(prompts), count, dtype=torch.int64)

    for row, text in enumerate(prompts.texts("{}.")):
        name = tokenizer.encode(text)
        stop = len(tokenizer.encode(text[:-1]))  # of the name, without the full stop

        # [start] [V_1] ... [name], with zeros for the context
        first = len(tokenizer.prefix)
        tokens = [*tokenizer.prefix, *[0] * before, *name[:stop]]

        # ... [V_M] [.] [end]
        second = len(tokens)
        tokens += [*[0] * after, *name[stop:], *tokenizer.suffix]
        if len(tokens) > tokenizer.context_length:
            raise UserError(
                f"class {text[:-1]!r} with {count} context tokens takes {len(tokens)} "
                f"tokens, the model's context holds {tokenizer.context_length}: use "
                "fewer context tokens"
            )

        # the rest of the row stays padding
        ids[row, : len(tokens)] = torch.tensor(tokens)
        positions[row, :before] = torch.arange(first, first + before)
        positions[row, before:] = torch.arange(second, second + after)
    return ids.to(model.device), positions.to(model.device)


def initial_context(
    model: CLIP, words: str, count: int, generator: torch.Generator
) -> Tensor:
    """Embed ``words`` (M, D), or draw ``count`` tokens from N(0, 0.02^2), float32."""
    if words:
        return model.context(words).float()
    width = model.require_text().config.width
    drawn = torch.randn(count, width, generator=generator)
    return INIT_STD * drawn.to(model.device)


def initial_linear(
    inputs: int, outputs: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw weight (outputs, inputs) and bias as torch: uniform in ±1 / sqrt(inputs)."""
    # in [0, 1)
    weight = torch.rand(outputs, inputs, generator=generator)
    bias = torch.rand(outputs, generator=generator)

    # in [-bound, bound)
    bound = inputs**-0.5
    return (2 * weight - 1) * bound, (2 * bias - 1) * bound


def text_features(model: CLIP, tokens: Tokens, context: Tensor) -> Tensor:
    """Encode the class texts with a learned context: unit features (N, E)."""
    ids, positions = tokens
    return model.encode_text(ids, context=context, positions=positions, normalize=True)


def coop_logits(
    model: CLIP, tokens: Tokens, learned: Learned, features: Tensor
) -> Tensor:
    """Return scale * cos(image, text with context V), (B, N), of features (B, E)."""
    text = text_features(model, tokens, learned["context"])
    return model.scale * features @ text.T


def fit_coop(task: FitTask, config: CoOpConfig) -> dict[str, Tensor]:
    """Fit ``context`` (M, D), or (N, M, D) if class-specific."""
    model = task.model
    prompts = task.prompts
    generator = torch.Generator().manual_seed(task.seed)
    context = initial_context(
        model, config.context_init, config.context_length, generator
    )
    tokens = prompt_tokens(model, prompts, len(context), config.class_position)

    # one context per class: words start alike for all, random tokens do not
    if config.class_specific:
        context = context.repeat(len(prompts), 1, 1)
        if not config.context_init:
            drawn = torch.randn(context.shape, generator=generator)
            context = INIT_STD * drawn.to(model.device)

    # cross-entropy of the cosine logits, by SGD
    return learn(
        {"context": context}, partial(coop_logits, model, tokens), task, config
    )


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
        width = self.model.require_text().config.width
        if self.config.class_specific:
            context = self.tensor("context", len(self.prompts), None, width)
        else:
            context = self.tensor("context", None, width)

        # the learned context makes a fixed text classifier
        tokens = prompt_tokens(
            self.model, self.prompts, context.shape[-2], self.config.class_position
        )
        with torch.no_grad():
            self.classifier = text_features(self.model, tokens, context)

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(self.model.scale * features[:, 0] @ self.classifier.T)

    def frozen_model(self) -> FrozenModel:
        """Freeze the image tower with the texts of the learned context."""
        return FrozenModel(self.model, self.classifier)

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Select the contexts of classes; a shared one serves any class."""
        context = fitted["context"]
        if context.ndim == 2:
            return dict(fitted)
        rows = cls.indices_of(known, wanted, by="class-specific CoOp")
        return {**fitted, "context": context[rows]}
