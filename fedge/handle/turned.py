"""Images with the channels of a pixel side by side, for models that are not chains: convolutions are faster on them.

Torch's functions keep that order, or do not care. A user's own code could: it could ask how a tensor lies in memory, or
write into one view and read another. So the order is changed only in models whose calls all are known to be blind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fedge.handle.chain import trace
from fedge.handle.layer import NotAChain, arguments
from fedge.handle.layers.conv2d import layout
from fedge.handle.stacked.convolution import NAMES

MODULES = (
    nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Dropout, nn.Identity, nn.Flatten, nn.Linear, nn.LayerNorm,
)  # fmt: skip
FUNCTIONS = (
    F.relu, torch.relu, F.leaky_relu, F.elu, F.gelu, F.silu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.dropout,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, torch.flatten, torch.cat, torch.mean, torch.add, torch.mul,
    operator.add, operator.mul, operator.sub, operator.truediv, operator.iadd,
)  # fmt: skip
METHODS = ("relu", "tanh", "sigmoid", "flatten", "mean", "add", "mul", "size", "view", "reshape")
COPIES = ("view", "reshape", "flatten", torch.flatten, nn.Flatten)  # may copy where they did not
SAME = (nn.Identity, nn.Dropout, F.dropout)  # may return what they were given


def is_blind(module: nn.Module) -> bool:
    """Whether a module has convolutions, and nothing in it sees how images lie in memory."""
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    try:
        graph = trace(module).graph
    except NotAChain:
        return False
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    return all(_known(module, node) for node in nodes) and not _writes_into_a_copy(module, nodes)


def _known(module: nn.Module, node: Node) -> bool:
    known = {"call_module": MODULES, "call_function": FUNCTIONS, "call_method": METHODS}
    return _kind(module, node) in known[node.op]


def _kind(module: nn.Module, node: Node) -> Any:
    """The class of the layer that is called, the function, or the name of the method."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def _writes_into_a_copy(module: nn.Module, nodes: list[Node]) -> bool:
    """Whether something is overwritten after it was copied where it used to be shared: then the two would differ."""
    memory: dict[Node, int] = {}  # of what a node returns
    copied = set[int]()
    for number, node in enumerate(nodes):
        kind, writes = _kind(module, node), _writes(module, node)
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        shares = source is not None and (writes or kind in (*COPIES, *SAME))
        memory[node] = memory.setdefault(source, -1 - number) if shares and source is not None else number
        if writes and memory[node] in copied:
            return True
        if kind in COPIES:
            copied.add(memory[node])
    return False


def _writes(module: nn.Module, node: Node) -> bool:
    """Whether it overwrites what it is given; a flag without its name is taken for `inplace`."""
    part = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    flag = node.op == "call_function" and any(one is True for one in node.args[1:])
    return bool(getattr(part, "inplace", False) or node.kwargs.get("inplace") or flag or node.target is operator.iadd)


def conv2d(*args: Any, **options: Any) -> Tensor:
    """As torch's, on images in the better order, in which the result lies too."""
    x, weight, *rest = arguments(args, options, NAMES)
    if x.dim() == 4:
        x = x.contiguous(memory_format=layout(x, weight))
        if x.shape[1] == 1 and not x.requires_grad and layout(x, weight) is torch.channels_last:
            _, _, height, width = x.shape  # with one channel both orders are the same, and the strides say which it is
            x = x.as_strided(x.shape, (height * width, 1, width, 1))
    return F.conv2d(x, weight, *rest)


def view(x: Tensor, *shape: Any) -> Tensor:
    return x.reshape(*shape)


RULES: dict[Any, Callable[..., Any]] = {F.conv2d: conv2d, torch.Tensor.view: view}
