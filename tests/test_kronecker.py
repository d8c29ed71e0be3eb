"""Server steps with accumulated Kronecker factors against NumPy, with one matrix the spectral step, and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedge
from fedge.algorithms.kronecker import root
from fedge.runs.differences import first_difference
from fedge.sweep.entries import as_before
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, generator, ragged, toy_data, toy_model
from tests.reference.drift import scaffold
from tests.reference.fedova import fedova
from tests.reference.kronecker import Server
from tests.reference.schedules import scheduled
from tests.test_spectral import deep

COMMON = {"lr": 0.1, "epochs": 2, "batch_size": 4}
FEDAVG = {
    "shampoo": {"server_optimiser": "shampoo", "server_momentum": 0.5, "server_betas": (0.9, 0.8), "server_lr": 2.0},
    "shampoo_no_momentum": {"server_optimiser": "shampoo", "server_betas": (0.9, 0.5)},
    "soap": {"server_optimiser": "soap", "server_momentum": 0.5, "server_betas": (0.9, 0.8), "server_lr": 2.0},
    "soap_decay": {"server_optimiser": "soap", "lr_decay": 0.8, "server_lr_decay": 0.7, "inner_decay": 0.5},
    "server_decay": {"server_lr": 2.0, "server_lr_decay": 0.7},
    "warm": {"server_optimiser": "spectral", "server_warmup": 2, "server_lr_decay": 0.9, "server_momentum": 0.5},
    "fedcm": {"alpha": 0.4, "server_optimiser": "spectral", "server_momentum": 0.5, "server_lr": 2.0},
    "fedcm_soap": {"alpha": 0.4, "server_optimiser": "soap", "server_warmup": 1, "server_lr_decay": 0.9},
    "fedcm_momentum": {"alpha": 0.4, "server_momentum": 0.5},
}


def square(outputs: int = 6) -> nn.Module:
    """Gradients of full rank, or all but: SOAP's bases are then known up to signs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in FEDAVG for model in ([square] if "soap" in name else [toy_model, deep])],
)
def test_against_the_plain_loop(name: str, model) -> None:
    options = COMMON | FEDAVG[name]
    federation = ragged(toy_data())
    kind = fedge.FedCM if "alpha" in options else fedge.FedAvg
    run = fedge.train(kind(model(), **options), federation, rounds=4, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 4, 5, seed=9), order_of(federation, 9)
    assert close(run.params, scheduled(model(), clients_of(federation), cohorts, order, **options)) < 1e-8


@pytest.mark.parametrize("name", ["shampoo", "fedcm"])
def test_under_fedova_against_the_plain_loop(name: str) -> None:
    options, federation, model = COMMON | FEDAVG[name], ragged(toy_data()), toy_model(outputs=2)
    inner = (fedge.FedCM if "alpha" in options else fedge.FedAvg)(model, **options)
    run = fedge.train(fedge.FedOVA(inner, classes=3), federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    expected = fedova(scheduled, model, clients_of(federation), cohorts, order, 3, **options)
    assert close(run.params, expected) < 1e-8


def test_scaffold_with_a_spectral_server_against_the_plain_loop() -> None:
    options, federation = COMMON | {"server_momentum": 0.5, "server_lr": 2.0}, ragged(toy_data())
    algorithm = fedge.SCAFFOLD(toy_model(), clients=7, server_optimiser="spectral", **options)
    run = fedge.train(algorithm, federation, rounds=4, cohort=4, seed=9)
    work = clients_of(federation), cohorts_of(federation, 4, 4, seed=9), order_of(federation, 9)
    assert close(run.params, scaffold(toy_model(), *work, total=7, spectral=True, **options)) < 1e-10


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3)])
@pytest.mark.parametrize("largest", [8, 6])
@pytest.mark.parametrize("kind", [fedge.Shampoo, fedge.SOAP])
def test_with_this_one_matrix_it_is_the_spectral_step(kind, shape: tuple[int, int], largest: int) -> None:
    """mu = beta = 0: U V^T as long as the gradient; for Shampoo with the short side alone too."""
    g = {"w": torch.randn(shape, generator=generator(2), dtype=torch.float64)}
    zero = {"w": torch.zeros(shape, dtype=torch.float64)}
    rule = kind(0.0, 0.0, 1e-12, largest)
    found = rule.step(zero, g, rule.start(zero), 1.0)[0]["w"]
    assert float(found.norm()) == pytest.approx(float(g["w"].norm()))
    if kind is fedge.Shampoo or largest == 8:
        u, _, vt = torch.linalg.svd(g["w"], full_matrices=False)
        expected = -(u @ vt) * g["w"].norm() / min(shape) ** 0.5
        assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("kind", "largest"), [("shampoo", 20), ("shampoo", 10), ("shampoo", 2), ("soap", 10), ("soap", 2)]
)
def test_long_sides_are_left_alone(kind: str, largest: int) -> None:
    rule = (fedge.Shampoo if kind == "shampoo" else fedge.SOAP)(0.5, 0.7, largest_side=largest)
    reference = Server(kind, 0.5, 0.7, largest)
    params = {"a": torch.zeros(4, 15).double(), "b": torch.zeros(12, 3).double(), "c": torch.zeros(5).double()}
    state, expected = rule.start(params), dict(params)
    for seed in range(4):
        grad = {name: torch.randn(leaf.shape, generator=generator(seed)).double() for name, leaf in params.items()}
        params, state = rule.step(params, grad, state, 0.3)
        moved = reference.step(list(grad.values()), 0.3)
        expected = {name: leaf - step for (name, leaf), step in zip(expected.items(), moved, strict=True)}
    assert close(params, expected) < 1e-9


def test_roots_and_zeros() -> None:
    a = torch.randn(5, 9, generator=generator(1), dtype=torch.float64)
    half = root(a @ a.T, -0.25, 1e-14)
    assert float((torch.linalg.matrix_power(half, 4) @ (a @ a.T) - torch.eye(5)).abs().max()) < 1e-6
    zero = {"w": torch.zeros(3, 4)}
    for rule in (fedge.Shampoo(), fedge.SOAP()):
        assert close(rule.step(zero, zero, rule.start(zero), 1.0)[0], zero) == 0


def test_directions_that_are_small_in_every_round_move_further() -> None:
    """Noise that changes from round to round in one direction, a small steady signal in another."""
    zero = {"w": torch.zeros(2, 2).double()}
    for rule in (fedge.Shampoo(0.0, 0.9), fedge.SOAP(0.0, 0.9)):
        state = rule.start(zero)
        for t in range(20):
            noise = torch.diag(torch.tensor([1.0 if t % 2 else -1.0, 0.01])).double()
            moved, state = rule.step(zero, {"w": noise}, state, 1.0)
        steady = {"w": torch.diag(torch.tensor([0.01, 0.01])).double()}
        moved, _ = rule.step(zero, steady, state, 1.0)
        assert abs(moved["w"][1, 1]) > 10 * abs(moved["w"][0, 0])


@pytest.mark.parametrize("name", ["shampoo", "soap", "warm"])
def test_a_stopped_run_goes_on_the_same(name: str, tmp_path: Path) -> None:
    algorithm, federation = fedge.FedAvg(toy_model(), **COMMON | FEDAVG[name]), ragged(toy_data())
    whole = fedge.train(algorithm, federation, rounds=4)
    for rounds in (2, 4):
        parts = fedge.train(algorithm, federation, rounds=rounds, out=tmp_path / "a", resume=rounds == 4)
    assert close(whole.params, parts.params) == 0


def test_a_run_with_another_server_step_goes_on() -> None:
    federation = ragged(toy_data())
    for kind in (fedge.FedCM, fedge.SCAFFOLD, fedge.FedAvg):
        before = fedge.train(kind(toy_model(), **COMMON), federation, rounds=1)
        warm = kind(toy_model(), server_warmup=2, **COMMON)
        assert fedge.train(warm, federation, rounds=1, start=before).rounds == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimiser": "soap"}, "optimiser is 'soap'"),
        ({"optimiser": fedge.SOAP()}, r"optimiser is SOAP\(...\), whose steps are a server's"),
        ({"server_optimiser": "shampo"}, "did you mean 'shampoo'"),
        ({"server_optimiser": fedge.Shampoo(), "server_momentum": 0.5}, r"server_optimiser=Shampoo\(...\) has its own"),
        ({"server_lr_decay": 1.5}, "server_lr_decay is 1.5"),
        ({"server_warmup": -1}, "server_warmup is -1, it must be a whole number of rounds"),
        ({"server_warmup": 1.5}, "server_warmup is 1.5"),
    ],
)
def test_what_does_not_go_together(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.FedAvg(toy_model(), **options)


def test_wrong_fields() -> None:
    for make, message in (
        (lambda: fedge.Shampoo(momentum=1.0), "momentum is 1.0"),
        (lambda: fedge.SOAP(beta=-0.1), "beta is -0.1"),
        (lambda: fedge.SOAP(eps=0), "eps is 0"),
        (lambda: fedge.Shampoo(largest_side=0), "largest_side is 0"),
        (lambda: fedge.FedCM(toy_model(), server_optimiser="adm"), "did you mean 'adam'"),
        (lambda: fedge.SCAFFOLD(toy_model(), server_warmup=True), "server_warmup is True"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_runs_from_before_the_servers_fields_go_on_and_keep_their_names() -> None:
    """FedCM without server fields, as a folder of an earlier version has it; FedAvg's name does not change."""
    old = {"algorithm": {"name": "fedcm", "alpha": 0.4}}
    rest = {"server_momentum": 0.0, "server_optimiser": "sgd", "server_betas": [0.9, 0.99], "server_eps": 0.001}
    same = {"algorithm": {**old["algorithm"], **rest, "server_lr_decay": 1.0, "server_warmup": 0}}
    assert first_difference(old, same) is None
    other = {"algorithm": {**same["algorithm"], "server_momentum": 0.5}}
    assert first_difference(old, other) == ("algorithm.server_momentum", None, 0.5)
    assert as_before(same["algorithm"]) == {**old["algorithm"], **rest}
