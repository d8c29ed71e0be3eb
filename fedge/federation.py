"""Which client holds which training examples, as one flat index and offsets."""

import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedge.data import Data

log = logging.getLogger("fedge")


class Federation:
    """The examples of a data set, dealt out to K clients.

    Client k holds the training examples `index[offsets[k]:offsets[k + 1]]`; an example may belong
    to several clients. Both tensors lie on the device of `data`. Clients without examples are left
    out, and that is said.

    `names` are the clients' names (those of `by_group`, unless given) and `groups` says what each
    belongs to, such as a kind of device, for metrics by group. `test` holds the examples of the test
    set on which each client is judged by itself; with `by_group` they are found by name.

    >>> from fedge.data import load
    >>> Federation(load("digits"), [[0, 1, 2], [3, 4]])
    Federation(clients=2, examples=5, sizes: min 2, median 2.5, max 3)
    """

    def __init__(
        self,
        data: Data,
        clients: Sequence[ArrayLike | Tensor],
        *,
        names: Sequence[Any] | None = None,
        groups: Sequence[Any] | None = None,
        test: Sequence[ArrayLike | Tensor] | None = None,
    ) -> None:
        if not isinstance(data, Data):
            raise TypeError(f"data is a {type(data).__name__}, it must be a Data: see fedge.data.from_arrays")
        _check_dealt("train", clients, len(data.train_y))
        arrays = _as_arrays(clients)
        about = Named(len(arrays), getattr(clients, "names", None) if names is None else names, groups)
        arrays, self.left_out = about.without_empty(arrays)
        self.names, self.groups = about.names, about.groups
        self.test = None if test is None else about.tests(test, len(data.test_y))
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        index = np.concatenate(arrays, dtype=np.int64, casting="unsafe")
        _check_range(index, offsets, len(data.train_y))
        _check_once(index, offsets, len(data.train_y))
        device = data.train_y.device
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

    def name(self, client: int) -> str:
        """What a client is called; its number where it has no name."""
        return self.names[client] if self.names else str(client)

    def examples(self, client: int) -> Tensor:
        """Give the indices into the training set that one client holds."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client is {client}, must be at least 0 and below {self.clients} (the number of clients)")
        return self.index[self.offsets[client] : self.offsets[client + 1]]

    def label_counts(self) -> Tensor:
        """Count every client's examples of every class, int64 [K, classes]."""
        classes = self.data.classes
        if not self.data.labelled:
            kind = "classes is 0" if not classes else "an example has several labels"
            raise ValueError(f"{kind}: labels can be counted for classification data only")
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
        raise ValueError("0 clients, at least 1 is needed: give one index array per client")
    _check_ndim(arrays)
    _check_integers(arrays if all(map(len, arrays)) else [array for array in arrays if len(array)])
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
        "give one flat index array per client"
    )


class Named:
    """The names and groups of clients, in the order of their lists."""

    def __init__(self, clients: int, names: Sequence[Any] | None, groups: Sequence[Any] | None) -> None:
        for what, given in (("names", names), ("groups", groups)):
            if given is not None and len(given) != clients:
                raise ValueError(f"{len(given)} {what} for {clients} clients: give one per client, or none")
        self.clients = clients
        self.names, self.groups = tuple(map(str, names or ())), tuple(map(str, groups or ()))
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"two clients are called {twice!r}: every client needs a name of its own")

    def without_empty(self, arrays: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], tuple[str, ...]]:
        """Those that have examples, and the names of the others; a client without a name is called by its number."""
        self.kept: Sequence[int] = range(len(arrays))
        if all(map(len, arrays)):
            return arrays, ()
        self.kept = [k for k, array in enumerate(arrays) if len(array)]
        if not self.kept:
            raise ValueError(f"all {len(arrays)} clients have no examples, at least 1 needs some: give index arrays")
        names = self.names or tuple(map(str, range(len(arrays))))
        gone = tuple(names[k] for k, array in enumerate(arrays) if not len(array))
        few = ", ".join(gone[:5]) + (", ..." if len(gone) > 5 else "")
        log.warning("%d of %d clients have no examples and are left out (%s)", len(gone), len(arrays), few)
        self.names = tuple(names[k] for k in self.kept)
        self.groups = tuple(self.groups[k] for k in self.kept) if self.groups else ()
        return [arrays[k] for k in self.kept], gone

    def tests(self, test: Sequence[Any], examples: int) -> list[Tensor]:
        """The test examples of each client; by name where both have names, else in the same order."""
        _check_dealt("test", test, examples)
        found = [torch.from_numpy(array.astype(np.int64)) for array in _as_arrays(test)]
        if bad := [int(i) for one in found if len(one) for i in (one.min(), one.max()) if not 0 <= i < examples]:
            raise IndexError(
                f"test has index {bad[0]}, must be at least 0 and below {examples}, the size of the test set"
            )
        named = getattr(test, "names", None)
        if named is not None and self.names:
            by_name = dict(zip(named, found, strict=True))
            _say_without_training([name for name in by_name if name not in set(self.names)])
            return [by_name.get(name, torch.empty(0, dtype=torch.long)) for name in self.names]
        if len(found) != self.clients:
            raise ValueError(f"test has {len(found)} index arrays for {self.clients} clients: give one per client")
        return [found[k] for k in self.kept]


def _say_without_training(names: Sequence[Any]) -> None:
    """No client stands for an owner of test examples alone: they count in the metrics of the whole test set only."""
    if names:
        few = ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")
        log.warning("%d owners of test examples have none to train on and are not judged (%s)", len(names), few)


def _check_dealt(part: str, clients: Any, examples: int) -> None:
    """Owners of another number of examples are owners of other examples."""
    dealt = getattr(clients, "examples", None)
    if isinstance(dealt, int) and dealt != examples:
        raise ValueError(
            f"by_group was given {dealt} owners, the {part} set has {examples} examples: give one owner per example"
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
