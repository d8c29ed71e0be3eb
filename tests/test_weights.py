"""No client weighs more than it enrolled with, and none has more than its share of a mean."""

from __future__ import annotations

import dataclasses
import logging

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fedge
from fedge import once
from fedge.engine import Loopback, Ranks, Simulator, TooFewReplies
from fedge.engine.links import wire
from fedge.engine.ranks.process_group import Group
from fedge.engine.uploads import limits
from tests.cases import close, one_holder, ragged, toy_data, toy_model


def liars(weight, sign: float, clients: tuple[int, ...] = (2,)):
    """A simulator and a loop-back link in which these clients claim a weight and send their update times `sign`."""

    class Simulated(Simulator):
        def received(self, jobs, uploads):
            lies = torch.isin(jobs.clients, torch.tensor(clients))
            for upload, w in uploads.values():
                w[lies] = float(weight)
                for leaf in upload.get("delta", {}).values():
                    leaf[lies] *= sign
            return uploads

    class Sent(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client in clients:
                answer = {row: [self._lie(*upload) for upload in uploads] for row, uploads in answer.items()}
            return wire.encode(answer)

        def _lie(self, upload, w):
            lie = {n: {k: sign * v for k, v in part.items()} for n, part in upload.items()}
            return lie, torch.full_like(w, float(weight))

    return Simulated, Sent


def by_class(weighted: bool) -> tuple[fedge.FedOVA, fedge.Federation]:
    """Client 2 alone holds the last class."""
    inner = fedge.FedAvg(toy_model(outputs=2, dtype=torch.float32), lr=0.1, epochs=1, batch_size=4)
    return fedge.FedOVA(inner, classes=3, weighted=weighted), one_holder(2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("weight", [1e-60, 1e-44, 9e-31])
def test_a_weight_that_is_next_to_nothing_costs_its_client_alone(weight: float, weighted: bool) -> None:
    """In double precision it is above 0, in single it is 0 or has no inverse: the mean of a row would be 0 / 0."""
    algorithm, federation = by_class(weighted)

    class Light(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client == 2:
                light = torch.tensor(weight, dtype=torch.float64)
                answer = {row: [(upload, light) for upload, _ in uploads] for row, uploads in answer.items()}
            return wire.encode(answer)

    run = fedge.train(algorithm, federation, rounds=6, link=Light(algorithm, federation))
    reasons = {(drop["client"], drop["reason"]) for record in run.history for drop in record["dropped"]}
    assert reasons == {(2, f"weight {weight:g} is below 1e-30, the least that counts")}
    assert not any("skipped" in record for record in run.history)


@pytest.mark.parametrize("link", liars(2e-30, 1.0))
def test_the_lightest_weight_that_counts_is_of_use(link) -> None:
    """Also of a row that it alone holds."""
    algorithm, federation = by_class(weighted=False)
    light = fedge.train(algorithm, federation, rounds=2, link=link(algorithm, federation))
    assert close(light.params, fedge.train(algorithm, federation, rounds=2).params) < 1e-5
    assert [record["dropped"] for record in light.history] == [[], []]


def test_one_of_twenty_that_claims_a_million_examples_costs_its_own_upload_and_no_accuracy() -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, 20, seed=0))
    algorithm = fedge.FedAvg(fedge.models.mlp(64, (32,), 10, seed=0), lr=0.1, epochs=2)
    honest = fedge.train(algorithm, federation, rounds=10)
    for link in liars(1e6, -1.0):
        run = fedge.train(algorithm, federation, rounds=10, link=link(algorithm, federation))
        drops = [drop for record in run.history for drop in record["dropped"]]
        assert {drop["client"] for drop in drops} == {2}
        assert len(drops) == 10
        size = int(federation.sizes[2])
        assert f"weight 1e+06 is not in (0, {size}], the most that this client may weigh" in drops[0]["reason"]
        assert run.history[-1]["test_accuracy"] > honest.history[-1]["test_accuracy"] - 0.02


@pytest.mark.parametrize("kind", ["fedova", "weighted fedova", "scaffold", "weighted scaffold", "shared"])
def test_the_limit_is_that_of_the_task(kind: str) -> None:
    """Plain means count every client once, whatever it has; shared examples count."""
    two, weighted = toy_model(outputs=2), "weighted" in kind
    algorithm: fedge.Algorithm
    if "fedova" in kind:
        algorithm = fedge.FedOVA(fedge.FedAvg(two, epochs=1), classes=3, weighted=weighted)
    elif "scaffold" in kind:
        algorithm = fedge.SCAFFOLD(toy_model(), epochs=1, weighted=weighted)
    else:
        algorithm = fedge.DataSharing(fedge.FedAvg(toy_model(), epochs=1), beta=0.5)
    federation = ragged(toy_data())
    assert fedge.train(algorithm, federation, rounds=2).history[1]["dropped"] == []
    most = {"shared": 8 + round(0.5 * 90 / 7)}.get(kind, 8 if weighted else 1)
    for link in liars(most + 0.5, 1.0):
        run = fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))
        assert {drop["client"] for drop in run.history[0]["dropped"]} == {2}
        assert f"not in (0, {most}]" in run.history[0]["dropped"][0]["reason"]
    for link in liars(most, 1.0):
        run = fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))
        assert run.history[0]["dropped"] == []


class Steps(fedge.FedAvg):
    """Weighs by ten times the number of examples."""

    says = True

    def tasks(self, model):
        tasks = dict(super().tasks(model))
        finish = tasks["train"].finish

        def heavier(sent, carry, examples):
            upload, weight = finish(sent, carry, examples)
            return upload, 10 * weight

        most = (lambda n: 10 * n) if self.says else None
        return {"train": dataclasses.replace(tasks["train"], finish=heavier, heaviest=most)}


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_task_that_weighs_otherwise_says_so(link, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, federation = Steps(toy_model(), epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))
    plain = fedge.FedAvg(toy_model(), epochs=1)
    assert close(run.params, fedge.train(plain, federation, rounds=1).params) < 1e-12
    monkeypatch.setattr(Steps, "says", False)
    with pytest.raises(TooFewReplies, match="weigh by numbers of examples or let the task's `heaviest` say"):
        fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))


# Shares


def one_giant() -> fedge.Federation:
    """One client with 74 of 90 examples, and eight others."""
    return ragged(toy_data(), (74, *[2] * 8))


def by_hand(federation: fedge.Federation, weights: list[float]) -> dict[str, torch.Tensor]:
    """One round of FedAvg with these weights, from the updates that single clients make."""
    total, start = sum(weights), {n: p.detach() for n, p in toy_model().named_parameters()}
    mean = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
    for client, weight in enumerate(weights):
        alone = fedge.Federation(federation.data, [federation.examples(client).numpy()])
        # one full batch: the order of examples, which is addressed by the client's number, does not matter
        run = fedge.train(fedge.FedAvg(toy_model(), epochs=2, batch_size=None), alone, rounds=1)
        for name, leaf in run.params.items():
            mean[name] += weight / total * (leaf - start[name])
    return {name: start[name] + mean[name] for name in start}


def links(algorithm, federation, **options):
    yield Simulator(algorithm, federation, **options)
    yield Simulator(algorithm, federation, chunk=1, **options)
    yield Simulator(algorithm, federation, chunk=2, **options)
    yield Loopback(algorithm, federation, **options)
    yield Ranks(algorithm, federation, group=Group(), **options)


@pytest.mark.parametrize("combine", [None, fedge.Gather()])
@pytest.mark.parametrize(("max_share", "giant"), [(0.5, 16.0), (None, 74.0), (0.9, 74.0), (1.0, 74.0), (0.1, 64 / 5)])
def test_a_client_counts_for_its_share_at_most(max_share: float | None, giant: float, combine) -> None:
    federation = one_giant()
    algorithm = fedge.FedAvg(toy_model(), epochs=2, batch_size=None)
    if combine is not None:
        algorithm = Gathered(toy_model(), epochs=2, batch_size=None)
    expected = by_hand(federation, [giant, *[2] * 8])
    for link in links(algorithm, federation, max_share=max_share):
        run = fedge.train(algorithm, federation, rounds=1, link=link)
        assert run.history[0]["dropped"] == []
        assert close(run.params, expected) < 1e-8  # weights are in single precision


class Gathered(fedge.FedAvg):
    """The mean, made by the server from single uploads."""

    def round(self, state):
        flow = super().round(state)
        reply = yield dataclasses.replace(next(flow), combine=fedge.Gather())
        weights = reply.uploads.weights["delta"].double()
        mean = {
            name: torch.tensordot(weights / weights.sum(), leaf, dims=1)
            for name, leaf in reply.uploads.parts["delta"].items()
        }
        try:
            flow.send(dataclasses.replace(reply, mean={"delta": mean}))
        except StopIteration as end:
            return end.value
        raise AssertionError


@pytest.mark.parametrize(
    ("sizes", "giant"), [((90,), 90), ((89, 1), 89), ((86, 2, 2), 86), ((84, 2, 2, 2), 84), ((82, 2, 2, 2, 2), 32)]
)
def test_up_to_four_clients_may_have_any_share_and_one_of_five_four_fifths(sizes: tuple[int, ...], giant: int) -> None:
    federation = ragged(toy_data(), sizes)
    algorithm = fedge.FedAvg(toy_model(), epochs=2, batch_size=None)
    for link in links(algorithm, federation):
        run = fedge.train(algorithm, federation, rounds=1, link=link)
        assert close(run.params, by_hand(federation, [giant, *sizes[1:]])) < 1e-12


def test_the_share_is_that_of_the_clients_that_answer() -> None:
    """With the giant and six small ones left, the giant counts for 4 / 7."""

    class Half(Loopback):
        def exchange(self, at, asks, requests):
            mail = super().exchange(at, asks, requests)
            return {c: m._replace(parts={}, lost="gone") if c in (1, 2) else m for c, m in mail.items()}

    federation, algorithm = one_giant(), fedge.FedAvg(toy_model(), epochs=2, batch_size=None)
    run = fedge.train(algorithm, federation, rounds=1, link=Half(algorithm, federation))
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [1, 2]
    assert close(run.params, by_hand(federation, [16, 0, 0, *[2] * 6])) < 1e-12


def test_who_counts_for_less_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_TOLD", set())
    algorithm = fedge.FedAvg(toy_model(), epochs=1)
    with caplog.at_level(logging.WARNING, "fedge"):
        fedge.train(algorithm, ragged(toy_data()), rounds=1)
        assert not caplog.records
        fedge.train(algorithm, one_giant(), rounds=2)
    (record,) = caplog.records
    assert "82 % of its cohort's weight: it counts for 50 %" in record.getMessage()


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=12), st.floats(0.05, 1.0))
@settings(deadline=None)
def test_the_cap_is_the_largest_that_keeps_every_share(bounds: list[float], max_share: float) -> None:
    """Against bisection: c - s * sum min(b, c) rises through 0 at the cap."""
    share, largest = max(max_share, 4 / len(bounds)), max(bounds)
    found = limits.cap(torch.tensor(bounds, dtype=torch.float64), max_share)

    def over(c: float) -> float:
        return c - share * sum(min(b, c) for b in bounds)

    if over(largest) <= 1e-9 * largest:
        assert found >= largest * (1 - 1e-6)
        return
    low, high = 0.0, largest
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if over(middle) <= 0 else (low, middle)
    assert found == pytest.approx(low, rel=1e-6)


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_share_beyond_one_is_refused(link) -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    with pytest.raises(ValueError, match=r"max_share is 1\.5, it must be at most 1"):
        link(algorithm, federation, max_share=1.5)
    with pytest.raises(ValueError, match="max_share is 0, it must be greater than 0"):
        link(algorithm, federation, max_share=0)


def test_the_remedy_for_no_weight_is_a_weight() -> None:
    federation, algorithm = ragged(toy_data()), fedge.FedAvg(toy_model())
    for weight in (0.0, -2.0, float("nan"), 1e-31):
        for link in liars(weight, 1.0, clients=tuple(range(federation.clients))):
            with pytest.raises(
                TooFewReplies, match=r"return a weight above 0 from `finish`, such as examples.float"
            ) as e:
                fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))
            assert "heaviest" not in str(e.value)
