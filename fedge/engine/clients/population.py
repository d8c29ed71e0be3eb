"""Who holds what: the clients of a federation as an engine needs them, one cohort at a time.

Nothing here is as large as the population but the federation's own flat index.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedge import inputs
from fedge.core import At, Examples, Share, Task
from fedge.federation import Federation
from fedge.keys import SHARE, choose, fold
from fedge.ledger import Row

PORTION, CLASS, ROUNDED, SERVER = 1, 2, 3, 4  # what is drawn of a shared set, after its own address


class Population:
    """The pool of examples on a device, and which of them each client has."""

    def __init__(self, federation: Federation, dtype: torch.dtype, device: torch.device) -> None:
        data = federation.data
        self.x = inputs.to(inputs.cast(data.train_x, dtype), device)
        self.y = inputs.to(inputs.cast(data.train_y, dtype), device)
        self.index, self.offsets = federation.index.to(device), federation.offsets.cpu()
        self._here, self._bounds = federation.index.cpu(), self.offsets.numpy()
        self.clients = federation.clients
        self.shared = torch.empty(0, dtype=torch.long, device=device)  # the set G of which every client has a portion
        self.each, self._key = 0, 0  # how many of them a client has; the address of what is drawn

    def sizes(self, clients: Tensor) -> Tensor:
        """How many examples each client folds over, shared ones included, [C]."""
        ids = clients.numpy()
        return torch.from_numpy(self._bounds[ids + 1] - self._bounds[ids] + self.each)

    def of(self, client: int) -> tuple[inputs.Inputs, Tensor]:
        """All that a client folds over: its examples and their targets."""
        chosen = self.examples(client)
        return inputs.take(self.x, chosen), self.y[chosen]

    def own(self, client: int) -> Tensor:
        """The pool indices of a client's own examples."""
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def examples(self, client: int) -> Tensor:
        """The pool indices of all that a client folds over: its own, then the shared."""
        return torch.cat([self.own(client), self.shared_with(client)])

    def shared_with(self, client: int) -> Tensor:
        """The pool indices of the shared examples that a client got: all of G, or a portion of its own."""
        if self.each == len(self.shared):
            return self.shared
        return self.shared[choose(fold(self._key, PORTION, client), len(self.shared), self.each).to(self.shared.device)]

    def flat_examples(self, clients: Tensor, device: torch.device) -> Tensor:
        """`examples` of many clients, one after another, on the CPU or where the pool is."""
        ids = clients.numpy()
        start, end = self._bounds[ids], self._bounds[ids + 1]
        size = end - start
        ends = size.cumsum()
        place = np.arange(ends[-1]) + np.repeat(start - (ends - size), size)
        index = self.index if device == self.index.device else self._here
        own = index[torch.from_numpy(place).to(index.device)]
        if not len(self.shared):
            return own
        pieces = zip(own.split(size.tolist()), clients.tolist(), strict=True)
        return torch.cat([part for mine, client in pieces for part in (mine, self.shared_with(client).to(own.device))])

    def rows_of(self, client: int, task: Task) -> list[int]:
        """Which rows a client works on, from its own labels."""
        assert task.holds is not None
        return list(task.holds(self.y[self.own(client)].unique()).nonzero().flatten().tolist())

    def share(self, at: At, wanted: Share) -> Row:
        """Draw a set G of the pool and give every client its portion of it; what that costs."""
        self._key = fold(at.seed, SHARE, at.round, at.phase)
        size = wanted.size(len(self.index), self.clients, len(self.y))
        picked = self._balanced(size) if wanted.balanced else choose(self._key, len(self.y), size)
        self.shared, self.each = picked.to(self.index.device), wanted.each(len(picked))
        one = inputs.nbytes(inputs.take(self.x, slice(1))) + self.y[:1].nbytes
        down = one * self.each * self.clients
        return Row(at.round, at.phase, "share", self.clients, down, one * len(self.shared), 0)

    def _balanced(self, size: int) -> Tensor:
        """As many examples of one class as of any other, up to one; of a class that has fewer, all of them."""
        if self.y.is_floating_point() or self.y.dim() > 1:
            raise ValueError("balanced is true, but examples have no single label to balance: leave it out")
        y = self.y.cpu()
        classes = y.unique().tolist()
        more = set(choose(fold(self._key, ROUNDED), len(classes), size % len(classes)).tolist())
        found = []
        for place, label in enumerate(classes):
            own = (y == label).nonzero().flatten()
            count = min(len(own), size // len(classes) + (place in more))
            found.append(own[choose(fold(self._key, CLASS, label), len(own), count)])
        return torch.cat(found)

    def examples_shared(self) -> Examples:
        """All of G, which the server drew."""
        return Examples(inputs.take(self.x, self.shared), self.y[self.shared], fold(self._key, SERVER))
