"""One trunk with a binary head per class, against a plain float64 loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedge
from fedge.algorithms.shared_ova import binary_heads
from fedge.core import Payload
from fedge.engine import Loopback
from fedge.engine.links import wire
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, one_holder, ragged, toy_data, toy_model
from tests.reference.shared_ova import shared_ova

COMMON = {"lr": 0.2, "epochs": 2}
ROUNDS, COHORT = 5, 3


@pytest.mark.parametrize("batch_size", [4, None])
def test_against_the_plain_loop(batch_size: int | None) -> None:
    """With cohorts of three of seven clients: in some rounds nobody holds a class."""
    model, federation = toy_model(), ragged(toy_data())
    algorithm = fedge.SharedOVA(model, batch_size=batch_size, **COMMON)
    run = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=9)
    cohorts, order = cohorts_of(federation, ROUNDS, COHORT, seed=9), order_of(federation, 9)
    clients = clients_of(federation)
    held = [{int(label) for k in cohort for label in clients[k][1]} for (cohort,) in cohorts]
    assert any(len(one) < 3 for one in held), "else a head that nobody holds is not tested"
    params = shared_ova(model, clients, cohorts, order, batch_size=batch_size, **COMMON)
    assert close(run.params, params) < 1e-9


def test_a_head_that_nobody_holds_stays_and_the_trunk_does_not_see_it() -> None:
    data = toy_data()
    only = torch.nonzero(data.train_y < 2).flatten().numpy()
    run = fedge.train(fedge.SharedOVA(toy_model(), **COMMON), fedge.Federation(data, [only]), rounds=2)
    first = dict(toy_model().named_parameters())
    assert torch.equal(run.params["fc2.weight"][2], first["fc2.weight"][2])
    assert torch.equal(run.params["fc2.bias"][2], first["fc2.bias"][2])
    assert not torch.equal(run.params["fc2.bias"][:2], first["fc2.bias"][:2])


def test_the_loss_is_the_sum_of_binary_ones() -> None:
    logits, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 2])
    p = torch.sigmoid(logits)
    wanted = torch.eye(3, dtype=torch.float64)[y]
    plain = -(wanted * p.log() + (1 - wanted) * (1 - p).log()).sum(1)
    assert torch.allclose(binary_heads(logits, y), plain)


class Turned(nn.Module):
    """The head is registered before the trunk; `after` follows it."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.head, self.trunk = nn.Linear(4, 3), nn.Linear(6, 4)
        self.after = after or nn.Identity()
        with torch.no_grad():
            for leaf in self.parameters():
                leaf.copy_(torch.randn(leaf.shape, generator=draw))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.head(torch.relu(self.trunk(x))))


class Straight(Turned):
    """The same function, registered in its order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {name: self._modules[name] for name in ("trunk", "head", "after")}


def test_a_head_that_is_not_registered_last_is_refused_unless_it_is_named() -> None:
    federation = ragged(toy_data())
    with pytest.raises(
        ValueError, match="the scores are not what the layer 'trunk' gives, one per class: name the one"
    ):
        fedge.train(fedge.SharedOVA(Turned(), **COMMON), federation, rounds=1)
    run = fedge.train(fedge.SharedOVA(Turned(), head="head", **COMMON), federation, rounds=3, cohort=COHORT, seed=9)
    plain = fedge.train(fedge.SharedOVA(Straight(), **COMMON), federation, rounds=3, cohort=COHORT, seed=9)
    assert close(run.params, plain.params) < 1e-12


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be a linear layer with bias: name yours"):
        fedge.SharedOVA(nn.Sequential(nn.Linear(6, 3, bias=False), nn.GroupNorm(1, 3)))
    with pytest.raises(ValueError, match="the head 'hed' has no parameters"):
        fedge.SharedOVA(Turned(), head="hed")
    with pytest.raises(ValueError, match="nothing may follow it"):
        fedge.train(fedge.SharedOVA(Turned(nn.Softplus()), head="head"), ragged(toy_data()), rounds=1)
    with pytest.raises(ValueError, match="carry_momentum mixes heads"):
        fedge.SharedOVA(toy_model(), momentum=0.9, carry_momentum=True)


class Liars(Loopback):
    """Client 2 weighs next to nothing, and client 0 moves all heads."""

    pushes: bool = True

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        for uploads in answer.values():
            uploads[:] = [self.lie(client, *one) for one in uploads]
        return wire.encode(answer)

    def lie(self, client: int, upload: Payload, weight: torch.Tensor) -> tuple[Payload, torch.Tensor]:
        if client == 0 and self.pushes:
            upload["delta"]["fc2.weight"] += 0.05
        return upload, torch.full_like(weight, 1e-30) if client == 2 else weight


@pytest.mark.parametrize("rule", [None, fedge.BoundedMean()])
@pytest.mark.parametrize("pushes", [True, False])
def test_a_holder_that_weighs_nothing_does_not_make_its_head_longer(
    rule: fedge.BoundedMean | None, pushes: bool
) -> None:
    """It alone holds class 2. What others send for that head is refused, and a rule does not look at weights."""
    federation, model = one_holder(2), fedge.models.mlp(6, (16,), 3, seed=1)
    algorithm = fedge.SharedOVA(model, lr=0.1, epochs=1, batch_size=4)
    algorithm = algorithm if rule is None else fedge.Robust(algorithm, rule)
    link = Liars(algorithm, federation)
    link.pushes = pushes
    run = fedge.train(algorithm, federation, rounds=3, seed=0, link=link)
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 10
    dropped = {(drop["client"], drop["reason"]) for record in run.history for drop in record["dropped"]}
    assert dropped == ({(0, "'delta/fc2.weight' moves a head that its client does not hold")} if pushes else set())


@pytest.mark.parametrize("codec", [fedge.Quantise(8), fedge.Quantise(2), fedge.TopK(0.1), fedge.Cast("fp16")])
def test_codecs_leave_the_heads_of_others_alone(codec: fedge.Quantise | fedge.TopK | fedge.Cast) -> None:
    federation, model = one_holder(2), fedge.models.mlp(6, (16,), 3, seed=1)
    algorithm = fedge.Compressed(fedge.SharedOVA(model, lr=0.1, epochs=1, batch_size=4), codec)
    run = fedge.train(algorithm, federation, rounds=3, seed=0, link=Loopback(algorithm, federation))
    assert [record["dropped"] for record in run.history] == [[], [], []]
