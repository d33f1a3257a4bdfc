"""How well images of no class are told from the others, and how far confidences can be trusted.

    python -m benchmarks.rejection --logits DIR                 # the bundled model
    python -m benchmarks.rejection --logits DIR --root DATA     # and the real image tower

Logits of all streams are kept in ``--logits`` and not computed again. Open streams
leave every second name out of the class list and show its images all the same.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import OUTSIDE
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.metrics import Metrics, auroc, fpr95
from cliquetta.evaluation.sweep import RunContext
from cliquetta.methods.building.zero_shot_reference import (
    SHARE,
    count_confidences,
    empty_window,
    find_temperature,
    no_confidences,
    reject,
)
from cliquetta.types import Batch, Rejection

SHIFTS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
BUNDLED = (
    "bundled",
    *(f"bundled@{shift}:{severity}" for shift in SHIFTS for severity in (3, 5)),
)
DEVELOPMENT = (
    "imagenet-54",
    "caltech-18",
    "tiny-27",
    "cifar100-21",
    "edges",
    "cue-conflict",
)
REPORT = (
    "silhouettes",
    "pacs-art_painting",
    "pacs-cartoon",
    "pacs-sketch",
    "cifar10-8",
)
WEIGHTS = ",".join(
    f"weights/clip-vit-b16-visual-int8-{i}of2.safetensors" for i in (1, 2)
)


@dataclass(frozen=True)
class Case:
    """A stream, closed or open."""

    name: str
    role: str
    spec: RunSpec


def cases(root: Path | None, images: int, dtype: str) -> Iterator[Case]:
    """All streams: the class list is the dataset's, or every second name of it."""
    found = [(name, "development", RunSpec(name, "zero_shot")) for name in BUNDLED]
    if root is not None:
        model = ",".join(str(root / part) for part in WEIGHTS.split(","))
        text = str(root / "text.npz")
        for role, names in (("development", DEVELOPMENT), ("report", REPORT)):
            for name in names:
                id = f"tar:{root}/tar/{name}"
                spec = RunSpec(id, "zero_shot", model, text_features=text, dtype=dtype)
                found.append((name, role, spec))
    for name, role, spec in found:
        spec = replace(spec, limit=images)
        yield Case(f"{name} closed", role, spec)
        kept = get_dataset(spec.dataset).names[::2]
        yield Case(
            f"{name} open", role, replace(spec, classes=kept, unknown=spec.dataset)
        )


@torch.no_grad()
def answers(context: RunContext, spec: RunSpec) -> tuple[Tensor, Tensor]:
    """Logits and labels of a stream, in its order."""
    adapter, stream = context.prepare(spec)
    logits = []
    labels = []
    for batch, truths in stream:
        assert isinstance(batch, Batch)
        logits.append(adapter.predict(batch).logits.float().cpu())
        labels.append(truths)
    return torch.cat(logits), torch.cat(labels)


def collect(given: argparse.Namespace) -> dict[Case, dict[str, Tensor]]:
    """Logits by method, and labels, of all streams: from files where there are any."""
    context = RunContext(None, device=given.device, workers=2, hold=False)
    found: dict[Case, dict[str, Tensor]] = {}
    for case in cases(given.root, given.images, given.dtype):
        file = given.logits / f"{case.name.replace(' ', '-').replace(':', '-')}.npz"
        saved = np.load(file).items() if file.exists() else ()
        kept = {name: torch.from_numpy(value) for name, value in saved}
        for method in given.methods:
            if method not in kept:
                spec = replace(case.spec, method=method)
                kept[method], kept["labels"] = answers(context, spec)
                arrays: Any = {name: value.numpy() for name, value in kept.items()}
                np.savez_compressed(file, **arrays)
        found[case] = kept
    return found


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """ECE in percent."""
    metrics = Metrics(logits.shape[1])
    metrics.update(logits, labels)
    return float(metrics.compute()["ece"])


def decide(logits: Tensor, zero_shot: Tensor, batch: int = 64) -> Rejection:
    """The decisions of a run over the stream."""
    window = empty_window()
    found = []
    for part, plain in zip(logits.split(batch), zero_shot.split(batch), strict=True):
        one, window = reject(part, plain, window, SHARE)
        found.append(one)
    return Rejection(
        torch.cat([f.score for f in found]), torch.cat([f.rejected for f in found])
    )


def best_balance(known: Tensor, outside: Tensor) -> float:
    """Mean of the shares told right by the best limit there is, which labels would find."""
    limits = torch.cat([known, outside]).unique()
    right = [
        (known <= t).double().mean() + (outside > t).double().mean() for t in limits
    ]
    return float(max(right)) / 2


def calibrate(logits: Tensor, zero_shot: Tensor, batch: int = 64) -> Tensor:
    """The scaled logits of a run over the stream."""
    sums = no_confidences()
    found = []
    for part, plain in zip(logits.split(batch), zero_shot.split(batch), strict=True):
        sums = count_confidences(sums, part, plain.softmax(dim=1))
        found.append(part / find_temperature(sums))
    return torch.cat(found)


def title(case: Case) -> str:
    """The stream as tables name it."""
    return case.name.rpartition(" ")[0] + f" ({case.role})" * (case.role == "report")


def tell(found: dict[Case, dict[str, Tensor]], methods: list[str]) -> None:
    """Print the tables."""
    print("\n## Images of classes that are not in the list\n")
    heads = [
        "stream",
        "method",
        "top-1",
        "AUROC",
        "FPR95",
        "AUROC of max p",
        "FPR95 of max p",
    ]
    heads += ["rejected of no class", "rejected of a class", "balanced", "best limit"]
    print(f"| {' | '.join(heads)} |\n|---|---{'|--:' * (len(heads) - 2)}|")
    for case, kept in found.items():
        labels = kept["labels"]
        known = labels >= 0
        outside = labels == OUTSIDE
        for method in methods if case.name.endswith("open") else ():
            logits = kept[method]
            sure = logits.softmax(dim=1).amax(dim=1)
            score, rejected = decide(logits, kept["zero_shot"])
            right = (logits.argmax(dim=1) == labels)[known].double().mean()
            told = rejected[outside].double().mean(), rejected[known].double().mean()
            figures: list[float | Tensor] = [
                right,
                auroc(-score[known], -score[outside]),
                fpr95(-score[known], -score[outside]),
                auroc(sure[known], sure[outside]),
                fpr95(sure[known], sure[outside]),
                *told,
                (1 - told[1] + told[0]) / 2,
                best_balance(score[known], score[outside]),
            ]
            cells = [f"{100 * float(figure):.1f}" for figure in figures]
            print(f"| {title(case)} | {method} | {' | '.join(cells)} |")
    print("\n## ECE where all images are of the list, as it is and calibrated\n")
    adapted = [method for method in methods if method != "zero_shot"]
    heads = [
        "stream",
        "zero_shot",
        *(f"{m}{c}" for m in adapted for c in ("", ", calibrated")),
    ]
    print(f"| {' | '.join(heads)} |\n|---{'|--:' * (len(heads) - 1)}|")
    for case, kept in found.items():
        if case.name.endswith("closed"):
            zero_shot = kept["zero_shot"]
            labels = kept["labels"]
            answers = [zero_shot]
            for method in adapted:
                answers += [kept[method], calibrate(kept[method], zero_shot)]
            errors = [f"{calibration_error(logits, labels):.1f}" for logits in answers]
            print(f"| {title(case)} | {' | '.join(errors)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--logits", type=Path, required=True, help="folder of logits")
    parser.add_argument(
        "--root", type=Path, help="folder with weights/, text.npz and tar/"
    )
    parser.add_argument(
        "--methods", nargs="+", default=["zero_shot", "domain_norm", "tent", "tda"]
    )
    parser.add_argument(
        "--images", type=int, default=512, help="per stream, and as many unknown"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the real tower")
    given = parser.parse_args()
    given.logits.mkdir(parents=True, exist_ok=True)
    found = collect(given)
    place = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {place}, at most {given.images} images, seed 0"
    )
    tell(found, given.methods)


if __name__ == "__main__":
    main()
