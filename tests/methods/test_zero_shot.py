"""Zero-shot against its formula, one template and many."""

import pytest
import torch

from cliquetta.methods.registry import create_method
from cliquetta.methods.zero_shot import ZeroShotConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import LOGIT

TEMPLATES = ("a photo of a {}.", "a sketch of a {}.", "{}")


@pytest.mark.parametrize("templates", [TEMPLATES[:1], TEMPLATES])
def test_logits_are_scaled_cosines(templates: tuple[str, ...]) -> None:
    adapter = create_method("zero_shot", TINY, ClassPrompts(TINY_NAMES, templates))
    logits = adapter.predict(TINY_IMAGES).logits
    for row in range(3):
        image = TINY.encode_image(TINY_IMAGES[row : row + 1])[0].double()
        for column, name in enumerate(TINY_NAMES):
            texts = TINY.encode_text(
                [t.replace("{}", name) for t in templates]
            ).double()
            mean = torch.stack([text / text.norm() for text in texts]).mean(dim=0)
            cosine = image @ mean / image.norm() / mean.norm()
            assert logits[row, column] == pytest.approx(
                TINY.scale * float(cosine), abs=LOGIT
            )


def test_temperature_changes_confidence_only() -> None:
    plain = create_method(
        "zero_shot", TINY, TINY_PROMPTS, ZeroShotConfig(temperature=1.0)
    )
    warm = create_method(
        "zero_shot", TINY, TINY_PROMPTS, ZeroShotConfig(temperature=2.0)
    )
    a = plain.predict(TINY_IMAGES)
    b = warm.predict(TINY_IMAGES)
    torch.testing.assert_close(a.logits, 2 * b.logits)
    assert (a.probabilities.amax(1) > b.probabilities.amax(1)).all()


def test_given_text_features_replace_the_tower() -> None:
    fixed = ClassPrompts(TINY_NAMES, features=3 * TINY.classifier(TINY_PROMPTS))
    expected = create_method("zero_shot", TINY, TINY_PROMPTS).predict(TINY_IMAGES)
    actual = create_method("zero_shot", TINY, fixed).predict(TINY_IMAGES)
    torch.testing.assert_close(actual.logits, expected.logits)
