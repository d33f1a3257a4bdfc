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
    patterns = generator.integers(0, 256, (8, 4, 4, 3)).repeat(5, axis=0)
    noisy = patterns + generator.integers(-20, 21, patterns.shape)
    pictures = noisy.clip(0, 255).astype(np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    keys, labels = [f"{n:02d}" for n in range(40)], [n % 5 for n in range(40)]
    return ArrayDataset("copies", pictures, names=TINY_NAMES, keys=keys, labels=labels)


@pytest.fixture
def run(tiny_clip: CLIP, dataset: Any, tmp_path: Path) -> Any:
    """Run a method over the dataset with evidence; gives back its folder and its adapter."""

    def call(
        method: str = "scap", options: Any = None, where: str = "runs", **arguments: Any
    ) -> Any:
        config = method_config(method, None, options)
        adapter = create_method(method, tiny_clip, dataset.prompts, config)
        stream, out = Stream(dataset, tiny_clip.preprocess, 10), tmp_path / where
        record = evaluate(adapter, stream, out=out, **{"evidence": LIMITS} | arguments)
        return out / record.id, adapter

    return call


def test_predictions_are_those_of_a_run_without_evidence(run: Any) -> None:
    (folder, _), (plain, _) = run(), run(where="plain", evidence=None)
    assert plain.name == folder.name and not has_evidence(plain)
    names = [path / "predictions.jsonl" for path in (folder, plain)]
    assert names[0].read_bytes() == names[1].read_bytes()
    steps = []
    for _ in range(2):  # a finished run without evidence is run again once
        run(where="plain", on_step=lambda step: steps.append(step.number))
    assert steps == [1, 2, 3, 4]


def test_evidence_is_what_was_predicted_and_seen(
    run: Any, tiny_clip: CLIP, dataset: Any
) -> None:
    folder, adapter = run()
    evidence, predictions = load_evidence(folder), load_predictions(folder)
    assert not adapter.collect_evidence and evidence.names == TINY_NAMES
    assert [batch.number for batch in evidence.batches] == [1, 2, 3, 4]
    assert sum((batch.keys for batch in evidence.batches), ()) == predictions.keys
    after = [label for batch in evidence.batches for label in batch.after]
    assert after == predictions.classes[:, 0].tolist()
    first = evidence.batches[0]
    order = [dataset.keys.index(key) for key in first.keys]
    difference = first.pictures.astype(int) - dataset.images[order].astype(int)
    assert np.abs(difference).max() <= 1  # small pictures are stored without loss
    plain = create_method("zero_shot", tiny_clip, dataset.prompts)
    batches = Stream(dataset, tiny_clip.preprocess, 10).batches()
    for stored, (batch, labels) in zip(evidence.batches, batches, strict=True):
        assert stored.before == tuple(
            plain.predict(batch).logits.argmax(dim=1).tolist()
        )
        assert stored.labels == tuple(labels.tolist())
        wanted = tiny_clip.encode_image(batch.images, normalize=True).numpy()
        np.testing.assert_allclose(stored.features, wanted, atol=STORED)
    assert [line["batch"] for line in evidence.counts] == [1, 2, 3, 4]
    for line, stored in zip(evidence.counts, evidence.batches, strict=True):
        cliques = stored.description["cliques"]
        assert line["cliques"] == len(cliques) > 0 and all(
            clique["after"] for clique in cliques
        )
        assert line["max_size"] == max(len(clique["members"]) for clique in cliques)
    other = load_evidence(run("tent")[0]).batches[0]  # a method without cliques
    assert other.description is None and other.prompted is None and other.maps == ()
    assert other.features.shape == (10, 24) and other.pictures.shape == (10, 32, 32, 3)


def test_prompted_features_are_those_that_were_scored(
    run: Any, tiny_clip: CLIP
) -> None:
    """With one pass an image and fixed text, logits are a product with the feature alone."""
    options = {"modalities": "image", "topk": 1, "lr": 0.5, "threshold": 0.5}
    folder, adapter = run(options=options)
    evidence, predictions = load_evidence(folder), load_predictions(folder)
    prompted = torch.from_numpy(
        np.concatenate([batch.prompted for batch in evidence.batches])
    )
    plain = np.concatenate([batch.features for batch in evidence.batches])
    assert np.abs(prompted.numpy() - plain).max() > 0.01
    logits = tiny_clip.scale * prompted @ adapter.learner.start_text.T
    best = logits.softmax(dim=-1).topk(5, dim=-1).values.numpy()
    np.testing.assert_allclose(
        best, predictions.probabilities, atol=TINY_SCALE * STORED
    )


def test_domain_prompts_leave_a_line_about_every_batch(run: Any) -> None:
    evidence = load_evidence(run("domain_norm")[0])
    for line, batch in zip(evidence.counts, evidence.batches, strict=True):
        assert line["images"] == 10
        assert len(batch.keys) == 10
        assert line["domain"] in range(4)
        assert 0 <= line["belief"] <= 1
        assert 0 <= line["changed"] <= 1
    folder, _ = run("domain_norm", {"prior": "uniform"})
    for line in load_evidence(folder).counts:
        assert line["belief"] == 0
        assert line["burst"] == 0


def test_maps_begin_with_plain_attention_and_end_with_all_prompts(
    run: Any, tiny_clip: CLIP, dataset: Any
) -> None:
    folder, _ = run(evidence=EvidenceLimits(maps=8))
    images = {
        key: image
        for batch, _ in Stream(dataset, tiny_clip.preprocess, 10).batches()
        for key, image in zip(batch.keys, batch.images, strict=True)
    }
    tower = tiny_clip.require_vit()
    pairs = [
        (batch, own) for batch in load_evidence(folder).batches for own in batch.maps
    ]
    assert len(pairs) == 8
    for batch, entry in pairs:
        for maps in entry.maps.values():
            assert maps.shape == (len(entry.cliques) + 2, 18)
            np.testing.assert_allclose(maps.sum(axis=1), 1, atol=FEATURE)
        members = [batch.description["cliques"][id]["members"] for id in entry.cliques]
        assert all(entry.index in clique for clique in members)
        with torch.no_grad():
            weights = tower.attention(images[batch.keys[entry.index]][None], [1])
        wanted = class_attention([weights[1]])[0].numpy()
        np.testing.assert_allclose(entry.maps["class"][0], wanted, atol=FEATURE)
        assert (entry.maps["class"][-1, 0] >= entry.maps["class"][1:-1, 0] - 1e-7).all()


def test_size_is_bounded(run: Any) -> None:
    folder, _ = run(evidence=EvidenceLimits(images=20, maps=2, pixels=16))
    evidence = load_evidence(folder)
    assert [batch.number for batch in evidence.batches] == [1, 4]
    assert sum(len(batch.maps) for batch in evidence.batches) == 2  # type: ignore[misc]
    assert all(batch.pictures.shape == (10, 16, 16, 3) for batch in evidence.batches)
    assert len(evidence.counts) == 4
    one, _ = run(evidence=EvidenceLimits(images=3), where="one")
    (batch,) = load_evidence(one).batches
    assert batch.number == 4 and len(batch.keys) == 3
    none, _ = run(evidence=EvidenceLimits(images=0), where="none")
    assert load_evidence(none).batches == () and len(load_evidence(none).counts) == 4
    shrunk = small_pictures(
        torch.zeros(2, 3, 64, 64), Preprocess(64, (0.4,) * 3, (0.25,) * 3), 24
    )
    assert shrunk.shape == (2, 24, 24, 3) and (shrunk == 102).all()


def test_evidence_of_another_format_is_refused(run: Any) -> None:
    folder, _ = run()
    about = folder / "evidence" / "about.json"
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"format": "cliquetta-evidence-9"})
    )
    with pytest.raises(ValueError, match="cliquetta-evidence-9"):
        load_evidence(folder)
    assert load_evidence(folder.parent) is None
