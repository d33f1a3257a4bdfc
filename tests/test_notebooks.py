"""The notebooks of the documentation run from top to bottom on the bundled model."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, as_version=4)
    NotebookClient(
        book,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    text = "\n".join(
        str(output.get("text", output.get("data", ""))) for output in outputs
    )
    for expected in {
        "own_images": ("data:image/webp", "'score'", "learned from 85 images"),
        "researchers": ("domain_norm", "%"),
        "serving": ("not an image", "vehicle"),
    }[path.stem]:
        assert expected in text, expected


def test_notebooks_are_stored_without_output() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None, (
                path.name
            )
