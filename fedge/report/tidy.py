"""Results as a table that other tools take: one flat dict per run, or per round, all with the same keys."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedge.report.errors import ReportError
from fedge.report.labels import flatten, varying
from fedge.report.read import RunFolder, read_all
from fedge.report.series import (
    Against,
    best_accuracy,
    check_target,
    clocked,
    elapsed,
    final_metric,
    last,
    megabytes,
    own_metrics,
    recorded,
    to_target,
)
from fedge.report.targets import stated_target
from fedge.runs.experiments import run_folders

ALWAYS = ("algorithm.name", "train.seed")
ROUND = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "up_bytes", "down_bytes", "seconds")
CLOCK: tuple[Against, Against] = ("virtual_seconds", "joules")
Row = dict[str, Any]


class Results(list[Row]):
    """The rows, a plain list of dicts; `frame()` is the same for pandas."""

    def frame(self) -> Any:
        """The rows as a pandas.DataFrame, one column per key; pandas has to be installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ReportError("frame() needs pandas: pip install pandas; the rows themselves need nothing") from None
        return pandas.DataFrame(list(self))


def results(*folders: Path | str, target: float | None = None, per: Literal["run", "round"] = "run") -> Results:
    """The runs in these folders as one tidy table: a list of flat dicts with the same keys.

    >>> frame = fedge.results("runs/steps").frame()  # of pandas, if it is installed  # doctest: +SKIP
    >>> frame.groupby("algorithm.lr")["final_accuracy"].agg(["mean", "std"])  # doctest: +SKIP

    A folder is a run's, or holds runs; one that failed before its first round is a row too. Rows are in the order of
    the folders given, and within one in that of the runs' names, numbers by their size (`seed-2` before `seed-10`):
    the same in whatever order the runs were made. Columns:
    `folder`, `label`, `state` (done, failed, unfinished), every field of the configuration in which the runs
    differ (`algorithm.lr`, `train.seed`), and what came of them, your own metrics
    among it (`final_f1`). With a `target` accuracy, that of the experiment file unless another is given, there are also
    `rounds_to_target` and `megabytes_to_target` (None: not reached). Runs with devices ([edge]) have `virtual_seconds`
    and `joules` too, and both to the target. With `keep = "best"` there are `best_round`, and the loss and every metric
    of that round (`best_loss`, `best_f1`). `per="round"` has a row per round instead, with accuracy, loss, metrics,
    bytes and seconds of that round and `megabytes` up to it.
    """
    if per not in ("run", "round"):
        raise ReportError(f"per is {per!r}, it must be 'run' or 'round'")
    if target is None:
        target = stated_target(folders)
    else:
        check_target(target)
    found: list[Path] = []
    for folder in folders:
        inside = run_folders(Path(folder), tried=True)
        if not inside:
            raise ReportError(f"{folder} holds no run: name a folder that `fedge run` or `fedge.train` wrote")
        found += sorted(inside, key=_natural)
    return Results(tidy(found, target) if per == "run" else rounds(found))


def _natural(folder: Path) -> list[tuple[float, str]]:
    """An order of names in which 2 is before 10, and 0.05 before 0.1."""
    parts = re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|\D+", folder.name)
    return [(float(part), "") if part[0].isdigit() else (math.inf, part) for part in parts]


def tidy(folders: Sequence[Path], target: float | None) -> list[Row]:
    """One row per run."""
    runs = read_all(folders)
    more = own_metrics(runs)
    own = on_training_examples(runs)
    clock, kept = clocked(runs), any("best_round" in run.summary for run in runs)
    return [
        about
        | _outcome(run, target)
        | (_on_devices(run, target) if clock else {})
        | {f"final_{name}": final_metric(run, name) for name in more}
        | (_best(run, ["loss", *more]) if kept else {})
        | {key: last(run, key) for key in own}
        for run, about in zip(runs, _about(runs), strict=True)
    ]


def on_training_examples(runs: Sequence[RunFolder]) -> list[str]:
    """Metrics client by client where clients have no test examples, in the order in which they came."""
    found = (key for run in runs for record in run.rounds for key in record if key.startswith("train_client_"))
    return list(dict.fromkeys(found))


def rounds(folders: Sequence[Path]) -> list[Row]:
    """One row per round of every run."""
    runs = read_all(folders)
    keys = [
        *ROUND,
        *(CLOCK if clocked(runs) else ()),
        *(f"test_{name}" for name in own_metrics(runs)),
        *on_training_examples(runs),
    ]
    return [
        about | {"round": record.get("round")} | {key: record.get(key) for key in keys} | {"megabytes": spent}
        for run, about in zip(runs, _about(runs), strict=True)
        for record, spent in zip(run.rounds, elapsed(run, "MB"), strict=True)
    ]


def _about(runs: Sequence[RunFolder]) -> list[Row]:
    """What a run is: its folder, label, state, and the fields in which it may differ from others."""
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in varying(flat) if key not in ("name", "algorithm.label")]
    keys += [key for key in ALWAYS if key not in keys and any(key in one for one in flat)]
    return [
        {"folder": str(run.path), "label": run.label, "state": _state(run)}
        | {key: one.get(key) for key in sorted(keys)}
        for run, one in zip(runs, flat, strict=True)
    ]


def _on_devices(run: RunFolder, target: float | None) -> Row:
    """Seconds and joules of the devices, where there was a clock."""
    row: Row = {name: elapsed(run, name)[-1] if run.rounds and recorded(run, name) else None for name in CLOCK}
    if target is not None:
        reached = to_target(run, target)
        row |= {f"{name}_to_target": None if reached is None else getattr(reached, name) for name in CLOCK}
    return row


def _best(run: RunFolder, names: Sequence[str]) -> Row:
    """The round that was kept, and what was measured then."""
    best = run.summary.get("best_round")
    then: Row = next((record for record in run.rounds if record.get("round") == best), {})
    return {"best_round": best} | {f"best_{name}": then.get(f"test_{name}") for name in names}


def _state(run: RunFolder) -> str:
    return "failed" if run.failed else "done" if run.finished else "unfinished"


def _outcome(run: RunFolder, target: float | None) -> Row:
    spent = elapsed(run, "seconds")
    row: Row = {
        "failed": run.failed,
        "rounds": len(run.rounds),
        "final_accuracy": run.summary.get("final_accuracy", last(run, "test_accuracy")),
        "best_accuracy": best_accuracy(run),
        "final_loss": run.summary.get("final_loss", last(run, "test_loss")),
        "final_train_accuracy": run.summary.get("final_train_accuracy", last(run, "train_accuracy")),
        "megabytes_up": megabytes(run, "up"),
        "megabytes_down": megabytes(run, "down"),
        "seconds": spent[-1] if spent else 0.0,
    }
    if target is not None:
        reached = to_target(run, target)
        row["rounds_to_target"] = None if reached is None else reached.round
        row["megabytes_to_target"] = None if reached is None else reached.megabytes
    return row
