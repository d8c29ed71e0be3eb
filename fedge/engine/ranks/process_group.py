"""Processes that train together: who they are, and the few things that they tell each other.

`torchrun` starts the same program several times, each a *rank*. Here one process alone is a group of one, so nothing
that uses a group has to ask whether there is another rank.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fedge.checks import positive

T = TypeVar("T")
LET_GO = 5.0  # seconds
TIMEOUT = 600.0  # seconds: rank 0 may evaluate and write for so long while the others wait
CPU = torch.device("cpu")


class RankError(RuntimeError):
    """Something went wrong on another rank, which says what."""


class RankLost(RankError):
    """Another rank ended or does not answer."""


class Group:
    """A process alone: rank 0 of one."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that evaluates, writes and prints."""
        return self.rank == 0

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; its error too."""
        return make()

    def gather(self, thing: T) -> list[T]:
        """One value from every rank."""
        return [thing]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on all of them; in place."""
        return tensor

    def place(self, device: torch.device | str) -> torch.device:
        """The device of this rank, of the kind that was asked for."""
        return torch.device(device)

    def speaks(self) -> bool:
        """Whether this rank is the one to report what all of them see; true for the first that asks."""
        return True

    def meet(self) -> None:
        """Wait until rank 0 has come here too: torchrun ends all ranks when one of them fails."""

    def leave(self) -> None:
        """The end of the group."""

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return any(self.gather(flag))

    def check(self, error: Exception | None) -> None:
        """Raise on every rank if one has an error: there the error itself, elsewhere one line that names it."""
        found = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, line in enumerate(found):
            if line is not None:
                raise RankError(f"rank {rank}: {line}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A piece of work that every rank does for itself: all have done it, or all raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        self.check(error)


class Processes(Group):
    """The ranks of torch's default process group."""

    def __init__(self, store: Any = None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed has no process group: use `with fedge.engine.joined() as group`")
        self.rank, self.size, self.store = dist.get_rank(), dist.get_world_size(), store
        self.local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.beside = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))  # ranks on this machine

    def first(self, make: Callable[[], T]) -> T:
        found: list[Any] = [None, None]
        if self.leads:
            try:
                found[0] = make()
            except Exception as error:
                found[1] = error
        with _peers():
            dist.broadcast_object_list(found, device=CPU)
        if found[1] is not None:
            raise found[1]
        made: T = found[0]
        return made

    def gather(self, thing: T) -> list[T]:
        """As messages from each rank to all: `all_gather_object` would take a GPU for it, if there is one."""
        found: list[list[Any]] = [[thing if rank == self.rank else None] for rank in range(self.size)]
        with _peers():
            for rank, one in enumerate(found):
                dist.broadcast_object_list(one, src=rank, device=CPU)
        return [one[0] for one in found]

    def sum(self, tensor: Tensor) -> Tensor:
        with _peers():
            dist.all_reduce(tensor)
        return tensor

    def place(self, device: torch.device | str) -> torch.device:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is '{device}', several processes train on 'cpu' or 'cuda'")
        if device.type == "cpu":
            return device
        there = torch.cuda.device_count()
        if device.index is not None and self.beside > 1:
            raise ValueError(f"device is '{device}' for {self.beside} processes: use 'cuda', and each gets its own")
        if device.index is None and self.beside > there:
            raise ValueError(
                f"{self.beside} processes need as many GPUs, there are {there}: start {there}, or use 'cpu'"
            )
        chosen = torch.device("cuda", self.local if device.index is None else device.index)
        torch.cuda.set_device(chosen)
        return chosen

    def speaks(self) -> bool:
        try:
            return self.store is None or self.store.add("fedge/said", 1) == 1
        except RuntimeError:
            return True

    def meet(self) -> None:
        if dist.is_initialized():
            self.first(lambda: None)

    def leave(self) -> None:
        if dist.is_initialized():
            self._part()
            dist.destroy_process_group()

    def _part(self) -> None:
        """A last message, and a wait until gloo has released it.

        A thread of gloo frees a message's tensors some time after the message has arrived, for which it needs the GIL.
        If the interpreter is shutting down by then, the process aborts, after a run that went well.
        """
        last = torch.zeros(1)
        with _peers():
            dist.broadcast(last, 0)
        held, end = weakref.ref(last), time.monotonic() + LET_GO
        del last
        while held() is not None and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)  # another gloo thread may still hold an earlier message


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of any backend: a closed connection, a timeout
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = re.sub(r"^\[[^\]]*\]\s*", "", line)  # gloo begins with a place in its source
        raise RankLost(f"another process of this run died or does not answer ({why[:120]})") from error


@contextmanager
def joined(timeout: float = TIMEOUT, environment: Mapping[str, str] = os.environ) -> Iterator[Group]:
    """The group of a program that torchrun started, or a group of one.

    with joined() as group:
        run = train(algorithm, federation, rounds=10, link=Ranks(algorithm, federation, group=group))

    `timeout`: seconds to wait for another rank. GPUs talk by NCCL, everything else goes through gloo.
    """
    positive("timeout", timeout)
    if int(environment.get("WORLD_SIZE", 1)) == 1:
        yield Group()
        return
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of_a_rank(environment))
    try:
        with _peers():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
        group = Processes(store)
        yield group
        group.leave()  # not after an error: a dead rank would be waited for
    finally:
        torch.set_num_threads(threads)


def threads_of_a_rank(environment: Mapping[str, str]) -> int:
    """The cores of this machine, divided among its ranks, or the user's setting; torchrun's own 1 does not count."""
    wanted = environment.get("OMP_NUM_THREADS", "1")
    if wanted.isdigit() and int(wanted) > 1:
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", 1)))
