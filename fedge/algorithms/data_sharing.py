"""Data sharing: Zhao et al., Federated Learning with Non-IID Data, 2018."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedge.algorithms.wrapper import Wrapper, chain
from fedge.core import Algorithm, Flow, Share


@dataclass(frozen=True, eq=False)
class DataSharing(Wrapper[Any]):
    """Any algorithm, whose clients all get the same few examples of the global pool before the first round.

    beta = |D_shared| / |D_k| (Sec. VI-C): round(beta * mean n_k) examples, drawn once, are sent to every client and
    from then on are part of its data; its weight counts them. Which rows a client works on (FedOVA) still follows from
    its own labels.

    Bytes: those of the inner algorithm and, once, K times the shared examples down.
    """

    inner: Algorithm[Any]
    beta: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.beta, int | float) or not 0 < self.beta <= 1:
            raise ValueError(f"beta is {self.beta!r}, it must be greater than 0 and at most 1")
        if any(isinstance(one, DataSharing) for one in chain(self.inner)):
            raise ValueError("data is shared once: add up the two betas instead of nesting DataSharing")
        if self.inner.privacy() is not None:
            raise ValueError("data sharing sends examples to everybody: nothing that Private promises would hold")

    def setup(self, state: Any) -> Flow[Any]:
        yield Share(self.beta)
        return (yield from self.inner.setup(state))
