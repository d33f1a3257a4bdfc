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
from cliquetta.methods.registry import register
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
    """V + pi(x): the context (B, M, D) of each image, from unit features (B, E)."""
    hidden = F.relu(F.linear(features, learned["down.weight"], learned["down.bias"]))
    shift = F.linear(hidden, learned["up.weight"], learned["up.bias"])
    return learned["context"] + shift[:, None]


def cocoop_logits(
    model: CLIP,
    tokens: coop.Tokens,
    learned: coop.Learned,
    features: Tensor,
    *,
    chunk: int = 512,
) -> Tensor:
    """Scale * cos(image, its own texts): (B, N) of unit image features (B, E)."""
    B, N = len(features), len(tokens[0])
    ids, positions = (each.repeat(B, 1) for each in tokens)
    context = image_context(learned, features).repeat_interleave(N, dim=0)
    text = model.encode_text(
        ids, context=context, positions=positions, normalize=True, chunk=chunk
    ).view(B, N, -1)
    return model.scale * torch.einsum("be,bne->bn", features, text)


def initial_parameters(
    model: CLIP, config: CoCoOpConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Context and network before training."""
    width = model.require_text().config.width
    hidden = config.hidden_dim or max(1, model.embed_dim // 16)
    down = coop.initial_linear(model.embed_dim, hidden, generator)
    up = coop.initial_linear(hidden, width, generator)
    context = coop.initial_context(
        model, config.context_init, config.context_length, generator
    )
    names = "context", "down.weight", "down.bias", "up.weight", "up.bias"
    values = (value.to(model.device) for value in (context, *down, *up))
    return dict(zip(names, values, strict=True))


def fit_cocoop(task: FitTask, config: CoCoOpConfig) -> dict[str, Tensor]:
    """``context`` (M, D) and the network: ``down.*`` (E -> hidden), ``up.*`` (hidden -> D)."""
    model, prompts = task.model, task.prompts
    start = initial_parameters(model, config, torch.Generator().manual_seed(task.seed))
    tokens = coop.prompt_tokens(model, prompts, len(start["context"]))
    return learn(start, partial(cocoop_logits, model, tokens), task, config)


@register("cocoop", fit=fit_cocoop)
class CoCoOp(FeatureLevel, FewShotAdapter):
    """Learned context that a small network shifts for every image."""

    needs = frozenset({"text", "text-prompts"})
    config: CoCoOpConfig

    def _setup(self) -> None:
        model, prompts, config = self.model, self.prompts, self.config
        width, hidden = (
            model.require_text().config.width,
            self.tensor("down.bias", None).shape[0],
        )
        self.learned = {
            "context": self.tensor("context", None, width),
            "down.weight": self.tensor("down.weight", hidden, model.embed_dim),
            "down.bias": self.tensor("down.bias", hidden),
            "up.weight": self.tensor("up.weight", width, hidden),
            "up.bias": self.tensor("up.bias", width),
        }
        self.tokens = coop.prompt_tokens(model, prompts, len(self.learned["context"]))
        self.chunk: int = config.text_chunk

    def _predict_features(self, features: Tensor) -> Prediction:
        images = max(1, self.chunk // len(self.prompts))
        logits = partial(
            cocoop_logits, self.model, self.tokens, self.learned, chunk=self.chunk
        )
        return Prediction(
            torch.cat([logits(part) for part in torch.split(features[:, 0], images)])
        )
