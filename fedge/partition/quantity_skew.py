"""The partition with uneven sizes and even labels."""

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedge.partition.checks import as_rows, check_alpha, check_clients, generator
from fedge.partition.owners import Indices, split_by_owner
from fedge.partition.shares import draw_counts


def quantity_skew(
    y: ArrayLike | Tensor,
    clients: int = 100,
    alpha: float = 0.5,
    seed: int = 0,
    min_examples: int = 1,
) -> list[Indices]:
    """Draw client sizes from Dir(alpha) and fill them with shuffled examples.

    Small alpha: a few clients hold nearly everything. Sizes are drawn again until every client has
    `min_examples`; with few examples per client and a small alpha that never happens, which is an
    error.

    >>> sum(len(examples) for examples in quantity_skew([0] * 100, clients=5))
    100
    """
    examples = len(as_rows("y", y))
    check_clients(clients, examples, min_examples)
    check_alpha(alpha)
    rng = generator(seed)
    sizes = draw_counts(np.array([examples]), clients, alpha, min_examples, rng)[0]
    return split_by_owner(rng.permutation(np.repeat(np.arange(clients), sizes)), clients)
