"""Small made-up data folders in the official layouts, with what a reader must make of them."""

from __future__ import annotations

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


def zhou(images: Path, file: Path, rows: Sequence[tuple[str, int, str]]) -> Expected:
    """Images with a split file of CoOp that names their classes."""
    pictures(images, [name for name, _, _ in rows])
    split(file, rows)
    return {name: label for name, _, label in rows}


def imagenet_a(root: Path) -> Expected:
    pictures(root / "imagenet-adversarial/imagenet-a", ["n01498041/a.jpg", "n12267677/b.jpg"])
    write(root / "imagenet-adversarial/imagenet-a/README.txt", "classes")
    return {"n01498041/a.jpg": "stingray", "n12267677/b.jpg": "acorn"}


def tiny_imagenet(root: Path) -> Expected:
    pictures(root / "tiny-imagenet-200/val/images", ["val_0.JPEG", "val_1.JPEG"])
    write(
        root / "tiny-imagenet-200/val/val_annotations.txt",
        "val_0.JPEG\tn03444034\t0\t32\t44\t62\nval_1.JPEG\tn01443537\t0\t32\t44\t62\n",
    )
    write(root / "tiny-imagenet-200/wnids.txt", "n03444034\nn01443537\n")
    return {"val_0.JPEG": "go-kart", "val_1.JPEG": "goldfish"}


def caltech101(root: Path) -> Expected:
    home = root / "caltech-101"
    pictures(
        home / "101_ObjectCategories",
        [
            "Faces/image_0001.jpg",
            "Faces_easy/image_0001.jpg",
            "BACKGROUND_Google/image_0001.jpg",
            "yin_yang/image_0002.jpg",
        ],
    )
    split(
        home / "split_zhou_Caltech101.json",
        [("Faces/image_0001.jpg", 0, "face"), ("yin_yang/image_0002.jpg", 99, "yin_yang")],
    )
    return {"Faces/image_0001.jpg": "face", "yin_yang/image_0002.jpg": "yin yang"}


def flowers102(root: Path) -> Expected:
    rows = [("image_00002.jpg", 76, "passion flower"), ("image_00001.jpg", 0, "pink primrose")]
    home = root / "oxford_flowers"
    return zhou(home / "jpg", home / "split_zhou_OxfordFlowers.json", rows)


def pets(root: Path) -> Expected:
    pictures(
        root / "oxford-iiit-pet/images",
        ["Abyssinian_1.jpg", "yorkshire_terrier_10.jpg", "american_bulldog_100.jpg"],
    )
    write(
        root / "oxford-iiit-pet/annotations/test.txt",
        "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_1 1 1 1\nyorkshire_terrier_10 37 2 25\n",
    )
    return {"Abyssinian_1.jpg": "abyssinian", "yorkshire_terrier_10.jpg": "yorkshire terrier"}


def cars(root: Path) -> Expected:
    rows = [
        ("cars_test/00001.jpg", 180, "2007 Suzuki Aerio Sedan"),
        ("cars_test/00002.jpg", 0, "2000 AM General Hummer SUV"),
    ]
    return zhou(root / "stanford_cars", root / "splits/split_zhou_StanfordCars.json", rows)


def sun397(root: Path) -> Expected:
    pictures(root / "sun397/SUN397", ["a/abbey/sun_1.jpg", "a/apse/indoor/sun_2.jpg"])
    write(root / "sun397/Testing_01.txt", "/a/abbey/sun_1.jpg\n/a/apse/indoor/sun_2.jpg\n")
    return {"a/abbey/sun_1.jpg": "abbey", "a/apse/indoor/sun_2.jpg": "indoor apse"}


def eurosat(root: Path) -> Expected:
    rows = [
        ("AnnualCrop/AnnualCrop_1.jpg", 0, "Annual Crop Land"),
        ("SeaLake/SeaLake_2.jpg", 9, "Sea or Lake"),
    ]
    return zhou(root / "EuroSAT/2750", root / "EuroSAT/split_zhou_EuroSAT.json", rows)


def food101(root: Path) -> Expected:
    rows = [
        ("apple_pie/1.jpg", 0, "apple_pie"),
        ("cheese_plate/2.jpg", 16, "cheese_plate"),
        ("cheesecake/3.jpg", 17, "cheesecake"),
    ]
    zhou(root / "food-101/images", root / "food-101/split_zhou_Food101.json", rows)
    return {
        "apple_pie/1.jpg": "apple pie",
        "cheese_plate/2.jpg": "cheese plate",
        "cheesecake/3.jpg": "cheesecake",
    }


def dtd(root: Path) -> Expected:
    rows = [("banded/banded_0060.jpg", 0, "banded"), ("zigzagged/zigzagged_1.jpg", 46, "zigzagged")]
    return zhou(root / "dtd/dtd/images", root / "dtd/split_zhou_DescribableTextures.json", rows)


def ucf101(root: Path) -> Expected:
    pictures(
        root / "ucf101/UCF-101-midframes",
        [
            "Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg",
            "Handstand_Pushups/v_HandStandPushups_g01_c02.jpg",
        ],
    )
    write(
        root / "ucf101/ucfTrainTestlist/testlist01.txt",
        "ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi\n"
        "HandstandPushups/v_HandStandPushups_g01_c02.avi\n",
    )
    return {
        "Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg": "Apply Eye Makeup",
        "Handstand_Pushups/v_HandStandPushups_g01_c02.jpg": "Handstand Pushups",
    }


def aircraft(root: Path) -> Expected:
    home = root / "fgvc-aircraft-2013b/data"
    pictures(home / "images", ["1514522.jpg", "0747566.jpg", "9999999.jpg"])
    write(home / "images_variant_test.txt", "1514522 707-320\n0747566 Yak-42\n")
    write(home / "images_variant_train.txt", "9999999 DC-3\n")
    return {"1514522.jpg": "707-320", "0747566.jpg": "Yak-42"}


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


def texture_vs_shape(root: Path) -> Expected:
    pictures(
        root / "texture-vs-shape/stimuli",
        [
            "edges/airplane/airplane1.png",
            "filled-silhouettes/bear/bear1.png",
            "style-transfer-preprocessed-512/airplane/airplane1-clock2.png",
        ],
    )
    return {
        "edges/airplane/airplane1.png": "airplane",
        "silhouettes/bear/bear1.png": "bear",
        "cue-conflict/airplane/airplane1-clock2.png": "airplane",
    }


def cifar_c(folder: str, labels: Sequence[int], names: Sequence[str]) -> Tree:
    """Two images at five severities; the last two of ten are severity 5."""

    def make(root: Path) -> Expected:
        home = root / folder
        home.mkdir(parents=True)
        np.save(home / "gaussian_noise.npy", cifar_pixels(10))
        np.save(home / "labels.npy", np.tile(np.array(labels, np.uint8), 5))
        return {f"gaussian_noise/5/0000{n}": name for n, name in enumerate(names)}

    return make


def tree(folder: str, expected: Expected, prefix: str = "") -> Tree:
    """Pictures below a folder, at their keys after ``prefix``."""

    def make(root: Path) -> Expected:
        pictures(root / folder, [f"{prefix}{key}" for key in expected])
        return expected

    return make


def office_home(root: Path) -> Expected:
    pictures(root / "OfficeHomeDataset_10072016", ["Art/Alarm_Clock/1.jpg", "Real World/TV/2.jpg"])
    return {"art/Alarm_Clock/1.jpg": "Alarm Clock", "real-world/TV/2.jpg": "TV"}


def terra_incognita(root: Path) -> Expected:
    pictures(root / "terra_incognita", ["location_38/bobcat/1.jpg", "location_100/empty/2.jpg"])
    return {"location-100/empty/2.jpg": "empty", "location-38/bobcat/1.jpg": "bobcat"}


def vlcs(root: Path) -> Expected:
    pictures(root / "VLCS", ["Caltech101/bird/1.jpg", "VOC2007/person/2.jpg"])
    return {"caltech101/bird/1.jpg": "bird", "voc2007/person/2.jpg": "person"}


def domainnet_126(root: Path) -> Expected:
    keys = ["clipart/ant/clipart_1.jpg", "clipart/zebra/clipart_2.jpg"]
    pictures(root / "domainnet", keys)
    write(root / "domainnet/clipart_list.txt", f"{keys[0]} 2\n{keys[1]} 125\n")
    return {keys[0]: "ant", keys[1]: "zebra"}


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
    "imagenet-a": imagenet_a,
    "imagenet-r": tree("imagenet-r", {f"n01443537/art_{i}.jpg": "goldfish" for i in (0, 2, 10)}),
    "imagenet-sketch": tree("imagenet-sketch/images", {"n01443537/sketch_0.JPEG": "goldfish"}),
    "tiny-imagenet": tiny_imagenet,
    "caltech101": caltech101,
    "flowers102": flowers102,
    "pets": pets,
    "cars": cars,
    "sun397": sun397,
    "eurosat": eurosat,
    "food101": food101,
    "dtd": dtd,
    "ucf101": ucf101,
    "aircraft": aircraft,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar10.1": cifar101,
    "pacs": tree("PACS", {"art_painting/dog/a.jpg": "dog", "sketch/person/b.png": "person"}),
    "texture-vs-shape": texture_vs_shape,
    "cifar10-c": cifar_c("CIFAR-10-C", [3, 9], ["cat", "truck"]),
    "cifar100-c": cifar_c("CIFAR-100-C", [1, 99], ["aquarium fish", "worm"]),
    "imagenet-c": tree("ImageNet-C", {"n01440764/a.JPEG": "tench"}, "noise/gaussian_noise/5/"),
    "imagenet-c-bar": tree("imagenet_c_bar", {"n01440764/a.JPEG": "tench"}, "blue_noise_sample/5/"),
    "vlcs": vlcs,
    "office-home": office_home,
    "terra-incognita": terra_incognita,
    "domainnet": tree(
        "domain_net",
        {
            "clipart/aircraft_carrier/1.jpg": "aircraft carrier",
            "sketch/teddy-bear/2.jpg": "teddy bear",
        },
    ),
    "domainnet-126": domainnet_126,
    "visda": tree("visda-2017", {"aeroplane/1.jpg": "aeroplane"}, "validation/"),
    "svhn": svhn,
}
UNLABELLED = {
    "places-unknown": "Places/images/a.jpg",
    "inaturalist-unknown": "iNaturalist/images/a.jpg",
    "ninco": "NINCO/NINCO_OOD_classes/cup/a.jpg",
}
"""Sets of images of no class, and a file of each."""
