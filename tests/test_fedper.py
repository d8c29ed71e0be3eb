"""FedPer against a plain float64 loop: shared layers, every client's own layers, and what the record says of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedge
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.common import named
from tests.reference.fedper import fedper

COMMON = {"lr": 0.1, "epochs": 2, "batch_size": 4}
ROUNDS, COHORT = 6, 4
VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.5, "weight_decay": 0.02, "server_lr": 0.7},
    "shrinking": {"lr_decay": 0.7, "inner_decay": 0.2, "clip": 0.5},
    "full_batch": {"batch_size": None},
}


@pytest.mark.parametrize("personal", [(), ("fc1",), ("fc2.bias", "fc1.bias")])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_plain_loop(name: str, personal: tuple[str, ...]) -> None:
    options = COMMON | VARIANTS[name]
    model, federation = toy_model(), ragged(toy_data())
    run = fedge.train(fedge.FedPer(model, personal, **options), federation, rounds=ROUNDS, cohort=COHORT, seed=9)
    cohorts, order = cohorts_of(federation, ROUNDS, COHORT, seed=9), order_of(federation, 9)
    wanted = personal or ("fc2",)
    own = [name for name, _ in model.named_parameters() if name in wanted or name.split(".")[0] in wanted]
    params, networks, judged = fedper(model, clients_of(federation), cohorts, order, own, **options)
    assert close(run.params, params) < 1e-10
    held = run.memory["personal"]
    assert sorted(held["leaves"]) == sorted(own)
    for place, client in enumerate(held["jobs"][:, 0].tolist()):
        expected = named(model, networks[client])
        assert close({n: leaf[place] for n, leaf in held["leaves"].items()}, {n: expected[n] for n in own}) < 1e-10
    for record, accuracies in zip(run.history, judged, strict=True):
        assert record["client_accuracy_mean"] == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-12)
        assert record["client_accuracy_worst_decile"] == pytest.approx(min(accuracies), abs=1e-12)


def test_the_lowest_tenth() -> None:
    accuracies = torch.linspace(0, 1, 31, dtype=torch.float64)[torch.randperm(31)]
    assert fedge.algorithms.fedper._served(accuracies) == pytest.approx({"mean": 0.5, "worst_decile": 1 / 30})


def test_what_the_server_has_is_the_shared_layers_and_the_first_personal_ones() -> None:
    model, federation = toy_model(), ragged(toy_data())
    algorithm = fedge.FedPer(model, **COMMON)
    run = fedge.train(algorithm, federation, rounds=2, seed=0)
    first = {name: leaf.detach() for name, leaf in model.named_parameters()}
    assert run.params.keys() == first.keys()
    for name in first:
        assert torch.equal(run.params[name], first[name]) == name.startswith("fc2.")
    served = toy_model()
    served.load_state_dict(run.params)
    x = federation.data.test_x
    assert float((run.scores(x) - served(x).detach()).abs().max()) < 1e-12
    assert algorithm.with_params(run.state, first) == {**run.state, "params": first}
    assert tuple(run.memory["personal"]["leaves"]["fc2.weight"].shape) == (7, 3, 5)


def test_personal_layers_serve_clients_with_few_labels() -> None:
    """Two labels per client: its own last layer knows which two, the mean of all last layers does not."""
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, 100, labels=2, seed=0)
    algorithm = fedge.FedPer(fedge.models.mlp(64, (32,), 10, seed=0))
    run = fedge.train(algorithm, fedge.Federation(data, lists), rounds=50, cohort=20, seed=0)
    last = run.history[-5:]
    assert sum(record["client_accuracy_mean"] for record in last) / 5 > 0.95
    assert all(record["client_accuracy_worst_decile"] <= record["client_accuracy_mean"] for record in run.history)
    assert run.history[0]["client_accuracy_mean"] < 0.3


def test_refusals() -> None:
    model = toy_model()
    with pytest.raises(ValueError, match=r"personal has 'fc2\.wieght' \(did you mean 'fc2\.weight'\?\)"):
        fedge.FedPer(model, ("fc2.wieght",))
    with pytest.raises(ValueError, match="it must be a list of names"):
        fedge.FedPer(model, "fc2")
    with pytest.raises(ValueError, match="none are left to share"):
        fedge.FedPer(model, ("fc1", "fc2"))
    with pytest.raises(ValueError, match="none are left to share"):
        fedge.FedPer(nn.Linear(3, 2))
    for inner in (fedge.FedPer(model), fedge.Averaged(fedge.FedPer(model))):
        with pytest.raises(ValueError, match="personal layers serve one client"):
            fedge.FedOVA(inner)
    data = toy_data()
    real = fedge.data.Data(data.train_x, data.train_y.double(), data.test_x, data.test_y.double(), 0)
    with pytest.raises(ValueError, match="FedPer records the accuracy of clients"):
        fedge.train(fedge.FedPer(model, loss=lambda out, y: out[:, 0] - y), ragged(real), rounds=1)
