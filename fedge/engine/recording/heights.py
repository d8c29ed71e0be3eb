"""A recording for a stack of another height, from two that differ in their height alone.

Recording a step takes as long as dozens of steps, and clients of different sizes leave a stack at nearly every height.
A recording has sizes written into it as integers; those that follow the height J of the stack do so in a line,

    size(J) = a J + b,

so that two recordings of the same operations give a and b of every integer, and the recording for any other height.
What is made so is compared with the step itself before it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

TRIES = 3  # recordings that are compared before a step is given up: its operations are other ones at every height


class Unlike(Exception):
    """Two recordings that differ in more than sizes."""


class Size(NamedTuple):
    """An integer that follows the height: slope * height + offset."""

    slope: int
    offset: int


class Heights:
    """The recordings of one step at several heights of its stack."""

    def __init__(self) -> None:
        self._first: tuple[int, GraphModule] | None = None
        self._lines: list[tuple[Node, Any, Any]] | None = None  # nodes of the first, with sizes in their arguments
        self._left = TRIES

    def add(self, height: int, module: GraphModule) -> None:
        """A recording that was made."""
        if self._lines is not None or not self._left or height < 2:  # a stack of one is often recorded differently
            return
        if self._first is not None and self._first[0] != height:
            try:
                self._lines = _lines(self._first[1], module, self._first[0], height)
                return
            except Unlike:
                self._left -= 1
        self._first = (height, module)

    def at(self, height: int) -> GraphModule | None:
        """The recording for this height; None if it is not known how sizes follow the height."""
        if self._lines is None or self._first is None:
            return None
        graph, made = Graph(), dict[Node, Node]()
        for node, args, options in self._lines:
            filled = _filled((args, options), made, height)
            made[node] = graph.create_node(node.op, node.target, filled[0], filled[1], node.name)
        return GraphModule(self._first[1], graph)

    @property
    def given_up(self) -> bool:
        """Whether every height needs a recording of its own."""
        return self._lines is None and not self._left

    def give_up(self) -> None:
        """What was made from two recordings is not what the step does."""
        self._lines, self._left = None, 0


def _lines(one: GraphModule, two: GraphModule, low: int, high: int) -> list[tuple[Node, Any, Any]]:
    pairs = list(zip(one.graph.nodes, two.graph.nodes, strict=False))
    same = dict(pairs)
    if len(one.graph.nodes) != len(two.graph.nodes):
        raise Unlike
    found = []
    for a, b in pairs:
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise Unlike
        if a.op == "get_attr" and not _equal(getattr(one, str(a.target)), getattr(two, str(b.target))):
            raise Unlike
        args, options = (_line(x, y, same, low, high) for x, y in ((a.args, b.args), (a.kwargs, b.kwargs)))
        found.append((a, args, options))
    return found


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def _line(a: Any, b: Any, same: dict[Node, Node], low: int, high: int) -> Any:
    """An argument, with integers that differ as sizes."""
    if isinstance(a, Node):
        if same.get(a) is not b:
            raise Unlike
        return a
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        return type(a)(_line(x, y, same, low, high) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return {key: _line(a[key], b[key], same, low, high) for key in a}
    if type(a) is not type(b):
        raise Unlike
    if a == b:
        return a
    if type(a) is not int or (b - a) % (high - low):
        raise Unlike
    slope = (b - a) // (high - low)
    return Size(slope, a - slope * low)


def _filled(part: Any, made: dict[Node, Node], height: int) -> Any:
    """An argument for this height, of nodes that were made."""
    if isinstance(part, Size):
        return part.slope * height + part.offset
    if isinstance(part, Node):
        return made[part]
    if isinstance(part, tuple | list):
        return type(part)(_filled(one, made, height) for one in part)
    if isinstance(part, dict):
        return {key: _filled(one, made, height) for key, one in part.items()}
    return part
