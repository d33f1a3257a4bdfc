"""Images that a run repairs and breaks, written into its record."""

from dataclasses import replace
from pathlib import Path

from benchmarks.results.pairing import add_changes
from cliquetta.evaluation.record import load_record
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, make_run


def test_a_record_counts_what_its_method_changed(tmp_path: Path) -> None:
    plain = load_record(make_run(tmp_path, "zero_shot", LABELS, PLAIN))
    tda = load_record(make_run(tmp_path, "tda", LABELS, ADAPTED))
    before, after = add_changes([plain, tda], tmp_path)
    assert before == plain
    assert after == replace(tda, metrics={**tda.metrics, "repaired": 1, "broken": 2})


def test_records_of_other_streams_and_without_predictions_stay(tmp_path: Path) -> None:
    plain = load_record(make_run(tmp_path, "zero_shot", LABELS, PLAIN))
    other = load_record(make_run(tmp_path, "tda", LABELS, ADAPTED, batch_size=8))
    elsewhere = load_record(make_run(tmp_path / "elsewhere", "tda", LABELS, ADAPTED))
    assert add_changes([plain, other, elsewhere], tmp_path) == [plain, other, elsewhere]
