"""The simulator: a whole cohort as one batched computation on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge import tree
from fedge.checks import at_least_one, positive
from fedge.core import Algorithm, Ask, At, Batch, Drop, Params, Payload, Task
from fedge.engine.clients.batches import Schedule, client_key, client_keys, one_client
from fedge.engine.clients.client_parts import Kept, together
from fedge.engine.clients.directory import Directory, Jobs
from fedge.engine.clients.limits import by_steps, of_clients, steps_at_most
from fedge.engine.clients.memory import ClientMemory, Job
from fedge.engine.clients.population import Population
from fedge.engine.clients.recall import Mine, Recall
from fedge.engine.clients.run_task import Stacked, Upload, finish_keys, fold_one, one_step, parted
from fedge.engine.hardware.budget import Budget, is_out_of_memory
from fedge.engine.hardware.device import place
from fedge.engine.hardware.thread_pool import ThreadPool
from fedge.engine.links.base_link import BaseLink, Replies, begins_anew, named
from fedge.engine.recording.recorder import Traced
from fedge.engine.runtime import Precision, Runtime, check_precision
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import MAX_RATIO, Intake, Refused, Total
from fedge.engine.uploads.limits import MAX_SHARE, MAX_WEIGHT, Limits, check_limits
from fedge.federation import Federation
from fedge.handle import FastHandle, Handle, NotAChain, WrittenHandle, parameters
from fedge.ledger import Ledger, Row, payload_bytes

log = logging.getLogger("fedge")

FEW = 20_000  # a GPU needs longer to be told to draw so few than the CPU to draw them


class Done(NamedTuple):
    """What a chunk of jobs did in one task: the upload as the server sees it, its bytes, and what is remembered."""

    upload: Upload
    up: int
    raw: Payload  # before it was encoded, what clients remember included
    mine: Mine | None


class Simulator(BaseLink):
    """A link whose clients live on this device, computed `chunk` jobs at a time.

    Examples stay on the device. A chunk of jobs is stacked and folded at once, ragged clients masked; a streaming
    mean joins the chunks, so memory is bounded by the chunk and not by the cohort. `chunk=1` is one job at a time, by
    `workers` threads side by side (one per core), which is what convolutions on a CPU want; by default the chunk is
    chosen from the model and the free memory. `compile` lets torch.compile join the operations of a step on a GPU;
    `written=False` leaves every gradient to autograd, as it is for models that are not a chain of known layers.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
        chunk: int | None = None,
        compile: bool = False,
        written: bool = True,
        workers: int | None = None,
        min_replies: int = 1,
        max_weight: float = MAX_WEIGHT,
        max_share: float | None = MAX_SHARE,
        max_ratio: float | None = MAX_RATIO,
    ) -> None:
        at_least_one("chunk", chunk, optional=True)
        at_least_one("workers", workers, optional=True)
        at_least_one("min_replies", min_replies)
        check_limits(max_weight, max_share)
        positive("max_ratio", max_ratio, optional=True)
        self.algorithm, self.device, self.precision = algorithm, place(device), precision
        check_precision(precision, self.device)
        check_compile(compile, self.device)
        self.min_replies, self.max_ratio = min_replies, max_ratio
        self.max_weight, self.max_share = max_weight, max_share
        self.chunk, self.compile, self.written = chunk, compile, written
        self.slower: str | None = None if written else "written=False"  # why the gradient goes through autograd
        dtype = next(iter(parameters(algorithm.model).values())).dtype
        self.population = Population(federation, dtype, self.device)
        self.directory = Directory(federation.clients, self.population.rows_of, self.population.sizes)
        self.handle = self.make_handle(algorithm)
        self.runtime = Runtime(self.handle, self.device, self.population.x, self.population.y, precision)
        self.tasks = algorithm.tasks(self.handle)
        self.ledger = Ledger(self.directory.declaration(self.tasks.values()))
        self.memory = ClientMemory(self.device)
        self._bad: list[Job] = []  # jobs of this phase whose uploads do not count
        self.recall = Recall(self.memory, self.device)
        self.budget = Budget(self.handle, self.population.x[0], self.device)
        self._folds: dict[tuple[Any, ...], Stacked] = {}
        self._steps: dict[str, Traced] = {}
        workers = (workers or torch.get_num_threads()) if self.loops else 1
        self.halved = False
        self.pool = ThreadPool(workers, lambda: algorithm.tasks(self.make_handle(algorithm)))
        self.runtime.threads = 1 if workers > 1 else self.runtime.threads
        self.forget()

    def make_handle(self, algorithm: Algorithm[Any]) -> Handle:
        if self.written:
            try:
                options = {"fused": self.compile, "half": self.precision == "bf16"}
                return WrittenHandle(algorithm.model, algorithm.loss, self.device, **options)
            except NotAChain as reason:
                self.slower = str(reason)
                _tell(self.slower)
        if self.precision == "bf16":
            raise ValueError(f"precision is 'bf16', which needs a chain of known layers: {self.slower}; use 'tf32'")
        kind = FastHandle if self.device.type == "cuda" else Handle
        return kind(algorithm.model, algorithm.loss, self.device)

    def forget(self) -> None:
        """A new cohort holds nothing yet."""
        self._sent: dict[str, dict[int, tuple[Params, int]]] = {}  # part -> row -> where it was sent
        self._kept: dict[str, dict[tuple[int, int], tuple[Params, int]]] = {}  # part -> job -> where it lies

    def settings(self) -> dict[str, Any]:
        return {"threads": self.runtime.threads, "ranks": 1, "memory": self.budget.memory, "chunk": self.chunk}

    def restore(self, settings: Mapping[str, Any]) -> None:
        at_least_one("threads", settings["threads"])
        at_least_one("chunk", settings.get("chunk"), optional=True)
        positive("memory", settings.get("memory"), optional=True)
        if settings.get("ranks", 1) == 1:  # else sums are in another order anyhow
            self.runtime.threads = settings["threads"]
        self.budget.memory = settings.get("memory", self.budget.memory)
        self.chunk = settings.get("chunk", self.chunk)

    def remembered(self, round: int) -> dict[str, Any]:
        self.memory.settle(round)
        return self.memory.state()

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.memory.load(memory)

    def memory_bytes(self) -> int:
        return self.memory.nbytes

    def share(self, at: At, beta: float) -> None:
        self.ledger.add(self.population.share(at, beta))

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        self.open(at, asks)
        answers, dropped, asked = [], list[Drop](), list[int]()
        for ask in asks:
            tasks, mine = self.jobs_of(ask, clients)
            total, bad, up = self.work(at, ask, tasks, mine)
            self.ledger.add(self.row(at, ask, tasks[0], mine, up))
            answers.append(total.reply())
            dropped += bad
            asked += mine.clients.tolist()
        self.close(at)
        if asked or not len(clients):  # else nobody holds what was asked for
            good = len(asked) if not dropped and self.min_replies == 1 else checks.good_clients(asked, dropped)
            checks.require(good, self.min_replies, asks[0].tasks[0], dropped)
        return answers, dropped

    def open(self, at: At, asks: tuple[Ask, ...]) -> None:
        """A phase begins."""
        if begins_anew(at, asks):
            self.forget()
        self.memory.begin(at)

    def jobs_of(self, ask: Ask, clients: Tensor) -> tuple[list[Task], Jobs]:
        tasks = named(self.tasks, ask)
        return tasks, self.directory.jobs(clients, tasks[0], ask.rows)

    def work(
        self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, everybody: Jobs | None = None
    ) -> tuple[Total, list[Drop], int]:
        """These jobs of an ask: what became of their uploads, who was dropped, and how many bytes came up.

        `everybody` is all jobs of the ask, if others work on the rest.
        """
        self._note_sent(ask, tasks[0])
        intake = self.intake(ask, tasks, jobs if everybody is None else everybody)
        up, kept = 0, Kept(tasks)
        dropped: list[Drop] = []
        for part, positions, done in self._done(at, ask, tasks, jobs):
            kept.add(part, [one.raw for one in done])
            for one in done:
                if one.mine is not None:
                    self.recall.keep(at, part, one.mine)
            uploads = {n: one.upload for n, t, one in zip(ask.tasks, tasks, done, strict=True) if not t.private}
            up += sum(one.up for one in done)
            dropped += self._refused(intake.take(part, positions, self.received(part, uploads)))
        dropped += self._refused(intake.close())
        for name, where in kept.parts().items():
            self._kept.setdefault(name, {}).update(where)
        return intake.total, dropped, up

    def intake(
        self, ask: Ask, tasks: list[Task], jobs: Jobs, sizes: Callable[[Tensor], Tensor] | None = None
    ) -> Intake:
        """What takes in uploads: the server's checks, and its rule; `jobs` are all jobs of the ask.

        `sizes` are the numbers of examples that clients said they have, None: those that they have.
        """
        named = dict(zip(ask.tasks, tasks, strict=True))
        limits = Limits(named, sizes or self.directory.sizes, self.max_weight, self.max_share)
        limits.among(jobs)
        return Intake(ask, tasks[0], limits, self.max_ratio)

    def close(self, at: At) -> None:
        """All asks of a phase are done: what belongs to uploads that did not count is forgotten."""
        self.memory.void(at, self._bad)
        self._bad = []

    def _refused(self, refused: Refused) -> list[Drop]:
        dropped, jobs = refused
        self._bad += jobs
        return dropped

    def received(self, jobs: Jobs, uploads: dict[str, Upload]) -> dict[str, Upload]:
        """What arrives of the uploads of some jobs, by task; a subclass may simulate clients that lie."""
        return uploads

    def _done(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs) -> Iterator[tuple[Jobs, Tensor, list[Done]]]:
        """Every chunk of jobs, its positions on the device and what it did; single jobs by one worker per core."""
        chunks = self._chunks(tasks, jobs)
        shared = self.loops and 1 < self.pool.workers <= len(jobs.clients)
        known = all(name in self._steps and self._steps[name].recorded for name in ask.tasks)
        for part in chunks if not shared else islice(chunks, 0 if known else 1):  # workers record nothing
            yield from self._sparing(at, ask, tasks, part)
        if not shared:
            return

        def work(part: Jobs, own: Mapping[str, Task]) -> list[Done]:
            return self._fold(at, ask, [own[name] for name in ask.tasks], part, record=False)

        for part, done in self.pool.map(work, chunks):
            yield part, part.positions, done

    def _sparing(self, at: At, ask: Ask, tasks: list[Task], part: Jobs) -> Iterator[tuple[Jobs, Tensor, list[Done]]]:
        """A chunk; if there is no memory for it, in two halves, and from then on every chunk is half as large."""
        try:
            positions = part.positions.to(self.device)
            done = self._fold(at, ask, tasks, part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._halve(len(part.clients), error)
        else:
            yield part, positions, done
            return
        assert self.chunk is not None
        for half in zip(*(leaf.split(self.chunk) for leaf in part), strict=True):
            yield from self._sparing(at, ask, tasks, Jobs(*half))

    def _halve(self, jobs: int, error: Exception) -> None:
        self._folds.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if jobs == 1 or self.halved:
            once = "once, after the chunk was halved" if self.halved else "for a single client"
            raise MemoryError(
                f"out of memory on {self.device} with {jobs} client(s) at a time, {once}: lower chunk= or the batch "
                f"size, or use a device with more memory ({str(error).splitlines()[0]})"
            ) from error
        self.chunk, self.halved = -(-jobs // 2), True
        log.warning("out of memory with %d clients at a time: going on with %d", jobs, self.chunk)

    @property
    def loops(self) -> bool:
        """Whether jobs are computed one by one on a CPU."""
        return self.device.type == "cpu" and (self.budget.loop if self.chunk is None else self.chunk == 1)

    def row(self, at: At, ask: Ask, task: Task, jobs: Jobs, up: int) -> Row:
        """The ledger's row of an ask."""
        total = payload_bytes(ask.send)
        asked = 1 if task.rows is None else len(ask.rows or range(task.rows))
        down = total // asked * len(jobs.clients)
        count = len(jobs.clients if task.rows is None else jobs.clients.unique())
        return Row(at.round, at.phase, "+".join(ask.tasks), count, down, total, up)

    def _chunks(self, tasks: list[Task], jobs: Jobs) -> Iterator[Jobs]:
        """The jobs, most examples first, in pieces that fit into memory."""
        n = self.population.sizes(jobs.clients).numpy()
        order = (-n).argsort(kind="stable")
        sizes, at = n[order], 0
        while at < len(order):
            largest = int(sizes[at])
            width = max(min(task.batch_size or largest, largest) for task in tasks)
            alike = int((sizes[at:] * 4 >= width).sum())  # much smaller clients would be mostly padding
            most = self.chunk or self.budget.jobs(width)
            piece = torch.from_numpy(order[at : at + -(-alike // -(-alike // most))])  # pieces of about one size
            yield Jobs(*(part[piece] for part in jobs))
            at += len(piece)

    def _note_sent(self, ask: Ask, task: Task) -> None:
        rows = ask.rows if ask.rows is not None else tuple(range(task.rows or 1))
        for name, part in ask.send.items():
            self._sent.setdefault(name, {}).update({row: (part, i) for i, row in enumerate(rows)})
            self._kept.pop(name, None)

    def _payload(self, ask: Ask, task: Task, jobs: Jobs) -> tuple[Payload, dict[str, int | None]]:
        """What these jobs work with: sent now, sent earlier, or kept by the clients; and which has a job axis."""
        payload: Payload = {}
        dims: dict[str, int | None] = {}
        index: list[int] | None
        for name in (*ask.send, *ask.reuse):
            if name in self._kept:
                try:
                    part, index = together(self._kept[name], jobs.pairs())
                except LookupError as error:
                    raise ValueError(
                        f"client {error.args[0][0]} does not hold '{name}', which task '{ask.tasks[0]}' reuses: it was "
                        "not asked in the phase before; lose a client in all later phases of a round"
                    ) from None
            elif name in self._sent and task.rows is None:
                part, index = self._sent[name][0][0], None
            elif name in self._sent:
                part, index = together(self._sent[name], jobs.rows.tolist())
            else:
                raise ValueError(
                    f"task '{ask.tasks[0]}' reuses '{name}', which this cohort does not hold: send it, or list it "
                    f"in the task's `keeps` (held: {sorted({*self._sent, *self._kept})})"
                )
            dims[name] = None if index is None else 0
            payload[name] = part if index is None else tree.take(part, torch.tensor(index, device=self.device))
        return payload, dims

    def _fold(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, record: bool = True) -> list[Done]:
        payload, dims = self._payload(ask, tasks[0], jobs)
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
        examples = self.population.flat_examples(clients, where)
        schedule = Schedule(task, examples, sizes, client_keys(at, clients), slots, most)
        kind = (id(task), *dims.items())
        if kind not in self._folds:
            coarse = self.device.type == "cuda"
            self._folds[kind] = Stacked(task, dims, self.compile, self.most, coarse=coarse)
        draws = None if draws is None else draws.to(self.device)
        return self._folds[kind](payload, schedule, self.gather, jobs.rows.to(self.device), draws)

    @property
    def most(self) -> int:
        """Examples to gather at a time: what stays in a CPU's cache; on a GPU, a few launches for many steps."""
        return max(1, (1 << 21 if self.device.type == "cpu" else 1 << 28) // self.population.x[0].nbytes)

    def gather(self, indices: Tensor, mask: Tensor, keys: Tensor) -> Batch:
        indices, mask, keys = (part.to(self.device, non_blocking=True) for part in (indices, mask, keys))
        flat = indices.reshape(-1)
        x = self.population.x.index_select(0, flat).unflatten(0, indices.shape)
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
        chosen = self.population.examples(client)
        x, y = self.population.x[chosen], self.population.y[chosen]
        row = jobs.rows[0].to(self.device)
        batches = one_client(task, x, y, client_key(at, client), limit)
        if name not in self._steps:
            self._steps[name] = Traced(one_step(task))
        key = None if draws is None else draws[0].to(self.device)
        upload, weight = fold_one(task, sent, batches, len(y), row, self._steps[name], record, key)
        return {n: tree.map_(lambda t: t[None], p) for n, p in upload.items()}, weight[None]


def check_compile(compile: bool, device: torch.device) -> None:
    if compile and device.type != "cuda":
        raise ValueError(f"compile is for CUDA devices: on {device} steps are recorded, leave it out")


_TOLD: set[str] = set()


def _tell(reason: str) -> None:
    """Once for every reason: it is no error, but it costs time."""
    if reason not in _TOLD:
        _TOLD.add(reason)
        log.warning("the model's gradient is left to autograd, which is slower: %s", reason)
