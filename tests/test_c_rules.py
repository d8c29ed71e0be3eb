"""Every operation that has a form in C, one by one, against torch's own in both precisions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fedge.engine.recording.c_library import load, there_is_a_compiler
from fedge.engine.recording.c_source import RULES, NoRule, Rule, Source, Value
from tests.cases import generator

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
aten = torch.ops.aten


class Do(NamedTuple):
    """A call of an operation; strings among its arguments are inputs by name."""

    op: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def do(op: Any, *args: Any, **options: Any) -> Do:
    return Do(op, args, options)


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    g = generator(3)
    floats = {
        "a": (3, 5),
        "b": (3, 5),
        "row": (5,),
        "column": (3, 1),
        "square": (4, 8),
        "wide": (8, 37),
        "cube": (2, 3, 5),
    }
    found = {name: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in floats.items()}
    found |= {"plus": found["a"].abs() + 0.5, "one": found["row"][0].clone(), "two": found["row"][1].clone()}
    found |= {name: torch.randint(-9, 9, (3, 5), generator=g) for name in ("i", "j")}
    found |= {"yes": found["i"] > 0, "which": torch.tensor([2, 0, 2, 1])}
    found["a"][1, 2] = found["b"][1, 2]  # two that are equal
    return found


T = do(aten.transpose.int, "wide", 0, 1)  # [37, 8], not one after another
CASES: dict[str, Do] = {
    "view": do(aten.view.default, "a", [5, 3]),
    "reshape, of three": do(aten.reshape.default, do(aten.permute.default, "cube", [1, 0, 2]), [3, 10]),
    "unsafe view": do(aten._unsafe_view.default, "a", [15]),
    "reshape": do(aten.reshape.default, T, [2, 148]),
    "transpose": do(aten.transpose.int, "cube", 0, -1),
    "t": do(aten.t.default, "a"),
    "permute": do(aten.permute.default, "cube", [2, 0, -2]),
    "unsqueeze": do(aten.unsqueeze.default, "a", 1),
    "unsqueeze, last": do(aten.unsqueeze.default, T, -1),
    "expand": do(aten.expand.default, "column", [2, 3, 4]),
    "alias": do(aten.alias.default, "a"),
    "detach": do(aten.detach.default, "a"),
    "mm": do(aten.mm.default, "square", "wide"),
    "mm, turned": do(aten.mm.default, T, do(aten.t.default, "square")),
    "mm, left turned": do(aten.mm.default, do(aten.t.default, "b"), "a"),
    "addmm": do(aten.addmm.default, "one", "square", "wide"),
    "addmm, bias per column": do(aten.addmm.default, "row", do(aten.t.default, "b"), "a"),
    "add": do(aten.add.Tensor, "a", "row"),
    "add, alpha": do(aten.add.Tensor, "a", "column", alpha=-2.5),
    "add, in place": do(aten.add_.Tensor, do(aten.mul.Scalar, "a", 2), "row", alpha=0.5),
    "add a number": do(aten.add.Scalar, "a", 1.5),
    "add a number, alpha": do(aten.add.Scalar, "a", 1.5, 3),
    "sub": do(aten.sub.Tensor, "a", "b"),
    "sub, alpha": do(aten.sub.Tensor, "row", "a", alpha=0.25),
    "sub a number, alpha": do(aten.sub.Scalar, "a", 1.5, 3),
    "rsub": do(aten.rsub.Scalar, "a", 1.5),
    "rsub, alpha": do(aten.rsub.Scalar, "a", 1.5, 3),
    "mul": do(aten.mul.Tensor, "a", "column"),
    "mul, of integers": do(aten.mul.Tensor, "i", "j"),
    "mul by a number": do(aten.mul.Scalar, "a", -0.3),
    "mul by what is true": do(aten.mul.Tensor, "a", "yes"),
    "div": do(aten.div.Tensor, "a", "plus"),
    "div, of integers": do(aten.div.Tensor, "i", do(aten.add.Scalar, "j", 20)),
    "div by a number": do(aten.div.Scalar, "a", 3),
    "neg": do(aten.neg.default, "a"),
    "reciprocal": do(aten.reciprocal.default, "plus"),
    "sqrt": do(aten.sqrt.default, "plus"),
    "exp": do(aten.exp.default, "a"),
    "exp, in place": do(aten.exp_.default, do(aten.mul.Scalar, "a", 2)),
    "tanh": do(aten.tanh.default, "a"),
    "sigmoid": do(aten.sigmoid.default, "a"),
    "relu": do(aten.relu.default, "a"),
    "pow of a number": do(aten.pow.Scalar, 0.7, "a"),
    "threshold, back": do(aten.threshold_backward.default, "a", "b", 0.1),
    "tanh, back": do(aten.tanh_backward.default, "a", "b"),
    "sigmoid, back": do(aten.sigmoid_backward.default, "a", "b"),
    "clamp": do(aten.clamp.default, "a", -0.4, 0.6),
    "clamp, below": do(aten.clamp.default, "a", -0.4),
    "clamp, above": do(aten.clamp.default, "a", None, 0.6),
    "copy to integers": do(aten._to_copy.default, do(aten.mul.Scalar, "a", 5), dtype=torch.int64),
    "copy to numbers": do(aten._to_copy.default, "yes", dtype=torch.float32),
    "xor": do(aten.bitwise_xor.Tensor, "i", "j"),
    "and": do(aten.bitwise_and.Scalar, "i", 6),
    "shift": do(aten.__rshift__.Scalar, "i", 1),
    "ge": do(aten.ge.Tensor, "a", "b"),
    "ge, of both kinds": do(aten.ge.Scalar, "i", 0.5),
    "ge a number": do(aten.ge.Scalar, "a", 0.1),
    "eq": do(aten.eq.Tensor, "a", "b"),
    "eq a number": do(aten.eq.Scalar, "i", 3),
    "gt": do(aten.gt.Tensor, "a", "i"),
    "gt a number": do(aten.gt.Scalar, "a", -0.2),
    "sum": do(aten.sum.default, "a"),
    "sum of what is true": do(aten.sum.default, "yes"),
    "sum, first": do(aten.sum.dim_IntList, "cube", [0]),
    "sum, last, kept": do(aten.sum.dim_IntList, "cube", [-1], True),
    "sum, two": do(aten.sum.dim_IntList, "cube", [0, 2]),
    "sum, middle": do(aten.sum.dim_IntList, do(aten.transpose.int, "cube", 0, 2), [1]),
    "amax": do(aten.amax.default, "cube", [1]),
    "amax, kept": do(aten.amax.default, "a", [-1], True),
    "norm": do(aten.linalg_vector_norm.default, "cube"),
    "rows": do(aten.index_select.default, "a", 0, "which"),
    "stack": do(aten.stack.default, ["one", "two", "one"]),
}


class Built:
    """All cases in one graph, each an output of its own; `expected` is what torch computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.graph, self.tensors = Graph(), inputs(dtype)
        self.expected = {name: self._plain(case) for name, case in CASES.items()}
        self.places = [
            self._named(self.graph.placeholder(f"out{i}"), one) for i, one in enumerate(self.expected.values())
        ]
        self.nodes = {name: self._named(self.graph.placeholder(name), one) for name, one in self.tensors.items()}
        self.graph.output([self._node(case) for case in CASES.values()])

    def _named(self, node: Node, value: Tensor) -> Node:
        node.meta["val"] = value
        return node

    def _plain(self, thing: Any) -> Any:
        if isinstance(thing, Do):
            return thing.op(*[self._plain(one) for one in thing.args], **thing.options)
        if isinstance(thing, list):
            return [self._plain(one) for one in thing]
        return self.tensors[thing].clone() if isinstance(thing, str) else thing

    def _node(self, thing: Any) -> Any:
        if isinstance(thing, Do):
            args = tuple(self._node(one) for one in thing.args)
            return self._named(self.graph.call_function(thing.op, args, dict(thing.options)), self._plain(thing))
        if isinstance(thing, list):
            return [self._node(one) for one in thing]
        return self.nodes[thing] if isinstance(thing, str) else thing

    def run(self) -> dict[str, Tensor]:
        """What the C program computes."""
        found = [torch.full(one.shape, 77, dtype=one.dtype) for one in self.expected.values()]
        leaves = [*found, *self.tensors.values()]
        source = Source(GraphModule({}, self.graph), leaves, range(len(found)))
        pointers = (ctypes.c_void_p * len(leaves))(*[one.data_ptr() for one in leaves])
        zeros = (ctypes.c_int64 * len(leaves))()
        load(source.text)[0](ctypes.c_int64(1), ctypes.c_int64(1), pointers, zeros, zeros, (ctypes.c_void_p * 1)())
        return dict(zip(self.expected, found, strict=True))


def agree(expected: Tensor, found: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    slack = 2e-6 if expected.dtype == torch.float32 else 1e-14
    return torch.allclose(expected, found, rtol=slack, atol=slack)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def both(request: pytest.FixtureRequest, own_cache: None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    built = Built(request.param)
    return built.expected, built.run()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_does_what_torch_does(name: str, both: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    expected, found = both
    assert agree(expected[name], found[name]), (expected[name], found[name])


def test_every_rule_has_a_case() -> None:
    assert {case.op for case in CASES.values()} == set(RULES)


def off_by_one(rule: Rule) -> Rule:
    def wrong(source: Source, node: Node) -> Value:
        found = source.saved(rule(source, node))
        size = max(1, torch.Size(found.shape).numel())
        change = "!" if found.dtype == torch.bool else "1 + "
        source.lines.append(f"for (int i = 0; i < {size}; i++) {found.array}[i] = {change}{found.array}[i];")
        return found

    return wrong


def test_every_case_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    for op, rule in RULES.items():
        monkeypatch.setitem(RULES, op, off_by_one(rule))
    built = Built(torch.float64)
    found = built.run()
    assert [name for name in CASES if agree(built.expected[name], found[name])] == []


@pytest.mark.parametrize(
    "case",
    [
        do(aten.sin.default, "a"),
        do(aten.addmm.default, "one", "square", "wide", alpha=2),
        do(aten.addmm.default, "one", "square", "wide", beta=2),
        do(aten.linalg_vector_norm.default, "a", 1),
        do(aten.linalg_vector_norm.default, "a", 2, [0]),
        do(aten.amax.default, "i", [0]),
        do(aten.index_select.default, "a", 1, "which"),
        do(aten.stack.default, ["a", "b"]),
        do(aten._to_copy.default, "a", dtype=torch.float16),
        do(aten.mm.default, do(aten._to_copy.default, "i", dtype=torch.int64), do(aten.t.default, "j")),
    ],
)
def test_what_has_no_rule_is_said(case: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(CASES):
        monkeypatch.delitem(CASES, name)
    monkeypatch.setitem(CASES, "it", case)
    with pytest.raises(NoRule, match="has no form in C"):
        Built(torch.float64).run()
