"""The mean of clipped uploads: Sun et al., Can You Really Backdoor Federated Learning?, 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedge.checks import positive
from fedge.combine.stacked import squared_norms, times
from fedge.core import Combine, Payload


@dataclass(frozen=True)
class ClippedMean(Combine):
    """sum_j w_j c_j u_j / sum_j w_j with c_j = min(1, limit / |u_j|): no upload is longer than `limit`.

    The length is over all tensors of an upload. Streams: chunks of uploads are merged as they come.
    """

    limit: float = 1.0
    streams: ClassVar[bool] = True
    limits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("limit", self.limit)

    def each(self, uploads: Payload) -> Payload:
        factor = (self.limit / squared_norms(uploads).sqrt()).clamp(max=1.0)  # an upload of zeros: infinity, so 1
        return {part: {name: times(leaf, factor) for name, leaf in leaves.items()} for part, leaves in uploads.items()}
