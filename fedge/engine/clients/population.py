"""Who holds what: the clients of a federation as an engine needs them, one cohort at a time.

Nothing here is as large as the population but the federation's own flat index.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedge import inputs
from fedge.core import At, Task
from fedge.federation import Federation
from fedge.keys import SHARE, choose, fold
from fedge.ledger import Row


class Population:
    """The pool of examples on a device, and which of them each client has."""

    def __init__(self, federation: Federation, dtype: torch.dtype, device: torch.device) -> None:
        data = federation.data
        self.x = inputs.to(inputs.cast(data.train_x, dtype), device)
        self.y = inputs.to(inputs.cast(data.train_y, dtype), device)
        self.index, self.offsets = federation.index.to(device), federation.offsets.cpu()
        self._here, self._bounds = federation.index.cpu(), self.offsets.numpy()
        self.clients = federation.clients
        self.shared = torch.empty(0, dtype=torch.long, device=device)

    def sizes(self, clients: Tensor) -> Tensor:
        """How many examples each client folds over, shared ones included, [C]."""
        ids = clients.numpy()
        return torch.from_numpy(self._bounds[ids + 1] - self._bounds[ids] + len(self.shared))

    def of(self, client: int) -> tuple[inputs.Inputs, Tensor]:
        """All that a client folds over: its examples and their targets."""
        chosen = self.examples(client)
        return inputs.take(self.x, chosen), self.y[chosen]

    def own(self, client: int) -> Tensor:
        """The pool indices of a client's own examples."""
        return self.index[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def examples(self, client: int) -> Tensor:
        """The pool indices of all that a client folds over: its own, then the shared."""
        return torch.cat([self.own(client), self.shared])

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
        shared = self.shared.to(own.device)
        parts = [torch.cat([piece, shared]) for piece in own.split(size.tolist())]
        return torch.cat(parts)

    def rows_of(self, client: int, task: Task) -> list[int]:
        """Which rows a client works on, from its own labels."""
        assert task.holds is not None
        return list(task.holds(self.y[self.own(client)].unique()).nonzero().flatten().tolist())

    def share(self, at: At, beta: float) -> Row:
        """Draw round(beta * mean n_k) examples of the pool and give them to every client."""
        wanted = max(1, round(beta * len(self.index) / self.clients))
        picked = choose(fold(at.seed, SHARE, at.round, at.phase), len(self.y), min(wanted, len(self.y)))
        self.shared = picked.to(self.index.device)
        size = inputs.nbytes(inputs.take(self.x, self.shared)) + self.y[self.shared].nbytes
        return Row(at.round, at.phase, "share", self.clients, size * self.clients, size, 0)
