"""``cliquetta data doctor``."""

import json
from pathlib import Path

import pytest
from PIL import Image

from cliquetta import get_dataset
from cliquetta.data.benchmarks import BENCHMARKS
from tests._helpers.running import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two pictures of PACS, one of them damaged, and a folder of something else."""
    (tmp_path / "PACS/sketch/dog").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "PACS/sketch/dog/1.png")
    (tmp_path / "PACS/sketch/dog/2.png").write_bytes(b"damaged")
    return tmp_path


def test_the_table_and_what_is_missing(run: Run, root: Path) -> None:
    result = run("data", "doctor", root)
    assert result.code == 0
    missing = f"{len(BENCHMARKS) - 1} datasets not found"
    for words in ("pacs", "incomplete", "2 / 9,991", missing, "other"):
        assert words in result.text
    result = run("data", "doctor", root, "--only", "imagenet-a")
    assert result.code == 0 and "natural-adv-examples" in result.text


def test_deep_names_damaged_files_and_ends_with_three(run: Run, root: Path) -> None:
    result = run(
        "data", "doctor", root, "--deep", "--only", "pacs", "--quiet", "--json"
    )
    assert result.code == 3
    finding = json.loads(result.stdout)["findings"][0]
    assert list(finding["opened"]["unreadable"]) == ["sketch/dog/2.png"]
    assert finding["splits"]["sketch"] == {"found": 2, "expected": 3929, "absent": 0}


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Forty bundled images of two classes, in folders."""
    dataset = get_dataset("bundled")
    assert dataset.labels is not None
    folder = tmp_path / "animals"
    for name in ("frog", "ship"):
        (folder / name).mkdir(parents=True)
        rows = (dataset.labels == dataset.names.index(name)).nonzero()[:20, 0].tolist()
        for row in rows:
            dataset.load(row).save(folder / name / f"{row}.png")
    return folder


def test_a_folder_of_ones_own_is_examined(run: Run, animals: Path) -> None:
    (animals / "ship/cut.png").write_bytes(b"damaged")
    for words in ((animals,), (f"folder:{animals}",)):
        result = run("data", "doctor", *words, "--classes", "frog,ship,cat")
        assert result.code == 3
        for said in (
            "frog",
            "20",
            "41 images",
            "cannot be read",
            "'cat'",
            "shorter side 32",
        ):
            assert said in result.text, said


def test_zero_shot_is_compared_with_chance(run: Run, animals: Path) -> None:
    result = run("data", "doctor", animals, "--model", "micro", "--json")
    assert result.code == 0
    score = json.loads(result.stdout)["zero_shot"]
    assert score["images"] == 40 and score["chance"] == 50 and score["p"] < 1e-6
    (animals / "frog").rename(animals / "x")
    (animals / "ship").rename(animals / "frog")
    (animals / "x").rename(animals / "ship")
    result = run("data", "doctor", animals, "--model", "micro")
    assert "this may be chance" in result.text


def test_a_folder_without_images_is_no_folder_of_ones_own(
    run: Run, tmp_path: Path
) -> None:
    result = run("data", "doctor", tmp_path)
    assert result.code == 0 and "not found under" in result.text
