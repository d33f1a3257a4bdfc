"""Zero against a plain numpy count, ties included, and where it leaves the official code."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cliquetta.methods.building.registry import method_config
from cliquetta.methods.zero import ZeroConfig, count_votes, decide, elect, vote_logits
from tests._helpers.arrays import softmax
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import LOGIT


def numpy_zero(
    cosines: npt.NDArray[np.float32], scale: float, fraction: float, vote: str
) -> tuple[int, str]:
    """Decision about one image with views (V, N), and how it was reached."""
    # the surest views come first
    p = softmax(scale * cosines.astype(np.float64))
    entropy = -(p * np.log(p)).sum(axis=1)
    cosines = cosines[np.argsort(entropy, kind="stable")]
    count = max(1, int(fraction * len(cosines)))
    voters = cosines[:count]
    others = cosines[count:]

    tally = np.zeros(cosines.shape[1], dtype=np.float32)
    for view in voters:
        if vote == "hard":
            tally[view.argmax()] += 1
        else:
            share = np.exp((view - view.max()) / np.float32(2**-10))
            tally += share / share.sum()

    tied = np.flatnonzero(tally == tally.max())
    if len(tied) == 1:
        return int(tied[0]), "votes"
    for view in others:
        if view.argmax() in tied:
            return int(view.argmax()), "other view"
    best_of_tied = others[0][tied].argmax()
    return int(tied[best_of_tied]), "last resort"


@pytest.mark.parametrize("vote", ["hard", "fp16-eps"])
@pytest.mark.parametrize(
    ("views", "classes", "fraction"), [(12, 3, 0.34), (6, 9, 0.7), (64, 5, 0.3)]
)
def test_all_images_at_once_equal_numpy_one_by_one(
    vote: str, views: int, classes: int, fraction: float
) -> None:
    cosines = 0.2 * draw(300, views, classes, seed=views).float()
    options = {"vote": vote, "selection_fraction": fraction}
    logits, _ = elect(cosines, 10.0, method_config("zero", options=options))

    expected = []
    ways = set()
    for image in cosines.numpy():
        label, way = numpy_zero(image, 10.0, fraction, vote)
        expected.append(label)
        ways.add(way)

    assert logits.argmax(dim=-1).tolist() == expected

    # every way to a decision occurs, or the test has not seen ties; of twelve views
    # and three classes one of the rest always knows a tied class
    if vote == "hard":
        assert {"votes", "other view"} <= ways
        assert "last resort" in ways or views != 6


def test_the_last_resort_asks_about_tied_classes_only() -> None:
    votes = torch.tensor([[0.0, 2.0, 0.0, 2.0]])
    # both predict untied classes, 0 and 2
    first = [0.9, 0.1, 0.0, 0.3]
    second = [0.2, 0.1, 0.8, 0.0]
    winner, top = decide(votes, torch.tensor([[first, second]]))

    assert top.tolist() == [[False, True, False, True]]
    assert winner.tolist() == [3]


def test_softmax_of_the_logits_is_the_smoothed_share_of_votes() -> None:
    votes = torch.tensor(
        [
            [3.0, 1.0, 0.0, 0.0],
            [2.0, 2.0, 0.0, 0.0],
        ]
    )
    winner = torch.tensor([0, 1])
    top = votes == votes.amax(dim=1, keepdim=True)
    probabilities = vote_logits(votes, winner, top).softmax(dim=-1)

    # a quarter of a vote for every class, and one more for the winner of a tie
    clear = torch.tensor([3.25, 1.25, 0.25, 0.25]) / 5
    tied = torch.tensor([2.25, 3.25, 0.25, 0.25]) / 6

    torch.testing.assert_close(probabilities, torch.stack([clear, tied]))


NEAR_TIES = torch.tensor([[[0.2500, 0.2499]] * 3 + [[0.20, 0.25]] * 2])
"""Three views prefer class 0 by a hair, two prefer class 1 by far."""


def test_near_ties_are_votes_as_in_the_paper() -> None:
    assert ZeroConfig().vote == "hard"
    assert count_votes(NEAR_TIES, "hard").tolist() == [[3.0, 2.0]]


def test_near_ties_share_a_vote_at_the_epsilon_of_fp16() -> None:
    near, far = count_votes(NEAR_TIES, "fp16-eps")[0].tolist()
    share = 1 / (1 + np.exp(-0.0001 * 1024))

    assert near == pytest.approx(3 * share, abs=LOGIT)
    assert far > near

    apart = torch.tensor([[[0.26, 0.25]]])
    assert count_votes(apart, "fp16-eps")[0, 0] > 0.999
