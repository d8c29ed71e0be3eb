"""A module read as a chain: layers that each take what the one before put out, with nothing beside them.

A chain has a gradient that can be written down, which is what the fast engine needs. Everything else (a branch, a
layer without a rule, shared or frozen weights, hooks) is still trained, through autograd; `NotAChain` says what it was.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node, Tracer

from fedge.handle import layers as table
from fedge.handle.layer import Call, Layer, NotAChain


def read(module: nn.Module) -> list[Layer]:
    """The layers of a module in the order in which they are applied."""
    traced = trace(module)
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
            layers += _layer(_call(module, node))
            current = node
        else:
            raise NotAChain(f"'{node}' ({node.op}) is beside the chain")
    _every_parameter_once(module, layers)
    return _reordered(layers)


class _Tracer(Tracer):
    """Does not look into layers that have a rule."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or bool(_match(Call("", type(m), m)))


def trace(module: nn.Module) -> GraphModule:
    """The calls of a module's forward pass; `NotAChain` says why they cannot be followed."""
    for name, part in module.named_modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooks) or hasattr(part, "parametrizations"):
            raise NotAChain(f"'{name or type(part).__name__}' has hooks or a parametrisation")
    own = copy.deepcopy(module).train()
    try:
        return GraphModule(own, _Tracer().trace(own))
    except Exception as error:
        line = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise NotAChain(f"its forward cannot be followed ({line})") from error


def _sizes(node: Node) -> set[Node]:
    return {user for user in node.users if user.op == "call_method" and user.target == "size"}


def _call(module: nn.Module, node: Node) -> Call:
    if node.op == "call_module":
        name = str(node.target)
        part = module.get_submodule(name)
        return Call(name, type(part), part)  # the class itself: a subclass may do anything
    return Call(str(getattr(node.target, "__name__", node.target)), node.target, None, node.args[1:], node.kwargs)


def _layer(call: Call) -> list[Layer]:
    if call.target is nn.Identity:
        return []
    if (layer := _match(call)) is None:
        kind = "" if call.part is None else f" ({call.target.__name__})"
        raise NotAChain(f"'{call.name}'{kind} is no layer with a written gradient")
    return [layer]


def _match(call: Call) -> Layer | None:
    found = (kind.match(call) for kind in table.KINDS)
    return next((layer for layer in found if layer is not None), None)


def _every_parameter_once(module: nn.Module, layers: list[Layer]) -> None:
    used = [name for layer in layers for name in layer.parameters]
    if sorted(used) != sorted(name for name, _ in module.named_parameters()):
        raise NotAChain("a parameter is shared, or outside its layers")
    if frozen := [name for name, leaf in module.named_parameters() if not leaf.requires_grad]:
        raise NotAChain(f"'{frozen[0]}' is frozen")


def _reordered(layers: list[Layer]) -> list[Layer]:
    layers = list(layers)
    for i in range(len(layers) - 1):
        if layers[i + 1].goes_before(layers[i]):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return layers
