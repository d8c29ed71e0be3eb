"""One table of every algorithm through the same checks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedge
from tests.cases import close, generator, ragged, toy_data, toy_model

DIGITS = fedge.data.load("digits")


def digits_model(outputs: int = 10):
    return fedge.models.mlp(64, (32,), outputs, seed=0)


UNTOUCHED = {
    "fedavg": fedge.FedAvg(digits_model()),
    "fedprox": fedge.FedProx(digits_model()),
    "fednova": fedge.FedNova(digits_model()),
    "foof": fedge.FOOF(digits_model()),
    "scaffold": fedge.SCAFFOLD(digits_model(), clients=100),
    "scaffold_counted": fedge.SCAFFOLD(digits_model()),
    "feddane": fedge.FedDANE(digits_model()),
    "fisher_lbfgs": fedge.FisherLBFGS(digits_model()),
    "subspace_newton": fedge.SubspaceNewton(digits_model()),
    "giant": fedge.GIANT(digits_model()),
    "done": fedge.DONE(digits_model()),
    "data_sharing": fedge.DataSharing(fedge.FedAvg(digits_model())),
    "fedova": fedge.FedOVA(fedge.FedAvg(digits_model(2))),
    "fedova_lbfgs": fedge.FedOVA(fedge.FisherLBFGS(digits_model(2))),
    "fedova_scaffold": fedge.FedOVA(fedge.SCAFFOLD(digits_model(2))),
}


def final_accuracy(algorithm: fedge.Algorithm) -> float:
    """Two labels per client, 20 of 100 clients per round, the last five of 50 rounds; guessing is at 10 %."""
    lists = fedge.partition.labels_per_client(DIGITS.train_y, 100, labels=2, seed=0)
    run = fedge.train(algorithm, fedge.Federation(DIGITS, lists), rounds=50, cohort=20, seed=0)
    return sum(record["test_accuracy"] for record in run.history[-5:]) / 5


@pytest.mark.parametrize("name", UNTOUCHED)
def test_defaults_learn_digits(name: str) -> None:
    assert final_accuracy(UNTOUCHED[name]) > 0.8


def test_local_adam_learns_digits_with_a_step_of_its_own() -> None:
    """The default step is SGD's; Adam, whose moments start over in every round, wants a smaller one for longer."""
    assert final_accuracy(fedge.FedAvg(digits_model(), optimiser="adam", lr=0.02, epochs=10)) > 0.8


def quadratic() -> tuple[fedge.Federation, torch.Tensor]:
    """Least squares with an exact solution: every client's minimum is another one, the sum's is known."""
    g = generator(0)
    x = torch.randn(60, 3, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(60, generator=g, dtype=torch.float64)
    data = fedge.data.Data(x, y, x, y, classes=0)
    solution = torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0]
    return fedge.Federation(data, [range(10), range(10, 25), range(25, 60)]), solution


def squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out[:, 0] - y) ** 2 / 2


def test_reaches_the_optimum_of_a_quadratic() -> None:
    federation, solution = quadratic()
    model = torch.nn.Linear(3, 1, bias=False).double()
    common = {"loss": squared}
    newton = {"source": "gradient", "curvature": "product", "matrix": "gauss_newton", "damping": 0.0}
    cases = {
        "fedavg": fedge.FedAvg(model, lr=0.3, epochs=1, batch_size=None, **common),
        "server_momentum": fedge.FedAvg(model, lr=0.2, epochs=1, batch_size=None, server_momentum=0.5, **common),
        "fednova": fedge.FedNova(model, lr=0.3, epochs=1, batch_size=None, server_momentum=0.2, **common),
        "scaffold": fedge.SCAFFOLD(model, lr=0.1, epochs=3, batch_size=None, weighted=True, **common),
        "fedprox": fedge.FedProx(model, lr=0.3, epochs=1, batch_size=None, mu=0.5, **common),
        "feddane": fedge.FedDANE(model, lr=0.1, epochs=3, batch_size=None, mu=0.5, **common),
        "lbfgs": fedge.FisherLBFGS(model, **newton, **common),
        "lbfgs_next": fedge.FisherLBFGS(model, curvature_at="next", **newton, **common),
        "giant": fedge.GIANT(model, damping=0.0, **common),
        "done": fedge.DONE(model, damping=0.0, alpha=0.3, **common),
    }
    sooner = {"lbfgs": 30, "lbfgs_next": 30, "giant": 80, "done": 80}
    for name, algorithm in cases.items():
        rounds = sooner.get(name, 150)
        run = fedge.train(algorithm, federation, rounds=rounds, observe=fedge.Observe(evaluate_every=rounds))
        assert float((run.params["weight"][0] - solution).abs().max()) < 1e-8, name
    short = fedge.train(cases["lbfgs"], federation, rounds=12, observe=fedge.Observe(evaluate_every=12))
    assert float((short.params["weight"][0] - solution).abs().max()) < 1e-8  # three dimensions, three pairs


def test_scaffold_reaches_the_mean_of_the_clients_objectives_where_local_steps_lead_others_astray() -> None:
    """Its plain means minimise mean_k F_k, whatever the sizes of clients; many local steps of FedAvg end elsewhere."""
    federation, _ = quadratic()
    x, y = federation.data.train_x, federation.data.train_y
    root = torch.cat(
        [torch.full((len(federation.examples(k)),), len(federation.examples(k)) ** -0.5) for k in range(3)]
    )
    solution = torch.linalg.lstsq(root.double()[:, None] * x, (root * y)[:, None]).solution[:, 0]
    model = torch.nn.Linear(3, 1, bias=False).double()
    options = {"lr": 0.05, "epochs": 8, "batch_size": None, "loss": squared}
    far = {}
    for kind, cohort in ((fedge.FedAvg, None), (fedge.SCAFFOLD, None), (fedge.SCAFFOLD, 2)):
        rarely = fedge.Observe(evaluate_every=400)
        run = fedge.train(kind(model, **options), federation, rounds=400, cohort=cohort, observe=rarely)
        far[kind, cohort] = float((run.params["weight"][0] - solution).abs().max())
    assert far[fedge.SCAFFOLD, None] < 1e-8
    assert far[fedge.SCAFFOLD, 2] < 1e-8
    assert far[fedge.FedAvg, None] > 1e-3


def test_the_order_of_clients_does_not_matter() -> None:
    """With full batches and everybody taking part no address is left to matter."""
    data = toy_data()
    federation = ragged(data)
    lists = [federation.examples(k).numpy() for k in range(7)]
    other = fedge.Federation(data, lists[::-1])
    options = {"epochs": 2, "batch_size": None}
    cases = {
        "fedavg": fedge.FedAvg(toy_model(), **options),
        "feddane": fedge.FedDANE(toy_model(), **options),
        "lbfgs": fedge.FisherLBFGS(toy_model(), curvature="product", **options),
        "subspace": fedge.SubspaceNewton(toy_model(), **options),
        "giant": fedge.GIANT(toy_model(), iterations=5),
        "scaffold": fedge.SCAFFOLD(toy_model(), **options),
        "fednova": fedge.FedNova(toy_model(), **options),
        "fedper": fedge.FedPer(toy_model(), **options),
        "fedova": fedge.FedOVA(fedge.FisherLBFGS(toy_model(outputs=2), **options), classes=3),
    }
    for name, algorithm in cases.items():
        one = fedge.train(algorithm, federation, rounds=3)
        two = fedge.train(algorithm, other, rounds=3)
        assert close(one.params, two.params) < 1e-10, name


def test_shared_examples_are_part_of_every_clients_data() -> None:
    """Sharing equals a federation whose lists already hold the shared examples."""
    from fedge.core import At, Share
    from fedge.engine import Simulator

    data = toy_data()
    federation = ragged(data)
    inner = fedge.FedAvg(toy_model(), lr=0.2, epochs=2, batch_size=4)
    sharing = fedge.DataSharing(inner, beta=0.5)
    link = Simulator(sharing, federation)
    run = fedge.train(sharing, federation, rounds=3, cohort=4, seed=1, link=link)
    shared = link.population.shared
    assert len(shared) == round(0.5 * 90 / 7)
    more = dataclasses.replace(
        data,
        train_x=torch.cat([data.train_x, data.train_x[shared]]),
        train_y=torch.cat([data.train_y, data.train_y[shared]]),
    )
    lists = [torch.cat([federation.examples(k), 90 + torch.arange(len(shared))]).numpy() for k in range(7)]
    plain = fedge.train(inner, fedge.Federation(more, lists), rounds=3, cohort=4, seed=1)
    assert close(run.params, plain.params) < 1e-12
    again = Simulator(sharing, federation)
    again.share(At(1, 0, 0), Share(0.5))
    assert torch.equal(again.population.shared, shared)
    again.share(At(2, 0, 0), Share(0.5))
    assert not torch.equal(again.population.shared, shared)


def test_a_client_whose_loss_is_not_a_number_is_dropped_in_every_algorithm() -> None:
    data = toy_data()
    federation = ragged(data)
    poisoned = data.train_x.clone()
    poisoned[federation.examples(4)[0]] = 1e200
    bad = fedge.data.Data(poisoned, data.train_y, data.test_x, data.test_y, 3)
    federation = fedge.Federation(bad, [federation.examples(k).numpy() for k in range(7)])

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return fedge.cross_entropy(logits * logits.abs(), y)

    cases = {
        "feddane": fedge.FedDANE(toy_model(), lr=0.01, epochs=1, loss=loss),
        "scaffold": fedge.SCAFFOLD(toy_model(), lr=0.01, epochs=1, loss=loss),
        "fednova": fedge.FedNova(toy_model(), lr=0.01, epochs=1, loss=loss),
        "fedper": fedge.FedPer(toy_model(), lr=0.01, epochs=1, loss=loss),
        "lbfgs": fedge.FisherLBFGS(toy_model(), epochs=1, local_lr=0.01, loss=loss),
        "product": fedge.FisherLBFGS(toy_model(), source="gradient", curvature="product", lr=0.01, loss=loss),
        "subspace": fedge.SubspaceNewton(toy_model(), lr=0.01, epochs=1, loss=loss),
        "giant": fedge.GIANT(toy_model(), iterations=3, lr=0.01, loss=loss),
        "fedova": fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), lr=0.01, epochs=1, loss=loss), classes=3),
    }  # fmt: skip
    for name, algorithm in cases.items():
        run = fedge.train(algorithm, federation, rounds=2)
        for record in run.history:
            assert {drop["client"] for drop in record["dropped"]} == {4}, name
        assert all(bool(torch.isfinite(leaf).all()) for leaf in run.params.values()), name
