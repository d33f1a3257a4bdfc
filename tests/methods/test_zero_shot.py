"""Zero-shot against its formula, one template and many."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.registry import create_method
from cliquetta.methods.zero_shot import ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tolerance import LOGIT

TEMPLATES = ("a photo of a {}.", "a sketch of a {}.", "{}")


@pytest.mark.parametrize("templates", [TEMPLATES[:1], TEMPLATES])
def test_logits_are_scaled_cosines(
    tiny_clip: CLIP, tiny_images: Tensor, templates: tuple[str, ...]
) -> None:
    adapter = create_method("zero_shot", tiny_clip, ClassPrompts(TINY_NAMES, templates))
    logits = adapter.predict(Batch(tiny_images)).logits
    for row in range(3):
        image = tiny_clip.encode_image(tiny_images[row : row + 1])[0].double()
        for column, name in enumerate(TINY_NAMES):
            texts = tiny_clip.encode_text([t.replace("{}", name) for t in templates]).double()
            mean = torch.stack([text / text.norm() for text in texts]).mean(dim=0)
            cosine = image @ mean / image.norm() / mean.norm()
            assert logits[row, column] == pytest.approx(tiny_clip.scale * float(cosine), abs=LOGIT)


def test_temperature_changes_confidence_only(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    plain, warm = (
        create_method("zero_shot", tiny_clip, tiny_prompts, ZeroShotConfig(temperature=t))
        for t in (1.0, 2.0)
    )
    a, b = (adapter.predict(Batch(tiny_images)) for adapter in (plain, warm))
    torch.testing.assert_close(a.logits, 2 * b.logits)
    assert (a.probabilities.amax(1) > b.probabilities.amax(1)).all()


def test_given_text_features_replace_the_tower(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    features = 3 * tiny_clip.classifier(tiny_prompts)
    fixed = ClassPrompts(TINY_NAMES, features=features)
    expected = create_method("zero_shot", tiny_clip, tiny_prompts).predict(Batch(tiny_images))
    actual = create_method("zero_shot", tiny_clip, fixed).predict(Batch(tiny_images))
    torch.testing.assert_close(actual.logits, expected.logits)
