"""Batches and predictions."""

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.types import Batch, Prediction


def test_parts_of_a_batch_keep_names_and_views_together() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 2, 2)
    batch = Batch(images, tuple("abcde"), torch.stack([images, -images], dim=1))
    part = batch[1:3]
    assert (len(batch), len(part), part.keys) == (5, 2, ("b", "c"))
    assert part.views is not None
    assert part.images[:, 0, 0, 0].tolist() == [1, 2]
    assert part.views[:, :, 0, 0, 0].tolist() == [[1, -1], [2, -2]]


def test_the_best_classes_by_hand() -> None:
    prediction = Prediction(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]))
    probabilities, classes = prediction.topk(2)
    assert classes[0].tolist() == [1, 2]
    assert classes[1, 0] == 0
    e = torch.e
    softmax_of_2 = e**2 / (1 + e + e**2)
    torch.testing.assert_close(probabilities[0, 0], torch.tensor(softmax_of_2))

    sigmoid, _ = prediction.topk(9, independent=True)  # three classes are all
    assert sigmoid.shape == (2, 3)
    sigmoid_of_2 = 1 / (1 + e**-2)
    torch.testing.assert_close(sigmoid[0, 0], torch.tensor(sigmoid_of_2))


def test_predictions_name_their_classes() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [torch.nan] * 3])
    prediction = Prediction(
        logits, names=("cat", "dog", "ship"), errors={1: "an empty file"}
    )
    assert prediction.labels == ["dog", None]
    first, second = prediction.top(2)
    assert [name for name, _ in first] == ["dog", "ship"] and second == []
    assert first[0][1] == prediction.probabilities[0, 1]
    with pytest.raises(UserError, match="names="):
        _ = Prediction(logits).labels
