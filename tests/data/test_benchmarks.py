"""Every known dataset, read from a small folder in its official layout."""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.data.benchmarks import BENCHMARKS, DataNotFoundError
from cliquetta.data.catalogue import get_dataset, list_datasets
from cliquetta.data.corruptions import ShiftedDataset
from cliquetta.data.dataset import ArrayDataset, Dataset, FileDataset
from cliquetta.errors import UserError
from tests._helpers.trees import (
    TREES,
    UNLABELLED,
    Tree,
    cifar_rows,
    picture,
    pictures,
    random_pixels,
    split,
    trees,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*a complete copy has:UserWarning")


def stated(dataset: Dataset) -> dict[str, str]:
    """Class name by key."""
    labels = dataset.labels.tolist()
    return {
        key: dataset.names[label]
        for key, label in zip(dataset.keys, labels, strict=True)
    }


def test_all_promised_ids_are_there() -> None:
    assert {entry.id for entry in list_datasets()} > {*TREES, *UNLABELLED}
    assert {benchmark.id for benchmark in BENCHMARKS} == {*TREES, *UNLABELLED}


# In folder 10, the third as strings are sorted, are images of the eleventh class.
OTHERS = trees("""
imagenet-c/fog/3 | imagenet-c/fog/3 | n01440764/a.JPEG: tench
imagenet-v2 | imagenetv2-matched-frequency-format-val
  | 0/x.jpeg: tench; 2/x.jpeg: great white shark; 10/x.jpeg: brambling
imagenet-v2/top-images | imagenetv2/top-images | 0/x.jpeg: tench
imagenet-v2/top-images | imagenetv2/imagenetv2-top-images-format-val | 0/x.jpeg: tench
tiny-imagenet | tiny-imagenet-200/val | n01443537/images/x.JPEG: goldfish
tiny-imagenet/train | tiny-imagenet-200/train | n03444034/images/y.JPEG: go-kart
cars | stanford_cars/test
  | AM General Hummer SUV 2000/000046.jpg: 2000 AM General Hummer SUV;
  Ram C-V Cargo Van Minivan 2012/1.jpg: 2012 Ram C/V Cargo Van Minivan
cifar100 | cifar100/test
  | aquarium_fish/goldfish_s_1.png: aquarium fish; worm/worm_s_1.png: worm
flowers102 | flowers102
  | train/77/image_00002.jpg > image_00002.jpg: 76 passion flower;
  valid/1/image_00001.jpg > image_00001.jpg: 0 pink primrose
  | splits/split_zhou_OxfordFlowers.json
imagenet | imagenet/val
  | ILSVRC2012_val_00000001.JPEG: sea snake; ILSVRC2012_val_00000002.JPEG: mountain
  | imagenet/val.txt | ILSVRC2012_val_00000001.JPEG 65; ILSVRC2012_val_00000002.JPEG 970
imagenet | imagenet/val
  | ILSVRC2012_val_00000001.JPEG: sea snake; ILSVRC2012_val_00000002.JPEG: mountain
  | imagenet/imagenet_2012_validation_synset_labels.txt | n01751748; n09193705
imagenet | imagenet/val
  | ILSVRC2012_val_00000001.JPEG: sea snake; ILSVRC2012_val_00000002.JPEG: mountain
  | imagenet/LOC_val_solution.csv | ImageId,PredictionString;
  ILSVRC2012_val_00000001,n01751748 111 108 441 193 ;
  ILSVRC2012_val_00000002,n09193705 1 2 3 4 n09193705 5 6 7 8
""")


@pytest.mark.parametrize(("id", "make"), [*TREES.items(), *OTHERS])
def test_layouts(id: str, make: Tree, tmp_path: Path) -> None:
    expected = make(tmp_path)
    dataset = get_dataset(id, tmp_path)
    assert stated(dataset) == expected
    assert dataset.id == id
    assert dataset.load(0).mode == "RGB"


@pytest.mark.parametrize("id", UNLABELLED)
def test_images_of_no_class_are_for_open_sets(id: str, tmp_path: Path) -> None:
    picture(tmp_path / UNLABELLED[id])
    with pytest.raises(UserError, match="--unknown"):
        get_dataset(id, tmp_path)
    dataset = get_dataset(id, tmp_path, classes=["cat", "dog"])
    assert len(dataset) == 1
    assert dataset.names == ("cat", "dog")
    assert dataset.labels is None


def test_severities_of_cifar_c_follow_each_other(tmp_path: Path) -> None:
    # ten rows: two images at severities 1 to 5
    TREES["cifar10-c"](tmp_path)
    rows = random_pixels(10, 32, 32, 3)
    mildest: Any = get_dataset("cifar10-c/gaussian_noise/1", tmp_path)
    strongest: Any = get_dataset("cifar10-c/gaussian_noise/5", tmp_path)
    assert np.array_equal(mildest.arrays([0, 1]), rows[:2])
    assert np.array_equal(strongest.arrays([0, 1]), rows[8:])


def test_a_corruption_or_labels_that_lack_are_named(tmp_path: Path) -> None:
    TREES["cifar10-c"](tmp_path)
    with pytest.raises(UserError, match=r"fog\.npy"):
        get_dataset("cifar10-c/fog/1", tmp_path)
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.zeros(3))
    with pytest.raises(UserError, match="labels"):
        get_dataset("cifar10-c", tmp_path)


def test_lists_of_domainnet_are_held_against_the_class_list(tmp_path: Path) -> None:
    pictures(
        tmp_path / "domainnet", ["clipart/aircraft_carrier/1.jpg", "clipart/ant/2.jpg"]
    )
    write(tmp_path / "domainnet/clipart_test.txt", "clipart/ant/2.jpg 9\n")
    assert stated(get_dataset("domainnet/clipart-test", tmp_path)) == {
        "clipart/ant/2.jpg": "ant"
    }
    assert len(get_dataset("domainnet/clipart", tmp_path)) == 2
    write(tmp_path / "domainnet/clipart_test.txt", "clipart/ant/2.jpg 8\n")
    with pytest.raises(UserError, match="contradicts"):
        get_dataset("domainnet/clipart-test", tmp_path)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.id)
def test_missing_data_say_where_they_were_looked_for_and_how_to_get_them(
    benchmark: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        get_dataset(benchmark.id, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert benchmark.get in message
    assert benchmark.folders[0] in message
    assert benchmark.layouts[0].name in message
    with pytest.raises(ValueError, match="--root"):
        get_dataset(benchmark.id)


def test_the_root_may_be_the_dataset_itself_and_names_are_matched_loosely(
    tmp_path: Path,
) -> None:
    expected = TREES["eurosat"](tmp_path)
    folder = tmp_path / "EuroSAT"
    by_itself = get_dataset("eurosat", folder)
    assert stated(by_itself) == expected

    folder.rename(tmp_path / "Euro_SAT")
    renamed = get_dataset("eurosat", tmp_path)
    assert stated(renamed) == expected


def test_an_incomplete_copy_warns_with_both_counts(tmp_path: Path) -> None:
    TREES["dtd"](tmp_path)
    with pytest.warns(UserWarning, match="dtd: 2 .* 1,692"):
        dataset = get_dataset("dtd", tmp_path)
    assert len(dataset) == 2  # what is there can be used all the same


def test_a_complete_copy_gives_no_warning(tmp_path: Path) -> None:
    home = tmp_path / "cifar10.1"
    home.mkdir()
    images = np.zeros((2000, 32, 32, 3), np.uint8)
    np.save(home / "cifar10.1_v6_data.npy", images)
    np.save(home / "cifar10.1_v6_labels.npy", np.arange(2000) % 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(get_dataset("cifar10.1", tmp_path)) == 2000


def test_parts_and_shifts_compose(tmp_path: Path) -> None:
    TREES["pacs"](tmp_path)
    TREES["cifar10"](tmp_path)
    sketch = get_dataset("pacs/sketch", tmp_path)
    assert stated(sketch) == {"sketch/person/b.png": "person"}
    assert sketch.id == "pacs/sketch"
    noisy = get_dataset("pacs/sketch@gaussian_noise:3", tmp_path)
    assert isinstance(noisy, ShiftedDataset)
    assert noisy.id == "pacs/sketch@gaussian_noise:3"

    cifar = get_dataset("cifar10@gaussian_noise:3", tmp_path)
    clean = get_dataset("cifar10", tmp_path)
    assert isinstance(clean, ArrayDataset)
    assert clean.keys == cifar.keys
    assert not np.array_equal(cifar.arrays([0]), clean.arrays([0]))  # type: ignore[arg-type]
    for id, message in (
        ("pacs/sketches", "'sketch'"),
        ("bundled/test", "no splits"),
        ("imagenet_a", "'imagenet-a'"),
    ):
        with pytest.raises(UserError, match=message):
            get_dataset(id, tmp_path)


def test_benchmarks_use_pixels_as_stored_and_coops_template(tmp_path: Path) -> None:
    TREES["pets"](tmp_path)
    dataset = get_dataset("pets", tmp_path)
    assert isinstance(dataset, FileDataset)
    assert not dataset.exif
    assert dataset.templates == ("a photo of a {}, a type of pet.",)
    TREES["pacs"](tmp_path)
    assert get_dataset("pacs", tmp_path).templates == ("a photo of a {}.",)


# Traps of the ImageNet family


def test_parts_and_subsets_are_not_mixed_up(tmp_path: Path) -> None:
    """Goldfish is class 1 of ImageNet, 0 of R, and none of A."""
    folders = (
        "imagenet-r/n01443537",
        "imagenet-a/n01443537",
        "imagenetv2/top-images/0",
    )
    pictures(tmp_path, [f"{folder}/x.jpg" for folder in folders])
    dataset = get_dataset("imagenet-r", tmp_path)
    assert dataset.labels.tolist() == [0]
    assert len(dataset.names) == 200
    for id, message in (
        ("imagenet-a", "n01443537"),
        ("imagenet-v2", "matched-frequency"),
    ):
        with pytest.raises(UserError, match=message):
            get_dataset(id, tmp_path)


def test_a_list_that_counts_images_is_no_list_of_classes(tmp_path: Path) -> None:
    """Kaggle's val.txt counts from 1 to 50,000."""
    folder = tmp_path / "imagenet"
    pictures(folder / "val", ["ILSVRC2012_val_00000001.JPEG"])
    with pytest.raises(DataNotFoundError, match="LOC_val_solution"):
        get_dataset("imagenet", tmp_path)

    lines = [f"ILSVRC2012_val_{i:08d}.JPEG {i}" for i in range(1, 1500)]
    write(folder / "val.txt", "\n".join(lines))
    with pytest.raises(ValueError, match="numbers"):
        get_dataset("imagenet", tmp_path)


# Traps of the others


def test_a_split_that_contradicts_the_class_list_is_refused(tmp_path: Path) -> None:
    TREES["dtd"](tmp_path)
    split(
        tmp_path / "dtd/split_zhou_DescribableTextures.json",
        [("banded/x.jpg", 1, "banded")],
    )
    with pytest.raises(ValueError, match="blotchy"):
        get_dataset("dtd", tmp_path)
    write(tmp_path / "dtd/split_zhou_DescribableTextures.json", '{"test": [["banded')
    with pytest.raises(ValueError, match="downloaded"):
        get_dataset("dtd", tmp_path)


def test_listed_twice_counts_once_and_absent_files_are_left_out(tmp_path: Path) -> None:
    TREES["dtd"](tmp_path)
    rows = [("banded/banded_0060.jpg", 0, "banded")] * 2 + [
        ("banded/gone.jpg", 0, "banded")
    ]
    split(tmp_path / "dtd/split_zhou_DescribableTextures.json", rows)
    assert get_dataset("dtd", tmp_path).keys == ("banded/banded_0060.jpg",)


def test_coops_split_is_preferred_to_the_official_list(tmp_path: Path) -> None:
    TREES["pets"](tmp_path)
    with pytest.raises(DataNotFoundError, match="train"):
        get_dataset("pets/train", tmp_path)
    split_file = tmp_path / "oxford-iiit-pet/split_zhou_OxfordPets.json"
    rows = {"test": [["american_bulldog_100.jpg", 1, "american_bulldog"]],
            "train": [["Abyssinian_1.jpg", 0, "abyssinian"]], "val": []}  # fmt: skip
    write(split_file, json.dumps(rows))
    assert stated(get_dataset("pets", tmp_path)) == {
        "american_bulldog_100.jpg": "american bulldog"
    }
    assert stated(get_dataset("pets/train", tmp_path)) == {
        "Abyssinian_1.jpg": "abyssinian"
    }


# CIFAR's own formats


def test_pixels_of_pickled_cifar_survive(tmp_path: Path) -> None:
    TREES["cifar10"](tmp_path)
    dataset: Any = get_dataset("cifar10", tmp_path)
    assert np.array_equal(dataset.arrays([0, 1]), random_pixels(2, 32, 32, 3))


def test_pixels_and_labels_of_binary_cifar_survive(tmp_path: Path) -> None:
    images = random_pixels(3, 32, 32, 3)
    labels = np.array([[0], [7], [9]], np.uint8)
    # a byte of the label, then those of the picture
    records = np.concatenate([labels, cifar_rows(images)], axis=1)
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    for name in ("test_batch.bin", "data_batch_1.bin"):
        (home / name).write_bytes(records.tobytes())

    dataset: Any = get_dataset("cifar10", tmp_path)
    assert dataset.labels.tolist() == [0, 7, 9]
    assert np.array_equal(dataset.arrays([0, 1, 2]), images)


def test_cifar100_records_carry_the_fine_label_second(tmp_path: Path) -> None:
    file = tmp_path / "cifar-100-binary" / "test.bin"
    file.parent.mkdir()
    labels = np.array([[4, 30], [5, 99]], np.uint8)
    rows = cifar_rows(random_pixels(2, 32, 32, 3))
    records = np.concatenate([labels, rows], axis=1).tobytes()
    file.write_bytes(records)
    dataset = get_dataset("cifar100", tmp_path)
    assert dataset.labels.tolist() == [30, 99]

    file.write_bytes(records[:-1])
    with pytest.raises(ValueError, match="cut off"):
        get_dataset("cifar100", tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("harm",))


def test_a_pickle_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    TREES["cifar10"](tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(
        pickle.dumps({"data": _Evil()})
    )
    with pytest.raises(ValueError, match="builtins"):
        get_dataset("cifar10", tmp_path)


class _MakesFolder:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy"])
def test_an_array_file_that_asks_for_code_is_refused_and_runs_nothing(
    tmp_path: Path, name: str
) -> None:
    TREES["cifar10.1"](tmp_path)
    harm = tmp_path / "harm"
    crafted = np.array([_MakesFolder(harm)], dtype=object)
    (path,) = tmp_path.rglob(name)
    np.save(path, crafted, allow_pickle=True)
    with pytest.raises(UserError, match="no array file"):
        get_dataset("cifar10.1", tmp_path)
    assert not harm.exists()
    np.load(path, allow_pickle=True)  # what the file would have done
    assert harm.exists()


def test_a_list_none_of_whose_images_are_there_is_missing_data(tmp_path: Path) -> None:
    TREES["dtd"](tmp_path)
    for image in tmp_path.rglob("*.jpg"):
        image.unlink()
    with pytest.raises(DataNotFoundError, match="dtd: none of its images are in"):
        get_dataset("dtd", tmp_path)
