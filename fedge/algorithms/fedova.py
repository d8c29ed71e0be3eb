"""FedOVA (Alg. 2), one model per class. Zhu et al., FedOVA: One-vs-All Training Method for Federated Learning with
Non-IID Data, IJCNN 2021; Liu, Zhu and Yu, Resource-constrained Federated Edge Learning with Heterogeneous Data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedge import tree
from fedge.algorithms.data_sharing import DataSharing
from fedge.algorithms.fedper import FedPer
from fedge.algorithms.wrapper import Wrapper, chain
from fedge.checks import at_least_one, positive
from fedge.core import Algorithm, Ask, Flow, Loss, Model, Note, Params, Payload, Reply, Task
from fedge.handle import parameters
from fedge.inputs import Inputs, take

State = list[Any]  # one inner state per class
UNCHANGED = "unchanged_classes"  # in the record: classes whose new state was of no use


@dataclass(frozen=True)
class Balanced:
    """A loss of two classes that counts the examples of class 1 so many times."""

    loss: Loss
    weight: float

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.loss(logits, y) * (1 + (self.weight - 1) * y)


@dataclass(frozen=True, eq=False)
class FedOVA(Wrapper[State]):
    """`classes` binary problems "class i or not", each trained by `inner` on the clients that hold class i.

        client k trains w^i on all its examples, relabelled y == i, for every label i that it holds
        w^i_{t+1} = the inner server's step from the mean over the group P^i_t, plain (1/|P|) or `weighted` by n_k
        prediction = argmax_i P(i | x; w^i); for two logits that is the difference of the logits

    A (client, class) pair is a job, and only jobs are computed, sent and counted: a client with 2 of 10 labels costs
    two binary models. All classes start from the module's weights; one that nobody in the cohort holds stays as it is.
    `inner` is any algorithm built on a model with two outputs. `positive_weight` multiplies the loss of the examples of
    the class itself: with l labels per client, l - 1 balances the two sides.

    A class whose new state is not finite stays as it was, and the record names it (`unchanged_classes`); the others
    move on. What its clients remember is that of this round all the same.

    Bytes per round: those of the inner algorithm with jobs in place of clients; once, one byte per class from every
    client, which says what it holds.
    """

    inner: Algorithm[Any]
    classes: int = 10
    weighted: bool = False
    positive_weight: float = 1.0

    inner_outputs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        at_least_one("classes", self.classes)
        positive("positive_weight", self.positive_weight)
        inside = [*chain(self.inner)]
        if any(isinstance(one, FedOVA) for one in inside):
            raise ValueError("a binary problem has no classes left to split: FedOVA cannot wrap FedOVA")
        if any(isinstance(one, DataSharing) for one in inside):
            raise ValueError("data is shared with clients, not with classes: write DataSharing(FedOVA(...), beta)")
        if self.inner.privacy() is not None:
            raise ValueError("one client works on several classes: write Private(FedOVA(...)), which limits their sum")
        if isinstance(inside[-1], FedPer):
            raise ValueError("personal layers serve one client, and FedOVA's prediction compares models of all clients")

    @property
    def loss(self) -> Loss:  # type: ignore[override]
        return self.inner.loss if self.positive_weight == 1 else Balanced(self.inner.loss, self.positive_weight)

    def add_class(self) -> FedOVA:
        """The same with one class more (Sec. IV-B); a run that starts from an earlier one keeps the others' models."""
        return replace(self, classes=self.classes + 1)

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return {name: self._by_class(task) for name, task in self.inner.tasks(model).items()}

    def _by_class(self, task: Task) -> Task:
        if not self.weighted:
            task = replace(task, finish=_plain(task.finish), heaviest=torch.ones_like)
        return replace(task, rows=self.classes, holds=self._holds, relabel=_is_class)

    def _holds(self, labels: Tensor) -> Tensor:
        held = torch.zeros(self.classes, dtype=torch.bool, device=labels.device)
        held[labels] = True
        return held

    def init(self, params: Params) -> State:
        return [self.inner.init(params) for _ in range(self.classes)]

    def adopt(self, state: State) -> State:
        """Classes that the earlier run did not have start from the module's weights."""
        like = next(iter(self.inner.params(state[0]).values()))
        start = {name: leaf.to(like.device) for name, leaf in parameters(self.model).items()}
        known = [self.inner.adopt(one) for one in state[: self.classes]]
        return known + [self.inner.init(start) for _ in range(self.classes - len(state))]

    def setup(self, state: State) -> Flow[State]:
        """Nothing: only sharing data is set up, and that goes around FedOVA."""
        return Algorithm.setup(self, state)

    def round(self, state: State) -> Flow[State]:
        """Every class's own flow, in step: asks of the same kind travel together, and each gets its own row back."""
        after, failed = list(state), dict[int, LinAlgError]()
        flows = {row: self.inner.round(one) for row, one in enumerate(state)}
        asks: dict[int, Any] = {row: next(flow) for row, flow in flows.items()}
        while asks:
            groups = _alike(asks)
            replies = yield tuple(_together(asks, rows) for rows in groups)
            waiting: dict[int, Any] = {}
            for rows, reply in zip(groups, replies, strict=True):
                for position, row in enumerate(rows):
                    try:
                        _advance(flows[row], reply.row(position, row), row, after, waiting)
                    except LinAlgError as error:  # of numbers that are finite, and whose squares are not
                        failed[row] = error
            asks = waiting
        return (yield from _sound(state, after, failed))

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        if y.is_floating_point() or y.dim() > 1:
            kind = "floating-point targets" if y.is_floating_point() else "several labels per example"
            raise ValueError(
                f"FedOVA trains one model per class and needs one class number per example, these are {kind}: "
                "use FedAvg or another algorithm, without FedOVA around it"
            )
        if int(y.max()) >= self.classes:
            raise ValueError(f"label {int(y.max())} is out of range: FedOVA has classes 0 to {self.classes - 1}")
        outputs = model.logits(params, take(x, slice(1))).shape[-1]
        if outputs != self.inner_outputs:
            raise ValueError(
                f"FedOVA's inner model has {outputs} outputs, it needs 2 (no, yes): build it with outputs=2"
            )

    def notes(self, state: State) -> dict[str, Any]:
        """Counts of the classes, added up; other numbers as the mean over the classes that have one."""
        found: dict[str, list[Any]] = {}
        for one in state:
            for name, value in self.inner.notes(one).items():
                found.setdefault(name, []).append(value)
        return {
            name: sum(values) / len(values) if isinstance(values[0], float) else sum(values)
            for name, values in found.items()
        }

    def params(self, state: State) -> Params:
        """The module's names, with a leading class axis."""
        return tree.stack([self.inner.params(one) for one in state])

    def with_params(self, state: State, params: Params) -> State:
        return [self.inner.with_params(one, tree.take(params, row)) for row, one in enumerate(state)]

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """The inner loss of "class i or not", the mean over the classes; only the difference of two logits counts."""
        each = [
            self.inner.losses(torch.stack([torch.zeros_like(column), column], 1), (y == row).long())
            for row, column in enumerate(scores.unbind(1))
        ]
        return torch.stack(each).mean(0)

    def scores(self, model: Model, state: State, x: Inputs) -> Tensor:
        """log P(i | x) - log P(not i | x) for every class, [N, classes]."""
        logits = [self.inner.scores(model, one, x) for one in state]
        return torch.stack([two[:, 1] - two[:, 0] for two in logits], dim=1)

    def network(self, state: State, memory: Payload | None = None) -> nn.Module:
        """One module that gives a score per class."""
        several = len(inspect.signature(self.model.forward).parameters) > 1
        kind = OneVsAllOfSeveral if several else OneVsAll
        return kind(self.inner.network(one, memory) for one in state).eval()


class OneVsAll(nn.Module):
    """Binary networks side by side, `classes.0`, `classes.1`, ...: [N, ...] -> [N, classes]."""

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.classes = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)

    def scores(self, *x: Tensor, **named: Tensor) -> Tensor:
        logits = [network(*x, **named) for network in self.classes]
        return torch.stack([two[:, 1] - two[:, 0] for two in logits], dim=1)


class OneVsAllOfSeveral(OneVsAll):
    """The same for networks that take several inputs; apart, because exporters want to know how many there are."""

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        return self.scores(*x, **named)


def _is_class(y: Tensor, row: Tensor) -> Tensor:
    return (y == row).long()


def _plain(finish: Callable[..., tuple[Payload, Tensor]]) -> Callable[..., tuple[Payload, Tensor]]:
    """The same upload with weight one."""

    def plain(sent: Payload, carry: Any, examples: Tensor, *key: Tensor) -> tuple[Payload, Tensor]:
        upload, weight = finish(sent, carry, examples, *key)
        return upload, torch.ones_like(weight)

    return plain


def _alike(asks: dict[int, Ask]) -> list[tuple[int, ...]]:
    """Rows whose asks can travel as one: the same task, parts, reuse, cohort and rule."""
    groups: dict[Any, list[int]] = {}
    for row, ask in asks.items():
        groups.setdefault((ask.task, tuple(ask.send), ask.reuse, ask.cohort, ask.combine), []).append(row)
    return [tuple(rows) for rows in groups.values()]


def _together(asks: dict[int, Ask], rows: tuple[int, ...]) -> Ask:
    first = asks[rows[0]]
    send = {part: tree.stack([asks[row].send[part] for row in rows]) for part in first.send}
    return replace(first, send=send, rows=rows)


def _sound(before: State, after: State, failed: Mapping[int, LinAlgError]) -> Flow[State]:
    """A class without a finite new state stays as it was, and is named; if no other moved, the round is of no use."""
    if not failed and tree.is_finite(after):
        return after
    bad = [row for row, one in enumerate(after) if row in failed or not tree.is_finite(one)]
    if all(row in bad or one is before[row] for row, one in enumerate(after)):
        for error in failed.values():
            raise error
        return after
    yield Note(UNCHANGED, bad)
    return [before[row] if row in bad else one for row, one in enumerate(after)]


def _advance(flow: Flow[Any], reply: Reply | None, row: int, state: State, waiting: dict[int, Any]) -> None:
    """Give one class its reply; a class that got none ends its round and stays as it was."""
    if reply is None:
        flow.close()
        return
    try:
        waiting[row] = flow.send(reply)
    except StopIteration as end:
        state[row] = end.value
