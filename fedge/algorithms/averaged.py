"""The mean of late rounds: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control
Optim. 1992; with a window, Izmailov et al., Averaging Weights Leads to Wider Optima, UAI 2018."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedge import tree
from fedge.algorithms.wrapper import Wrapper, chain
from fedge.checks import at_least_one
from fedge.core import Algorithm, Flow, Model, Params, Payload

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Averaged(Wrapper[State]):
    """Any algorithm, judged and used at the mean of its late parameters; training itself is untouched.

        m_t = m_{t-1} + (w_t - m_{t-1}) / min(t, window)

    This is the plain mean of the first `window` rounds, and from then on a mean that forgets at the rate 1 / window.
    The noise of single cohorts averages out. With FedOVA, inside or around it, every class has its own mean.

    Bytes: those of the inner algorithm; the server keeps one more copy of the parameters.
    """

    inner: Algorithm[Any]
    window: int = 20

    def __post_init__(self) -> None:
        at_least_one("window", self.window)
        if any(isinstance(one, Averaged) for one in chain(self.inner)):
            raise ValueError("a mean of means forgets twice: set one window instead of nesting Averaged")

    def init(self, params: Params) -> State:
        return self._begin(self.inner.init(params))

    def _begin(self, inner: Any) -> State:
        return {"inner": inner, "mean": self.inner.params(inner), "round": 0}

    def setup(self, state: State) -> Flow[State]:
        return {**state, "inner": (yield from self.inner.setup(state["inner"]))}

    def round(self, state: State) -> Flow[State]:
        return self.after(state, (yield from self.inner.round(state["inner"])))

    def after(self, state: State, inner: Any) -> State:
        """The state once the inner algorithm has moved on."""
        t = state["round"] + 1
        away = tree.sub(self.inner.params(inner), state["mean"])
        return {"inner": inner, "mean": tree.axpy(1 / min(t, self.window), away, state["mean"]), "round": t}

    def adopt(self, state: Any) -> State:
        """Also a run of the inner algorithm alone; where the parameters changed their shape, the mean starts anew."""
        if not (isinstance(state, dict) and "inner" in state):
            return self._begin(self.inner.adopt(state))
        fresh = self._begin(self.inner.adopt(state["inner"]))
        same = all(leaf.shape == state["mean"][name].shape for name, leaf in fresh["mean"].items())
        return {**state, "inner": fresh["inner"]} if same else fresh

    def notes(self, state: State) -> dict[str, Any]:
        return self.inner.notes(state["inner"])

    def params(self, state: State) -> Params:
        mean: Params = state["mean"]
        return mean

    def with_params(self, state: State, params: Params) -> State:
        return {**state, "mean": params}

    def scores(self, model: Model, state: State, x: Tensor) -> Tensor:
        return self.inner.scores(model, self._with_mean(state), x)

    def network(self, state: State, memory: Payload | None = None) -> nn.Module:
        return self.inner.network(self._with_mean(state), memory)

    def _with_mean(self, state: State) -> Any:
        return self.inner.with_params(state["inner"], state["mean"])
