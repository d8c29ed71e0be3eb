"""Both apps of a fleet whose nodes take their time; a file says which asynchronous algorithm is trained."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedge.deploy import client_app, serve
from fedge.engine.clients.worker import Worker
from tests.deploy.test_link import FEDERATION, load
from tests.test_asynchronous import ALGORITHMS, SEED

FOLDER = "FEDGE_UNEVEN"  # environment: where the file `algorithm` lies
NODES, COHORT, DEADLINE = 4, 3, 20.0
SLOW, SECONDS = 3, 6.0  # this client takes so long


def algorithms() -> dict[str, Any]:
    return {"": ALGORITHMS[(Path(os.environ[FOLDER]) / "algorithm").read_text()]()}


def client() -> ClientApp:
    """The real app, on devices of which one is slow."""
    work = Worker.work

    def slowly(self: Worker, *words: Any) -> Any:
        time.sleep(SECONDS if self.client == SLOW else 0.0)
        return work(self, *words)

    Worker.work = slowly  # type: ignore[method-assign]
    return client_app(algorithms, load)


def server() -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        serve(
            grid,
            algorithms()[""],
            FEDERATION,
            nodes=NODES,
            deadline=DEADLINE,
            rounds=int(str(config["nodes"])),
            cohort=COHORT,
            seed=SEED,
            out=str(config["out"]),
            resume=bool(config["resume"]),
            say=lambda line: print(f"fedge: {line}", flush=True),
        )

    return app
