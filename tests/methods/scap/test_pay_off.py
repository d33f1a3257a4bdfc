"""The record of a long stream says when the text Jacobian had paid for itself."""

from __future__ import annotations

from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches


def test_evidence_tells_after_how_many_batches_the_jacobian_paid_off() -> None:
    model = build_model(0)
    batches = make_batches(5, 12, 8)
    config = SCAPConfig(threshold=between_similarities(model, batches[0], 0.5))
    adapter = SCAP(model, ClassPrompts(NAMES), config)
    ways, payments = [], []
    for images in batches:
        evidence = adapter.predict(Batch(images)).evidence
        ways.append(evidence["text_gradient"])
        payments.append(evidence.get("jacobian_pays_off_after", "not built"))
    changed = ways.index("jacobian")
    assert changed > 0, "the first batches must not pay for a Jacobian"
    assert set(ways[:changed]) == {"vjp"} and set(ways[changed:]) == {"jacobian"}
    assert payments[:changed] == ["not built"] * changed
    # Unknown only if the products happened to be quicker than the Jacobian on this machine.
    assert all(after is None or after >= 1 for after in payments[changed:])
    adapter.learner.text_seconds = {"vjp": 3.0, "jacobian": 1.0}
    assert adapter.text is not None
    adapter.text.jacobian_seconds = 5.0
    assert adapter.predict(Batch(batches[0])).evidence["jacobian_pays_off_after"] == 3
