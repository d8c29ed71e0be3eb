"""Steps of small models as C programs, one call for a whole block of steps of all jobs."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedge.core import Batch, Carry, Payload
from fedge.engine.recording import pytree
from fedge.engine.recording.c_library import NoCompiler, load
from fedge.engine.recording.c_source import NoRule, Source
from fedge.engine.recording.cuda_graph import Function
from fedge.engine.recording.graph_passes import simplify, update_in_place
from fedge.engine.recording.recorder import Traced, apart, check_same
from fedge.engine.recording.untouched import untouched
from fedge.once import is_new

log = logging.getLogger("fedge")
LARGEST = 1 << 18  # bytes that a job carries: beyond a core's second cache a library's products are faster


class Program:
    """One step for certain shapes: `run` overwrites the carry."""

    def __init__(self, step: Function, args: tuple[Any, ...]) -> None:
        flat, spec = pytree.flatten(args)
        counts = [len(pytree.leaves(arg)) for arg in args]
        self.sent, self.carry = counts[0], range(counts[0], counts[0] + counts[1])
        if sum(flat[i].nbytes for i in self.carry) > LARGEST:
            raise NoRule(f"a client carries more than {LARGEST >> 10} KiB")

        def plainly(*leaves: Tensor) -> list[Tensor]:
            given = pytree.unflatten(list(leaves), spec)
            return pytree.leaves_as(step(*given), pytree.flatten(given[1])[1])

        try:
            graph = make_fx(plainly)(*apart(flat))
        except Exception as error:
            raise NoRule(f"a client's step cannot be recorded ({str(error).splitlines()[0]})") from error
        simplify(graph)
        update_in_place(graph, self.carry, fuse=False)
        source = Source(graph, flat, self.carry)
        self.constants = source.constants
        self.function, self.fresh = load(source.text)
        self._fixed = (ctypes.c_void_p * max(1, len(self.constants)))(*[one.data_ptr() for one in self.constants])

    def run(self, sent: list[Tensor], stacked: list[bool], carry: list[Tensor], block: Batch, rows: Tensor) -> None:
        """All steps of a block [T, J, ...] for all jobs; sent parts have a job axis where `stacked` says so."""
        steps, jobs = block.mask.shape[:2]
        sent = [leaf.contiguous() for leaf in sent]
        batch = [leaf.contiguous() for leaf in block]
        by_job = [leaf.numel() // jobs if own else 0 for leaf, own in zip(sent, stacked, strict=True)]
        by_job += [leaf.numel() // jobs for leaf in carry] + [leaf.numel() // (steps * jobs) for leaf in batch] + [1]
        by_step = [0] * (len(sent) + len(carry)) + [leaf.numel() // steps for leaf in batch] + [0]
        leaves = [*sent, *carry, *batch, rows.contiguous()]
        words = ctypes.c_int64 * len(leaves)
        pointers = (ctypes.c_void_p * len(leaves))(*[leaf.data_ptr() for leaf in leaves])
        counts = ctypes.c_int64(jobs), ctypes.c_int64(steps)
        self.function(*counts, pointers, words(*by_job), words(*by_step), self._fixed)


class Native:
    """A task's step in C where that is possible; any other step is taken as it was recorded."""

    def __init__(self, one: Function, many: Traced, dims: dict[str, int | None]) -> None:
        self.one, self.many, self.dims = one, many, dims
        self.programs: dict[Any, Program | None] = {}  # by the shapes of one job
        self._stacks: dict[Any, Program | None] = {}  # by those of a whole stack: quicker to find

    def fold(self, sent: Payload, carry: Carry, blocks: Iterable[Batch], rows: Tensor) -> Carry:
        """The carry after all steps of these blocks."""
        leaves, stacked = self._sent(sent)
        flat, spec = pytree.flatten(carry)
        kind = (spec, *sent, *[(leaf.shape, leaf.dtype) for leaf in (*leaves, *flat)])
        for block in blocks:
            shapes = (kind, *[(leaf.shape, leaf.dtype) for leaf in pytree.leaves(block)])
            if shapes not in self._stacks:
                self._stacks[shapes] = self._for_one(sent, pytree.unflatten(flat, spec), block, rows)
            if (program := self._stacks[shapes]) is not None:
                flat = [leaf.contiguous() for leaf in flat]
                program.run(leaves, stacked, flat, block, rows)
                continue
            for found in self.many.fold(sent, pytree.unflatten(flat, spec), [steps_of(block)], rows):
                flat = flat if found is None else pytree.leaves_as(found, spec)
        return pytree.unflatten(flat, spec)

    def _sent(self, sent: Payload) -> tuple[list[Tensor], list[bool]]:
        pairs = [(leaf, self.dims[name] is not None) for name, part in sent.items() for leaf in part.values()]
        return [leaf for leaf, _ in pairs], [own for _, own in pairs]

    def _for_one(self, sent: Payload, carry: Carry, block: Batch, rows: Tensor) -> Program | None:
        if not isinstance(block.x, Tensor):
            _tell("steps are not compiled: the model takes several inputs", logging.WARNING)
            return None
        leaves, stacked = self._sent(sent)
        flat, spec = pytree.flatten(carry)
        kind: tuple[Any, ...] = (spec, tuple((name, *part) for name, part in sent.items()))
        kind += tuple((leaf.shape[own:], leaf.dtype) for leaf, own in zip(leaves, stacked, strict=True))
        kind += tuple((leaf.shape[1:], leaf.dtype) for leaf in flat)
        kind += tuple((leaf.shape[2:], leaf.dtype) for leaf in block)
        if kind not in self.programs:
            self.programs[kind] = self._made(sent, carry, block, rows)
        return self.programs[kind]

    def _made(self, sent: Payload, carry: Carry, block: Batch, rows: Tensor) -> Program | None:
        """The program, after it was compared with the step itself on the first step of these jobs."""
        try:
            begin = time.perf_counter()
            found = Program(self.one, self._first_job(sent, carry, block, rows))
            self._compare(found, sent, carry, block, rows)
        except (NoRule, NoCompiler) as reason:
            _tell(f"steps are not compiled: {reason}", logging.WARNING)
            return None
        _tell(
            f"steps are compiled to C ({time.perf_counter() - begin:.1f} s{'' if found.fresh else ', from the cache'})"
        )
        return found

    def _first_job(self, sent: Payload, carry: Carry, block: Batch, rows: Tensor) -> tuple[Any, ...]:
        own = {n: part if self.dims[n] is None else pytree.map_(lambda t: t[0], part) for n, part in sent.items()}
        first = Batch(*(leaf[0, 0].clone() for leaf in block))
        return own, pytree.map_(lambda t: t[0].clone(), carry), first, rows[0]

    def _compare(self, program: Program, sent: Payload, carry: Carry, block: Batch, rows: Tensor) -> None:
        flat, spec = pytree.flatten(carry)
        first = Batch(*(leaf[0] for leaf in block))
        with untouched(True, sent=sent, carry=carry, batch=first):
            expected = pytree.leaves_as(self.many.function(sent, carry, first, rows), spec)
        found = [leaf.clone(memory_format=torch.contiguous_format) for leaf in flat]
        program.run(*self._sent(sent), found, Batch(*(leaf[:1] for leaf in block)), rows)
        try:
            check_same(flat, expected, found)
        except RuntimeError as error:
            raise NoRule(str(error)) from error


def steps_of(block: Batch) -> Iterator[Batch]:
    """The steps of a block of steps."""
    if isinstance(block.x, Tensor):
        return map(Batch, *[leaf.unbind() for leaf in block])
    leaves, spec = pytree.flatten(block)
    return (pytree.unflatten(list(step), spec) for step in zip(*(leaf.unbind() for leaf in leaves), strict=True))


def _tell(what: str, level: int = logging.INFO) -> None:
    """Once for every reason."""
    if is_new(what):
        log.log(level, what)
