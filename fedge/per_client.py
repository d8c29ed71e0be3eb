"""Metrics client by client: their mean, the worst tenth of the clients, and groups of clients.

    test_client_accuracy_mean            the mean over clients, whatever their sizes
    test_client_accuracy_worst_decile    the mean over the worst tenth of them, at least one
    test_client_accuracy/phone           the mean over the clients of the group `phone`

A client is judged on its test examples where the federation knows them (`test_`), else on its training examples
(`train_`), with the model that all clients share. One client's outputs are in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedge import inputs
from fedge.core import Algorithm, Params
from fedge.engine.runtime import Runtime, plain_runtime
from fedge.evaluate import Judge, batches, measured, number
from fedge.federation import Federation
from fedge.hooks import Observe, Record
from fedge.metrics import Accuracy, Metric, best_of, named
from fedge.problem import Problem
from fedge.runs.run import Run

UNUSUAL = re.compile(r"[^\w. -]")  # what trackers do not take in the name of a metric
Values = dict[str, list[float]]  # by metric, one per client; NaN where a client has none


class Clients:
    """The examples on which each client is judged, on the device."""

    def __init__(self, federation: Federation, runtime: Runtime) -> None:
        self.federation, self.runtime, data = federation, runtime, federation.data
        self.part = "train" if federation.test is None else "test"
        if federation.test is None:
            self.x, self.y, self.index = runtime.x, runtime.y, federation.index
            self.sizes: list[int] = federation.sizes.tolist()
            return
        device = runtime.y.device
        self.x = inputs.to(inputs.cast(data.test_x, runtime.dtype), device)
        self.y = data.test_y.to(device, runtime.y.dtype)
        self.index, self.sizes = torch.cat(federation.test), [len(one) for one in federation.test]

    def values(self, algorithm: Algorithm[Any], state: Any, wanted: Mapping[str, Metric]) -> Values:
        """Loss and metrics of every client."""
        found: Values = {name: [] for name in ("loss", *wanted)}
        for outputs, y in self._outputs(algorithm, state):
            if not len(y):
                for values in found.values():
                    values.append(math.nan)
                continue
            found["loss"].append(float(algorithm.losses(outputs, y).double().mean()))
            for name, metric in wanted.items():
                found[name].append(number(name, measured(name, metric, outputs, y)))
        return found

    @torch.no_grad()
    def _outputs(self, algorithm: Algorithm[Any], state: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets, client by client; scored in batches, whoever the examples belong to."""
        index = self.index.to(self.y.device)
        rest = batches(algorithm, self.runtime.handle, state, self.x, index)
        held, begin = list[Tensor](), 0
        for size in self.sizes:
            while sum(map(len, held)) < size:
                held.append(next(rest))
            outputs = torch.cat(held) if held else self.y.new_empty(0)
            held = [outputs[size:]] if len(outputs) > size else []
            yield outputs[:size], self.y[index[begin : begin + size]]
            begin += size

    def record(self, values: Values, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """What goes into the record of a round."""
        found: dict[str, float] = {}
        for name, each in values.items():
            place = f"{self.part}_client_{name}"
            found |= _summary(place, each, best_of(name, metrics.get(name)) == "smallest")
            for group in sorted(set(self.federation.groups)):
                mine = [v for v, g in zip(each, self.federation.groups, strict=True) if g == group]
                found[f"{place}/{UNUSUAL.sub('_', group)}"] = mean(mine)
        return found

    def rows(self, values: Values) -> list[dict[str, Any]]:
        """A table with one row per client."""
        fed = self.federation
        about = [
            {"client": fed.name(k), **({"group": fed.groups[k]} if fed.groups else {}), "examples": size}
            for k, size in enumerate(self.sizes)
        ]
        return [one | {name: each[k] for name, each in values.items()} for k, one in enumerate(about)]


def wanted(problem: Problem, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """What is computed for a client beside its loss."""
    own: dict[str, Metric] = {"accuracy": Accuracy()} if problem.kind == "classes" else {}
    return {**own, **problem.metrics(), **metrics}


def by_client(
    run: Run[Any], federation: Federation, metrics: Mapping[str, Metric | str] | Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The trained model on each client's own examples: one row per client with its name, group, size and metrics.

    Test examples where the federation knows whose they are, else training examples.
    """
    runtime = replace(plain_runtime(run.algorithm, federation, leaf_device(run.params)), handle=run.handle)
    clients, chosen = Clients(federation, runtime), wanted(run.problem, named(metrics))
    return clients.rows(clients.values(run.algorithm, run.state, chosen))


def leaf_device(params: Params) -> torch.device:
    return next(iter(params.values())).device


def _summary(name: str, values: Sequence[float], smaller: bool) -> dict[str, float]:
    known = sorted((value for value in values if not math.isnan(value)), reverse=smaller)
    return {f"{name}_mean": mean(known), f"{name}_worst_decile": mean(known[: max(1, len(known) // 10)])}


def mean(values: Sequence[float]) -> float:
    """The mean of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def with_names(record: Record, name: Callable[[int], str]) -> Record:
    """The record with the names of the clients beside their numbers."""
    who = {"cohort_names": [name(client) for client in record["cohort"]]} if "cohort" in record else {}
    return record | who | {"dropped": [{**drop, "name": name(drop["client"])} for drop in record["dropped"]]}


class Jury:
    """Judges a run on the test set, on the training set, and client by client, as far as that is wanted."""

    def __init__(self, federation: Federation, runtime: Runtime, observe: Observe) -> None:
        self.metrics, self.runtime = observe.functions, runtime
        self.judge = Judge(federation.data, runtime, observe.evaluate_train, self.metrics)
        self.clients = Clients(federation, runtime) if observe.per_client else None

    def __call__(self, run: Run[Any]) -> Record:
        record = self.judge(run.algorithm, run.state)
        if self.clients is not None:
            chosen = wanted(run.problem, self.metrics)
            with self.runtime.judging():
                record |= self.clients.record(self.clients.values(run.algorithm, run.state, chosen), chosen)
        return record
