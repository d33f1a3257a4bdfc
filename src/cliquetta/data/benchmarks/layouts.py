"""Layouts of the known datasets: where the images and lists of each may be, and who reads them."""

import csv
import re
from pathlib import Path

import numpy as np

from cliquetta.data.benchmarks.benchmark import COOP, Layout, Listing, Location, squeeze
from cliquetta.data.benchmarks.readers import (
    Read,
    Rows,
    RowsOf,
    by_name,
    by_wnid,
    by_wnid_or_number,
    cifar_pickles,
    cifar_records,
    class_folders,
    coop_rows,
    each_line,
    from_list,
    load_pair,
    numbered_arrays,
    numbered_rows,
    several,
    words,
)
from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.files import walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import text_lines

# --- lists: key and class of every line ---------------------------------------------------------

_SYNSETS = "imagenet_2012_validation_synset_labels.txt"
_KAGGLE = "LOC_val_solution.csv"


def _imagenet_rows(location: Location, file: Path) -> Rows:
    """WordNet ids by Kaggle or in the order of the images; class numbers by Caffe."""
    if file.name == _KAGGLE:
        with file.open(newline="", encoding="utf-8") as opened:
            for row in csv.DictReader(opened):
                yield f"{row['ImageId']}.JPEG", row["PredictionString"].split()[0]
    elif file.name == _SYNSETS:
        for number, wnid in enumerate(text_lines(file), start=1):
            yield f"ILSVRC2012_val_{number:08d}.JPEG", wnid
    else:
        for line in text_lines(file):
            name, _, label = line.partition(" ")
            yield name, label.strip()


@each_line
def _tiny(line: str) -> tuple[str, str]:
    """``val_0.JPEG n03444034 0 32 44 62``."""
    name, wnid, *_ = line.split()
    return name, wnid


@each_line
def _pet(line: str) -> tuple[str, str]:
    """``yorkshire_terrier_10 37 2 25``: the class is in the file's name."""
    name = line.split()[0]
    return f"{name}.jpg", name.rpartition("_")[0]


@each_line
def _plane(line: str) -> tuple[str, str]:
    """``1514522 707-320``: a number and a variant."""
    number, _, variant = line.partition(" ")
    return f"{number}.jpg", variant


@each_line
def _scene(line: str) -> tuple[str, str]:
    """``/a/abbey/sun_x.jpg``; a qualifier comes first in the name."""
    key = line.removeprefix("/")
    return key, " ".join(reversed(key.split("/")[1:-1]))


def _ucf_rows(location: Location, file: Path) -> Rows:
    """Lines ``YoYo/v_YoYo_g01_c01.avi``, of which the middle frame is there."""
    folders = {squeeze(folder.name): folder.name for folder in location.images.iterdir()}
    for line in text_lines(file):
        action, _, video = line.split()[0].partition("/")
        folder = folders.get(squeeze(action), "_".join(re.findall("[A-Z][^A-Z]*", action)))
        yield f"{folder}/{Path(video).stem}.jpg", action


# --- layouts that several datasets share --------------------------------------------------------

_WNID = "n[0-9]*"


def _by_wnid(dataset: str, class_list: str) -> Layout:
    """One folder per WordNet id."""
    read = class_folders(by_wnid(class_list), hint=f"{dataset} has them named by WordNet id")
    return Layout(dataset, "one folder per WordNet id", read, shows=_WNID)


def _coop(dataset: str, name: str, split: str, inside: str, shows: str) -> Layout:
    """A folder of images and a split file of CoOp."""
    read = from_list(coop_rows(dataset), by_name(dataset))
    return Layout(dataset, name, read, inside, shows, f"{COOP}{split}.json")


def _official(dataset: str, name: str, rows: RowsOf, inside: str, shows: str, files: str) -> Layout:
    """A folder of images and the list of its authors, of the test split or of any."""
    splits = "" if "{split}" in files else "test"
    read = from_list(rows, by_name(dataset))
    return Layout(dataset, name, read, inside, shows, files, splits)


def _split_folders(dataset: str, splits: str, shows: str) -> Layout:
    """A folder per split with one folder per class."""
    name, read = f"{splits} with one folder per class", class_folders(by_name(dataset))
    return Layout(dataset, name, read, "{split}", shows)


def _v2(name: str, inside: str = ".", *, splits: str = "", folders: str = "") -> Layout:
    read = class_folders(_IMAGENET, hint="ImageNetV2 has folders 0 to 999")
    return Layout("imagenet-v2", name, read, inside, "[n0-9]*/*", "", splits, folders)


def _archived(dataset: str, name: str, read: Read, shows: str) -> Layout:
    """The folder in an archive, which ``name`` begins with, or what is in it."""
    return Layout(dataset, name, read, f".|{name.partition('/')[0]}", shows)


def _corrupted_arrays(dataset: str, list_id: str) -> Layout:
    """CIFAR-10-C: ``fog.npy`` with severities 1 to 5 in a row, ``labels.npy`` for all of them."""

    def read(location: Location) -> Listing:
        name, _, severity = location.split.partition("/")
        file = location.images / f"{name}.npy"
        images, labels = load_pair(file, location.images / "labels.npy")
        size, rest = divmod(len(images), 5)
        if rest:
            raise UserError(f"{file} has {len(images)} images: five severities of the same")
        rows = slice((int(severity) - 1) * size, int(severity) * size)
        return numbered_arrays(location, images[rows], labels[rows], list_id)

    return Layout(dataset, "CORRUPTION.npy and labels.npy", read, shows="labels.npy")


def _corrupted_tree(dataset: str, inside: str) -> Layout:
    """ImageNet-C: corruption, severity, WordNet id; an archive may be a folder around these."""
    read = class_folders(by_wnid("imagenet"), hint="ImageNet has 1,000, named by WordNet id")
    name = "CORRUPTION/SEVERITY/ with one folder per WordNet id"
    return Layout(dataset, name, read, inside, _WNID)


def _domains(dataset: str, shows: str, *folders: str) -> Layout:
    """A folder per domain with one folder per class each; a domain may have several names."""
    named = [names.split("|") for names in folders]
    by_split = {re.sub("[ _]", "-", names[0].lower()): names for names in named}
    name = f"{', '.join(names[0] for names in named)} with one folder per class"
    splits = "|".join(["all", *by_split])
    return Layout(dataset, name, several(by_split, dataset), shows=shows, splits=splits)


def _listed_domains(dataset: str, file: str, splits: str) -> Layout:
    """Domains of which each has a list."""
    name = f"domain/class/ with {file.format(domain='DOMAIN')}"
    read = from_list(numbered_rows(dataset), by_name(dataset))
    return Layout(dataset, name, read, shows="*/*/*", files=file, splits=splits)


def _unlabelled(dataset: str, name: str, inside: str) -> Layout:
    """Images of classes that do not matter: unknown ones of an open set."""

    def read(location: Location) -> Listing:
        paths = list(walk_images(location.images))
        keys = [path.relative_to(location.images).as_posix() for path in paths]
        return Listing(keys, [UNKNOWN] * len(keys), paths)

    return Layout(dataset, name, read, f"{inside}|.", "*")


def _read_cifar101(location: Location) -> Listing:
    """CIFAR-10.1: ``cifar10.1_v6_data.npy`` (N, 32, 32, 3) and its labels."""
    stem = f"cifar10.1_{location.split}"
    images, labels = (location.images / f"{stem}_{what}.npy" for what in ("data", "labels"))
    return numbered_arrays(location, *load_pair(images, labels), "cifar10", digits=4)


def _read_svhn(location: Location) -> Listing:
    """``test_32x32.mat``: pictures (32, 32, 3, N) and labels in which 10 stands for 0."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError("the files of SVHN are MATLAB's: pip install scipy to read them") from None
    path = location.images / f"{location.split}_32x32.mat"
    try:
        content = loadmat(path)
        images, labels = content["X"], content["y"].ravel()
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path} is not a file of SVHN ({error})") from None
    return numbered_arrays(location, np.moveaxis(images, 3, 0), labels % 10, "svhn")


# --- the datasets -------------------------------------------------------------------------------

_VAL = "images/val|val|validation|ILSVRC/Data/CLS-LOC/val|Data/CLS-LOC/val|ILSVRC2012_img_val|."
_IMAGENET = by_wnid_or_number("imagenet")
_FLAT = from_list(
    _imagenet_rows,
    _IMAGENET,  # Kaggle's val.txt counts images instead of naming classes
    hint=f"if it numbers the images, not their classes, put {_KAGGLE} or {_SYNSETS} beside it",
)
_V2_FOLDERS = "imagenetv2-{split}-format-val|imagenetv2-{split}"
_CIFAR10 = {"test": ["test_batch"], "train": [f"data_batch_{i}" for i in range(1, 6)]}
_CIFAR100 = {"test": ["test"], "train": ["train"]}
_PICKLES_10 = cifar_pickles("cifar10", "labels", _CIFAR10)
_PICKLES_100 = cifar_pickles("cifar100", "fine_labels", _CIFAR100)
_RECORDS_10 = cifar_records("cifar10", 1, _CIFAR10)
_RECORDS_100 = cifar_records("cifar100", 2, _CIFAR100)
_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_STIMULI = {
    "edges": ["edges"],
    "silhouettes": ["filled-silhouettes"],
    "cue-conflict": ["style-transfer-preprocessed-512"],
}
_REAL_WORLD = "Real World|Real_World|RealWorld|Real"
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

LAYOUTS: tuple[Layout, ...] = (  # of one dataset, from the most to the least trusted
    Layout(
        "imagenet",
        "val/ with one folder per WordNet id (or class number)",
        class_folders(_IMAGENET, hint="ImageNet has 1,000"),
        _VAL,
        "[n0-9][0-9]*/*",
    ),
    Layout(
        "imagenet",
        "val/ILSVRC2012_val_*.JPEG",
        _FLAT,
        _VAL,
        "ILSVRC2012_val_*",
        f"{_KAGGLE}|{_SYNSETS}|val.txt",
    ),
    _v2("imagenetv2-SPLIT-format-val/ with folders 0 ... 999", _V2_FOLDERS + "|{split}"),
    _v2("the same without a folder around it", folders=_V2_FOLDERS),
    _v2("folders 0 ... 999", splits="matched-frequency"),
    _by_wnid("imagenet-a", "imagenet-a"),
    _by_wnid("imagenet-r", "imagenet-r"),
    _by_wnid("imagenet-sketch", "imagenet"),
    Layout(
        "tiny-imagenet",
        "val/images/",
        from_list(_tiny, by_wnid("tiny-imagenet")),
        "{split}/images",
        "*.JPEG",
        "val_annotations.txt",
        "val",
    ),
    Layout(
        "tiny-imagenet",
        "val/ or train/ with one folder per WordNet id",
        class_folders(by_wnid("tiny-imagenet"), hint="Tiny-ImageNet has 200"),
        "{split}",
        _WNID,
    ),
    # The ten cross-domain datasets, on CoOp's test splits
    _coop(
        "caltech101",
        "101_ObjectCategories/",
        "Caltech101",
        "101_ObjectCategories|caltech-101/101_ObjectCategories",
        "Faces",
    ),
    _coop("flowers102", "jpg/image_*.jpg", "OxfordFlowers", "jpg|images|.", "image_*.jpg"),
    Layout(
        "flowers102",
        "train/, valid/, test/ with folders 1 ... 102",
        from_list(coop_rows("flowers102"), by_name("flowers102"), anywhere=True),
        "flowers|dataset|.",
        "*/*/image_*.jpg",
        f"{COOP}OxfordFlowers.json",
    ),
    _coop("pets", "images/", "OxfordPets", "images", "*_*.jpg"),
    _official("pets", "images/", _pet, "images", "*_*.jpg", "annotations/test.txt"),
    _coop("cars", "cars_test/", "StanfordCars", ".", "cars_test/*.jpg"),
    Layout(
        "cars",
        "test/ or train/ with one folder per model",
        class_folders(by_name("cars", words), hint="folders are named by make, model and year"),
        "{split}|car_data/{split}|car_data/car_data/{split}",
        "* */*.jpg",
        splits="test",
    ),
    _coop("sun397", "SUN397/a ... z", "SUN397", "SUN397|.", "a/abbey"),
    _official("sun397", "SUN397/a ... z", _scene, "SUN397|.", "a/abbey", "Testing_01.txt"),
    _coop(
        "eurosat", "2750/ with one folder per class", "EuroSAT", "2750|EuroSAT_RGB|.", "AnnualCrop"
    ),
    _coop("food101", "images/", "Food101", "images", "apple_pie"),
    _coop("dtd", "images/", "DescribableTextures", "images", "banded"),
    _coop("ucf101", "UCF-101-midframes/", "UCF101", "UCF-101-midframes|.", "Apply*"),
    _official(
        "ucf101",
        "UCF-101-midframes/",
        _ucf_rows,
        "UCF-101-midframes|.",
        "Apply*",
        "testlist01.txt|ucfTrainTestlist/testlist01.txt",
    ),
    _official(
        "aircraft", "images/", _plane, "images|data/images", "*.jpg", "images_variant_{split}.txt"
    ),
    # CIFAR, PACS, texture against shape
    _archived("cifar10", "cifar-10-batches-py/ (pickles)", _PICKLES_10, "test_batch|data_batch_1"),
    _archived(
        "cifar10",
        "cifar-10-batches-bin/ (binary)",
        _RECORDS_10,
        "test_batch.bin|data_batch_1.bin",
    ),
    _split_folders("cifar10", "test/ and train/", "*/*.png"),
    _archived("cifar100", "cifar-100-python/ (pickles)", _PICKLES_100, "meta|{split}"),
    _archived("cifar100", "cifar-100-binary/", _RECORDS_100, "{split}.bin"),
    _split_folders("cifar100", "test/ and train/", "*/*.png"),
    Layout(
        "cifar10.1",
        "cifar10.1_SPLIT_data.npy and cifar10.1_SPLIT_labels.npy",
        _read_cifar101,
        shows="cifar10.1_{split}_data.npy|cifar10.1_{split}_labels.npy",
    ),
    Layout(
        "pacs",
        f"{', '.join(_DOMAINS)} with one folder per class each",
        several({domain: [domain] for domain in _DOMAINS}, "pacs"),
        shows="*/dog",
    ),
    Layout(
        "texture-vs-shape",
        "stimuli/ with edges, filled-silhouettes, style-transfer-preprocessed-512",
        several(_STIMULI, "texture-vs-shape"),
        ".|stimuli",
        "*/airplane",
    ),
    # Corrupted copies, several domains, images of no known class
    _corrupted_arrays("cifar10-c", "cifar10"),
    _corrupted_arrays("cifar100-c", "cifar100"),
    _corrupted_tree(  # below the folders of its archives, or without them
        "imagenet-c",
        "{split}|noise/{split}|blur/{split}|weather/{split}|digital/{split}|extra/{split}",
    ),
    _corrupted_tree("imagenet-c-bar", "{split}"),
    _domains("vlcs", "*/bird", "Caltech101", "LabelMe", "SUN09", "VOC2007"),
    _domains("office-home", "*/Alarm_Clock", "Art", "Clipart", "Product", _REAL_WORLD),
    _domains("terra-incognita", "*/bobcat", *(f"location_{n}" for n in (100, 38, 43, 46))),
    _listed_domains(
        "domainnet", "{domain}_test.txt", "|".join(f"{name}-test" for name in _DOMAINNET)
    ),
    _domains("domainnet", "*/aircraft_carrier", *_DOMAINNET),
    _listed_domains("domainnet-126", "{domain}_list.txt", "clipart|painting|real|sketch"),
    _split_folders("visda", "train/ and validation/", "aeroplane"),
    Layout("svhn", "test_32x32.mat and train_32x32.mat", _read_svhn, shows="{split}_32x32.mat"),
    _unlabelled("places-unknown", "images/", "images"),
    _unlabelled("inaturalist-unknown", "images/", "images"),
    _unlabelled(
        "ninco",
        "NINCO_OOD_classes/ with one folder per class",
        "NINCO/NINCO_OOD_classes|NINCO_OOD_classes",
    ),
)
