"""Any algorithm with encoded uploads and error feedback.

Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD and
other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedge.algorithms.wrapper import Wrapper, chain
from fedge.codecs import Cast, Quantise, TopK
from fedge.core import Algorithm, Codec, Model, Task


@dataclass(frozen=True, eq=False)
class Compressed(Wrapper[Any]):
    """The inner algorithm, whose uploads travel through `codec`.

        client k sends    c_k = encode(u_k + e_k),    and with feedback remembers  e_k <- u_k + e_k - decode(c_k)
        the server uses   decode(c_k)  in place of  u_k

    e_k, zero at first, is client memory: it is not sent, and takes d numbers on every client that took part (per row in
    FedOVA). Parts with fewer than 64 numbers, such as a few losses, are sent unchanged, and so are counts and other
    parts that have to lie between two ends.

    Bytes per round: down those of the inner algorithm, up those of the codec in place of d b (`fedge.codecs`).
    """

    inner: Algorithm[Any]
    codec: Quantise | TopK | Cast | Codec = field(default_factory=Quantise)
    feedback: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(
                f"codec is {self.codec!r}, it must be a codec such as fedge.Quantise(8) or fedge.TopK(0.01)"
            )
        if any(isinstance(one, Compressed) for one in chain(self.inner)):
            raise ValueError("uploads are encoded once: choose one codec in place of nesting Compressed")

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return {name: self._coded(task) for name, task in self.inner.tasks(model).items()}

    def _coded(self, task: Task) -> Task:
        return task if task.private else replace(task, codec=self.codec, feedback=self.feedback)
