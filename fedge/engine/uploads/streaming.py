"""Uploads that are merged as they come, for rules that stream: sums by row; nothing else of the model is kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fedge.core import Combine, Params, Payload, Reply
from fedge.engine.uploads.beside import Few, bounded_means, mean_type
from fedge.engine.uploads.coding import split


class Part(NamedTuple):
    """Weighted sums over some jobs, by part; the weights; how many jobs: [] or, with rows, [rows].

    Small parts under a rule that limits them are there as they came. Of one job alone `sums` are its upload as it came,
    and its weight is in `alone`: a large model is then read and added up in one pass.
    """

    sums: dict[str, Params]
    totals: dict[str, Tensor]
    clients: Tensor
    few: list[Few]
    alone: dict[str, Tensor]  # by part

    def finite(self) -> Tensor:
        """True only if every upload in it is finite: with positive weights, no sum hides a NaN or an infinity."""
        parts = [*self.sums.values(), *(part for few in self.few for part in few.parts.values())]
        ends = [leaf.sum() for leaves in parts for leaf in leaves.values() if leaf.is_floating_point()]
        return torch.isfinite(torch.stack(ends).sum() if ends else self.clients)


class Sums:
    """A streaming weighted mean, by row: sum_j w_j u_j / sum_j w_j over what `each` made of the jobs added so far."""

    def __init__(self, combine: Combine, rows: int | None, losses: Collection[str] = ()) -> None:
        self.combine, self.rows, self.losses = combine, rows, losses
        self.sums: Payload = {}
        self.types: dict[str, dict[str, torch.dtype]] = {}  # of the uploads
        self.weights: dict[str, Tensor] = {}
        self.clients: Tensor | None = None
        self.few: list[Few] = []

    def part(self, uploads: list[Payload], weights: list[Tensor], rows: Tensor) -> Part:
        """The sums of these jobs alone: what `merge` takes, and a quick look at whether all of them are finite.

        Stacked jobs [J, ...], one payload and weight per task, and the row position of every job, [J].
        """
        sums: dict[str, Params] = {}
        totals: dict[str, Tensor] = {}
        few: list[Few] = []
        alone: dict[str, Tensor] = {}
        for upload, weight in zip(uploads, weights, strict=True):
            total = self._by_row(weight.double(), rows)
            large, small = split(upload, self.losses)
            if self.combine.limits and small:
                few.append(Few(small, weight, rows))
                small = {}
            for part, leaves in {**(self.combine.each(large) if large else {}), **small}.items():
                self.types[part] = {name: mean_type(leaf) for name, leaf in leaves.items()}
                totals[part] = total
                if self.rows is None and len(weight) == 1 and all(map(torch.is_floating_point, leaves.values())):
                    sums[part] = {name: leaf[0].to(sum_type(leaf)) for name, leaf in leaves.items()}
                    alone[part] = weight[0]
                else:
                    sums[part] = {name: self._sum(leaf, weight, rows) for name, leaf in leaves.items()}
        return Part(sums, totals, self._count(weights[0], rows), few, alone)

    def merge(self, part: Part) -> None:
        self.clients = part.clients if self.clients is None else self.clients + part.clients
        self.few += part.few
        for name, leaves in part.sums.items():
            weight = part.alone.get(name)
            if name not in self.sums:
                own = leaves if weight is None else {key: leaf * weight.to(leaf.dtype) for key, leaf in leaves.items()}
                self.sums[name], self.weights[name] = own, part.totals[name]
                continue
            for key, leaf in leaves.items():
                if weight is None:
                    self.sums[name][key] += leaf
                else:
                    self.sums[name][key].addcmul_(leaf, weight.to(leaf.dtype))
            self.weights[name] = self.weights[name] + part.totals[name]

    def _sum(self, leaf: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        weight = weight.to(sum_type(leaf))
        leaf = leaf.to(weight.dtype)
        if self.rows is None:
            return torch.mv(leaf.reshape(len(leaf), -1).t(), weight).view(leaf.shape[1:])
        weighted = leaf * weight.view(-1, *[1] * (leaf.dim() - 1))
        out = weighted.new_zeros(self.rows, *leaf.shape[1:])
        return out.index_add_(0, rows, weighted)

    def _count(self, weight: Tensor, rows: Tensor) -> Tensor:
        """How many jobs there are."""
        if self.rows is None:
            return weight.new_full((), len(weight))
        return self._by_row(torch.ones_like(weight), rows)

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
            kinds = self.types[part]
            mean[part] = {name: (leaf / _beside(safe, leaf)).to(kinds[name]) for name, leaf in sums.items()}
        return Reply({**mean, **bounded_means(self.few, self.rows, self.losses)}, self.clients.long())


def sum_type(leaf: Tensor) -> torch.dtype:
    """What uploads of this type are added up in: at least fp32, whose range no sum of half precision leaves."""
    return torch.float64 if leaf.dtype == torch.float64 else torch.float32


def _beside(weight: Tensor, leaf: Tensor) -> Tensor:
    """A weight, or one for every row, in the type and the dimensions of a leaf."""
    weight = weight.to(leaf.dtype)
    return weight.view(-1, *[1] * (leaf.dim() - 1)) if weight.dim() else weight
