"""The mean of uploads that are no longer than most: norm bounding (Sun et al., Can You Really Backdoor Federated
Learning?, 2019) at a quantile of the lengths (Andrew et al., Differentially Private Learning with Adaptive Clipping,
NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedge.combine.stacked import coordinates, squared_norms, times
from fedge.core import Combine, Params, Payload


@dataclass(frozen=True)
class BoundedMean(Combine):
    """sum_j c_j u_j / J with c_j = min(1, limit / |u_j|), limit the `quantile` of the lengths |u_1|, ..., |u_J|.

    The length is over all tensors of a part: an upload with several, such as SCAFFOLD's, has a length and a limit for
    each, so that a liar cannot put the length of the one into the other. The quantile is over the uploads of all rows:
    a class of FedOVA has few uploads, the cohort has many. There every client counts once, however many rows it has,
    and one with more rows than most has its uploads shortened by (median of the numbers of rows) / (its own): who
    claims all classes is not heard in each as loudly as those that hold two. Weights do not count, since a liar would
    choose its own. A share s of liars then moves the mean by s * limit at most, whatever they send; as long as less
    than 1 - quantile of the clients lie, the limit is no larger than an honest length. Needs all uploads at once.
    """

    quantile: float = 0.5

    def __post_init__(self) -> None:
        value = self.quantile
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(f"quantile is {value!r}, it must be above 0 and below 1: the share of uploads left alone")

    def across(self, uploads: Payload) -> Payload:
        return self.among(uploads, torch.arange(_count(uploads)))

    def among(self, uploads: Payload, clients: Tensor) -> Payload:
        shares = voices(clients)
        return {part: self._bounded(part, leaves, clients, shares) for part, leaves in uploads.items()}

    def _bounded(self, part: str, leaves: Params, clients: Tensor, shares: Tensor) -> Params:
        lengths = squared_norms({part: leaves}).sqrt()
        limit = quantile(lengths, clients, self.quantile)
        factor = (limit / lengths).nan_to_num(nan=1.0).clamp(max=1.0)  # an upload of zeros stays one
        factor = factor * shares.to(factor)
        return {name: times(leaf, factor) for name, leaf in leaves.items()}

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        return coordinates(lambda leaf: leaf.mean(0), uploads)


def _count(uploads: Payload) -> int:
    return next(len(leaf) for leaves in uploads.values() for leaf in leaves.values())


def voices(clients: Tensor) -> Tensor:
    """min(1, median / own) of the numbers of rows that the client of each upload has here, [J]."""
    _, which, counts = clients.unique(return_inverse=True, return_counts=True)
    found: Tensor = (counts.median() / counts).clamp(max=1.0)[which]
    return found


def quantile(lengths: Tensor, clients: Tensor, share: float) -> Tensor:
    """The quantile of lengths [J], to which every client adds as much as any other, however many of them it has.

    The i-th length in order is the quantile p_i, where p_0 = 0 and p_i - p_{i-1} is proportional to the mean weight of
    these two. If all clients have equally many lengths, this is torch's quantile.
    """
    _, which, counts = clients.unique(return_inverse=True, return_counts=True)
    if int(counts.min()) == int(counts.max()):
        return lengths.quantile(share)
    ordered, order = lengths.sort()
    weights = (1 / counts.double())[which].to(lengths.device)[order]
    places = torch.cat([weights.new_zeros(1), (weights[1:] + weights[:-1]).cumsum(0)])
    places = places / places[-1]
    after = int(torch.searchsorted(places, share).clamp(1, len(places) - 1))
    near = (share - places[after - 1]) / (places[after] - places[after - 1])
    return torch.lerp(ordered[after - 1], ordered[after], near.to(ordered.dtype))
