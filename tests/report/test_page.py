"""The page and its command: complete, small, the same again."""

import json
from typing import Any

from cliquetta.evaluation.record import Record
from cliquetta.report.page import Choices, build_page, unlearned_text
from cliquetta.report.runs import load_runs
from tests._helpers.html_reader import Reader


def test_the_sections_of_a_run_with_evidence(page: Any, evaluated: Any) -> None:
    text = Reader(page.html).text
    for heading in ("Results", "Accuracy over the stream", "Calibration", "Inside scap",
                    "Cliques", "Attention", "Features", "How to repeat it"):  # fmt: skip
        assert heading in text
    assert "cliquetta evaluate --dataset bundled@fog:3 --method scap" in text
    assert "--set lr=0.3" in text
    for record in evaluated.glob("*/record.json"):
        top1 = json.loads(record.read_text())["metrics"]["top1"]
        assert f"{top1:.2f}" in text
    kinds = {name.partition("-")[0] for name in page.figures}
    assert {"stream", "reliability", "attention", "features"} <= kinds
    assert (
        build_page(*load_runs([evaluated])).html == page.html
    )  # equal runs, equal pages


def test_a_large_report_loses_its_galleries_first(page: Any, evaluated: Any) -> None:
    runs, _ = load_runs([evaluated])
    size = len(page.html.encode())
    assert size < 3_000_000
    small = build_page(runs, (), Choices(limit=size // 3)).html
    assert len(small.encode()) <= size // 3
    text = Reader(small).text
    assert "To keep the page small" in text and "How to repeat it" in text
    assert "Accuracy over the stream" in text and "Inside scap" not in text


def test_runs_that_learned_no_text_are_named() -> None:
    notes = {"text_prompts": "'{} texture.' has no words before the name"}
    silent = Record("a", {"method": "scap", "dataset": "dtd"}, notes=notes)
    learned = Record(
        "b", {"method": "scap", "dataset": "pets"}, notes={"text_prompts": "learned"}
    )
    (note,) = unlearned_text([silent, learned, silent])
    assert (
        note
        == "scap learned no text prompt on dtd: '{} texture.' has no words before the name."
    )
