"""Packed ImageNet validation images, made from a clone of their source.

``ndb796/Small-ImageNet-Validation-Dataset-1000-Classes`` holds 5,000 originals, five of
each class, in folders that are named by the class index in torchvision's order. A part
is one ``.npz`` file: JPEG bytes one after another in ``data``, where image ``i`` is
``data[off[i]:off[i + 1]]``, with its class in ``label`` and in ``index`` its place
among the five files of its class by name. Images 0, 2 and 4 of a class are for
development; 1 and 3 are for reports.

``benchmarks.real_data --imagenet`` makes the parts and, from them, the folders of tar
files that the grid ``leaderboard-imagenet`` reads: ``imagenet`` (all images, shorter
side 224, centre crop), ``imagenet-report`` (its report images), and
``imagenet-report-256`` (these, shorter side 256, not cropped) for methods that look at
many views of an image.
"""

import io
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from benchmarks.real_data import Images, write_shard
from cliquetta.prompts.catalogue import class_names

SOURCE_FOLDER = "ILSVRC2012_img_val_subset"
PARTS = {"dev": (0, 2, 4), "report": (1, 3)}
"""Places within a class, by part."""
JPEG_QUALITY = 88


@dataclass(frozen=True)
class SourceImage:
    """One original: its git object, its class and its place among the files of the class."""

    blob: str
    label: int
    index: int


@dataclass(frozen=True)
class PackedImages:
    """The images of a part, as they are stored."""

    data: np.ndarray  # uint8, JPEG bytes concatenated
    off: np.ndarray  # int64, one more than there are images
    label: np.ndarray  # int64
    index: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.label)

    def jpeg(self, position: int) -> bytes:
        """Return the file of one image."""
        start = self.off[position]
        stop = self.off[position + 1]
        return self.data[start:stop].tobytes()


def list_source(clone: Path) -> list[SourceImage]:
    """List the originals of a clone (bare or with a work tree), by class, then by file name."""
    listing = subprocess.run(
        ["git", "-C", str(clone), "ls-tree", "-r", "HEAD", f"{SOURCE_FOLDER}/"],
        capture_output=True,
        check=True,
        text=True,
    )
    # "mode type blob<TAB>folder/class/file"
    by_class: dict[int, list[tuple[str, str]]] = {}
    for line in listing.stdout.splitlines():
        about, _, path = line.partition("\t")
        blob = about.split()[2]
        label = int(PurePosixPath(path).parent.name)
        by_class.setdefault(label, []).append((path, blob))
    images = []
    for label in sorted(by_class):
        for index, (_, blob) in enumerate(sorted(by_class[label])):
            images.append(SourceImage(blob=blob, label=label, index=index))
    return images


def read_blob(clone: Path, blob: str) -> bytes:
    """Read one object of a git repository."""
    command = ["git", "-C", str(clone), "cat-file", "blob", blob]
    return subprocess.run(command, capture_output=True, check=True).stdout


def resize_shorter_side(image: Image.Image, size: int) -> Image.Image:
    """Resize as CLIP does: the shorter side to ``size``, bicubic."""
    scale = size / min(image.size)
    # torchvision cuts the longer side off to whole pixels.
    width = max(size, int(image.width * scale))
    height = max(size, int(image.height * scale))
    return image.resize((width, height), Image.Resampling.BICUBIC)


def crop_centre(image: Image.Image, size: int) -> Image.Image:
    """Cut the square of ``size`` pixels out of the middle."""
    left = round((image.width - size) / 2)
    top = round((image.height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def encode(original: bytes, *, size: int, crop: bool) -> bytes:
    """Make the stored JPEG of an original; ``crop`` says whether only the middle is kept."""
    image = Image.open(io.BytesIO(original)).convert("RGB")
    image = resize_shorter_side(image, size)
    if crop:
        image = crop_centre(image, size)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def _encode_blob(blob: str, clone: Path, size: int, crop: bool) -> bytes:
    return encode(read_blob(clone, blob), size=size, crop=crop)


def encode_all(
    images: Sequence[SourceImage], clone: Path, *, size: int, crop: bool, processes: int
) -> Iterator[bytes]:
    """Make the stored JPEG of every image, in order."""
    encode_one = partial(_encode_blob, clone=clone, size=size, crop=crop)
    blobs = [image.blob for image in images]
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(encode_one, blobs, chunksize=16)


def write_part(
    path: Path, images: Sequence[SourceImage], files: Sequence[bytes]
) -> None:
    """Write one part; equal inputs give equal files."""
    lengths = [0] + [len(file) for file in files]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        data=np.frombuffer(b"".join(files), dtype=np.uint8),
        off=np.cumsum(lengths),
        label=np.array([image.label for image in images]),
        index=np.array([image.index for image in images]),
    )


def read_part(path: Path) -> PackedImages:
    """Read a part."""
    with np.load(path) as file:
        return PackedImages(
            data=file["data"], off=file["off"], label=file["label"], index=file["index"]
        )


def pack(
    clone: Path, path: Path, part: str, *, size: int, crop: bool, processes: int
) -> None:
    """Write the images of one part to ``path``."""
    images = [image for image in list_source(clone) if image.index in PARTS[part]]
    encoded = encode_all(images, clone, size=size, crop=crop, processes=processes)
    write_part(path, images, list(encoded))
    print(
        f"{path}: {len(images)} images, {path.stat().st_size / 1e6:.1f} MB", flush=True
    )


def pack_all(clone: Path, out: Path, *, processes: int) -> None:
    """Write both parts, and the report images once more for methods with views."""
    for part in PARTS:
        path = out / f"imagenet-{part}.npz"
        pack(clone, path, part, size=224, crop=True, processes=processes)
    path = out / "imagenet-report-256.npz"
    pack(clone, path, "report", size=256, crop=False, processes=processes)


def named_files(parts: Sequence[PackedImages]) -> Images:
    """Name every image ``class/class-place.jpg``, by class, then by place."""
    found = []
    for part in parts:
        for position in range(len(part)):
            place = (int(part.label[position]), int(part.index[position]))
            found.append((place, part.jpeg(position)))
    for (label, index), data in sorted(found):
        yield f"{label}/{label}-{index}.jpg", data


def write_folders(parts: Path, out: Path) -> None:
    """Write the folders of tar files under ``out / "tar"`` from the parts in a folder."""
    development = read_part(parts / "imagenet-dev.npz")
    report = read_part(parts / "imagenet-report.npz")
    folders = {
        "imagenet": [development, report],
        "imagenet-report": [report],
        "imagenet-report-256": [read_part(parts / "imagenet-report-256.npz")],
    }
    for name, packed in folders.items():
        folder = out / "tar" / name
        count = write_shard(folder, named_files(packed))
        # Folders are numbered, so the class list has to be stated.
        names = "\n".join(class_names("imagenet"))
        (folder / "classes.txt").write_text(f"{names}\n", encoding="utf-8")
        print(f"{name}: {count} images", flush=True)


def write_text_features(folder: Path, out: Path) -> None:
    """Write ``imagenet-single.npz`` and ``imagenet-descriptions.npz``: names and features."""
    for kind in ("single", "descriptions"):
        with np.load(folder / f"imagenet1k-{kind}.npz") as file:
            names = file["names"]
            features = file["emb"].astype(np.float32)
        np.savez(out / f"imagenet-{kind}.npz", names=names, features=features)
