"""The fault drill: five nodes, one fault after another, and the run must end with what the simulator promises.

    make drill      (about five minutes; python -m tests.deploy.drill FOLDER keeps its files in FOLDER)

Round by round: a SuperNode killed with -9, NaN, a wrong shape, an exception, garbage, a hang, the SuperLink killed and
started again, the server app killed and resumed. Every fault must be named in the record, and the final parameters
equal those of a simulation in which the same clients are dropped. `make test-deploy` does the short form: three nodes,
NaN, the server app killed and resumed, a SuperNode killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedge
from fedge.deploy.bundle import project
from fedge.deploy.fleet import Fleet
from fedge.deploy.process import listens
from fedge.engine import Simulator
from fedge.runs import checkpoint
from fedge.toml import dump
from tests.cases import close
from tests.deploy.faults import CLIENTS, FOLDER, ROUNDS, SEED, algorithm, federation
from tests.deploy.processes import Marked, running
from tests.lossy import Lossy

LOST, HELD = "no answer within|Flower says|was not accepted", "does not hold"  # reasons; the second follows one
KILLED_NODE = 1


@dataclass(frozen=True)
class Plan:
    """Which fault comes in which round."""

    clients: int
    rounds: int
    deadline: float
    limit: float  # seconds for all of it
    devices: dict[int, tuple[int, str]]  # round: client, fault
    node_round: int
    server_round: int
    link_round: int | None = None

    @property
    def back(self) -> int:
        """The round in which the killed node must be back: that of a fault of its own, if it has one."""
        own = [number for number, (client, _) in self.devices.items() if client == KILLED_NODE]
        return min(own, default=self.rounds + 1)


FULL = Plan(
    clients=5,
    rounds=11,
    deadline=40.0,
    limit=25 * 60,
    devices={3: (2, "nan"), 4: (3, "shape"), 5: (4, "raises"), 6: (0, "garbage"), 7: (1, "hangs")},
    node_round=2,
    link_round=9,
    server_round=10,
)
SHORT = Plan(clients=3, rounds=4, deadline=25.0, limit=300, devices={2: (2, "nan")}, server_round=3, node_round=4)


class Drill:
    """One run on one fleet, and what is done to them."""

    def __init__(self, folder: Path, plan: Plan = FULL) -> None:
        self.marked, self.plan = Marked(folder), plan
        self.folder, self.out, self.begin = folder, folder / "run", time.monotonic()
        faults = {FOLDER: str(folder / "faults"), CLIENTS: str(plan.clients), ROUNDS: str(plan.rounds)}
        os.environ.update(self.marked.env() | faults)
        (folder / "faults").mkdir()
        for number, (client, fault) in plan.devices.items():
            (folder / "faults" / f"{client}-{number}").write_text(fault)
        self.fleet = Fleet(folder / "fleet", plan.clients)
        self.run = self.told = 0

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {line}", flush=True)

    def records(self) -> list[dict[str, Any]]:
        path = self.out / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, ready: Callable[[], Any], what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not ready():
            self.tell()
            if time.monotonic() > min(end, self.begin + self.plan.limit):
                raise SystemExit(f"waited in vain until {what}; logs are in {self.fleet.folder / 'logs'}")
            time.sleep(0.2)
        self.tell()

    def tell(self) -> None:
        """The rounds that are over and were not told of yet."""
        for record in self.records()[self.told :]:
            self.told = record["round"]
            self.say(f"round {record['round']}, {record['seconds']:.1f} s: {_told(record)}")

    def after_round(self, number: int) -> None:
        self.until(lambda: len(self.records()) >= number, f"round {number} is over", 400)

    def submit(self, resume: bool) -> None:
        config = {"out": str(self.out), "resume": resume, "deadline": self.plan.deadline}
        self.run = self.fleet.submit(self.app(), config)

    def app(self) -> Path:
        folder = self.folder / "app"
        (folder / "fleet").mkdir(parents=True, exist_ok=True)
        (folder / "fleet/__init__.py").write_text("")
        module = "from tests.deploy import faults\n\nclient = faults.client()\nserver = faults.server()\n"
        (folder / "fleet/app.py").write_text(module)
        (folder / "pyproject.toml").write_text(dump(project("fedge-drill")))
        return folder

    def log(self, name: str) -> str:
        return (self.fleet.folder / "logs" / f"{name}.log").read_text(errors="replace")

    # The faults that are not a device's own

    def kill_node(self) -> None:
        name = f"node-{KILLED_NODE}"
        seen = self.log(name).count("Receiving: train.work")
        self.until(lambda: self.log(name).count("Receiving: train.work") > seen, f"{name} is at work", 60)
        os.kill(self.fleet.processes[name].pid, signal.SIGKILL)
        self.say(f"{name} killed with -9, in round {self.plan.node_round}")
        if self.plan.back <= self.plan.rounds:
            self.restart_node()

    def restart_node(self) -> None:
        """Flower lets a killed node in again once it counts as offline; until then each start is refused."""
        name, tries = f"node-{KILLED_NODE}", 0
        while True:
            self.fleet.start_node(KILLED_NODE)
            tries, before = tries + 1, len(self.log(name))
            self.until(
                lambda at=before: "SuperNode ID" in self.log(name)[at:] or not self.fleet.processes[name].alive,
                "the node is in or refused",
                60,
            )
            if self.fleet.processes[name].alive:
                break
            time.sleep(3)
        self.say(f"{name} is back, at start {tries}")

    def kill_superlink(self) -> None:
        time.sleep(3)
        os.kill(self.fleet.processes["superlink"].pid, signal.SIGKILL)
        self.say(f"the SuperLink killed with -9, in round {self.plan.link_round}")
        self.until(lambda: not listens(self.fleet.port), "its port is closed", 10)
        time.sleep(4)
        self.fleet.start_superlink()
        self.say("the SuperLink is back")

    def kill_server(self) -> None:
        time.sleep(1)
        (pid,) = [pid for pid, words in running(self.marked.mark).items() if "flwr-serverapp" in words]
        os.kill(pid, signal.SIGKILL)
        self.say(f"the server app killed with -9, in round {self.plan.server_round}")
        self.submit(resume=True)
        self.say("the server app is started again, with resume")

    def perform(self) -> None:
        with self.fleet:
            self.say(f"{self.plan.clients} nodes are started")
            self.submit(resume=False)
            faults = {self.plan.node_round: self.kill_node, self.plan.server_round: self.kill_server}
            if self.plan.link_round is not None:
                faults[self.plan.link_round] = self.kill_superlink
            for number, fault in sorted(faults.items()):
                self.after_round(number - 1)
                fault()
            self.until(lambda: (self.out / "summary.json").exists(), "the run ends", 400)
            self.say("the run has ended")


def _told(record: dict[str, Any]) -> str:
    drops = [f"client {d['client']} in '{d['task']}': {d['reason']}" for d in record["dropped"]]
    return "; ".join([*drops, *record.get("faults", [])]) or "all answered"


def unexplained(records: list[dict[str, Any]], plan: Plan = FULL) -> list[tuple[int, dict[str, Any]]]:
    """Dropped answers, by round, that no fault of the drill accounts for.

    A planned fault costs its own client; the killed node is away until it must be back, for a fault of its own; and a
    killed SuperLink may lose what is under way: one answer per client, in that round alone, and what follows from it.
    """
    planned = {number: client for number, (client, _) in plan.devices.items()} | {plan.node_round: KILLED_NODE}
    found = []
    for record in records:
        number, seen = record["round"], set[int]()
        for drop in record["dropped"]:
            own = drop["client"] == planned.get(number)
            away = (
                drop["client"] == KILLED_NODE
                and plan.node_round < number < plan.back
                and re.search(f"{LOST}|{HELD}|not connected", drop["reason"])
            )
            lost = number == plan.link_round and re.search(HELD if drop["client"] in seen else LOST, drop["reason"])
            seen.add(drop["client"])
            if not (own or away or lost):
                found.append((number, drop))
    return found


def judge(drill: Drill) -> list[str]:
    """What is wrong; nothing, if all is well."""
    wrong, plan = [], drill.plan
    records = {record["round"]: record for record in drill.records()}
    if sorted(records) != list(range(1, plan.rounds + 1)):
        return [f"the record has rounds {sorted(records)}"]
    expected = {plan.node_round: (KILLED_NODE, r"no answer within|Flower says")}
    reasons = {"nan": "is not finite", "shape": r"has shape \[1, \d+\], not", "garbage": "cannot be read"}
    reasons |= {
        "raises": r"client 4, step \d+: ZeroDivisionError: a sensor gave nothing",
        "hangs": "took longer than|no answer within",
    }
    expected |= {number: (client, reasons[fault]) for number, (client, fault) in plan.devices.items()}
    for number, (client, reason) in expected.items():
        if not any(d["client"] == client and re.search(reason, d["reason"]) for d in records[number]["dropped"]):
            wrong.append(f"round {number} does not name client {client}: {records[number]['dropped']}")
    wrong += [f"round {number} cost others too: {drop}" for number, drop in unexplained(list(records.values()), plan)]
    for number, words in ((plan.link_round, "the SuperLink did not answer"), (plan.server_round, "was started again")):
        if number is not None and not any(words in fault for fault in records[number].get("faults", [])):
            wrong.append(f"round {number} does not say '{words}'")
    lost = {(n, d["task"], d["client"]) for n, record in records.items() for d in record["dropped"]}
    own, fed = algorithm(), federation()
    simulated = fedge.train(own, fed, rounds=plan.rounds, seed=SEED, link=Lossy(Simulator(own, fed), lost))
    state = checkpoint.load(drill.out / "checkpoint.pt")["state"]
    gap = close(simulated.params, own.params(state))
    drill.say(f"{len(lost)} answers were lost; fleet and simulator, with the same lost, differ by {gap:.1e}")
    if not gap < 1e-6:
        wrong.append(f"fleet and simulator differ by {gap:.1e}")
    if left := running(drill.marked.mark):
        wrong.append(f"processes are left: {left}")
    if listens(drill.fleet.port):
        wrong.append(f"somebody listens on port {drill.fleet.port}")
    return wrong


def main(folder: Path) -> None:
    drill = Drill(folder)
    drill.perform()
    wrong = judge(drill)
    seconds = time.monotonic() - drill.begin
    if seconds > drill.plan.limit:
        wrong.append(f"it took {seconds:.0f} s, more than {drill.plan.limit:.0f}")
    print("\n".join(wrong) if wrong else f"The drill passed in {seconds:.0f} s.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory(prefix="fedge-drill-") as temporary:
        main(Path(temporary))
