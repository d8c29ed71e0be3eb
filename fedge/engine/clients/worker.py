"""The client's side of a link that passes messages: a device, or the loop-back link's stand-in for one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedge.core import At, Payload, Task
from fedge.engine.clients.batches import client_key, one_client
from fedge.engine.clients.memory import ClientMemory
from fedge.engine.clients.run_task import StepError, Upload, finish_keys, fold_one, parted
from fedge.engine.uploads.checks import finite_jobs
from fedge.engine.uploads.coding import code, codec_key, is_coded, left_out
from fedge.inputs import Inputs


class ClientError(RuntimeError):
    """Client work failed; says which task, client and step."""


class Worker:
    """One client: its examples, what it holds between the phases of a round, and what it remembers between rounds."""

    def __init__(
        self, client: int, x: Inputs, y: Tensor, tasks: Mapping[str, Task], memory: ClientMemory | None = None
    ) -> None:
        self.client, self.x, self.y, self.tasks = client, x, y, tasks
        self.memory = ClientMemory(torch.device("cpu")) if memory is None else memory
        self.round = -1
        self.held: dict[int, Payload] = {}  # row -> parts
        self.limits: tuple[int, ...] | None = None

    def work(
        self,
        at: At,
        names: tuple[str, ...],
        reuse: tuple[str, ...],
        sent: dict[int, Payload],
        limits: tuple[int, ...] | None = None,
    ) -> dict[int, list[Upload]]:
        """Do the named tasks for every row in `sent` (row 0 when the tasks have none); uploads as they travel.

        `limits` are the steps of each task that may be done at most.
        """
        if at.round != self.round:
            self.round, self.held = at.round, {}
        self.limits = limits
        return {row: self._row(at, names, reuse, row, payload) for row, payload in sent.items()}

    def _row(self, at: At, names: tuple[str, ...], reuse: tuple[str, ...], row: int, sent: Payload) -> list[Upload]:
        held = self.held.get(row, {}) | sent
        if missing := [name for name in reuse if name not in held]:
            raise ClientError(
                f"task '{names[0]}', client {self.client}: it does not hold '{missing[0]}', which the task "
                "reuses: it was not asked in the phase before"
            )
        payload = {name: held[name] for name in (*sent, *reuse)}
        uploads = []
        for position, name in enumerate(names):
            task = self.tasks[name]
            upload, weight = self._task(at, name, position, row, payload)
            travels, mine = parted(task, upload)
            kept = {part: upload[part] for part in task.keeps}
            held, payload = held | kept, payload | kept
            if not task.private and task.codec is not None:
                travels, left = self._coded(at, name, position, row, travels)
                mine = mine | left
            self._remember(at, row, mine)
            if not task.private:
                uploads.append((travels, weight))
        self.held[row] = held
        return uploads

    def _task(self, at: At, name: str, position: int, row: int, payload: Payload) -> Upload:
        task, key, where = self.tasks[name], client_key(at, self.client), torch.tensor(row)
        batches = one_client(task, self.x, self.y, key, None if self.limits is None else self.limits[position])
        known = payload | self._recalled(task, row, payload)
        draws = finish_keys(task, torch.tensor(key), position, where)
        try:
            return fold_one(task, known, batches, len(self.y), where, key=draws)
        except StepError as error:
            raise ClientError(f"task '{name}', client {self.client}, {error}") from error

    def _recalled(self, task: Task, row: int, payload: Payload) -> Payload:
        """What this client remembers for a task, or what it begins with."""
        job = [(self.client, row)]
        known = {name: self.memory.knows(name, job)[0] for name in task.remembers}
        first: Payload = task.first(payload) if task.first is not None and not all(known.values()) else {}
        return {n: _only(self.memory.get(n, job)) if known[n] else first[n] for n in task.remembers}

    def _coded(self, at: At, of: str, position: int, row: int, upload: Payload) -> tuple[Payload, Payload]:
        """The upload as it travels, and what its codec left out, to be remembered."""
        task, job, left = self.tasks[of], [(self.client, row)], dict[str, dict[str, Tensor]]()
        for name, part in upload.items() if task.feedback else ():
            known = is_coded(task, name, part) and self.memory.knows(left_out(of, name), job)[0]
            zeros = {key: torch.zeros_like(leaf) for key, leaf in part.items()}
            left[name] = _only(self.memory.get(left_out(of, name), job)) if known else zeros
        key = codec_key(torch.tensor(client_key(at, self.client)), position, torch.tensor(row))
        done = code(task, upload, left, key)
        return done.sent, {left_out(of, name): part for name, part in done.left.items()}

    def _remember(self, at: At, row: int, parts: Payload) -> None:
        stacked = {name: {key: leaf[None] for key, leaf in part.items()} for name, part in parts.items()}
        if parts and bool(finite_jobs(stacked, torch.ones(1, dtype=torch.bool))):
            self.memory.put(at, [(self.client, row)], stacked)


def _only(part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf[0] for name, leaf in part.items()}
