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


def test_domains_are_described_without_cliques(
    evidence: Evidence, tmp_path: Path
) -> None:
    make_run(tmp_path, "zero_shot", LABELS, PLAIN)
    folder = make_run(tmp_path, "domain_norm", LABELS, ADAPTED)
    (run,) = load_runs([folder])[0]
    first = {"batch": 1, "images": 4, "domain": 0, "belief": 0.0, "changed": 0.5}
    second = {"batch": 2, "images": 4, "domain": 0, "belief": 0.2}  # between steps
    third = {"batch": 3, "images": 4, "domain": 2, "belief": 0.1, "changed": 0.0}
    counts = (first, second, third)
    evidence = replace(evidence, counts=counts)
    plain = [replace(entry, description=None) for entry in evidence.batches]
    evidence = replace(evidence, batches=tuple(plain))
    html = evidence_section(run, "domain_norm", evidence, Amounts(), PageFigures())
    text = Reader(html).text
    assert text.startswith("3 batches with the LayerNorms of 2 domains.")
    assert "Weight of the class prior, on average: 10 %." in text
    assert "Predictions that differ from zero-shot CLIP's: 25 %." in text
    assert "Images whose prediction changed" in text
    assert "Cliques" not in text and "Attention" not in text
