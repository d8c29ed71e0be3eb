"""A vectorised step, recorded once as a plain list of tensor operations and replayed.

vmap and grad cost more than the arithmetic of a small model: they interpret the step anew every time. After a step has
been taken `WARM` times with the same shapes, it is recorded below those layers and the recording is run from then on:
on a CPU the same operations in the same order, so the same bits; on a GPU as one CUDA graph, launched as a whole. What
cannot be recorded goes on as before.

The carry belongs to the step: it may be overwritten.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedge.engine.rewrite import simplify, update_in_place

WARM = {"cpu": 40, "cuda": 3}
MOST = {"cpu": 64, "cuda": 4}  # recordings kept of one step; on a GPU each holds its own buffers

Function = Callable[..., Any]


class Traced:
    """A step (sent, carry, batch, row) -> carry, recorded for every set of shapes it is often called with."""

    def __init__(self, function: Function, compile: bool = False) -> None:
        self.function, self.compile = function, compile
        self.calls: Counter[Any] = Counter()
        self.recorded: dict[Any, Function] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        shapes = (spec, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
        if shapes in self.recorded:
            return self.recorded[shapes](leaves)
        self.calls[shapes] += 1
        kind = leaves[0].device.type
        if self.calls[shapes] > WARM.get(kind, 40) and len(self.recorded) < MOST.get(kind, 64):
            self.recorded[shapes] = self._record(args, leaves, spec)
        return self.function(*args)

    def _record(self, args: tuple[Any, ...], leaves: list[Tensor], spec: Any) -> Function:
        counts = [len(pytree.tree_leaves(arg)) for arg in args]
        carry = range(counts[0], counts[0] + counts[1])
        carry_spec = pytree.tree_flatten(args[1])[1]
        gpu = leaves[0].device.type == "cuda"
        try:
            graph = self._graph(leaves, spec)
            simplify(graph)
            update_in_place(graph, carry, fuse=gpu)
            run = self._runner(graph, leaves, carry) if gpu else graph.forward
        except Exception as error:
            warnings.warn(f"a step could not be recorded and runs slower: {error}", stacklevel=2)
            return lambda leaves: self.function(*pytree.tree_unflatten(leaves, spec))
        return lambda leaves: pytree.tree_unflatten(run(*leaves), carry_spec)

    def _runner(self, graph: GraphModule, leaves: list[Tensor], carry: range) -> Captured:
        """On a GPU: the recording, compiled if that is wanted and possible, as one CUDA graph."""
        if self.compile:
            try:
                return Captured(torch.compile(graph, dynamic=False), leaves, carry)
            except Exception as error:
                line = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
                warnings.warn(f"a step could not be compiled and runs as it was recorded: {line}", stacklevel=2)
        return Captured(graph.forward, leaves, carry)

    def _graph(self, leaves: list[Tensor], spec: Any) -> GraphModule:
        def flat(*leaves: Tensor) -> list[Tensor]:
            return pytree.tree_leaves(self.function(*pytree.tree_unflatten(list(leaves), spec)))

        return make_fx(flat)(*leaves)


class Captured:
    """A recorded step as one CUDA graph on fixed buffers.

    The carry lives in the buffers between steps; other inputs are copied in, and only if they are not the tensors of
    the last step.
    """

    def __init__(self, step: Function, leaves: list[Tensor], carry: range) -> None:
        self.buffers = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
        self.carry = carry
        self.last: list[Tensor | None] = [None] * len(leaves)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(step)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(step)

    def _step(self, step: Function) -> None:
        for index, new in zip(self.carry, step(*self.buffers), strict=True):
            if new.data_ptr() != self.buffers[index].data_ptr():
                self.buffers[index].copy_(new)

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        for i, leaf in enumerate(leaves):
            if leaf is not self.last[i] and leaf is not self.buffers[i]:
                self.buffers[i].copy_(leaf)
                self.last[i] = None if i in self.carry else leaf
        self.graph.replay()
        return [self.buffers[i] for i in self.carry]
