"""Several processes, one federation: every cohort is shared out, and one sum a phase brings the work together.

All ranks hold all clients and run the same algorithm on the same replies, so nothing but sums has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Algorithm, Ask, At, Drop, Payload, Reply, Task
from fedge.engine.clients.population import Jobs
from fedge.engine.ranks.process_group import Group, Processes, RankError
from fedge.engine.simulator import Simulator
from fedge.engine.uploads import replies
from fedge.federation import Federation


class Part(NamedTuple):
    """One ask of a phase: all its jobs, and what the upload of each looks like."""

    ask: Ask
    tasks: list[Task]
    jobs: Jobs
    like: Payload


class Done(NamedTuple):
    """What one rank, or in the end all of them, made of an ask."""

    mean: replies.Mean
    dropped: list[Drop]
    up: int


class Ranks(Simulator):
    """The simulator on every rank of a group; use it on all of them alike.

    A client belongs to one rank from the phase in which it is first asked until the cohort is forgotten, because it
    keeps things between phases; the examples to fold over are dealt out evenly. A wish to stop and a failure travel
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
        super().__init__(algorithm, federation, device=self.group.place(device), **options)

    def forget(self) -> None:
        super().forget()
        self._owner: dict[int, int] = {}  # client -> rank
        self._load = [0] * self.group.size  # examples to fold over, by rank
        self._known: Payload = {}  # one row's worth of what the cohort holds

    def agreed(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """`stop` as all ranks see it: what any of them wanted when the last phase was summed."""
        self._stop, self._stopping = stop or (lambda: False), False
        return lambda: self._stopping

    def all_asks(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> list[tuple[Reply, list[Drop], int]]:
        parts = [self._part(ask, clients) for ask in asks]
        self._deal([part.jobs for part in parts])
        done, error = self._own(at, parts)
        answers = []
        for part, one in zip(parts, self._sum(at, parts, done, error), strict=True):
            self.ledger.add(self._row(at, part.ask, part.tasks[0], part.jobs, one.up))
            answers.append((one.mean.reply(), self._in_order(one.dropped, part.jobs), len(part.jobs.clients)))
        return answers

    def _part(self, ask: Ask, clients: Tensor) -> Part:
        tasks = self.named(ask)
        jobs = self.population.jobs(clients, tasks[0], ask.rows)
        self._known |= {n: p if tasks[0].rows is None else tree.take(p, 0) for n, p in ask.send.items()}
        replies.require_held(ask.tasks[0], ask.reuse, self._known)
        like: Payload = {}
        for task in tasks if len(jobs.clients) else ():
            upload = replies.template(task, self._known)
            self._known |= {name: upload[name] for name in task.keeps}
            like |= {} if task.private else upload
        return Part(ask, tasks, jobs, like)

    def _deal(self, phase: list[Jobs]) -> None:
        """Give each client that has none yet to the rank with the least to do, those with most work first."""
        work: dict[int, int] = {}
        for jobs in phase:
            for client, size in zip(jobs.clients.tolist(), self.population.sizes(jobs.clients).tolist(), strict=True):
                if client not in self._owner:
                    work[client] = work.get(client, 0) + size
        for client, size in sorted(work.items(), key=lambda one: (-one[1], one[0])):
            rank = self._load.index(min(self._load))
            self._owner[client] = rank
            self._load[rank] += size

    def _own(self, at: At, parts: list[Part]) -> tuple[list[Done], Exception | None]:
        """This rank's share; an error is kept for later, for the others wait for the sum."""
        done = []
        try:
            for part in parts:
                mine = [self._owner[client] == self.group.rank for client in part.jobs.clients.tolist()]
                jobs = Jobs(*(column[torch.tensor(mine, dtype=torch.bool)] for column in part.jobs))
                done.append(Done(*self.work(at, part.ask, part.tasks, jobs)))
        except Exception as error:
            return [self._nothing(part) for part in parts], error
        return done, None

    def _nothing(self, part: Part) -> Done:
        return Done(self.new_mean(part.ask, part.tasks[0]), [], 0)

    def _sum(self, at: At, parts: list[Part], done: list[Done], error: Exception | None) -> list[Done]:
        """The one all-reduce of a phase. In float64, where the bytes and the addresses are exact as well."""
        address = at.round * 1000 + at.phase
        dropped = sum(len(one.dropped) for one in done)
        flags = [float(self._stop()), float(error is not None), dropped, address, *(one.up for one in done)]
        sums = (piece for part, one in zip(parts, done, strict=True) for piece in _pieces(one.mean, part.like))
        pieces = [torch.tensor(flags, dtype=torch.float64), *sums]
        total = self.group.sum(torch.cat([piece.to(self.device, torch.float64).flatten() for piece in pieces]))
        stop, failed, lost, where, *up = total[: len(flags)].tolist()
        if failed:
            self.group.check(error)
        if where != address * self.group.size:
            raise RankError(f"round {at.round}, phase {at.phase}: the ranks are not at the same phase of the same run")
        self._stopping = bool(stop)
        drops = self._all_dropped(done) if lost else [list[Drop]() for _ in done]
        rest = _Reader(total[len(flags) :])
        means = [rest.mean(one.mean.rows, part.like) for part, one in zip(parts, done, strict=True)]
        return [Done(mean, gone, int(size)) for mean, gone, size in zip(means, drops, up, strict=True)]

    def _all_dropped(self, done: list[Done]) -> list[list[Drop]]:
        everybody = self.group.gather([one.dropped for one in done])
        return [[drop for rank in everybody for drop in rank[at]] for at in range(len(done))]

    def _in_order(self, dropped: list[Drop], jobs: Jobs) -> list[Drop]:
        """As one process would find them: most examples first."""
        if not dropped:
            return dropped
        order = self.population.sizes(jobs.clients).sort(descending=True, stable=True).indices
        place = {client: at for at, client in reversed([*enumerate(jobs.clients[order].tolist())])}
        return sorted(dropped, key=lambda drop: place[drop.client])


def _pieces(mean: replies.Mean, like: Payload) -> Iterator[Tensor]:
    """A mean as tensors in an order that all ranks know; zeros where there was nothing to add."""
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

    def mean(self, rows: int | None, like: Payload) -> replies.Mean:
        mean, front = replies.Mean(rows), () if rows is None else (rows,)
        clients = self.take(front)
        for name, leaves in like.items():
            mean.weights[name] = self.take(front)
            mean.sums[name] = {
                key: self.take((*front, *leaf.shape)).to(leaf.dtype if leaf.is_floating_point() else torch.float32)
                for key, leaf in leaves.items()
            }
        mean.clients = clients if bool(clients.any()) else None
        return mean
