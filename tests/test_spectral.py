"""Spectral steps, carried momentum, shrinking steps and FedCM against plain float64 loops and an SVD."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

import fedge
from fedge.algorithms.spectral import MINIMAX, in_halves, matrices, orthogonal, orthogonal_in_three
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, generator, ragged, toy_data, toy_model
from tests.reference.fedova import fedova
from tests.reference.schedules import scheduled
from tests.reference.spectral import turned, turned_in_three

SHRINKING = {"lr_decay": 0.7, "inner_decay": 0.2}
FEDAVG = {
    "inner": {"inner_decay": 0.3},
    "inner_full_batch": {"inner_decay": 0.3, "batch_size": None},
    "sgd_carried": {"momentum": 0.9, "lr": 0.02, "carry_momentum": True, **SHRINKING},
    "adam": {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.02, **SHRINKING},
    "spectral": {"optimiser": "spectral", "lr": 0.02, "momentum": 0.95},
    "spectral_decay": {"optimiser": "spectral", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **SHRINKING},
    "spectral_carried": {"optimiser": "spectral", "lr": 0.02, "momentum": 0.9, "carry_momentum": True, **SHRINKING},
    "spectral_fast": {"optimiser": "spectral_fast", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **SHRINKING},
    "server": {"server_optimiser": "spectral", "server_momentum": 0.5, "server_lr": 2.0},
    "server_no_momentum": {"server_optimiser": "spectral"},
    "both": {"optimiser": "spectral", "lr": 0.01, "server_optimiser": "spectral", "server_momentum": 0.5},
}
FEDCM = {"plain": {}, "decay": SHRINKING, "server": {"server_lr": 0.5, "weight_decay": 0.02}, "alpha": {"alpha": 1.0}}
COMMON = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def deep(outputs: int = 3) -> nn.Module:
    """A convolution (wide), a tall and a wide matrix."""
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(15, 20), nn.Tanh(), nn.Linear(20, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *layers, nn.Tanh(), nn.Linear(4, outputs)).double()


@pytest.mark.parametrize("name", FEDAVG)
@pytest.mark.parametrize("model", [toy_model, deep])
def test_fedavg_against_the_plain_loop(name: str, model) -> None:
    options = COMMON | FEDAVG[name]
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedAvg(model(), **options), federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    assert close(run.params, scheduled(model(), clients_of(federation), cohorts, order, **options)) < 1e-10


@pytest.mark.parametrize("name", FEDCM)
def test_fedcm_against_the_plain_loop(name: str) -> None:
    options = COMMON | {"alpha": 0.4} | FEDCM[name]
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedCM(toy_model(), **options), federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    assert close(run.params, scheduled(toy_model(), clients_of(federation), cohorts, order, **options)) < 1e-10


@pytest.mark.parametrize("alpha", [None, 0.4])
def test_under_fedova_against_the_plain_loop(alpha: float | None) -> None:
    options = COMMON | ({"server_optimiser": "spectral", "server_momentum": 0.5} if alpha is None else {"alpha": alpha})
    inner = (fedge.FedAvg if alpha is None else fedge.FedCM)(toy_model(outputs=2), **options)
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedOVA(inner, classes=3), federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    expected = fedova(scheduled, toy_model(outputs=2), clients_of(federation), cohorts, order, 3, **options)
    assert close(run.params, expected) < 1e-10


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (1, 7), (7, 1)])
def test_newton_schulz_keeps_the_singular_vectors_and_evens_out_the_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=generator(3), dtype=torch.float64)
    found = orthogonal(matrix)
    assert float((found - turned(matrix)).abs().max()) < 1e-10
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.67
    assert float(values.max()) < 1.21
    assert float((orthogonal(1e-9 * matrix) - found).abs().max()) < 1e-10, "its length does not matter"
    single = orthogonal(matrix.float())
    assert float((single - found).abs().max()) < 1e-4
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (60, 70), (16, 25)])
@pytest.mark.parametrize("fall", [0.0, 0.5, 1.0])
def test_products_in_bfloat16_keep_the_band(shape: tuple[int, int], fall: float) -> None:
    """Singular values j^-fall: every direction ends where float64 leaves it, to a tenth; none runs away."""
    small, g = min(shape), generator(5)
    u, v = (torch.linalg.qr(torch.randn(n, small, generator=g, dtype=torch.float64))[0] for n in shape)
    matrix = (u * torch.arange(1, small + 1) ** -fall) @ v.mT
    found = orthogonal(matrix.float(), products="bf16")
    assert found.dtype == torch.float32
    along = torch.diagonal(u.mT @ found.double() @ v)
    assert float(along.min()) > 0.66
    assert float(torch.linalg.svdvals(found.double()).max()) < 1.25
    assert float((along - torch.diagonal(u.mT @ turned(matrix) @ v)).abs().max()) < 0.1


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (60, 70)])
def test_products_in_bfloat16_keep_a_low_rank(shape: tuple[int, int]) -> None:
    """As after a step on one batch: nothing is added in directions that the matrix does not have."""
    g = generator(7)
    matrix = torch.randn(shape[0], 5, generator=g) @ torch.randn(5, shape[1], generator=g)
    found, exact = orthogonal(matrix, products="bf16").double(), turned(matrix.double())
    values = torch.linalg.svdvals(found)
    assert float(values[4]) > 0.66
    assert float(values[5]) < 1e-3
    assert float((found - exact).norm()) < 0.1 * float(exact.norm())


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (1, 7), (60, 70)])
def test_three_quintics_against_an_svd(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=generator(3), dtype=torch.float64)
    found = orthogonal_in_three(matrix)
    assert float((found - turned_in_three(matrix)).abs().max()) < 1e-10
    assert float((orthogonal_in_three(1e-9 * matrix) - found).abs().max()) < 1e-10, "its length does not matter"
    assert float((orthogonal_in_three(matrix.float()) - found).abs().max()) < 1e-3
    assert torch.equal(orthogonal_in_three(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("products", ["same", "bf16"])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (60, 70)])
@pytest.mark.parametrize("fall", [0.0, 0.5, 1.0])
def test_three_quintics_keep_the_band(products, shape: tuple[int, int], fall: float) -> None:
    small, g = min(shape), generator(5)
    u, v = (torch.linalg.qr(torch.randn(n, small, generator=g, dtype=torch.float64))[0] for n in shape)
    matrix = (u * torch.arange(1, small + 1) ** -fall) @ v.mT
    found = orthogonal_in_three(matrix.float(), products).double()
    along = torch.diagonal(u.mT @ found @ v)
    assert float(along.min()) > (0.65 if products == "same" else 0.6)
    assert float(torch.linalg.svdvals(found).max()) < (1.35 if products == "same" else 1.9)


def test_three_quintics_keep_a_low_rank() -> None:
    g = generator(7)
    matrix = torch.randn(64, 5, generator=g) @ torch.randn(5, 256, generator=g)
    values = torch.linalg.svdvals(orthogonal_in_three(matrix, "bf16").double())
    assert float(values[4]) > 0.6
    assert float(values[5]) < 1e-3


def test_the_three_quintics_are_the_best_one_after_another() -> None:
    """Each is the odd quintic nearest to 1 on the interval that the last one leaves, 4 % wider: a linear programme."""
    low, high = 0.01, 1.0
    for stored in MINIMAX:
        x = np.concatenate([np.geomspace(0.96 * low, 1.04 * high, 1500), np.linspace(0.96 * low, 1.04 * high, 1500)])
        powers, one = np.stack([x, x**3, x**5], 1), np.ones((len(x), 1))
        rows = np.vstack([np.hstack([powers, -one]), np.hstack([-powers, -one])])
        limits = np.concatenate([np.ones(len(x)), -np.ones(len(x))])
        *found, error = linprog([0, 0, 0, 1], rows, limits, bounds=[(None, None)] * 4).x
        assert np.allclose(found, stored, rtol=1e-3)
        low, high = 1 - error, 1 + error
    assert (low, high) == pytest.approx((0.652, 1.348), abs=1e-3)


def test_auto_is_the_parameters_own_precision_on_a_cpu() -> None:
    matrix = torch.randn(4, 9, generator=generator(6))
    assert torch.equal(orthogonal(matrix, products="auto"), orthogonal(matrix))
    assert not torch.equal(orthogonal(matrix, products="bf16"), orthogonal(matrix))


def test_auto_is_bfloat16_on_a_gpu_where_precision_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    there = cast("torch.Tensor", SimpleNamespace(is_cuda=True, dtype=torch.float32))
    said = {}
    for precision in ("high", "highest"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        said[precision] = [in_halves(there, products) for products in ("auto", "same", "bf16")]
    assert said == {"high": [True, False, True], "highest": [False, False, True]}
    assert (fedge.Spectral.fast().products, fedge.Spectral().products) == ("auto", "same")


def test_the_derivation() -> None:
    """U V^T = (M M^T)^(-1/4) M (M^T M)^(-1/4)."""
    m = torch.randn(4, 4, generator=generator(1), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(m)

    def root(square: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(square)
        return vectors @ torch.diag(values**-0.25) @ vectors.T

    assert float((root(m @ m.T) @ m @ root(m.T @ m) - u @ vt).abs().max()) < 1e-10


def test_which_tensors_are_matrices() -> None:
    params = dict(deep().named_parameters())
    assert matrices(params, last_layer=True) == ["1.weight", "4.weight", "6.weight", "8.weight"]
    assert matrices(params, last_layer=False) == ["1.weight", "4.weight", "6.weight"]
    assert matrices(dict(nn.Linear(3, 2).named_parameters()), last_layer=False) == []


def test_an_optimiser_is_a_name_with_fields_or_an_object() -> None:
    federation = ragged(toy_data())
    pairs = [
        ({"optimiser": "spectral"}, {"optimiser": fedge.Spectral()}),
        (
            {"optimiser": "spectral", "momentum": 0.5, "weight_decay": 0.1},
            {"optimiser": fedge.Spectral(momentum=0.5, weight_decay=0.1)},
        ),
        ({"optimiser": "spectral_fast"}, {"optimiser": fedge.Spectral(products="auto", quintics="minimax")}),
        ({"momentum": 0.5, "weight_decay": 0.1}, {"optimiser": fedge.SGD(0.5, 0.1)}),
        ({"optimiser": "adam", "weight_decay": 0.1}, {"optimiser": fedge.Adam(weight_decay=0.1)}),
        ({"server_momentum": 0.5}, {"server_optimiser": fedge.SGD(0.5)}),
        ({"server_optimiser": "adam", "server_eps": 0.1}, {"server_optimiser": fedge.Adam((0.9, 0.99), 0.1)}),
        (
            {"server_optimiser": "spectral", "server_momentum": 0.3},
            {"server_optimiser": fedge.Spectral(0.3, False, "norm", None, True)},
        ),
    ]
    for names, objects in pairs:
        one, two = (
            fedge.train(fedge.FedAvg(toy_model(), **{"lr": 0.01, **options}), federation, rounds=1).params
            for options in (names, objects)
        )
        assert close(one, two) == 0, names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimiser": "spectrl"}, "did you mean 'spectral'"),
        ({"optimiser": fedge.SGD(), "momentum": 0.5}, r"momentum is 0.5, but optimiser=SGD\(...\) has its own"),
        ({"server_optimiser": fedge.Adam(), "server_momentum": 0.5}, "server_momentum is 0.5"),
        ({"carry_momentum": True}, "carry_momentum is true, but there is none"),
        ({"carry_momentum": True, "optimiser": "adam"}, "carry_momentum is true, but there is none"),
        ({"inner_decay": 0}, "inner_decay is 0, it must be above 0"),
    ],
)
def test_what_does_not_go_together(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.FedAvg(toy_model(), **options)


def test_wrong_fields_of_optimisers_and_fedcm() -> None:
    for make, message in (
        (lambda: fedge.Spectral(momentum=1.0), "momentum is 1.0"),
        (lambda: fedge.Spectral(scale="size"), "scale is 'size'"),
        (lambda: fedge.Spectral(iterations=0), "iterations is 0"),
        (lambda: fedge.Spectral(products="fp8"), "products is 'fp8'"),
        (lambda: fedge.Spectral(quintics="best"), "quintics is 'best'"),
        (lambda: fedge.Spectral(iterations=3, quintics="minimax"), "minimax has three of its own"),
        (lambda: fedge.SGD(weight_decay=-1), "weight_decay is -1"),
        (lambda: fedge.Adam(eps=0), "eps is 0"),
        (lambda: fedge.FedCM(toy_model(), alpha=1.5), "alpha is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_run_without_carried_momentum_can_go_on_with_it() -> None:
    federation = ragged(toy_data())
    options = {"optimiser": "spectral", "lr": 0.01}
    before = fedge.train(fedge.FedAvg(toy_model(), **options), federation, rounds=1)
    after = fedge.train(fedge.FedAvg(toy_model(), carry_momentum=True, **options), federation, rounds=1, start=before)
    assert after.rounds == 2
