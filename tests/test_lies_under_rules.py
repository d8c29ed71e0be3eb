"""What one liar of a few can do under `BoundedMean`, where it is not the model that it lies about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedge
from fedge.algorithms.lbfgs import gram
from fedge.algorithms.subspace_newton import LONGEST, bounded
from fedge.combine.bounded_mean import voices
from fedge.core import Ask
from fedge.engine import Loopback, Simulator
from fedge.engine.links import wire
from fedge.engine.uploads.beside import judged
from tests.cases import close, ragged, toy_data, toy_model, wide

LIAR = 3
BEST, WORST = 0, 2


class Chooses(Loopback):
    """One device speaks for the candidate that the others like least, as loudly as it may."""

    def client(self, client: int, at: Any, ask: Ask, request: bytes) -> bytes:
        answer = wire.decode(super().client(client, at, ask, request))
        for upload, _ in (one for uploads in answer.values() for one in uploads) if client == LIAR else ():
            if "losses" in upload:
                at_all = torch.full_like(upload["losses"]["at"], 1e30)
                at_all[self.wanted(upload["losses"]["at"])] = -1e30
                upload["losses"]["at"] = at_all
            if "span" in upload:
                upload["span"]["matrix"] = -9 * upload["span"]["matrix"]
        return wire.encode(answer)

    def wanted(self, losses: Tensor) -> int:
        return int(losses.argmax())


SEARCHES = {
    "done": fedge.DONE(fedge.models.mlp(64, (32,), 10, seed=0), iterations=10),
    "giant": fedge.GIANT(fedge.models.mlp(64, (32,), 10, seed=0), iterations=5),
    "candidates": fedge.FisherLBFGS(fedge.models.mlp(64, (32,), 10, seed=0), epochs=1, candidates=(0.1, 0.5, 1.0, 3.0)),
    "subspace": fedge.SubspaceNewton(fedge.models.mlp(64, (32,), 10, seed=0), lr=0.1, epochs=1),
}


@pytest.mark.parametrize("name", [*SEARCHES, "giant, clipped"])
def test_one_device_of_ten_does_not_choose_the_step(name: str) -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=10, seed=0))
    rule = fedge.ClippedMean(100.0) if "clipped" in name else fedge.BoundedMean()
    algorithm = fedge.Robust(SEARCHES[name.split(",")[0]], rule)
    ends = []
    for link in (Loopback, Chooses):
        run = fedge.train(algorithm, federation, rounds=6, seed=0, link=link(algorithm, federation))
        ends.append(run.history[-1]["test_loss"])
        assert all(record["dropped"] == [] for record in run.history)
    assert ends[1] < 1.1 * ends[0]


def test_losses_count_by_what_they_say_within_a_client() -> None:
    """Against a plain loop over numbers; levels differ between clients, one cannot be computed, one is a lie."""
    told = [[1.0, 0.5, 2.0], [7.0, 6.8, 9.0], [3.0, 2.0, 2.5], [0.5, 0.5, 1e30], [1e30, 1e30, -1e30]]
    lowest = [min(losses) for losses in told]
    above = [[loss - low for loss in losses] for losses, low in zip(told, lowest, strict=True)]
    most = [3 * sorted(row[q] for row in above)[2] for q in range(3)]
    wanted = [[sorted(lowest)[2] + min(row[q], most[q]) for q in range(3)] for row in above]
    assert (
        close({"a": judged(torch.tensor(told, dtype=torch.float64))}, {"a": torch.tensor(wanted, dtype=torch.float64)})
        < 1e-12
    )
    stacked = torch.tensor(told, dtype=torch.float64)
    assert torch.equal(judged(stacked.view(5, 3, 1)), judged(stacked).view(5, 3, 1))
    assert judged(stacked[:, 0]).tolist() == [3.0] * 5  # of one point nothing is compared: the median
    assert int(judged(torch.tensor(told, dtype=torch.float64)).mean(0).argmin()) == 1


def test_the_liar_alone_cannot_be_heard_and_honest_clients_choose_as_in_a_mean() -> None:
    honest = torch.rand(9, 4, generator=torch.Generator().manual_seed(0)).double() + torch.arange(4) / 2
    assert judged(honest).mean(0).argmin() == honest.mean(0).argmin() == 0
    for wanted in range(1, 4):
        lie = torch.full((1, 4), 1e30).double()
        lie[0, wanted] = -1e30
        assert judged(torch.cat([honest, lie])).mean(0).argmin() == 0


def test_who_claims_more_classes_than_most_is_heard_less_in_each() -> None:
    clients = torch.tensor([4, 4, 7, 7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1])
    assert voices(clients).tolist() == pytest.approx([1.0] * 4 + [0.2] * 10 + [1.0])
    upload = {"delta": {"w": torch.ones(15, 2)}}
    lengths = fedge.BoundedMean().among(upload, clients)["delta"]["w"][:, 0]
    assert lengths.tolist() == pytest.approx([1.0] * 4 + [0.2] * 10 + [1.0])


def test_a_rule_does_not_go_around_what_adds_up_for_ever() -> None:
    inner = fedge.SCAFFOLD(toy_model(outputs=2), epochs=1)
    for algorithm in (inner, fedge.FedOVA(inner, classes=3), fedge.Averaged(inner, window=2)):
        with pytest.raises(ValueError, match=r"SCAFFOLD adds up what clients send.* control='average'"):
            fedge.Robust(algorithm, fedge.BoundedMean())
        fedge.Robust(algorithm, fedge.Mean())  # nobody is promised anything
    fedge.Robust(fedge.SCAFFOLD(toy_model(), epochs=1, control="average"), fedge.Median())


class Pushes(Loopback):
    """One device pushes the server's control in the same direction in every round."""

    def client(self, client: int, at: Any, ask: Ask, request: bytes) -> bytes:
        answer = wire.decode(super().client(client, at, ask, request))
        for upload, _ in (one for uploads in answer.values() for one in uploads) if client == LIAR else ():
            for part in {"change", "control"} & set(upload):
                upload[part] = {name: torch.full_like(leaf, 0.05) for name, leaf in upload[part].items()}
        return wire.encode(answer)


def test_a_push_in_every_round_does_not_add_up_in_the_control() -> None:
    """With the sum the control grows in every round; an average stays where the push is."""
    federation, lengths = ragged(toy_data()), {}
    for control, rounds in (("average", 10), ("average", 40), ("sum", 10), ("sum", 40)):
        plain = fedge.SCAFFOLD(wide().model, lr=0.05, epochs=1, clients=7, control=control)
        algorithm = fedge.Robust(plain, fedge.BoundedMean()) if control == "average" else plain
        run = fedge.train(algorithm, federation, rounds=rounds, seed=0, link=Pushes(algorithm, federation))
        lengths[control, rounds] = sum(float(leaf.square().sum()) for leaf in run.state["control"].values()) ** 0.5
    assert lengths["average", 40] < 1.5 * lengths["average", 10]
    assert lengths["sum", 40] > 2.5 * lengths["sum", 10]


def test_no_step_in_the_span_is_longer_than_ten_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = [{"w": torch.randn(5, generator=generator).double()} for _ in range(2)]
    dots = gram(basis)
    for coefficients in ([1.0, 0.5], [1e3, -1e5], [0.0, 0.0]):
        given = torch.tensor(coefficients).double()
        found = bounded(given, dots)
        step = found[0] * basis[0]["w"] + found[1] * basis[1]["w"]
        plain = given[0] * basis[0]["w"] + given[1] * basis[1]["w"]
        most = LONGEST * basis[0]["w"].norm()
        assert step.norm() == pytest.approx(float(min(plain.norm(), most)))
        assert np.linalg.matrix_rank(torch.stack([found, given]).numpy()) <= 1


def test_a_cohort_refuses_a_step_that_helps_nobody() -> None:
    """0 is among the candidates: with a step that is uphill for all, the model stays."""

    class Uphill(fedge.GIANT):
        def solution(self, carry: Any) -> Any:
            return {name: -leaf for name, leaf in super().solution(carry).items()}

    federation = ragged(toy_data())
    algorithm = Uphill(toy_model(), iterations=3)
    run = fedge.train(algorithm, federation, rounds=1, link=Simulator(algorithm, federation))
    assert close(run.params, algorithm.init(run.params)["params"]) == 0
    start = fedge.train(algorithm, federation, rounds=1, start=None).params
    assert close(run.params, start) == 0
    model = {name: leaf.detach() for name, leaf in algorithm.model.named_parameters()}
    assert close(run.params, model) < 1e-12
