"""SCAFFOLD, FedProx and FedNova against plain float64 loops, and what SCAFFOLD's clients remember."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedge
from fedge import tree
from fedge.algorithms.wrapper import Wrapper
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.common import by_examples
from tests.reference.drift import coefficients, fednova, fedprox, scaffold
from tests.reference.fedova import fedova
from tests.test_runfolder import records, stop_after

COMMON = {"lr": 0.1, "epochs": 2, "batch_size": 4}
SHRINKING = {"lr_decay": 0.7, "inner_decay": 0.2}
ROUNDS, COHORT = 6, 4
SCAFFOLD = {
    "plain": {},
    "shrinking": SHRINKING,
    "decayed": {"weight_decay": 0.02, "server_lr": 0.7, "clip": 0.5},
    "full_batch": {"batch_size": None},
    "average": {"control": "average", **SHRINKING},
}
FEDPROX = {
    "plain": {},
    "shrinking": {**SHRINKING, "momentum": 0.5},
    "server": {"server_lr": 0.7, "server_momentum": 0.4, "weight_decay": 0.02, "clip": 0.5},
    "fedavg": {"mu": 0.0},
}
FEDNOVA = {
    "plain": {},
    "momentum": {"momentum": 0.9, "lr": 0.02},
    "shrinking": {**SHRINKING, "momentum": 0.5},
    "server": {"server_lr": 0.7, "server_momentum": 0.4, "weight_decay": 0.02, "clip": 0.5},
    "full_batch": {"batch_size": None},
}


def compare(algorithm: fedge.Algorithm, reference, **options) -> float:
    """The largest difference after six rounds of four of seven ragged clients."""
    federation = ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=9)
    cohorts, order = cohorts_of(federation, ROUNDS, COHORT, seed=9), order_of(federation, 9)
    return close(run.params, reference(algorithm.model, clients_of(federation), cohorts, order, **options))


@pytest.mark.parametrize("name", SCAFFOLD)
@pytest.mark.parametrize("total", [7, None, "weighted"])
def test_scaffold_against_the_plain_loop(name: str, total: int | str | None) -> None:
    options = COMMON | SCAFFOLD[name]
    if total == "weighted":
        algorithm = fedge.SCAFFOLD(toy_model(), weighted=True, **options)
        assert compare(algorithm, scaffold, total=None, weight=by_examples, **options) < 1e-10
    else:
        algorithm = fedge.SCAFFOLD(toy_model(), clients=total, **options)
        assert compare(algorithm, scaffold, total=total, **options) < 1e-10


@pytest.mark.parametrize("name", FEDPROX)
def test_fedprox_against_the_plain_loop(name: str) -> None:
    options = COMMON | {"mu": 0.3} | FEDPROX[name]
    assert compare(fedge.FedProx(toy_model(), **options), fedprox, **options) < 1e-10


@pytest.mark.parametrize("name", FEDNOVA)
def test_fednova_against_the_plain_loop(name: str) -> None:
    options = COMMON | FEDNOVA[name]
    assert compare(fedge.FedNova(toy_model(), **options), fednova, **options) < 1e-10


@pytest.mark.parametrize("weighted", [False, True])
def test_under_fedova_against_the_plain_loop(weighted: bool) -> None:
    """Every class has its own control, its own number of clients and, in each of them, its own memory."""
    model, federation = toy_model(outputs=2), ragged(toy_data())
    cohorts, order = cohorts_of(federation, ROUNDS, COHORT, seed=9), order_of(federation, 9)
    cases = {
        scaffold: (fedge.SCAFFOLD(model, weighted=weighted, **COMMON), {"total": None}),
        fedprox: (fedge.FedProx(model, mu=0.3, **COMMON), {"mu": 0.3}),
        fednova: (fedge.FedNova(model, **COMMON), {}),
    }
    for reference, (inner, more) in cases.items():
        algorithm = fedge.FedOVA(inner, classes=3, weighted=weighted)
        run = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=9)
        options = {**COMMON, **more, "weighted": weighted}
        assert close(run.params, fedova(reference, model, clients_of(federation), cohorts, order, 3, **options)) < 1e-10


def test_the_papers_coefficients_of_momentum() -> None:
    rho, steps = 0.9, 13
    closed = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert sum(coefficients([1.0] * steps, rho)) == pytest.approx(closed)


def test_equal_clients_make_fednova_fedavg() -> None:
    data = toy_data()
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, 9, seed=0))
    runs = [
        fedge.train(kind(toy_model(), momentum=0.5, inner_decay=0.3, **COMMON), federation, rounds=3, cohort=4)
        for kind in (fedge.FedAvg, fedge.FedNova)
    ]
    assert close(runs[0].params, runs[1].params) < 1e-12


def test_with_everybody_in_the_cohort_an_average_is_the_sum() -> None:
    federation = ragged(toy_data())
    algorithms = [fedge.SCAFFOLD(toy_model(), clients=7, control=kind, **COMMON) for kind in ("sum", "average")]
    every, some = ([fedge.train(a, federation, rounds=4, cohort=c, seed=9).params for a in algorithms] for c in (7, 4))
    assert close(*every) < 1e-12
    assert close(*some) > 1e-6


def test_the_control_is_the_mean_of_the_clients_controls() -> None:
    federation = ragged(toy_data())
    sizes = torch.tensor([3, 17, 8, 1, 24, 9, 28], dtype=torch.float64)
    for options in ({"clients": 7}, {}, {"weighted": True}):
        algorithm = fedge.SCAFFOLD(toy_model(), **COMMON, **options)
        run = fedge.train(algorithm, federation, rounds=2, cohort=COHORT, seed=9)
        held = run.memory["own_control"]
        clients = held["jobs"][:, 0]
        assert len(clients) < 7
        weight = sizes[clients] if "weighted" in options else torch.ones(len(clients), dtype=torch.float64)
        total = 7 if "clients" in options else weight.sum()
        mean = {name: torch.tensordot(weight / total, leaf, dims=1) for name, leaf in held["leaves"].items()}
        assert close(mean, run.state["control"]) < 1e-12


@pytest.mark.parametrize("clients", [100_000, None])
def test_memory_grows_with_the_clients_seen_only(clients: int | None) -> None:
    data = fedge.data.load("digits")
    many = torch.arange(100_000) % len(data.train_y)
    federation = fedge.Federation(data, many.view(-1, 1).numpy())
    model = fedge.models.mlp(64, (4,), 10, seed=0)
    algorithm = fedge.SCAFFOLD(model, epochs=1, clients=clients)
    run, sizes = None, []
    for _ in range(3):
        run = fedge.train(algorithm, federation, rounds=1, cohort=6, seed=0, start=run)
        seen = {client for record in run.history for client in record["cohort"]}
        each = tree.size(run.params) + (1 if clients is None else 0)
        assert run.memory_bytes == len(seen) * each * 4
        assert run.summary()["client_memory_bytes"] == run.memory_bytes
        sizes.append(len(seen))
    assert sizes[0] == 6 < sizes[1] < sizes[2]


@pytest.mark.parametrize("link", [fedge.engine.Simulator, fedge.engine.Loopback])
@pytest.mark.parametrize("name", ["scaffold", "fedper", "fedova"])
def test_stopped_within_a_round_and_resumed_is_never_stopped(tmp_path: Path, name: str, link) -> None:
    """Two phases per round, stopped between them: what the first phase made clients remember is forgotten again."""
    federation = ragged(toy_data())

    def go(folder: str, **options) -> fedge.Run:
        inner = {
            "scaffold": lambda: fedge.SCAFFOLD(toy_model(), **COMMON),
            "fedper": lambda: fedge.FedPer(toy_model(), **COMMON),
            "fedova": lambda: fedge.FedOVA(fedge.SCAFFOLD(toy_model(outputs=2), **COMMON), classes=3),
        }[name]()
        algorithm = Twice(inner)
        return fedge.train(
            algorithm,
            federation,
            rounds=5,
            cohort=COHORT,
            seed=3,
            out=tmp_path / folder,
            observe=fedge.Observe(checkpoint_every=2),
            link=link(algorithm, federation),
            **options,
        )

    whole = go("whole")
    first = go("parts", stop=stop_after(5))  # two rounds and one phase
    assert first.stopped
    assert first.rounds == 2
    rest = go("parts", resume=True)
    assert close(whole.params, rest.params) == 0
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    assert whole.ledger.rows == rest.ledger.rows
    for part, held in whole.memory.items():
        assert torch.equal(held["jobs"], rest.memory[part]["jobs"])
        assert close(held["leaves"], rest.memory[part]["leaves"]) == 0


@dataclass(frozen=True, eq=False)
class Twice(Wrapper):
    """Two rounds of an algorithm in one."""

    inner: fedge.Algorithm

    def round(self, state):
        state = yield from self.inner.round(state)
        return (yield from self.inner.round(state))


def test_refusals() -> None:
    model = toy_model()
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="clients is"):
            fedge.SCAFFOLD(model, clients=wrong)
    with pytest.raises(ValueError, match="weighted means need the weights of all"):
        fedge.SCAFFOLD(model, clients=7, weighted=True)
    with pytest.raises(ValueError, match="mu is -1"):
        fedge.FedProx(model, mu=-1)
    for kind in (fedge.SCAFFOLD, fedge.FedProx, fedge.FedNova, fedge.FedPer):
        for field in ("lr", "server_lr", "clip", "epochs", "batch_size", "inner_decay", "lr_decay"):
            with pytest.raises(ValueError, match=f"{field} is"):
                kind(model, **{field: -1})
