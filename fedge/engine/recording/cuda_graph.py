"""A recorded step on a GPU: compiled if that is wanted, and launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedge.engine.recording.graph_passes import Rest

SHARED = 32  # kinds of compiled steps that are kept for later runs

Function = Callable[..., Any]

_COMPILED: dict[Any, list[tuple[dict[str, Tensor], Function]]] = {}


def compiled(graph: GraphModule, leaves: list[Tensor]) -> Function:
    """The graph, compiled; or what became of the same one in an earlier run of this process."""
    kind = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)
    known = _COMPILED.setdefault((graph.code, kind, torch.get_float32_matmul_precision()), [])
    own = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    own |= {name: t for name, t in vars(graph).items() if isinstance(t, Tensor)}
    for constants, function in known:
        if own.keys() == constants.keys() and all(same(own[name], constants[name]) for name in own):
            return function
    while len(_COMPILED) > SHARED:
        del _COMPILED[next(iter(_COMPILED))]
    known.append((own, torch.compile(graph, dynamic=False)))
    return known[-1][1]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


class Captured:
    """A recorded step as one CUDA graph on fixed buffers.

    The carry lives in the buffers between steps; other inputs are copied in, and only if they are not the tensors of
    the last step.
    """

    def __init__(self, step: Function, leaves: list[Tensor], carry: range, rest: Rest | None = None) -> None:
        self.step, self.rest = step, rest  # the step owns constants that the graph will read
        like = next((leaves[i] for i in carry if leaves[i].is_floating_point()), leaves[carry[0]])
        self.numbers = [] if rest is None else [like.new_tensor(number) for number in rest.numbers]
        self.buffers = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
        self.carry = carry
        self.last: list[tuple[Tensor, int] | None] = [None] * len(leaves)  # what was copied in, and its version
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
        if self.rest is not None:
            found = step(*self.buffers, *self.numbers)
            for one in self.rest.updates:
                self.buffers[one.which].view(one.shape).baddbmm_(*found[one.at : one.at + 2], alpha=one.alpha)
            return
        held = {self.buffers[index].untyped_storage().data_ptr() for index in self.carry}
        moves = []
        for index, new in zip(self.carry, step(*self.buffers), strict=True):
            if new.data_ptr() != self.buffers[index].data_ptr():  # one that lies in another's place is saved first
                saved = new.clone() if new.untyped_storage().data_ptr() in held else new
                moves.append((self.buffers[index], saved))
        for place, new in moves:
            place.copy_(new)

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        for i, leaf in enumerate(leaves):
            last = self.last[i]
            if leaf is self.buffers[i] or (last is not None and leaf is last[0] and leaf._version == last[1]):
                continue
            self.buffers[i].copy_(leaf)
            self.last[i] = None if i in self.carry else (leaf, leaf._version)
        self.graph.replay()
        return [self.buffers[i] for i in self.carry]
