"""What a stack of simulated jobs remembers: found before a task, kept after it, what codecs left out included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fedge import tree
from fedge.core import At, Payload, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import ClientMemory
from fedge.engine.uploads.checks import finite_jobs
from fedge.engine.uploads.coding import code, codec_key, is_coded, left_out
from fedge.ledger import payload_bytes


class WrongMemory(RuntimeError):
    """A checkpoint has something else of clients than what they remember."""


class Mine(NamedTuple):
    """What jobs remember from now on, [J, ...], and which of them may: what is not finite is forgotten."""

    parts: Payload
    good: Tensor  # [J]


class Remembering(Protocol):
    @property
    def mine(self) -> Mine | None: ...


class Recall:
    """The memory of all clients, seen from a stack of jobs."""

    def __init__(self, memory: ClientMemory, device: torch.device) -> None:
        self.memory, self.device = memory, device

    def parts(
        self,
        task: Task,
        sent: Payload,
        dims: dict[str, int | None],
        jobs: Jobs,
        before: Sequence[Remembering],
    ) -> Payload:
        """What these jobs remember for a task, [J, ...]; `before` are the tasks that they did in the same ask."""
        pairs = jobs.pairs()
        found = {name: self._one(name, pairs) for name in task.remembers}
        if any(self._is_new(name, part) for name, (part, _) in found.items()):
            first = self._first(task, sent, dims, jobs)
            for name, (part, _) in found.items():
                self._check(name, part, first[name])
        for mine in (one.mine for one in before if one.mine is not None):
            for name in task.remembers:
                if name in mine.parts:
                    part, known = found[name]
                    found[name] = _chosen(mine.good, mine.parts[name], part), known | mine.good
        if all(bool(known.all()) for _, known in found.values()):
            return {name: part for name, (part, _) in found.items()}
        first = self._first(task, sent, dims, jobs)
        return {name: _chosen(known, part, first[name]) for name, (part, known) in found.items()}

    def _one(self, name: str, pairs: list[tuple[int, int]]) -> tuple[tree.Params, Tensor]:
        known = torch.tensor(self.memory.knows(name, pairs), device=self.device)
        return (self.memory.get(name, pairs) if bool(known.any()) else {}), known

    def _is_new(self, name: str, part: tree.Params) -> bool:
        return bool(part) and name in self.memory.unchecked

    def _check(self, name: str, part: tree.Params, like: tree.Params) -> None:
        """What a checkpoint has of clients is what one would remember here, but for the numbers."""
        if not self._is_new(name, part):
            return
        if part.keys() != like.keys() or not all(_are_alike(leaf, like[key]) for key, leaf in part.items()):
            raise WrongMemory(
                f"what clients remember as {name!r} has other names, shapes or types in the checkpoint than here: it "
                "is damaged, or of another algorithm or version; start another run"
            )
        self.memory.unchecked.discard(name)

    def _first(self, task: Task, sent: Payload, dims: dict[str, int | None], jobs: Jobs) -> Payload:
        def begin(sent: Payload, row: Tensor) -> Payload:
            assert task.first is not None
            return task.first(sent)

        rows = jobs.rows.to(self.device)
        some = {name: dims[name] for name in sent}
        begun: Payload = vmap(begin, in_dims=(some, 0), randomness="error")(sent, rows)
        return begun

    def coded(
        self, of: str, task: Task, jobs: Jobs, upload: Payload, client_keys: Tensor, position: int
    ) -> tuple[Payload, int, Payload]:
        """Uploads of a task as the server sees them, the bytes that they took, and what the codec left out."""
        left: Payload = {}
        for name, part in upload.items() if task.feedback else ():
            found = self._one(left_out(of, name), jobs.pairs())[0] if is_coded(task, name, _single(part)) else {}
            self._check(left_out(of, name), found, part)
            left[name] = found or tree.zeros_like(part)
        keys = codec_key(client_keys, position, jobs.rows).to(self.device)
        done = vmap(lambda *args: code(task, *args), randomness="error")(upload, left, keys)
        return done.seen, payload_bytes(done.sent), {left_out(of, name): part for name, part in done.left.items()}

    def mine(self, parts: Payload, left: Payload) -> Mine | None:
        """What is to be remembered of a task."""
        whole = parts | left
        if not whole:
            return None
        some = next(iter(next(iter(whole.values())).values()))
        return Mine(whole, finite_jobs(whole, torch.ones(len(some), dtype=torch.bool, device=self.device)))

    def keep(self, at: At, jobs: Jobs, mine: Mine) -> None:
        pairs, parts = jobs.pairs(), mine.parts
        if not bool(mine.good.all()):
            chosen = mine.good.nonzero().flatten()
            pairs = [pairs[i] for i in chosen.tolist()]
            parts = {name: tree.take(part, chosen) for name, part in parts.items()}
        self.memory.put(at, pairs, parts)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Of one shape, and not of two floating types; a count may begin as a whole number."""
    same = one.dtype == other.dtype or one.is_floating_point() != other.is_floating_point()
    return one.shape == other.shape and one.is_complex() == other.is_complex() and same


def _single(part: tree.Params) -> tree.Params:
    return tree.take(part, 0)


def _chosen(known: Tensor, part: tree.Params, other: tree.Params) -> tree.Params:
    """`part` where it is known, else `other`."""
    if not part or not other:
        return part or other
    return tree.map_(lambda a, b: torch.where(known.view(-1, *[1] * (a.dim() - 1)), a, b), part, other)
