"""Small datasets: CIFAR with its successor, PACS, and texture against shape."""

from __future__ import annotations

from collections.abc import Callable

from cliquetta.data.benchmarks import cifar
from cliquetta.data.benchmarks.benchmark import Benchmark
from cliquetta.data.benchmarks.place import Layout, Listing, Place
from cliquetta.data.benchmarks.readers import by_name, class_folders

_KRIZHEVSKY = "Krizhevsky, 2009; no licence stated"
_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_STIMULI = {
    "edges": "edges",
    "silhouettes": "filled-silhouettes",
    "cue-conflict": "style-transfer-preprocessed-512",
}


def _png_copy(list_id: str) -> Layout:
    return Layout(
        "test/ and train/ with one folder per class",
        class_folders(by_name(list_id)),
        inside=("{split}",),
        shows=("*/*.png",),
    )


def _several(folders: dict[str, str], list_id: str) -> Callable[[Place], Listing]:
    """One of several sets of class folders, or all of them in a row."""
    read_one = class_folders(by_name(list_id))

    def read(place: Place) -> Listing:
        wanted = folders if place.split == "all" else {place.split: folders[place.split]}
        found = {
            split: read_one(Place(place.root, place.folder, place.images / folder, split))
            for split, folder in wanted.items()
            if (place.images / folder).is_dir()
        }
        return Listing(
            keys=[f"{split}/{key}" for split, one in found.items() for key in one.keys],
            labels=[label for one in found.values() for label in one.labels],
            paths=[path for one in found.values() for path in one.paths],
        )

    return read


SMALL = (
    Benchmark(
        "cifar10",
        "32 px images of 10 classes",
        ("cifar-10-batches-py", "cifar10", "cifar-10", "cifar-10-batches-bin", "cifar-10-dataset"),
        (
            Layout(
                "cifar-10-batches-py/ (pickles)",
                cifar.read_cifar10_pickles,
                (".", "cifar-10-batches-py"),
                ("test_batch", "data_batch_1"),
            ),
            Layout(
                "cifar-10-batches-bin/ (binary)",
                cifar.read_cifar10_records,
                (".", "cifar-10-batches-bin"),
                ("test_batch.bin", "data_batch_1.bin"),
            ),
            _png_copy("cifar10"),
        ),
        {"test": 10_000, "train": 50_000},
        "Get cifar-10-python.tar.gz from cs.toronto.edu/~kriz/cifar.html and extract it.",
        _KRIZHEVSKY,
        "cifar10",
    ),
    Benchmark(
        "cifar100",
        "32 px images of 100 classes",
        ("cifar-100-python", "cifar100", "cifar-100", "cifar-100-binary", "cifar-100-dataset"),
        (
            Layout(
                "cifar-100-python/ (pickles)",
                cifar.read_cifar100_pickles,
                (".", "cifar-100-python"),
                ("meta", "{split}"),
            ),
            Layout(
                "cifar-100-binary/",
                cifar.read_cifar100_records,
                (".", "cifar-100-binary"),
                ("{split}.bin",),
            ),
            _png_copy("cifar100"),
        ),
        {"test": 10_000, "train": 50_000},
        "Get cifar-100-python.tar.gz from cs.toronto.edu/~kriz/cifar.html and extract it.",
        _KRIZHEVSKY,
        "cifar100",
        ("there are 20 coarse and 100 fine labels: the fine ones are used",),
    ),
    Benchmark(
        "cifar10.1",
        "a second test set for CIFAR-10",
        ("cifar10.1", "cifar-10.1", "cifar10.1/datasets", "cifar-10.1/datasets"),
        (
            Layout(
                "cifar10.1_SPLIT_data.npy and cifar10.1_SPLIT_labels.npy",
                cifar.read_cifar101,
                shows=("cifar10.1_{split}_data.npy", "cifar10.1_{split}_labels.npy"),
            ),
        ),
        {"v6": 2_000, "v4": 2_021},
        "Get the four files in datasets/ of github.com/modestyachts/CIFAR-10.1.",
        "Recht et al., 2018; MIT",
        "cifar10",
        ("v4 has 2,021 images, v6 is balanced",),
    ),
    Benchmark(
        "pacs",
        "photos, art, cartoons and sketches of 7 classes",
        ("pacs", "pacs/pacs", "pacs-data", "pacs/kfold"),
        (
            Layout(
                f"{', '.join(_DOMAINS)} with one folder per class each",
                _several({domain: domain for domain in _DOMAINS}, "pacs"),
                shows=("*/dog",),
            ),
        ),
        {"all": 9_991, "art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929},
        "Get it from huggingface.co/datasets/flwrlabs/pacs or the authors' page "
        "(domaingeneralization.github.io).",
        "Li et al., 2017; research",
        "pacs",
    ),
    Benchmark(
        "texture-vs-shape",
        "edges, silhouettes and cue-conflict images of 16 classes",
        ("texture-vs-shape", "texture-vs-shape/stimuli", "stimuli"),
        (
            Layout(
                "stimuli/ with edges, filled-silhouettes, style-transfer-preprocessed-512",
                _several(_STIMULI, "texture-vs-shape"),
                (".", "stimuli"),
                ("*/airplane",),
            ),
        ),
        {"all": 1_600, "edges": 160, "silhouettes": 160, "cue-conflict": 1_280},
        "Get github.com/rgeirhos/texture-vs-shape.",
        "Geirhos et al., 2019; CC BY 4.0",
        "texture-vs-shape",
        (
            "a cue-conflict image has two classes: the label is its shape; in 80 of the 1,280 "
            "shape and texture agree",
        ),
    ),
)
