"""The sentences about what a run did."""

from dataclasses import replace
from pathlib import Path

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.report.evidence_section import Amounts, evidence_section
from cliquetta.report.markup import PageFigures
from cliquetta.report.runs import load_runs
from tests._helpers.html_reader import Reader
from tests._helpers.made_runs import STREAM, make_run

LABELS, PLAIN, ADAPTED = STREAM


def test_domains_are_described_without_cliques(evidence: Evidence, tmp_path: Path) -> None:
    make_run(tmp_path, "zero_shot", LABELS, PLAIN)
    folder = make_run(tmp_path, "domain_norm", LABELS, ADAPTED)
    (run,) = load_runs([folder])[0]
    lines = ((0, 0.0, 0.5), (0, 0.2, 0.7), (2, 0.1, 0.9))
    counts = tuple(
        {"batch": 1 + batch, "images": 4, "domain": domain, "belief": belief, "step_size": size}
        | {"changed": 0.25, "restarts": 0, "abstained": 8, "verdict": "adapt"}
        for batch, (domain, belief, size) in enumerate(lines)
    )
    evidence = replace(evidence, counts=counts)
    plain = [replace(entry, description=None) for entry in evidence.batches]
    evidence = replace(evidence, batches=tuple(plain))
    html = evidence_section(run, "domain_norm", evidence, Amounts(), PageFigures())
    text = Reader(html).text
    assert text.startswith("3 batches with the LayerNorms of 2 domains.")
    assert "allowed 70 % of a full step" in text and "were believed to 10 %" in text
    assert "25 % of its predictions were changed" in text and "without labels: adapt." in text
    assert "left to zero-shot CLIP (abstained): 8." in text
    assert "Images whose prediction changed" in text
    assert "Cliques" not in text and "Attention" not in text
