"""Zero-shot against its formula, one template and many."""

import pytest
import torch

from cliquetta.methods.building.registry import create_method
from cliquetta.methods.zero_shot import ZeroShotConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction
from tests._helpers.live import unit_rows
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import LOGIT

TEMPLATES = ("a photo of a {}.", "a sketch of a {}.", "{}")


@pytest.mark.parametrize("templates", [TEMPLATES[:1], TEMPLATES])
def test_logits_are_scaled_cosines(templates: tuple[str, ...]) -> None:
    adapter = create_method("zero_shot", TINY, ClassPrompts(TINY_NAMES, templates))
    logits = adapter.predict(TINY_IMAGES).logits

    images = TINY.encode_image(TINY_IMAGES).double()
    for column, name in enumerate(TINY_NAMES):
        # the mean of unit features of all templates
        sentences = [template.replace("{}", name) for template in templates]
        texts = TINY.encode_text(sentences).double()
        mean = unit_rows(texts).mean(dim=0)
        for row, image in enumerate(images):
            lengths = image.norm() * mean.norm()
            cosine = float(image @ mean / lengths)
            expected = TINY.scale * cosine
            assert logits[row, column] == pytest.approx(expected, abs=LOGIT)


def test_temperature_changes_confidence_only() -> None:
    def predict(temperature: float) -> Prediction:
        config = ZeroShotConfig(temperature=temperature)
        return create_method("zero_shot", TINY, TINY_PROMPTS, config).predict(
            TINY_IMAGES
        )

    plain = predict(1.0)
    warm = predict(2.0)

    torch.testing.assert_close(plain.logits, 2 * warm.logits)
    confidence = plain.probabilities.amax(1)
    assert (confidence > warm.probabilities.amax(1)).all()


def test_given_text_features_replace_the_tower() -> None:
    zero_shot = create_method("zero_shot", TINY, TINY_PROMPTS)
    expected = zero_shot.predict(TINY_IMAGES).logits

    # of any length
    features = 3 * TINY.classifier(TINY_PROMPTS)
    fixed = ClassPrompts(TINY_NAMES, features=features)
    actual = create_method("zero_shot", TINY, fixed).predict(TINY_IMAGES)
    torch.testing.assert_close(actual.logits, expected)
