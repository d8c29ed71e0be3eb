"""A vectorised step, recorded once as a plain list of tensor operations and replayed.

vmap and grad cost more than the arithmetic of a small model: they interpret the step anew every time. After a step has
been taken `WARM` times with the same shapes, on a CPU often enough to repay it in the rest of the run (`payoff`), it is
recorded below those layers and the recording is run from then on:
on a CPU the same operations in the same order, so the same bits; on a GPU as one CUDA graph, launched as a whole. What
cannot be recorded goes on as before. Compiling takes seconds and is kept for shapes that many steps share. On a CPU,
stacks of two heights are recorded, and those of other heights follow from them (`heights`).

The carry belongs to the step: it may be overwritten.
"""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedge.core import Batch, Carry, Payload
from fedge.engine.hardware.budget import is_out_of_memory
from fedge.engine.recording import pytree
from fedge.engine.recording.cuda_graph import Captured, Function, compiled
from fedge.engine.recording.graph_passes import call_directly, simplify, split_updates, update_in_place
from fedge.engine.recording.heights import Heights
from fedge.engine.recording.memory_passes import reuse_memory, side_by_side
from fedge.engine.recording.payoff import Ahead, Payoff, Step, endless
from fedge.engine.recording.reasons import reason
from fedge.engine.recording.untouched import untouched

WARM = {"cpu": 8, "cuda": 3}
MOST = {"cpu": 64, "cuda": 8}  # recordings kept of one step; on a GPU each holds its own buffers
SHARE, OFTEN = 1 / 8, 20_000  # of all calls, or so many calls: then shapes are worth compiling


@contextmanager
def at_once() -> Iterator[None]:
    """Within it, a step is recorded the first time that it is taken."""
    with _after(0):
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within it, no step is recorded."""
    with _after(sys.maxsize):
        yield


@contextmanager
def _after(calls: int) -> Iterator[None]:
    before = dict(WARM)
    WARM.update(dict.fromkeys(WARM, calls))
    try:
        yield
    finally:
        WARM.update(before)


class Traced:
    """A step (sent, carry, batch, row) -> carry, recorded for every set of shapes it is often called with."""

    def __init__(self, function: Function, compile: bool = False, ahead: Ahead = endless) -> None:
        self.function, self.compile = function, compile
        self.calls: Counter[Any] = Counter()
        self.payoff = Payoff(ahead)
        self.recorded: dict[Any, Function] = {}
        self._trials: dict[Any, Function] = {}  # recorded, and not yet compared on other numbers
        self._refused: set[Any] = set()  # shapes that cannot be recorded: every thread takes its own step
        self._simple: set[Any] = set()  # recorded and not compiled, because they were rare
        self._seen: set[Any] = set()
        self._kinds: dict[Any, int] = {}
        self._shapes: dict[Any, int] = {}  # numbers for what takes long to look up
        self._numbers = count()  # no two threads get the same one
        self._heights: dict[Any, Heights] = {}  # by all shapes but the height of the stack

    @property
    def settled(self) -> bool:
        """Whether all that it was called with so far is recorded, or cannot be."""
        return not self._trials and bool(self.recorded or self._refused)

    @property
    def holds_the_carry(self) -> bool:
        """Whether the carry lies in buffers of its own, which the next fold overwrites."""
        return any(isinstance(run, Captured) for run in self.recorded.values())

    def fold(
        self,
        sent: Payload,
        carry: Carry,
        groups: Iterable[Iterable[Batch]],
        row: Tensor,
        function: Function | None = None,
    ) -> Iterator[Carry | None]:
        """Step over groups of batches, each of one shape; yields None before each step, and the carry after the last.

        `function` is the same step for another thread: it replays what is recorded, and records nothing.
        """
        fixed, sent_spec = pytree.flatten(sent)
        flat, spec = pytree.flatten(carry)
        kind = (sent_spec, spec, row.shape, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in (*fixed, *flat)))
        name = self._kinds.setdefault(kind, next(self._numbers))
        for group in groups:
            run: Function | None = None
            replayed = 0
            for batch in group:
                yield None
                parts = batch if isinstance(batch.x, Tensor) else pytree.leaves(batch)
                if run is not None:
                    flat = run(*fixed, *flat, *parts, row)
                    replayed += 1
                    continue
                types = [leaf.dtype for leaf in parts[:-3]]
                whole = (name, *types, *[leaf.shape for leaf in parts], *[leaf.stride() for leaf in flat])
                shapes = self._shapes.setdefault(whole, next(self._numbers))
                if (known := self._known(shapes)) is not None:
                    before, flat = flat, known(*fixed, *flat, *parts, row)
                    run = known if _alike(before, flat) else None  # if it is once, it is from then on
                    replayed += 1
                    continue
                args = (sent, pytree.unflatten(flat, spec), batch, row)
                with untouched(self._is_new(shapes), sent=fixed, carry=flat, batch=list(parts)):
                    if function is not None:
                        flat = pytree.leaves_as(function(*args), spec)
                        continue
                    step = Step(shapes, *_stack(args))
                    expected = pytree.leaves_as(self.payoff.timed(step, self._warm(row), self.function, *args), spec)
                if shapes in self._trials:
                    self._try(shapes, args, expected)
                elif shapes not in self._refused and not self._followed(shapes, args, expected):
                    self._count(step, args)
                flat = expected
            if self.compile and replayed:
                self.calls[shapes] += replayed  # the shapes of the whole group
        yield pytree.unflatten(flat, spec)

    def _is_new(self, shapes: Any) -> bool:
        """Whether no such step was taken before."""
        new = shapes not in self._seen
        self._seen.add(shapes)
        return new

    def _known(self, shapes: Any) -> Function | None:
        """The recording for these shapes; none if it is time to make a compiled one in its place."""
        known = self.recorded.get(shapes)
        if known is None or shapes not in self._simple or not self._worth_compiling(shapes):
            return known
        self._simple.remove(shapes)
        del self.recorded[shapes]
        return None

    def _worth_compiling(self, shapes: Any) -> bool:
        return self.calls[shapes] >= min(OFTEN, SHARE * self.calls.total())

    def _warm(self, row: Tensor) -> int:
        """How often a step is taken before it is recorded."""
        return WARM.get(row.device.type, 8)

    def _count(self, step: Step, args: tuple[Any, ...]) -> None:
        shapes, warm, most = step.shapes, self._warm(args[3]), MOST.get(args[3].device.type, 64)
        self.calls[shapes] += 1
        if step.family in self._heights and self._heights[step.family].given_up:
            self.payoff.part(step.family)
        if self.payoff.calls(step) > warm and len(self.recorded) < most and self.payoff.pays(step, warm):
            begin = time.perf_counter()
            compile = self.compile and self._worth_compiling(shapes)
            run = self._record(args, compile)
            self.payoff.recorded(step, time.perf_counter() - begin)
            if run is None:
                self._refused.add(shapes)
                return
            self._trials[shapes] = run
            if self.compile and not compile:
                self._simple.add(shapes)

    def _try(self, shapes: Any, args: tuple[Any, ...], expected: list[Tensor]) -> None:
        """Use a recording from now on if it does the same on other numbers than those that it was made with.

        It does not if the step computed something outside torch: that was recorded as a constant.
        """
        run = self._trials.pop(shapes)
        leaves = pytree.leaves(args)
        try:
            check_same(pytree.leaves(args[1]), expected, run(*[leaf.clone() for leaf in leaves]))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            warnings.warn("a step depends on values outside torch: it is not recorded, and slower", stacklevel=2)
            self._refused.add(shapes)
        else:
            self.recorded[shapes] = run

    def _followed(self, shapes: Any, args: tuple[Any, ...], expected: list[Tensor]) -> bool:
        """Whether there is now a recording that follows from those of other heights, and does what the step did."""
        heights = self._heights.get(_but_height(args)) if self._heights else None
        if heights is None or len(self.recorded) >= MOST["cpu"]:
            return False
        try:
            if (graph := heights.at(len(args[3]))) is None:
                return False
            found = graph.forward(*[leaf.clone() for leaf in pytree.leaves(args)])
            check_same(pytree.leaves(args[1]), expected, found)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            heights.give_up()
            return False
        self.recorded[shapes] = graph.forward
        return True

    def _plainly(self, spec: Any) -> Function:
        """The step itself, from its flat arguments and to its flat carry."""

        def run(*leaves: Tensor) -> list[Tensor]:
            args = pytree.unflatten(list(leaves), spec)
            return pytree.leaves_as(self.function(*args), pytree.flatten(args[1])[1])

        return run

    def _record(self, args: tuple[Any, ...], compile: bool) -> Function | None:
        flat, spec = pytree.flatten(args)
        leaves = apart(flat)
        counts = [len(pytree.leaves(arg)) for arg in args]
        carry = range(counts[0], counts[0] + counts[1])
        gpu = leaves[0].device.type == "cuda"
        try:
            graph = self._graph(leaves, spec)
            simplify(graph)
            if gpu:
                return self._runner(graph, leaves, carry, compile)
            update_in_place(graph, carry, fuse=False)
            side_by_side(graph)
            reuse_memory(graph)
            call_directly(graph)
            if args[3].dim():
                self._heights.setdefault(_but_height(args), Heights()).add(len(args[3]), graph)
            return graph.forward
        except Exception as error:
            if is_out_of_memory(error):
                raise
            warnings.warn(f"a step could not be recorded and runs slower: {reason(error)}", stacklevel=2)
            return None

    def _runner(self, graph: GraphModule, leaves: list[Tensor], carry: range, compile: bool) -> Captured:
        """On a GPU: the recording, compiled if that is wanted and possible, as one CUDA graph."""
        if compile:
            try:
                parted = copy.deepcopy(graph)
                rest = split_updates(parted, carry)
                captured = Captured(compiled(parted, leaves), leaves, carry, rest)
                graph.recompile()
                check_same([leaves[i] for i in carry], graph.forward(*leaves), captured(*leaves))
                return captured
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                line = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
                warnings.warn(f"a step could not be compiled and runs as it was recorded: {line}", stacklevel=2)
        update_in_place(graph, carry, fuse=True)
        return Captured(graph.forward, leaves, carry)

    def _graph(self, leaves: list[Tensor], spec: Any) -> GraphModule:
        with one_mode(leaves):
            return make_fx(self._plainly(spec))(*leaves)


def one_mode(leaves: list[Tensor]) -> AbstractContextManager[Any]:
    """Within it, on a CPU, the shapes of all that is recorded are noted in one mode: torch makes a mode per tensor if
    there is none, which is half of what a recording costs. On a GPU the first round takes no less with it."""
    if leaves[0].device.type != "cpu":
        return nullcontext()
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))


def _stack(args: tuple[Any, ...]) -> tuple[Any, int]:
    """On a CPU, what stacks of all heights have in common, and the height."""
    return (_but_height(args), len(args[3])) if args[3].dim() and args[3].device.type == "cpu" else (None, 0)


def _but_height(args: tuple[Any, ...]) -> Any:
    """The shapes of a stacked step without its height, which is the first size of everything that has a client axis."""
    leaves, spec = pytree.flatten(args)
    return spec, *((leaf.shape[1:], leaf.stride(), leaf.dtype) for leaf in leaves)


def apart(leaves: list[Tensor]) -> list[Tensor]:
    """Every leaf a tensor of its own: two that share one tensor now would be recorded as one for good."""
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    return [leaf if first[id(leaf)] == i else leaf.clone() for i, leaf in enumerate(leaves)]


def check_same(before: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> None:
    """Refuse a recorded or compiled step that does not do what the step itself does, up to rounding.

    What is compared is where each part of the carry moved; the slack is that of bfloat16, except in double precision.
    """
    for old, wanted, got in zip(before, expected, found, strict=True):
        if not wanted.is_floating_point():
            same = torch.equal(wanted, got)
        else:
            moved, gap = float((wanted - old).norm()), float((wanted - got).norm())
            slack = 1e-7 if wanted.dtype == torch.float64 else 0.3 if wanted.device.type == "cuda" else 1e-3
            same = gap <= slack * moved + 1e-6 * float(wanted.norm()) or not math.isfinite(moved)
        if not same:
            raise RuntimeError("it gives other results")


def _alike(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether the carry lies in memory as it did; most steps overwrite it, and then there is nothing to compare."""
    return all(a is b or a.stride() == b.stride() for a, b in zip(before, after, strict=True))
