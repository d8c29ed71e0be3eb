"""The simulator: a whole cohort as one batched computation on one device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedge.checks import at_least_one, positive
from fedge.core import Algorithm, Ask, At, Drop, Examples, Share, Task
from fedge.engine.clients.client_parts import Held, Kept
from fedge.engine.clients.directory import Directory, Jobs
from fedge.engine.clients.memory import ClientMemory, Job
from fedge.engine.clients.population import Population
from fedge.engine.clients.recall import Recall
from fedge.engine.clients.run_task import Stacked, Upload
from fedge.engine.folding import Done, Folding
from fedge.engine.hardware.budget import Budget, has_convolutions, is_out_of_memory
from fedge.engine.hardware.device import place
from fedge.engine.links.base_link import Replies, begins_anew, named
from fedge.engine.recording import c_library
from fedge.engine.recording.c_library import NoCompiler
from fedge.engine.recording.c_linear import direct, rules
from fedge.engine.recording.pooled_layer import joined
from fedge.engine.recording.recorder import Traced
from fedge.engine.recording.stacked_layers import stacked_in_c
from fedge.engine.recording.turned_layers import turned_in_c
from fedge.engine.runtime import Precision, Runtime, check_precision
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import MAX_RATIO, Intake, Refused, Total
from fedge.engine.uploads.limits import MAX_SHARE, MAX_WEIGHT, Limits, check_limits
from fedge.engine.uploads.sizes import Usuals
from fedge.engine.ways import Way, check_way
from fedge.federation import Federation
from fedge.handle import FastHandle, GraphHandle, Handle, NotAChain, WrittenHandle, parameters
from fedge.inputs import take
from fedge.ledger import Ledger, Row, payload_bytes
from fedge.once import is_new

log = logging.getLogger("fedge")
RESTORED = {"threads", "ranks", "memory", "chunk", "way", "compile", "layers"}  # the settings of a checkpoint


class Simulator(Folding):
    """A link whose clients live on this device, computed `chunk` jobs at a time.

    Examples stay on the device. A chunk of jobs is stacked and folded at once, ragged clients masked; a streaming
    mean joins the chunks, so memory is bounded by the chunk and not by the cohort. `chunk=1` is one job at a time, by
    `workers` threads side by side (one per core), which is what convolutions on a CPU want; by default the chunk is
    chosen from the model and the free memory. `compile` lets torch.compile join the operations of a step on a GPU; on
    a CPU the steps of small models become a C program (`fedge.engine.recording.c_program`). LSTM layers, attention,
    convolutions, norms and large linear layers are computed in C on a CPU wherever there is a compiler, unless
    `compile` is False. `written=False` leaves every gradient to autograd and vmap. `rounds` is the length of the run,
    if it is known: in a short one, less time is spent on finding the fastest way. A model that is not a chain of known
    layers is batched function by function
    (`fedge.handle.graph`).
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
        chunk: int | None = None,
        way: Way | None = None,
        compile: bool | None = None,
        written: bool = True,
        workers: int | None = None,
        rounds: int | None = None,
        min_replies: int = 1,
        max_weight: float = MAX_WEIGHT,
        max_share: float | None = MAX_SHARE,
        max_ratio: float | None = MAX_RATIO,
    ) -> None:
        at_least_one("chunk", chunk, optional=True)
        check_way(way, chunk)
        at_least_one("workers", workers, optional=True)
        at_least_one("rounds", rounds, optional=True)
        at_least_one("min_replies", min_replies)
        check_limits(max_weight, max_share)
        positive("max_ratio", max_ratio, optional=True)
        self.algorithm, self.device, self.precision = algorithm, place(device), precision
        check_precision(precision, self.device)
        self.layers = compile is not False and self.device.type == "cpu"  # some layers in C, if that is possible
        compile = bool(compile)
        check_compile(compile, self.device, self.device.type == "cpu" and not has_convolutions(algorithm.model))
        self.min_replies, self.max_ratio = min_replies, max_ratio
        self.max_weight, self.max_share = max_weight, max_share
        self.chunk, self.compile, self.written, self.rounds = chunk, compile, written, rounds
        self.slower: str | None = None if written else "written=False"  # why the gradient is not written layer by layer
        dtype = next(iter(parameters(algorithm.model).values())).dtype
        self.population = Population(federation, dtype, self.device)
        self.directory = Directory(federation.clients, self.population.rows_of, self.population.sizes)
        self.handle = self.make_handle(algorithm)
        self.runtime = Runtime(self.handle, self.device, self.population.x, self.population.y, precision, dtype=dtype)
        self.tasks = algorithm.tasks(self.handle)
        self.ledger = Ledger(self.directory.declaration(self.tasks.values()))
        self.memory = ClientMemory(self.device)
        self._bad: list[Job] = []  # jobs of this phase whose uploads do not count
        self.recall = Recall(self.memory, self.device)
        self.budget = Budget(self.handle, take(self.population.x, 0), self.device)
        self._folds: dict[tuple[Any, ...], Stacked] = {}
        self._steps: dict[str, Traced] = {}
        self.workers = workers or torch.get_num_threads()
        self.way = self._first_way(way)
        self.forget()

    def make_handle(self, algorithm: Algorithm[Any]) -> Handle:
        several = not isinstance(self.population.x, Tensor)
        if several:
            self.slower = "it takes several inputs"
        elif self.written:
            try:
                options = {"fused": self.compile and not self._in_c, "half": self.precision == "bf16"}
                return self._equip(WrittenHandle(algorithm.model, algorithm.loss, self.device, **options))
            except NotAChain as reason:
                self.slower = str(reason)
                _tell(self.slower)
        if self.precision == "bf16":
            raise ValueError(f"precision is 'bf16', which needs a chain of known layers: {self.slower}; use 'tf32'")
        if self.written:
            return self._equip(GraphHandle(algorithm.model, algorithm.loss, self.device))
        kind = FastHandle if self.device.type == "cuda" else Handle
        return kind(algorithm.model, algorithm.loss, self.device)

    def _equip(self, handle: Handle) -> Handle:
        """The handle with layers in C, and images in the better order, where that is wanted and possible."""
        model = self.algorithm.model
        if isinstance(handle, WrittenHandle):
            layers = handle.program.layers
            handle.program.alone = direct(joined(layers), parameters(model)) if self.layers else layers
        elif isinstance(handle, GraphHandle):
            handle.program.layers = stacked_in_c(model) if self.layers else {}
            handle.program.alone = turned_in_c(model) | rules(parameters(model)) if self.layers else {}
        return handle

    def forget(self) -> None:
        """A new cohort holds nothing yet."""
        self.held = Held()

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"threads": self.runtime.threads, "ranks": 1, "memory": self.budget.memory}
        found |= {"chunk": self.chunk, "way": self.way}
        return found | ({"compile": True} if self._in_c else {}) | ({"layers": True} if self._has_layers else {})

    def restore(self, settings: Mapping[str, Any]) -> None:
        if unknown := settings.keys() - RESTORED:
            raise ValueError(f"engine has {sorted(map(str, unknown))[:5]}, known are {sorted(RESTORED)}")
        at_least_one("threads", settings["threads"])
        at_least_one("chunk", settings.get("chunk"), optional=True)
        positive("memory", settings.get("memory"), optional=True)
        if settings.get("ranks", 1) == 1:  # else sums are in another order anyhow
            self.runtime.threads = min(settings["threads"], max(os.cpu_count() or 1, torch.get_num_threads()))
        self.budget.memory = settings.get("memory", self.budget.memory)
        self.chunk = settings.get("chunk", self.chunk)
        if self.device.type == "cpu":  # a run goes on as it began: compiled sums are rounded differently
            self.compile = bool(settings.get("compile", False))
            self.layers = bool(settings.get("layers", False))
            self._equip(self.handle)
        if (way := settings.get("way")) is not None:
            check_way(way, self.chunk)
            self.way = self._go(way)

    def remembered(self, round: int) -> dict[str, Any]:
        self.memory.settle(round)
        return self.memory.state()

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.memory.load(memory)

    def abandon(self, round: int, phase: int | None = None) -> None:
        self.memory.abandon(round, phase)

    def memory_bytes(self) -> int:
        return self.memory.nbytes

    def share(self, at: At, wanted: Share) -> Examples:
        self.ledger.add(self.population.share(at, wanted))
        return self.population.examples_shared()

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        self.open(at, asks)
        answers, dropped, asked = [], list[Drop](), list[int]()
        everybody: list[tuple[str, list[Drop]]] = []  # asks that are not by row, and who failed in each
        parts, usual = [self.jobs_of(ask, clients) for ask in asks], Usuals() if len(asks) > 1 else None
        worked = [self.work(at, ask, *part, usual=usual) for ask, part in zip(asks, parts, strict=True)]
        for ask, (tasks, mine), one in zip(asks, parts, worked, strict=True):
            total, bad, up = self.settled(*one)
            self.ledger.add(self.row(at, ask, tasks[0], mine, up))
            answers.append(total.reply())
            dropped += bad
            asked += mine.clients.tolist()
            everybody += [(ask.tasks[0], bad)] if bad and checks.each_needed(self.algorithm, tasks[0]) else []
        self.close(at)
        for name, bad in everybody:
            checks.require(checks.good_clients(clients.tolist(), bad), self.min_replies, name, bad)
        if asked or not len(clients):  # else nobody holds what was asked for
            good = len(asked) if not dropped and self.min_replies == 1 else checks.good_clients(asked, dropped)
            checks.require(good, self.min_replies, asks[0].tasks[0], dropped)
        return answers, dropped

    def open(self, at: At, asks: tuple[Ask, ...]) -> None:
        """A phase begins."""
        self._begun += at.round != self._round
        self._round = at.round
        if begins_anew(at, asks):
            self.forget()
        self.memory.begin(at)

    def jobs_of(self, ask: Ask, clients: Tensor) -> tuple[list[Task], Jobs]:
        tasks = named(self.tasks, ask)
        return tasks, self.directory.jobs(clients, tasks[0], ask.rows)

    def work(
        self,
        at: At,
        ask: Ask,
        tasks: list[Task],
        jobs: Jobs,
        everybody: Jobs | None = None,
        usual: Usuals | None = None,
    ) -> tuple[Intake, list[Drop], int]:
        """These jobs of an ask: what took in their uploads, who was dropped so far, and how many bytes came up.

        `everybody` is all jobs of the ask, if others work on the rest; `usual` is shared by all asks of a phase.
        """
        self.held.note_sent(ask, tasks[0])
        if self.way is None and jobs.clients.shape[0]:
            self.way = self._go(self._measured(at, ask, tasks, jobs))
            torch.set_num_threads(self.runtime.threads)
        intake = self.intake(ask, tasks, jobs if everybody is None else everybody)
        if usual is not None:
            intake.compared_with(usual)
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
        self.held.keep(kept.parts())
        return intake, dropped, up

    def settled(self, intake: Intake, dropped: list[Drop], up: int) -> tuple[Total, list[Drop], int]:
        """What became of the uploads of `work`, now that those of all asks of the phase are known."""
        return intake.total, dropped + self._refused(intake.close()), up

    def intake(
        self, ask: Ask, tasks: list[Task], jobs: Jobs, sizes: Callable[[Tensor], Tensor] | None = None
    ) -> Intake:
        """What takes in uploads: the server's checks, and its rule; `jobs` are all jobs of the ask.

        `sizes` are the numbers of examples that clients said they have, None: those that they have.
        """
        named = dict(zip(ask.tasks, tasks, strict=True))
        limits = Limits(named, sizes or self.directory.sizes, self.max_weight, self.max_share)
        limits.among(jobs)
        return Intake(ask, tasks, limits, self.max_ratio, before=self.held.reused(ask))

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
        count = jobs.clients.shape[0]
        shared = self.loops and 1 < self.pool.workers <= count
        self._share = self.pool.workers / count if shared else 1.0
        known = self.way == "plain" or all(n in self._steps and self._steps[n].recorded for n in ask.tasks)
        for part in chunks if not shared else islice(chunks, 0 if known else 1):  # workers record nothing
            yield from self._sparing(at, ask, tasks, part)
        if not shared:
            return

        def work(part: Jobs, own: Mapping[str, Task]) -> list[Done]:
            return self._fold(at, ask, [own[name] for name in ask.tasks], part, record=False)

        for part, done in self.pool.map(work, chunks):
            yield part, part.positions, done

    def _sparing(self, at: At, ask: Ask, tasks: list[Task], part: Jobs) -> Iterator[tuple[Jobs, Tensor, list[Done]]]:
        """A chunk; without memory for it, in halves as small as need be, and from then on every chunk is as small."""
        if self.chunk is None or part.clients.shape[0] <= self.chunk:
            try:
                positions = part.positions.to(self.device)
                done = self._fold(at, ask, tasks, part, self.way != "plain")
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(part.clients.shape[0], error)
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
        if jobs == 1:
            raise MemoryError(
                f"out of memory on {self.device} for a single client: lower the batch size, or use a device with more "
                f"memory ({str(error).splitlines()[0]})"
            ) from error
        self.chunk = -(-jobs // 2)
        log.warning("out of memory with %d clients at a time: going on with %d", jobs, self.chunk)

    @property
    def loops(self) -> bool:
        """Whether jobs are computed one by one on a CPU."""
        return self.way in ("single", "plain")

    def row(self, at: At, ask: Ask, task: Task, jobs: Jobs, up: int) -> Row:
        """The ledger's row of an ask."""
        total = payload_bytes(ask.send)
        asked = 1 if task.rows is None else len(ask.rows or range(task.rows))
        down = total // asked * jobs.clients.shape[0]
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
            most = 1 if self.loops else self.chunk or self.budget.jobs(width)
            piece = torch.from_numpy(order[at : at + -(-alike // -(-alike // most))])  # pieces of about one size
            yield Jobs(*(part[piece] for part in jobs))
            at += len(piece)


def check_compile(compile: bool, device: torch.device, small: bool = False) -> None:
    """`small`: the model has no convolutions, so that its steps can be compiled on a CPU too."""
    if not compile or device.type == "cuda":
        return
    if not small:
        raise ValueError(
            f"compile is for CUDA devices, and on a CPU for models without convolutions: on {device} steps are "
            "recorded, leave it out"
        )
    try:
        c_library.check()
    except NoCompiler as error:
        raise ValueError(f"compile is true, but {error}") from None


def _tell(reason: str) -> None:
    """Once for every reason."""
    if is_new(("no chain", reason)):
        log.info("the model is not a chain of known layers (%s): clients are batched function by function", reason)
