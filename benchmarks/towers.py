"""How fast the towers encode: ours and transformers' CLIP in one run, on the same random weights.

    python -m benchmarks.towers
    python -m benchmarks.towers --device cuda --dtype bf16

The two take turns, so that a busy machine slows both; figures are medians. transformers
runs with ``scaled_dot_product_attention``, its fastest. Nothing is downloaded.
``--check`` fails where one of the aims is missed.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from cliquetta.model.checkpoints.huggingface import from_huggingface
from cliquetta.model.checkpoints.state import build
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import pick_device, pick_dtype
from cliquetta.prompts.catalogue import class_names

Run = Callable[[], Tensor]

# patch, width, layers, heads of the image tower; width, heads of the text tower; common
# width
SHAPES = {
    "tiny": (8, 192, 4, 3, 128, 2, 128),
    "ViT-B/32": (32, 768, 12, 12, 512, 8, 512),
    "ViT-B/16": (16, 768, 12, 12, 512, 8, 512),
    "ViT-L/14": (14, 1024, 24, 16, 768, 12, 768),
}


@dataclass(frozen=True)
class Row:
    """One comparison: what was run, both times, and how often the first fits into the second."""

    work: str
    fast: str
    slow: str
    fast_ms: float
    slow_ms: float
    aim: float
    difference: float
    """Largest difference of the unit features, which must be the same work."""

    @property
    def ratio(self) -> float:
        """How many times as fast the first is."""
        return self.slow_ms / self.fast_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument(
        "--shape", choices=SHAPES, help="ViT-B/32 on the CPU, else ViT-B/16"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="images at once")
    parser.add_argument(
        "--classes", type=int, help="ImageNet classes to encode, evenly spread"
    )
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if an aim is missed"
    )
    options = parser.parse_args()
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype)
    on_cpu = device.type == "cpu"
    shape = options.shape or ("ViT-B/32" if on_cpu else "ViT-B/16")
    ours, theirs = build_pair(shape, device, dtype)
    rounds = options.rounds or (5 if on_cpu else 30)
    rows = [
        image_row(ours, theirs, batch, rounds)
        for batch in options.batches or ([4, 16] if on_cpu else [64, 256])
    ]
    rows += text_rows(ours, theirs, options.classes or (50 if on_cpu else 1000), rounds)
    setting = {
        "shape": shape,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if options.json:
        print(
            json.dumps(
                {**setting, "rows": [asdict(r) | {"ratio": r.ratio} for r in rows]}
            )
        )
    else:
        print_table(setting, rows)
    return int(options.check and any(row.ratio < row.aim for row in rows))


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine()
    )


def build_pair(
    shape: str, device: torch.device, dtype: torch.dtype
) -> tuple[CLIP, transformers.CLIPModel]:
    """Our CLIP and transformers', with the same random weights."""
    patch, width, layers, heads, text_width, text_heads, common = SHAPES[shape]
    text_layers = min(layers, 12)
    torch.manual_seed(0)
    config = transformers.CLIPConfig(  # type: ignore[call-arg]
        text_config={
            "hidden_size": text_width,
            "intermediate_size": 4 * text_width,
            "num_hidden_layers": text_layers,
            "num_attention_heads": text_heads,
        },
        vision_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "image_size": 224,
            "patch_size": patch,
        },
        projection_dim=common,
        attn_implementation="sdpa",
    )
    theirs = transformers.CLIPModel(config).eval().requires_grad_(False)
    checkpoint = from_huggingface(theirs.state_dict(), config.to_dict(), id=shape)
    ours = build(checkpoint, device=device, dtype=dtype)
    return ours, theirs.to(device, dtype)


def image_row(
    ours: CLIP, theirs: transformers.CLIPModel, batch: int, rounds: int
) -> Row:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, 224, 224, generator=generator).to(
        ours.device, ours.dtype
    )
    return compare(
        f"{batch} images",
        ("ours", lambda: ours.encode_image(pixels)),
        (
            "transformers",
            lambda: features(theirs.get_image_features(pixel_values=pixels)),
        ),
        rounds,
        aim=1.0,
    )


def text_rows(
    ours: CLIP, theirs: transformers.CLIPModel, classes: int, rounds: int
) -> list[Row]:
    """Both at the length of the longest text, both at 77, and ours cut against ours at 77."""
    names = class_names("imagenet")
    spread = [names[i * len(names) // classes] for i in range(classes)]
    ids = ours.tokenizer([f"a photo of a {name}." for name in spread]).to(ours.device)
    longest = int(ids.argmax(dim=1).max()) + 1
    short = ids[:, :longest]

    def plain() -> Tensor:
        return ours.encode_text(ids)

    def at(length: int) -> Run:
        return lambda: features(theirs.get_text_features(input_ids=ids[:, :length]))

    def uncut() -> Tensor:
        text = ours.require_text()
        ends = ids.argmax(dim=1)
        parts = zip(ids.split(512), ends.split(512), strict=True)
        return torch.cat([text.encode(text.tokens(part), end) for part, end in parts])

    return [
        compare(
            f"{classes} texts of {longest} tokens",
            ("ours", lambda: ours.encode_text(short)),
            ("transformers", at(longest)),
            rounds,
            aim=1.0,
        ),
        compare(
            f"{classes} texts of 77 tokens",
            ("ours", plain),
            ("transformers", at(77)),
            rounds,
            1.0,
        ),
        compare(
            f"{classes} classes",
            ("ours, cut", plain),
            ("ours, 77 tokens", uncut),
            rounds,
            aim=3.0,
        ),
    ]


def features(output: object) -> Tensor:
    """Transformers 5 wraps features, 4 does not."""
    return output if isinstance(output, Tensor) else output.pooler_output  # type: ignore[attr-defined]


@torch.inference_mode()
def compare(
    work: str, fast: tuple[str, Run], slow: tuple[str, Run], rounds: int, aim: float
) -> Row:
    """Time two ways of the same work in turns, after a warm-up that checks that they agree."""
    a, b = (
        torch.nn.functional.normalize(run().float(), dim=-1) for _, run in (fast, slow)
    )
    for _ in range(3 if a.is_cuda else 0):
        fast[1](), slow[1]()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, into in ((fast[1], times[0]), (slow[1], times[1])):
            into.append(milliseconds(run, a.device))
    return Row(
        work,
        fast[0],
        slow[0],
        statistics.median(times[0]),
        statistics.median(times[1]),
        aim,
        float((a - b).abs().max()),
    )


def milliseconds(run: Run, device: torch.device) -> float:
    """Time of one call; on a GPU, until its work is done."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end)
    if device.type == "mps":
        torch.mps.synchronize()
    before = time.perf_counter()
    run()
    if device.type == "mps":
        torch.mps.synchronize()
    return 1000 * (time.perf_counter() - before)


def print_table(setting: dict[str, Any], rows: list[Row]) -> None:
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(
        f"{'work':28}{'':17}{'ms':>10}  {'':17}{'ms':>10}{'ratio':>8}{'aim':>6}{'differ':>10}"
    )
    for row in rows:
        print(
            f"{row.work:28}{row.fast:17}{row.fast_ms:10.2f}  {row.slow:17}{row.slow_ms:10.2f}"
            f"{row.ratio:8.2f}{row.aim:6.1f}{row.difference:10.1e}"
            f"{'' if row.ratio >= row.aim else '  missed'}"
        )


if __name__ == "__main__":
    sys.exit(main())
