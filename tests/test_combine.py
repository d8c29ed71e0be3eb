"""Combining rules against plain references, on one row and on several, and what liars can do to each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import fedge
from fedge.combine.bounded_mean import quantile
from fedge.core import Ask, Combine, Payload
from fedge.engine import Loopback, Simulator
from fedge.engine.clients.run_task import Upload
from fedge.engine.uploads.stacking import Stack
from tests.cases import close, generator, ragged, toy_data, toy_model


def uploads(jobs: int, seed: int = 0) -> Payload:
    g = generator(seed)
    return {
        "delta": {
            "weight": torch.randn(jobs, 4, 3, generator=g, dtype=torch.float64),
            "bias": torch.randn(jobs, 4, generator=g, dtype=torch.float64),
        }
    }


def flat(one: Payload) -> np.ndarray:
    return np.concatenate([leaf.reshape(-1).numpy() for leaf in one["delta"].values()])


def rows(many: Payload) -> np.ndarray:
    return np.stack(
        [flat({"delta": {k: v[j] for k, v in many["delta"].items()}}) for j in range(len(many["delta"]["bias"]))]
    )


@pytest.mark.parametrize("jobs", [1, 2, 5, 8])
def test_median_is_that_of_numpy(jobs: int) -> None:
    many = uploads(jobs)
    assert np.allclose(flat(fedge.Median().together(many, torch.rand(jobs))), np.median(rows(many), axis=0), atol=1e-15)


@pytest.mark.parametrize(("jobs", "share"), [(1, 0.4), (5, 0.2), (10, 0.1), (10, 0.19), (9, 0.0)])
def test_trimmed_mean_is_that_of_scipy(jobs: int, share: float) -> None:
    many = uploads(jobs)
    found = flat(fedge.TrimmedMean(share).together(many, torch.rand(jobs)))
    assert np.allclose(found, stats.trim_mean(rows(many), share, axis=0), atol=1e-15)


def plain_krum(points: np.ndarray, bad: int, keep: int) -> np.ndarray:
    """As in the paper, one pair after another."""
    scores = []
    for i, one in enumerate(points):
        distances = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(points) if j != i)
        scores.append(sum(distances[: len(points) - bad - 2]))
    return points[np.argsort(scores, kind="stable")[:keep]].mean(0)


@pytest.mark.parametrize(("jobs", "bad", "keep"), [(7, 2, 1), (7, 1, 3), (10, 3, 4)])
def test_krum_is_that_of_a_plain_loop(jobs: int, bad: int, keep: int) -> None:
    many = uploads(jobs)
    assert np.allclose(flat(fedge.Krum(bad, keep).together(many, torch.rand(jobs))), plain_krum(rows(many), bad, keep))


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_krum_with_few_uploads_keeps_what_there_is(jobs: int) -> None:
    many = uploads(jobs)
    assert np.isfinite(flat(fedge.Krum(bad=2, keep=5).together(many, torch.ones(jobs)))).all()
    assert np.allclose(flat(fedge.Krum(bad=0, keep=5).together(many, torch.ones(jobs))), rows(many).mean(0))
    one = flat(fedge.Krum(bad=2, keep=5).together(many, torch.ones(jobs)))
    assert any(np.allclose(one, row) for row in rows(many))  # no more than J - bad are kept


def test_clipped_mean_shortens_what_is_long_and_leaves_the_rest() -> None:
    many = uploads(5)
    many["delta"]["weight"][1] *= 1e100
    many["delta"]["weight"][2] = many["delta"]["bias"][2, :, None] * 0
    many["delta"]["bias"][2] = 0.0
    lengths = np.linalg.norm(rows(many)[[0, 3, 4]], axis=1)
    found = rows(fedge.ClippedMean(2.0).each(many))
    assert np.allclose(np.linalg.norm(found[[0, 3, 4]], axis=1), np.minimum(lengths, 2.0))
    assert np.linalg.norm(found[1]) == pytest.approx(2.0)
    assert np.allclose(found[2], 0)


@pytest.mark.parametrize(("jobs", "quantile"), [(1, 0.5), (4, 0.5), (7, 0.25), (9, 0.8)])
def test_bounded_mean_is_that_of_a_plain_loop(jobs: int, quantile: float) -> None:
    many = uploads(jobs)
    many["delta"]["weight"][0] *= 1e6
    rule, points = fedge.BoundedMean(quantile), rows(many)
    lengths = [float(np.sqrt((point**2).sum())) for point in points]
    limit = np.quantile(lengths, quantile)
    expected = sum(min(1.0, limit / length) * point for point, length in zip(points, lengths, strict=True)) / jobs
    found = flat(rule.together(rule.across(many), torch.rand(jobs)))
    assert np.allclose(found, expected, atol=1e-12)
    assert np.linalg.norm(found) <= limit * (1 + 1e-12)


def test_bounded_mean_takes_its_limit_from_the_uploads_of_all_rows() -> None:
    """A liar that is alone in its row is shortened to the usual length too; zeros stay zeros."""
    many, stack = uploads(6), Stack(fedge.BoundedMean(), 2)
    many["delta"]["weight"][5] *= 1e6
    many["delta"]["weight"][4], many["delta"]["bias"][4] = 0.0, 0.0
    stack.add([many], [torch.ones(6)], torch.tensor([0, 0, 0, 0, 0, 1]), torch.arange(6))
    limit = np.quantile(np.linalg.norm(rows(many), axis=1), 0.5)
    mean = stack.reply().mean
    alone = flat({"delta": {name: leaf[1] for name, leaf in mean["delta"].items()}})
    assert np.linalg.norm(alone) == pytest.approx(limit)
    assert not flat({"delta": {n: leaf[4] for n, leaf in fedge.BoundedMean().across(many)["delta"].items()}}).any()


def test_a_liar_does_not_put_the_length_of_one_part_into_another() -> None:
    """A momentum is much longer than the update that it comes with."""
    many = uploads(10)
    many["momentum"] = {name: 100 * leaf for name, leaf in uploads(10, seed=1)["delta"].items()}
    many["delta"]["weight"][0], many["momentum"]["weight"][0], many["momentum"]["bias"][0] = 1e4, 0.0, 0.0
    limit = np.quantile(np.linalg.norm(rows(many), axis=1), 0.5)
    found = fedge.BoundedMean().across(many)
    assert np.linalg.norm(rows(found)[0]) == pytest.approx(limit)
    assert not found["momentum"]["weight"][0].any()


def test_who_has_many_rows_does_not_set_the_limit_of_a_bounded_mean() -> None:
    """Nine clients with one label each and a liar with ten: its uploads are most of those that come."""
    many, stack = uploads(19), Stack(fedge.BoundedMean(), 10)
    many["delta"]["weight"][9:] *= 1e3
    longest = np.linalg.norm(rows(many)[:9], axis=1).max()
    clients = torch.tensor([*range(9), *[9] * 10])
    stack.add([many], [torch.ones(19)], torch.tensor([*range(9), *range(10)]), clients)
    mean = stack.reply().mean
    found = [flat({"delta": {name: leaf[row] for name, leaf in mean["delta"].items()}}) for row in range(10)]
    assert max(map(np.linalg.norm, found)) <= longest


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.95])
def test_the_quantile_of_clients_is_torchs_if_all_have_as_many_rows(share: float) -> None:
    lengths = torch.rand(12, dtype=torch.float64)
    twice = torch.arange(6).repeat_interleave(2)
    assert float(quantile(lengths, twice, share)) == float(lengths.quantile(share))


def test_the_quantile_of_clients_with_different_numbers_of_rows_by_hand() -> None:
    """Weights 1, 1, 1 and four quarters: the lengths are the quantiles 0, 2, 4, 5.25, 5.75, 6.25 and 6.75 of 6.75."""
    lengths, clients = torch.tensor([10.0, 1, 2, 10, 3, 10, 10]), torch.tensor([7, 0, 1, 7, 2, 7, 7])
    assert float(quantile(lengths, clients, 0.5)) == pytest.approx(2 + 1.375 / 2)
    assert float(quantile(lengths, clients, 1e-9)) == pytest.approx(1.0)
    assert float(quantile(lengths, clients, 0.9)) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedge.BoundedMean(1.0), "quantile is 1.0, it must be above 0 and below 1"),
        (lambda: fedge.TrimmedMean(0.5), "share is 0.5, it must be at least 0 and below 0.5"),
        (lambda: fedge.Krum(-1), "bad is -1, it must be a whole number of at least 0"),
        (lambda: fedge.Krum(1, 0), "keep is 0, it must be a whole number of at least 1"),
        (lambda: fedge.ClippedMean(0.0), "limit is 0.0, it must be greater than 0"),
    ],
)
def test_impossible_rules_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="combine is 'median', it must be a rule such as"):
        fedge.Robust(fedge.FedAvg(toy_model()), "median")


def test_a_stack_sorts_by_client_and_leaves_empty_rows_at_zero() -> None:
    many, stack = uploads(4), Stack(fedge.Median(), 3)
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0])
    for j, (client, position) in enumerate([(7, 2), (3, 0), (7, 0), (1, 2)]):
        one = {"delta": {k: v[j : j + 1] for k, v in many["delta"].items()}}
        stack.add([one], [weights[j : j + 1]], torch.tensor([position]), torch.tensor([client]))
    reply = stack.reply()
    assert reply.clients.tolist() == [2, 0, 2]
    assert reply.uploads is not None
    assert reply.uploads.weights["delta"].tolist() == [1.0, 3.0, 2.0, 4.0]
    assert reply.uploads.rows.tolist() == [2, 0, 0, 2]
    assert not reply.mean["delta"]["bias"][1].any()
    assert torch.equal(reply.mean["delta"]["bias"][0], many["delta"]["bias"][[1, 2]].mean(0))
    assert reply.row(1, 1) is None
    alone = reply.row(2, 2)
    assert alone is not None
    assert torch.equal(alone.uploads.parts["delta"]["bias"], many["delta"]["bias"][[3, 0]])


# -- a new rule is one class; a new algorithm on gathered uploads one more


class Smallest(Combine):
    """The upload with the smallest bias."""

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        first = int(uploads["delta"]["fc1.bias"].norm(dim=1).argmin())
        return {part: {name: leaf[first] for name, leaf in leaves.items()} for part, leaves in uploads.items()}


class Reweighted(fedge.FedAvg):
    """Gathered uploads, averaged by the server itself with the square roots of their weights."""

    def round(self, state):
        trained = yield Ask("train", {"params": state["params"]}, combine=fedge.Gather())
        weight = trained.uploads.weights["delta"].double().sqrt()
        mean = {
            name: torch.tensordot((weight / weight.sum()).to(leaf.dtype), leaf, dims=1)
            for name, leaf in trained.uploads.parts["delta"].items()
        }
        return {**state, "params": fedge.tree.add(state["params"], mean)}


@pytest.mark.parametrize(
    "make", [lambda m: fedge.Robust(fedge.FedAvg(m, epochs=1), Smallest()), lambda m: Reweighted(m, epochs=1)]
)
def test_your_own_rule_and_your_own_arithmetic_agree_on_all_links(make) -> None:
    algorithm, federation = make(toy_model()), ragged(toy_data())
    found = [
        fedge.train(algorithm, federation, rounds=3, cohort=5, seed=3, link=link)
        for link in (
            Simulator(algorithm, federation),
            Simulator(algorithm, federation, chunk=2),
            Loopback(algorithm, federation),
        )
    ]
    assert close(found[0].params, found[1].params) < 1e-10
    assert close(found[0].params, found[2].params) < 1e-10
    plain = fedge.FedAvg(toy_model(), epochs=1)
    assert close(found[0].params, fedge.train(plain, federation, rounds=3, cohort=5, seed=3).params) > 1e-4


# -- liars


class Liars(Simulator):
    """Some clients send ten times the opposite of what they computed."""

    liars = frozenset(range(0, 100, 5))

    def received(self, jobs, uploads: dict[str, Upload]) -> dict[str, Upload]:
        sign = torch.tensor([-10.0 if client in self.liars else 1.0 for client in jobs.clients.tolist()])
        return {
            name: (
                {
                    p: {k: leaf * sign.view(-1, *[1] * (leaf.dim() - 1)) for k, leaf in part.items()}
                    for p, part in up.items()
                },
                w,
            )
            for name, (up, w) in uploads.items()
        }


def accuracy(algorithm, federation, link: type[Simulator]) -> float:
    run = fedge.train(
        algorithm, federation, rounds=30, cohort=20, link=link(algorithm, federation), observe=fedge.Observe(30)
    )
    return run.history[-1]["test_accuracy"]


def test_twenty_of_a_hundred_liars_ruin_the_mean_and_cost_robust_rules_little() -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, 100, seed=0))
    inner = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, epochs=5, batch_size=10)
    honest = accuracy(inner, federation, Simulator)
    assert honest > 0.9
    assert accuracy(inner, federation, Liars) < 0.5
    for rule in (fedge.Median(), fedge.Krum(bad=6, keep=8)):
        assert accuracy(fedge.Robust(inner, rule), federation, Liars) > honest - 0.03


def test_a_task_without_streaming_says_what_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    class Own(fedge.Median):
        pass

    algorithm, federation = fedge.Robust(fedge.FedAvg(toy_model(), epochs=1), Own()), ragged(toy_data())
    with caplog.at_level("INFO", "fedge"):
        fedge.train(algorithm, federation, rounds=2, cohort=5)
    assert [r.getMessage() for r in caplog.records if "Own" in r.getMessage()] == [
        "Own needs all 5 uploads at once: 0.0 MB"
    ]


def test_a_rule_around_an_algorithm_that_combines_by_itself_is_refused() -> None:
    algorithm, federation = fedge.Robust(Reweighted(toy_model(), epochs=1), fedge.Median()), ragged(toy_data())
    with pytest.raises(ValueError, match="Reweighted gathers single uploads and combines them itself"):
        fedge.train(algorithm, federation, rounds=1)


def test_a_rule_around_fedova_combines_every_class_by_itself() -> None:
    """Against the median of gathered uploads, class by class."""
    federation = ragged(toy_data())
    inner = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), lr=0.2, epochs=1), classes=3)
    found = fedge.train(fedge.Robust(inner, fedge.Median()), federation, rounds=1)

    class Gathering(fedge.FedAvg):
        def round(self, state):
            got = yield Ask("train", {"params": state["params"]}, combine=fedge.Gather())
            middle = {k: torch.from_numpy(np.median(v.numpy(), axis=0)) for k, v in got.uploads.parts["delta"].items()}
            return {**state, "params": fedge.tree.add(state["params"], middle)}

    plain = fedge.train(
        fedge.FedOVA(Gathering(toy_model(outputs=2), lr=0.2, epochs=1), classes=3), federation, rounds=1
    )
    assert close(found.params, plain.params) < 1e-12
    assert close(found.params, fedge.train(inner, federation, rounds=1).params) > 1e-4


@pytest.mark.parametrize("rule", [fedge.Median(), fedge.Krum(1, 2), fedge.ClippedMean(0.1), fedge.TrimmedMean(0.2)])
def test_counters_beside_a_model_are_averaged_and_not_compared(rule: Combine) -> None:
    """SCAFFOLD counts clients, FedNova steps: a rule for directions has no say in them."""
    federation, model = ragged(toy_data()), fedge.models.mlp(6, (12,), 3, seed=1).double()
    run = fedge.train(
        fedge.Robust(fedge.SCAFFOLD(model, epochs=1, control="average"), rule), federation, rounds=20, cohort=4
    )
    assert run.state["seen"] == pytest.approx(7)
    clipped, plain = (
        fedge.train(a, federation, rounds=1).params
        for a in (fedge.Robust(fedge.FedNova(model, epochs=1), fedge.ClippedMean(1e6)), fedge.FedNova(model, epochs=1))
    )
    assert close(clipped, plain) < 1e-12


def test_personal_layers_can_be_made_robust() -> None:
    inner, federation = fedge.FedPer(fedge.models.mlp(6, (12,), 3, seed=1).double(), epochs=1), ragged(toy_data())
    runs = [fedge.train(a, federation, rounds=2) for a in (inner, fedge.Robust(inner, fedge.Median()))]
    assert close(runs[0].params, runs[1].params) > 1e-6
    assert all("client_accuracy_mean" in record for run in runs for record in run.history)


def test_wrappers_are_checked_at_any_depth() -> None:
    inner = fedge.FedAvg(toy_model(outputs=2))
    with pytest.raises(ValueError, match=r"write DataSharing\(FedOVA"):
        fedge.FedOVA(fedge.Robust(fedge.DataSharing(inner)), classes=3)
    with pytest.raises(ValueError, match="uploads are encoded once"):
        fedge.Compressed(fedge.Robust(fedge.Compressed(inner)))


def test_the_server_draws_with_another_key_in_every_round_phase_ask_and_row() -> None:
    seen: list[int] = []

    class Drawing(fedge.FedDANE):
        def round(self, state):
            first = yield Ask("gradient", {"params": state["params"]})
            second = yield Ask("gradient", {"params": state["params"]})
            seen.extend([first.key, second.key])
            return state

    federation = ragged(toy_data())
    fedge.train(fedge.FedOVA(Drawing(toy_model(outputs=2), epochs=1), classes=3), federation, rounds=2)
    assert len(seen) == len(set(seen)) == 2 * 2 * 3
    again, seen = list(seen), []
    fedge.train(fedge.FedOVA(Drawing(toy_model(outputs=2), epochs=1), classes=3), federation, rounds=2)
    assert seen == again


def test_krum_says_when_there_are_too_few_uploads(caplog: pytest.LogCaptureFixture) -> None:
    rule, many = fedge.Krum(bad=5, keep=2), uploads(6)
    for _ in range(2):
        rule.together(many, torch.ones(6))
    assert [r.getMessage() for r in caplog.records] == [
        "Krum(bad=5, keep=2) got 6 uploads; it resists 5 liars among 13 or more"
    ]


def test_a_rule_that_neither_streams_nor_combines_says_so() -> None:
    class Nothing(Combine):
        pass

    algorithm, federation = fedge.Robust(fedge.FedAvg(toy_model(), epochs=1), Nothing()), ragged(toy_data())
    with pytest.raises(NotImplementedError, match="Nothing must say what it makes of all uploads together"):
        fedge.train(algorithm, federation, rounds=1)
