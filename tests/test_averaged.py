"""A shrinking step size and the mean of late rounds, for FedAvg and FedOVA alike."""

from __future__ import annotations

import pytest
import torch

import fedge
from fedge import tree
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.fedavg import train as plain_steps

FEDERATION = ragged(toy_data())


def fedavg(outputs: int = 3, **options) -> fedge.FedAvg:
    return fedge.FedAvg(toy_model(outputs=outputs), lr=0.2, epochs=2, batch_size=None, **options)


def run(algorithm: fedge.Algorithm, rounds: int, **options) -> fedge.Run:
    return fedge.train(
        algorithm, FEDERATION, rounds=rounds, cohort=4, seed=3, observe=fedge.Observe(evaluate_every=rounds), **options
    )


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_every_round_takes_the_shrunken_step(optimiser: str) -> None:
    """Round by round against torch.optim with lr * 0.5^t, on whole clients, so that there is no order of batches."""
    algorithm = fedavg(lr_decay=0.5, optimiser=optimiser)
    done = run(algorithm, 3)
    module = toy_model()
    for t, record in enumerate(done.history):
        deltas, sizes = [], []
        for client in record["cohort"]:
            chosen = FEDERATION.examples(client)
            x, y = FEDERATION.data.train_x[chosen], FEDERATION.data.train_y[chosen]
            every = [torch.arange(len(y))] * 2
            deltas.append(plain_steps(module, (x, y), every, lr=0.2 * 0.5**t, optimiser=optimiser) * len(y))
            sizes.append(len(y))
        vector = torch.nn.utils.parameters_to_vector(module.parameters()) + sum(deltas) / sum(sizes)
        torch.nn.utils.vector_to_parameters(vector.detach(), module.parameters())
    assert close(done.params, {name: leaf.detach() for name, leaf in module.named_parameters()}) < 1e-10


@pytest.mark.parametrize("kind", [fedge.FedAvg, fedge.FedDANE])
def test_a_clipped_step_shrinks_too(kind: type[fedge.Algorithm]) -> None:
    """One step of one client, whose gradient is longer than what is allowed: lr * clip, then half of it."""
    data = toy_data()
    federation = fedge.Federation(data, [range(len(data.train_y))])
    algorithm = kind(toy_model(), lr=0.2, lr_decay=0.5, clip=1e-3, epochs=1, batch_size=None)
    points = [fedge.train(algorithm, federation, rounds=rounds, seed=0).params for rounds in (1, 2)]
    start = dict(toy_model().named_parameters())
    steps = [float(tree.norm(tree.sub(b, a)).detach()) for a, b in ((start, points[0]), (points[0], points[1]))]
    assert steps == pytest.approx([0.2e-3, 0.1e-3], rel=1e-2)


def test_the_factor_is_counted() -> None:
    plain, shrinking = run(fedavg(), 2), run(fedavg(lr_decay=0.9), 2)
    assert shrinking.ledger.total()["down"] - plain.ledger.total()["down"] == 2 * 4 * 8  # rounds, clients, float64
    assert shrinking.ledger.total()["up"] == plain.ledger.total()["up"]


def test_a_class_counts_its_own_rounds() -> None:
    """Under FedOVA a class that nobody in the cohort holds does not shrink its step."""
    done = run(fedge.FedOVA(fedavg(2, lr_decay=0.5), classes=3), 4)
    labels = FEDERATION.label_counts() > 0
    held = [sum(bool(labels[record["cohort"]][:, row].any()) for record in done.history) for row in range(3)]
    assert [one["round"] for one in done.state] == held


@pytest.mark.parametrize("decay", [0, -1, 1.5, True, "x"])
def test_impossible_decays_are_refused(decay: object) -> None:
    for kind in (fedge.FedAvg, fedge.FedDANE, fedge.FisherLBFGS):
        with pytest.raises(ValueError, match="lr_decay is"):
            kind(toy_model(), lr_decay=decay)
    with pytest.raises(ValueError, match="source='update'"):
        fedge.FisherLBFGS(toy_model(), lr_decay=0.9, source="gradient")
    with pytest.raises(ValueError, match="source='update'"):
        fedge.FisherLBFGS(toy_model(), clip=0.9, source="gradient")


def test_a_run_without_a_schedule_goes_on_with_one() -> None:
    first = run(fedavg(), 2)
    assert run(fedavg(lr_decay=0.5), 2, start=first).state["round"] == 2


INNER = {"fedavg": fedavg(), "fedova": fedge.FedOVA(fedavg(2), classes=3)}


@pytest.mark.parametrize("name", INNER)
def test_the_mean_is_that_of_the_rounds(name: str) -> None:
    """The plain mean while the window is not full; then every round moves it by a part of one over the window."""
    inner = INNER[name]
    points = [run(inner, rounds).params for rounds in (1, 2, 3, 4)]
    for window in (2, 10):
        expected = points[0]
        for t, point in enumerate(points[1:], 2):
            expected = {n: expected[n] + (point[n] - expected[n]) / min(t, window) for n in expected}
        assert close(run(fedge.Averaged(inner, window=window), 4).params, expected) < 1e-12
    mean = {n: sum(point[n] for point in points) / 4 for n in points[0]}
    assert close(run(fedge.Averaged(inner, window=10), 4).params, mean) < 1e-12


@pytest.mark.parametrize("name", INNER)
def test_training_is_untouched_and_the_mean_is_judged(name: str) -> None:
    inner, algorithm = INNER[name], fedge.Averaged(INNER[name], window=3)
    plain, mean = run(inner, 3), run(algorithm, 3)
    assert close(inner.params(mean.state["inner"]), plain.params) == 0
    assert mean.ledger.total() == plain.ledger.total()
    x = FEDERATION.data.test_x
    by_hand = inner.scores(mean.handle, inner.with_params(plain.state, mean.params), x)
    assert torch.equal(mean.scores(x), by_hand)
    assert not torch.equal(mean.scores(x), plain.scores(x))


def test_inside_fedova_it_is_the_same_as_around_it() -> None:
    """While every class is held in every round."""
    everyone = {"rounds": 3, "seed": 0}
    outside = fedge.train(fedge.Averaged(fedge.FedOVA(fedavg(2), classes=3), window=2), FEDERATION, **everyone)
    inside = fedge.train(fedge.FedOVA(fedge.Averaged(fedavg(2), window=2), classes=3), FEDERATION, **everyone)
    assert close(outside.params, inside.params) < 1e-12


def test_it_goes_on_from_its_own_run_from_the_inner_one_and_with_a_class_more() -> None:
    algorithm = fedge.Averaged(INNER["fedova"], window=3)
    assert close(run(algorithm, 2, start=run(algorithm, 2)).params, run(algorithm, 4).params) < 1e-12
    assert run(algorithm, 1, start=run(INNER["fedova"], 2)).state["round"] == 1
    wider = fedge.Averaged(fedge.FedOVA(fedavg(2), classes=4), window=3)
    assert len(next(iter(run(wider, 1, start=run(algorithm, 2)).params.values()))) == 4


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        fedge.Averaged(fedavg(), window=0)
    with pytest.raises(ValueError, match="instead of nesting"):
        fedge.Averaged(fedge.Averaged(fedavg()))
