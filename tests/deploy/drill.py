"""The fault drill: six nodes, one fault after another, and the run must end with what the simulator promises.

    make drill      (python -m tests.deploy.drill FOLDER keeps its files in FOLDER)

Round by round (`plan.py`): a SuperNode killed with -9; NaN, a wrong shape, an exception, garbage, escapes, a hang;
liars (1e30, more weight than a device joined with, every attack of `fedge.attacks` that a device can make alone); a
bomb and a malformed object; an impostor; an app that dies and one that is told to end; the SuperLink killed and started
again while it takes messages and while devices work; the server app killed and resumed.

Every fault must be named in the record and cost its own client alone, and everybody must be back in the last round. The
final parameters equal those of a simulation in which the same answers are lost and the same lies count. `make
test-deploy` does the short form with four nodes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedge
from fedge.attacks.attack import ENROLLED, KINDS
from fedge.core import Ask, At
from fedge.deploy.bundle import project
from fedge.deploy.fleet import Fleet
from fedge.deploy.process import listens
from fedge.engine import BaseLink, Loopback, Simulator
from fedge.engine.clients.worker import Worker
from fedge.runs import checkpoint
from fedge.toml import dump
from tests.cases import close
from tests.deploy.faults import (
    CLIENTS,
    FOLDER,
    ROUNDS,
    SEED,
    TAMPERING,
    algorithm,
    colluding,
    examples,
    federation,
)
from tests.deploy.plan import COUNTS, FULL, Plan, unexplained, unnamed
from tests.deploy.processes import Marked, running
from tests.lossy import Lossy


class Drill:
    """One run on one fleet, and what is done to them."""

    def __init__(self, folder: Path, plan: Plan = FULL) -> None:
        self.marked, self.plan = Marked(folder), plan
        self.folder, self.out, self.begin = folder, folder / "run", time.monotonic()
        faults = {FOLDER: str(folder / "faults"), CLIENTS: str(plan.clients), ROUNDS: str(plan.rounds)}
        os.environ.update(self.marked.env() | faults)
        (folder / "faults").mkdir()
        for number, client, fault in plan.faults():
            (folder / "faults" / f"{client}-{number}").write_text(fault)
        for number in plan.push_rounds:
            (folder / "faults" / f"push-{number}").touch()
        if plan.heavy is not None:
            (folder / "faults" / f"examples-{plan.heavy}").write_text(str(int(ENROLLED)))
        for client in plan.impostors:
            (folder / "faults" / f"hello-{client}.later").write_text("0")
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
                words = self.fleet.last_words("serverapp")
                raise SystemExit(
                    f"waited in vain until {what}; the server app said {words}; see {self.fleet.folder}/logs"
                )
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
        config = {"out": str(self.out), "resume": resume, "deadline": self.plan.deadline, "wait": 60.0}
        config |= {"keys": str(self.fleet.known_keys.folder)}
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
        number, client = self.plan.node
        name = f"node-{client}"
        seen = self.log(name).count("Receiving: train.work")
        self.until(lambda: self.log(name).count("Receiving: train.work") > seen, f"{name} is at work", 60)
        os.kill(self.fleet.processes[name].pid, signal.SIGKILL)
        self.say(f"{name} killed with -9, in round {number}")
        if number < self.plan.rounds:
            self.restart_node(client)

    def restart_node(self, number: int) -> None:
        """Flower lets a killed node in again once it counts as offline; until then each start is refused."""
        name, tries = f"node-{number}", 0
        while True:
            self.fleet.start_node(number)
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

    def kill_superlink(self, when: str = "while devices work", seconds: float = 4.0) -> None:
        os.kill(self.fleet.processes["superlink"].pid, signal.SIGKILL)
        self.say(f"the SuperLink killed with -9, {when}")
        self.until(lambda: not listens(self.fleet.port), "its port is closed", 10)
        time.sleep(seconds)
        self.fleet.start_superlink()
        self.say("the SuperLink is back")

    def kill_at_work(self) -> None:
        time.sleep(3)
        self.kill_superlink()

    def kill_at_push(self) -> None:
        held = self.folder / "faults/pushing"
        self.until(held.exists, "messages are being sent", 120)
        self.kill_superlink("while it takes messages", 1.0)
        held.unlink()

    def kill_server(self) -> None:
        time.sleep(1)
        (pid,) = [pid for pid, words in running(self.marked.mark).items() if "flwr-serverapp" in words]
        os.kill(pid, signal.SIGKILL)
        self.say(f"the server app killed with -9, in round {self.plan.server_round}")
        self.submit(resume=True)
        self.say("the server app is started again, with resume")

    def lie(self, client: int) -> Callable[[], None]:
        def begin() -> None:
            (self.folder / f"faults/hello-{client}.later").rename(self.folder / f"faults/hello-{client}")

        return begin

    def stop_lying(self, client: int) -> Callable[[], None]:
        def end() -> None:
            (self.folder / f"faults/hello-{client}").unlink()
            self.say(f"client {client} does not say any more that it is client 0")

        return end

    def actions(self) -> list[tuple[int, Callable[[], None]]]:
        """What is done from outside, and in which round."""
        plan = self.plan
        found = [(plan.node[0], self.kill_node), (plan.server_round, self.kill_server)]
        found += [(number, self.kill_at_push) for number in plan.push_rounds]
        found += [(number, self.kill_at_work) for number in plan.link_rounds]
        for client, number in plan.impostors.items():
            found += [(number, self.lie(client)), (number + 3, self.stop_lying(client))]
        return sorted(((number, do) for number, do in found if number <= plan.rounds), key=lambda one: one[0])

    def perform(self) -> None:
        with self.fleet:
            self.say(f"{self.plan.clients} nodes are started")
            self.submit(resume=False)
            for number, action in self.actions():
                self.after_round(number - 1)
                action()
            self.until(lambda: (self.out / "summary.json").exists(), "the run ends", 400)
            self.say("the run has ended")


def _told(record: dict[str, Any]) -> str:
    drops = [f"client {d['client']} in '{d['task']}': {d['reason']}" for d in record["dropped"]]
    return "; ".join([*drops, *record.get("faults", [])]) or "all answered"


class Lying(Loopback):
    """The loop-back link with the lies that no check can see."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(algorithm(), federation())
        self.lies = {(number, client): fault for number, client, fault in plan.faults() if fault in COUNTS}
        self.directory.sizes = partial(_joined, self.directory.sizes, plan.heavy)

    def client(self, client: int, at: At, ask: Ask, request: bytes) -> bytes:
        fault = self.lies.get((at.round, client))
        if fault is not None and KINDS[fault].poisons and at.phase == 0:
            self._workers[client] = Worker(client, *examples(client, fault), self.tasks, self.memory)
        answer = super().client(client, at, ask, request)
        if fault == "little":
            return colluding(client, at, ask.tasks, ask.reuse, request, answer)
        return answer if fault is None else TAMPERING[fault](answer)


def _joined(sizes: Callable[[Tensor], Tensor], heavy: int | None, clients: Tensor) -> Tensor:
    """How many examples clients joined with."""
    found = sizes(clients)
    return found if heavy is None else torch.where(clients == heavy, int(ENROLLED), found)


def promised(plan: Plan, lost: set[tuple[int, str, int]]) -> fedge.Run[Any]:
    """What the run must end with: the same answers are lost, and the same lies count."""
    lying = Lying(plan)
    link: BaseLink = lying if lying.lies else Simulator(lying.algorithm, federation())
    return fedge.train(lying.algorithm, federation(), rounds=plan.rounds, seed=SEED, link=Lossy(link, lost))


def judge(drill: Drill) -> list[str]:
    """What is wrong; nothing, if all is well."""
    plan = drill.plan
    records = {record["round"]: record for record in drill.records()}
    if sorted(records) != list(range(1, plan.rounds + 1)):
        return [f"the record has rounds {sorted(records)}"]
    wrong = unnamed(records, plan)
    wrong += [f"round {number} cost others too: {drop}" for number, drop in unexplained(list(records.values()), plan)]
    lost = {(n, d["task"], d["client"]) for n, record in records.items() for d in record["dropped"]}
    simulated = promised(plan, lost)
    state = checkpoint.load(drill.out / "checkpoint.pt")["state"]
    gap = close(simulated.params, algorithm().params(state))
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
