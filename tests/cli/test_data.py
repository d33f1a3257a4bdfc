"""``cliquetta data doctor``."""

import json
from pathlib import Path

import pytest
from PIL import Image

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
    result = run("data", "doctor", root, "--deep", "--only", "pacs", "--quiet", "--json")
    assert result.code == 3
    finding = json.loads(result.stdout)["findings"][0]
    assert list(finding["opened"]["unreadable"]) == ["sketch/dog/2.png"]
    assert finding["splits"]["sketch"] == {"found": 2, "expected": 3929, "absent": 0}
