"""CoCoOp: CoOp whose context moves with the image.

Zhou et al., Conditional Prompt Learning for Vision-Language Models, CVPR 2022. A small
network (linear, ReLU, linear) reads the unit image feature x, and its output pi(x) is
added to every context token: V_m(x) = V_m + pi(x). Each image therefore has N texts of
its own.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods import coop
from cliquetta.methods.building.config import Count
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitTask,
    TextTraining,
    learn,
)
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import CLIP
from cliquetta.types import Prediction


@dataclass(frozen=True)
class CoCoOpConfig(TextTraining):
    """The authors' defaults."""

    epochs: Count | None = 10
    """Passes over the examples; ``None``: by number of shots, as CoOp."""
    batch_size: Count = 1  # Images per step; each costs a pass of all class texts.
    context_init: str = "a photo of a"
    """Words whose embeddings initialise the context. Empty: ``context_length`` random tokens."""
    context_length: Count = 4  # Number of context tokens, if ``context_init`` is empty.
    hidden_dim: Count | None = None
    """Width of the network's hidden layer; ``None``: a sixteenth of the features' width."""
    text_chunk: Count = 2048
    """Texts encoded at once when predicting. Bounds memory only."""


def image_context(learned: coop.Learned, features: Tensor) -> Tensor:
    """Shift the context by pi(x): (B, M, D) of unit features (B, E), one per image."""
    # pi(x): linear, ReLU, linear
    hidden = F.linear(features, learned["down.weight"], learned["down.bias"])
    hidden = F.relu(hidden)

    # (B, D)
    shift = F.linear(hidden, learned["up.weight"], learned["up.bias"])

    # V_m(x) = V_m + pi(x)
    return learned["context"] + shift[:, None]


def cocoop_logits(
    model: CLIP,
    tokens: coop.Tokens,
    learned: coop.Learned,
    features: Tensor,
    *,
    chunk: int = 512,
) -> Tensor:
    """Return scale * cos(image, its texts): (B, N) of unit image features (B, E)."""
    ids, positions = tokens
    images = len(features)
    classes = len(ids)

    # every class text once per image, with the context of that image
    context = image_context(learned, features).repeat_interleave(classes, dim=0)
    text = model.encode_text(
        ids.repeat(images, 1),
        context=context,
        positions=positions.repeat(images, 1),
        normalize=True,
        chunk=chunk,
    )
    text = text.view(images, classes, -1)
    return model.scale * torch.einsum("be,bne->bn", features, text)


def initial_parameters(
    model: CLIP, config: CoCoOpConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw the context and the network before training."""
    # the network: linear, ReLU, linear
    hidden = config.hidden_dim or max(1, model.embed_dim // 16)
    width = model.require_text().config.width
    down, down_bias = coop.initial_linear(model.embed_dim, hidden, generator)
    up, up_bias = coop.initial_linear(hidden, width, generator)

    # V, before the network moves it
    context = coop.initial_context(
        model, config.context_init, config.context_length, generator
    )
    start = {
        "context": context,
        "down.weight": down,
        "down.bias": down_bias,
        "up.weight": up,
        "up.bias": up_bias,
    }
    return {name: value.to(model.device) for name, value in start.items()}


def fit_cocoop(task: FitTask, config: CoCoOpConfig) -> dict[str, Tensor]:
    """Fit ``context`` (M, D) and the network.

    ``down.*`` maps E to the hidden width, ``up.*`` that to D.
    """
    generator = torch.Generator().manual_seed(task.seed)
    start = initial_parameters(task.model, config, generator)

    # class texts with room for the context
    tokens = coop.prompt_tokens(task.model, task.prompts, len(start["context"]))

    # cross-entropy of the cosine logits, by SGD
    return learn(start, partial(cocoop_logits, task.model, tokens), task, config)


@register("cocoop", fit=fit_cocoop)
class CoCoOp(FeatureLevel, FewShotAdapter):
    """Learned context that a small network shifts for every image."""

    needs = frozenset({"text", "text-prompts"})
    config: CoCoOpConfig

    def _setup(self) -> None:
        model = self.model

        # what was fitted, in the shapes that this model takes
        width = model.require_text().config.width
        hidden = len(self.tensor("down.bias", None))
        context = self.tensor("context", None, width)
        self.learned = {
            "context": context,
            "down.weight": self.tensor("down.weight", hidden, model.embed_dim),
            "down.bias": self.tensor("down.bias", hidden),
            "up.weight": self.tensor("up.weight", width, hidden),
            "up.bias": self.tensor("up.bias", width),
        }

        # class texts with room for it
        self.tokens = coop.prompt_tokens(model, self.prompts, len(context))
        self.chunk: int = self.config.text_chunk

    def _predict_features(self, features: Tensor) -> Prediction:
        # as many images at once as their texts fit into a chunk
        images = max(1, self.chunk // len(self.prompts))
        logits = [
            cocoop_logits(
                self.model, self.tokens, self.learned, group, chunk=self.chunk
            )
            for group in torch.split(features[:, 0], images)
        ]
        return Prediction(torch.cat(logits))
