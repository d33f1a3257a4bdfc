"""The table of scores names what is computed, and says which direction is better."""

import torch

from cliquetta.data.dataset import OUTSIDE
from cliquetta.evaluation.metric_table import METRICS
from cliquetta.evaluation.metrics import Metrics

RIGHT = torch.tensor(
    [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0], [0.5, 0.4, 0.3]]
)
WRONG = RIGHT.roll(1, dims=1)
UNSURE_OUTSIDE = torch.tensor([0, 1, 2, OUTSIDE])


def scores(logits: torch.Tensor) -> dict[str, float]:
    metrics = Metrics(3)
    metrics.update(logits, UNSURE_OUTSIDE)
    return metrics.compute()


def test_every_computed_score_is_in_the_table_and_no_other() -> None:
    counts_and_lists = {"labelled", "outside", "per_class", "ece_bins"}
    assert set(scores(RIGHT)) - counts_and_lists == set(METRICS)


def test_better_predictions_have_better_scores() -> None:
    right = scores(RIGHT)
    wrong = scores(WRONG)
    for name in ("top1", "mean_class", "macro_f1", "ece", "nll"):
        assert (right[name] < wrong[name]) == METRICS[name].lower_is_better, name


def test_a_score_that_separates_unknown_images_is_better() -> None:
    separated = scores(RIGHT)
    # unsure of known images, sure of the unknown one
    logits = torch.cat([RIGHT[:3] / 40, 10 * RIGHT[3:]])
    confused = scores(logits)
    for name in ("auroc", "fpr95"):
        assert (separated[name] < confused[name]) == METRICS[name].lower_is_better, name


def test_titles_say_which_images_are_meant() -> None:
    assert METRICS["top1"].title == "top-1 %"
    assert METRICS["fpr95"].title == "FPR95 % of unknown images"
