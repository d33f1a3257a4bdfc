"""Zero-shot CLIP: cosine of image and class texts, nothing learned.

One template or an ensemble of them is the choice of the prompts
(``ClassPrompts.templates``), not of the method. Every other method is compared with
this one.
"""

from dataclasses import dataclass

from torch import Tensor

from cliquetta.methods.building.config import MethodConfig, Positive
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import FrozenModel
from cliquetta.types import Prediction


@dataclass(frozen=True)
class ZeroShotConfig(MethodConfig):
    """Settings of a classifier that learns nothing."""

    temperature: Positive = 1.0
    """Divides the logits: changes confidence, never the prediction. C-TPT uses 1.16 for ViTs."""


@register(
    "zero_shot",
    paper="Radford et al., Learning Transferable Visual Models From Natural Language Supervision, "
    "ICML 2021",
)
class ZeroShot(FixedText):
    """CLIP as it is: cosine of image and class text."""

    config: ZeroShotConfig

    scaled_cosines = True

    def _setup(self) -> None:
        super()._setup()
        self.scale /= self.config.temperature

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(self.scale * features[:, 0] @ self.classifier.T)

    def frozen_model(self) -> FrozenModel:
        """Freeze the image tower and the class texts as they are."""
        return FrozenModel(self.model, self.classifier, scale=self.scale)
