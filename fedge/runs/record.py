"""What a round leaves in the record, and what a private run leaves out of it."""

from __future__ import annotations

import logging
import time
from typing import Any

from fedge.core import Algorithm, Progress
from fedge.engine.links.base_link import BaseLink
from fedge.ledger import Row
from fedge.runs.notes import noted
from fedge.runs.run import Record, Run

log = logging.getLogger("fedge")
HIDDEN = ("cohort", "phases")  # of a private run: who took part is nobody's business


def record_of(run: Run[Any], link: BaseLink, progress: Progress, number: int, rows: list[Row], begin: float) -> Record:
    """A round that began at `begin` by `time.perf_counter`; evaluation adds its own."""
    about: Record = {
        "round": number,
        "cohort": sorted(progress.cohort),
        "up_bytes": sum(row.up for row in rows),
        "down_bytes": sum(row.down for row in rows),
        "seconds": time.perf_counter() - begin,
        "dropped": [drop._asdict() for drop in progress.dropped],
        **noted(run.algorithm.notes(run.state) | progress.notes),
        **link.notes(),
    }
    return about if run.algorithm.privacy() is None else discreet(about)


def why_ended(algorithm: Algorithm[Any], error: Exception) -> str:
    """Why a run has too few good uploads, for its folder; of a private one the operator's log alone says whose."""
    reason = " ".join(str(error).split())
    if algorithm.privacy() is None:
        return reason
    log.warning("%s", reason)
    return "too few good uploads (the log says whose)"


def discreet(record: Record) -> Record:
    """Of a private run: who was dropped, and why, goes to the operator's log alone."""
    for drop in record["dropped"]:
        where = (record["round"], drop["client"], drop["task"], drop["reason"])
        log.warning("round %d: client %d dropped in '%s': %s", *where)
    return {name: value for name, value in record.items() if name not in HIDDEN} | {"dropped": []}
