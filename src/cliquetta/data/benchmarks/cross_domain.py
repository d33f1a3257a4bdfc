"""The ten datasets of the cross-domain benchmark, on CoOp's test splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cliquetta.data.benchmarks import official
from cliquetta.data.benchmarks.benchmark import Benchmark
from cliquetta.data.benchmarks.place import COOP, Layout, Place
from cliquetta.data.benchmarks.readers import (
    by_words,
    class_folders,
    coop_split,
)
from cliquetta.data.files import walk_images

SPLITS = (
    "The split file is linked from DATASETS.md of github.com/KaiyangZhou/CoOp, and most are in "
    "splits/ of github.com/linzhiqiu/cross_modal_adaptation; put it beside the images or into "
    "ROOT/splits."
)


def _split_file(name: str) -> str:
    return f"{COOP}{name}.json"


def _coop(name: str, split: str, list_id: str, *inside: str, shows: str = "*") -> Layout:
    """CoOp's layout: a folder of images and a split file."""
    file = _split_file(split)
    return Layout(name, coop_split(file, list_id), inside, (shows,), (file,))


def _by_file_name(place: Place) -> Callable[[str], Path]:
    """Finds pictures below class folders by file name alone."""
    paths = {path.name: path for path in walk_images(place.images)}
    return lambda key: paths.get(Path(key).name, place.images / key)


CROSS_DOMAIN = (
    Benchmark(
        "caltech101",
        "objects, 100 classes; CoOp's test split",
        ("caltech-101", "caltech101", "caltech-101/caltech-101", "caltech101/caltech101"),
        (
            _coop(
                "101_ObjectCategories/",
                "Caltech101",
                "caltech101",
                "101_ObjectCategories",
                "caltech-101/101_ObjectCategories",
                shows="Faces",
            ),
        ),
        {"test": 2_465, "val": 1_649, "train": 4_128},
        "Get caltech-101.zip from data.caltech.edu/records/mzrjq-6wc02 and extract it (and "
        f"101_ObjectCategories.tar.gz in it). {SPLITS}",
        "Fei-Fei et al., 2004; CC BY 4.0",
        "caltech101",
        (
            "BACKGROUND_Google and Faces_easy are no classes, and four folder names are written "
            "as singulars (Faces: face): a loader that takes the folders as they are is off by "
            "one or two from the first class on",
        ),
    ),
    Benchmark(
        "flowers102",
        "flowers, 102 classes; CoOp's test split",
        (
            "oxford_flowers",
            "flowers-102",
            "flowers102",
            "flower102",
            "oxford-flowers-102",
            "oxford102flowers",
        ),
        (
            _coop(
                "jpg/image_*.jpg",
                "OxfordFlowers",
                "flowers102",
                "jpg",
                "images",
                ".",
                shows="image_*.jpg",
            ),
            Layout(
                "train/, valid/, test/ with folders 1 ... 102",
                coop_split(_split_file("OxfordFlowers"), "flowers102", locate=_by_file_name),
                ("flowers", "dataset", "."),
                ("*/*/image_*.jpg",),
                (_split_file("OxfordFlowers"),),
            ),
        ),
        {"test": 2_463, "val": 1_633, "train": 4_093},
        f"Get 102flowers.tgz from robots.ox.ac.uk/~vgg/data/flowers/102/. {SPLITS}",
        "Nilsback & Zisserman, 2008; research",
        "flowers102",
        (
            "the official split has 6,149 test images, another one than CoOp's",
            "folders 1 ... 102 count from one and sort wrongly as strings: labels come from the "
            "split file",
        ),
    ),
    Benchmark(
        "pets",
        "cats and dogs, 37 breeds",
        ("oxford_pets", "oxford-iiit-pet", "oxfordpets", "pets", "oxfordiiitpets"),
        (
            _coop("images/", "OxfordPets", "pets", "images", shows="*_*.jpg"),
            Layout(
                "images/",
                official.read_pets,
                ("images",),
                ("*_*.jpg",),
                (official.PETS_LIST,),
                splits=("test",),
            ),
        ),
        {"test": 3_669, "val": 736, "train": 2_944},
        "Get images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets/.",
        "Parkhi et al., 2012; CC BY-SA 4.0",
        "pets",
        ("breeds sort differently with capitals first (cats are capitalised): names decide",),
    ),
    Benchmark(
        "cars",
        "cars, 196 models",
        ("stanford_cars", "stanfordcars", "cars", "cars196", "stanford-cars-dataset"),
        (
            _coop("cars_test/", "StanfordCars", "cars", ".", shows="cars_test/*.jpg"),
            Layout(
                "test/ or train/ with one folder a model",
                class_folders(by_words("cars"), hint="folders are named by make, model and year"),
                ("{split}", "car_data/{split}", "car_data/car_data/{split}"),
                ("* */*.jpg",),
                splits=("test",),
            ),
        ),
        {"test": 8_041, "val": 1_635, "train": 6_509},
        "The original links are dead; copies are on kaggle.com (stanford-cars-dataset) and "
        f"huggingface.co (tanganke/stanford_cars). {SPLITS}",
        "Krause et al., 2013; non-commercial research",
        "cars",
        (
            "copies with class folders carry other file names and put the year last "
            "(AM General Hummer SUV 2000): classes are matched by their words, files not at all",
        ),
    ),
    Benchmark(
        "sun397",
        "scenes, 397 classes",
        ("sun397", "sun397/sun397"),
        (
            _coop("SUN397/a ... z", "SUN397", "sun397", "SUN397", ".", shows="a/abbey"),
            Layout(
                "SUN397/a ... z",
                official.read_sun,
                ("SUN397", "."),
                ("a/abbey",),
                (official.SUN_LIST,),
                splits=("test",),
            ),
        ),
        {"test": 19_850, "val": 3_970, "train": 15_880},
        "Get SUN397.tar.gz and Partitions.zip from vision.princeton.edu/projects/2010/SUN/.",
        "Xiao et al., 2010; research",
        "sun397",
        ("names with a qualifier turn round (a/apse/indoor: indoor apse)",),
    ),
    Benchmark(
        "eurosat",
        "satellite images, 10 kinds of land; CoOp's test split",
        ("eurosat", "eurosat-rgb", "eurosat/eurosat"),
        (
            _coop(
                "2750/ with one folder per class",
                "EuroSAT",
                "eurosat",
                "2750",
                "EuroSAT_RGB",
                ".",
                shows="AnnualCrop",
            ),
        ),
        {"test": 8_100, "val": 5_400, "train": 13_500},
        f"Get EuroSAT_RGB.zip from zenodo.org/records/7711810. {SPLITS}",
        "Helber et al., 2019; MIT",
        "eurosat",
        (
            "folder names (AnnualCrop) as class names cost many points: CoOp's names are used "
            "(Annual Crop Land)",
        ),
    ),
    Benchmark(
        "food101",
        "dishes, 101 classes; CoOp's test split",
        ("food-101", "food101", "food-101/food-101", "food101/food-101"),
        (_coop("images/", "Food101", "food101", "images", shows="apple_pie"),),
        {"test": 30_300, "val": 20_200, "train": 50_500},
        f"Get food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/. {SPLITS}",
        "Bossard et al., 2014; research",
        "food101",
        (
            "the official split (meta/test.txt) has 25,250 test images, another one than CoOp's",
            "cheese_plate (16) stands before cheesecake (17); some published lists swap them",
        ),
    ),
    Benchmark(
        "dtd",
        "textures, 47 classes; CoOp's test split",
        ("dtd", "dtd/dtd", "describabletextures"),
        (_coop("images/", "DescribableTextures", "dtd", "images", shows="banded"),),
        {"test": 1_692, "val": 1_128, "train": 2_820},
        f"Get dtd-r1.0.1.tar.gz from robots.ox.ac.uk/~vgg/data/dtd/. {SPLITS}",
        "Cimpoi et al., 2014; research",
        "dtd",
        ("the official splits (labels/test1.txt ...) have 1,880 test images: not CoOp's",),
    ),
    Benchmark(
        "ucf101",
        "actions, 101 classes; middle frames of videos",
        ("ucf101", "ucf-101", "ucf101/ucf101"),
        (
            _coop(
                "UCF-101-midframes/", "UCF101", "ucf101", "UCF-101-midframes", ".", shows="Apply*"
            ),
            Layout(
                "UCF-101-midframes/",
                official.read_ucf,
                ("UCF-101-midframes", "."),
                ("Apply*",),
                official.UCF_LISTS,
                splits=("test",),
            ),
        ),
        {"test": 3_783, "val": 1_898, "train": 7_639},
        f"Get UCF-101-midframes.zip, linked from DATASETS.md of CoOp. {SPLITS}",
        "Soomro et al., 2012; research",
        "ucf101",
        ("files say HandStandPushups and folders Handstand_Pushups: case does not count",),
    ),
    Benchmark(
        "aircraft",
        "aeroplanes, 100 variants",
        (
            "fgvc_aircraft",
            "fgvc-aircraft-2013b",
            "fgvc-aircraft-2013b/data",
            "fgvc-aircraft-2013b/fgvc-aircraft-2013b/data",
            "aircraft",
        ),
        (
            Layout(
                "images/",
                official.read_aircraft,
                ("images", "data/images"),
                ("*.jpg",),
                (official.AIRCRAFT_LIST,),
            ),
        ),
        {"test": 3_333, "val": 3_333, "train": 3_334},
        "Get fgvc-aircraft-2013b.tar.gz from robots.ox.ac.uk/~vgg/data/fgvc-aircraft/.",
        "Maji et al., 2013; non-commercial research",
        "aircraft",
        ("families and makers have lists of their own: the variants are used",),
    ),
)
