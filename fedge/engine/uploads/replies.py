"""Uploads are checked before any arithmetic, then averaged; a bad one is dropped and named."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedge.core import Drop, Params, Payload, Reply, Task
from fedge.engine.clients.run_task import finished

MAX_WEIGHT = 1e6


class TooFewReplies(RuntimeError):
    """A phase had fewer good uploads than it needs."""


def template(task: Task, sent: Payload) -> Payload:
    """What an upload of this task must look like: the fold over no batches has the same names, shapes and types."""
    upload, _ = finished(task, sent, task.start(sent), torch.tensor(1))
    return upload


def shape_fault(upload: Payload, like: Payload) -> str | None:
    """Why one client's upload cannot be used, None if it can; of its values, see `value_fault`."""
    names = {f"{part}/{name}" for part, leaves in upload.items() for name in leaves}
    expected = {f"{part}/{name}" for part, leaves in like.items() for name in leaves}
    if names != expected:
        return f"upload has {sorted(names ^ expected)[0]!r} too many or too few"
    for part, leaves in like.items():
        for name, leaf in leaves.items():
            got = upload[part][name]
            if got.shape != leaf.shape:
                return f"'{part}/{name}' has shape {list(got.shape)}, not {list(leaf.shape)}"
            if got.dtype != leaf.dtype:
                return f"'{part}/{name}' is {got.dtype}, not {leaf.dtype}"
    return None


def value_fault(upload: Payload, weight: Tensor, max_weight: float) -> str | None:
    if weight.numel() != 1:
        return f"the weight has shape {list(weight.shape)}, not one value"
    number = float(weight)
    if not math.isfinite(number) or not 0 < number <= max_weight:
        return f"weight {number:g} is not in (0, {max_weight:g}]"
    for part, leaves in upload.items():
        for name, leaf in leaves.items():
            if not bool(torch.isfinite(leaf).all()):
                return f"'{part}/{name}' is not finite"
    return None


def good_jobs(uploads: list[tuple[Payload, Tensor]], max_weight: float) -> Tensor:
    """Which of a stack of jobs passed every value check, [J]; the simulator's shapes are right by construction."""
    good = torch.ones_like(uploads[0][1], dtype=torch.bool)
    for upload, weight in uploads:
        good &= (weight > 0) & (weight <= max_weight)  # false for NaN too
        for leaves in upload.values():
            for leaf in leaves.values():
                good &= torch.isfinite(_largest(leaf))
    return good


def weights_fit(weights: list[Tensor], max_weight: float) -> Tensor:
    """Whether every weight is in its range; false for NaN too."""
    together = torch.stack(weights)
    return ((together > 0) & (together <= max_weight)).all()


def _largest(leaf: Tensor) -> Tensor:
    """The largest magnitude of every job, [J]: NaN and infinity survive it, and nothing is copied."""
    flat = leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)
    if not flat.is_floating_point():
        flat = flat.double()
    largest: Tensor = torch.linalg.vector_norm(flat, math.inf, dim=1)
    return largest


class Part(NamedTuple):
    """Weighted sums over some jobs, by part; the weights; how many jobs: [] or, with rows, [rows]."""

    sums: dict[str, Params]
    totals: dict[str, Tensor]
    clients: Tensor

    def finite(self) -> Tensor:
        """True only if every upload in it is finite: with positive weights, no sum hides a NaN or an infinity."""
        ends = [leaf.sum() for leaves in self.sums.values() for leaf in leaves.values() if leaf.is_floating_point()]
        total = ends[0] if ends else torch.zeros(())
        for end in ends[1:]:
            total = total + end
        return torch.isfinite(total)


class Mean:
    """A streaming weighted mean, by row: sum_j w_j u_j / sum_j w_j over the jobs added so far."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self.sums: Payload = {}
        self.weights: dict[str, Tensor] = {}
        self.clients: Tensor | None = None

    def add(self, uploads: list[Payload], weights: list[Tensor], rows: Tensor) -> None:
        """Stacked jobs [J, ...], one payload and weight a task, and the row position of every job, [J]."""
        self.merge(self.part(uploads, weights, rows))

    def part(self, uploads: list[Payload], weights: list[Tensor], rows: Tensor) -> Part:
        """The sums of these jobs alone: what `merge` takes, and a quick look at whether all of them are finite."""
        sums: dict[str, Params] = {}
        totals: dict[str, Tensor] = {}
        for upload, weight in zip(uploads, weights, strict=True):
            total = self._by_row(weight.double(), rows)
            for part, leaves in upload.items():
                sums[part] = {name: self._sum(leaf, weight, rows) for name, leaf in leaves.items()}
                totals[part] = total
        return Part(sums, totals, self._by_row(torch.ones_like(weights[0]), rows))

    def merge(self, part: Part) -> None:
        self.clients = part.clients if self.clients is None else self.clients + part.clients
        for name, leaves in part.sums.items():
            if name not in self.sums:
                self.sums[name], self.weights[name] = leaves, part.totals[name]
                continue
            for key, leaf in leaves.items():
                self.sums[name][key] += leaf
            self.weights[name] = self.weights[name] + part.totals[name]

    def _sum(self, leaf: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        weight = weight.to(leaf.dtype if leaf.is_floating_point() else torch.float32)
        if self.rows is None:
            flat = leaf.to(weight.dtype).reshape(len(leaf), -1)
            return torch.mv(flat.t(), weight).view(leaf.shape[1:])
        weighted = leaf * weight.view(-1, *[1] * (leaf.dim() - 1))
        out = weighted.new_zeros(self.rows, *leaf.shape[1:])
        return out.index_add_(0, rows, weighted)

    def _by_row(self, values: Tensor, rows: Tensor) -> Tensor:
        if self.rows is None:
            return values.sum()
        return values.new_zeros(self.rows).index_add_(0, rows, values)

    def reply(self) -> Reply:
        """The means; a row that nobody answered holds zeros and counts no clients."""
        if self.clients is None:
            return Reply({}, torch.zeros(() if self.rows is None else (self.rows,), dtype=torch.long))
        mean: Payload = {}
        for part, sums in self.sums.items():
            safe = torch.where(self.weights[part] > 0, self.weights[part], 1.0)
            mean[part] = {name: leaf / _beside(safe, leaf) for name, leaf in sums.items()}
        return Reply(mean, self.clients.long())


def _beside(weight: Tensor, leaf: Tensor) -> Tensor:
    """A weight, or one for every row, in the type and the dimensions of a leaf."""
    weight = weight.to(leaf.dtype)
    return weight.view(-1, *[1] * (leaf.dim() - 1)) if weight.dim() else weight


def require_held(task: str, reuse: tuple[str, ...], held: Payload) -> None:
    """A part that nobody sent or kept cannot be used again."""
    for name in reuse:
        if name not in held:
            raise ValueError(
                f"task '{task}' reuses '{name}', which this cohort does not hold: send it, or list it in the task's "
                f"`keeps` (held: {sorted(held)})"
            )


def require(good: int, minimum: int, task: str, dropped: list[Drop]) -> None:
    """Too few good uploads is an error that says what was wrong with the others."""
    if good >= minimum:
        return
    why = "; ".join(f"client {d.client}: {d.reason}" for d in dropped[:3]) or "no client answered"
    hint = "lower the required number of replies"
    if any("not finite" in drop.reason for drop in dropped):
        hint = f"lower the step size, for values are not finite, or {hint.removeprefix('lower ')}"
    raise TooFewReplies(f"task '{task}' has {good} good uploads, {minimum} needed ({why}): {hint}")
