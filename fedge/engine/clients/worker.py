"""The client's side of a link that passes messages: a device, or the loop-back link's stand-in for one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedge.core import At, Payload, Task
from fedge.engine.clients.batches import client_key, one_client
from fedge.engine.clients.run_task import StepError, Upload, fold_one


class ClientError(RuntimeError):
    """Client work failed; says which task, client and step."""


class Worker:
    """One client: its examples, and what it holds between the phases of a round."""

    def __init__(self, client: int, x: Tensor, y: Tensor, tasks: Mapping[str, Task]) -> None:
        self.client, self.x, self.y, self.tasks = client, x, y, tasks
        self.round = -1
        self.held: dict[int, Payload] = {}  # row -> parts

    def work(
        self, at: At, names: tuple[str, ...], reuse: tuple[str, ...], sent: dict[int, Payload]
    ) -> dict[int, list[Upload]]:
        """Do the named tasks for every row in `sent` (row 0 when the tasks have none)."""
        if at.round != self.round:
            self.round, self.held = at.round, {}
        return {row: self._row(at, names, reuse, row, payload) for row, payload in sent.items()}

    def _row(self, at: At, names: tuple[str, ...], reuse: tuple[str, ...], row: int, sent: Payload) -> list[Upload]:
        held = self.held.get(row, {}) | sent
        payload = {name: held[name] for name in (*sent, *reuse)}
        uploads = []
        for name in names:
            upload = self._task(at, name, row, payload)
            kept = {part: upload[0][part] for part in self.tasks[name].keeps}
            held, payload = held | kept, payload | kept
            if not self.tasks[name].private:
                uploads.append(upload)
        self.held[row] = held
        return uploads

    def _task(self, at: At, name: str, row: int, payload: Payload) -> Upload:
        task, key = self.tasks[name], client_key(at, self.client)
        batches = one_client(task, self.x, self.y, key)
        try:
            upload, weight = fold_one(task, payload, batches, len(self.y), torch.tensor(row))
        except StepError as error:
            raise ClientError(f"task '{name}', client {self.client}, {error}") from error
        return upload, weight
