"""How often the verdict of ``domain_norm`` without labels is right, on development streams.

    python -m benchmarks.verdict

For each development shift (never one that is reported) at five severities, for images as they are,
few classes, bursts and a long tail: accuracy of zero-shot CLIP in percent, the gain of
``domain_norm``, its verdict at the end, and whether the two agree. With ``--datasets`` on other
images by id, in random order; labels are for the score only.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from typing import Any

import torch

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.stream import Stream
from cliquetta.methods.registry import create_method
from cliquetta.model.factory import create_model

SHIFTS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
ORDERS: dict[str, dict[str, Any]] = {
    "few": {"order": "uneven"},
    "bursts": {"order": "correlated"},
    "tail": {"order": "long-tail"},
}
BATCH, BAND = 64, 0.5
"""Images per batch, and the gain in points up to which nothing was gained or lost."""


def bundled_streams() -> Iterator[tuple[str, dict[str, Any]]]:
    """Dataset id and order of each stream."""
    for shift in SHIFTS:
        yield from ((f"bundled@{shift}:{severity}", {}) for severity in range(1, 6))
    for id in ("bundled", *(f"bundled@{shift}:4" for shift in SHIFTS)):
        yield from ((id, order) for order in ({}, *ORDERS.values()) if order or id == "bundled")


def is_right(verdict: str, gain: float) -> bool:
    """Whether a verdict fits a gain: abstain where it lost, little to gain where nothing moved."""
    if gain > BAND:
        return verdict in ("adapt", "careful")
    return verdict == "abstain" if gain < -BAND else verdict in ("abstain", "little to gain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", default=[], help="instead of the bundled streams")
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = create_model("micro", device=given.device)
    print(f"{datetime.now(timezone.utc):%Y-%m-%d} micro, {vars(given)}")
    print("stream images zero-shot gain confidence belief information verdict right")
    found: Counter[bool] = Counter()
    for id, order in [(id, {}) for id in given.datasets] or bundled_streams():
        dataset = get_dataset(id)
        stream = Stream(dataset, model.preprocess, BATCH, seed=given.seed, **order)
        plain, adapter = (
            create_method(method, model, dataset.prompts) for method in ("zero_shot", "domain_norm")
        )
        right = torch.zeros(2)
        images, figures = 0, {}
        for batch, labels in islice(stream, given.images // BATCH):
            answers = [method.predict(batch) for method in (plain, adapter)]
            best = torch.stack([answer.logits.argmax(dim=1).cpu() for answer in answers])
            right += (best == labels).sum(dim=1)
            images, figures = images + len(batch), adapter.summarize(answers[1])
        accuracy, after = (100 * right / images).tolist()
        verdict, gain = str(figures["verdict"]), after - accuracy
        found[is_right(verdict, gain)] += 1
        told = ("confidence", "belief", "information")
        shown = [f"{figures.get(name, float('nan')):.3f}" for name in told]
        name = f"{id} {order['order']}" if order else id
        print(f"{name:36} {images:5} {accuracy:6.2f} {gain:+6.2f}", *shown, verdict,
              "yes" if is_right(verdict, gain) else "NO", flush=True)  # fmt: skip
    print(f"right: {found[True]} of {found.total()}")


if __name__ == "__main__":
    main()
