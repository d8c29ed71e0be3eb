"""An algorithm around another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fedge.core import Algorithm, Flow, Loss, Model, Params, Payload, Privacy, S, Task, check_network
from fedge.inputs import Inputs


class Wrapper(Algorithm[S]):
    """A frozen dataclass with `inner`, and all else that of the inner algorithm: its state too.

    One whose state is another overrides every method that is given or returns a state.
    """

    inner: Algorithm[Any]

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        return self.inner.model

    @property
    def loss(self) -> Loss:  # type: ignore[override]
        return self.inner.loss

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return self.inner.tasks(model)

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        self.inner.check(model, params, x, y)

    def check_run(self, rounds: int, cohort: int, sampling: str) -> None:
        self.inner.check_run(rounds, cohort, sampling)

    def no_rule_limits(self) -> str | None:
        return self.inner.no_rule_limits()

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.inner.losses(scores, y)

    def init(self, params: Params) -> S:
        state: S = self.inner.init(params)
        return state

    def setup(self, state: S) -> Flow[S]:
        return self.inner.setup(state)

    def round(self, state: S) -> Flow[S]:
        return self.inner.round(state)

    def adopt(self, state: S) -> S:
        adopted: S = self.inner.adopt(state)
        return adopted

    def notes(self, state: S) -> dict[str, Any]:
        return self.inner.notes(state)

    def privacy(self) -> Privacy | None:
        return self.inner.privacy()

    def params(self, state: S) -> Params:
        return self.inner.params(state)

    def with_params(self, state: S, params: Params) -> S:
        changed: S = self.inner.with_params(state, params)
        return changed

    def scores(self, model: Model, state: S, x: Inputs) -> Tensor:
        return self.inner.scores(model, state, x)

    def network(self, state: S, memory: Payload | None = None) -> nn.Module:
        check_network(self, Wrapper)
        return self.inner.network(state, memory)


def chain(algorithm: Algorithm[Any]) -> Iterator[Algorithm[Any]]:
    """An algorithm, the one it wraps, the one that wraps, and so on."""
    yield algorithm
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.inner
        yield algorithm
