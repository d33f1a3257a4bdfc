"""Probabilities of first and later batches can share a threshold, at no cost."""

from __future__ import annotations

import numpy as np
import pytest

from cliquetta import create_method, create_model, get_dataset, predict
from cliquetta.data.stream import Stream
from cliquetta.methods.domain_norm.config import DomainNormConfig


def test_first_batches_are_as_sure_as_zero_shot_by_default() -> None:
    model, dataset = create_model("micro", device="cpu"), get_dataset("bundled")
    chosen = np.random.default_rng(0).permutation(len(dataset))[:64].tolist()
    images = [dataset.load(i) for i in chosen]

    def sure(name: str, calibrate: bool | None = None) -> float:
        run = predict(images, dataset.names, model=model, method=name, calibrate=calibrate)
        return sum(row["probability"] for row in run.rows) / 64

    default, uncalibrated, zero_shot = (
        sure("domain_norm"),
        sure("domain_norm", False),
        sure("zero_shot"),
    )
    assert abs(default - zero_shot) < abs(uncalibrated - zero_shot) / 4
    assert uncalibrated < zero_shot


def test_calibration_changes_no_class_and_adds_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dataset = create_model("micro", device="cpu"), get_dataset("bundled")
    config = DomainNormConfig(settled_steps=1, settled_every=128, vote_memory=64)
    batches = [batch for batch, _ in Stream(dataset, model.preprocess, 64, limit=384)]
    plain, calibrated = (create_method("domain_norm", model, dataset.prompts, config) for _ in "ab")
    calibrated.enable(reject=None, calibrate=None)
    monkeypatch.setattr(model, "encode_image", lambda *_, **__: pytest.fail("encoded plainly"))
    lent = []
    for batch in batches:
        one, other = plain.predict(batch), calibrated.predict(batch)
        lent.append("zero_shot" in other.evidence)
        assert one.logits.argmax(dim=1).equal(other.logits.argmax(dim=1))
        assert not one.logits.equal(other.logits)
    assert any(lent) and not all(lent)
