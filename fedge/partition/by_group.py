"""The natural partition: one client per speaker, writer or device."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedge.partition.checks import as_rows
from fedge.partition.owners import Owned, split_by_owner


def by_group(groups: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Owned:
    """Make one client of every distinct id, in sorted order of the ids.

    `groups` holds the id, an integer or a string, of every example; `y`, if given, must be as long. The ids are the
    clients' names in a federation of these examples.

    >>> by_group(["bob", "ann", "bob"])
    [array([1]), array([0, 2])]
    >>> by_group(["bob", "ann", "bob"]).names
    ('ann', 'bob')
    """
    ids = _as_ids(groups)
    if y is not None and len(as_rows("y", y)) != len(ids):
        raise ValueError(f"groups has {len(ids)} ids and y {len(as_rows('y', y))} labels: give one id per example")
    distinct, owner = np.unique(ids, return_inverse=True)
    return Owned(split_by_owner(owner, len(distinct)), distinct.tolist(), len(ids))


def _as_ids(groups: ArrayLike | Tensor) -> NDArray[Any]:
    ids = as_rows("groups", groups)
    if ids.dtype.kind == "O" and all(isinstance(name, str) for name in ids.flat):
        ids = ids.astype(str)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise ValueError(
            f"groups has shape {ids.shape} and dtype {ids.dtype}, must be one-dimensional "
            "integers or strings: give one id per example"
        )
    return ids
