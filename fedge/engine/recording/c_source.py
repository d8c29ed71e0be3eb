"""A recorded step of one job as a C function: what a compiler makes of it runs a whole block of steps in one call.

    for every job:  for every step:  the recorded operations, one loop nest each

A small model's operations take a microsecond each, and calling them takes longer. Here nothing is called, a job's
numbers stay in the first cache from its first step to its last, and products keep their sums in registers. An operation
that has no rule raises `NoRule`, and the step is run as it was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fedge.engine.recording.c_products import PRELUDE

aten = torch.ops.aten

STACK = 1 << 18  # bytes: a thread may have half a MiB of stack in all
TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.bool: "uint8_t"}


class NoRule(Exception):
    """A step that cannot be written in C, and why."""


@dataclass(frozen=True)
class Value:
    """A tensor of one job in C: an array and how its elements lie in it."""

    array: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def at(self, indices: Sequence[str]) -> str:
        """The element at these indices, one per dimension; those before the value's own are dropped, as torch does."""
        own = indices[len(indices) - len(self.shape) :]
        terms = [f"{i} * {s}" for i, s, n in zip(own, self.strides, self.shape, strict=True) if n != 1 and s]
        return f"{self.array}[{' + '.join(terms) or '0'}]"

    @property
    def contiguous(self) -> bool:
        return self.strides == _strides(self.shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of elements one after another."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


class Source:
    """The C program of one recorded step; `source` is its text, `constants` are tensors that it reads besides."""

    def __init__(self, graph: GraphModule, leaves: Sequence[Tensor], carry: range) -> None:
        self.graph, self.lines = graph, list[str]()
        self.constants: list[Tensor] = []
        self.values: dict[Node, Value] = {}
        self.count = 0
        self.stack = 0  # bytes of arrays of a job's own
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for i, (node, leaf) in enumerate(zip(inputs, leaves, strict=True)):
            self.values[node] = Value(f"in{i}", tuple(leaf.shape), _strides(leaf.shape), _known(leaf.dtype))
        for node in graph.graph.nodes:
            self._node(node)
        self._outputs([self.values[inputs[i]] for i in carry])
        self.leaves = [self.values[node] for node in inputs]

    def _node(self, node: Node) -> None:
        if node.op == "get_attr":
            self.values[node] = self._constant(getattr(self.graph, str(node.target)))
        elif node.op == "call_function":
            if not any(isinstance(one, Node) for one in node.all_input_nodes):
                self.values[node] = self._constant(_called(node))
                return
            rule = RULES.get(node.target)
            if rule is None:
                raise NoRule(f"{node.target} has no form in C")
            self.values[node] = rule(self, node)

    def _constant(self, tensor: Tensor) -> Value:
        tensor = tensor.detach().contiguous()
        self.constants.append(tensor)
        return Value(
            f"fixed{len(self.constants) - 1}", tuple(tensor.shape), _strides(tensor.shape), _known(tensor.dtype)
        )

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """A fresh array of a job's own."""
        self.count += 1
        name = f"t{self.count}"
        size = max(1, math.prod(shape))
        self.stack += size * dtype.itemsize + 64
        if self.stack > STACK:
            raise NoRule(f"a client's step needs more than {STACK >> 10} KiB beside what it carries")
        self.lines.append(f"{TYPES[_known(dtype)]} {name}[{size}] __attribute__((aligned(64)));")
        return Value(name, tuple(shape), _strides(shape), dtype)

    def like(self, node: Node) -> Value:
        return self.new(node.meta["val"].shape, node.meta["val"].dtype)

    def loops(self, shape: Sequence[int], body: str) -> None:
        """`body` at every index i0, i1, ... of a shape."""
        heads = [f"for (int i{d} = 0; i{d} < {n}; i{d}++) " for d, n in enumerate(shape)]
        self.lines.append("".join(heads) + "{ " + body + " }")

    def of(self, thing: Any, dtype: torch.dtype, indices: Sequence[str]) -> str:
        """An operand at these indices, in the type that is computed in."""
        kind = TYPES[dtype]
        if isinstance(thing, Node):
            return f"({kind}){self.values[thing].at(indices)}"
        return f"({kind}){_number(thing)}"

    def solid(self, value: Value) -> Value:
        """The value with its elements one after another."""
        if value.contiguous:
            return value
        found = self.new(value.shape, value.dtype)
        names = _names(value.shape)
        self.loops(value.shape, f"{found.at(names)} = {value.at(names)};")
        return found

    def _outputs(self, carry: list[Value]) -> None:
        """What the step returns goes into the carry; what lies in another part of it is saved first."""
        (output,) = [node for node in self.graph.graph.nodes if node.op == "output"]
        held = {value.array for value in carry}
        moves = []
        for new, old in zip(_args(output)[0], carry, strict=True):
            value = self.values[new]
            if value.array == old.array and value.strides == old.strides:
                continue
            moves.append((old, self.saved(value) if value.array in held else value))
        for old, value in moves:
            names = _names(old.shape)
            self.loops(old.shape, f"{old.at(names)} = {value.at(names)};")

    def saved(self, value: Value) -> Value:
        found = self.new(value.shape, value.dtype)
        names = _names(value.shape)
        self.loops(value.shape, f"{found.at(names)} = {value.at(names)};")
        return found

    @property
    def text(self) -> str:
        """The whole program: run(jobs, steps, pointers, job strides, step strides, constants)."""
        arrays = "".join(
            f"{(kind := TYPES[one.dtype])} *{one.array} = ({kind} *)leaves[{i}] + j * by_job[{i}] + t * by_step[{i}];\n"
            for i, one in enumerate(self.leaves)
        )
        fixed = "".join(
            f"const {TYPES[one.dtype]} *fixed{i} = (const {TYPES[one.dtype]} *)constants[{i}];\n"
            for i, one in enumerate(self.constants)
        )
        head = "void run(int64_t jobs, int64_t steps, void **leaves, const int64_t *by_job, const int64_t *by_step, void **constants) {"  # noqa: E501
        loops = "for (int64_t j = 0; j < jobs; j++) for (int64_t t = 0; t < steps; t++) {"
        return "\n".join([PRELUDE, head, fixed, loops, arrays, *self.lines, "}}", ""])


def _called(node: Node) -> Tensor:
    """What a call without tensors gives: the same in every step."""
    target: Any = node.target
    found: Tensor = target(*node.args, **node.kwargs)
    return found


def _known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in TYPES:
        raise NoRule(f"{dtype} has no form in C")
    return dtype


def _names(shape: Sequence[int]) -> list[str]:
    return [f"i{d}" for d in range(len(shape))]


def _number(number: Any) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        return "NAN" if math.isnan(number) else "INFINITY" if number > 0 else "-INFINITY"
    if isinstance(number, bool | int | float):
        return repr(float(number)) if isinstance(number, float) else str(int(number))
    raise NoRule(f"{number!r} is not a number")


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


Rule = Callable[[Source, Node], Value]


def pointwise(expression: str, compare: bool = False) -> Rule:
    """An operation on single numbers; {a}, {b}, {c} are its operands, {s} the suffix of C's functions."""

    def rule(source: Source, node: Node) -> Value:
        out = source.values[_args(node)[0]] if node.target in IN_PLACE else source.like(node)
        kind = _compared(node) if compare else out.dtype
        names = _names(out.shape)
        given = {
            key: source.of(arg, kind, names) for key, arg in zip("abc", _args(node), strict=False) if arg is not None
        }
        third = _args(node)[2] if "{alpha}" in expression and len(_args(node)) > 2 else 1  # of add.Scalar and the like
        alpha = f"({TYPES[kind]}){_number(node.kwargs.get('alpha', third))}"
        body = expression.format(**given, alpha=alpha, s="f" if kind == torch.float32 else "")
        source.loops(out.shape, f"{out.at(names)} = {body};")
        return out

    return rule


def _compared(node: Node) -> torch.dtype:
    """The type in which operands of different types are compared."""
    values = [one.meta["val"] if isinstance(one, Node) else one for one in _args(node)[:2]]
    found: torch.dtype = torch.result_type(
        *[torch.empty_like(v, device="cpu") if isinstance(v, Tensor) else v for v in values]
    )
    return found


def clamp(source: Source, node: Node) -> Value:
    """Between two bounds, either of which may be missing."""
    low, high = (*_args(node)[1:], None, None)[:2]
    upper = "{a}" if high is None else "{a} > {c} ? {c} : {a}"
    return pointwise(upper if low is None else "{a} < {b} ? {b} : " + upper)(source, node)


def view(source: Source, node: Node) -> Value:
    """Another shape or order of the same elements: no code, unless they do not lie one after another."""
    value, val = source.values[_args(node)[0]], node.meta["val"]
    shape = tuple(val.shape)
    if node.target in _RESHAPES:
        return replace(source.solid(value), shape=shape, strides=_strides(shape))
    if node.target is aten.transpose.int or node.target is aten.t.default:
        first, second = _args(node)[1:] if len(_args(node)) > 1 else (-2, -1)
        order = list(range(len(shape)))
        order[first], order[second] = order[second], order[first]
        return _permuted(value, order)
    if node.target is aten.permute.default:
        return _permuted(value, [d % len(shape) for d in _args(node)[1]])
    if node.target is aten.unsqueeze.default:
        at = _args(node)[1] % len(shape)
        strides = (*value.strides[:at], 1, *value.strides[at:])
        return replace(value, shape=shape, strides=strides)
    if node.target is aten.expand.default:
        lead = len(shape) - len(value.shape)
        strides = tuple(0 if old == 1 else s for old, s in zip(value.shape, value.strides, strict=True))
        return replace(value, shape=shape, strides=(*[0] * lead, *strides))
    return value  # alias, detach


def _permuted(value: Value, order: Sequence[int]) -> Value:
    return replace(value, shape=tuple(value.shape[d] for d in order), strides=tuple(value.strides[d] for d in order))


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def reduction(first: str, expression: str) -> Rule:
    """{o} = expression of itself and of {a}, over some dimensions; contiguous ones innermost."""

    def rule(source: Source, node: Node) -> Value:
        value, out = source.values[_args(node)[0]], source.like(node)
        if first != "0" and not out.dtype.is_floating_point:
            raise NoRule(f"a maximum of {out.dtype} has no form in C")
        rank = len(value.shape)
        dims = {d % rank for d in _args(node)[1]} if len(_args(node)) > 1 and _args(node)[1] else set(range(rank))
        keep = len(_args(node)) > 2 and bool(_args(node)[2])
        names = _names(value.shape)
        kept = [("0" if d in dims else names[d]) for d in range(rank) if keep or d not in dims]
        source.loops(out.shape, f"{out.at(_names(out.shape))} = {first};")
        order = sorted(range(rank), key=lambda d: (d not in dims, d)) if rank - 1 not in dims else list(range(rank))
        heads = "".join(f"for (int i{d} = 0; i{d} < {value.shape[d]}; i{d}++) " for d in order)
        a = f"({TYPES[out.dtype]}){value.at(names)}"
        o = out.at(kept)
        source.lines.append(f"{heads}{{ {o} = {expression.format(o=o, a=a)}; }}")
        return out

    return rule


def norm(source: Source, node: Node) -> Value:
    """The Euclidean norm of all elements."""
    if len(_args(node)) > 1 and _args(node)[1] != 2:
        raise NoRule(f"a norm of order {_args(node)[1]} has no form in C")
    if len(_args(node)) > 2 and _args(node)[2]:
        raise NoRule("a norm over some dimensions has no form in C")
    value, out = source.values[_args(node)[0]], source.like(node)
    names, root = _names(value.shape), "sqrtf" if out.dtype == torch.float32 else "sqrt"
    source.lines.append(f"{out.array}[0] = 0;")
    source.loops(value.shape, f"{out.array}[0] += {value.at(names)} * {value.at(names)};")
    source.lines.append(f"{out.array}[0] = {root}({out.array}[0]);")
    return out


def packed(source: Source, right: Value, kind: str) -> Value:
    """The right factor with its rows in whole vectors; a transposed one is turned four by four."""
    (inner, columns), lanes = right.shape, 64 // right.dtype.itemsize
    wide = -(-columns // lanes) * lanes
    out = source.new((inner, wide), right.dtype)
    whole = columns - columns % 4 if right.strides[0] == 1 and inner % 4 == 0 else 0
    step = f"{right.array} + i0 + i1 * {right.strides[1]}, {right.strides[1]}, {out.array} + i0 * {wide} + i1, {wide}"
    if whole:
        heads = f"for (int i0 = 0; i0 < {inner}; i0 += 4) for (int i1 = 0; i1 < {whole}; i1 += 4) "
        source.lines.append(f"{heads}turn_{kind}({step});")
    rest = f"{out.array}[i0 * {wide} + i1] = i1 < {columns} ? {right.at(['i0', 'i1'])} : 0;"
    if whole < wide:
        source.lines.append(f"for (int i0 = 0; i0 < {inner}; i0++) for (int i1 = {whole}; i1 < {wide}; i1++) {rest}")
    return out


def product(source: Source, node: Node) -> Value:
    """a b, or bias + a b."""
    bias, a, b = (None, *_args(node)) if len(_args(node)) == 2 else _args(node)
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        raise NoRule("a product with factors has no form in C")
    left, right, out = source.values[a], source.values[b], source.like(node)
    (rows, inner), columns = left.shape, right.shape[1]
    if out.dtype not in (torch.float32, torch.float64):
        raise NoRule(f"a product of {out.dtype} has no form in C")
    kind = "f32" if out.dtype == torch.float32 else "f64"
    if right.strides[1] != 1 or columns % (64 // out.dtype.itemsize):
        right = packed(source, right, kind)
    start = "0" if bias is None else source.values[bias].at(["i0", "i1"])
    source.loops(out.shape, f"{out.at(['i0', 'i1'])} = {start};")
    where = f"{left.array}, {left.strides[0]}, {left.strides[1]}, {right.array}, {right.strides[0]}"
    source.lines.append(f"product_{kind}({rows}, {columns}, {inner}, {where}, {out.array}, {out.strides[0]});")
    return out


def select(source: Source, node: Node) -> Value:
    """Rows of a table."""
    table, dim, index = _args(node)
    if dim != 0:
        raise NoRule(f"index_select along dimension {dim} has no form in C")
    values, chosen, out = source.values[table], source.values[index], source.like(node)
    names = _names(out.shape)
    source.loops(out.shape, f"{out.at(names)} = {values.at([chosen.at(['i0']), *names[1:]])};")
    return out


def stack(source: Source, node: Node) -> Value:
    """Single numbers side by side."""
    parts, out = _args(node)[0], source.like(node)
    for place, part in enumerate(parts):
        if source.values[part].shape:
            raise NoRule("a stack of tensors has no form in C")
        source.lines.append(f"{out.array}[{place}] = {source.values[part].at([])};")
    return out


IN_PLACE = (aten.add_.Tensor, aten.exp_.default)
_SIGMOID = "1 / (1 + exp{s}(-({a})))"
_LARGEST = "({a} > {o} || {a} != {a}) ? {a} : {o}"
RULES: dict[Any, Rule] = {
    **dict.fromkeys((*_RESHAPES, aten.transpose.int, aten.t.default, aten.permute.default), view),
    **dict.fromkeys((aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten.detach.default), view),
    **dict.fromkeys((aten.mm.default, aten.addmm.default), product),
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar), pointwise("{a} + {alpha} * {b}")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), pointwise("{a} - {alpha} * {b}")),
    aten.rsub.Scalar: pointwise("{b} - {alpha} * {a}"),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), pointwise("{a} * {b}")),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), pointwise("{a} / {b}")),
    aten.neg.default: pointwise("-({a})"),
    aten.reciprocal.default: pointwise("1 / ({a})"),
    aten.sqrt.default: pointwise("sqrt{s}({a})"),
    **dict.fromkeys((aten.exp.default, aten.exp_.default), pointwise("exp{s}({a})")),
    aten.tanh.default: pointwise("tanh{s}({a})"),
    aten.sigmoid.default: pointwise(_SIGMOID),
    aten.relu.default: pointwise("({a} <= 0) ? 0 : {a}"),
    aten.pow.Scalar: pointwise("pow{s}({a}, {b})"),
    aten.threshold_backward.default: pointwise("({b} <= {c}) ? 0 : {a}"),
    aten.tanh_backward.default: pointwise("{a} * (1 - {b} * {b})"),
    aten.sigmoid_backward.default: pointwise("{a} * (1 - {b}) * {b}"),
    aten.clamp.default: clamp,
    aten._to_copy.default: pointwise("{a}"),
    aten.bitwise_xor.Tensor: pointwise("{a} ^ {b}"),
    aten.bitwise_and.Scalar: pointwise("{a} & {b}"),
    aten.__rshift__.Scalar: pointwise("{a} >> {b}"),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), pointwise("{a} >= {b}", compare=True)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), pointwise("{a} == {b}", compare=True)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), pointwise("{a} > {b}", compare=True)),
    aten.sum.dim_IntList: reduction("0", "{o} + {a}"),
    aten.sum.default: reduction("0", "{o} + {a}"),
    aten.amax.default: reduction("-INFINITY", _LARGEST),
    aten.linalg_vector_norm.default: norm,
    aten.index_select.default: select,
    aten.stack.default: stack,
}
