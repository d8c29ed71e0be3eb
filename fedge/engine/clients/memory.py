"""What clients remember from round to round, by (client, row): in a simulator for all of them, on a device for one.

What a round writes becomes final when the next one begins, so a round that was given up and is done again finds what it
found the first time; and what belongs to an upload that did not count is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import At, Params, Payload

Job = tuple[int, int]  # client, row
SHARE = 0.25  # of a GPU's free memory: what is larger goes to the main memory


def lies_in(at: At, round: int, phase: int | None) -> bool:
    """Whether a phase is of this round, and is this one if one is given."""
    return at.round == round and phase in (None, at.phase)


class Written(NamedTuple):
    """What some jobs remembered in one phase: every leaf [J, ...]."""

    at: At
    jobs: Sequence[Job]
    parts: Payload


class Table:
    """One part of all jobs that have it: tensors that double when they are full, so that space follows clients seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: dict[Job, int] = {}
        self.leaves: Params = {}

    def put(self, jobs: Sequence[Job], part: Params) -> None:
        for job in jobs:
            self.slots.setdefault(job, len(self.slots))
        if not self.leaves or len(self.slots) > len(next(iter(self.leaves.values()))):
            self._grow(part)
        for name, leaf in part.items():
            here = self.leaves[name]
            here[torch.tensor([self.slots[job] for job in jobs], device=here.device)] = leaf.to(here.device)

    def _grow(self, like: Params) -> None:
        room = 1 << (len(self.slots) - 1).bit_length()
        for name, leaf in like.items():
            old = self.leaves.get(name)
            size = room * leaf[0].nbytes
            device = self.device if old is None else old.device
            if device.type == "cuda" and size > SHARE * torch.cuda.mem_get_info(device)[0]:
                device = torch.device("cpu")
            new = torch.zeros(room, *leaf.shape[1:], dtype=leaf.dtype, device=device)
            if old is not None:
                new[: len(old)] = old.to(device)
            self.leaves[name] = new

    def get(self, jobs: Sequence[Job], device: torch.device) -> Params:
        """[J, ...]; a job that has none gets zeros."""
        index = torch.tensor([self.slots.get(job, -1) for job in jobs])
        known = index >= 0
        found = {name: leaf[index.clamp(min=0).to(leaf.device)].to(device) for name, leaf in self.leaves.items()}
        if bool(known.all()):
            return found
        return tree.map_(lambda leaf: torch.where(_beside(known.to(device), leaf), leaf, torch.zeros_like(leaf)), found)

    @property
    def nbytes(self) -> int:
        """What the jobs seen so far take."""
        return sum(leaf[0].nbytes * len(self.slots) for leaf in self.leaves.values())


def _beside(flags: Tensor, leaf: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (leaf.dim() - 1))


class ClientMemory:
    """Tables by part, and what this round has written so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: dict[str, Table] = {}
        self.unchecked: set[str] = set()  # parts that came from a file and that no task has looked at yet
        self.written: list[Written] = []
        self._fresh: dict[str, dict[Job, tuple[Params, int]]] = {}  # the newest of what was written, by part and job

    def begin(self, at: At) -> None:
        """A phase begins: earlier rounds are final; what an abandoned try at this phase wrote is dropped."""
        for one in self.written:
            if one.at.round < at.round:
                self._keep(one)
        self._keep_only([one for one in self.written if one.at.round == at.round and one.at.phase < at.phase])

    def settle(self, round: int) -> None:
        """Rounds up to this one are final; anything later was abandoned."""
        for one in self.written:
            if one.at.round <= round:
                self._keep(one)
        self._keep_only([])

    def abandon(self, round: int, phase: int | None = None) -> None:
        """What was written in this round, or in this phase of it, is forgotten."""
        self._keep_only([one for one in self.written if not lies_in(one.at, round, phase)])

    def abandon_since(self, round: int) -> None:
        """What was written in this round and later is forgotten."""
        self._keep_only([one for one in self.written if one.at.round < round])

    def _keep(self, one: Written) -> None:
        for name, part in one.parts.items():
            self.tables.setdefault(name, Table(self.device)).put(one.jobs, part)

    def knows(self, name: str, jobs: Sequence[Job]) -> list[bool]:
        slots = self.tables[name].slots if name in self.tables else {}
        fresh = self._fresh.get(name, {})
        return [job in slots or job in fresh for job in jobs]

    def get(self, name: str, jobs: Sequence[Job]) -> Params:
        """A part of these jobs, [J, ...]; zeros where there is none. Some job must have it."""
        found = self.tables[name].get(jobs, self.device) if name in self.tables else {}
        fresh = self._fresh.get(name, {})
        sources: dict[int, list[tuple[int, int]]] = {}  # where a part lies -> (place among the jobs, place there)
        for place, job in enumerate(jobs):
            if job in fresh:
                part, there = fresh[job]
                sources.setdefault(id(part), []).append((place, there))
        for pairs in sources.values():
            part = fresh[jobs[pairs[0][0]]][0]
            if not found:
                found = {key: leaf.new_zeros(len(jobs), *leaf.shape[1:]) for key, leaf in part.items()}
            to, source = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
            found = {key: leaf.index_copy(0, to, part[key][source]) for key, leaf in found.items()}
        return found

    def put(self, at: At, jobs: Sequence[Job], parts: Payload) -> None:
        if parts and jobs:
            self.written.append(Written(at, jobs, parts))
            self._index(self.written[-1])

    def _index(self, one: Written) -> None:
        for name, part in one.parts.items():
            self._fresh.setdefault(name, {}).update({job: (part, place) for place, job in enumerate(one.jobs)})

    def _keep_only(self, written: list[Written]) -> None:
        self.written, self._fresh = written, {}
        for one in written:
            self._index(one)

    def void(self, at: At, jobs: Sequence[Job]) -> None:
        """The uploads of these jobs in this phase did not count: what they wrote in it is forgotten."""
        if not jobs:
            return
        gone, kept = set(jobs), []
        for one in self.written:
            if (one.at.round, one.at.phase) == (at.round, at.phase) and gone & set(one.jobs):
                left = [place for place, job in enumerate(one.jobs) if job not in gone]
                index = torch.tensor(left, dtype=torch.long, device=self.device)
                parts = {name: tree.take(part, index) for name, part in one.parts.items()}
                one = Written(one.at, [one.jobs[place] for place in left], parts)
            if one.jobs:
                kept.append(one)
        self._keep_only(kept)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())

    def state(self) -> dict[str, Any]:
        """For a checkpoint, settled: tensors and names alone."""
        return {
            name: {
                "jobs": torch.tensor(list(table.slots), dtype=torch.long).view(-1, 2),
                "leaves": {key: leaf[: len(table.slots)].clone() for key, leaf in table.leaves.items()},
            }
            for name, table in self.tables.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave, in place of everything here."""
        self.tables, self.unchecked = {}, set(state)
        self._keep_only([])
        for name, one in state.items():
            jobs = [(int(client), int(row)) for client, row in one["jobs"].tolist()]
            self.tables[name] = Table(self.device)
            if jobs:
                self.tables[name].put(jobs, one["leaves"])
