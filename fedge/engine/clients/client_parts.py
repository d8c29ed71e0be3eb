"""What clients hold between the phases of a round, wherever its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedge import tree
from fedge.core import Ask, Params, Payload, Task
from fedge.engine.clients.directory import Jobs


def together(where: Mapping[Any, tuple[Params, int]], wanted: list[Any]) -> tuple[Params, list[int] | None]:
    """Tensors that hold everything wanted, and the position of each in them; several sources are put together."""
    if missing := [key for key in wanted if key not in where]:
        raise LookupError(missing[0])
    parts = {id(where[key][0]): where[key][0] for key in wanted}
    if len(parts) == 1:
        return next(iter(parts.values())), [where[key][1] for key in wanted]
    keys = sorted(set(wanted))
    place = {key: i for i, key in enumerate(keys)}
    return tree.stack([tree.take(*where[key]) for key in keys]), [place[key] for key in wanted]


class Kept:
    """What clients hold on to after a phase: some parts of their own uploads."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.jobs: list[tuple[int, int]] = []
        self.pieces: dict[str, list[Params]] = {}

    def add(self, jobs: Jobs, uploads: list[Payload]) -> None:
        if any(task.keeps for task in self.tasks):
            self.jobs += jobs.pairs()
        for task, upload in zip(self.tasks, uploads, strict=True):
            for name in task.keeps:
                self.pieces.setdefault(name, []).append(upload[name])

    def parts(self) -> dict[str, dict[tuple[int, int], tuple[Params, int]]]:
        """Part -> job -> the tensors and the position in them."""
        found = {}
        for name, pieces in self.pieces.items():
            whole = {k: torch.cat([p[k] for p in pieces]) for k in pieces[0]}
            found[name] = {job: (whole, i) for i, job in enumerate(self.jobs)}
        return found


class Held:
    """What the cohort of a round holds: what it was sent, and what its clients kept of their own uploads."""

    def __init__(self) -> None:
        self.sent: dict[str, dict[int, tuple[Params, int]]] = {}  # part -> row -> where it was sent
        self.kept: dict[str, dict[tuple[int, int], tuple[Params, int]]] = {}  # part -> job -> where it lies

    def note_sent(self, ask: Ask, task: Task) -> None:
        rows = ask.rows if ask.rows is not None else tuple(range(task.rows or 1))
        for name, part in ask.send.items():
            self.sent.setdefault(name, {}).update({row: (part, i) for i, row in enumerate(rows)})
            self.kept.pop(name, None)

    def reused(self, ask: Ask) -> list[Params]:
        """What clients were sent in earlier asks and use again in this one."""
        found = [part for name in ask.reuse for part, _ in self.sent.get(name, {}).values()]
        return list({id(part): part for part in found}.values())

    def payload(self, ask: Ask, task: Task, jobs: Jobs, device: torch.device) -> tuple[Payload, dict[str, int | None]]:
        """What these jobs work with: sent now, sent earlier, or kept by the clients; and which has a job axis."""
        payload: Payload = {}
        dims: dict[str, int | None] = {}
        index: list[int] | None
        for name in (*ask.send, *ask.reuse):
            if name in self.kept:
                try:
                    part, index = together(self.kept[name], jobs.pairs())
                except LookupError as error:
                    raise ValueError(
                        f"client {error.args[0][0]} does not hold '{name}', which task '{ask.tasks[0]}' reuses: it was "
                        "not asked in the phase before; lose a client in all later phases of a round"
                    ) from None
            elif name in self.sent and task.rows is None:
                part, index = self.sent[name][0][0], None
            elif name in self.sent:
                part, index = together(self.sent[name], jobs.rows.tolist())
            else:
                raise ValueError(
                    f"task '{ask.tasks[0]}' reuses '{name}', which this cohort does not hold: send it, or list it "
                    f"in the task's `keeps` (held: {sorted({*self.sent, *self.kept})})"
                )
            dims[name] = None if index is None else 0
            payload[name] = part if index is None else tree.take(part, torch.tensor(index, device=device))
        return payload, dims

    def keep(self, parts: dict[str, dict[tuple[int, int], tuple[Params, int]]]) -> None:
        for name, where in parts.items():
            self.kept.setdefault(name, {}).update(where)
