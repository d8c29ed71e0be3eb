"""What an ask costs every client, before anybody is asked: FLOPs of the fold, bytes down, bytes up.

FLOPs are counted, not guessed: one step of the task is run on one example and on two, after a first one that is not
counted, and the matrix products and convolutions in it are added up. A client with n examples does
jobs * (steps * per_step + visits * per_example + once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedge import inputs, tree
from fedge.core import Algorithm, Ask, At, Batch, Payload, Share, Task
from fedge.edge.draws import Array
from fedge.engine.clients.run_task import finished, one_step, parted
from fedge.engine.links.base_link import begins_anew, named
from fedge.engine.uploads.coding import sent_template
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.ledger import payload_bytes

CLOSE = 1e-9  # of a step: less is rounding


class Cost(NamedTuple):
    """One job of one task: FLOPs of a step, of an example in it, and of start and finish; bytes and parts it keeps."""

    step: float
    example: float
    once: float
    up: int
    keeps: Payload
    memory: int


class Work(NamedTuple):
    """One ask, by client, [C] each; of `steps` and `limits` one row per task."""

    jobs: Array
    flops: Array
    down: Array  # bytes
    up: Array
    memory: Array  # bytes: at least so many are needed at once
    steps: Array  # [tasks, C], all that the task asks for


class Workload:
    """Counts what asks cost the clients of a federation."""

    def __init__(self, algorithm: Algorithm[Any], federation: Federation) -> None:
        self.federation, self.data = federation, federation.data
        dtype = next(iter(algorithm.model.parameters())).dtype
        first = [inputs.to(inputs.take(part, slice(1)), "cpu") for part in (self.data.train_x, self.data.train_y)]
        self.x, self.y = (inputs.cast(part, dtype) for part in first)
        self.handle = Handle(algorithm.model, algorithm.loss)
        self.tasks: Mapping[str, Task] = algorithm.tasks(self.handle)
        self.params = parameters(algorithm.model)
        self.model_bytes = sum(leaf.nbytes for leaf in self.params.values())
        self.offsets: Array = federation.offsets.cpu().numpy()
        self.shared = 0  # examples that every client got
        self._known: dict[int, Payload] = {}  # what the cohort holds, by row; classes may be asked different things
        self._costs: dict[Any, list[Cost]] = {}
        self._rows: dict[int, tuple[int, ...]] = {}  # by client
        self._held: dict[tuple[int, ...], tuple[int, ...]] = {}  # rows, by the labels that a client holds

    def rows(self, clients: Array, task: Task) -> list[tuple[int, ...]]:
        """The rows that clients hold; one object for all that hold the same labels."""
        ids = clients.tolist()
        if new := [client for client in ids if client not in self._rows]:
            self._rows.update(zip(new, self._looked_up(np.array(new), task), strict=True))
        return [self._rows[client] for client in ids]

    def _looked_up(self, clients: Array, task: Task) -> list[tuple[int, ...]]:
        """All at once: the different pairs of a client and a label that it has, in order."""
        index, names, codes = self._labels
        begin, sizes = self.offsets[clients], self.offsets[clients + 1] - self.offsets[clients]
        flat = np.arange(sizes.sum()) + (begin - (sizes.cumsum() - sizes)).repeat(sizes)
        pairs = np.unique(np.arange(len(clients)).repeat(sizes) * len(names) + codes[index[flat]])
        ends = np.searchsorted(pairs, np.arange(len(clients) + 1) * len(names)).tolist()
        held = names[pairs % len(names)].tolist()
        return [self._rows_with(tuple(held[a:b]), task) for a, b in pairwise(ends)]

    def _rows_with(self, labels: tuple[int, ...], task: Task) -> tuple[int, ...]:
        if labels not in self._held:
            assert task.holds is not None
            rows = task.holds(torch.tensor(labels, dtype=self.data.train_y.dtype)).nonzero().flatten()
            self._held[labels] = tuple(rows.tolist())
        return self._held[labels]

    @cached_property
    def _labels(self) -> tuple[Array, Array, Array]:
        """Which examples clients hold, one client after another; the labels there are, and which every example has."""
        names, codes = np.unique(self.data.train_y.cpu().numpy(), return_inverse=True)
        return self.federation.index.cpu().numpy(), names, codes

    def share(self, wanted: Share) -> int:
        """Every client now folds over some shared examples as well; returns the bytes that one client got."""
        size = wanted.size(len(self.federation.index), self.federation.clients, len(self.data.train_y))
        self.shared = wanted.each(size)
        return self.shared * (inputs.nbytes(self.x) + inputs.nbytes(self.y))

    def sizes(self, clients: Array) -> Array:
        found: Array = self.offsets[clients + 1] - self.offsets[clients] + self.shared
        return found

    def open(self, at: At, asks: tuple[Ask, ...]) -> None:
        """A phase begins."""
        if begins_anew(at, asks):
            self._known = {}

    def of(self, ask: Ask, clients: Array) -> Work:
        """What an ask costs these clients when they do all of it."""
        tasks = named(self.tasks, ask)
        rows = _rows(ask, tasks[0])
        sent = ask.send if rows is None else {name: tree.take(part, 0) for name, part in ask.send.items()}
        costs, n = self._cost(ask, tasks, sent, (0,) if rows is None else rows), self.sizes(clients)
        jobs = np.ones(len(clients), np.int64) if rows is None else self._jobs(ask, tasks[0], clients)
        steps = np.array([_steps(task, n) for task in tasks])
        up = sum(cost.up for cost in costs)
        need = payload_bytes(sent) + sum(cost.memory for cost in costs)
        bytes_down = payload_bytes(ask.send) // len(rows or (0,))
        flops = jobs * self.flops(tasks, costs, n, steps)
        return Work(jobs, flops, jobs * bytes_down, jobs * up, np.full(len(clients), need), steps)

    def fitting(self, ask: Ask, clients: Array, most: Array, share: Array) -> tuple[Array, Array]:
        """The steps, [tasks, C], that fit into a share, [C], of the FLOPs of `most`, at least one, and their FLOPs.

        After `of`. Of several tasks each gets the same share of its own FLOPs.
        """
        tasks, n, costs = named(self.tasks, ask), self.sizes(clients), self._costs[self._kind(ask)]
        steps = np.array([_fitting(*one, n, share) for one in zip(tasks, costs, most, strict=True)])
        jobs = 1 if tasks[0].rows is None else self._jobs(ask, tasks[0], clients)
        return steps, jobs * self.flops(tasks, costs, n, steps)

    @staticmethod
    def flops(tasks: list[Task], costs: list[Cost], n: Array, steps: Array) -> Array:
        """FLOPs of one job per client."""
        total = np.zeros(len(n))
        for task, cost, taken in zip(tasks, costs, steps, strict=True):
            total += cost.once + cost.step * taken + cost.example * _visits(task, n, taken)
        return total

    def _jobs(self, ask: Ask, task: Task, clients: Array) -> Array:
        asked = None if ask.rows is None else set(ask.rows)
        held = self.rows(clients, task)
        return np.array([len(rows) if asked is None else sum(row in asked for row in rows) for rows in held])

    def _kind(self, ask: Ask) -> Any:
        shapes = ((part, name, leaf.shape) for part, leaves in ask.send.items() for name, leaf in leaves.items())
        return (ask.tasks, ask.reuse, len(ask.rows or ()), *shapes)

    @torch.no_grad()
    def _cost(self, ask: Ask, tasks: list[Task], sent: Payload, rows: Sequence[int]) -> list[Cost]:
        kind = self._kind(ask)
        if kind not in self._costs:
            here = {name: {key: leaf.cpu() for key, leaf in part.items()} for name, part in sent.items()}
            known, costs = self._known.get(rows[0], {}) | here, list[Cost]()
            for task in tasks:
                costs.append(self._measure(task, known))
                known = known | costs[-1].keeps
            self._costs[kind] = costs
        # what the cohort now holds: shapes are all that matters, so it is enough to know it once
        keeps = {name: part for cost in self._costs[kind] for name, part in cost.keeps.items()}
        for row in rows:
            self._known[row] = sent | self._known.get(row, {}) | keeps
        return self._costs[kind]

    def _measure(self, task: Task, sent: Payload) -> Cost:
        known = {name: tree.map_(lambda leaf: leaf.cpu(), part) for name, part in sent.items()}
        known = known if task.first is None else {**known, **task.first(known)}
        step, row = one_step(task), torch.tensor(0)
        with Counted() as begin:
            carry = task.start(known)
        step(known, carry, self._batch(1), row)  # what a model does once, such as trying its layers, is not counted
        found = []
        for examples in (1, 2):
            with Counted() as counted:
                step(known, carry, self._batch(examples), row)
            found.append(counted.total)
        with Counted() as end:
            upload, weight = finished(task, known, carry, torch.tensor(1), torch.tensor(0))
        example = max(0, found[1] - found[0])
        return Cost(
            max(0, found[0] - example),
            example,
            begin.total + end.total,
            0 if task.private else _uploaded(task, upload, weight),
            {part: upload[part] for part in task.keeps},
            payload_bytes(upload),
        )

    @property
    def epochs(self) -> int:
        """Passes over a client's examples, of all tasks together."""
        return sum(task.epochs for task in self.tasks.values())

    def models(self, clients: Array) -> Array:
        """How many models each client trains: one, or one per row that it holds."""
        first = next(iter(self.tasks.values()))
        if first.rows is None:
            return np.ones(len(clients), np.int64)
        return np.array([len(rows) for rows in self.rows(clients, first)])

    def gradient_flops(self) -> float:
        """FLOPs of the gradient of one example, with labels as the tasks have them: of a row, if they are by row."""
        found = []
        relabel = next((task.relabel for task in self.tasks.values() if task.relabel is not None), None)
        for examples in (1, 2):
            batch = self._batch(examples)
            batch = batch if relabel is None else batch._replace(y=relabel(batch.y, torch.tensor(0)))
            with torch.no_grad(), Counted() as counted:
                self.handle.grad({name: leaf.cpu() for name, leaf in self.params.items()}, batch)
            found.append(counted.total)
        return float(found[1] - found[0])

    def _batch(self, examples: int) -> Batch:
        again = torch.zeros(examples, dtype=torch.long)
        return Batch(inputs.take(self.x, again), self.y[again], torch.ones(examples, dtype=torch.bool), torch.tensor(0))


def _rows(ask: Ask, task: Task) -> Sequence[int] | None:
    """The rows that are asked for; None: the task has none."""
    if task.rows is None:
        return None
    return range(task.rows) if ask.rows is None else ask.rows


def _uploaded(task: Task, upload: Payload, weight: Tensor) -> int:
    return payload_bytes(sent_template(task, parted(task, upload)[0], torch.tensor(0))) + weight.nbytes


def _steps(task: Task, n: Array) -> Array:
    """`task.steps` of many clients."""
    full = task.epochs * -(-n // np.minimum(n if task.batch_size is None else task.batch_size, n))
    found: Array = full if task.batches is None else np.minimum(full, task.batches)
    return found


def _visits(task: Task, n: Array, steps: Array) -> Array:
    """Examples in the first so many batches; the last batch of an epoch may be smaller."""
    size = np.minimum(n if task.batch_size is None else task.batch_size, n)
    a_pass = -(-n // size)
    found: Array = steps // a_pass * n + np.minimum(steps % a_pass * size, n)
    return found


def _fitting(task: Task, cost: Cost, most: Array, n: Array, share: Array) -> Array:
    """The most steps whose FLOPs are no more than a share of those of `most` steps; at least one."""
    if not cost.step + cost.example:
        return most
    size = n if task.batch_size is None else np.minimum(task.batch_size, n)
    a_pass, step = -(-n // size), cost.step + cost.example * size
    whole, (passes, more) = cost.step * a_pass + cost.example * n, divmod(most, a_pass)
    room = share * (passes * whole + more * step) - (1 - share) * cost.once + CLOSE * step
    passes, rest = divmod(room, whole)
    steps = passes * a_pass + rest // step  # what is less than a pass has no smaller batch
    found: Array = np.maximum(1, np.minimum(steps, most)).astype(np.int64)
    return found


class Counted(TorchDispatchMode):
    """Adds up the FLOPs of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count is not None else 0
        return out
