"""Rewriting a recorded step for the processor's caches: results over what is spent, operands in one order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fedge.engine.recording.graph_passes import is_view, shape, strides

aten = torch.ops.aten

# Element by element: the result may lie where the first argument lay, of the second kind also where the second did.
_OVER_FIRST: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default, aten.tanh.default: aten.tanh_.default, aten.exp.default: aten.exp_.default,
    aten.sigmoid.default: aten.sigmoid_.default, aten.neg.default: aten.neg_.default,
    aten.sub.Tensor: aten.sub_.Tensor, aten.div.Tensor: aten.div_.Tensor, aten.div.Scalar: aten.div_.Scalar,
    aten.mul.Scalar: aten.mul_.Scalar,
}  # fmt: skip
_OVER_EITHER: dict[Any, Any] = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
# What lies where its first argument lies, and reaches all of it.
_WHOLE = {
    aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.t.default, aten.threshold_backward.grad_input, *_OVER_FIRST.values(), *_OVER_EITHER.values(),
}  # fmt: skip


def reuse_memory(module: GraphModule) -> None:
    """Let operations write into what nobody reads after them: a new place has to be fetched into the cache first.

    The numbers are the same, to the bit.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.threshold_backward.default and _may_lie(node, node.args[0]):
            node.target, node.kwargs = aten.threshold_backward.grad_input, {"grad_input": node.args[0]}
        elif node.target in _OVER_FIRST and _may_lie(node, node.args[0]):
            node.target = _OVER_FIRST[node.target]
        elif node.target in _OVER_EITHER:
            _over_either(node)
    module.recompile()


def _over_either(node: Node) -> None:
    first, second = node.args
    if _may_lie(node, first):
        node.target = _OVER_EITHER[node.target]
    elif _may_lie(node, second) and isinstance(first, Node) and not node.kwargs:
        node.target, node.args = _OVER_EITHER[node.target], (second, first)


def _may_lie(node: Node, old: Any) -> bool:
    """Whether a result may lie where its argument lies: in memory of the step's own that nobody else reads."""
    if not isinstance(old, Node) or not isinstance(old.meta.get("val"), torch.Tensor):
        return False
    same = shape(node) == shape(old) and strides(node) == strides(old)
    return same and node.meta["val"].dtype == old.meta["val"].dtype and _is_own(old)


def _is_own(node: Node) -> bool:
    """Whether a tensor has one user, and so has all that it is a view of, back to an operation that made it."""
    while len(node.users) == 1 and node.op == "call_function":
        if node.target in _WHOLE:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is operator.getitem:  # of several results, each in a place of its own
            source = node.args[0]
            return isinstance(source, Node) and source.op == "call_function" and not is_view(source)
        else:
            return not is_view(node)
    return False


def side_by_side(module: GraphModule) -> None:
    """Bring gradients into the order of their images: torch's kernel takes ten times as long where the two differ."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not aten.threshold_backward.default:
            continue
        slope, image = (one.meta["val"] for one in node.args[:2])
        last = torch.channels_last
        turned = image.dim() == 4 and image.is_contiguous(memory_format=last) and slope.shape == image.shape
        if turned and not slope.is_contiguous(memory_format=last):
            with module.graph.inserting_before(node):
                new = module.graph.call_function(aten.clone.default, (node.args[0],), {"memory_format": last})
            new.meta["val"] = slope.contiguous(memory_format=last)
            node.replace_input_with(node.args[0], new)
    module.recompile()
