"""Uploads are checked before any arithmetic; a bad one is dropped and named."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedge.core import Algorithm, Ask, Drop, Payload, Range, Task
from fedge.engine.clients.run_task import finished, parted
from fedge.engine.uploads.coding import is_coded

IN_A_ROW = 5  # rounds without enough good uploads, after which a run ends
TOO_LIGHT = re.compile(r"weight ((0|-\S+|nan) |\S+ is below)")  # of those that a client may not weigh
FEW = 1 << 17  # numbers that are copied faster than they are read twice
ROUNDING = 1 + 1e-6  # weights travel in single precision
NEARLY, ROUGHLY = 1.05, 2.0  # sums of many steps are off by less, those in half precision
LIGHTEST = 1e-30  # of all weights: its products with uploads, and their quotients, stay within single precision


class TooFewReplies(RuntimeError):
    """A phase had fewer good uploads than it needs; `dropped` are those that were lost or bad, if that is why."""

    def __init__(self, message: str, dropped: Sequence[Drop] = ()) -> None:
        super().__init__(message)
        self.dropped = list(dropped)


def template(task: Task, sent: Payload) -> Payload:
    """What `finish` returns in this task: the fold over no batches has the same names, shapes and types."""
    known = sent if task.first is None else {**sent, **task.first(sent)}
    upload, _ = finished(task, known, task.start(known), torch.tensor(1), torch.tensor(0))
    return upload


def upload_template(task: Task, sent: Payload) -> Payload:
    """The same without what the client remembers: what an upload is once it is decoded."""
    return parted(task, template(task, sent))[0]


def shape_fault(upload: Payload, like: Payload) -> str | None:
    """Why one client's upload cannot be used, None if it can; of its values, see `value_fault`."""
    if upload.keys() != like.keys():  # by themselves: a part without tensors has no name below it
        return f"upload has the part {_first(upload.keys() ^ like.keys())!r} too many or too few"
    for part, leaves in like.items():
        if upload[part].keys() != leaves.keys():
            other = _first(upload[part].keys() ^ leaves.keys())
            return f"upload has {f'{part}/{other}'!r} too many or too few"
        for name, leaf in leaves.items():
            got = upload[part][name]
            if got.shape != leaf.shape:
                return f"'{part}/{name}' has shape {list(got.shape)}, not {list(leaf.shape)}"
            if got.dtype != leaf.dtype:
                return f"'{part}/{name}' is {got.dtype}, not {leaf.dtype}"
    return None


def ordered(upload: Payload, like: Payload) -> Payload:
    """An upload of the right form, in the server's order of names and not in its client's: the state takes it over."""
    return {part: {name: upload[part][name] for name in leaves} for part, leaves in like.items()}


def _first(names: Iterable[object]) -> str:
    """One of the names that a device made up, of whatever type."""
    return min(map(str, names))


def range_fault(task: Task, upload: Payload, sent: Payload, examples: Tensor, whole_work: bool = True) -> str | None:
    """Which number of an upload is none that the task can make of what was sent and so many examples, [1].

    Of parts that a codec has changed the ranges are left alone, and of a client that may stop early what is the least.
    """
    for one in task.ranges:
        part, whole = one.part, one.whole
        if part not in upload or (task.codec is not None and is_coded(task, part, upload[part])):
            continue
        for name, leaf in upload[part].items():
            if one.name is not None and name != one.name:
                continue
            low, high = _ends(one if whole_work else one._replace(least=None), sent, examples, leaf.dtype)
            least, most = (float(end) for end in leaf.double().aminmax()) if leaf.numel() else (low, high)
            if math.isfinite(least + most) and not _below(low) <= least <= most <= high * ROUNDING:
                found = most if least >= _below(low) else least
                return f"'{part}/{name}' has {found:g}, it must be from {low:g} to {high:g}"
            if whole and bool((leaf != leaf.round()).any()):
                return f"'{part}/{name}' has numbers that are not whole"
    return None if task.contradiction is None else task.contradiction(upload)


def _ends(one: Range, sent: Payload, examples: Tensor, kind: torch.dtype) -> tuple[float, float]:
    """The least and the most of one client, with room for rounding where they depend on it."""
    room = ROUGHLY if kind in (torch.float16, torch.bfloat16) else NEARLY
    low = one.low if one.least is None else max(one.low, float(one.least(sent, examples)) / room)
    high = one.high if one.most is None else min(one.high, float(one.most(examples)) * _share(one, sent) * room)
    return low, high


def _share(one: Range, sent: Payload) -> float:
    share = None if one.shrunk is None else one.shrunk(sent)
    return 1.0 if share is None else float(share)


def _below(low: float) -> float:
    return low / ROUNDING if low > 0 else low * ROUNDING


def value_fault(upload: Payload, weight: Tensor, most: float) -> str | None:
    if weight.numel() != 1:
        return f"the weight has shape {list(weight.shape)}, not one value"
    number = float(weight)
    if (light := light_fault(number)) is not None:
        return light
    if not math.isfinite(number) or not 0 < number <= most * ROUNDING:
        return f"weight {number:g} is not in (0, {most:g}], the most that this client may weigh"
    for part, leaves in upload.items():
        for name, leaf in leaves.items():
            if not bool(torch.isfinite(leaf).all()):
                return f"'{part}/{name}' is not finite"
    return None


def light_fault(weight: float) -> str | None:
    """Why a weight above 0 does not count: in single precision it is, or all that it weighs, may be 0."""
    return f"weight {weight:g} is below {LIGHTEST:g}, the least that counts" if 0 < weight < LIGHTEST else None


def good_jobs(uploads: list[tuple[Payload, Tensor]], most: list[Tensor]) -> Tensor:
    """Which of a stack of jobs passed every value check, [J]; the simulator's shapes are right by construction."""
    good = torch.ones_like(uploads[0][1], dtype=torch.bool)
    for (upload, weight), limit in zip(uploads, most, strict=True):
        good &= (weight >= LIGHTEST) & (weight <= limit * ROUNDING)  # false for NaN too
        good &= finite_jobs(upload, good)
    return good


def finite_jobs(upload: Payload, good: Tensor) -> Tensor:
    """Which of a stack of jobs have finite tensors alone, [J]; `good` is what to begin with."""
    for leaves in upload.values():
        for leaf in leaves.values():
            good = good & torch.isfinite(largest(leaf))
    return good


def weights_fit(weights: list[Tensor], most: list[Tensor]) -> Tensor:
    """Whether every weight is in its range; false for NaN too."""
    fine = [(weight >= LIGHTEST) & (weight <= limit * ROUNDING) for weight, limit in zip(weights, most, strict=True)]
    return (fine[0] if len(fine) == 1 else torch.stack(fine)).all()


def largest(leaf: Tensor) -> Tensor:
    """The largest magnitude of every job, [J]: NaN and infinity survive it, and nothing is copied."""
    flat = leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)
    if not flat.is_floating_point():
        flat = flat.double()
    if flat.device.type == "cpu":  # where the norm takes twenty times as long
        if flat.numel() < FEW:
            return flat.abs().amax(1)
        low, high = flat[0].aminmax() if len(flat) == 1 else (flat.amin(1), flat.amax(1))  # one job is read once
        return torch.maximum(high, -low).view(-1)
    found: Tensor = torch.linalg.vector_norm(flat, math.inf, dim=1)
    return found


def seen(ask: Ask, known: Payload) -> Payload:
    """The parts that a client has before it in this ask: what is sent, and of what it holds, what is reused."""
    return {name: known[name] for name in (*ask.send, *ask.reuse)}


def require_held(task: str, reuse: tuple[str, ...], held: Payload) -> None:
    """A part that nobody sent or kept cannot be used again."""
    for name in reuse:
        if name not in held:
            raise ValueError(
                f"task '{task}' reuses '{name}', which this cohort does not hold: send it, or list it in the task's "
                f"`keeps` (held: {sorted(held)})"
            )


def good_clients(clients: list[int], dropped: list[Drop]) -> int:
    """Of how many clients an upload counts; `clients` has one entry per job, `dropped` one per bad job."""
    bad = Counter(drop.client for drop in dropped)
    return sum(jobs > bad[client] for client, jobs in Counter(clients).items())


def each_needed(algorithm: Algorithm[Any], task: Task) -> bool:
    """Whether an ask needs enough good uploads of its own, beside others in its phase: one of everybody, not by row.

    Not of a private algorithm: whether one client answers it well would decide over all uploads to the others.
    """
    return task.rows is None and algorithm.privacy() is None


def require(good: int, minimum: int, task: str, dropped: list[Drop]) -> None:
    """Good uploads of too few clients are an error that says what was wrong with the others."""
    if good >= minimum:
        return
    nobody = "no other client answered" if good else "no client answered"
    why = "; ".join(f"client {d.client}: {d.reason}" for d in dropped[:3]) or nobody
    hint = "lower the required number of replies"
    if any("not finite" in drop.reason for drop in dropped):
        hint = f"lower the step size, for values are not finite, or {hint.removeprefix('lower ')}"
    weighed = [drop.reason for drop in dropped if drop.reason.startswith("weight ")]
    if any(map(TOO_LIGHT.match, weighed)):
        hint = f"return a weight above 0 from `finish`, such as examples.float(), or {hint}"
    elif weighed:
        hint = f"weigh by numbers of examples or let the task's `heaviest` say how else, or {hint}"
    raise TooFewReplies(f"task '{task}' has good uploads of {good} clients, {minimum} needed ({why}): {hint}", dropped)
