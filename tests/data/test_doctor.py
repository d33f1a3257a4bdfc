"""The look over a data folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data.doctor import Finding, SplitCount, examine
from cliquetta.errors import UnknownNameError
from tests._helpers.trees import TREES, UNLABELLED, picture, split, write


def one(root: Path, id: str, **options: Any) -> Finding:
    return examine(root, ids=[id], **options).findings[0]


def test_all_trees_are_recognised_and_counted(tmp_path: Path) -> None:
    expected = {id: len(make(tmp_path)) for id, make in TREES.items()}
    for id, file in UNLABELLED.items():
        picture(tmp_path / file)
        expected[id] = 1
    report = examine(tmp_path)
    found = {}
    for finding in report.findings:
        first = next(iter(finding.splits.values()))
        found[finding.id] = first.found
    assert found == expected
    assert {finding.state for finding in report.findings} == {"incomplete"}
    assert report.unknown_folders == ()


def test_counts_classes_and_absent_files(tmp_path: Path) -> None:
    TREES["dtd"](tmp_path)
    (tmp_path / "dtd/dtd/images/banded/banded_0060.jpg").unlink()
    finding = one(tmp_path, "dtd")
    assert finding.splits["test"] == SplitCount(found=1, expected=1692, absent=1)
    assert len(finding.empty_classes) == 46
    assert "banded" in finding.empty_classes
    counts = "1 images, a complete copy has 1,692; 1 listed files are missing"
    assert counts in finding.problems
    assert "46 of 47 classes have no images" in "\n".join(finding.problems)
    assert finding.folder == str(tmp_path / "dtd/dtd/images")


def test_a_complete_copy_has_no_problems(tmp_path: Path) -> None:
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    # CIFAR's binary format: a byte of the label, then those of the picture
    rows = np.zeros((10_000, 1 + 32 * 32 * 3), np.uint8)
    rows[:, 0] = np.arange(10_000) % 10
    (home / "test_batch.bin").write_bytes(rows.tobytes())
    write(home / "data_batch_1.bin", "")
    finding = one(tmp_path, "cifar10", deep=True)
    assert finding.state == "complete"
    assert finding.get == ""
    assert finding.opened is None
    assert finding.splits == {"test": SplitCount(10_000, 10_000)}


def test_deep_finds_damaged_files_duplicates_and_contradictions(tmp_path: Path) -> None:
    TREES["pacs"](tmp_path)  # a.jpg, b.png
    for name in ("dog/1", "dog/2", "horse/3"):
        picture(tmp_path / f"PACS/photo/{name}.png", 50)
    (tmp_path / "PACS/photo/horse/4.png").write_bytes(b"")
    seen: list[tuple[str, int, int]] = []
    finding = one(tmp_path, "pacs", deep=True, on_image=lambda *at: seen.append(at))
    assert seen[-1] == ("pacs", 6, 6)
    opened = finding.opened
    assert opened is not None
    assert opened.images == 6
    assert opened.unreadable == {"photo/horse/4.png": "an empty file"}
    assert opened.duplicates == 2
    assert opened.contradictions == (("photo/dog/1.png", "photo/horse/3.png"),)
    assert "1 images cannot be read" in "\n".join(finding.problems)
    assert one(tmp_path, "pacs").opened is None


def test_broken_data_are_distinguished_from_missing_ones(tmp_path: Path) -> None:
    TREES["caltech101"](tmp_path)
    split(
        tmp_path / "caltech-101/split_zhou_Caltech101.json",
        [("x.jpg", 0, "background")],
    )
    write(tmp_path / "imagenet-r.tar", "")
    TREES["eurosat"](tmp_path)
    (tmp_path / "EuroSAT/split_zhou_EuroSAT.json").unlink()
    for id, problem in (
        ("caltech101", "calls class 0 'background', our list calls it 'face'"),
        ("imagenet-r", "imagenet-r.tar is not extracted"),
        ("eurosat", "is there, but not split_zhou_EuroSAT.json"),
    ):
        finding = one(tmp_path, id)
        assert finding.state == "broken"
        assert problem in finding.problems[0]


def test_label_traps_are_named_where_they_lurk(tmp_path: Path) -> None:
    TREES["imagenet-v2"](tmp_path)
    TREES["caltech101"](tmp_path)
    for id, trap in (
        ("imagenet-v2", "sorted as strings"),
        ("caltech101", "Faces_easy"),
    ):
        assert trap in "\n".join(one(tmp_path, id).notes)


def test_missing_data_and_unknown_folders_and_names(tmp_path: Path) -> None:
    for name in ("holiday photos", "splits", ".cache", "PACS"):
        (tmp_path / name).mkdir()
    report = examine(tmp_path)
    assert report.unknown_folders == ("holiday photos",)
    for finding in report.findings:
        assert finding.state == "missing"
        assert finding.get
        assert not finding.problems
    with pytest.raises(UnknownNameError):
        examine(tmp_path, ids=["petz"])
    with pytest.raises(ValueError, match="no folder"):
        examine(tmp_path / "gone")
