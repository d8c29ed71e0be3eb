"""Loss, accuracy and other metrics of a model on a set of examples, over all, by class and by client.

Examples are scored in batches. Sums are kept, not scores, unless a metric is a function of all of them. A metric is
given tensors of its own: it may work in place.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedge.checks import brief
from fedge.core import Algorithm
from fedge.data import Data
from fedge.engine.runtime import Runtime
from fedge.handle import Handle
from fedge.inputs import Inputs, cast, count, leading, take, to
from fedge.metrics import Metric, Streamed
from fedge.problem import Problem, problem_of

BATCH = {"cpu": 250}  # examples: what lies between two layers fits a CPU's cache
MOST = 1000  # elsewhere
ROOM = 1 << 32  # bytes of outputs that metrics of all of them may keep


@torch.no_grad()
def batches(
    algorithm: Algorithm[Any], model: Handle, state: Any, x: Inputs, index: Tensor | None = None
) -> Iterator[Tensor]:
    """The scores [B, ...] of the examples, batch by batch; with an index, of those that it names."""
    step = BATCH.get(leading(x).device.type, MOST)
    for begin in range(0, count(x) if index is None else len(index), step):
        part = slice(begin, begin + step)
        yield algorithm.scores(model, state, model.laid_out(take(x, part if index is None else index[part])))


def scores(algorithm: Algorithm[Any], model: Handle, state: Any, x: Inputs) -> Tensor:
    """[N, classes], or what the model puts out, computed in batches."""
    return torch.cat(list(batches(algorithm, model, state, x)))


@torch.no_grad()
def evaluate(
    algorithm: Algorithm[Any],
    model: Handle,
    state: Any,
    x: Inputs,
    y: Tensor,
    classes: int,
    metrics: Mapping[str, Metric] | None = None,
    problem: Problem | None = None,
) -> dict[str, Any]:
    """{"loss", "accuracy", "class_accuracy"} and further metrics; regression targets (classes = 0) have no accuracy.

    The accuracy of a class without examples is None.
    """
    problem = problem_at(algorithm, model, x, y) if problem is None else problem
    tally = Tally(algorithm, problem.metrics() | dict(metrics or {}), classes if problem.kind == "classes" else 0)
    begin = 0
    for found in batches(algorithm, model, state, x):
        tally.add(found, y[begin : begin + len(found)], len(y))
        begin += len(found)
    return tally.result(y)


class Tally:
    """The sums of what was scored so far; the scores themselves where a metric needs all of them."""

    def __init__(self, algorithm: Algorithm[Any], metrics: Mapping[str, Metric], classes: int) -> None:
        self.algorithm, self.metrics, self.classes = algorithm, metrics, classes
        self.streamed = {name: metric for name, metric in metrics.items() if isinstance(metric, Streamed)}
        self.sums: dict[str, Tensor] = {}
        self.kept: list[Tensor] = []
        self.right: list[Tensor] = []
        self.losses: list[Tensor] = []

    def add(self, found: Tensor, y: Tensor, total: int) -> None:
        """One batch of `total` examples."""
        self.losses.append(self.algorithm.losses(found, y).double())
        for name, metric in self.streamed.items():
            sums: Tensor = measured(name, metric.sums, found.clone(), y.clone())
            self.sums[name] = metric.joined(self.sums[name], sums) if name in self.sums else sums
        if self.classes:
            self.right.append(found.argmax(1) == y)
        if len(self.streamed) < len(self.metrics):
            self._check_room(found, total)
            self.kept.append(found)

    def _check_room(self, found: Tensor, total: int) -> None:
        needed = found[:1].nbytes * total
        if not self.kept and needed > ROOM:
            whole = [name for name in self.metrics if name not in self.streamed]
            raise ValueError(
                f"metrics {whole} are functions of all outputs, which take {needed / 2**30:.1f} GiB of at most "
                f"{ROOM >> 30}: write them as fedge.metrics.Streamed, or evaluate on fewer examples"
            )

    def result(self, y: Tensor) -> dict[str, Any]:
        result: dict[str, Any] = {"loss": float(torch.cat(self.losses).mean())}
        whole = torch.cat(self.kept) if self.kept else None
        for name, metric in self.metrics.items():
            if isinstance(metric, Streamed):
                result[name] = number(name, measured(name, metric.value, self.sums[name]))
            elif whole is not None:
                result[name] = number(name, measured(name, metric, whole.clone(), y.clone()))
        return result | (self._by_class(y) if self.classes else {})

    def _by_class(self, y: Tensor) -> dict[str, Any]:
        right = torch.cat(self.right).long()
        total = torch.bincount(y, minlength=self.classes).tolist()
        hits = torch.bincount(y, weights=right, minlength=self.classes).tolist()
        each = [h / n if n else None for h, n in zip(hits, total, strict=True)]
        return {"accuracy": int(right.sum()) / len(y), "class_accuracy": each}


def number(name: str, value: Any) -> float:
    """What a metric returned, as a number that a file can hold."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        gave = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else brief(value)
        raise ValueError(f"metric {name!r} gave {gave}, it must give one number") from None


def measured(name: str, function: Callable[..., Any], *given: Any) -> Any:
    """What a metric gives; what it raises says which metric it was, and where."""
    try:
        return function(*given)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((one for one in reversed(frames) if "site-packages" not in one.filename), frames[-1])  # not torch's
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"metric {name!r} raised {words} ({last.filename}, line {last.lineno})") from error


def problem_at(algorithm: Algorithm[Any], model: Handle, x: Inputs, y: Tensor, values: Sequence[Any] = ()) -> Problem:
    """What kind of answers these targets want; with several labels per example, one is tried on the model."""
    tokens = not y.is_floating_point() and y.dim() > 1
    with torch.no_grad():
        shape = model.logits({}, take(x, slice(1))).shape if tokens else None
    return problem_of(y, algorithm.loss, values, shape)


class Judge:
    """Evaluates a state on the test set and, when wanted, on the training set."""

    def __init__(
        self,
        data: Data,
        runtime: Runtime,
        train: bool,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.classes, self.runtime, self.metrics = data.classes, runtime, metrics
        self.problem: Problem | None = None
        x, y = (to(cast(part, runtime.dtype), runtime.y.device) for part in (data.test_x, data.test_y))
        self.sets = {"test": (x, y)}
        if train:
            self.sets["train"] = (runtime.x, runtime.y)

    def __call__(self, algorithm: Algorithm[Any], state: Any) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.problem is None:
            self.problem = problem_at(algorithm, self.runtime.handle, *self.sets["test"])
        for name, (x, y) in self.sets.items():
            with self.runtime.judging():
                found = evaluate(algorithm, self.runtime.handle, state, x, y, self.classes, self.metrics, self.problem)
            record |= {f"{name}_{key}": value for key, value in found.items()}
        return record
