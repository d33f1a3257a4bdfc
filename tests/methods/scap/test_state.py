"""Streams that are split, saved, killed and taken up again end as if nothing had happened."""

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.data.stream import Stream
from cliquetta.evaluation.predictions import PREDICTIONS
from cliquetta.evaluation.record import list_records
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.scap import SCAP, SCAPConfig
from cliquetta.methods.state import load_state
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.building import assert_same_state
from tests._helpers.oracle import scap_config
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.streaming import made_up_dataset
from tests._helpers.tiny_world import TINY, TINY_PROMPTS

MODEL = build_model(0).float()
BATCHES = [images.float() for images in make_batches(3, 6, 6)]
PROMPTS = ClassPrompts(NAMES, ("a photo of a {}.", "art of the {}."))


@pytest.mark.parametrize(
    "options",
    [{}, {"text_per_class": True, "blocks": (1, 2)}, {"modalities": "text"}, {"steps": 2}],
    ids=str,
)
def test_a_split_stream_equals_the_whole_to_the_bit(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = scap_config(threshold=0.4, capacity=2, **options)
    unbroken, expected = SCAP(MODEL, PROMPTS, config), []
    for number, images in enumerate(BATCHES):
        unbroken.save(tmp_path / f"{number}.safetensors")
        expected.append(unbroken.predict(images).logits)
    assert int(unbroken.memory["sets_learned"]) > MODEL.embed_dim  # the text gradient changed over
    for number in range(len(BATCHES)):
        # another seed: whatever it decides must come from the state
        other = SCAP(MODEL, PROMPTS, config, seed=9)
        load_state(other, tmp_path / f"{number}.safetensors")
        for images, logits in zip(BATCHES[number:], expected[number:], strict=True):
            assert torch.equal(other.predict(images).logits, logits)
        assert_same_state(other, unbroken.state_dict())


# --- kills --------------------------------------------------------------------------------------


def run_until_killed(adapter: SCAP, out: Path, batch: int, inside: bool) -> None:
    """Die at a batch of this execution: after it, or in the middle of learning from it."""
    count = 0

    def die() -> None:
        nonlocal count
        count += 1
        if count == batch:
            os.kill(os.getpid(), signal.SIGKILL)

    if inside:
        retain = adapter._retain

        def retain_and_die(*given: Any) -> None:
            retain(*given)
            die()

        adapter._retain = retain_and_die  # type: ignore[method-assign, assignment]
    stream = Stream(made_up_dataset(96), adapter.model.preprocess, batch_size=4, seed=1)
    step = None if inside else lambda step: die()
    evaluate(adapter, stream, out=out, save_every=2, on_step=step)


def test_a_stream_killed_at_random_batches_ends_with_the_same_predictions(tmp_path: Path) -> None:
    def build() -> SCAP:
        return SCAP(TINY, TINY_PROMPTS, SCAPConfig(threshold=0.3, capacity=2), seed=4)

    unbroken, out = tmp_path / "whole", tmp_path / "killed"
    adapter = build()
    run_until_killed(adapter, unbroken, 0, inside=False)
    (expected,) = list_records(unbroken)
    assert int(adapter.memory["sets_learned"]) > 20
    assert int(adapter.memory["count"].max()) == 2
    moments, kills = random.Random(3), 0
    fork = multiprocessing.get_context("fork")  # a fresh interpreter would take seconds to start
    while True:
        given = (build(), out, moments.randint(3, 6), bool(kills % 2))
        process = fork.Process(target=run_until_killed, args=given)
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        assert kills < 40
    (record,) = list_records(out)
    assert kills >= 4 and record.resumed >= 4
    assert (record.status, record.metrics) == ("finished", expected.metrics)
    name = f"{record.id}/{PREDICTIONS}"
    assert (out / name).read_bytes() == (unbroken / name).read_bytes()
