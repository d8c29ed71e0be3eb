"""What a run folder holds is checked before a run goes on with it: anybody may have changed the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fedge.checks import MOST, brief
from fedge.ledger import Row
from fedge.runs.checkpoint import CheckpointError
from fedge.runs.lines import DamagedFile, Record

LINES = {"rounds.jsonl", "ledger.jsonl"}
_ROW = {one.name: (int | None if "wire" in one.name else str if one.name == "task" else int) for one in fields(Row)}


def check_content(content: Any) -> None:
    """A checkpoint has its parts, each of its kind; the state's own shape is for the algorithm to judge."""
    kinds: dict[str, type] = {"config": dict, "round": int, "engine": dict}
    for name, kind in kinds.items():
        if not isinstance(content, Mapping) or not isinstance(content.get(name), kind):
            raise CheckpointError(f"its checkpoint has no {name!r} of type {kind.__name__}: it is damaged")
    if isinstance(content["round"], bool) or not 0 <= content["round"] <= MOST:
        round = brief(content["round"])
        raise CheckpointError(f"its checkpoint is of round {round}, which is from 0 to {MOST}: it is damaged")
    if "state" not in content:
        raise CheckpointError(f"its checkpoint, of round {content['round']}, has no state: it is damaged")
    clients = content.get("clients", {})
    if not isinstance(clients, dict) or not all(map(_is_memory, clients.values())):
        raise CheckpointError("what clients remember is no table of tensors in its checkpoint: it is damaged")
    sums = content.get("lines", {})
    if (
        not isinstance(sums, dict)
        or (sums and not sums.keys() >= LINES)
        or not all(isinstance(one, Tensor) and _are_sums(one) for one in sums.values())
    ):
        raise CheckpointError("its checkpoint has no checksums of lines: it is damaged")
    if "examples" in content and not _is_fingerprint(content["examples"]):
        raise CheckpointError("what its checkpoint says of the examples is no table of numbers: it is damaged")


def _is_memory(found: Any) -> bool:
    """A part that clients remember: [N, 2] clients and rows, and of every leaf [N, ...]."""
    if not isinstance(found, dict) or not isinstance(found.get("leaves"), dict):
        return False
    jobs, leaves = found.get("jobs"), found["leaves"].values()
    if not isinstance(jobs, Tensor) or jobs.dtype != torch.int64 or jobs.dim() != 2 or jobs.shape[1] != 2:
        return False
    return all(isinstance(leaf, Tensor) and leaf.shape[:1] == jobs.shape[:1] for leaf in leaves)


def _is_fingerprint(found: Any) -> bool:
    return isinstance(found, Tensor) and found.dtype == torch.float64 and found.dim() == 2 and found.shape[1] == 2


def _are_sums(found: Tensor) -> bool:
    return found.dtype == torch.int32 and found.dim() == 1


def check_records(records: list[Record], rows: list[Record], round: int) -> None:
    """The rounds are 1 to `round`, and the bytes of each are those of its asks in the ledger."""
    if len(records) != round or any(record["round"] != number for number, record in enumerate(records, 1)):
        raise DamagedFile(f"the checkpoint is of round {round}, but rounds.jsonl has {len(records)} of its rounds")
    found = as_rows(rows)
    for way in ("up", "down"):
        moved: Counter[int] = Counter()
        for row in found:
            moved[row.round] += getattr(row, way)
        for record in records:
            if record.get(f"{way}_bytes", moved[record["round"]]) != moved[record["round"]]:
                raise DamagedFile(
                    f"round {record['round']} has {record.get(f'{way}_bytes')!r} bytes {way} in rounds.jsonl, but "
                    f"{moved[record['round']]} in ledger.jsonl"
                )


def as_rows(rows: list[Record]) -> list[Row]:
    for number, row in enumerate(rows, 1):
        wrong = [name for name, kind in _ROW.items() if not isinstance(row.get(name), kind)]
        if wrong or row.keys() - _ROW.keys():
            name = (wrong or sorted(row.keys() - _ROW.keys()))[0]
            raise DamagedFile(f"line {number} of ledger.jsonl has {name!r} = {str(row.get(name))[:40]}")
    return [Row(**row) for row in rows]
