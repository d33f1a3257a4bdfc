"""What SCAP did, counted by hand from evidence of two batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.evaluation.evidence_log import Evidence, MapEvidence, load_evidence
from cliquetta.report.scap_findings import EXPECTATION, OPEN_QUESTIONS, find
from cliquetta.version import REPOSITORY

LINES: tuple[dict[str, Any], ...] = (
    {
        "images": 6,
        "cliques": 4,
        "distinct_sets": 3,
        "mean_size": 2.5,
        "max_size": 3,
        "images_with_clique": 6,
        "images_with_retained": 0,
    },
    {
        "images": 2,
        "cliques": 1,
        "distinct_sets": 1,
        "mean_size": 2.0,
        "max_size": 2,
        "images_with_clique": 2,
        "images_with_retained": 2,
    },
)


@pytest.fixture
def described(evidence: Evidence) -> Evidence:
    """Two of three passes used a retained prompt; all prompts moved a tenth of the attention."""
    plain = np.full(
        6, 0.15, np.float32
    )  # of a prompt, of the class token and of four patches
    together = plain + np.array([0.0, 0.0, 0.1, -0.1, 0.0, 0.0], np.float32)
    maps = MapEvidence(0, (0,), {"class": np.stack([plain, plain, together])})
    pairs = ((1, 0), (1, 0), (2, 4), (3, None))
    passes = [{"class": label, "retained": slot} for label, slot in pairs]
    batch = evidence.batches[0]
    assert batch.description is not None
    description = {**batch.description, "images": [{"passes": passes}]}
    batch = replace(batch, description=description, maps=(maps,))
    return replace(evidence, counts=LINES, batches=(batch,))


def test_cliques_attention_and_retained_prompts_are_counted(
    described: Evidence,
) -> None:
    found = find(described)
    assert found is not None
    assert (found.images, found.batches, found.cliques, found.distinct_sets) == (
        8,
        2,
        5,
        4,
    )
    assert (
        found.mean_size == pytest.approx((4 * 2.5 + 1 * 2.0) / 5)
        and found.max_size == 3
    )
    assert (
        found.images_with_clique,
        found.images_with_retained,
        found.retained_used,
    ) == (8, 2, 2)
    assert (found.common_class, found.common_cliques) == (described.names[1], 2)
    assert found.mapped == 1 and found.moved == pytest.approx(10.0)
    text = " ".join(found.sentences())
    assert (
        "found 5 cliques among 8 images in 2 batches, 4 of them with different members"
        in text
    )
    assert f"candidates for {described.names[1]!r} (2 cliques)" in text
    assert (
        "move 10 % of an image's attention" in text
        and "2 different ones were used" in text
    )


def test_evidence_of_another_method_has_no_cliques(evidence: Evidence) -> None:
    assert find(replace(evidence, counts=({"images": 6, "domain": 0},))) is None


def test_a_run_of_scap_leaves_all_of_it(evaluated: Path) -> None:
    runs = [load_evidence(folder) for folder in evaluated.iterdir()]
    (found,) = [find(evidence) for evidence in runs if evidence is not None]
    assert found is not None and found.batches == 2 and found.images == 40
    assert (
        found.cliques > 0
        and found.mapped > 0
        and found.moved > 0
        and found.retained_used > 0
    )


def test_the_link_leads_to_a_page_of_this_repository() -> None:
    root = Path(__file__).parents[2]
    assert OPEN_QUESTIONS in EXPECTATION and OPEN_QUESTIONS.startswith(REPOSITORY)
    assert (root / OPEN_QUESTIONS.partition("/blob/main/")[2]).is_file()
