"""What every rank of `tests/test_ranks.py` does: python -m tests.ranks_worker FOLDER CASES..., once per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedge
from fedge.bench.check import algorithms, problem
from fedge.core import Algorithm
from fedge.engine import Group, Ranks, Simulator, joined
from tests.cases import algorithms as toy_algorithms
from tests.cases import ragged, toy_data, toy_model, wide
from tests.test_inputs import Both, both
from tests.test_problems import LISTS

SETTINGS: dict[str, Any] = {"rounds": 3, "cohort": 6, "seed": 5, "observe": fedge.Observe(evaluate_every=3)}
PICTURES = ("fedavg", "fedova, fisher l-bfgs")  # convolutions are computed one client at a time
Make = Callable[[Algorithm[Any], fedge.Federation], Simulator]


@cache
def cases() -> dict[str, tuple[Algorithm[Any], fedge.Federation, dict[str, Any]]]:
    """Everything that must be the same on one process and on several."""
    flat, pictures = problem(image=False), problem(image=True)
    found = {name: (algorithm, flat, SETTINGS) for name, algorithm in algorithms(image=False).items()}
    found |= {f"{name} on pictures": (algorithms(image=True)[name], pictures, SETTINGS) for name in PICTURES}
    few = SETTINGS | {"cohort": 1}  # all ranks but one have nothing to do
    found |= {
        f"{name}, one client": (found[name][0], flat, few) for name in ("feddane", "fedova", "fedova, fisher l-bfgs")
    }
    some = ("robust_krum", "robust_fedova", "compressed_top", "fedova_compressed", "robust_compressed")
    for name in toy_algorithms() if os.environ.get("FEDGE_ALL_CASES") else some:
        found[name] = (toy_algorithms()[name], ragged(toy_data()), SETTINGS)
    both_inputs = fedge.FedAvg(Both(), lr=0.1, epochs=2, batch_size=4)
    found["several inputs"] = (
        both_inputs,
        fedge.Federation(both(named=True, regression=True), LISTS),
        SETTINGS | {"cohort": 3},
    )
    nova = fedge.FedNova(wide().model, lr=0.05, epochs=1, batch_size=4)
    found["clipped fednova"] = (fedge.Robust(nova, fedge.ClippedMean(0.5)), ragged(toy_data()), SETTINGS)
    search = fedge.GIANT(
        toy_model(), iterations=3, candidates=tuple(i / 10 for i in range(200))
    )  # close together, and far
    for rule in (fedge.BoundedMean(), fedge.ClippedMean(0.5)):
        found[f"search, {type(rule).__name__}"] = (fedge.Robust(search, rule), ragged(toy_data()), SETTINGS)
    found["bad clients"] = (fedge.FedAvg(toy_model(), lr=0.2, batch_size=4), spoilt(), SETTINGS | {"cohort": None})
    return found


def spoilt() -> fedge.Federation:
    """Three of seven clients hold what is not a number; the first to be computed is not the first in the list."""
    federation = ragged(toy_data())
    for client in (0, 4, 5):
        federation.data.train_x[federation.examples(client)] = torch.nan
    return federation


def result(run: fedge.Run[Any]) -> dict[str, Any]:
    records = [{k: v for k, v in r.items() if k != "seconds" and not k.startswith("test_")} for r in run.history]
    return {"params": run.params, "ledger": run.ledger.as_dicts(), "records": records, "stopped": run.stopped}


def train(name: str, make: Make, **more: Any) -> dict[str, Any]:
    algorithm, federation, settings = cases()[name]
    return result(fedge.train(algorithm, federation, link=make(algorithm, federation), **settings, **more))


def broken(logits: Tensor, y: Tensor) -> Tensor:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug on one machine")
    return fedge.cross_entropy(logits, y)


def failure(group: Group) -> str:
    """What a rank is told when the work of one of them fails."""
    algorithm, federation = fedge.FedAvg(toy_model(), loss=broken), ragged(toy_data())
    link = Ranks(algorithm, federation, group=group)
    state = algorithm.init({name: leaf.detach() for name, leaf in toy_model().named_parameters()})
    try:
        fedge.core.drive(algorithm.round(state), link, 0, 1, lambda at: torch.arange(federation.clients))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sums(group: Group) -> int:
    """How many all-reduces a run needs."""
    count, add = 0, group.sum

    def counted(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return add(tensor)

    group.sum = counted  # type: ignore[method-assign]
    train("fedova, fisher l-bfgs", lambda a, f: Ranks(a, f, group=group))
    group.sum = add  # type: ignore[method-assign]
    return count


def stop_on_the_last(group: Group) -> dict[str, Any]:
    """Only one rank wants to stop, in the second round of three."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return group.rank == group.size - 1 and asked == 3

    return train("feddane", lambda a, f: Ranks(a, f, group=group), stop=stop)


def resumed(group: Group, out: Path) -> dict[str, Any]:
    """Clients that remember things, and lie on several ranks, through a run folder."""
    algorithm, federation, settings = cases()["fedova_compressed"]
    found = {}
    for rounds in (2, 3):
        link = Ranks(algorithm, federation, group=group)
        options = settings | {"rounds": rounds, "out": out, "resume": rounds == 3}
        found = result(fedge.train(algorithm, federation, link=link, **options))
    return found


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with joined(timeout=60) as group:
        told: list[int] = []
        found: dict[str, Any] = {name: train(name, lambda a, f: Ranks(a, f, group=group)) for name in names}
        found["stop"] = stop_on_the_last(group)
        found["failure"] = failure(group)
        found["sums"] = sums(group)
        found["resumed"] = resumed(group, folder / "resumed")
        out = folder / f"run-{group.rank}"  # one that nobody writes but rank 0
        run = fedge.train(
            *cases()["fedavg"][:2],
            rounds=2,
            out=out,
            link=Ranks(*cases()["fedavg"][:2], group=group),
            on_round=lambda record: told.append(record["round"]),
        )
        found["told"], found["evaluated"] = told, ["test_accuracy" in record for record in run.history]
        torch.save(found, folder / f"{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
