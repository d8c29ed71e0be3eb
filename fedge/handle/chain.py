"""A module read as a chain: layers that each take what the one before put out, with nothing beside them.

A chain has a gradient that can be written down, which is what the fast engine needs. Everything else (a branch, a
layer without a rule, shared or frozen weights, hooks) is still trained, through autograd; `NotAChain` says what it was.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node, Tracer

WINDOW = 127  # pixels of a pool: places in it are kept as bytes


class NotAChain(ValueError):
    """Why a module has no written-down gradient."""


@dataclass(frozen=True)
class Layer:
    """One link of the chain: what it is, its settings and the names of its parameters."""

    kind: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()
    weight: str | None = None
    bias: str | None = None

    def __getitem__(self, option: str) -> Any:
        return dict(self.options)[option]


POINTWISE = {
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", "relu": "relu",
    nn.Tanh: "tanh", F.tanh: "tanh", torch.tanh: "tanh", "tanh": "tanh",
    nn.Sigmoid: "sigmoid", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", "sigmoid": "sigmoid",
}  # fmt: skip


def read(module: nn.Module) -> list[Layer]:
    """The layers of a module in the order in which they are applied."""
    traced = _trace(module)
    layers: list[Layer] = []
    current: Any = None
    for node in traced.graph.nodes:
        if node.op == "placeholder" and current is None:
            current = node
        elif node.op == "output" and node.args == (current,):
            break
        elif node.op == "call_method" and node.target == "size" and node.args == (current, 0):
            continue  # the first half of x.view(x.size(0), -1)
        elif node.op.startswith("call_") and node.args and node.args[0] is current:
            if any(user not in _sizes(current) and user is not node for user in current.users):
                raise NotAChain(f"'{current}' goes to several places")
            layers += _layer(module, node)
            current = node
        else:
            raise NotAChain(f"'{node}' ({node.op}) is beside the chain")
    _every_parameter_once(module, layers)
    return _pool_first(layers)


def _trace(module: nn.Module) -> GraphModule:
    for name, part in module.named_modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooks) or hasattr(part, "parametrizations"):
            raise NotAChain(f"'{name or type(part).__name__}' has hooks or a parametrisation")
    own = copy.deepcopy(module).train()
    try:
        return GraphModule(own, Tracer().trace(own))
    except Exception as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise NotAChain(f"its forward cannot be followed ({line})") from error


def _sizes(node: Node) -> set[Node]:
    return {user for user in node.users if user.op == "call_method" and user.target == "size"}


def _layer(module: nn.Module, node: Node) -> list[Layer]:
    if node.op == "call_module":
        name = str(node.target)
        return _of_module(name, module.get_submodule(name))
    rest: tuple[Any, ...] = node.args[1:]
    options: dict[str, Any] = dict(node.kwargs)
    name = str(getattr(node.target, "__name__", node.target))
    if node.target in POINTWISE and not rest and not set(options) - {"inplace"}:
        return [Layer(POINTWISE[node.target], name)]
    if node.target in (torch.flatten, "flatten") and (rest == (1,) or options == {"start_dim": 1}):
        return [Layer("flatten", name)]
    if node.target in ("view", "reshape") and len(rest) == 2 and rest[1] == -1 and _is_batch(rest[0]):
        return [Layer("flatten", name)]
    if node.target is F.dropout and not rest and set(options) <= {"p", "training", "inplace"}:
        return [Layer("dropout", name, (("p", options.get("p", 0.5) if options.get("training", True) else 0.0),))]
    if node.target is F.max_pool2d and (len(rest) == 1 or "kernel_size" in options):
        known = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        return [_pool(name, *rest, **{key: value for key, value in options.items() if key in known})]
    raise NotAChain(f"'{name}' has no rule")


def _is_batch(size: Any) -> bool:
    return isinstance(size, Node) and size.op == "call_method" and size.target == "size" and size.args[1:] == (0,)


def _of_module(name: str, part: Any) -> list[Layer]:
    kind = type(part)  # a subclass may do anything
    if kind in POINTWISE:
        return [Layer(POINTWISE[kind], name)]
    if kind is nn.Identity:
        return []
    if kind is nn.Flatten and part.start_dim == 1 and part.end_dim == -1:
        return [Layer("flatten", name)]
    if kind is nn.Dropout:
        return [Layer("dropout", name, (("p", part.p),))]
    if kind is nn.MaxPool2d:
        return [_pool(name, *operator.attrgetter("kernel_size", "stride", "padding", "dilation", "ceil_mode")(part))]
    if kind is nn.Linear:
        return [Layer("linear", name, (), f"{name}.weight", _bias(name, part))]
    if kind is nn.Conv2d:
        return [_conv(name, part)]
    raise NotAChain(f"'{name}' ({kind.__name__}) has no rule")


def _bias(name: str, part: Any) -> str | None:
    return None if part.bias is None else f"{name}.bias"


def _conv(name: str, part: Any) -> Layer:
    plain = part.groups == 1 and _pair(part.stride) == (1, 1) and _pair(part.dilation) == (1, 1)
    if not plain or isinstance(part.padding, str) or part.padding_mode != "zeros":
        raise NotAChain(f"'{name}' (Conv2d) has a stride, dilation, groups or padding without a rule")
    padding = _pair(part.padding)
    if padding[0] >= part.kernel_size[0] or padding[1] >= part.kernel_size[1]:
        raise NotAChain(f"'{name}' (Conv2d) has more padding than its kernel is wide")
    options = (("kernel", tuple(part.kernel_size)), ("padding", padding))
    return Layer("conv", name, options, f"{name}.weight", _bias(name, part))


def _pool(
    name: str, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Layer:  # fmt: skip
    kernel = _pair(kernel_size)
    whole = _pair(stride or kernel) == kernel and _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    if not whole or ceil_mode or return_indices:
        raise NotAChain(f"'{name}' (max_pool2d) overlaps, is padded or rounds up")
    if kernel[0] * kernel[1] > WINDOW:
        raise NotAChain(f"'{name}' (max_pool2d) has a window of more than {WINDOW} pixels")
    return Layer("pool", name, (("kernel", kernel),))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _every_parameter_once(module: nn.Module, layers: list[Layer]) -> None:
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if sorted(used) != sorted(name for name, _ in module.named_parameters()):
        raise NotAChain("a parameter is shared, or outside its layers")
    if frozen := [name for name, leaf in module.named_parameters() if not leaf.requires_grad]:
        raise NotAChain(f"'{frozen[0]}' is frozen")


def _pool_first(layers: list[Layer]) -> list[Layer]:
    """max(relu(x)) = relu(max(x)), gradients included: the pool goes first and leaves the ReLU less to do."""
    layers = list(layers)
    for i in range(len(layers) - 1):
        if layers[i].kind == "relu" and layers[i + 1].kind == "pool":
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return layers
