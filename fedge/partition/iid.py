"""The even, label-blind partition."""

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedge.partition.checks import as_rows, check_clients, generator
from fedge.partition.owners import Indices, split_by_owner


def iid(y: ArrayLike | Tensor, clients: int = 100, seed: int = 0) -> list[Indices]:
    """Deal shuffled examples out evenly: client sizes differ by at most one.

    >>> [len(examples) for examples in iid([0, 1, 0, 1, 0], clients=2)]
    [3, 2]
    """
    examples = len(as_rows("y", y))
    check_clients(clients, examples)
    owner = generator(seed).permutation(np.arange(examples) % clients)
    return split_by_owner(owner, clients)
