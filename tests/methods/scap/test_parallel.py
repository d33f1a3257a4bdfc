"""SCAP divided between processes answers as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.methods.scap.parallel import split_memberships
from cliquetta.model.tapes import VisualTape
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches
from tests._helpers.teamwork import in_processes
from tests._helpers.tolerance import SUM

MODEL = build_model(0)
BATCHES = make_batches(3, 3, 9)
THRESHOLD = between_similarities(MODEL, BATCHES[0], 0.5)


def build(options: dict[str, Any]) -> SCAP:
    config = SCAPConfig(threshold=THRESHOLD, **options)
    return SCAP(MODEL, ClassPrompts(NAMES), config)


def answer(scap: SCAP) -> dict[str, Any]:
    """Logits and prompts of every batch, the memory in the end, and the rows pulled back."""
    pulled = []
    pull = VisualTape.vjp

    def counted(tape: VisualTape, grad: Tensor, image: Tensor) -> dict[int, Tensor]:
        pulled.append(len(grad))
        return pull(tape, grad, image)

    VisualTape.vjp = counted  # type: ignore[method-assign, assignment]
    try:
        predictions = [scap.predict(Batch(images)) for images in BATCHES]
    finally:
        VisualTape.vjp = pull  # type: ignore[method-assign]
    learned = [p.evidence["learned"] for p in predictions]
    return {
        "logits": [p.logits for p in predictions],
        "visual": [found.visual for found in learned],
        "memory": scap.state_dict(),
        "pulled": sum(pulled),
    }


def answer_together(options: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    scap = build(options)
    split_memberships(scap.learner)
    found = answer(scap)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"modalities": "image"}, {"steps": 2}])
def test_processes_together_answer_as_one(
    size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    alone = answer(build(options))
    parts = in_processes(size, tmp_path, answer_together, options)
    for part in parts:
        torch.testing.assert_close(part["logits"], alone["logits"], rtol=0, atol=SUM)
        torch.testing.assert_close(part["visual"], alone["visual"], rtol=0, atol=SUM)
        torch.testing.assert_close(part["memory"], alone["memory"], rtol=0, atol=SUM)
    for part in parts[1:]:  # one process may not drift from another
        assert all(
            torch.equal(a, b) for a, b in zip(part["logits"], parts[0]["logits"], strict=True)
        )
        assert all(torch.equal(part["memory"][k], v) for k, v in parts[0]["memory"].items())
    assert alone["pulled"] > 20
    assert sum(part["pulled"] for part in parts) == alone["pulled"]
    assert max(part["pulled"] for part in parts) <= alone["pulled"] / size + len(BATCHES)


def shares(total: int) -> list[slice]:
    dist.init_process_group("gloo")
    scap = build({})
    split_memberships(scap.learner)
    found = [scap.learner.share(n) for n in range(total)]
    dist.destroy_process_group()
    return found


def test_parts_cover_every_membership_once(tmp_path: Path) -> None:
    first, second = in_processes(2, tmp_path, shares, 12)
    for total in range(12):
        covered = [*range(total)[first[total]], *range(total)[second[total]]]
        assert covered == list(range(total))
