"""Client-level differential privacy: McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018, with the fixed denominator (f~f) of Sec. 2."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedge import secret, tree
from fedge.algorithms import accounting
from fedge.algorithms.accounting import Spent
from fedge.algorithms.data_sharing import DataSharing
from fedge.algorithms.wrapper import Wrapper, chain
from fedge.checks import at_least_one, non_negative, positive
from fedge.combine import Limited, Mean
from fedge.core import Algorithm, Ask, Flow, Model, Note, Params, Payload, Privacy, Reply, Share, Task

State = dict[str, Any]
Finish = Callable[..., tuple[Payload, Tensor]]
LEAST = 1e-30  # of noise: its square has to be a number


@dataclass(frozen=True, eq=False)
class Private(Wrapper[State]):
    """Any algorithm whose server learns from noisy sums alone: what it releases hardly depends on any one client.

        u_k  = all that client k sends in a phase: every part, every row (FedOVA: all its classes) and every ask
        reply = ( sum_k u_k min(1, clip / |u_k|) + noise * clip * N(0, I) ) / (held * expected)

    One client more or less moves the sum by at most `clip`. Weights do not count, the denominator is fixed, and the
    number of answers is replaced by it: `expected` of the `clients` take part in a round on average, each drawn by
    itself with probability expected / clients (`fedge.train` sees to it). `held` is the share of a cohort that works on
    a row, in FedOVA labels per client / classes; it scales the reply and costs no privacy. With `on_client` every
    upload is shortened on the device too.

    The record has `epsilon` at `delta` (None: clients^-1.1) so far, for adding or removing one client, from
    `dp-accounting` (`pip install 'fedge[private]'`). A phase is a release; several from one cohort add up. Each counts
    with the noise and the rate that it had: also those of an earlier run that this one goes on from.

    The server is trusted: it sees uploads, and in FedOVA which labels a client holds. `secret` names a file of random
    bytes that only the server has; without it, who knows the seed can compute the noise: for simulations.

    Bytes: those of the inner algorithm, every weight one. Holds all uploads of a cohort in memory.
    """

    inner: Algorithm[Any]
    clip: float = 1.0
    noise: float = 1.0
    clients: int | None = None
    expected: float | None = None
    delta: float | None = None
    held: float = 1.0
    on_client: bool = False
    secret: str | None = None

    def __post_init__(self) -> None:
        positive("clip", self.clip)
        non_negative("noise", self.noise)
        if 0 < self.noise < LEAST:
            raise ValueError(f"noise is {self.noise}, it must be 0, or at least {LEAST:g}: no epsilon is known of less")
        _share("held", self.held)
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta!r}, it must be above 0 and below 1: well below 1 / clients")
        if self.clients is None or self.expected is None:
            raise ValueError(
                f"clients is {self.clients} and expected is {self.expected}: say how many clients there are and how "
                "many take part on average, as in Private(inner, clip=1.0, noise=1.0, clients=90, expected=9)"
            )
        at_least_one("clients", self.clients)
        positive("expected", self.expected)
        if self.expected > self.clients:
            raise ValueError(f"expected is {self.expected}, but there are only {self.clients} clients: lower it")
        if any(isinstance(one, Private) for one in chain(self.inner)):
            raise ValueError("noise is added once: set clip and noise of one Private instead of nesting two")
        if any(isinstance(one, DataSharing) for one in chain(self.inner)):
            raise ValueError("data sharing sends examples to everybody: it cannot be made private")

    # -- clients

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return {name: self._made_discreet(task) for name, task in self.inner.tasks(model).items()}

    def _made_discreet(self, task: Task) -> Task:
        """What clients shorten is no whole number any more, and may be next to 0."""
        shorter = tuple(one._replace(low=min(one.low, 0.0), whole=False, least=None) for one in task.ranges)
        return replace(task, finish=self._discreet(task), ranges=shorter if self.on_client else task.ranges)

    def _discreet(self, task: Task) -> Finish:
        """The same upload with weight one, since a number of examples says something too; shortened if asked for."""

        def finish(sent: Payload, carry: Any, examples: Tensor, *key: Tensor) -> tuple[Payload, Tensor]:
            upload, weight = task.finish(sent, carry, examples, *key)
            if self.on_client and not task.private:
                upload = upload | self._shortened({n: part for n, part in upload.items() if n not in task.remembers})
            return upload, torch.ones_like(weight)

        return finish

    def _shortened(self, upload: Payload) -> Payload:
        squares = [leaf.double().square().sum() for part in upload.values() for leaf in part.values()]
        factor = (self.clip / torch.stack(squares).sum().sqrt()).clamp(max=1.0)
        return {name: tree.map_(lambda leaf: leaf * factor.to(leaf.dtype), part) for name, part in upload.items()}

    # -- server

    def init(self, params: Params) -> State:
        return {"inner": self.inner.init(params), "spent": {}}

    def adopt(self, state: Any) -> State:
        """Only of a private run: what another has learned from its clients is not counted."""
        if not (isinstance(state, dict) and "spent" in state):
            raise ValueError("start is a run without noise: nothing that Private promises would hold of it")
        if any(isinstance(one, str) for one in state["spent"]):
            raise ValueError("start is a run of an older fedge, which does not say with what noise: start anew")
        return {"inner": self.inner.adopt(state["inner"]), "spent": dict(state["spent"])}

    def setup(self, state: State) -> Flow[State]:
        return (yield from self._noisy(self.inner.setup(state["inner"]), state["spent"]))

    def round(self, state: State) -> Flow[State]:
        return (yield from self._noisy(self.inner.round(state["inner"]), self._known(state["spent"])))

    def _known(self, spent: Mapping[Any, int]) -> Spent:
        """What was released so far. Older checkpoints say how many sums alone: with this run's own noise and rate."""
        return {self._release_of(one): count for one, count in spent.items()}

    def _release_of(self, one: Any) -> tuple[float, float, int]:
        return (float(self.noise), self._rate, int(one)) if isinstance(one, str) else one

    def _noisy(self, flow: Flow[Any], before: Spent) -> Flow[State]:
        """The inner flow with noisy replies, and what it released: so many sums from each of its cohorts."""
        released: list[int] = []
        reply: Any = None
        while True:
            try:
                wanted = flow.send(reply)
            except StopIteration as end:
                return {"inner": end.value, "spent": self._added(before, released)}
            if isinstance(wanted, Note):
                reply = yield wanted
                continue
            if isinstance(wanted, Share):
                raise ValueError("a round shares examples with everybody: it cannot be made private")
            asks = wanted if isinstance(wanted, tuple) else (wanted,)
            if not released or any(ask.cohort == "new" for ask in asks):
                released.append(0)
            released[-1] += 1
            replies = yield tuple(self._changed(ask) for ask in asks)
            noisy = self._release(replies)
            reply = noisy if isinstance(wanted, tuple) else noisy[0]

    def _added(self, before: Spent, released: list[int]) -> dict[tuple[float, float, int], int]:
        after = dict(before)
        for sums in released:
            one = (float(self.noise), self._rate, sums)
            after[one] = after.get(one, 0) + 1
        return after

    @property
    def _rate(self) -> float:
        assert self.clients is not None
        assert self.expected is not None
        return self.expected / self.clients

    def _changed(self, ask: Ask) -> Ask:
        if not isinstance(ask.combine, Mean):
            raise ValueError(
                f"task {ask.tasks[0]!r} is combined by {type(ask.combine).__name__}, whose result one client can move "
                "by any amount: Private needs an algorithm that averages"
            )
        return replace(ask, combine=Limited())

    def _release(self, replies: list[Reply]) -> list[Reply]:
        factors = _factors(replies, self.clip)
        key, who = secret.read(self.secret), _members(replies)
        return [self._one(reply, factors, key, who) for reply in replies]

    def _run(self) -> str:
        """What runs that share a secret differ in: with equal noise, their difference would show the sums."""
        settings = (self.clip, self.noise, self.clients, self.expected, self.held)
        return "" if self.secret is None else f"{settings} "

    def _one(self, reply: Reply, factors: dict[int, float], key: bytes, who: str) -> Reply:
        """The noisy mean; how many answered, by row, is not told."""
        assert self.expected is not None
        scale = 1 / (self.held * self.expected)
        found: Payload = {}
        for part, leaves in reply.mean.items():
            found[part] = {}
            for name, like in leaves.items():
                drawn = secret.gaussian(key, f"{self._run()}noise {reply.key} {who} {part}/{name}", like)
                total = _sum(reply, part, name, factors) + self.noise * self.clip * drawn
                found[part][name] = (scale * total).to(like.dtype)
        count = max(1, round(self.held * self.expected))
        return replace(reply, mean=found, clients=torch.full_like(reply.clients, count), uploads=None)

    def privacy(self) -> Privacy:
        return Privacy(self._rate, self.secret)

    def check(self, model: Model, params: Params, x: Tensor, y: Tensor) -> None:
        if self.noise:
            accounting.require()
        self.inner.check(model, params, x, y)

    def notes(self, state: State) -> dict[str, Any]:
        """What the inner algorithm has to say was learned from noisy replies, too."""
        assert self.clients is not None
        delta = self.clients**-1.1 if self.delta is None else self.delta
        spent = accounting.epsilon(self._known(state["spent"]), delta)
        return {**self.inner.notes(state["inner"]), "epsilon": spent, "delta": delta}

    def params(self, state: State) -> Params:
        return self.inner.params(state["inner"])

    def with_params(self, state: State, params: Params) -> State:
        return {**state, "inner": self.inner.with_params(state["inner"], params)}

    def scores(self, model: Model, state: State, x: Tensor) -> Tensor:
        return self.inner.scores(model, state["inner"], x)

    def network(self, state: State, memory: Payload | None = None) -> nn.Module:
        return self.inner.network(state["inner"], memory)


def _share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}, it must be above 0 and at most 1: the share of a cohort")


def _factors(replies: list[Reply], clip: float) -> dict[int, float]:
    """By what each client's uploads are multiplied, from their length over all rows and asks of the phase."""
    squares: dict[int, float] = {}
    for reply in replies:
        if reply.uploads is None:
            continue
        leaves = [leaf for part in reply.uploads.parts.values() for leaf in part.values()]
        each = torch.stack([leaf.reshape(len(leaf), -1).double().square().sum(1) for leaf in leaves]).sum(0)
        for client, square in zip(reply.uploads.clients.tolist(), each.tolist(), strict=True):
            squares[client] = squares.get(client, 0.0) + square
    return {client: min(1.0, clip / math.sqrt(square)) if square else 1.0 for client, square in squares.items()}


def _members(replies: list[Reply]) -> str:
    """Whose uploads are summed, as a digest: the sum of others, in a round that is done again, has other noise."""
    told = hashlib.sha256()
    for reply in replies:
        if reply.uploads is not None:
            pairs = zip(reply.uploads.clients.tolist(), reply.uploads.rows.tolist(), strict=True)
            told.update(repr(sorted(pairs)).encode())
        told.update(b";")
    return told.hexdigest()


def _sum(reply: Reply, part: str, name: str, factors: dict[int, float]) -> Tensor:
    """sum_k factor_k u_k by row, in float64; zeros where nobody answered."""
    like = reply.mean[part][name]
    if reply.uploads is None:
        return torch.zeros_like(like, dtype=torch.float64)
    leaf = reply.uploads.parts[part][name].double()
    factor = torch.tensor([factors[client] for client in reply.uploads.clients.tolist()], dtype=torch.float64)
    scaled = leaf * factor.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1))
    if not reply.clients.dim():
        return scaled.sum(0)
    total = scaled.new_zeros(like.shape)
    return total.index_add_(0, reply.uploads.rows.to(leaf.device), scaled)
