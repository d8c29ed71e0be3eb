"""Which client holds which training examples, as one flat index and offsets."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedge.data import Data


class Federation:
    """The examples of a data set, dealt out to K clients.

    Client k holds the training examples `index[offsets[k]:offsets[k + 1]]`; an example may belong
    to several clients. Both tensors lie on the device of `data`.

    >>> from fedge.data import load
    >>> Federation(load("digits"), [[0, 1, 2], [3, 4]])
    Federation(clients=2, examples=5, sizes: min 2, median 2.5, max 3)
    """

    def __init__(self, data: Data, clients: Sequence[ArrayLike | Tensor]) -> None:
        if not isinstance(data, Data):
            raise TypeError(f"data is a {type(data).__name__}, it must be a Data: see fedge.data.from_arrays")
        arrays = _as_arrays(clients)
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        index = np.concatenate(arrays, dtype=np.int64, casting="unsafe")
        _check_range(index, offsets, len(data.train_x))
        _check_once(index, offsets, len(data.train_x))
        device = data.train_x.device
        self.data = data
        self.index = torch.from_numpy(index).to(device)  # [N]
        self.offsets = torch.from_numpy(offsets).to(device)  # [K + 1]

    @property
    def clients(self) -> int:
        """The number of clients K."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """The number of examples of every client, int64 [K]."""
        return self.offsets.diff()

    def examples(self, client: int) -> Tensor:
        """Give the indices into the training set that one client holds."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client is {client}, must be at least 0 and below {self.clients} (the number of clients)")
        return self.index[self.offsets[client] : self.offsets[client + 1]]

    def label_counts(self) -> Tensor:
        """Count every client's examples of every class, int64 [K, classes]."""
        classes = self.data.classes
        if classes == 0:
            raise ValueError("classes is 0: labels can be counted for classification data only")
        owner = torch.repeat_interleave(self.sizes)  # [N]
        cell = owner * classes + self.data.train_y[self.index]
        return cell.bincount(minlength=self.clients * classes).reshape(self.clients, classes)

    def __len__(self) -> int:
        return self.clients

    def __repr__(self) -> str:
        sizes = self.sizes.cpu().numpy()
        spread = f"min {sizes.min()}, median {np.median(sizes):g}, max {sizes.max()}"
        return f"Federation(clients={len(self)}, examples={len(self.index)}, sizes: {spread})"


def _as_arrays(clients: Sequence[ArrayLike | Tensor]) -> list[NDArray[Any]]:
    """Turn every client into a one-dimensional, non-empty array of integers."""
    arrays = [_as_array(client) for client in clients]
    if not arrays:
        raise ValueError("0 clients, at least 1 is needed: give one index array a client")
    _check_ndim(arrays)
    _check_not_empty(arrays)
    _check_integers(arrays)
    return arrays


def _as_array(client: ArrayLike | Tensor) -> NDArray[Any]:
    if isinstance(client, np.ndarray):
        return client
    return client.detach().cpu().numpy() if isinstance(client, Tensor) else np.asarray(client)


# The checks below look at a set of all values first: with a million clients, a Python-level test
# of each would cost more than the rest of the set-up.


def _check_ndim(arrays: list[NDArray[Any]]) -> None:
    if set(map(attrgetter("ndim"), arrays)) == {1}:
        return
    client = next(k for k, array in enumerate(arrays) if array.ndim != 1)
    raise ValueError(
        f"client {client} has indices of shape {arrays[client].shape}, must be one-dimensional: "
        "give one flat index array a client"
    )


def _check_not_empty(arrays: list[NDArray[Any]]) -> None:
    if all(map(len, arrays)):
        return
    empty = [k for k, array in enumerate(arrays) if not len(array)]
    raise ValueError(
        f"{len(empty)} of {len(arrays)} clients have no examples ({_few(empty)}), each needs at "
        "least 1: leave them out, or partition with min_examples=1"
    )


def _check_integers(arrays: list[NDArray[Any]]) -> None:
    wrong = {dtype for dtype in set(map(attrgetter("dtype"), arrays)) if dtype.kind not in "iu"}
    if not wrong:
        return
    client = next(k for k, array in enumerate(arrays) if array.dtype in wrong)
    dtype = arrays[client].dtype
    remedy = "np.flatnonzero(mask)" if dtype.kind == "b" else "indices.astype(np.int64)"
    raise TypeError(f"client {client} has indices of dtype {dtype}, must be integers: convert with {remedy}")


def _check_range(index: NDArray[np.int64], offsets: NDArray[np.int64], examples: int) -> None:
    if index.min() >= 0 and index.max() < examples:
        return
    at = int(np.argmax((index < 0) | (index >= examples)))
    client = int(np.searchsorted(offsets, at, side="right")) - 1
    raise IndexError(
        f"client {client} has index {index[at]}, must be at least 0 and below {examples} (the size "
        "of the training set): partition this training set's labels"
    )


def _check_once(index: NDArray[np.int64], offsets: NDArray[np.int64], examples: int) -> None:
    """An example may belong to several clients, and to each of them once."""
    if np.bincount(index, minlength=examples).max() <= 1:
        return
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((index, owner))
    same = (np.diff(index[order]) == 0) & (np.diff(owner[order]) == 0)
    if not same.any():
        return
    at = order[int(np.argmax(same))]
    raise ValueError(
        f"client {owner[at]} has index {index[at]} more than once ({int(same.sum())} such indices in all), "
        "each example counts once: give np.unique(indices)"
    )


def _few(ids: Iterable[int], most: int = 5) -> str:
    listed = list(ids)
    shown = ", ".join(map(str, listed[:most]))
    return f"ids {shown}, ..." if len(listed) > most else f"ids {shown}"
