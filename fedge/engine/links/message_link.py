"""What the links that pass messages have in common: one message per client and phase, whatever it is asked for.

The server's side of the loop-back link and of a real fleet is this code; they differ in `exchange` alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.checks import at_least_one, positive
from fedge.core import Algorithm, Ask, At, Drop, Payload
from fedge.engine.clients.directory import Directory
from fedge.engine.clients.memory import Job, lies_in
from fedge.engine.links import wire
from fedge.engine.links.base_link import BaseLink, Replies, begins_anew, named
from fedge.engine.links.collector import Answer, Collector
from fedge.engine.runtime import Runtime
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import MAX_RATIO, Intake
from fedge.engine.uploads.limits import MAX_SHARE, MAX_WEIGHT, Limits, check_limits
from fedge.engine.uploads.sizes import Usuals
from fedge.ledger import Ledger

Parts = dict[int, bytes]  # position of the ask in its phase -> what is sent, or answered, for it
WEIGHTS = (torch.float32, torch.float64)  # torch cannot compute with every other floating type


class Unreadable(ValueError):
    """Bytes that cannot be read as an answer; says why."""


class Mail(NamedTuple):
    """What came back from one client: its answers or why there are none, and the bytes that travelled both ways."""

    parts: Parts
    lost: str | None
    wire_down: int
    wire_up: int


class MessageLink(BaseLink):
    """A link whose clients are reached by messages: bytes out, bytes back, nothing shared."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        runtime: Runtime,
        directory: Directory,
        *,
        min_replies: int = 1,
        max_weight: float = MAX_WEIGHT,
        max_share: float | None = MAX_SHARE,
        max_ratio: float | None = MAX_RATIO,
    ) -> None:
        at_least_one("min_replies", min_replies)
        check_limits(max_weight, max_share)
        positive("max_ratio", max_ratio, optional=True)
        self.algorithm, self.runtime, self.directory = algorithm, runtime, directory
        self.min_replies, self.max_ratio = min_replies, max_ratio
        self.max_weight, self.max_share = max_weight, max_share
        self.tasks = algorithm.tasks(runtime.handle)
        self.ledger = Ledger(directory.declaration(self.tasks.values()))
        self.most: dict[int, int] = {}  # client -> bytes that its answer in this phase may have
        self._worked: list[tuple[At, list[Job]]] = []  # the jobs of this round so far, by phase
        self.forget()

    def abandon(self, round: int, phase: int | None = None) -> None:
        for at, jobs in self._worked:
            if lies_in(at, round, phase):
                self.void(at, jobs)
        self._worked = [one for one in self._worked if not lies_in(one[0], round, phase)]

    def forget(self) -> None:
        """A new cohort holds nothing yet."""
        self._known: Payload = {}  # one row's worth of what the cohort holds
        self._sent: Payload = {}  # all rows of what it was sent

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if begins_anew(at, asks):
            self.forget()
        collectors = [self._open(at, ask, clients) for ask in asks]
        if len(asks) > 1:
            usual = Usuals()
            for collector in collectors:
                collector.intake.compared_with(usual)
        requests: dict[int, Parts] = {}
        for position, collector in enumerate(collectors):
            for client, request in collector.requests.items():
                requests.setdefault(client, {})[position] = wire.encode(request)
        self.most = {
            client: sum(collectors[place].most(client) for place in parts) for client, parts in requests.items()
        }
        mail = self.exchange(at, asks, requests)
        for collector in collectors:
            collector.heard({client for client in requests if mail[client].lost is None})
        for client in requests:  # in the order asked, not in that of arrival: sums must not depend on it
            self._take(client, requests[client], mail.pop(client), collectors)
        for collector in collectors:
            collector.settle()
        self.void(at, [job for collector in collectors for job in collector.bad])
        self._worked = [one for one in self._worked if one[0].round == at.round]
        self._worked.append((at, [job for collector in collectors for job in collector.jobs.pairs()]))
        return self._close(collectors, len(clients))

    @abstractmethod
    def void(self, at: At, jobs: list[Job]) -> None:
        """The uploads of these jobs do not count: their clients are to forget what they remembered with them."""

    @abstractmethod
    def exchange(self, at: At, asks: tuple[Ask, ...], requests: dict[int, Parts]) -> dict[int, Mail]:
        """Carry every client its parts, and bring back what each of them answered."""

    def _open(self, at: At, ask: Ask, clients: Tensor) -> Collector:
        tasks = named(self.tasks, ask)
        named_tasks = dict(zip(ask.tasks, tasks, strict=True))
        limits = Limits(named_tasks, self.directory.sizes, self.max_weight, self.max_share)
        before = [self._sent[name] for name in ask.reuse if name in self._sent]
        self._sent |= ask.send
        intake = Intake(ask, tasks, limits, self.max_ratio, True, before)
        collector = Collector(at, ask, tasks, self.directory.jobs(clients, tasks[0], ask.rows), intake)
        self._known |= {n: p if tasks[0].rows is None else tree.take(p, 0) for n, p in ask.send.items()}
        checks.require_held(ask.tasks[0], ask.reuse, self._known)
        self._known |= collector.expect(checks.seen(ask, self._known))
        return collector

    def _take(self, client: int, sent: Parts, mail: Mail, collectors: list[Collector]) -> None:
        """Every ask of the phase gets its part of the answer; framing is booked to the first of them."""
        answers = {position: mail.parts.get(position, b"") for position in sent}
        down, up = _shares(mail.wire_down, sent), _shares(mail.wire_up, answers)
        for position, answer in answers.items():
            collector = collectors[position]
            if mail.wire_down:
                collector.travelled(down[position], up[position])
            if mail.lost is not None:
                collector.lose(client, mail.lost, sent=mail.wire_down > 0)
                continue
            try:
                collector.add(client, parse(answer, collector.most(client), collector.frame(client)))
            except Unreadable as error:
                collector.lose(client, str(error))
            except Exception as error:  # one client's bytes must not end the run of all
                what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                collector.lose(client, f"the answer cannot be checked: {what}")

    def _close(self, collectors: list[Collector], clients: int) -> Replies:
        answers, dropped = [], list[Drop]()
        for collector in collectors:
            reply, bad, row = collector.close()
            self.ledger.add(replace(row, wire_down=collector.wire[0], wire_up=collector.wire[1]))
            answers.append(reply)
            dropped += bad
        for collector in collectors:
            if collector.requests and checks.each_needed(self.algorithm, collector.tasks[0]):
                checks.require(len(collector.good), self.min_replies, collector.ask.tasks[0], collector.dropped)
        if not clients or any(collector.requests for collector in collectors):  # else nobody holds what was asked for
            good = set[int]().union(*(collector.good for collector in collectors))
            checks.require(len(good), self.min_replies, collectors[0].ask.tasks[0], dropped)
        return answers, dropped


def _shares(whole: int, parts: Parts) -> dict[int, int]:
    """The bytes of a message by part: its own, and framing to the first. What is there twice may have come once."""
    found, left = dict.fromkeys(parts, 0), whole
    for position in list(parts)[1:]:
        found[position] = min(len(parts[position]), left)
        left -= found[position]
    return found | dict.fromkeys(list(parts)[:1], left)


def parse(blob: bytes, most: int, frame: int = wire.HEAD) -> Answer:
    """An answer from bytes that somebody else wrote: whatever they are, the outcome is an answer or Unreadable.

    `frame` of its bytes at most are names, shapes and types.
    """
    if len(blob) > most:
        raise Unreadable(f"the answer has {len(blob)} bytes, at most {most} are expected: it was not read")
    try:
        answer = wire.decode(blob, frame)
    except Exception as error:
        raise Unreadable(f"the answer cannot be read, {len(blob)} bytes: {type(error).__name__}") from None
    if not isinstance(answer, dict) or not all(isinstance(row, int) for row in answer):
        raise Unreadable(f"the answer is a {type(answer).__name__}, not uploads by row")
    for uploads in answer.values():
        if not isinstance(uploads, list) or not all(map(_is_upload, uploads)):
            raise Unreadable("the answer is not a list of uploads, each with its weight")
    return answer


def _is_upload(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], dict):
        return False
    parts = list(pair[0].values())
    tensors = all(isinstance(part, dict) and all(map(_is_dense, part.values())) for part in parts)
    return tensors and _is_dense(pair[1]) and pair[1].dtype in WEIGHTS


def _is_dense(leaf: object) -> bool:
    """A plain tensor on the CPU: what a check can look at."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.device.type == "cpu"
