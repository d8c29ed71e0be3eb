"""The contract that algorithms, engines and fleets speak.

A round is a *flow*: a generator that yields `Ask`s and is sent `Reply`s, so it reads like the paper and may have any
number of phases. Client work is a `Task`, a *fold* over one client's batches: pure, so an engine may run it one client
at a time, vectorised over a cohort, or on a phone. A `Link` carries asks to clients and combined uploads back.

    gathered = yield Ask("gradient", {"params": w})
    return tree.axpy(-lr, gathered.mean["grad"], w)

A task says what is the client's: what it remembers in later rounds, and the `Codec` by which its upload travels. An ask
says what is the server's: how uploads are combined (`Combine`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedge import keys
from fedge.inputs import Inputs, take
from fedge.losses import class_axis

Params = dict[str, Tensor]
Payload = dict[str, Params]  # named parts, e.g. {"params": ..., "fisher": ...}
Carry = Any  # a nest of dicts, tuples and tensors
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ...], targets [B, ...] -> [B]
S = TypeVar("S")  # an algorithm's state: dicts, lists, tuples, tensors, numbers and None only


class Batch(NamedTuple):
    x: Inputs  # [B, ...], or several such tensors in a dict or tuple
    y: Tensor  # [B, ...]
    mask: Tensor  # [B], False where the row is padding
    key: Tensor  # [], the address of this step's randomness

    @property
    def examples(self) -> Tensor:
        """How many real examples there are."""
        return self.mask.sum()


class Model(Protocol):
    """The network as an algorithm sees it; an engine is free to compute it faster."""

    def logits(self, params: Params, x: Inputs, key: Tensor | None = None) -> Tensor: ...
    def losses(self, params: Params, batch: Batch) -> Tensor: ...
    def loss(self, params: Params, batch: Batch) -> Tensor: ...
    def grad(self, params: Params, batch: Batch) -> Params: ...
    def sum_sq_grad(self, params: Params, batch: Batch) -> Params: ...
    def sum_inputs(self, params: Params, batch: Batch, largest: int) -> Params: ...
    def sum_fisher_product(self, params: Params, batch: Batch, v: Params) -> Params: ...
    def sum_gauss_newton_product(self, params: Params, batch: Batch, v: Params) -> Params: ...
    def sum_squared_slope_product(self, params: Params, batch: Batch, v: Params) -> Params: ...
    def sum_in_span(
        self, params: Params, batch: Batch, basis: list[Params], matrix: Literal["fisher", "gauss_newton"]
    ) -> tuple[Tensor, Tensor]: ...


class Codec(ABC):
    """How a part of an upload travels: pure functions for ONE client, so that an engine may vectorise them."""

    @abstractmethod
    def encode(self, part: Params, key: Tensor) -> Params:
        """What is sent in place of a part; `key` is an addressed key, for `fedge.keys`."""

    @abstractmethod
    def decode(self, sent: Params, like: Params) -> Params:
        """The part again, as the server sees it; `like` has its names, shapes and types."""


class Range(NamedTuple):
    """What every number of a part is in an honest upload: from `low` to `high`, and a whole one if it counts.

    With `name` this is so of one tensor of the part. What the server divides by has a `low` above 0. Of a part that
    grows with a client's examples, such as its number of steps, `most` says what clients with these numbers of examples
    have at most: its numbers are compared with the other clients' as shares of that, and beyond that refused, with room
    for rounding: a twentieth, in half precision twice that number. `least` says the same of the other end, where it
    depends on what was sent or on the examples; it is of clients that do the whole of their work. `shrunk` reads from
    what was sent which share of `most` a client can have in this round, such as the factor of steps that shrink.
    """

    part: str
    low: float
    high: float
    whole: bool = False
    name: str | None = None
    most: Callable[[Tensor], Tensor] | None = None  # numbers of examples -> numbers of the part, [J]
    least: Callable[[Payload, Tensor], Tensor] | None = None  # what was sent, numbers of examples -> the same, [J]
    shrunk: Callable[[Payload], Tensor | None] | None = None  # what was sent -> a share, or None for all of it


@dataclass(frozen=True)
class Task:
    """Client work, written for ONE client and ONE row; always at least one batch of at least one example.

    `finish` is told how many examples the client has and returns the upload and its weight in the mean; with `draws` it
    gets an addressed key as well. A task with `rows` is done once for every row the client holds: what is sent has a
    leading row axis, and a (client, row) pair is a *job*.

    A weight is above 0 and at most the client's number of examples; a task that weighs otherwise says in `heaviest`
    what the largest weight of clients with these numbers of examples is, as FedOVA's plain means do: one.

    `remembers` names parts that `finish` returns beside the upload. They never travel: the client finds them again,
    beside what it is sent, in all tasks that name them, in this round and in later ones. One that has none yet gets
    what `first` makes of what was sent. A result that is not finite is not remembered.

    `losses` names parts of a few numbers in which a huge one is honest: it says that a candidate is bad. They are not
    compared with the other clients' and dropped, as uploads are, but limited (`fedge.engine.uploads.sizes`).

    `squares` names parts of squares, such as a Fisher diagonal. Honest ones differ as much as the squares of updates
    do: a client that still learns has huge ones where the others have next to none. So numbers beyond the limit of
    uploads count for that limit, and an upload is dropped only beyond the square of what others may differ by.

    `ranges` are those of parts that the server divides by, or counts with: an upload of a remote client that is outside
    is refused, so that the mean lies within. `contradiction` says what else is wrong with one, such as parts that do
    not go together.
    """

    start: Callable[[Payload], Carry]
    step: Callable[[Payload, Carry, Batch], Carry]
    finish: Callable[..., tuple[Payload, Tensor]]  # (sent, carry, examples) or, with draws, (..., key)
    epochs: int = 1
    batch_size: int | None = None  # None: all examples in one batch
    batches: int | None = None  # stop after so many, None: all of every epoch
    keeps: tuple[str, ...] = ()  # parts of the upload that the client still holds in this round's later tasks
    private: bool = False  # nothing is uploaded: the task only makes what it keeps
    rows: int | None = None
    holds: Callable[[Tensor], Tensor] | None = None  # a client's labels -> [rows], which it works on
    relabel: Callable[[Tensor, Tensor], Tensor] | None = None  # labels, row -> labels in that row
    remembers: tuple[str, ...] = ()
    first: Callable[[Payload], Payload] | None = None
    draws: bool = False
    codec: Codec | None = None
    heaviest: Callable[[Tensor], Tensor] | None = None  # numbers of examples -> largest weights, [J]
    feedback: bool = False  # what the codec left out of one upload is added to the client's next one
    losses: tuple[str, ...] = ()
    squares: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    contradiction: Callable[[Payload], str | None] | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(f"codec is {self.codec!r}, it must be a codec such as fedge.Quantise(8)")
        if self.remembers and self.first is None:
            raise ValueError(f"a task remembers {list(self.remembers)}: `first` must say what a new client remembers")

    def steps(self, examples: int) -> int:
        """How many batches a client with so many examples folds over."""
        full = self.epochs * -(-examples // min(self.batch_size or examples, examples))
        return full if self.batches is None else min(self.batches, full)


class Combine:
    """How the good uploads of a task become one: pure functions on stacked uploads [J, ...].

    A rule sees the parts of an upload with at least 64 numbers; smaller ones beside them, such as counters and losses,
    are averaged. A rule that `streams` gives the weighted mean of what `each` makes of single uploads, chunk by chunk.
    Any other needs all uploads of a row at once, in memory, for `together`.
    """

    streams: ClassVar[bool] = False
    bounds: ClassVar[bool] = False  # limits every client by itself: its uploads are not compared with the others'
    gathers: ClassVar[bool] = False  # hands on what came: small parts are not bounded
    limits: ClassVar[bool] = False  # of one that streams: small parts are bounded all the same

    def each(self, uploads: Payload) -> Payload:
        """Every upload for itself, [J, ...] -> [J, ...]."""
        return uploads

    def across(self, uploads: Payload) -> Payload:
        """Before `together`: the uploads of all rows, [J, ...] -> [J, ...], where they can be compared."""
        return uploads

    def among(self, uploads: Payload, clients: Tensor) -> Payload:
        """`across`, for a rule that has to know whose upload is whose, [J]: a client with many rows sends many."""
        return self.across(uploads)

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        """All uploads of one row and their weights, [J, ...] and [J], as one."""
        raise NotImplementedError(f"{type(self).__name__} must say what it makes of all uploads together")


@dataclass(frozen=True)
class Mean(Combine):
    """sum_j w_j u_j / sum_j w_j."""

    streams: ClassVar[bool] = True


@dataclass(frozen=True)
class Ask:
    """One phase, seen from the server; several tasks run one after another and their uploads are merged."""

    task: str | tuple[str, ...]
    send: Payload
    reuse: tuple[str, ...] = ()  # parts this cohort still holds
    cohort: Literal["same", "new"] = "same"
    rows: tuple[int, ...] | None = None  # which rows the leading axis of `send` stands for
    combine: Combine = Mean()
    limits: Mapping[int, tuple[int, ...]] | None = None  # client -> steps of each task at most; others do all

    def __post_init__(self) -> None:
        if not isinstance(self.combine, Combine):
            raise TypeError(f"combine is {self.combine!r}, it must be a rule such as fedge.Median()")

    @property
    def tasks(self) -> tuple[str, ...]:
        return (self.task,) if isinstance(self.task, str) else self.task


class Examples(NamedTuple):
    """Examples that the server has itself, and an addressed key for what it draws among them."""

    x: Inputs
    y: Tensor
    key: int


@dataclass(frozen=True)
class Share:
    """Draw a set G of the global pool, and give every client the same random portion of it, or all of it.

        |G| = beta * (mean client size), or with `of` "all" beta * (all clients' examples together)

    With `balanced` G has as many examples of one class as of any other, up to one. With `portion` < 1 every client
    gets another portion * |G| of them. The reply are G's `Examples`: the server has them.
    """

    beta: float
    of: Literal["client", "all"] = "client"
    balanced: bool = False
    portion: float = 1.0

    def size(self, examples: int, clients: int, pool: int) -> int:
        """|G|, where all clients have so many examples together and the pool has so many."""
        return min(pool, max(1, round(self.beta * examples / (clients if self.of == "client" else 1))))

    def each(self, size: int) -> int:
        """How many of the |G| a client gets."""
        return max(1, round(self.portion * size))


class At(NamedTuple):
    """The address of a phase. Rounds count from 1, setup is round 0."""

    seed: int
    round: int
    phase: int


SOMEWHERE = At(0, 0, 0)  # of a reply that no phase brought


class Uploads(NamedTuple):
    """Every good upload of a phase, for `Gather`: parts [J, ...], weights [J] by part, row positions and clients."""

    parts: Payload
    weights: dict[str, Tensor]
    rows: Tensor  # [J]
    clients: Tensor  # [J]

    def row(self, index: int) -> Uploads:
        chosen = self.rows == index
        parts = {part: {name: leaf[chosen] for name, leaf in leaves.items()} for part, leaves in self.parts.items()}
        weights = {part: weight[chosen] for part, weight in self.weights.items()}
        return Uploads(
            parts, weights, torch.zeros_like(self.rows[chosen]), self.clients[chosen.to(self.clients.device)]
        )


@dataclass(frozen=True)
class Reply:
    """The combined uploads of a phase, and how many there were: [] or, with rows, [rows].

    `uploads` are the single ones, if the ask gathers them; `key` is an addressed key for what the server draws, and
    `at` says which seed, round and phase this is.
    """

    mean: Payload
    clients: Tensor
    uploads: Uploads | None = None
    key: int = 0
    at: At = SOMEWHERE

    def row(self, index: int, row: int) -> Reply | None:
        """What came back for the row at a position of the ask, None if nobody held it."""
        if not int(self.clients[index]):
            return None
        part = {n: {k: v[index] for k, v in p.items()} for n, p in self.mean.items()}
        alone = None if self.uploads is None else self.uploads.row(index)
        return Reply(part, self.clients[index], alone, keys.fold(self.key, row), self.at)


class Drop(NamedTuple):
    """A client that was asked and whose answer does not count, and why."""

    client: int
    task: str
    reason: str


@dataclass(frozen=True)
class Note:
    """What the record of this round is to say: a flow yields it, and is sent None."""

    name: str
    value: Any


class Privacy(NamedTuple):
    """What an algorithm that promises privacy demands of a run."""

    rate: float  # every client is drawn with this probability, independently of the others
    secret: str | None  # a file: what is drawn is drawn from it, beside the seed that clients know


Flow = Generator["Ask | Share | Note | tuple[Ask, ...]", Any, S]


class Algorithm(ABC, Generic[S]):
    """A frozen dataclass of hyper-parameters with `model` and `loss`; all state is passed in and returned."""

    model: nn.Module
    loss: Loss

    @abstractmethod
    def tasks(self, model: Model) -> Mapping[str, Task]:
        """The client work, by name, on the handle that the link provides."""

    @abstractmethod
    def init(self, params: Params) -> S:
        """The server's state before the first round."""

    @abstractmethod
    def round(self, state: S) -> Flow[S]:
        """One communication round."""

    def setup(self, state: S) -> Flow[S]:
        """Once, before the first round."""
        return state
        yield  # makes this a generator

    def adopt(self, state: S) -> S:
        """The state of an earlier run, taken over by this algorithm."""
        return state

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        """Refuse, before any training, examples that this algorithm or its model cannot handle."""
        if y.is_floating_point():
            return
        shape = model.logits(params, take(x, slice(1))).shape
        axis = getattr(self.loss, "axis", None)
        outputs = shape[class_axis(shape, y[:1].shape) if axis is None else axis]
        if int(y.max()) >= outputs:
            raise ValueError(
                f"the model has {outputs} outputs, but there is a label {int(y.max())}: set outputs= higher"
            )

    def check_run(self, rounds: int, cohort: int, sampling: str) -> None:
        """Refuse, before any training, so many rounds in all, or a draw of cohorts, of which nothing can come."""

    def no_rule_limits(self) -> str | None:
        """What the server adds up over rounds, so that no rule for single uploads limits it; with the remedy."""
        return None

    def notes(self, state: S) -> dict[str, Any]:
        """What else belongs into the record of a round."""
        return {}

    def privacy(self) -> Privacy | None:
        """How clients have to be drawn for what this algorithm promises them, None if it promises nothing."""
        return None

    def params(self, state: S) -> Params:
        """The trained parameters inside the state."""
        params: Params = state["params"]  # type: ignore[index]
        return params

    def with_params(self, state: S, params: Params) -> S:
        """The same state with other trained parameters."""
        return {**state, "params": params}  # type: ignore[dict-item,return-value]

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of every example, from its scores, [N]; what evaluation reports the mean of."""
        return self.loss(scores, y)

    def scores(self, model: Model, state: S, x: Inputs) -> Tensor:
        """[N, ...] -> [N, classes], whose largest is the prediction; of other targets, what the model puts out."""
        return model.logits(self.params(state), x)

    def network(self, state: S, memory: Payload | None = None) -> nn.Module:
        """A module of its own that gives the `scores`, on the CPU; `memory`: what one client remembers, for its own."""
        check_network(self, Algorithm)
        if memory is not None:
            raise ValueError(f"{type(self).__name__} has one model for all clients: leave the client out")
        return filled(self.model, self.params(state))


def check_network(algorithm: Algorithm[Any], base: type) -> None:
    """Refuse an algorithm whose scores are its own while its network is still that of `base`."""
    if type(algorithm).scores is not base.scores:  # type: ignore[attr-defined]
        kind = type(algorithm).__name__
        raise NotImplementedError(f"{kind} has scores of its own: write {kind}.network, a module that gives them")


def filled(module: nn.Module, params: Params) -> nn.Module:
    """A copy of a module on the CPU, ready to predict, with these parameters; what is frozen stays as it is."""
    copied = copy.deepcopy(module).cpu().eval()
    mine = dict(copied.named_parameters())
    with torch.no_grad():
        for name, leaf in params.items():
            if name not in mine or mine[name].shape != leaf.shape:
                raise ValueError(f"there is a {name!r} of shape {list(leaf.shape)}, which the model does not have")
            mine[name].data = leaf.detach().cpu().clone()
    return copied


class Link(Protocol):
    """Carries one phase to the cohort and brings the replies back; all arithmetic on data happens behind it."""

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> tuple[list[Reply], list[Drop]]: ...
    def share(self, at: At, wanted: Share) -> Examples: ...


@dataclass
class Progress:
    """What one flow did: the clients that were asked, those whose answers were dropped, and what it noted."""

    cohort: set[int] = field(default_factory=set)
    dropped: list[Drop] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def _without(clients: Tensor, gone: set[int]) -> Tensor:
    return clients[[client not in gone for client in clients.tolist()]] if gone else clients


def _check_wanted(wanted: Any) -> None:
    asks = wanted if isinstance(wanted, tuple) else (wanted,)
    for ask in asks:
        if not isinstance(ask, Ask | Share):
            raise TypeError(f"a round yielded {ask!r}; it must yield an Ask, or a tuple of Asks")


def _next(flow: Flow[S], reply: Any, progress: Progress) -> Any:
    """What a flow wants next; a note is no phase."""
    wanted = flow.send(reply)
    while isinstance(wanted, Note):
        progress.notes[wanted.name] = wanted.value
        wanted = flow.send(None)
    return wanted


def drive(flow: Flow[S], link: Link, seed: int, round: int, draw: Callable[[At], Tensor]) -> tuple[S, Progress]:
    """Run one flow to its end: the one loop between every algorithm and every link.

    The cohort is drawn at the first ask and whenever an ask wants a new one; a client whose answer was dropped is
    not asked again in the same round.
    """
    if not isinstance(flow, Generator):
        raise TypeError(f"round and setup must be generators that yield Asks; one returned a {type(flow).__name__}")
    progress, clients = Progress(), None
    reply: Any = None
    gone: set[int] = set()
    for phase in count():
        try:
            wanted = _next(flow, reply, progress)
        except StopIteration as end:
            if end.value is None:
                raise TypeError("a round or a setup returned None: it must return the next state") from None
            return end.value, progress
        _check_wanted(wanted)
        at = At(seed, round, phase)
        if isinstance(wanted, Share):
            reply = link.share(at, wanted)
            continue
        asks = wanted if isinstance(wanted, tuple) else (wanted,)
        if clients is None or any(ask.cohort == "new" for ask in asks):
            clients = _without(draw(at), gone)
            progress.cohort |= set(clients.tolist())
        replies, dropped = link.ask(at, asks, clients)
        address = keys.fold(seed, keys.SERVER, round, phase)
        replies = [replace(one, key=keys.fold(address, place), at=at) for place, one in enumerate(replies)]
        progress.dropped += dropped
        gone |= {drop.client for drop in dropped}
        clients = _without(clients, gone)
        reply = replies if isinstance(wanted, tuple) else replies[0]
    raise AssertionError("unreachable")
