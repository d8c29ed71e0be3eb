"""Rewriting a recorded step: drop what does nothing, update in place, and join a product with the update it feeds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fedge.handle.stacked.operator import DIRECT

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)


def simplify(module: GraphModule) -> None:
    """Remove views and expansions to the shape that is there already, twice-transposed pairs, and products with one."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        source = _same_as(node)
        if source is not None:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _same_as(node: Node) -> Node | None:
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.target in (aten.alias.default, aten.detach.default):
        return first
    if node.target in _SHAPES:
        return first if shape(node) == shape(first) and strides(node) == strides(first) else None
    if node.target is aten.transpose.int and first.target is aten.transpose.int:
        swap = {a % len(shape(node)) for a in node.args[1:]}  # type: ignore[operator]
        inner = {a % len(shape(node)) for a in first.args[1:]}  # type: ignore[operator]
        before = first.args[0]
        return before if swap == inner and isinstance(before, Node) else None
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return first
    if node.target is aten.slice.Tensor and shape(node) == shape(first):
        return first
    return None


def shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def strides(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].stride())


@torch.enable_grad()
def _lstm_for_training(*args: Any) -> Any:
    """torch's fused LSTM keeps what the backward pass needs only where gradients are wanted, whatever it is told."""
    return aten.mkldnn_rnn_layer.default(*args)


# The same kernels, called directly from Python: half the cost of a call through the operator table.
_DIRECT: dict[Any, Any] = {
    aten.bmm.default: torch.bmm, aten.baddbmm.default: torch.baddbmm, aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm, aten.relu.default: torch.relu, aten.amax.default: torch.amax,
    aten.exp_.default: torch.exp_, aten.sum.dim_IntList: torch.sum, aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div, aten.eq.Tensor: torch.eq,
    aten.unsqueeze.default: torch.unsqueeze, aten.transpose.int: torch.transpose, aten.permute.default: torch.permute,
    aten.index_select.default: torch.index_select, aten.view.default: torch.Tensor.view,
    aten.add_.Tensor: torch.Tensor.add_, aten.sub_.Tensor: torch.Tensor.sub_,
    aten.mkldnn_rnn_layer.default: _lstm_for_training,
}  # fmt: skip


def call_directly(module: GraphModule) -> None:
    """Let every operation that has a Python function of its own be called by it."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = _DIRECT.get(node.target) or DIRECT.get(node.target, node.target)
    module.recompile()


_IN_PLACE = {aten.sub.Tensor: aten.sub_.Tensor, aten.add.Tensor: aten.add_.Tensor}


def overwrite_spent(module: GraphModule, spent: range) -> None:
    """Let a difference or sum of an input that nobody needs afterwards be written into that input."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for old in (inputs[index] for index in spent):
        users = list(old.users)
        if len(users) == 1 and users[0].target in _IN_PLACE and _fits(users[0], old):
            users[0].target = _IN_PLACE[users[0].target]
    module.recompile()


def _fits(node: Node, old: Node) -> bool:
    """Whether the result of `old` and something else can lie where `old` does."""
    same = node.meta["val"].dtype == old.meta["val"].dtype and shape(node) == shape(old)
    return same and strides(node) == strides(old) and node.args[0] is old and node.args[1] is not old


def update_in_place(module: GraphModule, carry: range, fuse: bool) -> None:
    """Let outputs that are `carry + c * something` overwrite their input; with `fuse`, in one call with the product.

    Output i of the step is the successor of input carry[i]. An update may overwrite only what is not read later.
    """
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    (output,) = [node for node in nodes if node.op == "output"]
    successors: list[Any] = list(output.args[0])
    held = {inputs[index] for index in carry}
    for node, index in zip(successors, carry, strict=True):
        old = inputs[index]
        last = max((place[user] for part in _views(old) for user in part.users), default=-1)
        update = isinstance(node, Node) and node.target is aten.add.Tensor and node.args[0] == old
        if update and place[node] == last and shape(node) == shape(old) and _is_alone(node, successors):
            _overwrite(module, node, old, fuse, held)
    module.graph.eliminate_dead_code()
    module.recompile()


def is_view(node: Node) -> bool:
    """Whether what it returns may lie where its first argument lies."""
    schema = getattr(node.target, "_schema", None)
    return node.target in _SHAPES or (schema is not None and any(one.alias_info is not None for one in schema.returns))


def _views(node: Node) -> set[Node]:
    """A node and all that may lie in the same memory."""
    found, todo = {node}, [node]
    while todo:
        new = {user for user in todo.pop().users if is_view(user)} - found
        found |= new
        todo += new
    return found


def _root(node: Any) -> Any:
    """What a view is a view of."""
    while isinstance(node, Node) and node.op == "call_function" and is_view(node):
        node = node.args[0]
    return node


def _is_alone(node: Node, successors: list[Any]) -> bool:
    """Whether no other successor lies where this one does."""
    same = _views(node)
    return sum(one in same for one in successors if isinstance(one, Node)) == 1


class Update(NamedTuple):
    """carry[which] += alpha a b, to be done after the rest of the step; a and b are its outputs `at` and `at + 1`."""

    which: int
    shape: tuple[int, ...]
    alpha: float
    at: int


class Rest(NamedTuple):
    """What `split_updates` took out of a step: products to be added, and numbers to be passed behind its inputs.

    The numbers are the step sizes: passed and not written into the step, they let one compiled step serve them all.
    """

    updates: list[Update]
    numbers: list[float]


def split_updates(module: GraphModule, carry: range) -> Rest:
    """Take updates by a product out of a step, so that they need not pass through memory; overwrite the others.

    What is left returns the factors of those products, and its other successors go into the carry itself.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (output,) = [node for node in nodes if node.op == "output"]
    updates: list[Update] = []
    numbers: list[float] = []
    factors: list[Any] = []
    rest: list[tuple[Node, Any]] = []
    held = {inputs[index] for index in carry}
    for node, index in zip(output.args[0], carry, strict=True):
        old = inputs[index]
        product, by = None, None
        step = isinstance(node, Node) and node.target is aten.add.Tensor and node.args[0] == old
        if step and len(node.users) == 1:
            change, by = _scaled(node.args[1])
            product = _product(change, held)
        if product is None:
            rest.append((old, _lifted(module, node, inputs, numbers) if step else node))
            continue
        updates.append(Update(index, shape(product), node.kwargs.get("alpha", 1), len(factors)))
        first, second = product.args
        if by is not None:
            with module.graph.inserting_before(output):
                first = module.graph.call_function(aten.mul.Tensor, (first, by))
        factors += [first, second]
    moves = [(old, new) for old, new in rest if new is not old]
    with module.graph.inserting_before(output):
        moves = [(old, _saved(module, new) if _root(new) in held else new) for old, new in moves]
        for old, new in moves:
            module.graph.call_function(aten.copy_.default, (old, new))
    output.args = (factors,)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.target is aten.copy_.default or node.is_impure())
    module.recompile()
    return Rest(updates, numbers)


def _saved(module: GraphModule, node: Any) -> Node:
    """A copy of what will be overwritten before it is read."""
    found: Node = module.graph.call_function(aten.clone.default, (node,))
    return found


def _scaled(change: Any) -> tuple[Any, Node | None]:
    """A change that is a single number times something: the something, and the number."""
    if isinstance(change, Node) and change.target is aten.mul.Tensor and len(change.users) == 1:
        for one, other in (change.args, reversed(change.args)):
            if isinstance(one, Node) and isinstance(other, Node) and one.op == "placeholder" and not shape(one):
                return other, one
    return change, None


def _lifted(module: GraphModule, node: Node, inputs: list[Node], numbers: list[float]) -> Node:
    """old + alpha * change, with alpha as a further input of the step."""
    old, change = node.args
    alpha: Any = node.kwargs.get("alpha", 1)
    if alpha == 1:
        return node
    with module.graph.inserting_after(inputs[-1]):
        number = module.graph.placeholder(f"number_{len(numbers)}")
    inputs.append(number)
    numbers.append(float(alpha))
    with module.graph.inserting_before(node):
        moved = module.graph.call_function(aten.mul.Tensor, (change, number))
        new: Node = module.graph.call_function(aten.add.Tensor, (old, moved))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    return new


def _overwrite(module: GraphModule, node: Node, old: Node, fuse: bool, held: set[Node]) -> None:
    change, alpha = node.args[1], node.kwargs.get("alpha", 1)
    product = _product(change, held) if fuse else None
    with module.graph.inserting_before(node):
        if product is not None:
            flat = module.graph.call_function(aten.view.default, (old, list(shape(product))))
            done = module.graph.call_function(aten.baddbmm_.default, (flat, *product.args), {"alpha": alpha})
            done.meta["val"] = product.meta["val"]
            new: Any = module.graph.call_function(aten.view.default, (done, list(shape(old))))
        else:
            new = module.graph.call_function(aten.add_.Tensor, (old, change), {"alpha": alpha})
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def _product(node: Any, held: set[Node]) -> Node | None:
    """The batched product behind a tensor that is nothing but a view of it, used nowhere else.

    Its factors are read later than they were: they must not lie in the carry, which is overwritten meanwhile.
    """
    if not isinstance(node, Node):
        return None
    while node.target in _SHAPES and len(node.users) == 1 and isinstance(node.args[0], Node):
        node = node.args[0]
    found = len(node.users) == 1 and node.target is aten.bmm.default
    return node if found and not any(_root(factor) in held for factor in node.args) else None
