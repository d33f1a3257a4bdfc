"""Evidence of a run for reports, beside its record: a folder of bounded size.

Every batch leaves one line of counts; some, spread over the stream, leave everything.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
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
from cliquetta.evaluation.predictions import complete_lines
from cliquetta.evaluation.progress import Step
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.explanation import Explanation
from cliquetta.model.preprocess import Preprocess
from cliquetta.tensor_file import pack_raw
from cliquetta.types import Batch

FOLDER = "evidence"
FORMAT = "cliquetta-evidence-2"
_ABOUT = "about.json"
_COUNTS = "batches.jsonl"
_LOSSLESS_SIDE = 48

Pictures = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EvidenceLimits:
    """Limits on the evidence that is stored."""

    images: int = 256
    """in full, in batches spread over the stream; a batch is cut to this"""
    maps: int = 12  # images with attention maps
    pixels: int = 96  # longest side of the small pictures

    def batches(self, total: int, size: int) -> frozenset[int]:
        """Choose the batches that are shown in full, by number from 1: the last, then the first."""
        if self.images < 1 or total < 1:
            return frozenset()
        whole_batches = self.images // max(1, size)
        wanted = min(total, max(1, whole_batches))
        spread = np.linspace(total, 1, wanted).round().astype(int)
        return frozenset(spread.tolist())


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
        self.folder = folder
        self.adapter = adapter
        self.limits = limits
        self.shown = limits.batches(len(stream), stream.batch_size)
        about = {"format": FORMAT, "names": list(stream.names), "limits": vars(limits)}
        text = json.dumps(about, ensure_ascii=False)
        write_atomically(self.folder / _ABOUT, text.encode())

        counts = self.folder / _COUNTS
        if counts.exists():
            lines = counts.read_bytes().splitlines(keepends=True)
            write_atomically(counts, b"".join(lines[:done]))
        adapter.collect_evidence = done + 1 in self.shown

    def __call__(self, step: Step) -> None:
        """Keep what is wanted of a batch."""
        counts = self.adapter.summarize(step.prediction)
        line = json.dumps({"batch": step.number, **counts})
        with (self.folder / _COUNTS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

        # Batches in full share the images that may have attention maps.
        if step.number in self.shown and len(step.batch):
            maps = math.ceil(self.limits.maps / len(self.shown))
            self._write(step, maps)
        following = step.number + 1
        self.adapter.collect_evidence = following in self.shown

    def _write(self, step: Step, maps: int) -> None:
        """Write a batch in full: predictions, tensors of the explanation, pictures."""
        assert isinstance(step.batch, Batch)  # a stream of features has nothing to show

        batch = step.batch[: self.limits.images]
        labels = step.labels[: len(batch)]
        logits = step.prediction.logits[: len(batch)]
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
        preprocess = self.adapter.model.preprocess
        pictures = small_pictures(batch.images, preprocess, self.limits.pixels)
        tensors = pack_raw(explanation.tensors())
        text = json.dumps(entry, ensure_ascii=False)

        # The last file says that the batch is complete.
        name = f"{step.number:06d}"
        write_atomically(self.folder / f"{name}.webp", _mosaic(pictures))
        write_atomically(self.folder / f"{name}.safetensors", tensors)
        write_atomically(self.folder / f"{name}.json", text.encode())


def small_pictures(images: Tensor, preprocess: Preprocess, side: int) -> Pictures:
    """Make pictures (n, s, s, 3), s <= ``side``, of images (n, 3, S, S) as the model sees them."""
    if images.shape[-1] > side:
        images = F.interpolate(
            images.float(), (side, side), mode="bilinear", antialias=True
        )
    pixels = preprocess.unnormalise(images)
    return np.ascontiguousarray(pixels.cpu().numpy())


def _mosaic(pictures: Pictures) -> bytes:
    """Pack pictures into one WebP file, row by row."""
    count, side = pictures.shape[:2]
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    padded = np.zeros((rows * columns, side, side, 3), np.uint8)
    padded[:count] = pictures

    # Row by row of tiles, then row by row of pixels.
    tiles = padded.reshape(rows, columns, side, side, 3)
    sheet = tiles.swapaxes(1, 2).reshape(rows * side, columns * side, 3)

    # Small pictures have no detail to spare, and their tiles would bleed into each
    # other.
    file = io.BytesIO()
    lossless = side <= _LOSSLESS_SIDE
    Image.fromarray(sheet).save(file, "WEBP", lossless=lossless, quality=90)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class MapEvidence:
    """Attention maps of one image: plain CLIP first, then each clique, then all together."""

    index: int  # of the image in its batch
    cliques: tuple[int, ...]
    """ids in the batch's description; with none, there is plain CLIP only"""
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
    description: Mapping[str, Any] | None
    """of ``methods.scap.evidence.describe``, or ``None``"""
    features: npt.NDArray[np.float32]  # unit features (n, E) of plain CLIP
    prompted: npt.NDArray[np.float32] | None
    """the same with the prompts that scored the image"""
    pictures: Pictures  # (n, s, s, 3)
    maps: tuple[MapEvidence, ...]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence of a run."""

    names: tuple[str, ...]
    counts: tuple[Mapping[str, Any], ...]  # one per batch, in order
    batches: tuple[BatchEvidence, ...]


def has_evidence(run: Path | str) -> bool:
    """Return whether a run's folder holds evidence."""
    return (Path(run) / FOLDER / _ABOUT).exists()


def load_evidence(run: Path | str) -> Evidence | None:
    """Load the evidence in a run's folder, ``None`` if none was asked for."""
    folder = Path(run) / FOLDER
    if not has_evidence(run):
        return None
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))

    if about.get("format") != FORMAT:
        raise UserError(
            f"{folder} holds evidence of format {about.get('format')!r}, this version reads "
            f"{FORMAT}: run again with --evidence"
        )
    counts = folder / _COUNTS
    lines = complete_lines(counts) if counts.exists() else []
    paths = sorted(folder.glob("[0-9]*.json"))
    return Evidence(
        names=tuple(about["names"]),
        counts=tuple(json.loads(line) for line in lines),
        batches=tuple(_read_batch(path) for path in paths),
    )


def _read_batch(path: Path) -> BatchEvidence:
    """Read what was kept of a batch; its pictures are tiles of one square sheet."""
    entry = json.loads(path.read_text(encoding="utf-8"))
    tensors = load(path.with_suffix(".safetensors").read_bytes())
    arrays = {name: value.float().numpy() for name, value in tensors.items()}
    count = len(entry["keys"])
    columns = math.ceil(math.sqrt(count))
    sheet = open_image(path.with_suffix(".webp"))
    return BatchEvidence(
        number=entry["batch"],
        keys=tuple(entry["keys"]),
        labels=tuple(entry["labels"]),
        before=tuple(entry["before"]),
        after=tuple(entry["after"]),
        description=entry["description"],
        features=arrays["features"],
        prompted=arrays.get("prompted"),
        pictures=cut_mosaic(sheet, sheet.width // columns, count),
        maps=_split_maps(entry["maps"], arrays),
    )


def _split_maps(
    images: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, npt.NDArray[np.float32]],
) -> tuple[MapEvidence, ...]:
    """Give each image its rows of the maps, which lie one image after the other."""
    # Tensors of maps are named after their kind behind a common start.
    by_kind = {}
    for name, array in arrays.items():
        if name.startswith(Explanation.MAPS):
            by_kind[name.removeprefix(Explanation.MAPS)] = array
    found = []
    first = 0
    for image in images:
        last = first + image["rows"]
        maps = {kind: array[first:last] for kind, array in by_kind.items()}
        found.append(MapEvidence(image["index"], tuple(image["cliques"]), maps))
        first = last
    return tuple(found)
