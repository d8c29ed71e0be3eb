"""A link around a link, some of whose clients lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedge.attacks.attack import ENROLLED, Attack, Seen, attackers
from fedge.attacks.backdoor import poisoned
from fedge.attacks.uphill import Climb
from fedge.combine import Limited
from fedge.core import Algorithm, Ask, At, Batch, Drop, Params, Payload, Reply, Task, Uploads
from fedge.engine import Around, BaseLink, Engine, Simulator
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.run_task import Upload
from fedge.engine.links.base_link import Replies, named
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import Intake
from fedge.engine.uploads.limits import Limits
from fedge.engine.uploads.sizes import Usuals
from fedge.federation import Federation
from fedge.inputs import take


class Attacked(Around):
    """Clients work honestly, then liars' uploads are forged; the server's checks and its rule see what is left.

    `liars` know everything: the uploads of all clients, and what the server will do with them.
    """

    def __init__(self, inner: BaseLink, attack: Attack, liars: Iterable[int]) -> None:
        super().__init__(inner)
        self.attack, self.liars = attack, frozenset(liars)
        server = inner
        while isinstance(server, Around):
            server = server.inner
        if not isinstance(server, Simulator):
            raise TypeError(f"attacks are simulated on a Simulator, not on a {type(server).__name__}")
        self.server = server
        self._sent: Params = {}  # the model that liars were sent last
        self._climb = _climb(server, self.liars) if attack.climbs else None

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        self._sent = next((ask.send["params"] for ask in asks if "params" in ask.send), self._sent)
        gathered, dropped = self.inner.ask(at, tuple(replace(ask, combine=Limited()) for ask in asks), clients)
        usual = Usuals()
        judged = [
            reply if reply.uploads is None else self._judged(ask, reply.uploads, usual if len(asks) > 1 else None)
            for ask, reply in zip(asks, gathered, strict=True)
        ]
        found, asked = [], list[int]()
        for one, reply in zip(judged, gathered, strict=True):
            if isinstance(one, Reply):
                found.append(one)
                continue
            assert reply.uploads is not None
            asked += reply.uploads.clients.tolist()
            intake, refused = one
            dropped = [*dropped, *refused, *intake.close()[0]]
            found.append(intake.total.reply())
        if asked:
            checks.require(checks.good_clients(asked, dropped), self.server.min_replies, asks[0].tasks[0], dropped)
        return found, dropped

    def _judged(self, ask: Ask, uploads: Uploads, usual: Usuals | None) -> tuple[Intake, list[Drop]]:
        """What takes in all uploads, forged ones among them, and who was refused so far."""
        tasks = named(self.server.tasks, ask)
        jobs = _jobs(ask, tasks[0], uploads)
        intake = self.server.intake(ask, tasks, jobs, self._enrolled)
        if usual is not None:
            intake.compared_with(usual)
        return intake, intake.take(jobs, uploads.rows, self._forged(ask, tasks, uploads, jobs, intake.limits))[0]

    def _forged(self, ask: Ask, tasks: list[Task], uploads: Uploads, jobs: Jobs, limits: Limits) -> dict[str, Upload]:
        rows, lies = uploads.rows, self._lies(uploads.clients)
        sending = [name for name, task in zip(ask.tasks, tasks, strict=True) if not task.private]
        slopes = self._slopes(ask, tasks[0])
        return {
            name: self.attack.forged(
                parts, weights, Seen(lies.to(rows.device), rows, limits.most(name, jobs).to(rows.device)), slopes
            )
            for name, (parts, weights) in zip(sending, _by_task(uploads), strict=True)
        }

    def _slopes(self, ask: Ask, task: Task) -> Params | None:
        if self._climb is None or not self._sent:
            return None
        classes = None if task.rows is None else list(range(task.rows) if ask.rows is None else ask.rows)
        return self._climb.slopes(self._sent, classes)

    def _lies(self, clients: Tensor) -> Tensor:
        return torch.tensor([client in self.liars for client in clients.tolist()], dtype=torch.bool)

    def _enrolled(self, clients: Tensor) -> Tensor:
        """How many examples clients said they have when they joined: a device with data of its own is believed."""
        sizes = self.server.directory.sizes(clients)
        return torch.where(self._lies(clients), ENROLLED, sizes) if self.attack.kind == "weight_liar" else sizes


def _climb(server: Simulator, liars: Iterable[int]) -> Climb | None:
    """What these clients climb, if there are any; their examples as the server's simulator holds them."""
    chosen = [server.population.own(client) for client in sorted(liars)]
    if not chosen:
        return None
    mine = torch.cat(chosen)
    x, y = take(server.population.x, mine), server.population.y[mine]
    everybody = torch.ones(len(mine), dtype=torch.bool, device=y.device)
    return Climb(server.handle, Batch(x, y, everybody, torch.zeros((), dtype=torch.long, device=y.device)))


def _jobs(ask: Ask, task: Task, uploads: Uploads) -> Jobs:
    rows = range(task.rows or 1) if ask.rows is None else ask.rows
    position = uploads.rows.cpu()
    return Jobs(uploads.clients, torch.tensor([rows[at] for at in position.tolist()], dtype=torch.long), position)


def _by_task(uploads: Uploads) -> list[Upload]:
    """The parts of one task have one weight, and come one after another."""
    found: dict[int, tuple[Payload, Tensor]] = {}
    for part, leaves in uploads.parts.items():
        weights = uploads.weights[part]
        found.setdefault(id(weights), ({}, weights))[0][part] = leaves
    return list(found.values())


def attacked(
    algorithm: Algorithm[Any],
    federation: Federation,
    attack: Attack,
    share: float,
    seed: int = 0,
    engine: Engine | None = None,
) -> Attacked:
    """A simulated federation, a share of whose clients attacks; which, is a matter of the seed alone."""
    liars = attackers(federation.clients, share, seed)
    inside = poisoned(federation, attack.kind, liars) if attack.poisons else federation
    link = (engine or Engine()).link(algorithm, inside)
    return Attacked(link, attack, liars)
