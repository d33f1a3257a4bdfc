"""Scores of a stream, batch by batch, from torchmetrics; their state can be saved."""

import importlib
import importlib.metadata
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.data.dataset import OUTSIDE
from cliquetta.errors import UserError


def _import_torchmetrics() -> None:
    """Import torchmetrics even where it finds a torchvision that does not fit this torch."""
    try:
        importlib.import_module("torchmetrics")
    except ModuleNotFoundError:
        raise
    except Exception as error:
        logging.getLogger(__name__).warning("ignoring a broken torchvision (%s)", error)
        broken = ("torchmetrics", "lightning_utilities", "torchvision")
        for name in [name for name in sys.modules if name.partition(".")[0] in broken]:
            del sys.modules[name]
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name == "torchvision":
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        with patch("importlib.metadata.version", version):
            sys.modules["torchvision"] = None  # type: ignore[assignment]  # "there is none"
            importlib.import_module("torchmetrics")
        del sys.modules["torchvision"]


_import_torchmetrics()

from torchmetrics import CatMetric, MeanMetric, Metric  # noqa: E402
from torchmetrics.classification import (  # noqa: E402
    MulticlassAccuracy,
    MulticlassCalibrationError,
)

# bins of equal width for the calibration error, as in Guo et al. (2017); C-TPT takes 20
BINS = 15


class Metrics:
    """Top-1, top-5, accuracy per class and its mean, macro-F1, ECE, NLL. Labels of -1 are left out.

    Images outside the class list (label -2) enter no score of these; once there are
    some, AUROC and FPR95 say how well the highest probability tells them from images of
    the list.

    ``update``, ``compute`` and ``reset`` as in torchmetrics; ``state_dict`` is plain
    tensors.
    """

    def __init__(self, classes: int, *, bins: int = BINS) -> None:
        self.classes = classes
        self.bins = bins
        self.seen = 0
        count = max(2, classes)  # torchmetrics knows no problem with one class
        accuracy: dict[str, Any] = {"num_classes": count, "validate_args": False}
        self._metrics: dict[str, Metric] = {
            "top1": MulticlassAccuracy(average="micro", **accuracy),
            "top5": MulticlassAccuracy(
                average="micro", top_k=min(5, count), **accuracy
            ),
            "per_class": MulticlassAccuracy(average=None, **accuracy),
            "ece": MulticlassCalibrationError(
                count, n_bins=bins, norm="l1", validate_args=False
            ),
            "nll": MeanMetric(nan_strategy="error"),
            "outside": CatMetric(nan_strategy="error"),
        }

    def update(self, logits: Tensor, labels: Tensor, sizes: Sequence[int] = ()) -> None:
        """Count images, ``logits`` (B, N) and ``labels`` (B,), as if in batches of ``sizes``."""
        if logits.shape != (len(labels), self.classes):
            raise UserError(
                f"logits {tuple(logits.shape)} do not fit {len(labels)} labels of "
                f"{self.classes} classes"
            )
        logits = logits.detach()
        is_outside = (labels == OUTSIDE).to(logits.device)
        outside = logits[is_outside].float().cpu()
        if len(outside):
            confidence = outside.softmax(dim=-1).amax(dim=-1)
            self._metrics["outside"].update(confidence)

        labelled = labels >= 0
        if not labelled.any():
            return
        parts = torch.split(labelled, list(sizes) or len(labelled))
        labels = labels[labelled].cpu()
        logits = logits[labelled.to(logits.device)].float().cpu()
        if self.classes == 1:
            logits = F.pad(logits, (0, 1), value=-torch.inf)
        self.seen += len(labels)
        for name in ("top1", "top5", "per_class"):
            self._metrics[name].update(logits, labels)
        self._metrics["ece"].update(logits.softmax(dim=-1), labels)

        # Sums of losses are rounded batch by batch, however many come together.
        losses = F.cross_entropy(logits, labels, reduction="none")
        for part in torch.split(losses, [int(part.sum()) for part in parts]):
            if len(part):
                self._metrics["nll"].update(part)

    @property
    def accuracy(self) -> float | None:
        """Top-1 so far, in percent; ``None`` before the first label."""
        return 100 * float(self._metrics["top1"].compute()) if self.seen else None

    def compute(self) -> dict[str, Any]:
        """Compute all scores as JSON types: accuracies and ECE in percent, NLL in nats.

        Classes without images are ``None`` and not in the mean, unlike in torchmetrics'
        own.
        """
        if not self.seen:
            return {"labelled": 0}
        by_class = self._metrics["per_class"]
        # Of every class: hits over hits and misses.
        recall = by_class.compute()
        hits = torch.as_tensor(by_class.metric_state["tp"])
        misses = torch.as_tensor(by_class.metric_state["fn"])
        wrong = torch.as_tensor(by_class.metric_state["fp"])
        present = hits + misses > 0
        f1 = 2 * hits / (2 * hits + misses + wrong).clamp_min(1)
        per_class = []
        for value, has_images in zip(recall, present, strict=True):
            per_class.append(100 * float(value) if has_images else None)

        outside = _values(self._metrics["outside"].metric_state["value"])
        inside = _values(self._metrics["ece"].metric_state["confidences"])
        open_set: dict[str, Any] = {}
        if len(outside):
            open_set = {
                "outside": len(outside),
                "auroc": 100 * auroc(inside, outside),
                "fpr95": 100 * fpr95(inside, outside),
            }
        return {
            "labelled": self.seen,
            "top1": 100 * float(self._metrics["top1"].compute()),
            "top5": 100 * float(self._metrics["top5"].compute()),
            "mean_class": 100 * float(recall[present].double().mean()),
            "macro_f1": 100 * float(f1[present].double().mean()),
            "per_class": per_class[: self.classes],
            "ece": 100 * float(self._metrics["ece"].compute()),
            "ece_bins": self.bins,
            "nll": float(self._metrics["nll"].compute()),
            **open_set,
        }

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        for metric in self._metrics.values():
            metric.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything counted, as named tensors."""
        state = {"seen": torch.tensor(self.seen)}
        for name, metric in self._metrics.items():
            for field, value in metric.metric_state.items():
                counted = _values(value)
                state[f"{name}.{field}"] = counted.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        self.reset()
        self.seen = int(state["seen"])
        for name, metric in self._metrics.items():
            for field, value in metric.metric_state.items():
                saved = state[f"{name}.{field}"].clone()
                setattr(metric, field, [saved] if isinstance(value, list) else saved)
            # else compute() would warn that nothing was counted
            metric._update_count = int(self.seen > 0)


def _values(state: Tensor | Sequence[Tensor]) -> Tensor:
    """Join a state of torchmetrics in one tensor; some have an entry per batch."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(list(state)) if state else torch.zeros(0)


def auroc(known: Tensor, outside: Tensor) -> float:
    """Estimate how often an image of the list scores above one outside; a tie counts half."""
    # Every image of the list is ranked among those outside, twice: ties count half.
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, known)
    up_to = torch.searchsorted(ordered, known, right=True)
    mean = (below + up_to).double().mean()
    return float(mean) / (2 * len(outside))


def fpr95(known: Tensor, outside: Tensor) -> float:
    """Share of images outside the list that pass the threshold that 95 % of the others pass."""
    passing = -(-95 * len(known) // 100)  # rounded up
    ordered = known.sort(descending=True).values
    threshold = ordered[passing - 1]
    accepted = outside >= threshold
    return float(accepted.double().mean())


FEW_IMAGES = 30  # below this many images chance itself swings too far to say anything


def chance_p_value(right: int, images: int, *, classes: int) -> float:
    """Return how often guessing would be right on as many images or more.

    >>> round(chance_p_value(2, 2, classes=4), 4)
    0.0625

    Args:
        right: Images that were predicted correctly.
        images: How many there are.
        classes: Names that are guessed among, all alike.

    """
    if classes < 2:
        return 1.0
    log_right = -math.log(classes)
    log_wrong = math.log1p(-1 / classes)
    tail = 0.0
    for count in range(right, images + 1):
        ways = (
            math.lgamma(images + 1)
            - math.lgamma(count + 1)
            - math.lgamma(images - count + 1)
        )
        tail += math.exp(ways + count * log_right + (images - count) * log_wrong)
    return min(tail, 1.0)


def near_chance(accuracy: float, *, classes: int, images: int) -> str | None:
    """Warn if a zero-shot accuracy (0 to 1) is so low that labels look shuffled.

    The line is five times chance, or a quarter of the way to perfect where that is
    lower.
    """
    if not 0 <= accuracy <= 1:
        raise UserError(f"accuracy is a share between 0 and 1, got {accuracy}")
    if classes < 2 or images < FEW_IMAGES:
        return None
    chance = 1 / classes
    line = min(5 * chance, chance + (1 - chance) / 4)
    if accuracy >= line:
        return None
    return (
        f"zero-shot accuracy {accuracy:.1%} is near chance ({chance:.1%} with {classes:,} "
        "classes): check the order of labels and class names (cliquetta data doctor ROOT) and "
        "that the model's own preprocessing is used"
    )
