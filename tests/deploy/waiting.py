"""Where the seconds of a phase go: python -m tests.deploy.waiting [NODES] prints the table of docs/deploy.md.

The same experiment three times: with Flower's own waiting times, with shorter ones, and with apps that start warm.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedge.deploy.bundle import write_app
from fedge.deploy.fleet import Fleet
from fedge.deploy.local import follow
from fedge.experiment import Watch, load

SLOW = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"}  # Flower's default
WAYS: dict[str, tuple[bool, dict[str, str], float]] = {  # warm, environment, the server's pause between two looks
    "as Flower is set": (False, SLOW, 3.0),
    "shorter polls": (False, {}, 0.2),
    "and warm apps": (True, {}, 0.2),
}


def measure(nodes: int, warm: bool, environment: dict[str, str], pause: float) -> list[dict[str, float]]:
    experiment = load(Path("fedge/deploy/default.toml"), [f"partition.clients={nodes}", "train.rounds=6"])
    simple: dict[str, Any] = experiment.algorithm[0]["inner"]
    experiment = replace(experiment, algorithm=({**simple, "label": "FedAvg"},))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        app = write_app(work / "app", experiment)
        module = app / "fleet/app.py"
        module.write_text(f"{module.read_text()}\nimport fedge.deploy.post\n\nfedge.deploy.post.PAUSE = {pause}\n")
        with Fleet(work, nodes, warm=warm, environment=environment) as fleet:
            run = fleet.submit(app, {"out": str(work / "out"), "news": str(work)})
            return follow(fleet, run, Watch(), lambda: False).timings


def main(nodes: int) -> None:
    print(f"{nodes} nodes, FedAvg, mean of the phases after the first")
    for way, (warm, environment, pause) in WAYS.items():
        found = measure(nodes, warm, environment, pause)[1:]
        whole, start, work = (sum(one[key] for one in found) / len(found) for key in ("seconds", "start", "work"))
        rest = whole - start - work
        print(f"| {way} | {whole:.1f} | {start:.1f} | {work:.1f} | {rest:.1f} | ({len(found)} phases)", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
