"""A vectorised step, recorded once as a plain list of tensor operations and replayed.

vmap and grad cost more than the arithmetic of a small model: they interpret the step anew every time. After a step has
been taken `WARM` times with the same shapes, it is recorded below those layers and the recording is run from then on:
the same operations in the same order, so the same bits. What cannot be recorded goes on as before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

WARM = 40

Function = Callable[..., Any]


class Traced:
    """`function`, a pure function of tensors in nests, recorded for every set of shapes it is often called with."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.calls: Counter[Any] = Counter()
        self.recorded: dict[Any, Function] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        shapes = (spec, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
        if shapes in self.recorded:
            return self.recorded[shapes](leaves)
        self.calls[shapes] += 1
        if self.calls[shapes] > WARM:
            self.recorded[shapes] = self._record(leaves, spec)
        return self.function(*args)

    def _record(self, leaves: list[Tensor], spec: Any) -> Function:
        specs = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            out, out_spec = pytree.tree_flatten(self.function(*pytree.tree_unflatten(leaves, spec)))
            specs.append(out_spec)
            return out

        try:
            graph = make_fx(flat)(*leaves)
        except Exception as error:
            warnings.warn(f"a step could not be recorded and runs slower: {error}", stacklevel=2)
            return lambda leaves: self.function(*pytree.tree_unflatten(leaves, spec))
        run = graph.forward
        return lambda leaves: pytree.tree_unflatten(run(*leaves), specs[0])
