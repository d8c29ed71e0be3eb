"""The server's side of a link that passes messages: requests out, answers in, checked and decoded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Ask, At, Drop, Payload, Reply, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import Job
from fedge.engine.clients.run_task import Upload, parted
from fedge.engine.clients.worker import ClientError
from fedge.engine.uploads import checks
from fedge.engine.uploads.coding import decode, sent_template
from fedge.engine.uploads.intake import add, new_total
from fedge.ledger import Row, payload_bytes

Request = dict[int, Payload]  # row -> what is sent for it; row 0 when the task has none
Answer = dict[int, list[Upload]]  # row -> one upload and weight per task


class Expected(NamedTuple):
    """What the upload of a task looks like: when it is decoded, and as it travels."""

    name: str
    task: Task
    like: Payload
    sent: Payload


class Collector:
    """One ask, from the requests to the reply."""

    def __init__(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, max_weight: float) -> None:
        self.at, self.ask, self.tasks, self.max_weight = at, ask, tasks, max_weight
        self.total = new_total(ask, tasks[0])
        self.positions: dict[int, dict[int, int]] = {}
        for client, row, position in zip(*(part.tolist() for part in jobs), strict=True):
            self.positions.setdefault(client, {})[row] = position
        self.requests: dict[int, Request] = {
            client: {row: self._slice(ask.send, i) for row, i in rows.items()}
            for client, rows in self.positions.items()
        }
        self.down = sum(payload_bytes(p) for r in self.requests.values() for p in r.values())
        self.up, self.good = 0, 0
        self.wire = (0, 0)  # down, up: the bytes that messages really took
        self.dropped: list[Drop] = []
        self.bad: list[Job] = []  # jobs whose uploads do not count
        self.expected: list[Expected] = []

    def _slice(self, payload: Payload, position: int) -> Payload:
        if self.tasks[0].rows is None:
            return payload
        return {name: tree.take(part, position) for name, part in payload.items()}

    def expect(self, known: Payload) -> Payload:
        """What every upload must look like, given one row's worth of what the cohort holds; returns what it keeps."""
        kept: Payload = {}
        for name, task in zip(self.ask.tasks, self.tasks, strict=True):
            like = self._template(name, task, known | kept)
            kept |= {part: like[part] for part in task.keeps}
            if not task.private:
                travels = parted(task, like)[0]
                self.expected.append(Expected(name, task, travels, sent_template(task, travels, torch.tensor(0))))
        return kept

    @staticmethod
    def _template(name: str, task: Task, known: Payload) -> Payload:
        try:
            return checks.template(task, known)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ClientError(f"task '{name}' fails on the parts it gets, {sorted(known)}: {what}") from error

    def add(self, client: int, answer: Answer) -> None:
        """Take one client's answer: check it, count its bytes, and let the good rows into the mean."""
        wanted = self.positions[client]
        if answer.keys() != wanted.keys():
            self.lose(client, f"answered rows {sorted(answer)}, asked were {sorted(wanted)}")
            return
        for row, uploads in answer.items():
            self._row(client, row, uploads)

    def _row(self, client: int, row: int, uploads: list[Upload]) -> None:
        reason = self._fault(client, self.positions[client][row], uploads)
        if reason is not None:
            self.dropped.append(Drop(client, *reason))
            self.bad.append((client, row))

    def _fault(self, client: int, position: int, uploads: list[Upload]) -> tuple[str, str] | None:
        """Take in the uploads of one job, or say of which task and why not."""
        if len(uploads) != len(self.expected):
            return self.ask.tasks[0], f"answered {len(uploads)} uploads, asked were {len(self.expected)}"
        for one, (upload, weight) in zip(self.expected, uploads, strict=True):
            reason = checks.shape_fault(upload, one.sent)
            if reason is not None:
                return one.name, reason
            self.up += payload_bytes(one.sent) + weight.element_size()  # not what the upload says of its own size
        seen = []
        for one, (upload, weight) in zip(self.expected, uploads, strict=True):
            decoded = decode(one.task, upload, one.like)
            reason = checks.value_fault(decoded, weight, self.max_weight)
            if reason is not None:
                return one.name, reason
            seen.append(({n: tree.map_(_one, p) for n, p in decoded.items()}, weight.view(1)))
        add(self.total, seen, torch.tensor([position]), torch.tensor([client]))
        self.good += 1
        return None

    def travelled(self, down: int, up: int) -> None:
        """Count the bytes that the messages of one client took, framing included."""
        self.wire = (self.wire[0] + down, self.wire[1] + up)

    def lose(self, client: int, reason: str, sent: bool = True) -> None:
        """A client without any usable answer; one that was sent nothing costs nothing."""
        if not sent:
            self.down -= sum(payload_bytes(payload) for payload in self.requests[client].values())
        self.dropped.append(Drop(client, self.ask.tasks[0], reason))
        self.bad += [(client, row) for row in self.positions[client]]

    def close(self) -> tuple[Reply, list[Drop], Row]:
        sent = payload_bytes(self.ask.send)
        name, clients = "+".join(self.ask.tasks), len(self.positions)
        row = Row(self.at.round, self.at.phase, name, clients, self.down, sent, self.up)
        return self.total.reply(), self.dropped, row


def _one(leaf: Tensor) -> Tensor:
    return leaf.unsqueeze(0)
