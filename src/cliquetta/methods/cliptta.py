"""CLIPTTA: adapt by CLIP's own kind of loss, contrastive over the batch, instead of by entropy.

Lafon et al., CLIPTTA: Robust Contrastive Vision-Language Test-Time Adaptation, NeurIPS
2025; the closed-set method. Every image is paired with the text of its predicted class;
over the pairs of a batch the loss is the entropy of image-to-text probabilities,

    L(batch) = mean_i H(p(text_j | image_i)),

less λ times the entropy of the mean prediction, summed over the batch and over images
drawn from a class-wise confident memory. Ten steps of Adam on the image tower's
LayerNorms, which stay, precede the prediction of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamConfig, AdamState, minimize
from cliquetta.methods.building.cache import simulate_insertions, store
from cliquetta.methods.building.config import (
    Count,
    NonNegative,
    NonNegativeCount,
    Positive,
)
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.memory import NON_NEGATIVE
from cliquetta.methods.building.registry import register
from cliquetta.types import Batch, Prediction

EPS = 1e-6


@dataclass(frozen=True)
class CLIPTTAConfig(AdamConfig):
    """Soft contrastive adaptation, never reset."""

    lr: Positive = 1e-4
    steps: Count = 10  # Adam steps per batch.
    diversity_weight: NonNegative = 1.0
    """λ: weight of the entropy of the mean prediction."""
    memory_shots: NonNegativeCount = 4
    """Images remembered per class; 0 learns from the batch."""
    memory_drawn: Count = 40
    """Images drawn from the memory for each step, equally many per class."""

    @property
    def adam(self) -> Adam:
        """Return Adam with the authors' epsilon."""
        return Adam(self.lr, self.betas, eps=1e-6)


def soft_contrastive_loss(logits: Tensor) -> Tensor:
    """Average the entropy of images over a batch's paired texts; logits (B, N)."""
    # p(text_j | image_i): every image is paired with the text of its predicted class
    labels = logits.detach().argmax(dim=-1)
    pairs = logits[:, labels]  # (B, B): image i, text of image j
    return entropy(pairs).mean()


def mean_prediction_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean probabilities of logits (B, N)."""
    mean = logits.softmax(dim=-1).mean(dim=0)
    return -(mean * (mean + EPS).log()).sum()


@register(
    "cliptta",
    tuned={"cifar100-c": CLIPTTAConfig(memory_shots=16, memory_drawn=128)},
    setting="CLIP ViT-B/16, CIFAR-10-C",
    for_batches=True,
)
class CLIPTTA(LayerNormAdapter):
    """Ten contrastive steps per batch on visual LayerNorms, with a memory of sure images."""

    scaled_cosines = True
    config: CLIPTTAConfig

    def _setup(self) -> None:
        super()._setup()
        memory = self.memory
        AdamState.begin(self.tower.start).declare(memory, "norms")

        # the class-wise confident memory: 1 - probability, infinite where it is empty
        classes = len(self.prompts)
        shots = self.config.memory_shots
        doubt = self.classifier.new_full((classes, shots), torch.inf)
        memory.declare("doubt", doubt, NON_NEGATIVE)

        # its images, and from where they are drawn at random
        size = self.model.image_size
        images = torch.zeros(classes, shots, 3, size, size, device=self.model.device)
        memory.declare("images", images)
        memory.declare_generator("generator", self.seed)

    def _predict(self, batch: Batch) -> Prediction:
        state = AdamState.load(self.memory, "norms")
        shots = self.config.memory_shots
        if shots:
            self._remember(batch.images, state.values)

        def loss(norms: Tensor) -> Tensor:
            parts = [batch.images]
            if shots:
                parts.append(self._recall())

            # one forward pass for both, whose losses are added
            logits = self.logits(norms, torch.cat(parts))
            each = torch.split(logits, [len(part) for part in parts])
            losses = [self.loss(part) for part in each]
            return torch.stack(losses).sum()

        state = minimize(state, loss, self.config.steps, self.config.adam)
        state.store(self.memory, "norms")

        # the steps precede the prediction
        with torch.no_grad():
            logits = self.logits(state.values, batch.images)
        return Prediction(logits.float())

    def loss(self, logits: Tensor) -> Tensor:
        """Subtract the weighted diversity from the contrast of logits (B, N)."""
        diversity = self.config.diversity_weight * mean_prediction_entropy(logits)
        return soft_contrastive_loss(logits) - diversity

    def _recall(self) -> Tensor:
        """Draw images from the memory, equally many of every class that has as many."""
        filled = self.memory["doubt"].isfinite()  # (N, K)

        # images per class
        count = max(1, self.config.memory_drawn // len(filled))
        with self.memory.generator("generator") as generator:
            order = torch.rand(filled.shape, generator=generator).to(filled.device)

        # a random rank for every slot within its class, of which the empty ones come
        # last
        order = order.masked_fill(~filled, torch.inf)
        rank = order.argsort(dim=1).argsort(dim=1)

        # the first of the filled ones
        drawn = filled & (rank < count)
        return self.memory["images"][drawn]

    @torch.no_grad()
    def _remember(self, images: Tensor, norms: Tensor) -> None:
        """Remember the surest images of each class that ``norms`` predict."""
        memory = self.memory

        # the memory judges by the softmax of cosines, without the scale
        cosines = self.logits(norms, images) / self.scale
        probability, labels = cosines.softmax(dim=-1).max(dim=-1)
        doubt = (1 - probability).to(memory["doubt"].dtype)

        # an image goes to the memory of its predicted class, where it replaces one
        # that was less sure
        occupancy = simulate_insertions(memory["doubt"], labels, doubt)
        memory["doubt"] = store(memory["doubt"], doubt, occupancy)
        memory["images"] = store(memory["images"], images.float(), occupancy)
