"""What the tests of sweeps, of the paper and of `fedge reproduce` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks.paper import places
from benchmarks.paper.claims import claims
from fedge import sweep
from fedge.cli.app import app
from fedge.sweep import Entry, Runner, Store
from fedge.sweep.runner import Listener

from .facts import names, numbers

FILES = Path(__file__).parents[1] / "benchmarks" / "paper"


class Counting(Listener):
    def __init__(self) -> None:
        self.rounds: list[str] = []

    def round(self, entry: Entry, record: dict) -> None:
        self.rounds.append(f"{entry} {record['round']}")


def runner(out: Path, stop: Callable[[], bool] = lambda: False) -> Runner:
    return Runner(out, "cpu", stop=stop, listener=Counting())


def tune(runner: Runner, dataset: str, **options: Any) -> list[dict]:
    return sweep.tune(runner, places.files(), dataset, **options)


def facts(wanted: list[Entry], store: Store) -> list[tuple[list[str], list[float], bool | None]]:
    """The names and numbers of every claim, and whether it holds."""
    return [(names(claim.said), numbers(claim.said), claim.holds) for claim in claims(wanted, store)]


def row(text: str, *start: str) -> list[str]:
    """The cells of the one row of a table that starts with these."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (found,) = [cells for cells in rows if cells[: len(start)] == list(start)]
    return found


def said(wanted: list[Entry], store: Store) -> list[str]:
    return [str(claim) for claim in claims(wanted, store)]


def fake(entry: Entry, accuracy: float, **more: object) -> dict:
    return {
        "key": entry.key,
        "experiment": entry.experiment,
        "cell": entry.cell,
        "label": entry.label,
        "seed": entry.seed,
        "failed": None,
        "final_accuracy": accuracy,
        "final_train_accuracy": accuracy,
        "test_accuracy": [0.1, accuracy],
        "train_accuracy": [0.1, accuracy],
        "rounds": 2,
        "up_bytes": 3e6,
        "down_bytes": 3e6,
        "setup_bytes": 2e6,
        "seconds_a_round": 0.5,
        "hardware": "a machine",
        "engine": {"precision": "fp32"},
        **more,
    }


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["reproduce", *words])
    return found.exit_code, found.output
