"""Layouts of small datasets: CIFAR with its successor, PACS, and texture against shape."""

from __future__ import annotations

from cliquetta.data.benchmarks import cifar
from cliquetta.data.benchmarks.place import Layout
from cliquetta.data.benchmarks.readers import by_name, class_folders, several

_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_STIMULI = {
    "edges": ("edges",),
    "silhouettes": ("filled-silhouettes",),
    "cue-conflict": ("style-transfer-preprocessed-512",),
}


def _png_copy(list_id: str) -> Layout:
    return Layout(
        "test/ and train/ with one folder per class",
        class_folders(by_name(list_id)),
        inside=("{split}",),
        shows=("*/*.png",),
    )


SMALL: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
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
    "cifar100": (
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
    "cifar10.1": (
        Layout(
            "cifar10.1_SPLIT_data.npy and cifar10.1_SPLIT_labels.npy",
            cifar.read_cifar101,
            shows=("cifar10.1_{split}_data.npy", "cifar10.1_{split}_labels.npy"),
        ),
    ),
    "pacs": (
        Layout(
            f"{', '.join(_DOMAINS)} with one folder per class each",
            several({domain: (domain,) for domain in _DOMAINS}, "pacs"),
            shows=("*/dog",),
        ),
    ),
    "texture-vs-shape": (
        Layout(
            "stimuli/ with edges, filled-silhouettes, style-transfer-preprocessed-512",
            several(_STIMULI, "texture-vs-shape"),
            (".", "stimuli"),
            ("*/airplane",),
        ),
    ),
}
