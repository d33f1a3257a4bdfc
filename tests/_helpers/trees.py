"""Small made-up data folders in the official layouts, with what a reader must make of them."""

import csv
import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (6, 4)) -> Path:
    """A tiny picture in one shade of grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)
    return path


def pictures(folder: Path, names: Sequence[str]) -> None:
    """Pictures of different content."""
    for shade, name in enumerate(names):
        picture(folder / name, shade)


def random_pixels(*shape: int, seed: int = 0) -> Any:
    """Bytes of random value, the same every time."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def noise(
    folder: Path, names: Sequence[str], damaged: Sequence[int] = ()
) -> list[Path]:
    """Pictures of random pixels; files at the ``damaged`` indices cannot be read."""
    paths = [folder / name for name in names]
    for path, pixels in zip(paths, random_pixels(len(names), 40, 48, 3), strict=True):
        Image.fromarray(pixels).save(path)
    for index in damaged:
        paths[index].write_bytes(b"damaged")
    return paths


def numbered_photos(
    folder: Path, count: int, damaged: Sequence[int] = ()
) -> list[Path]:
    """Such pictures named 0.png, 1.png, ..."""
    return noise(folder, [f"{number}.png" for number in range(count)], damaged)


def camera_list(
    folder: Path, cameras: Sequence[str], damaged: Sequence[int] = ()
) -> Path:
    """A table of such pictures, one of each camera in the list."""
    numbered_photos(folder, len(cameras), damaged)
    lines = [f"{number}.png,{camera}" for number, camera in enumerate(cameras)]
    (folder / "list.csv").write_text("\n".join(["path,camera", *lines]))
    return folder / "list.csv"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif_of(orientation: int) -> Image.Exif:
    """EXIF data that say how a picture is to be turned: 6 is by 90 degrees, clockwise."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def table_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def encoded(shade: int) -> bytes:
    """A grey picture as the bytes of a PNG file."""
    return saved(Image.new("RGB", (8, 8), (shade,) * 3), "PNG")


def write(path: Path, text: str) -> None:
    """A text file in a folder that may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def make_tar(path: Path, members: Mapping[str, bytes], mode: Any = "w") -> Path:
    """A tar file of these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


Expected = Mapping[str, str]  # class name by key
Tree = Callable[[Path], Expected]


def split(path: Path, rows: Sequence[tuple[str, int, str]]) -> None:
    """A split file of CoOp whose rows all go to the test split."""
    write(path, json.dumps({"train": [], "val": [], "test": rows}))


def tree(folder: str, pictured: str, file: str = "", text: str = "") -> Tree:
    """Pictures ``path > key: class; ...`` below a folder, and a list of them.

    A picture without a class is in no split. Where classes have numbers, as in ``key: 3
    class``, the list is a split file of CoOp.
    """
    entries = [entry.partition(": ") for entry in pictured.split("; ")]

    def make(root: Path) -> Expected:
        pictures(root / folder, [path.partition(" > ")[0] for path, _, _ in entries])
        classes = {
            path.rpartition(" > ")[2]: label for path, _, label in entries if label
        }
        if file.endswith(".json"):
            numbered = {key: label.partition(" ") for key, label in classes.items()}
            split(
                root / file,
                [(key, int(n), name) for key, (n, _, name) in numbered.items()],
            )
            return {
                key: name.replace("_", " ") for key, (_, _, name) in numbered.items()
            }
        if file:
            write(root / file, text.replace("; ", "\n") + "\n")
        return classes

    return make


def trees(table: str) -> list[tuple[str, Tree]]:
    """Ids and trees of lines ``id | folder | pictures | file | text``, where the last
    two may be left out, and indented lines continue the one above."""
    rows = re.sub(r"\n +", " ", table.strip()).splitlines()
    cells = ([cell.strip(" ") for cell in row.split("|")] for row in rows)
    return [(id, tree(*about)) for id, *about in cells]


def cifar_rows(images: np.ndarray) -> np.ndarray:
    """CIFAR's rows: all red values, then green, then blue."""
    return np.stack(
        [np.concatenate([image[..., c].ravel() for c in range(3)]) for image in images]
    )


def cifar(folder: str, field: str, batches: Sequence[str], pictured: str) -> Tree:
    """Pickled batches of pictures ``number class/file; ...``."""
    rows = [row.split(" ") for row in pictured.split("; ")]

    def make(root: Path) -> Expected:
        (root / folder).mkdir(parents=True)
        files = [key.partition("/")[2] for _, key in rows]
        labels = [int(number) for number, _ in rows]
        batch = {
            "data": cifar_rows(random_pixels(2, 32, 32, 3)),
            field: labels,
            "filenames": files,
        }
        for name in batches:
            (root / folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        return {key: key.partition("/")[0].replace("_", " ") for _, key in rows}

    return make


def cifar101(root: Path) -> Expected:
    home = root / "CIFAR-10.1/datasets"
    home.mkdir(parents=True)
    np.save(home / "cifar10.1_v6_data.npy", random_pixels(2, 32, 32, 3))
    np.save(home / "cifar10.1_v6_labels.npy", np.array([5, 0], np.int32))
    return {"v6/0000": "dog", "v6/0001": "airplane"}


def cifar_c(folder: str, labels: Sequence[int], names: Sequence[str]) -> Tree:
    """Two images at five severities; the last two of ten are severity 5."""

    def make(root: Path) -> Expected:
        home = root / folder
        home.mkdir(parents=True)
        np.save(home / "gaussian_noise.npy", random_pixels(10, 32, 32, 3))
        np.save(home / "labels.npy", np.tile(np.array(labels, np.uint8), 5))
        return {f"gaussian_noise/5/0000{n}": name for n, name in enumerate(names)}

    return make


def svhn(root: Path) -> Expected:
    (root / "SVHN").mkdir()
    images = np.moveaxis(random_pixels(2, 32, 32, 3), 0, 3)
    from scipy.io import savemat  # which the environment of the web app does not have

    savemat(
        root / "SVHN/test_32x32.mat",
        {"X": images, "y": np.array([[10], [7]], np.uint8)},
    )
    return {"test/00000": "0", "test/00001": "7"}


TREES = {
    **dict(
        trees("""
imagenet | imagenet/images/val | n01440764/a.JPEG: tench; n15075141/c.JPEG: toilet paper
imagenet-v2 | imagenetv2/imagenetv2-matched-frequency-format-val
  | 0/a.jpeg: tench; 2/b.jpeg: great white shark; 10/c.jpeg: brambling; 999/d.jpeg: toilet paper
imagenet-a | imagenet-adversarial/imagenet-a
  | n01498041/a.jpg: stingray; n12267677/b.jpg: acorn
  | imagenet-adversarial/imagenet-a/README.txt
imagenet-r | imagenet-r | n01443537/art_0.jpg: goldfish; n01443537/art_10.jpg: goldfish
imagenet-sketch | imagenet-sketch/images | n01443537/sketch_0.JPEG: goldfish
tiny-imagenet | tiny-imagenet-200/val/images | val_0.JPEG: go-kart; val_1.JPEG: goldfish
  | tiny-imagenet-200/val/val_annotations.txt
  | val_0.JPEG\tn03444034\t0\t32\t44\t62; val_1.JPEG\tn01443537\t0\t32\t44\t62
caltech101 | caltech-101/101_ObjectCategories
  | Faces/image_0001.jpg: 0 face; yin_yang/image_0002.jpg: 99 yin_yang;
  Faces_easy/image_0001.jpg; BACKGROUND_Google/image_0001.jpg
  | caltech-101/split_zhou_Caltech101.json
flowers102 | oxford_flowers/jpg
  | image_00002.jpg: 76 passion flower; image_00001.jpg: 0 pink primrose
  | oxford_flowers/split_zhou_OxfordFlowers.json
pets | oxford-iiit-pet/images
  | Abyssinian_1.jpg: abyssinian; yorkshire_terrier_10.jpg: yorkshire terrier;
  american_bulldog_100.jpg
  | oxford-iiit-pet/annotations/test.txt
  | #Image CLASS-ID SPECIES BREED ID; Abyssinian_1 1 1 1; yorkshire_terrier_10 37 2 25
cars | stanford_cars
  | cars_test/00001.jpg: 180 2007 Suzuki Aerio Sedan;
  cars_test/00002.jpg: 0 2000 AM General Hummer SUV
  | splits/split_zhou_StanfordCars.json
sun397 | sun397/SUN397 | a/abbey/sun_1.jpg: abbey; a/apse/indoor/sun_2.jpg: indoor apse
  | sun397/Testing_01.txt | /a/abbey/sun_1.jpg; /a/apse/indoor/sun_2.jpg
eurosat | EuroSAT/2750
  | AnnualCrop/AnnualCrop_1.jpg: 0 Annual Crop Land; SeaLake/SeaLake_2.jpg: 9 Sea or Lake
  | EuroSAT/split_zhou_EuroSAT.json
food101 | food-101/images
  | apple_pie/1.jpg: 0 apple_pie; cheese_plate/2.jpg: 16 cheese_plate;
  cheesecake/3.jpg: 17 cheesecake
  | food-101/split_zhou_Food101.json
dtd | dtd/dtd/images | banded/banded_0060.jpg: 0 banded; zigzagged/zigzagged_1.jpg: 46 zigzagged
  | dtd/split_zhou_DescribableTextures.json
ucf101 | ucf101/UCF-101-midframes
  | Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg: Apply Eye Makeup;
  Handstand_Pushups/v_HandStandPushups_g01_c02.jpg: Handstand Pushups
  | ucf101/ucfTrainTestlist/testlist01.txt
  | ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi; HandstandPushups/v_HandStandPushups_g01_c02.avi
aircraft | fgvc-aircraft-2013b/data/images
  | 1514522.jpg: 707-320; 0747566.jpg: Yak-42; 9999999.jpg
  | fgvc-aircraft-2013b/data/images_variant_test.txt | 1514522 707-320; 0747566 Yak-42
pacs | PACS | art_painting/dog/a.jpg: dog; sketch/person/b.png: person
texture-vs-shape | texture-vs-shape/stimuli
  | edges/airplane/airplane1.png: airplane;
  filled-silhouettes/bear/bear1.png > silhouettes/bear/bear1.png: bear;
  style-transfer-preprocessed-512/airplane/airplane1-clock2.png
  > cue-conflict/airplane/airplane1-clock2.png: airplane
imagenet-c | ImageNet-C/noise/gaussian_noise/5 | n01440764/a.JPEG: tench
imagenet-c-bar | imagenet_c_bar/blue_noise_sample/5 | n01440764/a.JPEG: tench
vlcs | VLCS | Caltech101/bird/1.jpg > caltech101/bird/1.jpg: bird;
  VOC2007/person/2.jpg > voc2007/person/2.jpg: person
office-home | OfficeHomeDataset_10072016
  | Art/Alarm_Clock/1.jpg > art/Alarm_Clock/1.jpg: Alarm Clock;
  Real World/TV/2.jpg > real-world/TV/2.jpg: TV
terra-incognita | terra_incognita
  | location_38/bobcat/1.jpg > location-38/bobcat/1.jpg: bobcat;
  location_100/empty/2.jpg > location-100/empty/2.jpg: empty
domainnet | domain_net
  | clipart/aircraft_carrier/1.jpg: aircraft carrier; sketch/teddy-bear/2.jpg: teddy bear
domainnet-126 | domainnet | clipart/ant/clipart_1.jpg: ant; clipart/zebra/clipart_2.jpg: zebra
  | domainnet/clipart_list.txt | clipart/ant/clipart_1.jpg 2; clipart/zebra/clipart_2.jpg 125
visda | visda-2017/validation | aeroplane/1.jpg: aeroplane
""")
    ),
    "cifar10": cifar(
        "cifar-10-batches-py",
        "labels",
        ("test_batch", "data_batch_1"),
        "3 cat/domestic_cat_s_000907.png; 9 truck/truck_s_1.png",
    ),
    "cifar100": cifar(
        "cifar-100-python",
        "fine_labels",
        ("test", "meta"),
        "1 aquarium_fish/goldfish_s_1.png; 99 worm/worm_s_2.png",
    ),
    "cifar10.1": cifar101,
    "cifar10-c": cifar_c("CIFAR-10-C", [3, 9], ["cat", "truck"]),
    "cifar100-c": cifar_c("CIFAR-100-C", [1, 99], ["aquarium fish", "worm"]),
    "svhn": svhn,
}
UNLABELLED = {  # sets of images of no class, and a file of each
    "places-unknown": "Places/images/a.jpg",
    "inaturalist-unknown": "iNaturalist/images/a.jpg",
    "ninco": "NINCO/NINCO_OOD_classes/cup/a.jpg",
}
