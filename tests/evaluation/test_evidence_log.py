"""Evidence beside a run: predictions stay as they are, files are bounded, numbers are right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cliquetta.data.dataset import ArrayDataset
from cliquetta.data.stream import Stream
from cliquetta.evaluation.evidence_log import (
    EvidenceLimits,
    has_evidence,
    load_evidence,
    small_pictures,
)
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.runner import evaluate
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.model.attention import class_attention
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tolerance import FEATURE, TINY_SCALE

STORED = torch.finfo(torch.float16).eps  # features are stored in float16
LIMITS = EvidenceLimits()


@pytest.fixture(scope="module")
def dataset() -> ArrayDataset:
    """Forty images: noisy copies of eight patterns, so that there are cliques."""
    generator = np.random.default_rng(5)
    # five copies of each pattern of four by four squares, which are eight pixels wide
    patterns = generator.integers(0, 256, (8, 4, 4, 3)).repeat(5, axis=0)
    noisy = patterns + generator.integers(-20, 21, patterns.shape)
    squares = noisy.clip(0, 255).astype(np.uint8)
    return ArrayDataset(
        "copies",
        squares.repeat(8, axis=1).repeat(8, axis=2),
        names=TINY_NAMES,
        keys=[f"{number:02d}" for number in range(40)],
        labels=[number % 5 for number in range(40)],
    )


@pytest.fixture
def stream(tiny_clip: CLIP, dataset: Any) -> Stream:
    return Stream(dataset, tiny_clip.preprocess, 10)


@pytest.fixture
def run(tiny_clip: CLIP, dataset: Any, stream: Stream, tmp_path: Path) -> Any:
    """Run a method over the dataset with evidence; gives back its folder and its adapter."""

    def call(
        method: str = "scap",
        options: Any = None,
        where: str = "runs",
        evidence: EvidenceLimits | None = LIMITS,
        **arguments: Any,
    ) -> Any:
        config = method_config(method, None, options)
        adapter = create_method(method, tiny_clip, dataset.prompts, config)
        out = tmp_path / where
        record = evaluate(adapter, stream, out=out, evidence=evidence, **arguments)
        return out / record.id, adapter

    return call


def test_predictions_are_those_of_a_run_without_evidence(run: Any) -> None:
    folder, _ = run()
    plain, _ = run(where="plain", evidence=None)
    assert plain.name == folder.name
    assert not has_evidence(plain)
    predictions = (folder / "predictions.jsonl").read_bytes()
    assert (plain / "predictions.jsonl").read_bytes() == predictions


def test_a_finished_run_without_evidence_is_run_again_once(run: Any) -> None:
    run(evidence=None)
    steps = []
    for _ in range(2):
        run(on_step=lambda step: steps.append(step.number))
    assert steps == [1, 2, 3, 4]


def test_evidence_has_the_predictions_of_the_run(run: Any) -> None:
    folder, adapter = run()
    assert not adapter.collect_evidence
    evidence = load_evidence(folder)
    assert evidence.names == TINY_NAMES
    assert [batch.number for batch in evidence.batches] == [1, 2, 3, 4]

    keys = [key for batch in evidence.batches for key in batch.keys]
    after = [label for batch in evidence.batches for label in batch.after]
    predictions = load_predictions(folder)
    assert keys == list(predictions.keys)
    assert after == predictions.classes[:, 0].tolist()


def test_evidence_shows_the_pictures(run: Any, dataset: Any) -> None:
    folder, _ = run()
    first = load_evidence(folder).batches[0]
    order = [dataset.keys.index(key) for key in first.keys]
    originals = dataset.images[order].astype(int)
    # small pictures are stored without loss
    difference = first.pictures - originals
    assert np.abs(difference).max() <= 1


def test_evidence_has_features_and_what_zero_shot_predicts(
    run: Any, stream: Stream, tiny_clip: CLIP, dataset: Any
) -> None:
    folder, _ = run()
    plain = create_method("zero_shot", tiny_clip, dataset.prompts)
    batches = load_evidence(folder).batches
    for stored, (batch, labels) in zip(batches, stream.batches(), strict=True):
        before = plain.predict(batch).logits.argmax(dim=1)
        assert list(stored.before) == before.tolist()
        assert list(stored.labels) == labels.tolist()

        features = tiny_clip.encode_image(batch.images, normalize=True)
        np.testing.assert_allclose(stored.features, features.numpy(), atol=STORED)


def test_evidence_counts_cliques(run: Any) -> None:
    folder, _ = run()
    evidence = load_evidence(folder)
    assert [line["batch"] for line in evidence.counts] == [1, 2, 3, 4]

    # every line agrees with the cliques of its batch
    for line, stored in zip(evidence.counts, evidence.batches, strict=True):
        cliques = stored.description["cliques"]
        assert cliques
        assert line["cliques"] == len(cliques)
        assert all(clique["after"] for clique in cliques)
        sizes = [len(clique["members"]) for clique in cliques]
        assert line["max_size"] == max(sizes)


def test_a_method_without_cliques_leaves_features_and_pictures(run: Any) -> None:
    folder, _ = run("tent")
    first = load_evidence(folder).batches[0]
    assert first.features.shape == (10, 24)
    assert first.pictures.shape == (10, 32, 32, 3)
    assert first.description is None
    assert first.prompted is None
    assert first.maps == ()


def test_prompted_features_are_those_that_were_scored(
    run: Any, tiny_clip: CLIP
) -> None:
    """With one pass an image and fixed text, logits are a product with the feature alone."""
    options = {"modalities": "image", "topk": 1, "lr": 0.5, "threshold": 0.5}
    folder, adapter = run(options=options)
    batches = load_evidence(folder).batches
    prompted = np.concatenate([batch.prompted for batch in batches])
    plain = np.concatenate([batch.features for batch in batches])
    assert np.abs(prompted - plain).max() > 0.01

    text = adapter.learner.start_text
    logits = tiny_clip.scale * torch.from_numpy(prompted) @ text.T
    best = logits.softmax(dim=-1).topk(5, dim=-1).values
    np.testing.assert_allclose(
        best.numpy(),
        load_predictions(folder).probabilities,
        atol=TINY_SCALE * STORED,
    )


def test_domain_prompts_leave_a_line_about_every_batch(run: Any) -> None:
    folder, _ = run("domain_norm")
    evidence = load_evidence(folder)
    for line, batch in zip(evidence.counts, evidence.batches, strict=True):
        assert line["images"] == 10
        assert len(batch.keys) == 10
        assert line["domain"] in range(4)
        assert 0 <= line["belief"] <= 1
        assert 0 <= line["changed"] <= 1


def test_without_a_class_prior_there_is_no_belief_in_one(run: Any) -> None:
    folder, _ = run("domain_norm", {"prior": "uniform"})
    for line in load_evidence(folder).counts:
        assert line["belief"] == 0
        assert line["burst"] == 0


def test_maps_begin_with_plain_attention_and_end_with_all_prompts(
    run: Any, tiny_clip: CLIP, stream: Stream
) -> None:
    folder, _ = run(evidence=EvidenceLimits(maps=8))
    images: dict[str, torch.Tensor] = {}
    for batch, _ in stream.batches():
        images |= dict(zip(batch.keys, batch.images, strict=True))
    tower = tiny_clip.require_vit()

    count = 0
    for stored in load_evidence(folder).batches:
        cliques = stored.description["cliques"]
        for entry in stored.maps:
            count += 1
            for maps in entry.maps.values():
                assert maps.shape == (len(entry.cliques) + 2, 18)
                np.testing.assert_allclose(maps.sum(axis=1), 1, atol=FEATURE)
            for clique in entry.cliques:
                assert entry.index in cliques[clique]["members"]

            # the first row is the attention of the tower without prompts
            maps = entry.maps["class"]
            image = images[stored.keys[entry.index]]
            with torch.no_grad():
                weights = tower.attention(image[None], [1])
            plain = class_attention([weights[1]])[0].numpy()
            np.testing.assert_allclose(maps[0], plain, atol=FEATURE)
            # all prompts together get more of it than those of one clique
            of_prompts = maps[:, 0]
            assert (of_prompts[-1] >= of_prompts[1:-1] - 1e-7).all()
    assert count == 8


def test_images_maps_and_pixels_of_evidence_are_bounded(run: Any) -> None:
    folder, _ = run(evidence=EvidenceLimits(images=20, maps=2, pixels=16))
    evidence = load_evidence(folder)
    assert len(evidence.counts) == 4
    assert [batch.number for batch in evidence.batches] == [1, 4]
    maps = 0
    for batch in evidence.batches:
        assert batch.pictures.shape == (10, 16, 16, 3)
        maps += len(batch.maps)
    assert maps == 2


def test_evidence_of_few_images_is_of_the_last_batch(run: Any) -> None:
    folder, _ = run(evidence=EvidenceLimits(images=3))
    (batch,) = load_evidence(folder).batches
    assert batch.number == 4
    assert len(batch.keys) == 3


def test_evidence_of_no_image_still_counts_batches(run: Any) -> None:
    folder, _ = run(evidence=EvidenceLimits(images=0))
    evidence = load_evidence(folder)
    assert evidence.batches == ()
    assert len(evidence.counts) == 4


def test_small_pictures_are_unnormalised() -> None:
    preprocess = Preprocess(
        64,
        mean=(0.4, 0.4, 0.4),
        std=(0.25, 0.25, 0.25),
    )
    # zeros are pixels of the mean
    shrunk = small_pictures(torch.zeros(2, 3, 64, 64), preprocess, 24)
    assert shrunk.shape == (2, 24, 24, 3)
    assert (shrunk == 0.4 * 255).all()


def test_evidence_of_another_format_is_refused(run: Any) -> None:
    folder, _ = run()
    about = folder / "evidence" / "about.json"
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"format": "cliquetta-evidence-9"})
    )
    with pytest.raises(ValueError, match="cliquetta-evidence-9"):
        load_evidence(folder)
    assert load_evidence(folder.parent) is None
