"""Evidence of a run for reports, beside its record: a folder of bounded size.

Every batch leaves one line of counts; some, spread over the stream, leave everything.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load
from torch import Tensor

from cliquetta.atomic import write_atomically
from cliquetta.data.images import cut_mosaic, open_image
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.progress import Step
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.explanation import Explanation
from cliquetta.model.preprocess import Preprocess
from cliquetta.tensor_file import pack_raw
from cliquetta.types import Batch

FOLDER = "evidence"
FORMAT = "cliquetta-evidence-2"
_ABOUT = "about.json"
_COUNTS = "batches.jsonl"

Pictures = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EvidenceLimits:
    """Limits on the evidence that is stored."""

    images: int = 256
    """in full, in batches spread over the stream; a batch is cut to this"""
    maps: int = 12  # images with attention maps
    pixels: int = 96  # longest side of the small pictures

    def batches(self, total: int, size: int) -> frozenset[int]:
        """Numbers, from 1, of the batches that are shown in full: the last, then the first."""
        if self.images < 1 or total < 1:
            return frozenset()
        wanted = min(total, max(1, self.images // max(1, size)))
        return frozenset(np.linspace(total, 1, wanted).round().astype(int).tolist())


class EvidenceLog:
    """Writes the evidence of one run while it runs, the same files if it is resumed.

    Turns ``adapter.collect_evidence`` on for the batches it shows, which changes no
    prediction.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Adapter,
        stream: Stream,
        limits: EvidenceLimits,
        done: int,
    ) -> None:
        """Continue after ``done`` batches; what was written of later ones is dropped."""
        self.folder, self.adapter, self.limits = folder, adapter, limits
        self.shown = limits.batches(len(stream), stream.batch_size)
        about = {"format": FORMAT, "names": list(stream.names), "limits": vars(limits)}
        write_atomically(
            self.folder / _ABOUT, json.dumps(about, ensure_ascii=False).encode()
        )
        counts = self.folder / _COUNTS
        if counts.exists():
            lines = counts.read_bytes().splitlines(keepends=True)
            write_atomically(counts, b"".join(lines[:done]))
        adapter.collect_evidence = done + 1 in self.shown

    def __call__(self, step: Step) -> None:
        """Keep what is wanted of a batch."""
        line = {"batch": step.number, **self.adapter.summarize(step.prediction)}
        with (self.folder / _COUNTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if step.number in self.shown and len(step.batch):
            self._write(step, -(-self.limits.maps // len(self.shown)))
        self.adapter.collect_evidence = step.number + 1 in self.shown

    def _write(self, step: Step, maps: int) -> None:
        assert isinstance(step.batch, Batch)  # a stream of features has nothing to show
        batch = step.batch[: self.limits.images]
        labels, logits = step.labels[: len(batch)], step.prediction.logits[: len(batch)]
        explanation = self.adapter.explain(batch, step.prediction, maps=maps)
        entry = {
            "batch": step.number,
            "keys": list(batch.keys),
            "labels": labels.tolist(),
            "before": explanation.before.tolist(),
            "after": logits.argmax(dim=-1).tolist(),
            "description": explanation.description,
            "maps": explanation.mapped,
        }
        name = f"{step.number:06d}"
        model = self.adapter.model
        pictures = small_pictures(batch.images, model.preprocess, self.limits.pixels)
        write_atomically(self.folder / f"{name}.webp", _mosaic(pictures))
        write_atomically(
            self.folder / f"{name}.safetensors", pack_raw(explanation.tensors())
        )
        text = json.dumps(entry, ensure_ascii=False)
        write_atomically(
            self.folder / f"{name}.json", text.encode()
        )  # last: the batch is complete


def small_pictures(images: Tensor, preprocess: Preprocess, side: int) -> Pictures:
    """Pictures (n, s, s, 3), s <= ``side``, of images (n, 3, S, S) as the model sees them."""
    if images.shape[-1] > side:
        images = F.interpolate(
            images.float(), (side, side), mode="bilinear", antialias=True
        )
    return np.ascontiguousarray(preprocess.unnormalise(images).cpu().numpy())


def _mosaic(pictures: Pictures) -> bytes:
    """Pictures in one WebP file, row by row."""
    n, side = pictures.shape[:2]
    columns = math.ceil(math.sqrt(n))
    rows = -(-n // columns)
    padded = np.zeros((rows * columns, side, side, 3), np.uint8)
    padded[:n] = pictures
    sheet = padded.reshape(rows, columns, side, side, 3).swapaxes(1, 2)
    file = io.BytesIO()
    picture = Image.fromarray(sheet.reshape(rows * side, columns * side, 3))
    # Small pictures have no detail to spare, and their tiles would bleed into each
    # other.
    picture.save(file, "WEBP", lossless=side <= 48, quality=90)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class MapEvidence:
    """Attention maps of one image: plain CLIP first, then each clique, then all together."""

    index: int  # of the image in its batch
    cliques: tuple[
        int, ...
    ]  # ids in the batch's description; with none, there is plain CLIP only
    maps: Mapping[str, npt.NDArray[np.float32]]
    """(1 + cliques + 1, 1 + T) by kind: ``class`` or ``rollout``."""


@dataclass(frozen=True, eq=False)
class BatchEvidence:
    """One batch shown in full; all lists are in batch order."""

    number: int
    keys: tuple[str, ...]
    labels: tuple[int, ...]  # -1 where unknown
    before: tuple[int, ...]  # class by plain CLIP
    after: tuple[int, ...]  # class by the method
    description: (
        Mapping[str, Any] | None
    )  # of ``methods.scap.evidence.describe``, or ``None``
    features: npt.NDArray[np.float32]  # unit features (n, E) of plain CLIP
    prompted: (
        npt.NDArray[np.float32] | None
    )  # the same with the prompts that scored the image
    pictures: Pictures  # (n, s, s, 3)
    maps: tuple[MapEvidence, ...]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence of a run."""

    names: tuple[str, ...]
    counts: tuple[Mapping[str, Any], ...]  # one per batch, in order
    batches: tuple[BatchEvidence, ...]


def has_evidence(run: Path | str) -> bool:
    """Whether a run's folder holds evidence."""
    return (Path(run) / FOLDER / _ABOUT).exists()


def load_evidence(run: Path | str) -> Evidence | None:
    """The evidence in a run's folder, ``None`` if none was asked for."""
    folder = Path(run) / FOLDER
    if not has_evidence(run):
        return None
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    if about.get("format") != FORMAT:
        raise UserError(
            f"{folder} holds evidence of format {about.get('format')!r}, this version reads "
            f"{FORMAT}: run again with --evidence"
        )
    data = (folder / _COUNTS).read_bytes() if (folder / _COUNTS).exists() else b""
    return Evidence(
        tuple(about["names"]),
        tuple(json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()),
        tuple(_read_batch(path) for path in sorted(folder.glob("[0-9]*.json"))),
    )


def _read_batch(path: Path) -> BatchEvidence:
    entry = json.loads(path.read_text(encoding="utf-8"))
    tensors = load(path.with_suffix(".safetensors").read_bytes())
    arrays = {name: value.float().numpy() for name, value in tensors.items()}
    start = Explanation.MAPS
    kinds = {
        n.removeprefix(start): value
        for n, value in arrays.items()
        if n.startswith(start)
    }
    maps, first = [], 0
    for image in entry["maps"]:
        rows = slice(first, first + image["rows"])
        own = {kind: value[rows] for kind, value in kinds.items()}
        maps.append(MapEvidence(image["index"], tuple(image["cliques"]), own))
        first = rows.stop
    names = ("keys", "labels", "before", "after")
    lists: dict[str, Any] = {name: tuple(entry[name]) for name in names}
    count, sheet = len(entry["keys"]), open_image(path.with_suffix(".webp"))
    return BatchEvidence(
        entry["batch"],
        **lists,
        description=entry["description"],
        features=arrays["features"],
        prompted=arrays.get("prompted"),
        pictures=cut_mosaic(sheet, sheet.width // math.ceil(math.sqrt(count)), count),
        maps=tuple(maps),
    )
