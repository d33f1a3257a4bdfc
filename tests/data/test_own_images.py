"""What `data doctor` finds in a folder of one's own images."""

from pathlib import Path

import pytest
from PIL import Image

from cliquetta.data.own_images import examine_own
from cliquetta.errors import UserError
from tests._helpers.trees import random_pixels


def picture(path: Path, *, seed: int, side: int = 32) -> None:
    """Write random pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random_pixels(side, side + 8, 3, seed=seed)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes with a duplicate, a contradiction, a small and a damaged image."""
    fox = tmp_path / "red_fox"
    for number in range(3):
        picture(fox / f"{number}.png", seed=number)
    picture(fox / "again.png", seed=0)

    wolf = tmp_path / "wolf"
    picture(wolf / "also.png", seed=1)
    picture(wolf / "small.png", seed=7, side=16)
    (wolf / "cut.png").write_bytes(b"no picture")
    (wolf / "notes.txt").write_text("by hand")
    return tmp_path


def test_everything_about_a_folder_of_classes(photos: Path) -> None:
    seen = []
    found = examine_own(
        f"folder:{photos}",
        classes=["Red fox", "badger"],
        side=32,
        on_image=lambda *now: seen.append(now),
    )
    assert seen[-1] == (7, 7)
    assert found.classes == {"red fox": 4, "wolf": 3}
    assert found.unlisted == ("wolf",)
    assert found.empty == ("badger",)
    assert found.unused == {".txt": 1}
    assert found.unreadable == {"wolf/cut.png": "not an image in a known format"}
    assert found.duplicates == (
        ("red_fox/0.png", "red_fox/again.png"),
        ("red_fox/1.png", "wolf/also.png"),
    )
    assert found.contradictions == (("red_fox/1.png", "wolf/also.png"),)
    assert found.shortest == 16
    assert found.median == 32
    assert found.smaller == ("wolf/small.png",)

    text = "\n".join(found.problems)
    for words in (
        "cannot be read",
        "in two classes",
        "repeat another",
        "below the model's 32",
        "the list lacks: 'wolf'",
        "without an image: 'badger'",
    ):
        assert words in text


def test_a_folder_without_labels_is_opened_as_well(photos: Path) -> None:
    found = examine_own(f"folder:{photos / 'wolf'}")
    assert found.classes == {}
    assert found.images == 3
    assert len(found.unreadable) == 1
    assert len(found.smaller) == 2  # of the 224 pixels that most models take


def test_nothing_wrong_is_no_problem(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png", seed=0)
    picture(tmp_path / "dog" / "1.png", seed=1)
    found = examine_own(f"folder:{tmp_path}", classes=["cat", "dog"], side=32)
    assert found.problems == ()


def test_classes_of_very_different_size_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "rare" / "1.png", seed=99)
    for number in range(10):
        picture(tmp_path / "common" / f"{number}.png", seed=number)
    found = examine_own(f"folder:{tmp_path}", side=32)
    (problem,) = found.problems
    assert "'common' has 10 images and 'rare' 1" in problem


def test_a_table_of_numbers_needs_the_class_list(tmp_path: Path) -> None:
    picture(tmp_path / "1.png", seed=1)
    (tmp_path / "list.csv").write_text("path,class\n1.png,1\n")
    found = examine_own(
        f"csv:{tmp_path / 'list.csv'}",
        classes=["cat", "dog"],
    )
    assert found.classes == {"dog": 1}
    assert found.empty == ("cat",)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        examine_own(f"csv:{tmp_path / 'gone.csv'}")
