"""Rounds as an MLflow run. Without MLFLOW_TRACKING_URI they go to a database beside the run folders: no server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedge import atomic, regular
from fedge.report.trackers import Tracker, missing, plain

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

DATABASE, ID = "mlflow.db", "mlflow.txt"
BESIDE = ("", "-journal", "-wal", "-shm")  # the endings of what SQLite writes
MOST = 1000  # bytes of a run's id; MLflow's have 32
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}  # unless you set them


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: two that make the database at once both fail."""
    with open(lock, "w", opener=atomic.in_place) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class MLflow(Tracker):
    """`mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db` shows it; a resumed run goes on in its old place.

    FOLDER is the one that holds the run folder; its name is that of the experiment.
    """

    def __init__(self, folder: Path | str, title: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing("mlflow", "logging to MLflow") from error
        for name, value in PATIENCE.items():  # by default a server that is away holds up a round for minutes
            os.environ.setdefault(name, value)
        own = Path(folder).resolve()
        own.mkdir(parents=True, exist_ok=True)
        for ending in BESIDE:
            atomic.refuse_link(own.parent / f"{DATABASE}{ending}")
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own.parent / DATABASE}"
        with _alone(own.parent / f".{DATABASE}.lock"):
            self._client: Any = MlflowClient(tracking_uri=where)
            self.run = self._known(own) or self._begin(own, title, config or {})

    def _known(self, own: Path) -> str | None:
        """The run that an earlier session began in this folder."""
        try:
            found = regular.content(own / ID, MOST).decode().strip()
            self._client.update_run(found, status="RUNNING")
        except Exception:  # another place, or removed there: begin anew
            return None
        return found

    def _begin(self, own: Path, title: str, config: Mapping[str, Any]) -> str:
        name = own.parent.name
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        run = str(self._client.create_run(experiment, run_name=title).info.run_id)
        for key, value in plain(config).items():
            self._client.log_param(run, key, value)
        atomic.write_atomically(own / ID, run.encode())
        return run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self.run, [Metric(tag, value, now, step) for tag, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run)
