"""Steps that a recorder could get wrong: whatever is carried, all engines agree with the loop-back link."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.bench.check import algorithms, problem
from fedge.core import Task
from fedge.engine import Loopback, Simulator, folding
from fedge.engine.clients import batches
from fedge.engine.clients import run_task as fold
from fedge.engine.recording import cuda_graph as captured
from fedge.engine.recording import pytree as nest
from fedge.engine.recording import recorder as trace
from fedge.engine.recording.graph_passes import split_updates, update_in_place
from fedge.engine.recording.replayed import Replayed
from fedge.handle import parameters
from tests.cases import close, toy_data, toy_model


class Own(fedge.Algorithm):
    """An algorithm with a start and a step of a test's own; what it carries is a tuple, or a dict with "w" and "m"."""

    def __init__(self, start: Any, step: Any) -> None:
        self.model, self.loss = algorithms(False)["fedavg"].model, fedge.cross_entropy
        self.start, self.step = start, step

    def tasks(self, model: Any) -> dict[str, Task]:
        def finish(sent: Any, carry: Any, examples: Tensor) -> Any:
            w, *rest = (carry["w"], carry["m"]) if isinstance(carry, dict) else carry
            extra = sum(part[name].sum() for part in rest for name in part)
            return {"delta": {k: w[k] - sent["params"][k] + 1e-3 * extra for k in w}}, examples.to(torch.float64)

        return {"train": Task(self.start, lambda *args: self.step(model, *args), finish, epochs=6, batch_size=4)}

    def init(self, params: Any) -> Any:
        return {"params": params}

    def round(self, state: Any) -> Any:
        reply = yield fedge.Ask("train", {"params": state["params"]})
        return {"params": {k: v + reply.mean["delta"][k] for k, v in state["params"].items()}}


def three(sent: Any) -> Any:
    return sent["params"], sent["params"], {k: torch.zeros_like(v) for k, v in sent["params"].items()}


def downhill(model: Any, w: Any, batch: Any) -> Any:
    slope = model.grad(w, batch)
    return {k: torch.add(w[k], slope[k], alpha=-0.1) for k in w}


def other_order(model: Any, sent: Any, carry: Any, batch: Any) -> Any:
    slope = model.grad(carry["w"], batch)
    m = {k: 0.9 * carry["m"][k] + slope[k] for k in slope}
    return {"m": m, "w": {k: carry["w"][k] - 0.1 * m[k] for k in m}}


def returned_twice(model: Any, sent: Any, carry: Any, batch: Any) -> Any:
    w, before, m = carry
    new = downhill(model, w, batch)
    return new, new, {k: torch.add(m[k], before[k], alpha=1.0) for k in m}


def the_one_before(model: Any, sent: Any, carry: Any, batch: Any) -> Any:
    w, before, m = carry
    return downhill(model, w, batch), w, {k: torch.add(m[k], before[k], alpha=1.0) for k in m}


def a_view_read_later(model: Any, sent: Any, carry: Any, batch: Any) -> Any:
    w, before, m = carry
    old = {k: v.flatten() for k, v in w.items()}
    new = downhill(model, w, batch)
    return new, before, {k: m[k] + old[k].view(m[k].shape) for k in m}


def in_another_layout(model: Any, sent: Any, carry: Any, batch: Any) -> Any:
    w, before, m = carry
    new = downhill(model, w, batch)
    return {k: v.mT.contiguous().mT if v.dim() > 1 else v for k, v in new.items()}, before, m


CARRIES = {
    "other order": (lambda sent: {"w": sent["params"], "m": three(sent)[2]}, other_order),
    "returned twice": (three, returned_twice),
    "returned twice, begun apart": (lambda sent: (sent["params"], three(sent)[2], three(sent)[2]), returned_twice),
    "in another layout": (three, in_another_layout),
    "the one before": (three, the_one_before),
    "a view read later": (three, a_view_read_later),
}


BUILT_IN = ("fedavg", "fedavg momentum", "fedavg adam", "feddane", "fisher l-bfgs, diagonal")


def named(name: str) -> Any:
    return algorithms(False)[name] if name in BUILT_IN else Own(*CARRIES[name])


def loopback(algorithm: Any, rounds: int = 2) -> Any:
    """The parameters that the loop-back link ends with, which are not those it begins with."""
    federation = problem(False)
    run = fedge.train(algorithm, federation, rounds=rounds, cohort=6, link=Loopback(algorithm, federation))
    assert close(run.params, parameters(algorithm.model)) > 1e-3
    return run.params


@cache
def expected(name: str) -> Any:
    """The same for every engine that is compared with it."""
    return loopback(named(name))


def gap(params: Any, algorithm: Any, link: Any = None, rounds: int = 2, **options: Any) -> float:
    federation = problem(False)
    link = link or Simulator(algorithm, federation, **options)
    return close(params, fedge.train(algorithm, federation, rounds=rounds, cohort=6, link=link).params)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("name", CARRIES)
def test_whatever_is_carried_is_recorded_rightly(name: str, chunk: int) -> None:
    assert gap(expected(name), named(name), chunk=chunk, workers=1) < 1e-10


def test_a_recording_is_used_for_the_layout_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    record, seen = trace.Traced._record, set()

    def strict(self: Any, args: Any, compile: bool) -> Any:
        run, made = record(self, args, compile), [leaf.stride() for leaf in nest.leaves(args[1])]

        def checked(*leaves: Tensor) -> Any:
            first = len(nest.leaves(args[0]))
            assert [leaf.stride() for leaf in leaves[first : first + len(made)]] == made
            seen.add(str(made))
            return run(*leaves)

        return checked

    monkeypatch.setattr(trace.Traced, "_record", strict)
    monkeypatch.setitem(trace.WARM, "cpu", 1)
    algorithm = Own(three, in_another_layout)
    assert gap(loopback(algorithm, 6), algorithm, rounds=6, chunk=100) < 1e-10
    assert len(seen) > 1


def test_an_upload_does_not_lie_where_the_next_fold_will_write() -> None:
    carry = {"w": torch.ones(2, 3)}
    upload, weight = fold._apart(({"w": {"a": carry["w"], "b": torch.ones(2)}}, carry["w"][:, 0]), carry)
    carry["w"].zero_()
    assert bool(upload["w"]["a"].all())
    assert bool(weight.all())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on a CPU: the same buffers and copies, and a replay is the step once more.

    Within one test, a step is recorded once per layout of its inputs: engines of the same algorithm share it. Were it
    another step's, the engine, which compares every recording with the step itself, would warn and refuse it.
    """
    graphs: dict[str, Any] = {}

    class Graph:
        def replay(self) -> None:
            self.step()

    made = captured.Captured.__init__

    def init(self: Any, step: Any, *args: Any, **kwargs: Any) -> None:
        made(self, step, *args, **kwargs)
        self.graph.step = lambda: self._step(step)

    def record(self: Any, args: Any, compile: bool) -> Any:
        """What `Traced._record` does on a GPU."""
        leaves, spec = nest.flatten(args)
        leaves, first = trace.apart(leaves), len(nest.leaves(args[0]))
        layout = str([spec, [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]])
        if layout not in graphs:
            graphs[layout] = self._graph(leaves, spec)
        graph = copy.deepcopy(graphs[layout])
        trace.simplify(graph)
        return self._runner(graph, leaves, range(first, first + len(nest.leaves(args[1]))), compile)

    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(captured.Captured, "__init__", init)
    monkeypatch.setattr(trace.Traced, "_record", record)
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(captured, "_COMPILED", {})
    monkeypatch.setitem(trace.WARM, "cpu", 1)
    monkeypatch.setattr(folding.Folding, "_in_c", False)
    monkeypatch.setattr(folding, "Stacked", lambda *args, coarse: fold.Stacked(*args, coarse=True))


@pytest.mark.parametrize("name", [*CARRIES, *BUILT_IN])
def test_and_captured_rightly(name: str, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while rare shapes are not compiled, and when they are in the end."""
    monkeypatch.setattr(trace, "OFTEN", 12)
    share = trace.SHARE
    for compile, rare in product((False, True), repeat=2):
        monkeypatch.setattr(trace, "SHARE", share if rare else 0)
        captured_rightly(name, compile, rare)


def captured_rightly(name: str, compile: bool, rare: bool) -> None:
    algorithm = named(name)
    link = Simulator(algorithm, problem(False), chunk=100)
    link.compile = compile
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gap(expected(name), algorithm, link) < 1e-10
    steps = [one.step for one in link._folds.values()]
    found = [(run, shapes in step._simple) for step in steps for shapes, run in step.recorded.items()]
    assert found
    assert all(isinstance(run, captured.Captured) for run, _ in found)
    assert all((run.rest is not None) == (compile and not simple) for run, simple in found)
    assert rare or not any(simple for _, simple in found)


def test_a_rare_shape_is_compiled_when_it_has_become_frequent(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with 15 and with 16 steps: the few at work in the last step are a shape of their own."""
    data = toy_data(180)
    federation = fedge.Federation(data, [np.arange(20 * k, 20 * k + 15 + (k > 5)) for k in range(9)])
    algorithm = fedge.FedAvg(toy_model(), epochs=1, batch_size=1)
    expected = fedge.train(algorithm, federation, rounds=12, link=Loopback(algorithm, federation))
    for often, simple in ((20_000, {4: True, 9: False}), (6, {4: False, 9: False})):
        monkeypatch.setattr(trace, "OFTEN", often)
        link = Simulator(algorithm, federation, chunk=100)
        link.compile = True
        found = fedge.train(algorithm, federation, rounds=12, link=link)
        assert close(found.params, expected.params) < 1e-12
        (step,) = [one.step for one in link._folds.values()]
        assert {len(run.buffers[-1]): shapes in step._simple for shapes, run in step.recorded.items()} == simple


class Numpy(torch.autograd.Function):
    """Computes outside torch, with a rule for many jobs."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return g * (1 - out * out)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Numpy.apply(x), in_dims[0]


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Numpy.apply(self.first(x)))


@pytest.mark.parametrize(("chunk", "workers"), [(1, 1), (1, 3), (100, 1)])
def test_what_is_computed_outside_torch_is_not_recorded(chunk: int, workers: int) -> None:
    torch.manual_seed(0)
    algorithm = fedge.FedAvg(Outside().double(), epochs=6, batch_size=4)
    params = loopback(algorithm)
    with pytest.warns(UserWarning, match="depends on values outside torch"):
        found = gap(params, algorithm, chunk=chunk, workers=workers)
    assert found < 1e-10


def test_a_window_of_many_pixels_is_left_to_autograd() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 14, 14, generator=g), torch.arange(60) % 3
    federation = fedge.Federation(fedge.data.Data(x, y, x, y, 3), [np.arange(10) + 10 * k for k in range(6)])
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(12), nn.Flatten(), nn.Linear(4, 3))
    algorithm = fedge.FedAvg(model, epochs=1, batch_size=5)
    link = Simulator(algorithm, federation, chunk=100)
    assert "window of more than 127 pixels" in str(link.slower)
    fedge.train(algorithm, federation, rounds=1, link=link)


def test_an_engine_that_is_not_used_any_more_is_freed() -> None:
    algorithm, federation = algorithms(True)["fedavg"], problem(True)
    before = set(threading.enumerate())
    link = Simulator(algorithm, federation, workers=3)
    fedge.train(algorithm, federation, rounds=2, cohort=6, link=link)
    threads = set(threading.enumerate()) - before
    gone = weakref.ref(link)
    assert threads
    del link
    for _ in range(50):
        gc.collect()
        if gone() is None and not any(one.is_alive() for one in threads):
            break
        time.sleep(0.1)
    assert gone() is None
    assert not any(one.is_alive() for one in threads)


def test_a_frozen_layer_is_part_of_a_compiled_step(emulated: None) -> None:
    def graph(value: float) -> Any:
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, value).requires_grad_(False)
        found = make_fx(lambda w: [torch.add(w, layer.weight @ w, alpha=-0.1)])(torch.ones(2))
        split_updates(found, range(1))
        return found

    leaves = [torch.ones(2)]
    first = captured.compiled(graph(1.0), leaves)
    assert captured.compiled(graph(1.0), leaves) is first
    assert captured.compiled(graph(2.0), leaves) is not first


def test_factors_that_are_carried_are_not_read_after_they_were_overwritten() -> None:
    g = torch.Generator().manual_seed(0)
    a, b, total = (torch.randn(3, 4, 4, generator=g) for _ in range(3))

    def step(a: Tensor, b: Tensor, total: Tensor) -> list[Tensor]:
        product = torch.bmm(a, b)
        return [torch.add(a, a * a, alpha=0.3), torch.add(b, b * b, alpha=-0.1), torch.add(total, product, alpha=0.5)]

    expected = step(a, b, total)
    fused = make_fx(step)(a, b, total)
    update_in_place(fused, range(3), fuse=True)
    parted = make_fx(step)(a, b, total)
    rest = split_updates(parted, range(3))
    assert rest.updates == []
    held = [leaf.clone() for leaf in (a, b, total)]
    parted(*held, *(torch.tensor(number) for number in rest.numbers))
    for found in (fused(a.clone(), b.clone(), total.clone()), held):
        assert max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True)) < 1e-5


def test_nests_are_taken_apart_and_put_together() -> None:
    pair = namedtuple("pair", "x y")
    one, two, last = torch.ones(1), torch.ones(2), torch.ones(3)
    for made in (
        {"a": one, "b": (two, {"c": last})},
        pair(one, [two, last]),
        (one, OrderedDict(z=two, a=last), ()),
        torch.max(torch.rand(2, 3), 1),
    ):
        leaves, spec = nest.flatten(made)
        again = nest.unflatten(leaves, spec)
        assert type(again) is type(made)
        assert nest.flatten(again)[1] == spec
        assert all(a is b for a, b in zip(nest.leaves(again), leaves, strict=True))
    leaves, spec = nest.flatten({"a": one, "b": {"c": two, "d": last}})
    assert [id(leaf) for leaf in leaves] == [id(one), id(two), id(last)]
    found = nest.leaves_as({"b": {"d": last, "c": two}, "a": one}, spec)
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    with pytest.raises(TypeError, match="another structure than the one it got"):
        nest.leaves_as({"a": one, "b": {"c": two}}, spec)
    with pytest.raises(ValueError, match="different structure"):
        nest.map_(torch.add, {"a": one}, {"b": one})


def test_only_tensors_are_carried() -> None:
    algorithm, federation = Own(lambda sent: (sent["params"], None), returned_twice), problem(False)
    with pytest.raises(RuntimeError, match="start returned a NoneType in the carry"):
        fedge.train(algorithm, federation, rounds=1, link=Simulator(algorithm, federation, chunk=1))


def test_large_clients_are_shuffled_as_small_ones() -> None:
    """With too many examples for one word there is another way to sort; both give the same order."""
    g = np.random.default_rng(0)
    for count in (5, 70, 300):
        lengths = g.integers(1, 40, count)
        segment = np.repeat(np.arange(count), lengths)
        within = np.concatenate([np.arange(n) for n in lengths])
        key = g.integers(0, 50, len(segment))  # many ties: by position
        one_by_one = [(within[segment == one], key[segment == one]) for one in range(count)]
        wanted = np.concatenate([places[np.argsort(keys, kind="stable")] for places, keys in one_by_one])
        assert (wanted != within).any()
        assert (batches._in_order(segment, key, within, int(lengths.max())) == wanted).all()
        assert (batches._in_order(segment, key, within, 1 << 30) == wanted).all()


def test_what_is_spent_is_overwritten_only_if_nothing_else_lies_there() -> None:
    """A carry that shares its memory with what was sent must not take the difference of the two."""

    def difference(sent: dict[str, Tensor], carry: dict[str, Tensor]) -> Tensor:
        return carry["w"] - sent["w"]

    run = Replayed(difference, spends=1)
    for _ in range(10):
        sent, carry = {"w": torch.ones(3)}, {"w": torch.full((3,), 3.0)}
        assert run(sent, carry).tolist() == [2.0] * 3
    assert carry["w"].tolist() == [2.0] * 3, "recorded, and written in place"
    assert run(sent, sent).tolist() == [0.0] * 3
    assert sent["w"].tolist() == [1.0] * 3
