"""CLIPArTT: one new text per image, made of its likeliest classes, as the targets of a batch.

Hakim et al., CLIPArTT: Adaptation of CLIP to New Domains at Test Time, WACV 2025. For
every batch the image tower's LayerNorms start from the loaded ones and take ten steps
of Adam. In each step every image gets the text ``a photo of a c1 or c2 or c3`` of its
three likeliest classes under the current norms; with unit image features V and features
T of these texts the loss is the cross-entropy of softmax rows of scale·V·Tᵀ against Qᵀ,
Q = softmax of ((V·Vᵀ + T·Tᵀ) / 2) / 0.01 along its rows. The same batch is then
predicted under the adapted norms with the ordinary texts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.adam import AdamConfig, AdamState, minimize
from cliquetta.methods.building.config import Count, Positive, Template
from cliquetta.methods.building.layernorm import EpisodicLayerNormAdapter
from cliquetta.methods.building.registry import register


@dataclass(frozen=True)
class CLIPArTTConfig(AdamConfig):
    """Pseudo-texts of several classes; LayerNorms reset for every batch."""

    steps: Count = 10  # Adam steps per batch.
    topk: Count = 3  # Number of likeliest classes named in the text of an image.
    temperature: Positive = 0.01
    """Divides the similarities in the softmax of the targets."""
    template: Template = "a photo of a {}"  # Template around the joined class names.
    detach_targets: bool = False
    """Treat the targets as constants, which the authors do not."""


def transductive_loss(
    images: Tensor,
    texts: Tensor,
    scale: float,
    temperature: float,
    *,
    detach: bool = False,
) -> Tensor:
    """Compare similarities of images and texts with those among images and among texts.

    Args:
        images: Unit features (B, E).
        texts: Unit features (B, E) of the text of each image.
        scale: Of the cosines of images and texts.
        temperature: Divides the similarities in the targets.
        detach: Whether the targets are constants.

    Returns:
        Mean cross-entropy of softmax(scale V Tᵀ) against Qᵀ.

    """
    # Q = softmax of ((V·Vᵀ + T·Tᵀ) / 2) / temperature along its rows
    similarities = images @ images.T + texts @ texts.T
    targets = (similarities / (2 * temperature)).softmax(dim=-1)
    if detach:
        targets = targets.detach()

    # cross-entropy of the softmax rows of scale·V·Tᵀ against Qᵀ
    logits = scale * images @ texts.T
    logs = logits.log_softmax(dim=-1)
    return -(targets.T * logs).sum(dim=-1).mean()


@register("clipartt", for_batches=True)
class CLIPArTT(EpisodicLayerNormAdapter):
    """Ten steps per batch on visual LayerNorms, taught by texts of the top three classes."""

    config: CLIPArTTConfig

    def _setup(self) -> None:
        super()._setup()
        names = self.prompts.names
        tokenizer = self.model.tokenizer
        self.top = min(self.config.topk, len(names))

        # the longest text that can come up must fit, now rather than in the middle of a
        # stream
        lengths = [len(tokenizer.encode(name)) for name in names]
        longest = torch.tensor(lengths).topk(self.top).indices
        tokenizer([self.mixed_text(longest.tolist())])

    def adapt(self, images: Tensor) -> Tensor:
        """Return flat LayerNorm parameters after all steps on one batch."""
        config = self.config

        def loss(norms: Tensor) -> Tensor:
            features = self.features(norms, images)
            texts = self.pseudo_texts(features.detach())
            return transductive_loss(
                images=features,
                texts=texts,
                scale=self.scale,
                temperature=config.temperature,
                detach=config.detach_targets,
            )

        start = AdamState.begin(self.tower.start)
        return minimize(start, loss, config.steps, config.adam).values

    def mixed_text(self, classes: list[int]) -> str:
        """Write ``a photo of a c1 or c2 or c3``, likeliest first."""
        names = [self.prompts.names[label].replace("_", " ") for label in classes]
        return self.config.template.replace("{}", " or ".join(names))

    @torch.no_grad()
    def pseudo_texts(self, features: Tensor) -> Tensor:
        """Encode a text per image, of its likeliest classes: unit features (B, E)."""
        # the likeliest classes under the current norms, (B, top)
        cosines = features @ self.classifier.T
        likeliest = cosines.topk(self.top, dim=-1).indices

        # images that share them share a text, which is encoded once
        rows, text_of_image = torch.unique(likeliest, dim=0, return_inverse=True)
        texts = [self.mixed_text(classes) for classes in rows.tolist()]

        # (texts, E), then (B, E)
        encoded = self.model.encode_text(texts, normalize=True)
        return encoded[text_of_image]
