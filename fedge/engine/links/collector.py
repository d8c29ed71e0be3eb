"""The server's side of a link that passes messages: requests out, answers in, checked and decoded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedge import tree
from fedge.core import Ask, At, Drop, Payload, Reply, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import Job
from fedge.engine.clients.run_task import Upload, parted
from fedge.engine.clients.worker import ClientError
from fedge.engine.uploads import checks
from fedge.engine.uploads.coding import decode, sent_template
from fedge.engine.uploads.intake import Intake, Refused
from fedge.ledger import Row, payload_bytes

Request = dict[int, Payload]  # row -> what is sent for it; row 0 when the task has none
Answer = dict[int, list[Upload]]  # row -> one upload and weight per task


REASON = 500  # letters of what a record says of a bad answer, whatever the answer is
FRAME, NAME = 1024, 512  # bytes, generously: of an answer or a row, and of a tensor's description


class Expected(NamedTuple):
    """What the upload of a task looks like: when it is decoded, and as it travels."""

    name: str
    task: Task
    like: Payload
    sent: Payload


class Collector:
    """One ask, from the requests to the reply."""

    def __init__(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, intake: Intake) -> None:
        self.at, self.ask, self.tasks, self.jobs, self.intake = at, ask, tasks, jobs, intake
        self.positions: dict[int, dict[int, int]] = {}
        for client, row, position in zip(*(part.tolist() for part in jobs), strict=True):
            self.positions.setdefault(client, {})[row] = position
        self.requests: dict[int, Request] = {
            client: {row: self._slice(ask.send, i) for row, i in rows.items()}
            for client, rows in self.positions.items()
        }
        self.down = sum(payload_bytes(p) for r in self.requests.values() for p in r.values())
        self.up, self.good = 0, set[int]()
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

    def most(self, client: int) -> int:
        """The bytes that a client's answer may have: its uploads' own, and room for names, shapes and weights."""
        own = sum(payload_bytes(one.sent) for one in self.expected)
        return len(self.positions[client]) * own + self.frame(client)

    def frame(self, client: int) -> int:
        """Of these, what names, shapes and weights may take."""
        names = sum(1 + len(leaves) for one in self.expected for leaves in one.sent.values())
        return FRAME + len(self.positions[client]) * (FRAME + NAME * names)

    def heard(self, clients: set[int]) -> None:
        """These clients have answered, whatever it is."""
        there = torch.tensor([client in clients for client in self.jobs.clients.tolist()], dtype=torch.bool)
        self.intake.limits.among(Jobs(*(column[there] for column in self.jobs)))

    def add(self, client: int, answer: Answer) -> None:
        """Take one client's answer: check it, count its bytes, and let the good rows into the mean."""
        wanted = self.positions[client]
        if answer.keys() != wanted.keys():
            self.lose(client, f"answered rows {sorted(answer)}, asked were {sorted(wanted)}")
            return
        for row in wanted:
            self._row(client, row, answer[row])

    def _row(self, client: int, row: int, uploads: list[Upload]) -> None:
        reason = self._shape(uploads)
        if reason is not None:
            self._refused(([Drop(client, *reason)], [(client, row)]))
            return
        seen: dict[str, Upload] = {}
        examples = self.intake.limits.examples(torch.tensor([client]))
        for one, (upload, weight) in zip(self.expected, uploads, strict=True):
            try:
                found = decode(one.task, checks.ordered(upload, one.sent), one.like)
                why = checks.range_fault(one.task, found, self.requests[client][row], examples, self.ask.limits is None)
            except Exception as error:  # a codec's, on numbers that nobody encoded: this row alone does not count
                why = f"its upload cannot be decoded: {type(error).__name__}: {error}"
            if why is not None:
                self._refused(([Drop(client, one.name, why)], [(client, row)]))
                return
            seen[one.name] = _stacked(found), weight.view(1).float()
        position = torch.tensor([self.positions[client][row]])
        jobs = Jobs(torch.tensor([client]), torch.tensor([row]), position)
        self.good.add(client)
        self._refused(self.intake.take(jobs, position, seen))

    def _shape(self, uploads: list[Upload]) -> tuple[str, str] | None:
        """Of which task an upload has the wrong form, and how; None if all is as expected."""
        if len(uploads) != len(self.expected):
            return self.ask.tasks[0], f"answered {len(uploads)} uploads, asked were {len(self.expected)}"
        for one, (upload, weight) in zip(self.expected, uploads, strict=True):
            reason = checks.shape_fault(upload, one.sent)
            if reason is None and weight.numel() != 1:
                reason = f"the weight has shape {list(weight.shape)}, not one value"
            reason = reason or checks.light_fault(float(weight))
            if reason is not None:
                return one.name, reason
            self.up += payload_bytes(one.sent) + weight.element_size()  # not what the upload says of its own size
        return None

    def _refused(self, refused: Refused) -> None:
        self.dropped += [drop._replace(reason=drop.reason[:REASON]) for drop in refused[0]]
        self.bad += refused[1]

    def settle(self) -> None:
        """All answers are there: decide on those that were held back."""
        self._refused(self.intake.close())
        left = {client: set(rows) for client, rows in self.positions.items()}
        for client, row in self.bad:
            left[client].discard(row)
        self.good &= {client for client, rows in left.items() if rows}

    def travelled(self, down: int, up: int) -> None:
        """Count the bytes that the messages of one client took, framing included."""
        self.wire = (self.wire[0] + down, self.wire[1] + up)

    def lose(self, client: int, reason: str, sent: bool = True) -> None:
        """A client without any usable answer; one that was sent nothing costs nothing."""
        if not sent:
            self.down -= sum(payload_bytes(payload) for payload in self.requests[client].values())
        self.dropped.append(Drop(client, self.ask.tasks[0], reason[:REASON]))
        self.bad += [(client, row) for row in self.positions[client]]

    def close(self) -> tuple[Reply, list[Drop], Row]:
        sent = payload_bytes(self.ask.send)
        name, clients = "+".join(self.ask.tasks), len(self.positions)
        row = Row(self.at.round, self.at.phase, name, clients, self.down, sent, self.up)
        return self.intake.total.reply(), self.dropped, row


def _stacked(upload: Payload) -> Payload:
    return {name: tree.map_(lambda leaf: leaf.unsqueeze(0), part) for name, part in upload.items()}
