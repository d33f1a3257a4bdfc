"""BCA against a numpy version that takes one image after the other."""

import numpy as np
import pytest

from cliquetta.methods.bca import BCAConfig
from tests._helpers.arrays import Array, assert_stream, softmax, unit
from tests._helpers.tolerance import FEATURE

LIVELY = BCAConfig(likelihood_count=2, prior_threshold=0.4)
RESTLESS = BCAConfig(likelihood_count=1, likelihood_threshold=0.0, prior_threshold=0.0)


def numpy_bca(stream: Array, text: Array, scale: float, config: BCAConfig) -> Array:
    """Posteriors, each from the state that the images before it left."""
    N = len(text)
    mu = text.copy()
    priors = np.eye(N)
    seen = np.full(N, config.likelihood_count, float)
    judged = np.full(N, config.prior_count, float)
    predictions = []
    for f in stream:
        likelihood = softmax(scale * mu @ f)
        posterior = np.zeros(N)
        for m in range(N):
            posterior += likelihood[m] * priors[m]
        predictions.append(posterior)

        # the predicted class learns from the image, if it is sure enough
        s = int(posterior.argmax())
        if posterior[s] > config.likelihood_threshold:
            mu[s] = unit((seen[s] * mu[s] + f) / (seen[s] + 1))
            seen[s] += 1
        if posterior[s] > config.prior_threshold:
            priors[s] = (judged[s] * priors[s] + posterior) / (judged[s] + 1)
            judged[s] += 1
    return np.stack(predictions)


@pytest.mark.parametrize("config", [BCAConfig(), LIVELY, RESTLESS])
def test_a_stream_equals_numpy(config: BCAConfig) -> None:
    assert_stream(numpy_bca, "bca", config, [50, 1, 29], moved=0.01, atol=FEATURE)
