"""From the jobs of a chunk to their uploads: stacked in one computation, or one job alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge import inputs, tree
from fedge.core import Ask, At, Batch, Payload, Task
from fedge.engine.choosing import Choosing
from fedge.engine.clients.batches import Schedule, client_key, client_keys, one_client
from fedge.engine.clients.client_parts import Held
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.limits import by_steps, of_clients, steps_at_most
from fedge.engine.clients.population import Population
from fedge.engine.clients.recall import Mine, Recall
from fedge.engine.clients.run_task import Stacked, Upload, finish_keys, fold_one, one_step, parted
from fedge.engine.recording.recorder import Traced
from fedge.engine.ways import stacking
from fedge.handle import GraphHandle, WrittenHandle
from fedge.ledger import payload_bytes

FEW = 20_000  # a GPU needs longer to be told to draw so few than the CPU to draw them


class Done(NamedTuple):
    """What a chunk of jobs did in one task: the upload as the server sees it, its bytes, and what is remembered."""

    upload: Upload
    up: int
    raw: Payload  # before it was encoded, what clients remember included
    mine: Mine | None


class Folding(Choosing):
    """A link that folds the examples of clients on this device."""

    population: Population
    held: Held
    recall: Recall
    compile: bool
    _folds: dict[Any, Stacked]
    _steps: dict[str, Traced]

    def _fold(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, record: bool = True) -> list[Done]:
        payload, dims = self.held.payload(ask, tasks[0], jobs, self.device)
        done: list[Done] = []
        for position, (name, task) in enumerate(zip(ask.tasks, tasks, strict=True)):
            known, around = payload, dims
            if task.remembers:
                mine = self.recall.parts(task, payload, dims, jobs, done)
                known, around = payload | mine, dims | dict.fromkeys(mine, 0)
            keys = client_keys(at, jobs.clients) if task.draws or task.codec is not None else None
            draws = None if keys is None else finish_keys(task, keys, position, jobs.rows)
            most = steps_at_most(ask, position, jobs.clients)
            if len(jobs.clients) == 1:
                limit = None if most is None else int(most[0])
                raw, weight = self._plainly(at, name, task, known, around, jobs, record, draws, limit)
            elif most is None:
                raw, weight = self._stacked(at, task, known, around, jobs, draws)
            else:
                order = by_steps(task, self.population.sizes(jobs.clients), most)
                mine, here, drawn = order.take(known, around), order.jobs(jobs), order.some(draws)
                raw, weight = order.back(self._stacked(at, task, mine, around, here, drawn, most[order.ahead]))
            done.append(self._sent_up(name, task, jobs, (raw, weight), keys, position))
            payload = payload | {part: raw[part] for part in task.keeps}
            dims = dims | dict.fromkeys(task.keeps, 0)
        return done

    def _sent_up(self, name: str, task: Task, jobs: Jobs, upload: Upload, keys: Tensor | None, position: int) -> Done:
        """From what `finish` returned to what the server sees of it."""
        raw, weight = upload
        if not task.remembers and task.codec is None:
            up = 0 if task.private else payload_bytes(raw) + weight.nbytes
            return Done((raw, weight), up, raw, None)
        travels, mine = parted(task, raw)
        left: Payload = {}
        seen, up = travels, payload_bytes(travels)
        if task.codec is not None and not task.private and keys is not None:
            seen, up, left = self.recall.coded(name, task, jobs, travels, keys, position)
        found = self.recall.mine(mine, left)
        return Done((seen, weight), 0 if task.private else up + weight.nbytes, raw, found)

    def _stacked(
        self,
        at: At,
        task: Task,
        payload: Payload,
        dims: dict[str, int | None],
        jobs: Jobs,
        draws: Tensor | None,
        most: NDArray[Any] | None = None,
    ) -> Upload:
        clients, slots = jobs.clients, None
        if task.rows is not None:
            clients, slots = jobs.clients.unique_consecutive(return_inverse=True)
            most = None if most is None else of_clients(most, slots)
        sizes = self.population.sizes(clients)
        drawn = int(sizes.sum()) * task.epochs
        where = self.device if drawn > FEW else torch.device("cpu")
        limited, examples = self._limited(task), self.population.flat_examples(clients, where)
        schedule = Schedule(limited, examples, sizes, client_keys(at, clients), slots, most, self._in_c)
        kind = (id(task), *dims.items())
        if kind not in self._folds:
            gpu = self.device.type == "cuda"
            in_c = {"native": True} if self._in_c and not self._has_layers else {}
            compile = self.compile and not self._in_c
            self._folds[kind] = Stacked(task, dims, compile, self.most, self._ahead, coarse=gpu, **in_c)
        draws = None if draws is None else draws.to(self.device)
        with stacking() if self._limit is None else nullcontext():  # a trial that fails is told by its own words
            return self._folds[kind](payload, schedule, self.gather, jobs.rows.to(self.device), draws)

    @property
    def _in_c(self) -> bool:
        """Whether steps become C programs: compilation on a CPU."""
        return self.compile and self.device.type == "cpu"

    @property
    def _has_layers(self) -> bool:
        """Whether some layers are computed in C: then a step as a whole is not."""
        if isinstance(self.handle, WrittenHandle):
            return self.handle.program.joins
        return isinstance(self.handle, GraphHandle) and bool(self.handle.program.layers or self.handle.program.alone)

    @property
    def most(self) -> int:
        """Examples to gather at a time: what stays in a CPU's cache; on a GPU, a few launches for many steps."""
        return max(
            1, (1 << 21 if self.device.type == "cpu" else 1 << 28) // inputs.nbytes(inputs.take(self.population.x, 0))
        )

    def gather(self, indices: Tensor, mask: Tensor, keys: Tensor) -> Batch:
        indices, mask, keys = (part.to(self.device, non_blocking=True) for part in (indices, mask, keys))
        flat = indices.reshape(-1)
        x = inputs.map_(lambda part: part.index_select(0, flat).unflatten(0, indices.shape), self.population.x)
        y = self.population.y.index_select(0, flat).unflatten(0, indices.shape)
        return Batch(x, y, mask, keys)

    def _plainly(
        self,
        at: At,
        name: str,
        task: Task,
        payload: Payload,
        dims: dict[str, int | None],
        jobs: Jobs,
        record: bool,
        draws: Tensor | None,
        limit: int | None = None,
    ) -> Upload:
        client = int(jobs.clients[0])
        sent = {n: tree.take(p, 0) if dims[n] == 0 else p for n, p in payload.items()}
        x, y = self.population.of(client)
        row = jobs.rows[0].to(self.device)
        batches = one_client(self._limited(task), x, y, client_key(at, client), limit)
        if name not in self._steps:
            self._steps[name] = Traced(one_step(task), ahead=self._ahead)
        key = None if draws is None else draws[0].to(self.device)
        upload, weight = fold_one(task, sent, batches, len(y), row, self._steps[name], record, key)
        return {n: tree.map_(lambda t: t[None], p) for n, p in upload.items()}, weight[None]
