"""A method of another package that breaks the contract is named, with public names only."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import cliquetta


@dataclass(frozen=True)
class PlainConfig:
    """The function that spoils the logits."""

    spoil: Callable[["Plain", Tensor], Tensor] | None


class Plain(cliquetta.Adapter):
    """Zero-shot CLIP, which may be spoilt."""

    batch_dependence = cliquetta.BatchDependence.INDEPENDENT
    batches = 0

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        features = self.model.encode_image(batch.images, normalize=True)
        logits = self.model.scale * features @ self.zero_shot_classifier.T
        spoil = self.config.spoil
        return cliquetta.Prediction(spoil(self, logits) if spoil else logits)


def plain(spoil: Callable[[Plain, Tensor], Tensor] | None) -> Callable[[], Plain]:
    """A builder of the method on a small model."""
    model = cliquetta.create_model("micro")
    prompts = cliquetta.ClassPrompts(("cat", "dog", "ship"))
    config = PlainConfig(spoil)
    return lambda: Plain(model, prompts, config)


def remember_outside(adapter: Plain, logits: Tensor) -> Tensor:
    adapter.batches += 1
    return logits * adapter.batches


def draw_global_numbers(adapter: Plain, logits: Tensor) -> Tensor:
    return logits + torch.rand(())


def centre_the_batch(adapter: Plain, logits: Tensor) -> Tensor:
    return logits - logits.mean(dim=0)


def leave_gradients(adapter: Plain, logits: Tensor) -> Tensor:
    adapter.model.logit_scale.requires_grad_(True)
    return logits.detach()


def halve(adapter: Plain, logits: Tensor) -> Tensor:
    return logits.half()


def test_a_method_that_keeps_the_contract_passes() -> None:
    cliquetta.check_method(plain(None))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remember_outside, "refused images teach|reset adapter predicts otherwise"),
        (draw_global_numbers, "otherwise|manual_seed|images teach"),
        (centre_the_batch, "splitting matters"),
        (leave_gradients, "gradients were left"),
        (halve, "logits are torch.float16"),
    ],
)
def test_breaches_of_the_contract_are_named(
    spoil: Callable[[Plain, Tensor], Tensor], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        cliquetta.check_method(plain(spoil))
