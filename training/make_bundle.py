"""Make the slice of CIFAR-10 that the package carries.

Reads a copy of CIFAR-10 as PNG files (see ``cifar.py``) and writes to
``src/cliquetta/data/bundled``: ``test.webp`` and ``test.json`` with 200 test pictures
per class, ``few-shot.webp`` and ``few-shot.json`` with 16 training pictures per class::

    python training/make_bundle.py CIFAR-10-dataset

The draw looks at nothing but file names: of each class, the pictures whose key has the
smallest SHA-256 after the word :data:`SEED`. It is the same on every machine and
version of Python.
"""

import argparse
import hashlib
import json
from pathlib import Path

from cifar import Split, read_folder, save_mosaic

SEED = "cliquetta-0"
TEST_PER_CLASS = 200
FEW_SHOT_PER_CLASS = 16
FOLDER = Path(__file__).parents[1] / "src" / "cliquetta" / "data" / "bundled"


def draw(keys: tuple[str, ...], per_class: int, seed: str = SEED) -> list[int]:
    """Positions of ``per_class`` keys of each class (the part before ``/``), in the given order."""
    by_class: dict[str, list[tuple[str, int]]] = {}
    for i, key in enumerate(keys):
        rank = hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()
        by_class.setdefault(key.split("/")[0], []).append((rank, i))
    if short := [name for name, ranks in by_class.items() if len(ranks) < per_class]:
        raise ValueError(f"fewer than {per_class} pictures of {', '.join(short)}")
    return sorted(
        i for ranks in by_class.values() for _, i in sorted(ranks)[:per_class]
    )


def write(split: Split, origin: str, per_class: int, name: str, folder: Path) -> None:
    """Write the drawn pictures of one split as ``name.webp`` and ``name.json``."""
    chosen = draw(split.keys, per_class)
    classes = split.class_names
    names = list(dict.fromkeys(classes))
    record = {
        "names": names,
        "labels": [names.index(classes[i]) for i in chosen],
        "keys": [f"{origin}/{split.keys[i]}" for i in chosen],
    }
    columns = 40 if len(chosen) % 40 == 0 else 20
    save_mosaic(folder / f"{name}.webp", split.images[chosen], columns, effort=100)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=0) + "\n")
    size = (folder / f"{name}.webp").stat().st_size
    print(f"{name}: {len(chosen):,} pictures of {len(names)} classes, {size:,} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the bundled slice of CIFAR-10.")
    parser.add_argument(
        "root", type=Path, help="copy of CIFAR-10: SPLIT/CLASS/NAME.png"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    splits = read_folder(args.root)
    write(splits["test"], "cifar10/test", TEST_PER_CLASS, "test", args.out)
    write(splits["train"], "cifar10/train", FEW_SHOT_PER_CLASS, "few-shot", args.out)


if __name__ == "__main__":
    main()
