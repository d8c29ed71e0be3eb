"""Uploads that are kept until all are there, for rules that need them together."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Combine, Params, Payload, Reply, Uploads
from fedge.engine.uploads import beside
from fedge.engine.uploads.coding import split
from fedge.ledger import payload_bytes
from fedge.once import is_new

log = logging.getLogger("fedge")


class Piece(NamedTuple):
    """Some jobs: one payload [J, ...] and weights [J] per task, row positions [J], and the jobs' ids [J]."""

    uploads: list[Payload]
    weights: list[Tensor]
    positions: Tensor
    clients: Tensor

    def to(self, device: torch.device) -> Piece:
        uploads = [{n: tree.map_(lambda leaf: leaf.to(device), p) for n, p in one.items()} for one in self.uploads]
        return Piece(uploads, [w.to(device) for w in self.weights], self.positions.to(device), self.clients)


class Stack:
    """Every good upload of an ask, in the order of (client, row), whatever the order in which they came."""

    def __init__(self, combine: Combine, rows: int | None, losses: Collection[str] = ()) -> None:
        self.combine, self.rows, self.losses = combine, rows, losses
        self.pieces: list[Piece] = []

    def add(self, uploads: list[Payload], weights: list[Tensor], positions: Tensor, clients: Tensor) -> None:
        if len(clients):
            self.pieces.append(Piece(uploads, weights, positions, clients.cpu()))

    def reply(self) -> Reply:
        """One row after another; a row that nobody answered holds zeros and counts no clients."""
        if not self.pieces:
            return Reply({}, torch.zeros(() if self.rows is None else (self.rows,), dtype=torch.long))
        whole = self._whole()
        self._tell(whole)
        compared = whole._replace(uploads=[self._compared(upload, whole.clients) for upload in whole.uploads])
        found = [self._row(compared, row) for row in range(self.rows or 1)]
        if self.rows is None:
            mean, clients = found[0][0], found[0][1]
        else:
            like = next(mean for mean, count in found if int(count))
            empty = {part: tree.zeros_like(leaves) for part, leaves in like.items()}
            filled = [mean if int(count) else empty for mean, count in found]
            mean = {part: tree.stack([one[part] for one in filled]) for part in like}
            clients = torch.stack([count for _, count in found])
        parts = {part: leaves for one in whole.uploads for part, leaves in one.items()}
        weights = {part: w for one, w in zip(whole.uploads, whole.weights, strict=True) for part in one}
        return Reply(mean, clients, Uploads(parts, weights, whole.positions, whole.clients))

    def _whole(self) -> Piece:
        order = sorted(
            (client, position, at)
            for at, (client, position) in enumerate(
                (client, position)
                for piece in self.pieces
                for client, position in zip(piece.clients.tolist(), piece.positions.tolist(), strict=True)
            )
        )
        device = self.pieces[0].positions.device
        chosen = torch.tensor([at for *_, at in order])
        there = chosen.to(device)
        tasks = range(len(self.pieces[0].uploads))
        uploads = [
            {part: _joined([piece.uploads[task][part] for piece in self.pieces], there) for part in first}
            for task, first in enumerate(self.pieces[0].uploads)
        ]
        weights = [torch.cat([piece.weights[task] for piece in self.pieces])[there] for task in tasks]
        positions = torch.cat([piece.positions for piece in self.pieces])[there]
        return Piece(uploads, weights, positions, torch.cat([piece.clients for piece in self.pieces])[chosen])

    def _compared(self, upload: Payload, clients: Tensor) -> Payload:
        large, small = split(upload, self.losses)
        return {**(self.combine.among(large, clients) if large else {}), **small}

    def _row(self, whole: Piece, row: int) -> tuple[Payload, Tensor]:
        chosen = whole.positions == row if self.rows is not None else torch.ones_like(whole.positions, dtype=torch.bool)
        count = chosen.sum()
        mean: Payload = {}
        for upload, weight in zip(whole.uploads, whole.weights, strict=True) if int(count) else ():
            large, small = split({n: tree.take(p, chosen) for n, p in upload.items()}, self.losses)
            mean |= self.combine.together(large, weight[chosen]) if large else {}
            counted = weight[chosen]
            if not self.combine.gathers:  # a rule: weights do not count
                small = {name: beside.bounded_part(name, part, self.losses) for name, part in small.items()}
                counted = torch.ones_like(counted)
            mean |= {name: beside.mean(part, counted) for name, part in small.items()}
        return mean, count

    def _tell(self, whole: Piece) -> None:
        """Once for every rule: what it needs beyond what a mean would."""
        name = type(self.combine).__name__
        if is_new(("gathers", name)):
            size = sum(payload_bytes(upload) for upload in whole.uploads)
            log.info("%s needs all %d uploads at once: %.1f MB", name, len(whole.clients), size / 1e6)


def _joined(parts: list[Params], order: Tensor) -> Params:
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
