"""The documentation site: pages of methods have one shape, and what pages say runs."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import cliquetta
from cliquetta import create_method, get_dataset
from cliquetta.data.images import open_image
from cliquetta.export import export_model
from cliquetta.methods.building import registry
from cliquetta.methods.building.registry import MethodEntry, method_entries
from docs import hooks
from docs.hooks import DOCS, method_page, page_of
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.trees import exif_of

SHAPE = ("How to run it", "Settings", "What it costs and gains", "When to use it")
_NAMES = (
    "index",
    "quickstart/own-images",
    "quickstart/research",
    "predict",
    "features",
)
PAGES = [
    DOCS / f"{name}.md" for name in (*_NAMES, "pipeline", "write-a-method", "embed")
]


@pytest.fixture(autouse=True)
def no_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all recorded runs takes seconds; `make docs` fills them in."""
    monkeypatch.setattr(hooks, "_boards", dict)


def filled(entry: MethodEntry) -> str:
    """The page of a method as the site shows it."""
    name = page_of(entry.name)
    assert name is not None, f"write docs/methods/{entry.name}.md"
    own = [other for other in method_entries() if page_of(other.name) == name]
    return method_page((DOCS / name).read_text(encoding="utf-8"), own)


def programs(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three photos."""
    dataset = get_dataset("bundled")
    (tmp_path / "photos").mkdir()
    for index in range(3):
        dataset.load(index).save(tmp_path / "photos" / f"{index + 1}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.mark.parametrize("entry", method_entries(), ids=lambda entry: entry.name)
def test_pages_of_methods_have_one_shape(entry: MethodEntry) -> None:
    text = filled(entry)
    for heading in SHAPE[:3]:
        assert f"\n## {heading}\n" in text, heading
    assert "When to use it" in text
    assert f"cliquetta methods {entry.name}" in text or "| setting | type |" in text
    if entry.name != "domain_norm":  # ours
        assert "\n## Reference\n" in text
        assert "arxiv.org/abs/" in text or entry.name == "dart"


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize("entry", method_entries(), ids=lambda entry: entry.name)
def test_snippets_of_methods_run(
    entry: MethodEntry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a tiny model, and few-shot methods with one image per class: some fit for minutes."""
    monkeypatch.setattr(cliquetta, "create_model", lambda name: build_tiny_clip())
    own = [text for text in programs(filled(entry)) if f'"{entry.name}"' in text]
    assert own, "the page has no program that names the method"
    for program in own:
        exec(program.replace("dataset, 16", "dataset, 1"), {})
    assert "photos" not in program or "tensor(" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", DOCS / "quickstart/own-images.md"]
)
def test_a_damaged_photo_stops_no_first_program(
    page: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "4.jpg").write_bytes(b"no picture")
    exec(programs(page.read_text(encoding="utf-8"))[0], {})
    assert "4.jpg" in capsys.readouterr().out


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_of_pages_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "_ENTRIES", dict(registry._ENTRIES)
    )  # one page registers another
    snippets = programs(page.read_text(encoding="utf-8"))
    assert snippets
    for program in snippets:
        Path("program.py").write_text(program, encoding="utf-8")
        runpy.run_path("program.py", run_name="program")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain CLIP as an ONNX file."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    export_model(
        create_method("zero_shot", build_tiny_clip(), ["cat", "dog", "ship"]), path
    )
    return path


@pytest.mark.parametrize("rule", [{}, {"crop_rounding": "floor"}, {"resize": "squash"}])
def test_the_program_beside_onnxruntime_prepares_images_as_we_do(
    rule: dict[str, Any],
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_tiny_clip()
    model.preprocess = replace(model.preprocess, **rule)
    method = create_method("zero_shot", model, ["cat", "dog", "ship"])
    file = onnx.load(str(exported))
    (entry,) = (entry for entry in file.metadata_props if entry.key == "preprocess")
    entry.value = json.dumps(model.preprocess.to_dict())
    onnx.save(file, str(tmp_path / "model.onnx"))
    monkeypatch.chdir(tmp_path)
    (program,) = programs((DOCS / "export.md").read_text(encoding="utf-8"))
    for size in ((43, 32), (33, 50), (32, 32), (100, 75)):
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save("photo.jpg", exif=exif_of(6))
        variables: dict[str, Any] = {}
        exec(program, variables)
        expected = model.preprocess(open_image("photo.jpg")).numpy()
        # one rounding each of a quotient, a difference and a quotient of numbers up to
        # 3
        np.testing.assert_allclose(
            variables["pixels"].transpose(2, 0, 1), expected, rtol=0, atol=2**-20
        )
        best = int(method.predict("photo.jpg").logits.argmax())
        assert (
            variables["names"][int(variables["logits"].argmax())]
            == method.prompts.names[best]
        )


def test_photos_are_sorted_into_folders(photos: Path) -> None:
    (photos / "4.jpg").write_bytes(b"no picture")
    (program,) = [
        p for p in programs((DOCS / "predict.md").read_text()) if "sorted" in p
    ]
    exec(program, {})
    assert sorted(path.name for path in Path("sorted").glob("*/*")) == [
        "1.jpg",
        "2.jpg",
        "3.jpg",
    ]


def test_the_walk_of_a_batch_names_files_that_exist() -> None:
    text = (
        (DOCS / "concepts.md")
        .read_text(encoding="utf-8")
        .split("## One batch, file by file")[1]
    )
    rows = [
        line.split("|")[2:-1] for line in text.splitlines() if re.match(r"\| \d", line)
    ]
    for column, most in enumerate((8, 6, 9)):
        assert 0 < sum(bool(row[column].strip()) for row in rows) <= most
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (DOCS.parent / "src/cliquetta" / path).exists(), path


def test_links_and_paths_lead_somewhere_and_every_page_is_linked() -> None:
    linked = {DOCS / "index.md"}
    for page in [
        *DOCS.rglob("*.md"),
        DOCS.parent / "README.md",
        DOCS.parent / "CONTRIBUTING.md",
    ]:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(
            r"(?<=[`\s])(?:src|tests|docs|training)/[\w./-]*\w", text
        ):
            known = (DOCS.parent / path).exists() or "NAME" in path or "FILE" in path
            assert known, f"{page.name}: {path}"
        for target in re.findall(r"\]\((?!https?:)([^)\s#]+)", text):
            linked_file = (page.parent / target).resolve()
            assert linked_file.exists(), f"{page}: {target}"
            linked |= {linked_file} - {page}
    assert set(DOCS.rglob("*.md")) - linked == set()


NARROW = 80
WIDE_LINES = {
    "domain_norm.md": 82,
    "predict.md": 114,
    "serving.md": 108,
    "pipeline.md": 100,
}
"""Pages that others were changing on 2026-11-19; to be removed one by one."""


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]
)
def test_lines_of_code_fit_a_page(page: Path) -> None:
    most = WIDE_LINES.get(page.name, NARROW)
    blocks = re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), re.S | re.M)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > most]
    assert not wide


def test_cells_of_tables_carry_the_name_of_their_column() -> None:
    html = "<table><thead><tr><th>a <b>b</b></th><th>x &lt; 1</th></tr></thead><tbody>"
    html += '<tr><td>1</td><td style="text-align: right;">2</td></tr></tbody></table>'
    labelled = hooks.label_cells(html)
    assert '<td data-label="a b"><div>1</div></td>' in labelled
    assert (
        '<td style="text-align: right;" data-label="x &lt; 1"><div>2</div></td>'
        in labelled
    )
