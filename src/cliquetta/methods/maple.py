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
from cliquetta.methods.registry import register
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
    """Tokens of the image tower: linear maps of the textual ones, block by block.

    ``context`` (M, D_t), ``deep`` (J-1, M, D_t), ``map.weight`` (J, D_v, D_t), its bias
    (J, D_v).
    """
    tokens = torch.cat([learned["context"][None], learned["deep"]])  # (J, M, D_t)
    visual = tokens @ learned["map.weight"].mT + learned["map.bias"][:, None]
    return TokenPrompts(visual.unbind(), "end")


def text_tokens(model: CLIP, prompts: ClassPrompts, config: MaPLeConfig) -> coop.Tokens:
    """Token ids of the class texts and the positions of the learned tokens in them."""
    if not config.context_init:
        return coop.prompt_tokens(model, prompts, config.context_length)
    words = len(model.tokenizer.encode(config.context_init))
    if words < config.context_length:
        raise UserError(
            f"{config.context_init!r} has {words} tokens, {config.context_length} are to be "
            "learned: give more words or none"
        )
    ids = model.tokenizer(prompts.texts(f"{config.context_init} {{}}.")).to(
        model.device
    )
    positions = model.require_text().word_positions(config.context_length)
    return ids, positions.expand(len(prompts), -1)


def text_features(model: CLIP, tokens: coop.Tokens, learned: coop.Learned) -> Tensor:
    """Unit features (N, E) of the prompted class texts."""
    ids, positions = tokens
    context, deep = learned["context"], learned["deep"].unbind()
    return model.encode_text(
        ids, context=context, positions=positions, deep=deep, normalize=True
    )


def maple_logits(
    model: CLIP, tokens: coop.Tokens, learned: coop.Learned, pixels: Tensor
) -> Tensor:
    """Scale * cos(prompted image, prompted text): (B, N)."""
    images = model.encode_image(pixels, tokens=visual_prompts(learned), normalize=True)
    return model.scale * images @ text_features(model, tokens, learned).T


def initial_parameters(
    model: CLIP, config: MaPLeConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Tokens and maps before training."""
    text, image = model.require_text().config, model.require_vit().config
    depth = min(config.depth, text.layers, image.layers)
    M = config.context_length
    context = coop.initial_context(model, config.context_init, M, generator)[:M]
    deep = coop.INIT_STD * torch.randn(depth - 1, M, text.width, generator=generator)
    first, other = (
        coop.initial_linear(text.width, image.width, generator) for _ in range(2)
    )
    pairs = zip(first, other, strict=True)  # the later blocks start alike
    weight, bias = (torch.stack([a, *[b] * (depth - 1)]) for a, b in pairs)
    start = {"context": context, "deep": deep, "map.weight": weight, "map.bias": bias}
    return {name: value.to(model.device) for name, value in start.items()}


def fit_maple(task: FitTask, config: MaPLeConfig) -> dict[str, Tensor]:
    """The tensors that :func:`visual_prompts` names."""
    model, prompts = task.model, task.prompts
    start = initial_parameters(model, config, torch.Generator().manual_seed(task.seed))
    tokens = text_tokens(model, prompts, config)
    return learn(start, partial(maple_logits, model, tokens), task, config)


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
        model, prompts, config = self.model, self.prompts, self.config
        text, image = model.require_text().config, model.require_vit().config
        depth, M = min(config.depth, text.layers, image.layers), config.context_length
        learned = {
            "context": self.tensor("context", M, text.width),
            "deep": self.tensor("deep", depth - 1, M, text.width),
            "map.weight": self.tensor("map.weight", depth, image.width, text.width),
            "map.bias": self.tensor("map.bias", depth, image.width),
        }
        self.visual = visual_prompts(learned)
        with torch.no_grad():
            self.classifier = text_features(
                model, text_tokens(model, prompts, config), learned
            )

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        features = self.model.encode_image(
            batch.images, tokens=self.visual, normalize=True
        )
        return Prediction(self.model.scale * features @ self.classifier.T)

    def frozen_model(self) -> FrozenModel:
        """The image tower with its tokens, and the prompted texts."""
        visual = PromptedTower(self.model.visual, self.visual)
        return FrozenModel(self.model, self.classifier, visual=visual)
