"""Several runs at a time, one process each, so that together they fill a GPU."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedge.engine.hardware.budget import is_out_of_memory
from fedge.experiment import ExperimentError
from fedge.sweep.entries import Entry
from fedge.sweep.files import Files
from fedge.sweep.halving import tune
from fedge.sweep.kept import Kept, run_kept
from fedge.sweep.runner import RESULTS, Runner, Stopped, release
from fedge.sweep.store import LOCKS, Line, Store

log = logging.getLogger(__name__)

LOOK = 0.2  # seconds between two looks at whether to stop
CONTEXT = get_context("spawn")


class Tuning(NamedTuple):
    """One method to be tuned on one data set; its trials follow from one another."""

    files: Files
    dataset: str
    method: str
    rounds: int | None

    def __str__(self) -> str:
        return f"tuning of {self.method} on {self.dataset}"


Unit = Entry | Tuning | Kept


class LostWorker(RuntimeError):
    """A process is gone, and what it was at."""


def run_in_processes(
    runner: Runner,
    units: Iterable[Unit],
    processes: int,
    done: Callable[[Unit, Line | None], None] = lambda unit, line: None,
    start: Callable[..., Executor] | None = None,
) -> None:
    """All units, at most so many at a time; every process writes its results itself, at once.

    When the runner is to stop or one process fails, all processes stop, each with a checkpoint. Units that ran out of
    memory beside the others are run again afterwards, in half as many processes. `start` starts them: see `spawn`.
    """
    units, few = list(units), processes
    if units and not LOCKS:
        raise ExperimentError("several processes need locks on files, which this system does not have: use --jobs 1")
    while units:
        if runner.stop():
            raise Stopped
        few = min(few, len(units))
        cramped = _pass(runner, units, few, done, start or spawn)
        if cramped and few == 1:
            raise MemoryError(f"{cramped[0]} ran out of memory, with no other run beside it")
        if cramped:
            log.warning("%d of %d had no memory beside others: again, %d at a time", len(cramped), len(units), few // 2)
        units, few = cramped, few // 2


def spawn(processes: int, *about: Any) -> Executor:
    """Processes, each of which calls `work_for` with `about`; a forked process could not use the GPU."""
    return ProcessPoolExecutor(processes, CONTEXT, initializer=_begin, initargs=(processes, *about))


def _pass(
    runner: Runner,
    units: list[Unit],
    processes: int,
    done: Callable[[Unit, Line | None], None],
    start: Callable[..., Executor],
) -> list[Unit]:
    """Every unit once; returns those that ran out of memory."""
    stop = CONTEXT.RawValue("b", 0)  # without a lock, which a process that dies would keep
    others = set(active_children())  # of whoever uses this
    seen = _Seen(done)
    with start(processes, stop, runner.out, runner.device, runner.engine) as pool:
        try:
            with _no_interrupt():  # nor in the processes that begin here
                at_work: dict[Future[Line | None], Unit] = {pool.submit(_do, unit): unit for unit in units}
            while at_work:
                for future in wait(at_work, LOOK, FIRST_COMPLETED).done:
                    seen.take(at_work.pop(future), future)
                if seen.failure is not None or runner.stop():
                    stop.value = 1
        except BaseException:  # the second Ctrl-C: at once
            for child in {*active_children()} - others:
                child.terminate()
            raise
    with nullcontext() if seen.failure is None else suppress(ExperimentError):  # which would hide it
        runner.store = Store(runner.out / RESULTS)
    seen.check(processes)
    return seen.cramped


class _Seen:
    """How the units of a pass ended: which ran out of memory, and the first real failure."""

    def __init__(self, done: Callable[[Unit, Line | None], None]) -> None:
        self.done = done
        self.cramped: list[Unit] = []
        self.failure: Exception | None = None

    def take(self, unit: Unit, future: Future[Line | None]) -> None:
        if isinstance(error := future.exception(), MemoryError):
            self.cramped.append(unit)
            log.warning("%s: %s", unit, error)
            return
        try:
            self.done(unit, future.result())
        except Exception as wrong:
            self.failure = _worse(self.failure, wrong)

    def check(self, processes: int) -> None:
        if isinstance(self.failure, BrokenProcessPool):
            raise LostWorker(
                f"one of {processes} processes ended without a message: was it killed, or is there too little memory "
                "for so many? The same command goes on from here; lower --jobs if it happens again"
            ) from self.failure
        if self.failure is not None:
            raise self.failure


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C comes afterwards, and not at all to processes that were begun meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worse(one: Exception | None, other: Exception) -> Exception:
    """The first error that is more than a request to stop."""
    return other if one is None or isinstance(one, Stopped) else one


_runner: Runner  # of a process of the pool


def _begin(processes: int, *about: Any) -> None:
    """What a process needs before its first unit. Ctrl-C is for the one that gives out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    work_for(processes, *about)


def work_for(processes: int, stop: Any, out: Path, device: str, engine: dict[str, Any]) -> None:
    """Makes the runner that the units given to this process are run with."""
    global _runner
    _runner = Runner(out, device, engine, stop=lambda: bool(stop.value), at_a_time=processes)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(unit: Unit) -> Line | None:
    try:
        if isinstance(unit, Entry):
            return _runner.run(unit)
        if isinstance(unit, Kept):
            return run_kept(_runner, unit)
        tune(_runner, unit.files, unit.dataset, unit.rounds, [unit.method])
        return None
    except Exception as error:
        if not is_out_of_memory(error):
            raise _sendable(error) from error
        short = MemoryError(str(error))  # without the frames, which hold what there was no room for
    release()
    raise short


def _sendable(error: Exception) -> Exception:
    """The error, or its words if it cannot be sent to another process."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
