"""ImageNet's images, packed from a clone of a few made-up ones."""

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.imagenet_images import (
    PARTS,
    SOURCE_FOLDER,
    encode,
    list_source,
    pack,
    read_part,
    write_folders,
)
from cliquetta.data.catalogue import get_dataset


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with five wide images of each of classes 0, 3 and 10, one colour each."""
    root = tmp_path / "clone"
    for label in (0, 3, 10):
        folder = root / SOURCE_FOLDER / str(label)
        folder.mkdir(parents=True)
        for number in range(5):
            image = Image.new("RGB", (90, 60), (20 * label, 50 * number, 0))
            image.save(folder / f"ILSVRC2012_val_{number:08d}.JPEG")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["commit", "--quiet", "--message=images"],
    ):
        subprocess.run([*git, *words], check=True)
    return root


def test_images_are_listed_by_class_number_and_file_name(clone: Path) -> None:
    listed = [(image.label, image.index) for image in list_source(clone)]
    assert listed == [(label, index) for label in (0, 3, 10) for index in range(5)]


def test_parts_hold_their_places_at_the_size_asked_for(
    clone: Path, tmp_path: Path
) -> None:
    pack(clone, tmp_path / "dev.npz", "dev", size=32, crop=True, processes=1)
    part = read_part(tmp_path / "dev.npz")

    # Three of the five images of each of the classes 0, 3 and 10.
    assert part.index.tolist() == [*PARTS["dev"]] * 3
    assert part.label.tolist() == [0, 0, 0, 3, 3, 3, 10, 10, 10]

    image = Image.open(io.BytesIO(part.jpeg(4)))
    assert image.size == (32, 32)
    colour = np.asarray(image).mean(axis=(0, 1))
    assert colour == pytest.approx([60, 100, 0], abs=3), "class 3, place 2"


def test_equal_inputs_give_equal_files(clone: Path, tmp_path: Path) -> None:
    for name in ("once.npz", "again.npz"):
        pack(clone, tmp_path / name, "report", size=32, crop=True, processes=1)
    assert (tmp_path / "once.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


def test_the_longer_side_is_kept_where_views_need_it() -> None:
    file = io.BytesIO()
    Image.new("RGB", (90, 60)).save(file, "JPEG")
    whole = Image.open(io.BytesIO(encode(file.getvalue(), size=32, crop=False)))
    assert whole.size == (48, 32)


def test_the_folders_are_datasets_with_imagenets_classes(
    clone: Path, tmp_path: Path
) -> None:
    for part, name, crop in (
        ("dev", "imagenet-dev", True),
        ("report", "imagenet-report", True),
        ("report", "imagenet-report-256", False),
    ):
        pack(clone, tmp_path / f"{name}.npz", part, size=32, crop=crop, processes=1)
    folders = tmp_path / "packed"
    write_folders(tmp_path, folders)
    dataset = get_dataset(f"tar:{folders / 'tar' / 'imagenet'}")
    assert len(dataset.names) == 1000 and len(dataset) == 15
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0] * 5 + [3] * 5 + [10] * 5
    assert dataset.keys[5:7] == ("3/3-0", "3/3-1")
    assert np.asarray(dataset.load(9)).mean(axis=(0, 1)) == pytest.approx(
        [60, 200, 0], abs=3
    )
    report = get_dataset(f"tar:{folders / 'tar' / 'imagenet-report'}")
    assert len(report) == 6
