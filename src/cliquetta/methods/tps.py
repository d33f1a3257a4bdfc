"""TPS: shift each class's text feature on every image until its confident views agree.

Sui et al., Just Shift It: Test-Time Prototype Shifting for Zero-Shot Generalization
with Vision-Language Models, WACV 2025. As TPT, but what is learned is a shift s_k of
the text feature of each class, outside the text tower: the classifier normalised(t_k +
s_k) starts at s = 0, takes one AdamW step down the marginal entropy of the tenth of the
image's views that it is surest of (chosen again before each of several steps), and
scores the plain view. Every image starts anew.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.adam import Adam, AdamState, minimize
from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.config import Count, NonNegative
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    take_views,
)
from cliquetta.types import Prediction

# Numbers in the shifts learned at once: bounds memory (64 MiB each copy).
ELEMENTS = 2**24


@dataclass(frozen=True)
class TPSConfig(SelectiveConfig):
    """Prototype shifting with its authors' defaults."""

    lr: NonNegative = 5e-3
    """Learning rate of AdamW: about how far one step moves a coordinate."""
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW, PyTorch's default as theirs."""
    steps: Count = 1  # AdamW steps per image; views are selected before each.


@register(
    "tps",
    tuned={"fine-grained": TPSConfig(view_kind="augmix")},
    setting="CLIP ViT-B/16, ImageNet variants",
)
class TPS(FixedText):
    """Shifts the class texts on each image so that its confident views agree."""

    batch_dependence = BatchDependence.INDEPENDENT
    config: TPSConfig

    def _predict_features(self, features: Tensor) -> Prediction:
        # each image has a shift (N, E) of its own
        images = max(1, ELEMENTS // self.classifier.numel())
        logits = [self._predict_group(group) for group in torch.split(features, images)]
        return Prediction(torch.cat(logits))

    def _predict_group(self, features: Tensor) -> Tensor:
        """Predict unit features (B, V, E): logits (B, N)."""
        config = self.config

        def loss(shift: Tensor) -> Tensor:
            """Sum marginal entropies of confident views, chosen before every step."""
            # normalised(t_k + s_k), (B, E, N)
            text = F.normalize(self.classifier + shift, dim=-1).mT
            with torch.no_grad():
                logits = self.scale * features @ text
                index = confident_views(logits, config.selection_fraction)

            # images do not feel one another in a sum
            confident = take_views(features, index)
            return marginal_entropy(self.scale * confident @ text).sum()

        # s = 0 for every image and class
        zeros = features.new_zeros(len(features), *self.classifier.shape)

        # AdamW, coordinate by coordinate: images step as if alone
        adam = Adam(config.lr, weight_decay=config.weight_decay)
        shift = minimize(AdamState.begin(zeros), loss, config.steps, adam).values

        # the plain view is scored with normalised(t_k + s_k)
        text = F.normalize(self.classifier + shift, dim=-1)
        logits = self.scale * torch.einsum("be,bne->bn", features[:, 0], text)
        return logits.float()
