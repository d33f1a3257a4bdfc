"""Size of a session in the database by method and model: new, and when its memory is full.

Zeros are not stored, so that a session begins small. Full is every number of its
memory, which most methods reach after as many images as their caches hold. A ViT-B/16
has random weights, on which no size depends.
"""

from __future__ import annotations

import argparse

from benchmarks.scap_speed import vit_b16
from cliquetta.data.bundled import load_bundled
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.serve.pieces import SavedMemory
from cliquetta.serve.settings import served_methods


def measure(method: str, model: CLIP, names: tuple[str, ...]) -> tuple[int, int]:
    """Bytes of a new session, and of a full one."""
    adapter = create_method(method, model, names)
    saved, _ = SavedMemory.of("0" * 32, adapter.memory)
    full = sum(adapter.memory[name].nbytes for name in adapter.memory)
    return saved.stored_bytes, full


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--classes", type=int, default=10)
    options = parser.parse_args()
    bundled = load_bundled().names
    names = tuple(
        f"{bundled[i % 10]} {i}" if i >= 10 else bundled[i]
        for i in range(options.classes)
    )
    models = {"micro": create_model("micro"), "ViT-B/16": vit_b16()}
    print(f"KiB of a session with {options.classes} classes: new, full")
    for method in served_methods():
        cells = [measure(method, model, names) for model in models.values()]
        shown = "".join(
            f"{new / 1024:12,.0f} {full / 1024:12,.0f}" for new, full in cells
        )
        print(f"{method:12}{shown}")


if __name__ == "__main__":
    main()
