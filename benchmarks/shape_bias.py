"""Does adaptation learn shapes or textures? Cue-conflict images have one of each.

    python -m benchmarks.shape_bias DIR --model FILES --text-features FILE

DIR are the cue-conflict stimuli of Geirhos et al., ICLR 2019 (``stimuli/
style-transfer-preprocessed-512`` of their repository): ``bear/bear1-clock2.png`` has
the shape of a bear and the texture of a clock. The usual label is the shape. Both are
printed, and the shape bias: of the answers that are one of two different cues, the
share that are the shape.
"""

import argparse
import re
from datetime import datetime, timezone
from pathlib import Path

import torch

from cliquetta.data.catalogue import get_dataset
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.sweep import RunContext
from cliquetta.types import Batch

CUES = re.compile(r"([a-z]+)\d+-([a-z]+)\d+\.png$")


def cues(key: str) -> tuple[str, str]:
    """Shape and texture of an image, from its file name."""
    found = CUES.search(key)
    if found is None:
        raise ValueError(
            f"{key}: not named as a cue-conflict image (SHAPE1-TEXTURE2.png)"
        )
    return found[1], found[2]


@torch.no_grad()
def answers(context: RunContext, spec: RunSpec) -> list[tuple[str, str, str]]:
    """Shape, texture and answer of every image of a stream."""
    adapter, stream = context.prepare(spec)
    names = adapter.prompts.names
    found = []
    for batch, _ in stream:
        assert isinstance(batch, Batch)
        best = adapter.predict(batch).logits.argmax(dim=1).tolist()
        found += [
            (*cues(key), names[n])
            for key, n in zip(batch.keys or (), best, strict=True)
        ]
    return found


def shares(found: list[tuple[str, str, str]]) -> tuple[float, ...]:
    """Percent right by shape, by texture and by either, and the shape bias."""
    shape = sum(answer == shape for shape, _, answer in found)
    texture = sum(answer == texture for _, texture, answer in found)
    either = sum(answer in (shape, texture) for shape, texture, answer in found)

    # The bias is over images whose answer is one of two different cues.
    told = [cue for cue in found if cue[0] != cue[1] and cue[2] in cue[:2]]
    by_shape = sum(answer == shape for shape, _, answer in told)
    bias = by_shape / max(1, len(told))
    images = len(found)
    return (
        100 * shape / images,
        100 * texture / images,
        100 * either / images,
        100 * bias,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("images", type=Path, help="folder of the stimuli")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text-features", required=True)
    parser.add_argument("--methods", nargs="+", default=["zero_shot", "domain_norm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    context = RunContext(None, device=given.device, workers=1, hold=False)
    id = f"folder:{given.images}"
    print(f"{datetime.now(timezone.utc):%Y-%m-%d}, {given.device}, {given.dtype}, at most "
          f"{given.limit} of {len(get_dataset(id))} images\n")  # fmt: skip
    print(
        "| method | seed | shape | texture | either | shape bias |\n|---|--:|--:|--:|--:|--:|"
    )
    for method in given.methods:
        for seed in given.seeds:
            spec = RunSpec(
                id, method, given.model, text_features=given.text_features, seed=seed,
                limit=given.limit, dtype=given.dtype,
            )  # fmt: skip
            cells = " | ".join(
                f"{share:.1f}" for share in shares(answers(context, spec))
            )
            print(f"| {method} | {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
