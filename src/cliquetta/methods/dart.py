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
from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.config import (
    Count,
    NonNegative,
    NonNegativeCount,
    Positive,
    Weight,
    read_presets,
)
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.building.views import (
    SelectiveConfig,
    ViewKind,
    confident_views,
    mean_logits,
    near_one,
)
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
        model = self.model
        block = self.config.block
        self.tower = model.require_vit()
        depth = len(self.tower.blocks)
        if not 0 <= block < depth:
            raise UserError(
                f"block {block} does not exist: {model.id} has blocks 0 to {depth - 1}"
            )
        self.template = LearnableTemplate(
            model, self.prompts, chunk=self.config.text_chunk, by="DART"
        )
        self.scale = model.scale

        # the visual prompt starts uniform in [-1, 1), (P, 2, D): keys and values
        shape = (self.config.prompt_length, 2, self.tower.config.width)
        generator = torch.Generator().manual_seed(self.seed)
        visual = 2 * torch.rand(shape, generator=generator) - 1
        visual = visual.to(model.device)
        self.memory.declare("visual", visual)

        # one retained prompt of each kind per class, which starts as the prompts do
        classes = len(self.prompts)
        context = self.template.start.repeat(classes, 1, 1)
        self.memory.declare("retained_visual", visual.repeat(classes, 1, 1, 1))
        self.memory.declare("retained_context", context)

    @torch.no_grad()
    def _predict(self, batch: Batch) -> Prediction:
        # an image without views is its only one
        images = batch.images[:, None] if batch.views is None else batch.views

        # one after the other
        logits = []
        losses = []
        for views in images:
            image_logits, loss = self._next(views)
            logits.append(image_logits)
            losses.append(loss)
        return Prediction(torch.stack(logits), {"loss": torch.stack(losses)})

    def _next(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the next image of the stream from its views (V, 3, S, S).

        Returns:
            Its logits (N,), and the loss before learning.

        """
        fraction = self.config.selection_fraction
        hidden = self._hidden_states(views)

        # (1) the context starts near the retained ones, the visual prompt goes on from
        # the last image
        context = self._mix(self.memory["retained_context"], self.template.start)
        visual = self.memory["visual"]

        # (2) one step on both, down the marginal entropy of the confident views
        text = self.template.features(context[None])[0]
        before = self.scale * self.encode(hidden, visual) @ text.T  # (V, N)
        confident_before = confident_views(before, fraction)
        context, visual, loss = self._step(
            hidden[confident_before], context=context, visual=visual, text=text
        )

        # (3) the views that are confident under the new prompts name a class, whose
        # retained visual prompt is mixed in
        text = self.template.features(context[None])[0]
        after = self.scale * self.encode(hidden, visual) @ text.T
        confident_after = confident_views(after, fraction)
        label = mean_logits(after, confident_after).argmax()
        visual = self._mix(self.memory["retained_visual"][label], visual)

        # (4) the plain view is scored, or the confident ones
        plain = self.encode(hidden[:1], visual)
        logits = self.scale * (plain @ text.T)[0]
        if self.config.score == "views":
            logits = mean_logits(after, confident_after)
        elif self.config.score == "mixed":
            logits = 0.5 * mean_logits(before, confident_before) + 0.5 * logits

        # (5) the retained prompts of the predicted class move
        self._remember(logits, context, visual)
        return logits, loss

    def _hidden_states(self, views: Tensor) -> Tensor:
        """Run views up to the block that takes the prompt.

        Their hidden states there do not depend on the prompt.
        """
        states = []
        for part in torch.split(views, self.config.chunk):
            embedded = self.tower.embed(part)
            states.append(self.tower.run(embedded, stop=self.config.block))
        return torch.cat(states)

    def _mix(self, retained: Tensor, current: Tensor) -> Tensor:
        """Return the prompt at which an image starts: a little of what is retained."""
        weight = self.config.retained_weight
        return weight * retained + (1 - weight) * current

    def encode(self, hidden: Tensor, visual: Tensor) -> Tensor:
        """Encode hidden states under a visual prompt (P, 2, D): features (V, E)."""
        block = self.config.block
        prefix = {block: Prefix(visual[None])}

        # from the prompted block to the end, some views at a time
        features = []
        for part in torch.split(hidden, self.config.chunk):
            end = self.tower.run(part, block, prefix=prefix)
            features.append(self.tower.pool(end))
        return l2_normalize(torch.cat(features))

    def _step(
        self, hidden: Tensor, *, context: Tensor, visual: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take an AdamW step on the prompts down the entropy of selected views.

        Args:
            hidden: Hidden states of the views at the prompted block.
            context: (N, M, D), one per class.
            visual: Visual prompt (P, 2, D).
            text: Class features (N, E) under ``context``.

        Returns:
            Context and visual prompt after the step, and the loss before it.

        """
        with torch.enable_grad():
            visual_leaf = visual.detach().requires_grad_()
            features = self.encode(hidden, visual_leaf)

            # gradients of the loss by what comes out of the two towers
            feature_leaf = features.detach().requires_grad_()
            text_leaf = text.detach().requires_grad_()
            loss = marginal_entropy(self.scale * feature_leaf @ text_leaf.T)
            by_features, by_text = torch.autograd.grad(loss, (feature_leaf, text_leaf))

            # back through the image tower; scaled to near one, so that half precision
            # neither overflows nor loses small gradients
            scaled, factor = near_one(by_features[None])
            (by_visual,) = torch.autograd.grad(features, visual_leaf, scaled[0])
            by_visual = by_visual / factor.flatten()

        # back through the text tower, which does the same
        by_context = self.template.gradient(context[None], by_text[None])[0]

        # AdamW, whose moments start again with every image
        adam = Adam(self.config.lr, weight_decay=self.config.weight_decay)
        context = adam_step(AdamState.begin(context), by_context, adam).values
        visual = adam_step(AdamState.begin(visual), by_visual, adam).values
        return context, visual, loss.detach()

    def _remember(self, logits: Tensor, context: Tensor, visual: Tensor) -> None:
        """Move the retained prompts of the predicted class towards the image's."""
        label = logits.argmax()
        learned = {"retained_context": context[label], "retained_visual": visual}

        # they move by 1 - exp(-max logit / 5000)
        decay = torch.exp(-logits[label] / self.config.ema_scale)
        for name, prompt in learned.items():
            retained = self.memory[name].clone()
            retained[label] = decay * retained[label] + (1 - decay) * prompt
            self.memory[name] = retained

        # the next image starts from this one's visual prompt
        self.memory["visual"] = visual
