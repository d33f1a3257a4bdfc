"""The page: self-contained, escaped, small, complete; and the command that makes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.data.catalogue import get_dataset
from cliquetta.evaluation.evidence_log import BatchEvidence, Evidence
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.sweep import RunContext
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import MICRO_NOTE
from cliquetta.report.evidence_section import Amounts, evidence_section
from cliquetta.report.gallery import changed_tiles, clique_cards
from cliquetta.report.markup import PageFigures
from cliquetta.report.page import Choices, build_page, unlearned_text
from cliquetta.report.runs import load_runs
from cliquetta.report.sections import headline
from tests._helpers.made_runs import NAMES, make_run

LABELS = [0, 0, 1, 1, 2, 2, 3, 3] * 4
PLAIN = [0, 1, 1, 0, 2, 3, 3, 3] * 4
ADAPTED = [0, 0, 1, 2, 3, 3, 3, 2] * 4

VOID = {"meta", "link", "img", "br", "hr"}


class Reader(HTMLParser):
    """Tags of a page in order, with a check that they are closed in the order they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: Any, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: Any, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.text += data

    def all(self, tag: Any) -> Any:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def evaluated(tiny_clip: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Zero-shot and SCAP with evidence on 40 bundled images, by the tiny model."""
    folder = tmp_path_factory.mktemp("evaluated")
    model = folder / "tiny.safetensors"
    save_model(tiny_clip, model)
    place = RunContext(folder / "runs", device="cpu", evidence=True)
    for method in ("zero_shot", "scap"):
        options = (("lr", 0.3), ("threshold", 0.6)) if method == "scap" else ()
        place.run(
            RunSpec("bundled@fog:3", method, str(model), limit=40, batch_size=20, options=options)
        )
    return folder / "runs"


@pytest.fixture(scope="module")
def page(evaluated: Any) -> Any:
    return build_page(*load_runs([evaluated]))


def test_nothing_is_fetched_from_outside(page: Any) -> None:
    reader = Reader(page.html)
    assert not reader.all("script") and not reader.all("iframe")
    for attributes in (attributes for _, attributes in reader.tags):
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), value
    styles = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert not any("@import" in style or "http" in style for style in styles)
    assert "default-src 'none'" in page.html


def test_every_picture_has_words(page: Any) -> None:
    reader = Reader(page.html)
    assert len(reader.all("img")) > 10
    assert all(attributes["alt"] for attributes in reader.all("img"))
    svgs = [attributes for attributes in reader.all("svg") if "role" in attributes]
    assert len(svgs) == len(reader.all("figure")) >= 4
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in svgs)


def test_links_and_ids_lead_somewhere_and_are_unique(page: Any) -> None:
    reader = Reader(page.html)
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a.get("href") or a.get("xlink:href") for _, a in reader.tags]
    targets += [f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", page.html)]
    inside = {target[1:] for target in targets if target and target.startswith("#")}
    assert inside and inside <= set(ids)


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


def test_colours_follow_the_page(page: Any) -> None:
    figures = re.findall(r"<svg.*?</svg>", page.html, re.DOTALL)
    assert all("var(--ink)" in figure and "#1c2127" not in figure for figure in figures)
    assert "prefers-color-scheme: dark" in page.html and "@media print" in page.html


def test_names_and_titles_cannot_become_markup(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    make_run(folder, "zero_shot", LABELS, PLAIN, names=NAMES)
    scap = make_run(folder, "scap", LABELS, ADAPTED, config={"note": "<script>alert(1)</script>"})
    (scap / "evidence").mkdir()
    about = {"format": "cliquetta-evidence-1", "names": list(NAMES)}
    (scap / "evidence" / "about.json").write_text(json.dumps(about))
    runs, _ = load_runs([folder])
    html = build_page(runs, (), Choices(title="<img src=x>")).html
    assert not Reader(html).all("script")
    assert "<b>frog</b>" not in html and "&lt;b&gt;frog&lt;/b&gt; &amp; co" in html
    assert "<img src=x>" not in html


def test_runs_without_labels_are_reported_without_scores(tmp_path: Path) -> None:
    unknown = [-1] * len(LABELS)
    make_run(tmp_path, "zero_shot", unknown, PLAIN)
    make_run(tmp_path, "tent", unknown, ADAPTED)
    text = Reader(build_page(*load_runs([tmp_path])).html).text
    assert "tent changed 16 of 32 answers; without labels" in text
    assert "Calibration" not in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path, "zero_shot", LABELS, PLAIN)
    for method in ("tent", "tda", "dmn"):
        make_run(tmp_path, method, LABELS, ADAPTED)
    make_run(tmp_path, "scap", LABELS, LABELS)
    make_run(tmp_path, "scap", LABELS, PLAIN, status="running", seed=9)
    runs, unfinished = load_runs([tmp_path])
    page = build_page(runs, unfinished)
    text = Reader(page.html).text
    assert "5 methods on toy@fog:3" in text and "1 unfinished run left out" in text
    assert MICRO_NOTE in text
    assert text.count("tda") > 2
    assert "scap changed 12 of 32 answers: 12 from wrong to right, 0 from right to wrong" in text
    assert "gain of 37.50 points (p = 0.00049)" in text  # 2 ** -11
    assert "tent changed 16 of 32 answers: 4 from wrong to right, 8 from right to wrong" in text


def cards_of(folder: Path) -> list[tuple[str, str]]:
    html = headline(load_runs([folder])[0])
    return re.findall(r"<li><b>([^<]*)</b><span>([^<]*)</span>", html)


def test_figures_of_a_few_methods_head_the_page(tmp_path: Path) -> None:
    for shift in ("toy@fog:3", "toy@contrast:3"):
        make_run(tmp_path, "zero_shot", LABELS, PLAIN, dataset=shift)
        make_run(tmp_path, "scap", LABELS, LABELS, dataset=shift)
    alone = [("62.5 %", "right with zero_shot"), ("100.0 %", "right with scap")]
    assert cards_of(tmp_path) == [
        *alone,
        ("24", "of 64 answers changed"),
        ("24", "from wrong to right"),
        ("0", "from right to wrong"),
    ]
    make_run(tmp_path, "tent", LABELS, ADAPTED, dataset="toy@fog:3")
    assert cards_of(tmp_path) == []  # tent did not see all images
    make_run(tmp_path, "tent", LABELS, ADAPTED, dataset="toy@contrast:3")
    assert cards_of(tmp_path) == [*alone, ("50.0 %", "right with tent")]
    text = Reader(headline(load_runs([tmp_path])[0])).text
    assert "scap changed 24 of 64 answers: 24 from wrong to right" in text
    assert "tent changed 32 of 64 answers: 8 from wrong to right, 16 from right to wrong" in text


def test_all_seeds_count_in_the_figures_that_head_the_page(tmp_path: Path) -> None:
    for seed, answers in enumerate((LABELS, PLAIN)):
        make_run(tmp_path, "zero_shot", LABELS, PLAIN, seed=seed)
        make_run(tmp_path, "scap", LABELS, answers, seed=seed)
    right = sum(a == b for a, b in zip(LABELS, PLAIN, strict=True)) / len(LABELS)
    assert cards_of(tmp_path)[:2] == [
        (f"{100 * right:.1f} %", "right with zero_shot"),
        (f"{50 * (1 + right):.1f} %", "right with scap"),
    ]
    assert cards_of(tmp_path)[2][1] == f"of {2 * len(LABELS)} answers changed"


def test_domains_are_described_without_cliques(tmp_path: Path) -> None:
    make_run(tmp_path, "zero_shot", LABELS, PLAIN)
    folder = make_run(tmp_path, "domain_norm", LABELS, ADAPTED)
    (run,) = load_runs([folder])[0]
    lines = ((0, 0.0, 0.5), (0, 0.2, 0.7), (2, 0.1, 0.9))
    counts = tuple(
        {"batch": 1 + place, "images": 4, "domain": domain, "belief": belief, "step_size": size}
        | {"changed": 0.25, "restarts": 0, "abstained": 8, "verdict": "adapt"}
        for place, (domain, belief, size) in enumerate(lines)
    )
    evidence = replace(_evidence(), counts=counts)
    plain = [replace(batch, description=None) for batch in evidence.batches]
    evidence = replace(evidence, batches=tuple(plain))
    html = evidence_section(run, "domain_norm", evidence, Amounts(), PageFigures())
    text = Reader(html).text
    assert text.startswith("3 batches with the LayerNorms of 2 domains.")
    assert "allowed 70 % of a full step" in text and "were believed to 10 %" in text
    assert "25 % of its answers were changed" in text and "without labels: adapt." in text
    assert "left to zero-shot CLIP (abstained): 8." in text
    assert "Images whose answer changed" in text
    assert "Cliques" not in text and "Attention" not in text


def test_a_large_report_loses_its_galleries_first(page: Any, evaluated: Any) -> None:
    runs, _ = load_runs([evaluated])
    whole = len(page.html.encode())
    assert whole < 3_000_000
    small = build_page(runs, (), Choices(limit=whole // 3)).html
    assert len(small.encode()) <= whole // 3
    text = Reader(small).text
    assert "To keep the page small" in text and "How to repeat it" in text
    assert "Accuracy over the stream" in text and "Inside scap" not in text


def _evidence(pictures: int = 6) -> Evidence:
    cliques = [
        {"id": 0, "class": 1, "members": [0, 1, 2], "size": 3, "set": 0},
        {"id": 1, "class": 2, "members": [0, 1, 2], "size": 3, "set": 0},
        {"id": 2, "class": 1, "members": [3, 4], "size": 2, "set": 1},
        {"id": 3, "class": 3, "members": [4, 5], "size": 2, "set": 2},
    ]
    cliques = [clique | {"before": {"total": 1.5}, "after": None} for clique in cliques]
    features = np.eye(6, dtype=np.float32)
    features[1] = features[2] = [0.6, 0.8, 0, 0, 0, 0]
    batch = BatchEvidence(
        number=2,
        keys=tuple("abcdef"),
        labels=(0, 0, 1, 1, 2, -1),
        before=(1, 0, 1, 1, 2, 3),
        after=(0, 0, 0, 1, 3, 2),
        confidence=(0.5,) * 6,
        description={"cliques": cliques},
        features=features,
        prompted=None,
        pictures=np.zeros((pictures, 8, 8, 3), np.uint8),
        maps=(),
    )
    return Evidence(NAMES, (), (batch,))


def test_gallery_shows_unlike_cliques_with_most_changes_first() -> None:
    cards = clique_cards(_evidence(), 3)
    assert [(card.label, card.size) for card in cards] == [(1, 3), (3, 2), (1, 2)]
    first = cards[0]
    assert [tile.key for tile in first.tiles] == ["a", "c", "b"]  # repaired, broken, same
    assert [tile.change for tile in first.tiles] == ["repaired", "broken", "same"]
    similar = {tile.key: tile.similarity for tile in first.tiles}
    assert similar["a"] == pytest.approx(0.6) and similar["b"] == pytest.approx(0.8)
    assert len(clique_cards(_evidence(), 1)) == 1


def test_changed_images_are_sorted_by_what_became_of_them() -> None:
    tiles = changed_tiles(_evidence(), 10)
    assert [(tile.key, tile.change) for tile in tiles] == [
        ("a", "repaired"),
        ("c", "broken"),
        ("e", "broken"),
        ("f", "moved"),
    ]
    assert len(changed_tiles(_evidence(), 2)) == 2


def run_command(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_command_writes_page_and_figures(evaluated: Any, tmp_path: Path) -> None:
    out, figures = tmp_path / "deep" / "page.html", tmp_path / "figures"
    words = ("--out", out, "--figures", figures, "--attention", "rollout", "--title", "My run")
    result = run_command("report", evaluated, *words, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["bytes"] == out.stat().st_size < 3_000_000
    assert len(answer["runs"]) == 2 and len(answer["figures"]) >= 8
    assert "<title>My run</title>" in out.read_text() and "attention rollout" in out.read_text()
    starts = {path.suffix: path.read_bytes()[:4] for path in figures.iterdir()}
    assert starts == {".png": b"\x89PNG", ".pdf": b"%PDF"}


def test_equal_runs_give_equal_pages(page: Any, evaluated: Any) -> None:
    assert build_page(*load_runs([evaluated])).html == page.html


def test_command_refuses_what_it_cannot_report_on(tmp_path: Path) -> None:
    for words, reason in (
        ((tmp_path,), "no runs in"),
        ((tmp_path / "none",), "no such folder"),
        ((tmp_path, "--attention", "rollup"), "did you mean 'rollout'"),
        ((tmp_path, "--map", "umap"), "unknown map 'umap'"),
    ):
        result = run_command("report", *words, "--out", tmp_path / "page.html")
        assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output
    make_run(tmp_path / "half", "tent", LABELS, PLAIN, status="failed")
    result = run_command("report", tmp_path / "half", "--out", tmp_path / "page.html")
    assert result.exit_code == 2 and "no finished run" in result.output
    assert not (tmp_path / "page.html").exists()


def test_class_names_come_from_the_data_set_where_the_run_left_none(evaluated: Any) -> None:
    runs, _ = load_runs(sorted(evaluated.glob("*zero_shot*")))
    assert runs[0].evidence is None and runs[0].names == get_dataset("bundled").names


def test_runs_that_learned_no_text_are_named() -> None:
    told = {"text_prompts": "'{} texture.' has no words before the name"}
    silent = Record("a", {"method": "scap", "dataset": "dtd"}, notes=told)
    learned = Record("b", {"method": "scap", "dataset": "pets"}, notes={"text_prompts": "learned"})
    (note,) = unlearned_text([silent, learned, silent])
    assert note == "scap learned no text prompt on dtd: '{} texture.' has no words before the name."
