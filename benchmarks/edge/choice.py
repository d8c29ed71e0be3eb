"""How asynchronous FedOVA steps, chosen on held-out data: buffers, the server's step, staleness, the late mean.

    python -m benchmarks.edge.choice                            # digits, two minutes on a CPU
    python -m benchmarks.edge.choice fmnist kws --device cuda   # hours on a GPU; the files have to be there
    python -m benchmarks.edge.choice --page                     # the table in docs/edge.md from what is stored

A fifth of the training set is held out, class by class, and judged in place of the test set, with seeds that no other
table has. Rule: among the settings that end within half a point of the best, the one that is at the target first (of
equals, the better).
Finished runs are stored (choices.jsonl) and never repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fedge
from benchmarks.edge.measure import (
    CLIENTS,
    COHORT,
    FLEETS,
    LABELS,
    PROBLEMS,
    TENFOLD,
    Problem,
    fedova,
    lines,
    one_by_one,
    told,
)  # fmt: skip
from fedge.core import Algorithm
from fedge.edge import Clock

FILE = Path(__file__).parent / "choices.jsonl"
HELD_OUT, SEEDS, NEAR = 0.2, (10, 11, 12), 0.005
Model = Callable[[int], torch.nn.Module]
Build = Callable[[Problem, Model], Algorithm[Any]]


def buffered(buffer: int, step: float, staleness: float, window: int | None = None) -> Build:
    def build(problem: Problem, model: Model) -> Algorithm[Any]:
        inner = fedova(problem, model, {**problem.fedova, "server_lr": step})
        found = fedge.FedBuff(inner, buffer=buffer, staleness=staleness)
        return found if window is None else fedge.Averaged(found, window)

    return build


def mixed(alpha: float) -> Build:
    return lambda problem, model: fedge.FedAsync(fedova(problem, model, problem.fedova), alpha=alpha)


SETTINGS: dict[str, Build] = {  # * : in the tables
    "no buffer, step 1/4, staleness 0 *": lambda problem, model: one_by_one(problem, model, problem.fedova),
    "no buffer, step 1/4, staleness 0, late mean of 5": buffered(1, 0.25, 0.0, 5),
    "no buffer, step 1/4, staleness 0, late mean of 10 *": buffered(1, 0.25, 0.0, 10),
    "no buffer, step 1/4, staleness 0, late mean of 20": buffered(1, 0.25, 0.0, 20),
    "no buffer, step 1/4, staleness 0.5": buffered(1, 0.25, 0.5),
    "no buffer, step 1/2, staleness 0.5": buffered(1, 0.5, 0.5),
    "no buffer, step 1, staleness 0.5": buffered(1, 1.0, 0.5),
    "buffers of 2, step 1/2, staleness 0.5": buffered(2, 0.5, 0.5),
    "buffers of 4, step 1, staleness 0": buffered(4, 1.0, 0.0),
    "buffers of 4, step 1, staleness 0.5 *": buffered(4, 1.0, 0.5),
    "buffers of 4, step 1, staleness 0.5, late mean of 5": buffered(4, 1.0, 0.5, 5),
    "buffers of 4, step 1, staleness 0.5, late mean of 10 *": buffered(4, 1.0, 0.5, 10),
    "buffers of 4, step 1, staleness 0.5, late mean of 20": buffered(4, 1.0, 0.5, 20),
    "FedAsync, alpha 0.3": mixed(0.3),
    "FedAsync, alpha 0.6 *": mixed(0.6),
    "FedAsync, alpha 0.9": mixed(0.9),
}
Line = dict[str, Any]


def run(name: str, fleet: str, setting: str, seed: int, engine: fedge.Engine) -> Line:
    problem = PROBLEMS[name]
    data = fedge.data.load(problem.data, validation=HELD_OUT)
    shares = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=LABELS, seed=seed)
    federation = fedge.Federation(data, shares)

    def model(outputs: int) -> torch.nn.Module:
        found: torch.nn.Module = getattr(fedge.models, problem.model)(outputs=outputs, seed=seed)
        return found

    algorithm = SETTINGS[setting](problem, model)
    link = Clock(engine.link(algorithm, federation), federation, FLEETS[fleet])
    done = fedge.train(algorithm, federation, rounds=problem.rounds, cohort=COHORT, seed=seed, link=link)
    kept = ("rounds", "final", "rounds_to", "virtual_seconds", "virtual_seconds_to")
    found = told(done.history, problem.target)
    key = {"problem": name, "fleet": fleet, "setting": setting, "seed": seed}
    return {**key, **{what: found[what] for what in kept}, "device": engine.device, "torch": torch.__version__}


def do(problems: list[str], device: str) -> None:
    """What is missing, seed by seed."""
    engine = fedge.Engine(device, "tf32" if device.startswith("cuda") else "fp32")
    keys = ("problem", "fleet", "setting", "seed")
    known = {tuple(line[key] for key in keys) for line in lines(FILE)}
    wanted = [(p, f, s, seed) for p in problems for f in TENFOLD for seed in SEEDS for s in SETTINGS]
    for entry in (entry for entry in wanted if entry not in known):
        line = run(*entry, engine)
        with FILE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(*entry, f"{line['final']:.3f}, {line['virtual_seconds_to']} s", flush=True)


def chosen(problem: str, fleet: str) -> str | None:
    """The setting that the rule takes; None if nothing is stored."""
    ends = {setting: mean(line["final"] for line in some) for setting, some in _by_setting(problem, fleet).items()}
    times = {setting: _seconds(some) for setting, some in _by_setting(problem, fleet).items()}
    near = [setting for setting, end in ends.items() if end >= max(ends.values()) - NEAR]
    return min(near, key=lambda setting: (times[setting], -ends[setting])) if near else None


def _by_setting(problem: str, fleet: str) -> dict[str, list[Line]]:
    some = [line for line in lines(FILE) if (line["problem"], line["fleet"]) == (problem, fleet)]
    by = {setting: [line for line in some if line["setting"] == setting] for setting in SETTINGS}
    return {setting: found for setting, found in by.items() if found}


def _seconds(some: list[Line]) -> float:
    """To the target, the mean over seeds; infinite if one did not reach it."""
    return mean(float("inf") if line["virtual_seconds_to"] is None else line["virtual_seconds_to"] for line in some)


def rows(problem: str) -> list[list[str]]:
    """Settings down; held-out accuracy and seconds to the target on every fleet, what the rule takes in bold."""
    best = {fleet: chosen(problem, fleet) for fleet in TENFOLD}
    head = ["setting", *(f"{fleet}: held out, % | s to target" for fleet in TENFOLD)]
    found = [head]
    for setting in SETTINGS:
        cells = []
        for fleet in TENFOLD:
            some = _by_setting(problem, fleet).get(setting, [])
            end, taken = (100 * mean(line["final"] for line in some), _seconds(some)) if some else (0.0, 0.0)
            words = [f"{end:.1f}", f"{taken:.3g}" if taken < 100 else f"{taken:,.0f}"] if some else ["not run"] * 2
            words[1] = "–" if taken == float("inf") else words[1]
            cells += [f"**{word}**" if setting == best[fleet] else word for word in words]
        found.append([setting, *cells])
    return found


def main() -> None:
    from benchmarks.edge import page  # it shows what is chosen here

    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge.choice", description=__doc__)
    parser.add_argument("problems", nargs="*", default=["digits"], metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", action="store_true", help="write the page and do no run")
    options = parser.parse_args()
    if not options.page:
        do(options.problems, options.device)
    page.write()


if __name__ == "__main__":
    main()
