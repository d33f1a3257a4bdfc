"""The prediction for every image of a run, in a file that grows, and a test between two runs."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.significance import PairedTest, difference_half_width, sign_flip_p

PREDICTIONS = "predictions.jsonl"


class DamagedRunError(UserError):
    """A run whose predictions are not those that its record was made from."""


def fingerprint_predictions(folder: Path) -> dict[str, int | str]:
    """Compute length and hash of the predictions in a run's folder."""
    data = (folder / PREDICTIONS).read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


TOP = 5  # classes per image that are written


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of a run in the order of its stream."""

    keys: tuple[str, ...]
    labels: npt.NDArray[np.int64]  # (n,), -1 where unknown
    classes: npt.NDArray[np.int64]
    """(n, k) most probable, best first; k is 5 or all of them"""
    probabilities: npt.NDArray[np.float32]  # (n, k) their probabilities

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.keys)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """(n,) whether the best class is the label."""
        correct: npt.NDArray[np.bool_] = self.classes[:, 0] == self.labels
        return correct


class PredictionLog:
    """Writes a file of predictions, from a known length on."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open ``path`` and drop whatever stands behind ``length`` bytes."""
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            raise UserError(
                f"{path} has {size} bytes, {length} were written; it was cut from outside: delete "
                f"the folder {path.parent} and run again"
            )
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, keys: Sequence[str], labels: Tensor, logits: Tensor) -> None:
        """Add the predictions of some images and hand them to the system."""
        shares = logits.float().softmax(dim=-1)
        best = shares.topk(min(TOP, logits.shape[-1]), dim=-1)
        rows = zip(
            keys,
            labels.tolist(),
            best.indices.tolist(),
            best.values.cpu().numpy(),
            strict=True,
        )
        text = ""
        for key, label, classes, probabilities in rows:
            # str() of a float32 is the shortest that reads back.
            short = [float(str(probability)) for probability in probabilities]
            line = {"key": key, "label": label, "top": classes, "p": short}
            text += json.dumps(line) + "\n"
        self._file.write(text.encode())
        self._file.flush()

    def sync(self) -> int:
        """Wait until everything is on disk; returns the length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def load_predictions(folder: Path | str) -> Predictions:
    """Load the predictions in a run's folder, even while written, without a torn line."""
    lines = complete_lines(Path(folder) / PREDICTIONS)
    rows = [json.loads(line) for line in lines]
    shape = (len(rows), len(rows[0]["top"]) if rows else 0)
    classes = np.array([row["top"] for row in rows], dtype=np.int64)
    probabilities = np.array([row["p"] for row in rows], dtype=np.float32)
    return Predictions(
        keys=tuple(row["key"] for row in rows),
        labels=np.array([row["label"] for row in rows], dtype=np.int64),
        classes=classes.reshape(shape),
        probabilities=probabilities.reshape(shape),
    )


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that grows, without one that is still being written."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines()


def paired_test(pairs: Sequence[tuple[Predictions, Predictions]]) -> PairedTest:
    """Compare ``(baseline, other)`` runs, one pair per seed, image by image.

    An image is the unit: its differences are summed over seeds, since runs of several
    seeds on one image are not independent. If both methods were equally good, each
    image's sum would as well have had the other sign; ``p`` is the share of all sign
    patterns whose total is as far from zero as the one seen. With one seed that is
    McNemar's exact test.
    """
    totals: dict[str, int] = {}
    repaired = 0
    broken = 0
    for baseline, other in pairs:
        before = _right_by_key(baseline)
        now = _right_by_key(other)
        if before.keys() != now.keys():
            raise UserError(
                "a paired test needs runs over the same images, these differ"
            )
        for key, right in now.items():
            change = right - before[key]
            totals[key] = totals.get(key, 0) + change
            repaired += max(0, change)
            broken += max(0, -change)

    values = np.array(list(totals.values()), dtype=np.int64)
    # The unit is the image: its mean over seeds.
    means = values / max(1, len(pairs))
    half_width = 0.0
    if len(means):
        mean = float(means.mean())
        mean_square = float((means**2).mean())
        half_width = difference_half_width(mean, mean_square, len(means))
    return PairedTest(
        images=len(totals),
        repaired=repaired,
        broken=broken,
        p=sign_flip_p(values),
        half_width=half_width,
    )


def _right_by_key(predictions: Predictions) -> dict[str, int]:
    """Count how often each labelled image was right: a stream may show one again."""
    right_by_key: dict[str, int] = {}
    rows = zip(
        predictions.keys, predictions.correct, predictions.labels >= 0, strict=True
    )
    for key, right, labelled in rows:
        if labelled:
            right_by_key[key] = right_by_key.get(key, 0) + int(right)
    return right_by_key
