"""The Dirichlet label-skew partition.

M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
whose shares are per class over clients; T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019, made alpha the
standard measure of skew.
"""

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedge.partition.checks import as_labels, check_alpha, check_clients, generator
from fedge.partition.owners import Indices, split_by_owner
from fedge.partition.shares import draw_counts


def dirichlet(
    y: ArrayLike | Tensor,
    clients: int = 100,
    alpha: float = 0.5,
    seed: int = 0,
    min_examples: int = 1,
) -> list[Indices]:
    """Split every class over the clients in proportions drawn from Dir(alpha).

    Small alpha: few labels per client; large alpha: nearly IID. Proportions are drawn again until
    every client has `min_examples`.

    >>> sum(len(examples) for examples in dirichlet([0, 1] * 50, clients=5))
    100
    """
    array = as_labels(y)
    check_clients(clients, len(array), min_examples)
    check_alpha(alpha)
    rng = generator(seed)
    _, label, totals = np.unique(array, return_inverse=True, return_counts=True)
    counts = draw_counts(totals.astype(np.int64), clients, alpha, min_examples, rng)
    owner = np.empty(len(array), dtype=np.int64)
    for j, count in enumerate(counts):
        owner[label == j] = rng.permutation(np.repeat(np.arange(clients), count))
    return split_by_owner(owner, clients)
