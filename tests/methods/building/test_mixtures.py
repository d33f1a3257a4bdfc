"""Neighbours against a loop, the discriminant against scipy's densities."""

import numpy as np
import scipy.stats
import torch

from cliquetta.methods.building.mixtures import linear_discriminant, nearest_affinity
from tests._helpers.clusters import make_clusters
from tests._helpers.literal_numpy import neighbour_graph
from tests._helpers.tolerance import DOUBLE


def test_affinities_are_those_of_the_nearest_others() -> None:
    similarity = (make_clusters(12)[0] @ make_clusters(12)[0].T).double()
    expected = neighbour_graph(similarity.numpy(), 3)
    np.testing.assert_array_equal(nearest_affinity(similarity, 3).numpy(), expected)
    few = nearest_affinity(similarity[:2, :2], 3, power=2)
    np.testing.assert_allclose(few.numpy(), neighbour_graph(similarity[:2, :2].numpy(), 3) ** 2)


def test_the_discriminant_is_a_gaussian_log_likelihood_up_to_a_constant() -> None:
    features, means = (make_clusters(9, width=5)[i].double() for i in (0, 2))
    spread = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    covariance = spread @ spread.T + torch.eye(5).double()
    actual = linear_discriminant(features, means, covariance).numpy()
    densities = [scipy.stats.multivariate_normal(mean, covariance) for mean in means.numpy()]
    expected = np.stack([density.logpdf(features.numpy()) for density in densities], axis=1)
    between = actual - actual[:, :1], expected - expected[:, :1]
    np.testing.assert_allclose(*between, atol=DOUBLE)
