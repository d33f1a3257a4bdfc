"""A method of another package that breaks the contract is found out, by public names only."""

from dataclasses import dataclass

import pytest
import torch

import cliquetta


@dataclass(frozen=True)
class PlainConfig:
    """No settings."""


class Plain(cliquetta.Adapter):
    """Zero-shot CLIP, to be spoilt."""

    batch_dependence = cliquetta.BatchDependence.INDEPENDENT

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        features = self.model.encode_image(batch.images, normalize=True)
        return cliquetta.Prediction(self.model.scale * features @ self.zero_shot_classifier.T)


class Secretive(Plain):
    """Remembers outside of its memory."""

    batches = 0

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        self.batches += 1
        return cliquetta.Prediction(super()._predict(batch).logits * self.batches)


class Random(Plain):
    """Draws global random numbers."""

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        logits = super()._predict(batch).logits
        return cliquetta.Prediction(logits + torch.rand(()))


class Joint(Plain):
    """Centres a batch, and says that images are independent."""

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        logits = super()._predict(batch).logits
        return cliquetta.Prediction(logits - logits.mean(dim=0))


class Training(Plain):
    """Leaves gradients on the model."""

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        self.model.logit_scale.requires_grad_(True)
        return cliquetta.Prediction(super()._predict(batch).logits.detach())


class Halved(Plain):
    """Predicts in half precision."""

    def _predict(self, batch: cliquetta.Batch) -> cliquetta.Prediction:
        return cliquetta.Prediction(super()._predict(batch).logits.half())


def check(kind: type[cliquetta.Adapter]) -> None:
    model, prompts = cliquetta.create_model("micro"), cliquetta.ClassPrompts(("cat", "dog", "ship"))
    cliquetta.check_method(lambda: kind(model, prompts, PlainConfig()))


def test_a_method_that_keeps_to_the_contract_passes() -> None:
    check(Plain)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Secretive, "refused images teach|reset adapter predicts otherwise"),
        (Random, "otherwise|manual_seed|images teach"),
        (Joint, "splitting matters"),
        (Training, "gradients were left"),
        (Halved, "logits are torch.float16"),
    ],
)
def test_what_breaks_it_is_named(kind: type[cliquetta.Adapter], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check(kind)
