"""Running a task's fold: for one job, plainly; for many jobs at once, vectorised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from fedge.core import Batch, Carry, Params, Payload, Task
from fedge.engine.clients.batches import Schedule
from fedge.engine.recording import pytree
from fedge.engine.recording.c_program import Native, steps_of
from fedge.engine.recording.payoff import Ahead, endless
from fedge.engine.recording.recorder import Traced
from fedge.engine.recording.replayed import Replayed
from fedge.engine.recording.untouched import untouched
from fedge.handle.global_draws import drawn
from fedge.keys import FINISH, fold_tensor

FINE = 4  # binary digits of the height of a stack on a CPU

Upload = tuple[Payload, Tensor]
Gather = Callable[[Tensor, Tensor, Tensor], Batch]  # pool indices, mask, keys -> stacked batch


class StepError(RuntimeError):
    """Client work raised; says at which step."""

    def __init__(self, step: int | str, error: Exception) -> None:
        super().__init__(f"step {step}: {type(error).__name__}: {error}")
        self.step = step


def fold_one(
    task: Task,
    sent: Payload,
    batches: Iterable[Batch],
    examples: int,
    row: Tensor,
    take: Traced | None = None,
    record: bool = True,
    key: Tensor | None = None,
) -> Upload:
    """start, step over every batch, finish: what a device does. `take` is the step in a form that records itself.

    `key` is what `finish` may draw with. The upload still has the parts that the client remembers.
    """
    step: int | str = "start"
    state = drawn()
    try:
        carry = task.start(sent) if take is None else pytree.map_(_own, task.start(sent))
        if take is None or not (record or take.recorded):
            once = one_step(task)
            for step, batch in enumerate(batches):
                with untouched(step == 0, sent=sent, carry=carry, batch=batch):
                    carry = once(sent, carry, batch, row)
        else:
            own = None if record else one_step(task)
            for step, found in enumerate(take.fold(sent, carry, ((batch,) for batch in batches), row, own)):  # noqa: B007
                carry = found
        step = "finish"
        upload = _apart(finished(task, sent, carry, torch.tensor(examples, device=row.device), key), carry)
        if not torch.equal(state, drawn()):
            raise RuntimeError("the work drew from torch's global generator: only nn.Dropout's masks are addressed")
        return upload
    except Exception as error:
        _fail(step, error)


def _fail(step: int | str, error: Exception) -> NoReturn:
    raise StepError(step, error) from error


def finished(task: Task, sent: Payload, carry: Carry, examples: Tensor, key: Tensor | None = None) -> Upload:
    """`finish`, with a check of what it returned: tensors by part and name, and a weight."""
    found: Any = task.finish(sent, carry, examples, key) if task.draws else task.finish(sent, carry, examples)
    shaped = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], dict)
    parts = list(found[0].values()) if shaped else [None]
    nested = all(isinstance(part, dict) and all(isinstance(t, Tensor) for t in part.values()) for part in parts)
    if not shaped or not nested or not isinstance(found[1], Tensor):
        raise TypeError(
            "finish must return ({part: {name: tensor}}, weight), the weight a tensor such as examples.float(); "
            f"it returned {_outline(found)}"
        )
    upload: Upload = found
    if not upload[1].is_floating_point():
        raise TypeError(
            f"finish returned a weight of {upload[1].dtype}: write examples.float(), or a floating tensor of ones"
        )
    if missing := [part for part in task.remembers if part not in upload[0]]:
        raise ValueError(
            f"the task remembers '{missing[0]}', but finish returned {sorted(upload[0])}: return it as well"
        )
    return upload


def parted(task: Task, upload: Payload) -> tuple[Payload, Payload]:
    """What travels, and what the client remembers."""
    travels = {name: part for name, part in upload.items() if name not in task.remembers}
    return travels, {name: upload[name] for name in task.remembers}


def finish_keys(task: Task, client_key: Tensor, position: int, row: Tensor) -> Tensor | None:
    """The address of what `finish` draws; None if it draws nothing."""
    return fold_tensor(client_key, FINISH, position, row).to(row.device) if task.draws else None


def _outline(thing: Any) -> str:
    """The structure of nested tensors in a few words."""
    if isinstance(thing, dict):
        return "{" + ", ".join(f"{key!r}: {_outline(value)}" for key, value in list(thing.items())[:3]) + "}"
    if isinstance(thing, tuple):
        return "(" + ", ".join(_outline(one) for one in thing) + ")"
    return type(thing).__name__


def relabelled(task: Task, batch: Batch, row: Tensor) -> Batch:
    """The batch as this row sees it."""
    return batch if task.relabel is None else batch._replace(y=task.relabel(batch.y, row))


def one_step(task: Task) -> Callable[[Payload, Carry, Batch, Tensor], Carry]:
    """A task's step on the labels of a row."""
    return lambda sent, carry, batch, row: task.step(sent, carry, relabelled(task, batch, row))


class Stacked:
    """The same fold for J jobs stacked on a leading axis; `dims` says which sent parts have that axis.

    Jobs are sorted by their number of steps. A job that is done leaves the stack, and `step` never sees an empty batch.
    About `most` examples are gathered at a time. A stack has few heights, each of which can be recorded: those up to
    16, and then 18, 20, ..., 32, 36, ..., or if it is `coarse` 1, 2, 4, 8, ...; finished jobs stay until the next of
    these heights is reached and repeat their last batch, and the result is thrown away: at most an eighth more than the
    necessary work, or twice as much. With `native`, which does not know heights, jobs leave as they are done.
    """

    def __init__(
        self,
        task: Task,
        dims: dict[str, int | None],
        compile: bool = False,
        most: int = 1 << 20,
        ahead: Ahead = endless,
        coarse: bool = False,
        native: bool = False,
    ) -> None:
        self.dims, self.most, self.coarse = dims, most, coarse

        def first(sent: Payload, row: Tensor) -> Carry:
            return task.start(sent)

        self.start = Replayed(vmap(first, in_dims=(dims, 0), randomness="error"), ahead=ahead)
        self.step = Traced(vmap(one_step(task), in_dims=(dims, 0, 0, 0), randomness="error"), compile, ahead)
        self.native = Native(one_step(task), self.step, dims) if native else None
        ends = (dims, 0, 0, 0) if task.draws else (dims, 0, 0)
        last = vmap(partial(finished, task), in_dims=ends, randomness="error")
        self.finish, self.spend = Replayed(last, ahead=ahead), Replayed(last, spends=1, ahead=ahead)

    def __call__(
        self, sent: Payload, schedule: Schedule, gather: Gather, rows: Tensor, keys: Tensor | None = None
    ) -> Upload:
        sizes = schedule.sizes.to(rows.device)  # before the steps: waiting for a copy would wait for all queued work
        carry, done, some = pytree.map_(_own, self.start(sent, rows)), [], sent
        active = height = len(rows)  # at work, and in the stack
        for begin, end, left in schedule.segments():
            if left < active:
                done.append(pytree.map_(lambda leaf, a=left, b=active: leaf[a:b].clone(), carry))
                active = left
            if (wanted := self._height(left, height)) < height:
                height = wanted
                carry = pytree.map_(lambda leaf, n=height: leaf[:n].contiguous(), carry)
                some = {name: self._head(name, part, height) for name, part in sent.items()}
            blocks = (gather(*drawn) for drawn in schedule.blocks(begin, end, height, self.most))
            if self.native is not None:
                carry = self.native.fold(some, carry, blocks, rows[:height])
                continue
            for found in self.step.fold(some, carry, map(steps_of, blocks), rows[:height]):
                carry = found
        if done:
            last = pytree.map_(lambda leaf: leaf[:active], carry)
            carry = pytree.map_(lambda *leaves: torch.cat(leaves), last, *reversed(done))
        more = [] if keys is None else [keys]
        if self.step.holds_the_carry:
            return _apart(self.finish(sent, carry, sizes, *more), carry)
        upload: Upload = self.spend(sent, carry, sizes, *more)
        return upload

    @property
    def settled(self) -> bool:
        """Whether its steps are recorded, or cannot be."""
        return self.native is not None or self.step.settled

    def _height(self, active: int, height: int) -> int:
        """Stack height for `active` jobs; never grows."""
        if self.native is not None:
            return active
        step = 1 << max(0, (active - 1).bit_length() - (0 if self.coarse else FINE))
        return min(height, -(-active // step) * step)

    def _head(self, name: str, part: Params, count: int) -> Params:
        return part if self.dims[name] is None else pytree.map_(lambda leaf: leaf[:count], part)


def _apart(upload: Upload, carry: Carry) -> Upload:
    """The upload, copied where it is the carry itself: the next fold may overwrite that."""
    taken = {leaf.untyped_storage().data_ptr() for leaf in pytree.leaves(carry)}

    def own(leaf: Tensor) -> Tensor:
        return leaf.clone() if leaf.untyped_storage().data_ptr() in taken else leaf

    return pytree.map_(own, upload[0]), own(upload[1])


def _own(leaf: Any) -> Tensor:
    """A copy that the steps may overwrite."""
    if not isinstance(leaf, Tensor):
        raise TypeError(f"start returned a {type(leaf).__name__} in the carry: only tensors can be carried")
    return leaf.clone(memory_format=torch.contiguous_format)
