"""What GIANT and DONE share: the cohort's gradient goes to the clients, each solves its own Newton system for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from fedge import tree
from fedge.algorithms.lbfgs import named_shape
from fedge.algorithms.passes import average, losses_at, lowest
from fedge.checks import at_least_one, choice, non_negative, positive
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import by_target

State = dict[str, Any]
Times = Callable[[Params], Params]  # v -> (H_k + (weight_decay + damping) I) v


@dataclass(frozen=True, eq=False)
class LocalNewton(Algorithm[State]):
    """Two phases per round: g_t = mean gradient, then the mean over clients of an approximate H_k^{-1} g_t.

    A subclass says how the system is solved: `begin` makes the solver's first state from g, `improve` makes one
    iteration of it with one product, `solution` reads the answer. One iteration is one step of the client's fold.
    With 0 among the `candidates` the cohort can refuse the step.
    """

    model: nn.Module
    lr: float = 1.0
    iterations: int = 20
    weight_decay: float = 0.0
    damping: float = 0.1
    matrix: Literal["gauss_newton", "fisher"] = "gauss_newton"
    candidates: tuple[float, ...] = (0.0, 0.03, 0.1, 0.3, 1.0)
    loss: Loss = by_target

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        at_least_one("iterations", self.iterations)
        for name in ("weight_decay", "damping"):
            non_negative(name, getattr(self, name))
        choice("matrix", self.matrix, ("gauss_newton", "fisher"))
        for candidate in self.candidates:
            non_negative("candidates", candidate)

    @abstractmethod
    def begin(self, g: Params) -> Carry:
        """The solver before its first iteration."""

    @abstractmethod
    def improve(self, g: Params, carry: Carry, times: Times) -> Carry:
        """One iteration."""

    @abstractmethod
    def solution(self, carry: Carry) -> Params:
        """The approximate H_k^{-1} g."""

    # -- clients

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def gradient(sent: Payload, batch: Batch) -> Params:
            return tree.scale(batch.examples, model.grad(sent["params"], batch))

        return {
            "gradient": average("grad", gradient),
            "solve": self._solve(model),
            "losses": losses_at(model, lambda sent: self._points(sent["params"], sent["step"])),
        }

    def _solve(self, model: Model) -> Task:
        product = model.sum_fisher_product if self.matrix == "fisher" else model.sum_gauss_newton_product

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            def times(v: Params) -> Params:
                curved = tree.map_(lambda leaf: leaf / batch.examples, product(sent["params"], batch, v))
                return tree.axpy(self.weight_decay + self.damping, v, curved)

            return self.improve(sent["mean_grad"], carry, times)

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            return {"step": self.solution(carry)}, examples.float()

        size = self._batch_size()
        return Task(lambda sent: self.begin(sent["mean_grad"]), step, finish, self.iterations, size, self.iterations)

    def _batch_size(self) -> int | None:
        """Of every product; None: all examples."""
        return None

    def _points(self, w: Params, p: Params) -> list[Params]:
        return [tree.axpy(-a * self.lr, p, w) for a in self.candidates]

    # -- server

    def init(self, params: Params) -> State:
        return {"params": params, "shape": {}}

    def round(self, state: State) -> Flow[State]:
        w = state["params"]
        gathered = yield Ask("gradient", {"params": w})
        g = gathered.mean["grad"]
        if self.weight_decay:
            g = tree.axpy(self.weight_decay, w, g)
        solved = yield Ask("solve", {"mean_grad": g}, reuse=("params",))
        p, length = solved.mean["step"], self.lr
        if self.candidates:
            tried = yield Ask("losses", {"step": p}, reuse=("params",))
            best = lowest(tried.mean["losses"]["at"], self._points(w, p), self.weight_decay)
            length *= self.candidates[best]
        return {"params": tree.axpy(-length, p, w), "shape": named_shape("step", g, p)}

    def notes(self, state: State) -> dict[str, Any]:
        return dict(state["shape"])
