"""CLIPTTA: adapt by CLIP's own kind of loss, contrastive over the batch, instead of by entropy.

Lafon et al., CLIPTTA: Robust Contrastive Vision-Language Test-Time Adaptation, NeurIPS 2025; the
closed-set method. Every image is paired with the text of its predicted class; over the pairs of the
batch the loss is the entropy of image-to-text and of text-to-image probabilities,

    L(batch) = mean_i [ H(p(text_j | image_i)) + H(p(image_j | text_i)) ],

averaged with the same over images from a class-wise confident memory, plus λ times the negative
entropy of the mean prediction. Ten steps of Adam per batch on the LayerNorms of the image tower,
which are kept; then the batch is answered.

The authors' repository has no licence file and was not opened. Ours where the descriptions leave
it open: the memory holds pixels of the ``memory_shots`` images of highest probability per class;
as many entries as the batch has images are drawn from it anew for each batch; sums over the batch
are means; the answer is that after the last step. The extension to open sets (OCE loss) is left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import AdamConfig, AdamState, minimize
from cliquetta.methods._shared.cache import simulate_insertions, store
from cliquetta.methods._shared.config import Count, NonNegative, Positive, Rule
from cliquetta.methods._shared.entropy import entropy, marginal_entropy
from cliquetta.methods._shared.layernorm import LayerNormAdapter
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class CLIPTTAConfig(AdamConfig):
    """Soft contrastive adaptation, never reset."""

    lr: Positive = 1e-4
    """Learning rate of Adam."""
    steps: Count = 10
    """Adam steps per batch."""
    diversity_weight: NonNegative = 1.0
    """λ: weight of the entropy of the mean prediction."""
    memory_shots: Annotated[int, Rule("0 or more", lambda value: value >= 0)] = 4
    """Images remembered per class, as pixels; 0 learns from the batch alone."""


def soft_contrastive_loss(logits: Tensor) -> Tensor:
    """Mean entropy of both directions over the pairs of a batch, from its logits (B, N)."""
    pairs = logits[:, logits.detach().argmax(dim=-1)]  # (B, B): image i, text of image j
    return (entropy(pairs) + entropy(pairs.T)).mean()


@register(
    "cliptta",
    paper="Lafon et al., CLIPTTA: Robust Contrastive Vision-Language Test-Time Adaptation, "
    "NeurIPS 2025",
)
class CLIPTTA(LayerNormAdapter):
    """Ten contrastive steps per batch on visual LayerNorms, with a memory of sure images.

    logits = scale · cos(image under the norms learned up to this batch, text).
    """

    scaled_cosines = True
    config: CLIPTTAConfig

    def _setup(self) -> None:
        super()._setup()
        shape = (len(self.prompts), self.config.memory_shots)
        pixels = (3, self.model.image_size, self.model.image_size)
        AdamState.begin(self.tower.start).declare(self.memory, "norms")
        self.memory.declare("doubt", self.classifier.new_full(shape, torch.inf))
        self.memory.declare("images", torch.zeros(*shape, *pixels, device=self.model.device))
        generator = torch.Generator().manual_seed(self.seed)
        self.memory.declare("generator", generator.get_state())

    def _predict(self, batch: Batch) -> Prediction:
        state = AdamState.load(self.memory, "norms")
        remembered = self._recall(len(batch))

        def loss(norms: Tensor) -> Tensor:
            logits = self.logits(norms, batch.images)
            contrast = soft_contrastive_loss(logits)
            if len(remembered):
                contrast = (contrast + soft_contrastive_loss(self.logits(norms, remembered))) / 2
            return contrast - self.config.diversity_weight * marginal_entropy(logits)

        state = minimize(state, loss, self.config.steps, self.config.adam)
        state.store(self.memory, "norms")
        with torch.no_grad():
            logits = self.logits(state.values, batch.images)
        self._remember(batch.images, logits)
        return Prediction(logits.float())

    def _recall(self, count: int) -> Tensor:
        """At most ``count`` images drawn from the memory."""
        filled = self.memory["doubt"].isfinite().nonzero()
        generator = self.memory.generator("generator")
        drawn = torch.randperm(len(filled), generator=generator)[:count].to(filled.device)
        self.memory.keep("generator", generator)
        return self.memory["images"][tuple(filled[drawn].T)]

    def _remember(self, images: Tensor, logits: Tensor) -> None:
        """Keep the surest images of each predicted class."""
        if not self.config.memory_shots:
            return
        probability, labels = logits.softmax(dim=-1).max(dim=-1)
        doubt = (1 - probability).to(self.memory["doubt"].dtype)
        occupancy = simulate_insertions(self.memory["doubt"], labels, doubt)
        self.memory["doubt"] = store(self.memory["doubt"], doubt, occupancy)
        self.memory["images"] = store(self.memory["images"], images.float(), occupancy)
