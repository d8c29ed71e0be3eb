"""An algorithm around another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedge.core import Algorithm, Loss, Model, Params, S, Task


class Wrapper(Algorithm[S]):
    """A frozen dataclass with `inner`; what has nothing to do with the state is that of the inner algorithm."""

    inner: Algorithm[Any]

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        return self.inner.model

    @property
    def loss(self) -> Loss:  # type: ignore[override]
        return self.inner.loss

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return self.inner.tasks(model)

    def check(self, model: Model, params: Params, x: Tensor, y: Tensor) -> None:
        self.inner.check(model, params, x, y)

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.inner.losses(scores, y)
