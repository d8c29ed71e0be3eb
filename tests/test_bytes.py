"""The bytes of every algorithm equal the formula in its docstring."""

from __future__ import annotations

import pytest

import fedge
from fedge.core import Algorithm, At
from fedge.engine import Loopback, Simulator
from fedge.loop import cohorts

DATA = fedge.data.load("digits")
FEDERATION = fedge.Federation(DATA, fedge.partition.labels_per_client(DATA.train_y, 50, labels=2, seed=0))
C, B = 5, 4  # cohort, bytes per scalar


def model(outputs: int = 10):
    return fedge.models.mlp(64, (8,), outputs, seed=0)


D = 64 * 8 + 8 + 8 * 10 + 10
SHARED = 64 * 8 + 8  # without the last layer
BINARY = 64 * 8 + 8 + 8 * 2 + 2


def lbfgs(**options) -> fedge.FisherLBFGS:
    return fedge.FisherLBFGS(model(), epochs=1, **options)


def subspace(k: int, q: int = 4) -> tuple[int, int]:
    """Training, the span of k vectors, and q dampings beside FedAvg's point."""
    down = C * D * B + C * k * D * B + C * (q + 1) * k * B
    return down, C * (D * B + 4) + C * ((k * k + k) * B + 4) + C * ((q + 1) * B + 4)


PRODUCT = {"curvature": "product", "source": "gradient"}
# algorithm, (down, up) of the first round, of later rounds
CASES: dict[str, tuple[Algorithm, tuple[int, int], tuple[int, int]]] = {
    "fedavg": (fedge.FedAvg(model()), (C * D * B, C * (D * B + 4)), (C * D * B, C * (D * B + 4))),
    "fedavg_adam": (fedge.FedAvg(model(), optimiser="adam"), *[(C * D * B, C * (D * B + 4))] * 2),
    "server_adam": (fedge.FedAvg(model(), server_optimiser="adam"), *[(C * D * B, C * (D * B + 4))] * 2),
    "feddane": (fedge.FedDANE(model()), *[(2 * C * D * B, 2 * C * (D * B + 4))] * 2),
    "feddane_new": (fedge.FedDANE(model(), cohort="new"), *[(3 * C * D * B, 2 * C * (D * B + 4))] * 2),
    "diagonal": (lbfgs(), *[(C * D * B, C * (2 * D * B + 8))] * 2),
    "diagonal_next": (lbfgs(curvature_at="next"), *[(C * D * B, C * (2 * D * B + 8))] * 2),
    "product": (lbfgs(**PRODUCT), *[(2 * C * D * B, 2 * C * (D * B + 4))] * 2),
    "product_next": (
        lbfgs(**PRODUCT, curvature_at="next"),
        (C * D * B, C * (D * B + 4)),
        (2 * C * D * B, 2 * C * (D * B + 4)),
    ),
    "candidates": (
        lbfgs(candidates=(0.5, 1.0, 2.0)),
        *[(2 * C * D * B, C * (2 * D * B + 8) + C * (3 * B + 4))] * 2,
    ),
    "dampings": (
        lbfgs(dampings=(0.3, 1.0)),
        (C * D * B, C * (2 * D * B + 8)),
        (3 * C * D * B, C * (2 * D * B + 8) + C * (2 * B + 4)),
    ),
    "subspace": (fedge.SubspaceNewton(model()), subspace(1), subspace(2)),
    "subspace_line": (fedge.SubspaceNewton(model(), memory=0), *[subspace(1)] * 2),
    "giant": (
        fedge.GIANT(model(), iterations=2),
        *[(3 * C * D * B, 2 * C * (D * B + 4) + C * (5 * B + 4))] * 2,
    ),
    "done": (fedge.DONE(model(), iterations=2, candidates=()), *[(2 * C * D * B, 2 * C * (D * B + 4))] * 2),
    "fedova": (  # two labels per client: two jobs each
        fedge.FedOVA(fedge.FedAvg(model(2))),
        *[(2 * C * BINARY * B, 2 * C * (BINARY * B + 4))] * 2,
    ),
    "fedova_diagonal": (
        fedge.FedOVA(fedge.FisherLBFGS(model(2), epochs=1)),
        *[(2 * C * BINARY * B, 2 * C * (2 * BINARY * B + 8))] * 2,
    ),
    "fedavg_decay": (fedge.FedAvg(model(), lr_decay=0.9), *[(C * D * B + C * B, C * (D * B + 4))] * 2),
    "feddane_decay": (fedge.FedDANE(model(), lr_decay=0.9), *[(2 * C * D * B + C * B, 2 * C * (D * B + 4))] * 2),
    "diagonal_decay": (lbfgs(lr_decay=0.9), *[(C * D * B + C * B, C * (2 * D * B + 8))] * 2),
    "inner_decay": (fedge.FedAvg(model(), inner_decay=0.5), *[(C * D * B, C * (D * B + 4))] * 2),
    "spectral": (fedge.FedAvg(model(), optimiser="spectral"), *[(C * D * B, C * (D * B + 4))] * 2),
    "spectral_server": (fedge.FedAvg(model(), server_optimiser="spectral"), *[(C * D * B, C * (D * B + 4))] * 2),
    "carried": (
        fedge.FedAvg(model(), optimiser="spectral", carry_momentum=True, lr_decay=0.9),
        *[(2 * C * D * B + C * B, C * (2 * D * B + 4))] * 2,
    ),
    "fedcm": (fedge.FedCM(model()), *[(2 * C * D * B, C * (D * B + B + 4))] * 2),
    "fedprox": (fedge.FedProx(model()), *[(C * D * B, C * (D * B + 4))] * 2),
    "foof": (fedge.FOOF(model(), inner_decay=0.5), *[(C * D * B, C * (D * B + 4))] * 2),
    "fednova": (fedge.FedNova(model(), momentum=0.5), *[(C * D * B, C * (D * B + B + 4))] * 2),
    "scaffold": (fedge.SCAFFOLD(model(), clients=50), *[(2 * C * D * B, C * (2 * D * B + 4))] * 2),
    "scaffold_counted": (fedge.SCAFFOLD(model()), *[(2 * C * D * B, C * (2 * D * B + B + 4))] * 2),
    "scaffold_weighted": (
        fedge.SCAFFOLD(model(), weighted=True, lr_decay=0.9),
        *[(2 * C * D * B + C * B, C * (2 * D * B + 2 * B + 4))] * 2,
    ),
    "fedova_scaffold": (
        fedge.FedOVA(fedge.SCAFFOLD(model(2))),
        *[(4 * C * BINARY * B, 2 * C * (2 * BINARY * B + B + 4))] * 2,
    ),
    "fedper": (fedge.FedPer(model()), *[(C * SHARED * B, C * (SHARED * B + B + 8))] * 2),
    "fedper_decay": (
        fedge.FedPer(model(), lr_decay=0.9, inner_decay=0.5),
        *[(C * SHARED * B + C * B, C * (SHARED * B + B + 8))] * 2,
    ),
    "shared_ova": (fedge.SharedOVA(model()), *[(C * D * B, C * (D * B + 10 * B + 4))] * 2),
    "calibrated": (
        fedge.Calibrated(fedge.FedAvg(model()), every=1, cohorts=2),
        *[(3 * C * D * B, C * (D * B + 4) + 2 * C * (176 * B + 4))] * 2,
    ),
    "averaged": (fedge.Averaged(fedge.FedAvg(model())), *[(C * D * B, C * (D * B + 4))] * 2),
    "robust": (fedge.Robust(fedge.FedAvg(model()), fedge.Median()), *[(C * D * B, C * (D * B + 4))] * 2),
    "compressed": (fedge.Compressed(fedge.FedAvg(model())), *[(C * D * B, C * (D + 4 * B + 4))] * 2),  # four tensors
    "compressed_top": (
        fedge.Compressed(fedge.FedAvg(model()), fedge.TopK(0.01)),
        *[(C * D * B, C * (round(0.01 * D) * (B + 4) + 4))] * 2,
    ),
    "sharing": (fedge.DataSharing(fedge.FedAvg(model()), 0.2), *[(C * D * B, C * (D * B + 4))] * 2),
}


@pytest.mark.parametrize("link", [Simulator, Loopback])
@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_the_formula(name: str, link) -> None:
    algorithm, first, later = CASES[name]
    run = fedge.train(algorithm, FEDERATION, rounds=3, cohort=C, link=link(algorithm, FEDERATION))
    assert [(r["down_bytes"], r["up_bytes"]) for r in run.history] == [first, later, later]


PRIVATE = fedge.Private(fedge.FedAvg(model()), clients=50, expected=C)


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_private_round_costs_those_whom_it_drew(link) -> None:
    run = fedge.train(PRIVATE, FEDERATION, rounds=3, cohort=C, link=link(PRIVATE, FEDERATION))
    drawn = [len(cohorts(50, C, "poisson")(At(0, round, 0))) for round in (1, 2, 3)]
    assert len(set(drawn)) > 1
    assert [(r["down_bytes"], r["up_bytes"]) for r in run.history] == [(c * D * B, c * (D * B + 4)) for c in drawn]


def test_what_setup_costs() -> None:
    run = fedge.train(CASES["sharing"][0], FEDERATION, rounds=1, cohort=C)
    shared = round(0.2 * 1437 / 50)
    image, label = 64 * 4, 8
    assert [(r.task, r.clients, r.down, r.broadcast, r.up) for r in run.ledger if r.round == 0] == [
        ("share", 50, 50 * shared * (image + label), shared * (image + label), 0)
    ]
    run = fedge.train(CASES["fedova"][0], FEDERATION, rounds=1, cohort=C)
    assert [(r.task, r.clients, r.down, r.up) for r in run.ledger if r.round == 0] == [("rows", 50, 0, 50 * 10)]


def test_every_algorithm_has_a_formula() -> None:
    kinds = {type(case[0]) for case in CASES.values()} | {type(PRIVATE)}
    assert kinds == set(fedge.algorithms.ALGORITHMS.values())
    assert all("Bytes" in (kind.__doc__ or "") for kind in kinds)
