"""All uploads as they came, for the server's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedge.combine.stacked import coordinates
from fedge.core import Combine, Payload


@dataclass(frozen=True)
class Gather(Combine):
    """Hands the server every upload with its weight (`Reply.uploads`), in the order of the cohort; `mean` is theirs.

    For rules that need single uploads, such as q-FedAvg's; not to keep a record of clients. Needs all uploads at once.
    """

    gathers: ClassVar[bool] = True

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        return coordinates(lambda leaf: _mean(leaf, weights), uploads)


@dataclass(frozen=True)
class Limited(Gather):
    """`Gather` for a server that limits every client by itself: uploads are not compared with each other.

    That nobody answered is an answer too: the mean is then zeros of the right names and shapes.
    """

    bounds: ClassVar[bool] = True


def _mean(leaf: Tensor, weights: Tensor) -> Tensor:
    share = (weights.double() / weights.double().sum()).to(leaf.dtype)
    mean: Tensor = torch.tensordot(share, leaf, dims=1)
    return mean
