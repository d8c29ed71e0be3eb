"""GIANT, DONE and the subspace step against dense matrices, and what the Gauss-Newton matrix is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedge
from fedge import tree
from fedge.algorithms.subspace_newton import newton
from fedge.core import Batch
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.handle import Handle, cross_entropy, parameters
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, generator, ragged, toy_data, toy_model
from tests.reference.common import flatten, named
from tests.reference.curvature import squared_slope_product
from tests.reference.newton import dense, hessian, local_newton, subspace_newton

SHARED = {"lr": 0.8, "weight_decay": 0.01, "damping": 0.2}
PARAMETERS = 6 * 5 + 5 + 5 * 3 + 3


def batch(x: torch.Tensor, y: torch.Tensor) -> Batch:
    return Batch(x, y, torch.ones(len(y), dtype=torch.bool), torch.tensor(0))


@pytest.mark.parametrize("matrix", ["gauss_newton", "fisher"])
@pytest.mark.parametrize("candidates", [(), (0.1, 0.5, 1.0)])
def test_giant_solves_every_clients_system(matrix: str, candidates: tuple[float, ...]) -> None:
    """As many conjugate gradients as parameters, and some against rounding, are a dense solver."""
    options = SHARED | {"matrix": matrix, "candidates": candidates}
    federation = ragged(toy_data())
    algorithm = fedge.GIANT(toy_model(), iterations=2 * PARAMETERS, **options)
    run = fedge.train(algorithm, federation, rounds=3, cohort=5, seed=9)
    cohorts = cohorts_of(federation, 3, 5, 9, fresh=(True, False, False))
    expected = local_newton(toy_model(), clients_of(federation), cohorts, solver="exact", **options)
    assert close(run.params, expected) < 1e-8


def test_few_conjugate_gradients_minimise_over_the_krylov_space() -> None:
    """After r iterations x is the best of span{g, A g, ..., A^{r-1} g} in the energy of A."""
    data = toy_data()
    federation = fedge.Federation(data, [range(len(data.train_y))])
    run = fedge.train(fedge.GIANT(toy_model(), iterations=3, candidates=(), damping=0.2), federation, rounds=1)
    module, client = toy_model(), (data.train_x, data.train_y)
    start = parameters(module)
    a = dense(module, client, "gauss_newton") + 0.2 * torch.eye(PARAMETERS, dtype=torch.float64)
    g = flatten(module, Handle(module, cross_entropy).grad(start, batch(*client)))
    space, _ = torch.linalg.qr(torch.stack([g, a @ g, a @ a @ g], 1))
    best = space @ torch.linalg.solve(space.T @ a @ space, space.T @ g)
    assert close(run.params, named(module, flatten(module, start) - best)) < 1e-10


@pytest.mark.parametrize("candidates", [(), (0.1, 0.5, 1.0)])
def test_done_is_the_sum_of_powers(candidates: tuple[float, ...]) -> None:
    options = SHARED | {"alpha": 0.1, "iterations": 7, "candidates": candidates}
    federation = ragged(toy_data())
    run = fedge.train(fedge.DONE(toy_model(), **options), federation, rounds=3, cohort=5, seed=9)
    cohorts = cohorts_of(federation, 3, 5, 9, fresh=(True, False, False))
    expected = local_newton(toy_model(), clients_of(federation), cohorts, solver="richardson", **options)
    assert close(run.params, expected) < 1e-10


def test_done_goes_to_giants_step_and_away_from_it_when_alpha_is_too_large() -> None:
    federation = ragged(toy_data())
    options = SHARED | {"candidates": ()}
    exact = fedge.train(fedge.GIANT(toy_model(), iterations=100, **options), federation, rounds=1)
    far = [
        close(
            fedge.train(fedge.DONE(toy_model(), alpha=0.2, iterations=r, **options), federation, rounds=1).params,
            exact.params,
        )
        for r in (5, 20, 100, 400)
    ]
    assert far == sorted(far, reverse=True)
    assert far[-1] < 1e-6
    with pytest.raises(TooFewReplies, match="lower the step size, for values are not finite"):
        fedge.train(fedge.DONE(toy_model(), alpha=20.0, iterations=400, **options), federation, rounds=3)


def test_done_with_batches_takes_the_next_one_in_every_iteration() -> None:
    data = toy_data()
    federation = fedge.Federation(data, [range(len(data.train_y))])
    algorithm = fedge.DONE(toy_model(), alpha=0.1, iterations=4, batch_size=40, candidates=(), damping=0.2)
    run = fedge.train(algorithm, federation, rounds=1, seed=2)
    handle, module = Handle(toy_model(), cross_entropy), toy_model()
    w = parameters(module)
    g = handle.grad(w, batch(data.train_x, data.train_y))
    p = tree.zeros_like(g)
    for chosen in order_of(federation, 2)(0, 1, 0, 4, 40)[:4]:
        part = batch(data.train_x[chosen], data.train_y[chosen])
        curved = tree.scale(1 / len(chosen), handle.sum_gauss_newton_product(w, part, p))
        p = tree.axpy(-0.1, tree.sub(tree.axpy(0.2, p, curved), g), p)
    assert close(run.params, tree.sub(w, p)) < 1e-12


def test_one_step_of_giant_on_a_quadratic_is_the_solution_if_clients_are_alike() -> None:
    g = generator(0)
    x = torch.randn(20, 3, generator=g, dtype=torch.float64)
    y = torch.randn(20, generator=g, dtype=torch.float64)
    twice = fedge.data.Data(torch.cat([x, x]), torch.cat([y, y]), x, y, classes=0)
    federation = fedge.Federation(twice, [range(20), range(20, 40)])
    model = nn.Linear(3, 1, bias=False).double()
    algorithm = fedge.GIANT(
        model, damping=0.0, candidates=(), iterations=3, loss=lambda out, y: (out[:, 0] - y) ** 2 / 2
    )
    run = fedge.train(algorithm, federation, rounds=1)
    solution = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert float((run.params["weight"][0] - solution).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"centre": "start"},
        {"matrix": "fisher", "weight_decay": 0.0},
        {"memory": 0},
        {"memory": 3, "dampings": (0.5, 2.0)},
        {"memory": 2, "centre": "start", "matrix": "fisher"},
    ],
    ids=str,
)
def test_subspace_newton_against_dense_matrices(change: dict) -> None:
    options = {"lr": 0.1, "epochs": 2, "batch_size": 4, "weight_decay": 0.02, "memory": 1, "centre": "update"}
    options |= {"matrix": "gauss_newton", "dampings": (0.1, 1.0)} | change
    federation = ragged(toy_data())
    run = fedge.train(fedge.SubspaceNewton(toy_model(), **options), federation, rounds=5, cohort=5, seed=9)
    cohorts = cohorts_of(federation, 5, 5, 9, fresh=(True, False, False))
    expected = subspace_newton(toy_model(), clients_of(federation), cohorts, order_of(federation, 9), **options)
    assert close(run.params, expected) < 1e-8
    assert {record["candidate"] for record in run.history} - {0}  # some step was not FedAvg's
    assert len(run.state["steps"]) == options["memory"]


def test_fedavgs_point_wins_where_the_quadratic_model_is_wrong() -> None:
    """|out - y|^1.0001 has slopes of 1 and hardly any curvature: every Newton step is far too long."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out[:, 0] - y).abs().pow(1.0001)

    g = generator(0)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    data = fedge.data.Data(x, y, x, y, classes=0)
    federation = fedge.Federation(data, [range(20), range(20, 40)])
    model = nn.Linear(3, 1, bias=False).double()
    options = {"lr": 0.3, "epochs": 2, "batch_size": 5, "loss": loss}
    run = fedge.train(fedge.SubspaceNewton(model, dampings=(0.0,), memory=0, **options), federation, rounds=1)
    plain = fedge.train(fedge.FedAvg(model, **options), federation, rounds=1)
    assert run.history[0]["candidate"] == 0
    assert run.history[0]["step_update"] == 1
    assert close(run.params, plain.params) < 1e-12


def test_lengths_of_the_basis_do_not_matter_and_zero_vectors_are_left_out() -> None:
    g = generator(0)
    root = torch.randn(4, 4, generator=g, dtype=torch.float64)
    matrix, slopes = root @ root.T, torch.randn(4, generator=g, dtype=torch.float64)
    scale = torch.tensor([1e-3, 1.0, 1e3, 0.0], dtype=torch.float64)
    other = newton(scale * slopes, torch.outer(scale, scale) * matrix, 0.3)
    assert float(other[3]) == 0
    alone = newton(slopes[:3], matrix[:3, :3], 0.3)
    assert torch.allclose(scale[:3] * other[:3], alone, rtol=1e-9)


@pytest.mark.parametrize("matrix", ["fisher", "gauss_newton"])
def test_sums_in_a_span_against_dense_matrices(matrix: str) -> None:
    module, data = toy_model(), toy_data()
    client = (data.train_x[:9], data.train_y[:9])
    g = generator(4)
    basis = [{n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in parameters(module).items()} for _ in "ab"]
    handle = Handle(module, cross_entropy)
    padded = batch(data.train_x[:12], data.train_y[:12])._replace(mask=torch.arange(12) < 9)
    slopes, small = handle.sum_in_span(parameters(module), padded, basis, matrix)
    v = torch.stack([flatten(module, one) for one in basis], 1)
    whole = flatten(module, handle.grad(parameters(module), batch(*client)))
    assert torch.allclose(slopes, 9 * v.T @ whole)
    assert torch.allclose(small, 9 * v.T @ dense(module, client, matrix) @ v)


def test_squared_slopes_between_jacobians() -> None:
    """Line 4 of ClientUpdate, J^T diag(Gamma) J, with the Jacobian of the logits and the slopes of the loss in them."""
    module, data = toy_model(), toy_data()
    g = generator(4)
    v = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in parameters(module).items()}
    x, y = data.train_x[:5], data.train_y[:5]
    found = Handle(module, cross_entropy).sum_squared_slope_product(parameters(module), batch(x, y), v)
    assert close(found, tree.scale(5.0, squared_slope_product(module, x, y, v))) < 1e-12


def test_gauss_newton_is_the_hessian_of_softmax_regression_and_not_of_a_network() -> None:
    data = toy_data()
    client = (data.train_x, data.train_y)
    regression = fedge.models.logistic(6, 3, seed=0).double()
    exact = hessian(regression, client)
    assert float((dense(regression, client, "gauss_newton") - exact).abs().max()) < 1e-14
    assert float((dense(regression, client, "fisher") - exact).abs().max()) > 1e-3
    assert float((dense(toy_model(), client, "gauss_newton") - hessian(toy_model(), client)).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (fedge.GIANT, {"iterations": 0}, "iterations is 0, it must be a whole number of at least 1"),
        (fedge.GIANT, {"matrix": "hessian"}, r"matrix is 'hessian', it must be one of \['gauss_newton', 'fisher'\]"),
        (fedge.DONE, {"alpha": 0.0}, "alpha is 0.0, it must be greater than 0"),
        (fedge.DONE, {"candidates": (1.0, -1.0)}, "candidates is -1.0, it must be 0 or more"),
        (fedge.SubspaceNewton, {"memory": -1}, "memory is -1, it must be a whole number of at least 0"),
        (fedge.SubspaceNewton, {"dampings": ()}, "dampings is empty"),
        (fedge.SubspaceNewton, {"dampings": (-0.1,)}, "dampings is -0.1, it must be 0 or more"),
        (fedge.SubspaceNewton, {"centre": "updates"}, r"centre is 'updates' \(did you mean 'update'\?\)"),
    ],
)
def test_impossible_options_are_refused(kind: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(toy_model(), **options)


@pytest.mark.parametrize("link", [Simulator, Loopback])
@pytest.mark.parametrize("kind", [fedge.GIANT, fedge.SubspaceNewton])
def test_line_searches_work_in_half_precision(kind: type, link: type) -> None:
    """What stands for a loss that overflowed is a number of the model's type."""
    data = toy_data()
    federation = ragged(replace(data, train_x=data.train_x.half(), test_x=data.test_x.half()))
    algorithm = kind(toy_model(dtype=torch.float16))
    run = fedge.train(algorithm, federation, rounds=2, link=link(algorithm, federation))
    assert run.history[-1]["test_loss"] < math.log(3)
    assert all(not record["dropped"] for record in run.history)
