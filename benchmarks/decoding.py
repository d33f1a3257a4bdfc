"""How many predictions change when JPEG files are decoded another way than exactly.

    python -m benchmarks.decoding PHOTOS --model TOWER.safetensors --text-features TEXT.npz

Give photographs whose shorter side has at least 448 pixels: smaller ones are decoded
exactly by ``--decode fast``, too. As a yardstick, the same files are predicted exactly
with their pixels moved by one grey level at random, which no eye sees.
"""

import argparse
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from cliquetta.data.files import find_images
from cliquetta.data.images import open_image
from cliquetta.inference.bulk import predict
from cliquetta.methods.building.registry import create_method
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.prompts.features import as_text_features

Predictions = Mapping[str, tuple[str, float]]


def nudged(path: Path, generator: np.random.Generator) -> Image.Image:
    """The picture with a grey level more or less in every pixel."""
    values = np.asarray(open_image(path)).astype(np.int16)
    moved = values + generator.integers(-1, 2, values.shape, dtype=np.int16)
    return Image.fromarray(moved.clip(0, 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text-features", type=Path, required=True)
    parser.add_argument("--methods", default="zero_shot,domain_norm")
    parser.add_argument("--decode", default="fast", help="comma-separated")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    text = as_text_features(given.text_features)
    assert text.names is not None
    shards = given.model.split(",")
    source = shards if len(shards) > 1 else given.model
    model = create_model(source, device=given.device, dtype=given.dtype)
    prompts = ClassPrompts(text.names, features=text.select(text.names))
    every = find_images(given.photographs)
    paths = every[:: max(1, len(every) // given.images)][: given.images]
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {vars(given)}", flush=True)
    for name in given.methods.split(","):
        predictions: dict[str, Predictions] = {}
        for way in ("exact", *given.decode.split(","), "nudged"):
            adapter = create_method(name, model, prompts)
            generator = np.random.default_rng(0)
            images = (
                [nudged(path, generator) for path in paths]
                if way == "nudged"
                else paths
            )
            decode = "exact" if way == "nudged" else way
            run = predict(images, method=adapter, workers=1, decode=decode)  # type: ignore[arg-type]
            rows = zip(map(str, paths), run.rows, strict=True)
            predictions[way] = {
                path: (row["prediction"], row["probability"]) for path, row in rows
            }
            exact = predictions["exact"]
            changed = [
                path for path in exact if exact[path][0] != predictions[way][path][0]
            ]
            moves = [
                abs(exact[p][1] - predictions[way][p][1])
                for p in exact
                if p not in changed
            ]
            sure = max((exact[path][1] for path in changed), default=0.0)
            print(
                f"{name}, {way}: {len(changed)} of {len(paths)} predictions change (the surest had "
                f"a probability of {sure:.2f}); others move by {np.mean(moves):.4f} on average, at "
                f"most {max(moves):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
