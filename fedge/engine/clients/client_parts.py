"""What clients hold between the phases of a round, wherever its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedge import tree
from fedge.core import Params, Payload, Task
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
