"""Small made-up data folders in the official layouts, with what a reader must make of them."""

import csv
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (6, 4)) -> Path:
    """A tiny picture in one shade of grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)
    return path


def pictures(folder: Path, names: Sequence[str]) -> None:
    """Pictures of different content."""
    for shade, name in enumerate(names):
        picture(folder / name, shade)


def noise(folder: Path, names: Sequence[str]) -> None:
    """Pictures of random pixels, the same every time."""
    generator = np.random.default_rng(0)
    for name in names:
        pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def table_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def encoded(shade: int) -> bytes:
    """A grey picture as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade,) * 3).save(file, "PNG")
    return file.getvalue()


def write(path: Path, text: str) -> None:
    """A text file in a folder that may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


Expected = Mapping[str, str]
"""Class name by key."""
Tree = Callable[[Path], Expected]


def split(path: Path, rows: Sequence[tuple[str, int, str]]) -> None:
    """A split file of CoOp whose rows all go to the test split."""
    write(path, json.dumps({"train": [], "val": [], "test": rows}))


def tree(folder: str, expected: Expected, *others: str, prefix: str = "") -> Tree:
    """Pictures below a folder, at their keys after ``prefix``, and other files."""

    def make(root: Path) -> Expected:
        pictures(root / folder, [f"{prefix}{key}" for key in expected])
        for other in others:
            write(root / folder / other, "x")
        return expected

    return make


def renamed(folder: str, *pictured: tuple[str, str, str]) -> Tree:
    """Pictures below a folder: path, key and class."""

    def make(root: Path) -> Expected:
        pictures(root / folder, [path for path, _, _ in pictured])
        return {key: name for _, key, name in pictured}

    return make


def coop(images: str, file: str, *rows: tuple[str, int, str], others: Sequence[str] = ()) -> Tree:
    """Images with a split file of CoOp that names their classes, and images of no split."""

    def make(root: Path) -> Expected:
        pictures(root / images, [*(name for name, _, _ in rows), *others])
        split(root / file, rows)
        return {name: label.replace("_", " ") for name, _, label in rows}

    return make


def listed(images: str, file: str, text: str, expected: Expected, *others: str) -> Tree:
    """Images and a list of them, and images that are not in it."""

    def make(root: Path) -> Expected:
        pictures(root / images, [*expected, *others])
        write(root / file, text)
        return expected

    return make


def cifar_pixels(count: int) -> np.ndarray:
    """Pictures (N, 32, 32, 3) of random values."""
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def cifar_rows(images: np.ndarray) -> np.ndarray:
    """CIFAR's rows: all red values, then green, then blue."""
    return np.stack([np.concatenate([image[..., c].ravel() for c in range(3)]) for image in images])


def cifar10(root: Path) -> Expected:
    home = root / "cifar-10-batches-py"
    home.mkdir(parents=True)
    batch = {
        "data": cifar_rows(cifar_pixels(2)),
        "labels": [3, 9],
        "filenames": ["domestic_cat_s_000907.png", "truck_s_1.png"],
    }
    for name in ("test_batch", "data_batch_1"):
        (home / name).write_bytes(pickle.dumps(batch, protocol=2))
    return {"cat/domestic_cat_s_000907.png": "cat", "truck/truck_s_1.png": "truck"}


def cifar100(root: Path) -> Expected:
    home = root / "cifar-100-python"
    home.mkdir(parents=True)
    batch = {
        "data": cifar_rows(cifar_pixels(2)),
        "fine_labels": [1, 99],
        "coarse_labels": [1, 2],
        "filenames": ["goldfish_s_1.png", "worm_s_2.png"],
    }
    for name in ("test", "meta"):
        (home / name).write_bytes(pickle.dumps(batch, protocol=2))
    return {"aquarium_fish/goldfish_s_1.png": "aquarium fish", "worm/worm_s_2.png": "worm"}


def cifar101(root: Path) -> Expected:
    home = root / "CIFAR-10.1/datasets"
    home.mkdir(parents=True)
    np.save(home / "cifar10.1_v6_data.npy", cifar_pixels(2))
    np.save(home / "cifar10.1_v6_labels.npy", np.array([5, 0], np.int32))
    return {"v6/0000": "dog", "v6/0001": "airplane"}


def cifar_c(folder: str, labels: Sequence[int], names: Sequence[str]) -> Tree:
    """Two images at five severities; the last two of ten are severity 5."""

    def make(root: Path) -> Expected:
        home = root / folder
        home.mkdir(parents=True)
        np.save(home / "gaussian_noise.npy", cifar_pixels(10))
        np.save(home / "labels.npy", np.tile(np.array(labels, np.uint8), 5))
        return {f"gaussian_noise/5/0000{n}": name for n, name in enumerate(names)}

    return make


def svhn(root: Path) -> Expected:
    (root / "SVHN").mkdir()
    images = np.moveaxis(cifar_pixels(2), 0, 3)
    savemat(root / "SVHN/test_32x32.mat", {"X": images, "y": np.array([[10], [7]], np.uint8)})
    return {"test/00000": "0", "test/00001": "7"}


TREES: dict[str, Tree] = {
    "imagenet": tree(
        "imagenet/images/val",
        {
            "n01440764/a.JPEG": "tench",
            "n01440764/b.JPEG": "tench",
            "n15075141/c.JPEG": "toilet paper",
        },
    ),
    "imagenet-v2": tree(
        "imagenetv2/imagenetv2-matched-frequency-format-val",
        {
            "0/a.jpeg": "tench",
            "2/b.jpeg": "great white shark",
            "10/c.jpeg": "brambling",
            "999/d.jpeg": "toilet paper",
        },
    ),
    "imagenet-a": tree(
        "imagenet-adversarial/imagenet-a",
        {"n01498041/a.jpg": "stingray", "n12267677/b.jpg": "acorn"},
        "README.txt",
    ),
    "imagenet-r": tree("imagenet-r", {f"n01443537/art_{i}.jpg": "goldfish" for i in (0, 2, 10)}),
    "imagenet-sketch": tree("imagenet-sketch/images", {"n01443537/sketch_0.JPEG": "goldfish"}),
    "tiny-imagenet": listed(
        "tiny-imagenet-200/val/images",
        "tiny-imagenet-200/val/val_annotations.txt",
        "val_0.JPEG\tn03444034\t0\t32\t44\t62\nval_1.JPEG\tn01443537\t0\t32\t44\t62\n",
        {"val_0.JPEG": "go-kart", "val_1.JPEG": "goldfish"},
    ),
    "caltech101": coop(
        "caltech-101/101_ObjectCategories",
        "caltech-101/split_zhou_Caltech101.json",
        ("Faces/image_0001.jpg", 0, "face"),
        ("yin_yang/image_0002.jpg", 99, "yin_yang"),
        others=("Faces_easy/image_0001.jpg", "BACKGROUND_Google/image_0001.jpg"),
    ),
    "flowers102": coop(
        "oxford_flowers/jpg",
        "oxford_flowers/split_zhou_OxfordFlowers.json",
        ("image_00002.jpg", 76, "passion flower"),
        ("image_00001.jpg", 0, "pink primrose"),
    ),
    "pets": listed(
        "oxford-iiit-pet/images",
        "oxford-iiit-pet/annotations/test.txt",
        "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_1 1 1 1\nyorkshire_terrier_10 37 2 25\n",
        {"Abyssinian_1.jpg": "abyssinian", "yorkshire_terrier_10.jpg": "yorkshire terrier"},
        "american_bulldog_100.jpg",
    ),
    "cars": coop(
        "stanford_cars",
        "splits/split_zhou_StanfordCars.json",
        ("cars_test/00001.jpg", 180, "2007 Suzuki Aerio Sedan"),
        ("cars_test/00002.jpg", 0, "2000 AM General Hummer SUV"),
    ),
    "sun397": listed(
        "sun397/SUN397",
        "sun397/Testing_01.txt",
        "/a/abbey/sun_1.jpg\n/a/apse/indoor/sun_2.jpg\n",
        {"a/abbey/sun_1.jpg": "abbey", "a/apse/indoor/sun_2.jpg": "indoor apse"},
    ),
    "eurosat": coop(
        "EuroSAT/2750",
        "EuroSAT/split_zhou_EuroSAT.json",
        ("AnnualCrop/AnnualCrop_1.jpg", 0, "Annual Crop Land"),
        ("SeaLake/SeaLake_2.jpg", 9, "Sea or Lake"),
    ),
    "food101": coop(
        "food-101/images",
        "food-101/split_zhou_Food101.json",
        ("apple_pie/1.jpg", 0, "apple_pie"),
        ("cheese_plate/2.jpg", 16, "cheese_plate"),
        ("cheesecake/3.jpg", 17, "cheesecake"),
    ),
    "dtd": coop(
        "dtd/dtd/images",
        "dtd/split_zhou_DescribableTextures.json",
        ("banded/banded_0060.jpg", 0, "banded"),
        ("zigzagged/zigzagged_1.jpg", 46, "zigzagged"),
    ),
    "ucf101": listed(
        "ucf101/UCF-101-midframes",
        "ucf101/ucfTrainTestlist/testlist01.txt",
        "ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi\n"
        "HandstandPushups/v_HandStandPushups_g01_c02.avi\n",
        {
            "Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg": "Apply Eye Makeup",
            "Handstand_Pushups/v_HandStandPushups_g01_c02.jpg": "Handstand Pushups",
        },
    ),
    "aircraft": listed(
        "fgvc-aircraft-2013b/data/images",
        "fgvc-aircraft-2013b/data/images_variant_test.txt",
        "1514522 707-320\n0747566 Yak-42\n",
        {"1514522.jpg": "707-320", "0747566.jpg": "Yak-42"},
        "9999999.jpg",
    ),
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar10.1": cifar101,
    "pacs": tree("PACS", {"art_painting/dog/a.jpg": "dog", "sketch/person/b.png": "person"}),
    "texture-vs-shape": renamed(
        "texture-vs-shape/stimuli",
        ("edges/airplane/airplane1.png", "edges/airplane/airplane1.png", "airplane"),
        ("filled-silhouettes/bear/bear1.png", "silhouettes/bear/bear1.png", "bear"),
        (
            "style-transfer-preprocessed-512/airplane/airplane1-clock2.png",
            "cue-conflict/airplane/airplane1-clock2.png",
            "airplane",
        ),
    ),
    "cifar10-c": cifar_c("CIFAR-10-C", [3, 9], ["cat", "truck"]),
    "cifar100-c": cifar_c("CIFAR-100-C", [1, 99], ["aquarium fish", "worm"]),
    "imagenet-c": tree(
        "ImageNet-C", {"n01440764/a.JPEG": "tench"}, prefix="noise/gaussian_noise/5/"
    ),
    "imagenet-c-bar": tree(
        "imagenet_c_bar", {"n01440764/a.JPEG": "tench"}, prefix="blue_noise_sample/5/"
    ),
    "vlcs": renamed(
        "VLCS",
        ("Caltech101/bird/1.jpg", "caltech101/bird/1.jpg", "bird"),
        ("VOC2007/person/2.jpg", "voc2007/person/2.jpg", "person"),
    ),
    "office-home": renamed(
        "OfficeHomeDataset_10072016",
        ("Art/Alarm_Clock/1.jpg", "art/Alarm_Clock/1.jpg", "Alarm Clock"),
        ("Real World/TV/2.jpg", "real-world/TV/2.jpg", "TV"),
    ),
    "terra-incognita": renamed(
        "terra_incognita",
        ("location_38/bobcat/1.jpg", "location-38/bobcat/1.jpg", "bobcat"),
        ("location_100/empty/2.jpg", "location-100/empty/2.jpg", "empty"),
    ),
    "domainnet": tree(
        "domain_net",
        {
            "clipart/aircraft_carrier/1.jpg": "aircraft carrier",
            "sketch/teddy-bear/2.jpg": "teddy bear",
        },
    ),
    "domainnet-126": listed(
        "domainnet",
        "domainnet/clipart_list.txt",
        "clipart/ant/clipart_1.jpg 2\nclipart/zebra/clipart_2.jpg 125\n",
        {"clipart/ant/clipart_1.jpg": "ant", "clipart/zebra/clipart_2.jpg": "zebra"},
    ),
    "visda": tree("visda-2017", {"aeroplane/1.jpg": "aeroplane"}, prefix="validation/"),
    "svhn": svhn,
}
UNLABELLED = {
    "places-unknown": "Places/images/a.jpg",
    "inaturalist-unknown": "iNaturalist/images/a.jpg",
    "ninco": "NINCO/NINCO_OOD_classes/cup/a.jpg",
}
"""Sets of images of no class, and a file of each."""
