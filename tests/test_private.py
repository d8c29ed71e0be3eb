"""Private: what one client can change, what noise is added, and what the accountant says of it."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld
from scipy.special import gammaln, logsumexp
from torch import Tensor

import fedge
from fedge import secret, toml, tree
from fedge.algorithms import accounting
from fedge.core import Ask, At, Drop
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.engine.links import wire
from fedge.experiment import compare, parse
from fedge.loop import cohorts
from fedge.runs import checkpoint
from fedge.runs.experiments import failure
from fedge.sweep.whole import run_sweep
from tests.cases import algorithms, close, ragged, toy_data, toy_model
from tests.lossy import Lossy

CLIENTS = 7
ROUNDING = 1 + 1e-12


def noisy(inner: fedge.Algorithm, noise: float = 0.0, clip: float = 0.5, **options) -> fedge.Private:
    settings = {"clients": CLIENTS, "expected": CLIENTS} | options
    return fedge.Private(inner, clip=clip, noise=noise, **settings)


def fedavg(**options) -> fedge.FedAvg:
    return fedge.FedAvg(toy_model(), lr=0.2, epochs=2, batch_size=4, **options)


def fedova() -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), lr=0.2, epochs=2, batch_size=4), classes=3)


def step(algorithm: fedge.Algorithm, federation: fedge.Federation, **options) -> dict[str, Tensor]:
    """How far one round moved the parameters."""
    run = fedge.train(algorithm, federation, rounds=1, **options)
    start = algorithm.params(algorithm.init(dict(algorithm.model.named_parameters())))
    return tree.map_(lambda leaf: leaf.detach(), tree.sub(run.params, start))


# -- the accountant


def renyi(rate: float, noise: float, order: float) -> float:
    """log E_Q[(P/Q)^order] / (order - 1) of P = (1 - q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2), as a sum over z.

    The trapezium rule on a grid of s / 50: exact to rounding for such integrands.
    """
    z = np.arange(-30 * noise, order + 30 * noise, noise / 50)
    gain = (2 * z - 1) / (2 * noise**2)
    ratio = gain if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + gain)
    density = -(z**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    return float(logsumexp(order * ratio + density) + math.log(noise / 50)) / (order - 1)


def binomial(rate: float, noise: float, order: int) -> float:
    """The same for whole orders, in closed form (Mironov, Talwar and Zhang 2019, Sec. 3.3)."""
    k = np.arange(order + 1)
    chosen = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = chosen + k * math.log(rate) + (order - k) * math.log1p(-rate) + k * (k - 1) / (2 * noise**2)
    return float(logsumexp(terms)) / (order - 1)


def canonne(orders: np.ndarray, divergence: np.ndarray, delta: float) -> float:
    """Prop. 12 of Canonne, Kamath and Steinke 2020."""
    return float((divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())


@pytest.mark.parametrize(
    ("spent", "delta"),
    [
        ({(1.0, 0.2, 1): 100}, 1e-3),
        ({(1.1, 0.01, 1): 1000}, 1e-5),
        ({(1.5, 0.05, 2): 30}, 1e-4),
        ({(2.0, 0.1, 1): 10, (2.0, 0.1, 3): 5}, 1e-4),
        ({(0.8, 0.1, 1): 10, (2.0, 0.1, 1): 5, (2.0, 0.3, 2): 4}, 1e-4),
    ],
)
def test_epsilon_is_that_of_a_separate_computation(spent, delta: float) -> None:
    orders = np.concatenate([np.arange(1.8, 11, 0.1), np.arange(11, 64)])
    total = sum(
        count * np.array([renyi(rate, noise / math.sqrt(sums), order) for order in orders])
        for (noise, rate, sums), count in spent.items()
    )
    found = accounting.epsilon(spent, delta)
    ours = canonne(orders, total, delta)
    assert ours * (1 - 1e-9) < found < 1.005 * ours  # the accountant rounds up between whole orders
    whole = [12, 20, 40]
    for noise, rate, _ in spent:
        closed = [binomial(rate, noise, a) for a in whole]
        assert [renyi(rate, noise, a) for a in whole] == pytest.approx(closed, rel=1e-9)
        counted = accounting._divergence(accounting.Release(noise, rate, 1))
        known = dict(zip(accounting._orders().tolist(), counted.tolist(), strict=True))
        assert [known[a] for a in whole] == pytest.approx(closed, rel=1e-9)


def test_the_divergence_is_that_of_the_accountants_own_table() -> None:
    """rdp_privacy_accountant_test.py of dp-accounting: q = 0.01, noise 2.5, 50 rounds."""
    published = {1.5: 6.70579741e-04, 2.5: 1.08548710e-03, 5: 2.18075656e-03, 50: 2.38460375e-02}
    for order in (5, 50):
        assert 50 * renyi(0.01, 2.5, order) == pytest.approx(published[order], rel=1e-6)
        assert 50 * binomial(0.01, 2.5, order) == pytest.approx(published[order], rel=1e-6)
    for order in (1.5, 2.5):  # between whole orders it rounds up
        assert 0.95 * published[order] < 50 * renyi(0.01, 2.5, order) < published[order]


def test_epsilon_of_one_gaussian_is_the_published_one() -> None:
    """Noise of 4.530877117 is (1, 1e-6) by Renyi's way (the same file); exactly it is less."""
    assert accounting.epsilon({(4.530877117, 1.0, 1): 1}, 1e-6) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.3, 20, 1.34), (0.7, 70, 8.68)])
def test_epsilon_of_a_published_training_run(noise: float, epochs: int, published: float) -> None:
    """Bu, Dong, Long and Su, Deep Learning with Gaussian Differential Privacy, 2020, Fig. 4, with the older conversion
    of Mironov 2017; ours is tighter. The distribution of the loss itself is tighter still."""
    rate, count, delta = 256 / 60000, round(epochs * 60000 / 256), 1e-5
    orders = np.concatenate([np.arange(1.5, 11, 0.1), np.arange(11, 64)])
    older = (count * np.array([renyi(rate, noise, a) for a in orders]) + math.log(1 / delta) / (orders - 1)).min()
    assert older == pytest.approx(published, abs=0.03)
    found = accounting.epsilon({(noise, rate, 1): count}, delta)
    exact = pld.PLDAccountant()
    exact.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count)
    assert exact.get_epsilon(delta) < found < older


def test_nothing_is_promised_without_noise_and_nothing_spent_before_the_first_round() -> None:
    assert accounting.epsilon({(0.0, 0.5, 1): 3}, 1e-3) is None
    assert accounting.epsilon({(0.0, 0.5, 1): 3, (9.0, 0.5, 1): 1}, 1e-3) is None
    assert accounting.epsilon({}, 1e-3) == 0.0


def test_several_releases_of_one_cohort_are_dp_accountings_composition() -> None:
    event = dp_accounting.PoissonSampledDpEvent(
        0.1, dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.5), 3)
    )
    counted = dp_accounting.rdp.RdpAccountant()
    counted.compose(event, 20)
    assert accounting.epsilon({(1.5, 0.1, 3): 20}, 1e-4) == pytest.approx(counted.get_epsilon(1e-4), rel=1e-9)


# -- sums


def by_hand(inner: fedge.Algorithm, federation: fedge.Federation, clip: float) -> dict[str, Tensor]:
    """Every client trains alone; the sum of its shortened moves."""
    total: dict[str, Tensor] = {}
    for client in range(federation.clients):
        others = {(1, "train", other) for other in range(federation.clients) if other != client}
        moved = step(inner, federation, link=Lossy(Simulator(inner, federation), others))
        length = math.sqrt(sum(float(leaf.square().sum()) for leaf in moved.values()))
        moved = tree.scale(min(1.0, clip / length), moved)
        total = tree.add(total, moved) if total else moved
    return total


@pytest.mark.parametrize("make", [fedavg, fedova])
@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_the_sum_is_that_of_a_plain_loop(make, clip: float) -> None:
    """FedOVA's uploads are shortened over all classes of a client together."""
    federation, inner = ragged(toy_data()), make()
    found = step(noisy(inner, clip=clip), federation)
    expected = tree.scale(1 / CLIENTS, by_hand(inner, federation, clip))
    assert close(found, expected) < 1e-12


def extreme(federation: fedge.Federation, client: int) -> fedge.Federation:
    """The same clients, one of them with examples and labels of the worst kind."""
    data, mine = federation.data, federation.examples(client)
    x, y = data.train_x.clone(), data.train_y.clone()
    x[mine], y[mine] = 1e8 * x[mine].sign(), (y[mine] + 1) % 3
    lists = [federation.examples(k).numpy() for k in range(federation.clients)]
    return fedge.Federation(fedge.data.Data(x, y, data.test_x, data.test_y, 3), lists)


@pytest.mark.parametrize("make", [fedavg, fedova, lambda: fedavg(carry_momentum=True, momentum=0.5)])
@pytest.mark.parametrize("client", [2, 4])
def test_one_client_moves_the_sum_by_the_limit_at_most(make, client: int) -> None:
    """Added or removed: `clip`; its data replaced by others: twice that. `held` and `expected` are scale alone."""
    algorithm, federation = noisy(make(), clip=0.4, held=0.5, on_client=False), ragged(toy_data())
    scale = 0.5 * CLIENTS
    with_it = step(algorithm, federation)
    gone = Lossy(Simulator(algorithm, federation), {(1, "train", client)})
    without = step(algorithm, federation, link=gone)
    other = extreme(federation, client)
    worst = step(algorithm, other, link=Simulator(algorithm, other))

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return scale * float(tree.norm(tree.sub(a, b)))

    assert 0 < apart(with_it, without) <= 0.4 + 1e-9
    assert apart(worst, without) <= 0.4 + 1e-9
    assert apart(worst, with_it) <= 0.8 + 1e-9


class Forged(Loopback):
    """Some clients claim other weights, or send what is far too large."""

    def __init__(self, algorithm, federation, weight: float, times: float) -> None:
        super().__init__(algorithm, federation)
        self.weight, self.times = weight, times

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        if client == 3:
            return wire.encode(answer)
        changed = {
            row: [
                ({n: tree.scale(self.times, p) for n, p in upload.items()}, torch.full_like(weight, self.weight))
                for upload, weight in uploads
            ]
            for row, uploads in answer.items()
        }
        return wire.encode(changed)


def test_weights_do_not_count_and_no_upload_is_compared_with_another() -> None:
    """Else the others could make one client's part of the sum larger, or it could change which of them count."""
    algorithm, federation = noisy(fedavg(), clip=0.1), ragged(toy_data())
    honest = step(algorithm, federation)
    small = step(algorithm, federation, link=Forged(algorithm, federation, 1e-6, 1.0))
    assert close(honest, small) < 1e-12
    link = Forged(algorithm, federation, 1.0, 1e30)
    run = fedge.train(algorithm, federation, rounds=1, link=link)
    assert run.history[0]["dropped"] == []
    honest_run = fedge.train(algorithm, federation, rounds=1)
    moved = tree.norm(tree.sub(run.params, honest_run.params))
    assert float(moved) <= 6 * 2 * 0.1 / CLIENTS


def test_devices_send_weight_one_and_shorten_themselves_if_asked() -> None:
    federation = ragged(toy_data())
    for asked in (False, True):
        algorithm = noisy(fedavg(), clip=0.05, on_client=asked)
        link, sent = Loopback(algorithm, federation), []
        inner = link.client

        def client(*arguments, inner=inner, sent=sent) -> bytes:
            answer = inner(*arguments)
            sent += [(upload, float(weight)) for upload, weight in wire.decode(answer)[0]]
            return answer

        link.client = client
        fedge.train(algorithm, federation, rounds=1, link=link)
        lengths = [float(tree.norm(upload["delta"])) for upload, _ in sent]
        assert [weight for _, weight in sent] == [1.0] * CLIENTS
        assert (max(lengths) <= 0.05 + 1e-12) == asked


# -- noise


def test_the_noise_is_gaussian_of_the_stated_size() -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=10, seed=0))
    inner = fedge.FedAvg(fedge.models.mlp(seed=0), epochs=1)
    settings = {"clients": 10, "expected": 10, "clip": 0.5, "held": 0.8}
    clean, rough = (step(fedge.Private(inner, noise=z, **settings), federation) for z in (0.0, 2.0))
    drawn = torch.cat([leaf.flatten() for leaf in tree.sub(rough, clean).values()]) / (2.0 * 0.5 / (0.8 * 10))
    assert abs(float(drawn.std()) - 1) < 0.05
    assert abs(float(drawn.mean())) < 0.1
    assert float((drawn.abs() < 1).double().mean()) == pytest.approx(0.683, abs=0.03)


def test_gaussian_numbers_are_those_of_the_inverse_distribution() -> None:
    """Moments and quantiles of many, by another way than Box and Muller's."""
    drawn = secret.gaussian(b"", "test", torch.zeros(200_001)).sort().values
    assert drawn.shape == (200_001,)
    for share, z in [(0.5, 0.0), (0.8413447, 1.0), (0.0227501, -2.0), (0.9986501, 3.0)]:
        assert float(drawn[int(share * 200_001)]) == pytest.approx(z, abs=0.03)
    pair = secret.gaussian(b"", "pair", torch.zeros(100_000)).view(2, -1)
    assert abs(float((pair[0] * pair[1]).mean())) < 0.02


def test_noise_and_cohorts_are_addressed_and_depend_on_the_secret(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_bytes(bytes(range(32)))
    (tmp_path / "b.key").write_bytes(bytes(range(1, 33)))
    federation, found = ragged(toy_data()), []
    for name in (None, "a.key", "a.key", "b.key"):
        hidden = None if name is None else str(tmp_path / name)
        algorithm = noisy(fedavg(), 0.5, expected=5, secret=hidden)
        found.append(fedge.train(algorithm, federation, rounds=2, cohort=5).params)
    assert close(found[1], found[2]) == 0
    assert close(found[0], found[1]) > 1e-3
    assert close(found[1], found[3]) > 1e-3
    draws = [cohorts(1000, 50, "poisson", hidden)(At(0, 1, 0)) for hidden in (None, str(tmp_path / "a.key"))]
    assert not torch.equal(*draws)


def test_a_secret_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.key").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe.key")
    (tmp_path / "zero.key").symlink_to("/dev/zero")
    (tmp_path / "long.key").write_bytes(bytes(1 << 17))
    federation = ragged(toy_data())
    messages = {
        "short.key": "has 5 bytes: 16 or more",
        "none.key": r"cannot be read .*openssl rand -out .*none\.key",
        "pipe.key": r"it is no file but a pipe or a device.*openssl rand -out noise\.key",
        "zero.key": r"it is no file but a pipe or a device.*openssl rand -out noise\.key",
        "long.key": r"it has 131072 bytes, and 65536 are read at most.*openssl rand -out noise\.key",
    }
    for name, message in messages.items():
        algorithm = noisy(fedavg(), 0.5, secret=str(tmp_path / name))
        with pytest.raises(ValueError, match=message) as found:
            fedge.train(algorithm, federation, rounds=1)
        assert "remove it" not in str(found.value)


@pytest.mark.parametrize("name", ["private_fedova", "private_scaffold"])
def test_a_run_that_goes_on_ends_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    settings = {"cohort": 5, "seed": 3}
    whole = fedge.train(algorithm, federation, rounds=6, **settings)
    observe = fedge.Observe(checkpoint_every=2)
    for rounds in (3, 6):
        run = fedge.train(
            algorithm, federation, rounds=rounds, out=tmp_path / "a", resume=rounds == 6, observe=observe, **settings
        )
    assert close(whole.params, run.params) == 0
    assert [r["epsilon"] for r in whole.history] == [r["epsilon"] for r in run.history]


# -- cohorts


def test_poisson_cohorts_have_every_client_by_itself() -> None:
    draw = cohorts(200, 30, "poisson")
    drawn = torch.zeros(2000, 200)
    for round in range(2000):
        drawn[round, draw(At(0, round + 1, 0))] = 1
    assert (drawn.mean(0) - 0.15).abs().max() < 0.04
    assert float(drawn.sum(1).var()) == pytest.approx(200 * 0.15 * 0.85, rel=0.15)
    assert float(torch.corrcoef(drawn[:, :2].T)[0, 1]) == pytest.approx(0, abs=0.08)
    assert torch.equal(draw(At(0, 5, 0)), draw(At(0, 5, 0)))
    assert not torch.equal(draw(At(0, 5, 0)), draw(At(0, 5, 1)))
    assert len(cohorts(50, None, "poisson")(At(0, 1, 0))) == 50  # everybody, always


def empty_round(clients: int, cohort: int) -> int:
    """A round after the first in which nobody is drawn."""
    draw = cohorts(clients, cohort, "poisson")
    return next(round for round in range(2, 100) if not len(draw(At(0, round, 0))))


@pytest.mark.parametrize("link", [Simulator, Loopback])
@pytest.mark.parametrize("make", [fedavg, fedova, lambda: algorithms()["feddane"], lambda: algorithms()["scaffold"]])
def test_a_cohort_of_nobody_is_noise_alone(make, link) -> None:
    federation, last = ragged(toy_data()), empty_round(CLIENTS, 1)
    algorithm = noisy(make(), 0.3, expected=1, held=0.5)
    runs = [
        fedge.train(algorithm, federation, rounds=rounds, cohort=1, link=link(algorithm, federation))
        for rounds in (last, last - 1)
    ]
    assert runs[0].history[-1]["up_bytes"] == 0
    moved = tree.sub(runs[0].params, runs[1].params)
    assert all(bool((leaf != 0).all()) for leaf in moved.values())  # every class of FedOVA, too
    assert runs[0].history[-1]["epsilon"] > runs[1].history[-1]["epsilon"]


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_cohort_that_is_drawn_too_small_is_skipped(link) -> None:
    federation, draw, algorithm = ragged(toy_data()), cohorts(CLIENTS, 3, "poisson"), fedavg()
    options = {"rounds": 12, "cohort": 3, "sampling": "poisson"}
    run = fedge.train(algorithm, federation, **options, link=link(algorithm, federation, min_replies=3))
    drawn = [len(draw(At(0, round, 0))) for round in range(1, 13)]
    assert 0 < min(drawn) < 3
    assert [record["up_bytes"] > 0 for record in run.history] == [count >= 3 for count in drawn]
    told = [record["skipped"] for record in run.history if "skipped" in record]
    few = "{} clients were drawn, 3 have to answer: raise cohort or lower min_replies"
    assert told == [few.format(count) for count in drawn if count < 3]
    all_of_them = link(algorithm, federation, min_replies=CLIENTS)
    with pytest.raises(TooFewReplies, match=rf"round \d+: \d clients were drawn, {CLIENTS} have to answer"):
        fedge.train(algorithm, federation, **options, link=all_of_them)


def test_without_privacy_a_cohort_of_nobody_skips_the_round() -> None:
    federation, last = ragged(toy_data()), empty_round(CLIENTS, 1)
    runs = [
        fedge.train(fedge.FedNova(toy_model()), federation, rounds=rounds, cohort=1, sampling="poisson")
        for rounds in (last, last - 1)
    ]
    assert runs[0].history[-1]["cohort"] == []
    assert close(runs[0].params, runs[1].params) == 0
    with pytest.raises(ValueError, match=r"sampling is 'posson' \(did you mean 'poisson'\?\)"):
        fedge.train(fedavg(), federation, rounds=1, sampling="posson")


# -- what is recorded, and what is refused


def test_the_record_says_what_was_spent_and_not_who_took_part(tmp_path: Path) -> None:
    federation = ragged(toy_data())
    algorithm = noisy(algorithms()["feddane"], 2.0, expected=5)
    run = fedge.train(algorithm, federation, rounds=3, cohort=5, out=tmp_path / "run")
    spent = [record["epsilon"] for record in run.history]
    assert spent == sorted(spent)
    assert spent[-1] == accounting.epsilon({(2.0, 5 / 7, 2): 3}, 7**-1.1)  # two phases, one cohort
    assert all("cohort" not in record and record["delta"] == 7**-1.1 for record in run.history)
    other = fedge.train(noisy(algorithms()["feddane_new_cohort"], 2.0, expected=5), federation, rounds=3, cohort=5)
    assert other.history[-1]["epsilon"] == accounting.epsilon({(2.0, 5 / 7, 1): 6}, 7**-1.1)
    from fedge.report import write_report

    page = write_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert ">epsilon</th>" in page
    assert f">{spent[-1]:.3g}</td>" in page
    assert f">{7**-1.1:.1e}</td>" in page


def test_a_run_that_goes_on_with_other_noise_or_another_rate_keeps_what_was_spent() -> None:
    federation, delta = ragged(toy_data()), 7**-1.1

    def after(noise: float, expected: int, start: fedge.Run | None = None) -> fedge.Run:
        algorithm = noisy(fedavg(), noise, expected=expected)
        return fedge.train(algorithm, federation, rounds=2, cohort=expected, start=start)

    loud = after(0.4, 7)
    rest = after(5.0, 3, loud)
    counted = dp_accounting.rdp.RdpAccountant()
    counted.compose(dp_accounting.PoissonSampledDpEvent(1.0, dp_accounting.GaussianDpEvent(0.4)), 2)
    counted.compose(dp_accounting.PoissonSampledDpEvent(3 / 7, dp_accounting.GaussianDpEvent(5.0)), 2)
    assert rest.history[-1]["epsilon"] == pytest.approx(counted.get_epsilon(delta), rel=1e-9)
    assert rest.history[-1]["epsilon"] > loud.history[-1]["epsilon"]
    assert after(5.0, 7, after(0.0, 7)).history[-1]["epsilon"] is None


def test_a_run_whose_checkpoint_has_numbers_of_sums_alone_goes_on_with_its_own_noise_and_rate(tmp_path: Path) -> None:
    """As written before the noise was kept with every release: a run is resumed with its own settings alone."""
    algorithm, federation = noisy(algorithms()["feddane"], 2.0, expected=5), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=2, cohort=5, out=tmp_path / "run")
    content = checkpoint.load(tmp_path / "run/checkpoint.pt")
    assert "examples" not in content, "sums over the examples, exact and without noise"
    assert content["state"]["spent"] == {(2.0, 5 / 7, 2): 2}
    content["state"]["spent"] = {"2": 2}
    checkpoint.save(tmp_path / "run/checkpoint.pt", content)
    with pytest.raises(ValueError, match="an older fedge, which does not say with what noise: start anew"):
        algorithm.adopt(content["state"])
    whole = fedge.train(algorithm, federation, rounds=4, cohort=5)
    rest = fedge.train(algorithm, federation, rounds=4, cohort=5, out=tmp_path / "run", resume=True)
    assert [r["epsilon"] for r in rest.history] == [r["epsilon"] for r in whole.history]
    assert rest.history[:2] == run.history


REFUSED = {
    "clip": (lambda: noisy(fedavg(), clip=0.0), "clip is 0.0, it must be greater than 0"),
    "noise": (lambda: noisy(fedavg(), -1.0), "noise is -1.0, it must be 0 or more"),
    "tiny noise": (lambda: noisy(fedavg(), 1e-200), "noise is 1e-200, it must be 0, or at least 1e-30"),
    "held": (lambda: noisy(fedavg(), held=2.0), "held is 2.0, it must be above 0 and at most 1"),
    "delta": (lambda: noisy(fedavg(), delta=1.5), "delta is 1.5, it must be above 0 and below 1"),
    "clients": (lambda: fedge.Private(fedavg()), "clients is None and expected is None: say how many"),
    "expected": (lambda: noisy(fedavg(), expected=8), "expected is 8, but there are only 7 clients"),
    "twice": (lambda: noisy(noisy(fedavg())), "noise is added once"),
    "inside FedOVA": (
        lambda: fedge.FedOVA(noisy(fedge.FedAvg(toy_model(outputs=2))), classes=3),
        r"write Private\(FedOVA\(...\)\)",
    ),
    "sharing inside": (lambda: noisy(fedge.DataSharing(fedavg())), "it cannot be made private"),
    "sharing outside": (lambda: fedge.DataSharing(noisy(fedavg())), "nothing that Private promises would hold"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_private_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


RUNS = {
    "another cohort": ({"cohort": 4}, "drawn with probability 1, but cohort is 4 of 7"),
    "fixed": ({"sampling": "fixed"}, "sampling is 'fixed', but Private counts on every client being drawn by itself"),
    "train": ({"observe": fedge.Observe(evaluate_train=True)}, "evaluate_train judges the model on clients' examples"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_that_breaks_the_promise_is_refused(case: str) -> None:
    settings, message = RUNS[case]
    with pytest.raises(ValueError, match=message):
        fedge.train(noisy(fedavg(), 1.0), ragged(toy_data()), rounds=1, **settings)


@pytest.mark.parametrize("link", [Simulator, Loopback])
@pytest.mark.parametrize("around", [False, True])
def test_a_least_number_of_answers_is_refused(link, around: bool) -> None:
    """One client more or less would decide whether the uploads of the others are released."""
    federation, algorithm = ragged(toy_data()), noisy(fedavg(), 1.0)
    server = link(algorithm, federation, min_replies=3)
    with pytest.raises(ValueError, match=r"min_replies is 3, but with Private one client more .*leave it at 1"):
        fedge.train(algorithm, federation, rounds=1, link=Lossy(server, set()) if around else server)


class Elsewhere(Loopback):
    """Stands for a fleet: no simulation that preflight knows."""


def test_a_fleet_needs_a_secret_and_other_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, algorithm = ragged(toy_data()), noisy(fedavg(), 1.0)
    link = Elsewhere(algorithm, federation)
    monkeypatch.setattr("fedge.preflight.Loopback", Simulator)
    with pytest.raises(ValueError, match="Private has no secret, and every device of a fleet knows the seed"):
        fedge.train(algorithm, federation, rounds=1, link=link)
    for inner in (fedge.Robust(fedavg(), fedge.Median()), algorithms()["fedper"]):
        with pytest.raises(ValueError, match="whose result one client can move by any amount"):
            fedge.train(noisy(inner, 1.0), federation, rounds=1)
    with pytest.raises(ValueError, match="take Robust away"):
        fedge.train(fedge.Robust(noisy(fedavg(), 1.0)), federation, rounds=1)
    plain = fedge.train(fedavg(), federation, rounds=1)
    with pytest.raises(ValueError, match="start is a run without noise"):
        fedge.train(noisy(fedavg(), 1.0), federation, rounds=1, start=plain)


def test_the_accountant_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.algorithms.accounting.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Private needs dp-accounting: pip install 'fedge\[private\]'"):
        fedge.train(noisy(fedavg(), 1.0), ragged(toy_data()), rounds=1)


def test_an_experiment_file_fills_in_who_there_is() -> None:
    from fedge.experiment import build, parse

    file = {
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 40},
        "model": {"name": "mlp"},
        "train": {"rounds": 1, "cohort": 10},
        "algorithm": [{"name": "private", "noise": 1.5, "inner": {"name": "fedavg"}}],
    }
    (algorithm,) = build(parse(file)).algorithms.values()
    assert (algorithm.clients, algorithm.expected, algorithm.noise) == (40, 10, 1.5)


@pytest.mark.parametrize("kind", ["FedNova", "SCAFFOLD", "FedCM"])
def test_algorithms_whose_uploads_have_single_numbers(kind: str) -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=20))
    inner = getattr(fedge, kind)(fedge.models.mlp(seed=0), epochs=1)
    algorithm = fedge.Private(inner, clip=1.0, noise=1.0, clients=20, expected=10)
    assert fedge.train(algorithm, federation, rounds=2, cohort=10).rounds == 2


def test_runs_that_share_a_secret_do_not_share_their_noise(tmp_path: Path) -> None:
    """Else twice the step with noise 2 minus the step with noise 4 would be the step without noise."""
    (tmp_path / "secret").write_bytes(bytes(range(64)))
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=20))

    def step(noise: float) -> Tensor:
        inner = fedge.FedAvg(fedge.models.mlp(seed=0), epochs=1)
        place = str(tmp_path / "secret")
        private = fedge.Private(inner, clip=1.0, noise=noise, clients=20, expected=10, secret=place)
        run = fedge.train(private, federation, rounds=1, cohort=10)
        return run.params["fc1.weight"] - fedge.models.mlp(seed=0).state_dict()["fc1.weight"]

    two, four = step(2.0), step(4.0)
    left = float((2 * two - four).std())
    assert left > float(two.std())  # the noises of both, not of none


# -- what leaks beside the model


def spoilt(federation: fedge.Federation, client: int) -> fedge.Federation:
    federation.data.train_x[federation.examples(client)] = torch.nan  # after the data's own check
    return federation


def test_who_was_dropped_stands_in_the_log_and_not_in_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = fedge.train(noisy(fedavg(), 0.1), spoilt(ragged(toy_data()), 2), rounds=2, out=tmp_path / "run")
    assert [record["dropped"] for record in run.history] == [[], []]
    assert "client 2 dropped in 'train'" in caplog.text
    assert '"client"' not in (tmp_path / "run/rounds.jsonl").read_text()


TABLE = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "logistic"},
    "train": {"rounds": 9, "cohort": 5, "sampling": "poisson"},
    "algorithm": [{"name": "private", "clients": 5, "expected": 5, "inner": {"name": "fedavg"}}],
}


@pytest.mark.parametrize("many", [False, True])
def test_why_a_run_ended_names_clients_in_the_log_alone(
    many: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self, at, asks, clients):
        raise TooFewReplies("client 2 sent nothing good", [Drop(2, "train", "nothing good")])

    monkeypatch.setattr(Simulator, "ask", refused)
    if many:
        sweep = TABLE | {"train": TABLE["train"] | {"seed": {"sweep": [0, 1]}}}
        (tmp_path / "sweep.toml").write_text(toml.dump(sweep))
        run_sweep(tmp_path / "sweep.toml", tmp_path / "out")
    else:
        (outcome,) = compare(parse(TABLE), tmp_path / "out")
        assert outcome.failed == "too few good uploads (the log says whose)"
    found = list((tmp_path / "out").rglob("failure.json"))
    assert len(found) == 1 + many
    for file in found:
        assert failure(file.parent) == "too few good uploads (the log says whose)"
    assert "client 2 sent nothing good" in caplog.text
    for file in (tmp_path / "out").rglob("*.json*"):
        assert "nothing good" not in file.read_text()


@pytest.mark.parametrize("make", [fedavg, lambda: fedge.FedDANE(toy_model(), lr=0.1, epochs=1)])
def test_bad_uploads_alone_are_as_nobody(make) -> None:
    """A round in which all that came is bad releases noise, as one to which nobody was drawn."""
    federation = ragged(toy_data())
    for client in range(CLIENTS):
        federation = spoilt(federation, client)
    run = fedge.train(noisy(make(), 0.1), federation, rounds=2)
    assert all("skipped" not in record for record in run.history)
    assert run.history[1]["epsilon"] > run.history[0]["epsilon"]
    start = fedge.train(noisy(make(), 0.1), federation, rounds=1)
    assert close(run.params, start.params) > 0


class TwoAsks(fedge.FedAvg):
    """Asks everybody for two things in one phase."""

    def tasks(self, model):
        (task,) = super().tasks(model).values()
        return {name: dataclasses.replace(task, finish=self._named(task, name)) for name in ("one", "two")}

    @staticmethod
    def _named(task, name: str):
        def finish(sent, carry, examples, *key):
            upload, weight = task.finish(sent, carry, examples, *key)
            return {name: upload["delta"]}, weight

        return finish

    def round(self, state):
        one, two = yield tuple(Ask(name, {"params": state["params"]}) for name in ("one", "two"))
        return {**state, "params": tree.add(state["params"], tree.add(one.mean["one"], two.mean["two"]))}


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_who_alone_answers_one_ask_of_two_moves_the_sum_by_the_limit_at_most(link) -> None:
    """All other answers to the second ask are bad; those to the first count with it and without it."""
    federation, clip = ragged(toy_data()), 0.4
    algorithm = noisy(TwoAsks(toy_model(), lr=0.2, epochs=1), clip=clip)

    class Half(link):
        def received(self, jobs, uploads):
            for upload, _ in uploads.values():
                for leaf in upload.get("two", {}).values():
                    leaf[jobs.clients != 6] = torch.nan
            return uploads

        def client(self, client, at, ask, request):
            answer = super().client(client, at, ask, request)
            return b"bad" if client != 6 and ask.task == "two" else answer

    with_it = step(algorithm, federation, link=Half(algorithm, federation))
    without = step(algorithm, federation, link=Lossy(Half(algorithm, federation), {(1, "one", 6)}))
    assert (
        0 < CLIENTS * float(tree.norm(tree.sub(with_it, without))) <= math.sqrt(2) * clip * ROUNDING
    )  # the sum of two parts
    assert CLIENTS * float(tree.norm(without)) > 2 * clip


class Deaf(Loopback):
    """Nobody understands the first clients in round 2."""

    first = 3

    def client(self, client, at, ask, request):
        answer = super().client(client, at, ask, request)
        return b"bad" if at.round == 2 and client < self.first else answer


@pytest.mark.parametrize("first", [3, CLIENTS])
def test_controls_are_those_that_counted_after_a_round_with_bad_answers(first: int) -> None:
    """SCAFFOLD's server control is the mean of the clients' own, whatever round released nothing."""
    federation = ragged(toy_data())
    inner = fedge.SCAFFOLD(toy_model(), lr=0.1, epochs=1, batch_size=4, clients=CLIENTS)
    algorithm = noisy(inner, clip=1e6)
    link = Deaf(algorithm, federation)
    link.first = first
    run = fedge.train(algorithm, federation, rounds=3, seed=1, link=link)
    own, control = run.memory["own_control"]["leaves"], run.state["inner"]["control"]
    for name, leaf in control.items():
        assert torch.allclose(own[name].sum(0) / CLIENTS, leaf, atol=1e-12)


def test_what_a_codec_left_out_stays_in_a_round_with_bad_answers() -> None:
    """Nothing of client 2 is released in round 2: what it owes is what it was. Client 6 owes something else."""
    federation, model = ragged(toy_data()), fedge.models.mlp(6, (20,), 3, seed=1).double()
    inner = fedge.FedAvg(model, lr=0.1, epochs=1, batch_size=4)
    algorithm = noisy(fedge.Compressed(inner, fedge.TopK(0.1)), clip=1e6)
    owed: dict[int, list[dict[str, Tensor]]] = {2: [], 6: []}
    for rounds in (1, 2):
        run = fedge.train(algorithm, federation, rounds=rounds, seed=1, link=Deaf(algorithm, federation))
        table = run.memory["left out of train/delta"]
        for client, found in owed.items():
            place = table["jobs"][:, 0].tolist().index(client)
            found.append({name: leaf[place] for name, leaf in table["leaves"].items()})
    assert close(*owed[2]) == 0
    assert close(*owed[6]) > 0


def test_the_sum_of_others_has_other_noise() -> None:
    """A round that is done again without one client: the difference of the two must not be that client's upload."""
    federation, clip = ragged(toy_data()), 0.5
    algorithm = noisy(fedavg(), 50.0, clip=clip)
    whole = step(algorithm, federation)
    again = step(algorithm, federation)
    less = step(algorithm, federation, link=Lossy(Simulator(algorithm, federation), {(1, "train", 2)}))
    assert close(whole, again) == 0
    gap = tree.sub(whole, less)
    length = math.sqrt(float(tree.dot(gap, gap)))
    assert length > 10 * clip / CLIENTS  # one client alone moves it by clip / expected at most
