"""Zero against a plain numpy count, ties included, and where it leaves the official code."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cliquetta.methods.registry import method_config
from cliquetta.methods.zero import ZeroConfig, count_votes, decide, elect, vote_logits
from tests._helpers.arrays import softmax
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import LOGIT


def numpy_zero(
    cosines: npt.NDArray[np.float32], scale: float, fraction: float, vote: str
) -> tuple[int, str]:
    """Decision about one image with views (V, N), and how it was reached."""
    p = softmax(scale * cosines.astype(np.float64))
    order = np.argsort((-p * np.log(p)).sum(axis=1), kind="stable")
    cosines = cosines[order]
    count = max(1, int(fraction * len(cosines)))
    tally = np.zeros(cosines.shape[1], dtype=np.float32)
    for view in cosines[:count]:
        if vote == "hard":
            tally[view.argmax()] += 1
        else:
            share = np.exp((view - view.max()) / np.float32(2**-10))
            tally += share / share.sum()
    tied = np.flatnonzero(tally == tally.max())
    if len(tied) == 1:
        return int(tied[0]), "votes"
    for view in cosines[count:]:
        if view.argmax() in tied:
            return int(view.argmax()), "other view"
    return int(tied[cosines[count][tied].argmax()]), "last resort"


@pytest.mark.parametrize("vote", ["hard", "fp16-eps"])
@pytest.mark.parametrize(
    ("views", "classes", "fraction"), [(12, 3, 0.34), (6, 9, 0.7), (64, 5, 0.3)]
)
def test_all_images_at_once_equal_numpy_one_by_one(
    vote: str, views: int, classes: int, fraction: float
) -> None:
    cosines = 0.2 * draw(300, views, classes, seed=views).float()
    config = method_config(
        "zero", options={"vote": vote, "selection_fraction": fraction}
    )
    logits, _ = elect(cosines, 10.0, config)
    expected = [numpy_zero(image.numpy(), 10.0, fraction, vote) for image in cosines]
    assert logits.argmax(dim=-1).tolist() == [label for label, _ in expected]
    if vote == "hard":  # every way to a decision occurs, or the test has not seen ties
        ways = {way for _, way in expected}
        # of twelve views and three classes one of the rest always knows a tied class
        assert ways >= {"votes", "other view"} | (
            {"last resort"} if views == 6 else set()
        )


def test_the_last_resort_asks_about_tied_classes_only() -> None:
    votes = torch.tensor([[0.0, 2.0, 0.0, 2.0]])
    others = torch.tensor([[[0.9, 0.1, 0.0, 0.3], [0.2, 0.1, 0.8, 0.0]]])
    winner, top = decide(votes, others)  # both predict untied classes (0 and 2)
    assert top.tolist() == [[False, True, False, True]]
    assert winner.tolist() == [3]


def test_softmax_of_the_logits_is_the_smoothed_share_of_votes() -> None:
    votes = torch.tensor([[3.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    top = votes == votes.amax(dim=1, keepdim=True)
    p = vote_logits(votes, torch.tensor([0, 1]), top).softmax(dim=-1)
    shares = [
        [3.25 / 5, 1.25 / 5, 0.05, 0.05],
        [2.25 / 6, 3.25 / 6, 0.25 / 6, 0.25 / 6],
    ]
    torch.testing.assert_close(p, torch.tensor(shares))


def test_near_ties_share_a_vote_only_at_the_epsilon_of_fp16() -> None:
    # three views prefer class 0 by a hair, two prefer class 1 by far
    cosines = torch.tensor([[[0.2500, 0.2499]] * 3 + [[0.20, 0.25]] * 2])
    assert count_votes(cosines, "hard").tolist() == [[3.0, 2.0]]
    soft = count_votes(cosines, "fp16-eps")[0].tolist()
    assert (
        soft[1] > soft[0] == pytest.approx(3 / (1 + np.exp(-0.0001 * 1024)), abs=LOGIT)
    )
    assert ZeroConfig().vote == "hard"  # the paper's side
    apart = torch.tensor([[[0.26, 0.25]]])
    assert count_votes(apart, "fp16-eps")[0, 0] > 0.999
