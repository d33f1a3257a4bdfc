"""The scores of a run that are compared: their names in records, headings and direction.

Imports neither torch nor torchmetrics: commands check names of metrics here first.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricInfo:
    """How a score is shown, and which of two is better."""

    heading: str  # of a column
    lower_is_better: bool = False
    of: str = ""
    """which images it is about, where they are not all labelled ones"""

    @property
    def title(self) -> str:
        """Title of a table of this score alone."""
        return f"{self.heading} of {self.of}" if self.of else self.heading


METRICS: Mapping[str, MetricInfo] = {
    "top1": MetricInfo("top-1 %"),
    "top5": MetricInfo("top-5 %"),
    "mean_class": MetricInfo("mean accuracy of classes %"),
    "macro_f1": MetricInfo("macro-F1 %"),
    "ece": MetricInfo("ECE %", lower_is_better=True),
    "nll": MetricInfo("NLL", lower_is_better=True),
    "auroc": MetricInfo("AUROC %", of="unknown images"),
    "fpr95": MetricInfo("FPR95 %", lower_is_better=True, of="unknown images"),
}
"""By the name under which ``evaluation.metrics.Metrics`` computes it."""
