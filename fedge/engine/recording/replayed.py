"""The start and the end of a fold, recorded as its steps are."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedge.engine.recording import pytree
from fedge.engine.recording.cuda_graph import Function
from fedge.engine.recording.graph_passes import call_directly, overwrite_spent, simplify
from fedge.engine.recording.payoff import Ahead, Payoff, Step, endless
from fedge.engine.recording.recorder import MOST, WARM, apart, one_mode


class Replayed:
    """A vectorised function without a carry (the start and the end of a fold), recorded in the same way.

    With `spends`, the tensors of that argument are not needed afterwards and may be overwritten.
    """

    def __init__(self, function: Function, spends: int | None = None, ahead: Ahead = endless) -> None:
        self.function, self.spends = function, spends
        self.payoff = Payoff(ahead)
        self.recorded: dict[Any, Function] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, spec = pytree.flatten(args)
        shapes = (spec, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
        run = self.recorded.get(shapes)
        if run is not None and (self.spends is None or _own_memory(leaves, self._spent(args))):
            return run(leaves)
        step, few = Step(shapes), WARM["cuda"]
        if self.payoff.calls(step) >= few and len(self.recorded) < MOST["cpu"] and self.payoff.pays(step, few):
            self.recorded[shapes] = self._record(leaves, spec, self._spent(args))
        return self.payoff.timed(step, few, self.function, *args)

    def _spent(self, args: tuple[Any, ...]) -> range:
        """The places of the tensors that may be overwritten."""
        if self.spends is None:
            return range(0)
        counts = [len(pytree.leaves(arg)) for arg in args[: self.spends + 1]]
        return range(sum(counts[:-1]), sum(counts))

    def _record(self, leaves: list[Tensor], spec: Any, spent: range) -> Function:
        outs: list[Any] = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            found, out = pytree.flatten(self.function(*pytree.unflatten(list(leaves), spec)))
            outs.append(out)
            return found

        try:
            with one_mode(leaves):
                graph = make_fx(flat)(*apart(leaves))
            simplify(graph)
            overwrite_spent(graph, spent)
            call_directly(graph)
        except Exception as error:
            warnings.warn(f"the ends of a task could not be recorded and run slower: {error}", stacklevel=2)
            return lambda leaves: self.function(*pytree.unflatten(leaves, spec))
        return lambda leaves: pytree.unflatten(graph.forward(*leaves), outs[0])


def _own_memory(leaves: list[Tensor], some: range) -> bool:
    """Whether nothing else lies where some of the leaves lie."""
    places = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    return all(places.count(places[index]) == 1 for index in some)
