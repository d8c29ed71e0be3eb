"""Several processes, one federation: every cohort is shared out, and one sum per phase brings the work together.

All ranks hold all clients' examples and run the same algorithm on the same replies, so nothing but sums has to travel;
for a rule that needs all uploads together, the uploads do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Algorithm, Ask, At, Combine, Drop, Examples, Payload, Share, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.links.base_link import BaseLink, Replies, begins_anew
from fedge.engine.ranks.process_group import Group, Processes, RankError
from fedge.engine.simulator import Simulator
from fedge.engine.uploads import checks
from fedge.engine.uploads.beside import Few, mean_type
from fedge.engine.uploads.coding import split
from fedge.engine.uploads.intake import Total, new_total
from fedge.engine.uploads.sizes import Usuals
from fedge.engine.uploads.stacking import Stack
from fedge.engine.uploads.streaming import Sums, sum_type
from fedge.federation import Federation
from fedge.ledger import Ledger, Row

CPU = torch.device("cpu")


class Part(NamedTuple):
    """One ask of a phase: all its jobs, and what the upload of each looks like."""

    ask: Ask
    tasks: list[Task]
    jobs: Jobs
    like: Payload


class Done(NamedTuple):
    """What one rank, or in the end all of them, made of an ask."""

    total: Total
    dropped: list[Drop]
    up: int


class Ranks(BaseLink):
    """A simulator on every rank of a group; use it on all of them alike.

    A client belongs to one rank from the phase in which it is first asked until the cohort is forgotten, because it
    keeps things between phases; the examples to fold over are dealt out evenly. Where clients remember things from
    round to round, a client always belongs to rank (number modulo ranks). Requests to stop and failures travel
    with the sums, so all ranks leave after the same phase.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        *,
        device: torch.device | str = "cpu",
        group: Group | None = None,
        **options: Any,
    ) -> None:
        self.group = Processes() if group is None else group
        self._stop: Callable[[], bool] = lambda: False
        self._stopping = False
        self.simulator = Simulator(algorithm, federation, device=self.group.place(device), **options)
        self.algorithm, self.runtime = algorithm, self.simulator.runtime
        self.runtime.group = self.group
        self.remembers = any(task.remembers or task.feedback for task in self.simulator.tasks.values())
        self.forget()

    @property
    def ledger(self) -> Ledger:  # type: ignore[override]
        return self.simulator.ledger

    @property
    def min_replies(self) -> int:  # type: ignore[override]
        return self.simulator.min_replies

    def begin(self, rows: Iterable[Row]) -> None:
        self.simulator.begin(rows)

    def share(self, at: At, wanted: Share) -> Examples:
        return self.simulator.share(at, wanted)

    def forget(self) -> None:
        """A new cohort holds nothing yet."""
        self._owner: dict[int, int] = {}  # client -> rank
        self._load = [0] * self.group.size  # examples to fold over, by rank
        self._known: Payload = {}  # one row's worth of what the cohort holds

    def settings(self) -> dict[str, Any]:
        return self.simulator.settings() | {"ranks": self.group.size}

    def restore(self, settings: Mapping[str, Any]) -> None:
        same = settings.get("ranks", 1) == self.group.size  # else sums are in another order anyhow
        self.simulator.restore({**settings, "ranks": 1 if same else 0})

    def remembered(self, round: int) -> dict[str, Any]:
        """What the clients of all ranks remember; every rank has to ask."""
        return _merged(self.group.gather(_on(CPU, self.simulator.remembered(round)))) if self.remembers else {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.simulator.remember({name: self._mine(one) for name, one in memory.items()})

    def abandon(self, round: int, phase: int | None = None) -> None:
        self.simulator.abandon(round, phase)

    def _mine(self, one: Mapping[str, Any]) -> dict[str, Any]:
        own = one["jobs"][:, 0] % self.group.size == self.group.rank
        return {"jobs": one["jobs"][own], "leaves": tree.map_(lambda leaf: leaf[own], one["leaves"])}

    def remembers_elsewhere(self) -> bool:
        return self.remembers

    def memory_bytes(self) -> int | None:
        return sum(self.group.gather(self.simulator.memory.nbytes)) if self.remembers else 0

    def stopping(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """`stop` as all ranks see it: what any of them wanted when the last phase was summed."""
        self._stop, self._stopping = stop or (lambda: False), False
        return lambda: self._stopping

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if begins_anew(at, asks):
            self.forget()
        self.simulator.open(at, asks)
        parts = [self._part(ask, clients) for ask in asks]
        self._deal([part.jobs for part in parts])
        done, error = self._own(at, parts)
        self.simulator.close(at)
        answers, dropped = [], list[Drop]()
        for part, one in zip(parts, self._sum(at, parts, done, error), strict=True):
            self.ledger.add(self.simulator.row(at, part.ask, part.tasks[0], part.jobs, one.up))
            answers.append(one.total.reply())
            dropped += self._in_order(one.dropped, part.jobs)
            if one.dropped and checks.each_needed(self.algorithm, part.tasks[0]):
                good = checks.good_clients(clients.tolist(), one.dropped)
                checks.require(good, self.min_replies, part.ask.tasks[0], one.dropped)
        asked = [client for part in parts for client in part.jobs.clients.tolist()]
        if asked or not len(clients):  # else nobody holds what was asked for
            good = checks.good_clients(asked, dropped)
            checks.require(good, self.min_replies, asks[0].tasks[0], dropped)
        return answers, dropped

    def _part(self, ask: Ask, clients: Tensor) -> Part:
        tasks, jobs = self.simulator.jobs_of(ask, clients)
        self._known |= {n: p if tasks[0].rows is None else tree.take(p, 0) for n, p in ask.send.items()}
        checks.require_held(ask.tasks[0], ask.reuse, self._known)
        like: Payload = {}
        here = checks.seen(ask, self._known)
        for task in tasks if len(jobs.clients) else ():
            upload = checks.template(task, here)
            here |= {name: upload[name] for name in task.keeps}
            like |= {} if task.private else _combined(ask.combine, checks.upload_template(task, here), task.losses)
        self._known |= here
        return Part(ask, tasks, jobs, like)

    def _deal(self, phase: list[Jobs]) -> None:
        """Give each client that has none yet to the rank with the least to do, those with most work first."""
        work: dict[int, int] = {}
        for jobs in phase:
            for client, size in zip(
                jobs.clients.tolist(), self.simulator.population.sizes(jobs.clients).tolist(), strict=True
            ):
                if client not in self._owner:
                    work[client] = work.get(client, 0) + size
        for client, size in sorted(work.items(), key=lambda one: (-one[1], one[0])):
            rank = client % self.group.size if self.remembers else self._load.index(min(self._load))
            self._owner[client] = rank
            self._load[rank] += size

    def _own(self, at: At, parts: list[Part]) -> tuple[list[Done], Exception | None]:
        """This rank's share; an error is raised later, because the other ranks wait for the sum."""
        worked, usual = [], Usuals() if len(parts) > 1 else None
        try:
            for part in parts:
                mine = [self._owner[client] == self.group.rank for client in part.jobs.clients.tolist()]
                jobs = Jobs(*(column[torch.tensor(mine, dtype=torch.bool)] for column in part.jobs))
                worked.append(self.simulator.work(at, part.ask, part.tasks, jobs, part.jobs, usual))
            return [Done(*self.simulator.settled(*one)) for one in worked], None
        except Exception as error:
            return [self._nothing(part) for part in parts], error

    def _nothing(self, part: Part) -> Done:
        return Done(new_total(part.ask, part.tasks), [], 0)

    def _sum(self, at: At, parts: list[Part], done: list[Done], error: Exception | None) -> list[Done]:
        """The one all-reduce of a phase. In float64, where the bytes and the addresses are exact as well."""
        address = at.round * 1000 + at.phase
        dropped = sum(len(one.dropped) for one in done)
        flags = [float(self._stop()), float(error is not None), dropped, address, *(one.up for one in done)]
        pieces = [torch.tensor(flags, dtype=torch.float64)]
        for part, one in zip(parts, done, strict=True):
            pieces += _pieces(one.total, part.like) if isinstance(one.total, Sums) else []
        total = self.group.sum(torch.cat([piece.to(self.runtime.device, torch.float64).flatten() for piece in pieces]))
        stop, failed, lost, where, *up = total[: len(flags)].tolist()
        if failed:
            self.group.check(error)
        if where != address * self.group.size:
            raise RankError(f"round {at.round}, phase {at.phase}: the ranks are not at the same phase of the same run")
        self._stopping = bool(stop)
        drops = self._all_dropped(done) if lost else [list[Drop]() for _ in done]
        rest = _Reader(total[len(flags) :])
        found: list[Total] = []
        for part, one in zip(parts, done, strict=True):
            if isinstance(one.total, Sums):
                whole = rest.sums(one.total, part.like)
                whole.few = self._all_few(one.total) if part.ask.combine.limits else []
                found.append(whole)
            else:
                found.append(self._all_uploads(one.total))
        return [Done(whole, gone, int(size)) for whole, gone, size in zip(found, drops, up, strict=True)]

    def _all_uploads(self, stack: Stack) -> Stack:
        """The uploads of all ranks, on every rank."""
        everybody = self.group.gather([piece.to(CPU) for piece in stack.pieces])
        whole = Stack(stack.combine, stack.rows, stack.losses)
        whole.pieces = [piece.to(self.runtime.device) for rank in everybody for piece in rank]
        return whole

    def _all_few(self, sums: Sums) -> list[Few]:
        """The small parts of all ranks' uploads, on every rank."""
        everybody = self.group.gather([few.to(CPU) for few in sums.few])
        return [few.to(self.runtime.device) for rank in everybody for few in rank]

    def _all_dropped(self, done: list[Done]) -> list[list[Drop]]:
        everybody = self.group.gather([one.dropped for one in done])
        return [[drop for rank in everybody for drop in rank[at]] for at in range(len(done))]

    def _in_order(self, dropped: list[Drop], jobs: Jobs) -> list[Drop]:
        """As one process would find them: most examples first."""
        if not dropped:
            return dropped
        order = self.simulator.population.sizes(jobs.clients).sort(descending=True, stable=True).indices
        place = {client: at for at, client in reversed([*enumerate(jobs.clients[order].tolist())])}
        return sorted(dropped, key=lambda drop: place[drop.client])


def _combined(combine: Combine, like: Payload, losses: Collection[str]) -> Payload:
    """What a streaming rule makes of such an upload."""
    if not combine.streams:
        return like
    stacked = {part: tree.map_(lambda leaf: leaf[None], leaves) for part, leaves in like.items()}
    large, small = split(stacked, losses)
    summed = {**(combine.each(large) if large else {}), **({} if combine.limits else small)}
    return {part: tree.take(leaves, 0) for part, leaves in summed.items()}


def _on(device: torch.device, memory: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one | {"leaves": tree.map_(lambda leaf: leaf.to(device), one["leaves"])} for name, one in memory.items()
    }


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the clients of several ranks remember, as one: in the order of (client, row)."""
    found: dict[str, Any] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        there = [rank[name] for rank in ranks if name in rank]
        jobs = torch.cat([one["jobs"] for one in there])
        ranked = sorted((job, at) for at, job in enumerate(jobs.tolist()))
        order = torch.tensor([at for _, at in ranked], dtype=torch.long)
        leaves = {key: torch.cat([one["leaves"][key] for one in there])[order] for key in there[0]["leaves"]}
        found[name] = {"jobs": jobs[order], "leaves": leaves}
    return found


def _pieces(mean: Sums, like: Payload) -> Iterator[Tensor]:
    """A mean as tensors in an order that all ranks share; zeros where there was nothing to add."""
    rows = () if mean.rows is None else (mean.rows,)
    yield torch.zeros(rows) if mean.clients is None else mean.clients
    for name, leaves in like.items():
        yield mean.weights.get(name, torch.zeros(rows))
        sums = mean.sums.get(name)
        for key, leaf in leaves.items():
            yield torch.zeros(*rows, *leaf.shape) if sums is None else sums[key]


class _Reader:
    """Takes apart what `_pieces` and `torch.cat` put together."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.at = flat, 0

    def take(self, shape: Iterable[int]) -> Tensor:
        size = torch.Size(shape)
        begin, self.at = self.at, self.at + size.numel()
        return self.flat[begin : self.at].view(size)

    def sums(self, own: Sums, like: Payload) -> Sums:
        mean, front = Sums(own.combine, own.rows, own.losses), () if own.rows is None else (own.rows,)
        clients = self.take(front)
        for name, leaves in like.items():
            mean.weights[name] = self.take(front)
            mean.sums[name] = {key: self.take((*front, *leaf.shape)).to(sum_type(leaf)) for key, leaf in leaves.items()}
            mean.types[name] = {key: mean_type(leaf) for key, leaf in leaves.items()}
        mean.clients = clients if bool(clients.any()) else None
        return mean
