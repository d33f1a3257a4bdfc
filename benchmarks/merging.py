"""Accuracy of joined states of several actors, beside one actor on the same stream.

    python -m benchmarks.merging

For each development shift of the bundled images (never one that is reported):
``IMAGES`` images are learned from by one adapter, and in halves by two whose states are
joined; then each predicts the next ``HELD`` images, going on to learn. Accuracy in
percent on those.
"""

import argparse
from datetime import datetime, timezone
from itertools import islice

import torch

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.stream import Stream
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import merge_states, pack_state
from cliquetta.model.factory import create_model
from cliquetta.types import Batch

SHIFTS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
IMAGES = 512
HELD = 256
BATCH = 64
Labelled = tuple[Batch, torch.Tensor]


def accuracy(adapter: Adapter, batches: list[Labelled]) -> float:
    """Percent right while the adapter goes on to learn."""
    right = [
        adapter.predict(batch).logits.argmax(dim=1) == labels
        for batch, labels in batches
    ]
    return 100 * float(torch.cat(right).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--methods", nargs="+", default=["zero_shot", "domain_norm", "tent", "tda"]
    )
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--actors", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = create_model("micro", device="cpu")
    print(
        f"{datetime.now(timezone.utc):%Y-%m-%d} micro on the CPU, {vars(given)}, {IMAGES} images"
    )
    print("method shift nothing-learned half-each one-actor joined")
    for method in given.methods:
        for shift in SHIFTS:
            dataset = get_dataset(f"bundled@{shift}:{given.severity}")
            stream = Stream(dataset, model.preprocess, BATCH, seed=0)
            batches = list(islice(stream, (IMAGES + HELD) // BATCH))
            learned = batches[: IMAGES // BATCH]
            held = batches[IMAGES // BATCH :]
            figures = [accuracy(create_method(method, model, dataset.prompts), held)]
            states = []
            share = len(learned) // given.actors
            alone = []
            for actor in range(given.actors):
                adapter = create_method(method, model, dataset.prompts)
                accuracy(adapter, learned[actor * share : (actor + 1) * share])
                states.append(pack_state(adapter))
                alone.append(accuracy(adapter, held))
            figures.append(sum(alone) / len(alone))
            one = create_method(method, model, dataset.prompts)
            accuracy(one, learned)
            figures.append(accuracy(one, held))
            joined = create_method(method, model, dataset.prompts)
            merge_states(joined, states)
            figures.append(accuracy(joined, held))
            print(method, shift, *(f"{figure:.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
