"""MaPLe: learned tokens in both towers and in several blocks, tied to one another.

Khattak et al., MaPLe: Multi-modal Prompt Learning, CVPR 2023. The text tower has
learned tokens behind its start token, at the input and afresh in blocks 1 ... J-1; the
image tower has, at the end of its sequence and in the same blocks, linear images of
them. Tokens and linear maps are fitted by cross-entropy, the towers stay frozen. Words
of the start that are not learned ("of a") stay.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods import coop
from cliquetta.methods.building.config import Count, Positive
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitTask,
    SGDTraining,
    learn,
)
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import CLIP, FrozenModel, PromptedTower
from cliquetta.model.vision import TokenPrompts
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class MaPLeConfig(SGDTraining):
    """The authors' setting from base to novel classes."""

    epochs: Count | None = 5
    """Passes over the examples; ``None``: by the number of shots, as CoOp."""
    batch_size: Count = 4  # Images per step.
    lr: Positive = 3.5e-3  # Learning rate at the start of the cosine schedule.
    depth: Count = 9
    """J: number of blocks with learned tokens, at most those of the smaller tower."""
    context_length: Count = 2  # Learned tokens in each block.
    context_init: str = "a photo of a"
    """Words before the class name; the first ``context_length`` tokens are learned,
    others stay. Empty: ``context_length`` random tokens."""


def visual_prompts(learned: coop.Learned) -> TokenPrompts:
    """Map the textual tokens to tokens of the image tower, block by block.

    ``context`` (M, D_t), ``deep`` (J-1, M, D_t), ``map.weight`` (J, D_v, D_t), its bias
    (J, D_v).
    """
    # one set of tokens per block, (J, M, D_t)
    tokens = torch.cat([learned["context"][None], learned["deep"]])

    # each mapped by its block, (J, M, D_v)
    mapped = tokens @ learned["map.weight"].mT
    visual = mapped + learned["map.bias"][:, None]
    return TokenPrompts(visual.unbind(), "end")


def text_tokens(model: CLIP, prompts: ClassPrompts, config: MaPLeConfig) -> coop.Tokens:
    """Return the token ids of the class texts, and places of the learned tokens."""
    length = config.context_length
    if not config.context_init:
        return coop.prompt_tokens(model, prompts, length)

    words = len(model.tokenizer.encode(config.context_init))
    if words < length:
        raise UserError(
            f"{config.context_init!r} has {words} tokens, {length} are to be "
            "learned: give more words or none"
        )
    texts = prompts.texts(f"{config.context_init} {{}}.")
    ids = model.tokenizer(texts).to(model.device)
    positions = model.require_text().word_positions(length)
    return ids, positions.expand(len(prompts), -1)


def text_features(model: CLIP, tokens: coop.Tokens, learned: coop.Learned) -> Tensor:
    """Encode the prompted class texts: unit features (N, E)."""
    ids, positions = tokens
    return model.encode_text(
        ids,
        context=learned["context"],
        positions=positions,
        deep=learned["deep"].unbind(),
        normalize=True,
    )


def maple_logits(
    model: CLIP, tokens: coop.Tokens, learned: coop.Learned, pixels: Tensor
) -> Tensor:
    """Return scale * cos(prompted image, prompted text): (B, N)."""
    prompts = visual_prompts(learned)
    images = model.encode_image(pixels, tokens=prompts, normalize=True)
    texts = text_features(model, tokens, learned)
    return model.scale * images @ texts.T


def prompted_blocks(model: CLIP, config: MaPLeConfig) -> int:
    """Return J, the number of blocks with learned tokens: no more than a tower has."""
    text_blocks = model.require_text().config.layers
    image_blocks = model.require_vit().config.layers
    return min(config.depth, text_blocks, image_blocks)


def initial_parameters(
    model: CLIP, config: MaPLeConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw the tokens and the maps before training."""
    length = config.context_length
    later = prompted_blocks(model, config) - 1  # blocks after the first

    # D_t and D_v
    text_width = model.require_text().config.width
    image_width = model.require_vit().config.width

    # tokens at the input, and afresh in every later block
    context = coop.initial_context(model, config.context_init, length, generator)
    deep = torch.randn(later, length, text_width, generator=generator)

    # a map of the first tokens, and one with which all later blocks start
    first, first_bias = coop.initial_linear(text_width, image_width, generator)
    other, other_bias = coop.initial_linear(text_width, image_width, generator)
    start = {
        "context": context[:length],
        "deep": coop.INIT_STD * deep,
        "map.weight": torch.stack([first, *[other] * later]),
        "map.bias": torch.stack([first_bias, *[other_bias] * later]),
    }
    return {name: value.to(model.device) for name, value in start.items()}


def fit_maple(task: FitTask, config: MaPLeConfig) -> dict[str, Tensor]:
    """Fit the tensors that :func:`visual_prompts` names."""
    # tokens and maps, both towers frozen
    generator = torch.Generator().manual_seed(task.seed)
    start = initial_parameters(task.model, config, generator)

    # cross-entropy of the cosine logits, by SGD
    tokens = text_tokens(task.model, task.prompts, config)
    return learn(start, partial(maple_logits, task.model, tokens), task, config)


@register(
    "maple",
    presets={
        "base_to_novel": MaPLeConfig(),
        "cross_dataset": MaPLeConfig(depth=3, lr=2.6e-3, epochs=2),
    },
    fit=fit_maple,
)
class MaPLe(FewShotAdapter):
    """Coupled learned tokens in several blocks of both towers."""

    scaled_cosines = True
    needs = frozenset({"text", "text-prompts", "visual-tokens"})
    config: MaPLeConfig

    def _setup(self) -> None:
        model = self.model
        config = self.config
        length = config.context_length
        depth = prompted_blocks(model, config)
        text_width = model.require_text().config.width
        image_width = model.require_vit().config.width
        learned = {
            "context": self.tensor("context", length, text_width),
            "deep": self.tensor("deep", depth - 1, length, text_width),
            "map.weight": self.tensor("map.weight", depth, image_width, text_width),
            "map.bias": self.tensor("map.bias", depth, image_width),
        }

        # once fitted, texts and visual tokens are fixed
        self.visual = visual_prompts(learned)
        tokens = text_tokens(model, self.prompts, config)
        with torch.no_grad():
            self.classifier = text_features(model, tokens, learned)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        features = self.model.encode_image(
            batch.images, tokens=self.visual, normalize=True
        )
        return Prediction(self.model.scale * features @ self.classifier.T)

    def frozen_model(self) -> FrozenModel:
        """Freeze the image tower with its tokens, and the prompted texts."""
        visual = PromptedTower(self.model.visual, self.visual)
        return FrozenModel(self.model, self.classifier, visual=visual)
