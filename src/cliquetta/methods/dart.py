"""DART: tune text and visual prompts on each image, and remember them by class.

Liu et al., DART: Dual-Modal Adaptive Online Prompting and Knowledge Retention for
Test-Time Adaptation, AAAI 2024. A context per class and a key/value prompt in one
visual block take one step down TPT's loss. Retention prompts, one of each kind per
class, remember what was learned for the images predicted as that class, and later
images start near them.

Per image, in order of the stream: (1) context = 0.1 retained + 0.9 start, the visual
prompt goes on from the last image; (2) one step on both; (3) the confident views under
the new prompts name a class, whose retained visual prompt is mixed in; (4) the plain
view is scored; (5) the retained prompts of the predicted class move by 1 - exp(-max
logit / 5000).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.config import (
    Count,
    NonNegative,
    NonNegativeCount,
    Positive,
    Weight,
    read_presets,
)
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.building.views import (
    SelectiveConfig,
    ViewKind,
    confident_views,
    mean_logits,
    near_one,
)
from cliquetta.methods.registry import register
from cliquetta.model.block import Prefix
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class DARTConfig(SelectiveConfig):
    """DART with its authors' defaults."""

    view_kind: ViewKind = "zoom-crop"
    """How views are made; presets hold the zoom per dataset."""
    lr: NonNegative = 5e-3  # Learning rate of AdamW, for both kinds of prompts.
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW, PyTorch's default in the official code."""
    block: NonNegativeCount = 1
    """Visual block, counted from 0, that takes the key/value prompt."""
    prompt_length: Count = 1  # Key/value pairs of the visual prompt.
    retained_weight: Weight = 0.1
    """Weight of retained prompts in those that an image starts from."""
    ema_scale: Positive = 5000.0
    """Retained prompts move by 1 - exp(-max logit / ema_scale)."""
    score: Literal["plain", "views", "mixed"] = "plain"
    """Which logits are returned: of the plain view under the learned prompts (the
    active code), the mean of the confident views, or half those before learning and
    half the plain view after."""
    text_chunk: Count = 1024  # Class texts encoded at once. Bounds memory only.


@register("dart", tuned=read_presets("dart", DARTConfig))
class DART(Adapter):
    """Tunes text and visual prompts on each image and remembers them by class."""

    batch_dependence = BatchDependence.SEQUENTIAL
    needs = frozenset({"text-prompts", "visual-prefix"})
    config: DARTConfig

    def _setup(self) -> None:
        model, prompts, config = self.model, self.prompts, self.config
        self.tower = model.require_vit()
        if not 0 <= config.block < len(self.tower.blocks):
            raise UserError(
                f"block {config.block} does not exist: {model.id} has blocks 0 to "
                f"{len(self.tower.blocks) - 1}"
            )
        self.template = LearnableTemplate(
            model, prompts, chunk=config.text_chunk, by="DART"
        )
        self.scale = model.scale
        N, D = len(prompts), self.tower.config.width
        generator = torch.Generator().manual_seed(self.seed)
        start = 2 * torch.rand(config.prompt_length, 2, D, generator=generator) - 1
        start = start.to(model.device)
        self.memory.declare("visual", start)
        self.memory.declare("retained_visual", start.repeat(N, 1, 1, 1))
        self.memory.declare("retained_context", self.template.start.repeat(N, 1, 1))

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        images = batch.images[:, None] if batch.views is None else batch.views
        logits, losses = zip(*(self._next(views) for views in images), strict=True)
        return Prediction(torch.stack(logits), {"loss": torch.stack(losses)})

    def _next(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N,) of the next image of the stream, from its views (V, 3, S, S)."""
        retained = self.config.retained_weight
        embedded = (
            self.tower.embed(part) for part in torch.split(views, self.config.chunk)
        )
        before_prompt = [
            self.tower.run(part, stop=self.config.block) for part in embedded
        ]
        hidden = torch.cat(before_prompt)  # the same whatever the prompt
        visual = self.memory["visual"]
        context = (
            retained * self.memory["retained_context"]
            + (1 - retained) * self.template.start
        )
        text = self.template.features(context[None])[0]
        before = self.scale * self.encode(hidden, visual) @ text.T
        sure_before = confident_views(before, self.config.selection_fraction)
        context, visual, loss = self._step(hidden[sure_before], context, visual, text)

        text = self.template.features(context[None])[0]
        after = self.scale * self.encode(hidden, visual) @ text.T
        sure_after = confident_views(after, self.config.selection_fraction)
        named = mean_logits(after, sure_after).argmax()
        visual = (
            retained * self.memory["retained_visual"][named] + (1 - retained) * visual
        )
        logits = self.scale * (self.encode(hidden[:1], visual) @ text.T)[0]
        if self.config.score == "views":
            logits = mean_logits(after, sure_after)
        elif self.config.score == "mixed":
            logits = 0.5 * mean_logits(before, sure_before) + 0.5 * logits
        self._remember(logits, context, visual)
        return logits, loss

    def encode(self, hidden: Tensor, visual: Tensor) -> Tensor:
        """Unit features (V, E) of hidden states under a visual prompt (P, 2, D)."""
        block = self.config.block
        prefix = {block: Prefix(visual[None])}
        parts = torch.split(hidden, self.config.chunk)
        ends = (self.tower.run(part, block, prefix=prefix) for part in parts)
        return l2_normalize(torch.cat([self.tower.pool(end) for end in ends]))

    def _step(
        self, hidden: Tensor, context: Tensor, visual: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Context (N, M, D), visual prompt (P, 2, D), loss: an AdamW step on selected views."""
        with torch.enable_grad():
            leaf = visual.detach().requires_grad_()
            features = self.encode(hidden, leaf)
            ends = features.detach().requires_grad_(), text.detach().requires_grad_()
            loss = marginal_entropy(self.scale * ends[0] @ ends[1].T)
            by_features, by_text = torch.autograd.grad(loss, ends)
            scaled, factor = near_one(by_features[None])
            by_visual = (
                torch.autograd.grad(features, leaf, scaled[0])[0] / factor.flatten()
            )
        by_context = self.template.gradient(context[None], by_text[None])[0]
        adam = Adam(self.config.lr, weight_decay=self.config.weight_decay)
        context = adam_step(AdamState.begin(context), by_context, adam).values
        visual = adam_step(AdamState.begin(visual), by_visual, adam).values
        return context, visual, loss.detach()

    def _remember(self, logits: Tensor, context: Tensor, visual: Tensor) -> None:
        """Move the retained prompts of the predicted class towards those of this image."""
        label = logits.argmax()
        stay = torch.exp(-logits[label] / self.config.ema_scale)
        for name, now in (
            ("retained_context", context[label]),
            ("retained_visual", visual),
        ):
            moved = self.memory[name].clone()
            moved[label] = stay * moved[label] + (1 - stay) * now
            self.memory[name] = moved
        self.memory["visual"] = visual
