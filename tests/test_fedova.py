"""FedOVA against separate per-class runs, counted work, new classes, scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedge
from fedge.core import drive
from fedge.engine import Loopback, Simulator
from fedge.engine.links import wire
from fedge.loop import cohorts
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, one_holder, ragged, toy_data, toy_model
from tests.reference.fedavg import fedavg
from tests.reference.feddane import feddane
from tests.reference.fedova import fedova, fedova_predict
from tests.reference.fisher_lbfgs import fisher_lbfgs

BINARY = toy_model(outputs=2)
SECOND = {"epochs": 2, "batch_size": 4, "local_lr": 0.1, "lr": 0.7, "memory": 2, "damping": 0.2, "weight_decay": 0.01}
SECOND |= {"first_step": None}
INNER = {
    "fedavg": (fedge.FedAvg, fedavg, {"lr": 0.1, "epochs": 2, "batch_size": 4, "server_momentum": 0.5}, (True,)),
    "clip": (fedge.FedAvg, fedavg, {"lr": 0.1, "epochs": 2, "batch_size": 4, "clip": 0.3}, (True,)),
    "feddane": (fedge.FedDANE, feddane, {"lr": 0.1, "epochs": 2, "batch_size": 4, "mu": 0.3}, (True, False)),
    "diagonal": (fedge.FisherLBFGS, fisher_lbfgs, SECOND | {"source": "update", "curvature": "diagonal"}, (True,)),
    "product": (
        fedge.FisherLBFGS, fisher_lbfgs, SECOND | {"source": "gradient", "curvature": "product"}, (True, False),
    ),
    "next": (
        fedge.FisherLBFGS,
        fisher_lbfgs,
        SECOND | {"source": "gradient", "curvature": "product", "curvature_at": "next", "candidates": (0.5, 1.0)},
        (True, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", INNER)
def test_against_separate_per_class_runs(name: str, weighted: bool) -> None:
    """A cohort of two: in some rounds nobody holds a class, and its model, memory and moments must not move."""
    build, reference, options, fresh = INNER[name]
    federation = ragged(toy_data())
    algorithm = fedge.FedOVA(build(BINARY, **options), classes=3, weighted=weighted)
    cohorts = cohorts_of(federation, 5, 2, 9, fresh)
    expected = fedova(
        reference, BINARY, clients_of(federation), cohorts, order_of(federation, 9), 3, weighted=weighted, **options
    )
    held = [set(federation.data.train_y[federation.examples(k)].tolist()) for k in range(7)]
    missing = [{0, 1, 2} - set().union(*(held[k] for k in phases[0])) for phases in cohorts]
    assert any(missing), "the cohorts leave out no class: choose another seed"
    for link in (
        Simulator(algorithm, federation),
        Simulator(algorithm, federation, chunk=1),
        Loopback(algorithm, federation),
    ):
        run = fedge.train(algorithm, federation, rounds=5, cohort=2, seed=9, link=link)
        assert close(run.params, expected) < 1e-10
    assert torch.equal(run.predict(federation.data.test_x), fedova_predict(BINARY, expected, federation.data.test_x))


def digits(labels: int = 2) -> fedge.Federation:
    data = fedge.data.load("digits")
    return fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, 100, labels=labels, seed=0))


def test_a_client_with_two_labels_trains_two_binary_models_and_not_ten() -> None:
    rows = []

    def loss(logits, y):
        rows.append(y.shape)
        return fedge.cross_entropy(logits, y)

    model = fedge.models.mlp(64, (8,), 2, seed=0)
    federation = digits()
    algorithm = fedge.FedOVA(fedge.FedAvg(model, epochs=1, batch_size=5, loss=loss), classes=10)
    link = Loopback(algorithm, federation)  # one call of the loss a job and step
    state = algorithm.init({name: leaf.detach() for name, leaf in model.named_parameters()})
    _, progress = drive(algorithm.round(state), link, 0, 1, cohorts(100, 20))
    client_steps = sum(-(-int(federation.sizes[k]) // 5) for k in progress.cohort)
    assert len(rows) == 2 * client_steps
    ledger = [row for row in link.ledger if row.task == "train"]
    d = 64 * 8 + 8 + 8 * 2 + 2
    assert [(r.clients, r.down, r.broadcast, r.up) for r in ledger] == [(20, 40 * 4 * d, 10 * 4 * d, 40 * (4 * d + 4))]
    assert next((r.round, r.task, r.up) for r in link.ledger) == (0, "rows", 100 * 10)


def test_all_classes_start_from_the_modules_weights_and_params_are_stacked() -> None:
    algorithm = fedge.FedOVA(fedge.FedAvg(BINARY), classes=3)
    start = {name: leaf.detach() for name, leaf in BINARY.named_parameters()}
    stacked = algorithm.params(algorithm.init(start))
    assert all(torch.equal(stacked[name][c], start[name]) for name in start for c in range(3))


def test_a_new_class_leaves_the_other_models_alone_until_they_are_trained() -> None:
    data = toy_data(classes=3)
    two = data.train_y < 2
    small = fedge.data.Data(data.train_x[two], data.train_y[two], data.test_x, data.test_y % 2, 2)
    first = fedge.Federation(small, fedge.partition.iid(small.train_y, 4, seed=0))
    algorithm = fedge.FedOVA(fedge.FedAvg(BINARY, lr=0.2, epochs=2, batch_size=4), classes=2)
    run = fedge.train(algorithm, first, rounds=3, seed=0)
    only_new = fedge.Federation(data, [np.flatnonzero(data.train_y.numpy() == 2)])
    grown = fedge.train(algorithm.add_class(), only_new, rounds=2, start=run)
    for name, leaf in run.params.items():
        assert torch.equal(grown.params[name][:2], leaf)
        assert not torch.equal(grown.params[name][2], dict(BINARY.named_parameters())[name])
    everyone = fedge.Federation(data, fedge.partition.iid(data.train_y, 4, seed=0))
    later = fedge.train(algorithm.add_class(), everyone, rounds=8, start=grown)
    assert later.history[-1]["round"] == 13
    assert later.history[-1]["test_accuracy"] > 0.9
    declared = [row.up for row in later.ledger if row.task == "rows"]
    assert declared == [4 * 2, 1 * 3, 4 * 3]  # each population says what it holds, once


def test_agrees_with_one_vs_rest_logistic_regression() -> None:
    """One client, full batches, the same L2 penalty: scikit-learn's minimum and ours classify alike."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    data = fedge.data.load("digits")
    x, y = data.train_x.double().flatten(1), data.train_y
    l2 = 1e-3
    model = fedge.models.logistic(64, 2, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    newton = {
        "source": "gradient",
        "curvature": "product",
        "matrix": "gauss_newton",
        "candidates": (0.25, 0.5, 1.0, 2.0),
    }
    inner = fedge.FisherLBFGS(model, damping=0.0, weight_decay=l2, **newton)
    federation = fedge.Federation(data, [range(len(y))])
    run = fedge.train(fedge.FedOVA(inner, classes=10), federation, rounds=60, observe=fedge.Observe(evaluate_every=60))
    # two logits with penalty l2/2 (|a|^2 + |b|^2) are one logit w = b - a with penalty l2/4 |w|^2, for a = -b = -w/2
    features = np.hstack([x.numpy(), np.ones((len(y), 1))])  # the bias is penalised too, as weight decay does
    judge = LogisticRegression(C=1 / (len(y) * l2 / 2), fit_intercept=False, tol=1e-10, max_iter=10_000)
    theirs = OneVsRestClassifier(judge).fit(features, y.numpy())
    test = np.hstack([data.test_x.double().flatten(1).numpy(), np.ones((len(data.test_y), 1))])
    same = theirs.predict(test) == run.predict(data.test_x).numpy()
    assert same.mean() == 1.0
    assert float(np.abs(theirs.decision_function(test) - run.scores(data.test_x).numpy()).max()) < 0.05


def test_bad_input() -> None:
    data, federation = toy_data(), ragged(toy_data())
    with pytest.raises(ValueError, match="label 2 is out of range: FedOVA has classes 0 to 1"):
        fedge.train(fedge.FedOVA(fedge.FedAvg(BINARY), classes=2), federation, rounds=1)
    with pytest.raises(ValueError, match="inner model has 3 outputs, it needs 2"):
        fedge.train(fedge.FedOVA(fedge.FedAvg(toy_model()), classes=3), federation, rounds=1)
    with pytest.raises(ValueError, match="FedOVA cannot wrap FedOVA"):
        fedge.FedOVA(fedge.FedOVA(fedge.FedAvg(BINARY)))
    with pytest.raises(ValueError, match=r"write DataSharing\(FedOVA"):
        fedge.FedOVA(fedge.DataSharing(fedge.FedAvg(BINARY)))
    with pytest.raises(ValueError, match="add up the two betas"):
        fedge.DataSharing(fedge.DataSharing(fedge.FedAvg(BINARY)))
    for beta in (0, -0.1, 1.5, "x"):
        with pytest.raises(ValueError, match=r"beta is .*, it must be greater than 0 and at most 1"):
            fedge.DataSharing(fedge.FedAvg(BINARY), beta=beta)
    with pytest.raises(ValueError, match="classes is 0"):
        fedge.FedOVA(fedge.FedAvg(BINARY), classes=0)
    assert data.classes == 3


def test_the_loss_of_a_binary_problem_may_be_any_two_class_loss() -> None:
    """It is evaluated as it is trained: on "class i or not", the mean over the classes."""

    def weighted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor([1.0, 2.0], dtype=logits.dtype)
        return torch.nn.functional.cross_entropy(logits, y, weight, reduction="none")

    data = toy_data()
    algorithm = fedge.FedOVA(fedge.FedAvg(BINARY, lr=0.2, epochs=2, batch_size=4, loss=weighted), classes=3)
    run = fedge.train(algorithm, ragged(data), rounds=3)
    total = 0.0
    for label in range(3):
        params = {name: leaf[label] for name, leaf in run.params.items()}
        logits = torch.func.functional_call(BINARY, params, (data.test_x,))
        total += float(weighted(logits, (data.test_y == label).long()).mean()) / 3
    assert run.history[-1]["test_loss"] == pytest.approx(total, rel=1e-9)


class TwoKeepers(fedge.Algorithm):
    """Every other class keeps its gradient under another task's name; a second phase reuses it."""

    loss = staticmethod(fedge.cross_entropy)

    def __init__(self) -> None:
        self.model = BINARY

    def tasks(self, model):
        inner = fedge.FedDANE(BINARY).tasks(model)
        report = fedge.core.Task(
            lambda sent: torch.zeros(()),
            lambda sent, carry, batch: carry,
            lambda sent, carry, n: ({"size": {"norm": fedge.tree.norm(sent["grad"])}}, n.float()),
        )
        return {"one": inner["gradient"], "two": inner["gradient"], "report": report}

    def init(self, params):
        return {"params": params, "seen": torch.tensor(0.0), "turn": 0}

    def round(self, state):
        yield fedge.Ask("one" if state["turn"] % 2 else "two", {"params": state["params"]})
        told = yield fedge.Ask("report", {}, reuse=("grad",))
        return {**state, "seen": told.mean["size"]["norm"], "turn": state["turn"] + 1}


def test_parts_kept_by_different_tasks_of_one_phase_are_all_there() -> None:
    federation, seen = ragged(toy_data()), []
    for link in (Simulator, Loopback):
        algorithm = fedge.FedOVA(TwoKeepers(), classes=3)
        start = algorithm.init({name: leaf.detach() for name, leaf in BINARY.named_parameters()})
        start[1]["turn"] = 1
        state, _ = drive(algorithm.round(start), link(algorithm, federation), 0, 1, cohorts(7, 7))
        seen.append([float(one["seen"]) for one in state])
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)
    assert min(seen[0]) > 0


def test_a_class_whose_only_holder_fails_does_not_end_the_run() -> None:
    """However the asks are grouped: the phase as a whole had good answers."""
    data = toy_data()
    labels = data.train_y
    poisoned = data.train_x.clone()
    poisoned[labels == 2] = 1e200
    bad = fedge.data.Data(poisoned, labels, data.test_x, data.test_y, 3)
    lists = [np.flatnonzero(labels.numpy() != 2), np.flatnonzero(labels.numpy() == 2)]

    def loss(logits, y):
        return fedge.cross_entropy(logits * logits.abs(), y)

    inner = fedge.FisherLBFGS(BINARY, source="gradient", curvature="product", curvature_at="next", lr=0.01, loss=loss)
    run = fedge.train(fedge.FedOVA(inner, classes=3), fedge.Federation(bad, lists), rounds=3)
    assert all({drop["client"] for drop in record["dropped"]} == {1} for record in run.history)
    assert torch.equal(run.params["fc1.weight"][2], dict(BINARY.named_parameters())["fc1.weight"])


def behind() -> dict[str, fedge.Algorithm]:
    """Algorithms that send a class more, or other work, once it has moved."""
    model = fedge.models.mlp(6, (20,), 2, seed=1)
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 4}
    return {
        "next": fedge.FisherLBFGS(model, curvature="product", curvature_at="next", **settings),
        "subspace": fedge.SubspaceNewton(model, **settings),
    }


@pytest.mark.parametrize("label", [0, 2])
@pytest.mark.parametrize("name", behind())
@pytest.mark.parametrize(("kind", "options"), [(Loopback, {}), (Simulator, {"chunk": 1}), (Simulator, {"chunk": 3})])
def test_who_is_alone_in_its_ask_is_compared_with_those_of_the_others(kind, options, name: str, label: int) -> None:
    """In round 1 all classes are one ask. The one whose only upload was refused is an ask of its own from then on."""

    class Loud(kind):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            for upload, _ in (one for uploads in answer.values() for one in uploads) if client == 3 else ():
                for leaf in (leaf for part in upload.values() for leaf in part.values()):
                    leaf.fill_(1e30)
            return wire.encode(answer)

        def received(self, jobs, uploads):
            for upload, _ in uploads.values():
                for leaf in (leaf for part in upload.values() for leaf in part.values()):
                    leaf[jobs.clients == 3] = 1e30
            return uploads

    algorithm, federation = fedge.FedOVA(behind()[name], classes=3), one_holder(3, label)
    run = fedge.train(algorithm, federation, rounds=3, link=Loud(algorithm, federation, **options))
    dropped = [[drop for drop in record["dropped"] if drop["client"] == 3] for record in run.history]
    assert all(drops and "over 1000 times the usual" in drops[0]["reason"] for drops in dropped)
    assert [len(drops) for drops in dropped] == [len(record["dropped"]) for record in run.history]
    start = dict(algorithm.model.named_parameters())
    assert all(torch.equal(leaf[label], start[leaf_name]) for leaf_name, leaf in run.params.items())


class Overflowing(fedge.FedAvg):
    """Some rounds of a class end in a state that is not finite, or in none."""

    how: str = "inf"
    limit: float = 1.0

    def round(self, state):
        after = yield from super().round(state)
        moved = max(float((after["params"][n] - leaf).abs().max()) for n, leaf in state["params"].items())
        if moved < self.limit:
            return after
        if self.how == "singular":
            raise torch.linalg.LinAlgError("the matrix is singular")
        return {**after, "params": {name: leaf * float(self.how) for name, leaf in after["params"].items()}}


def overflowing(how: str, limit: float) -> fedge.FedOVA:
    inner = Overflowing(toy_model(outputs=2, dtype=torch.float32), lr=0.1, epochs=1, batch_size=4)
    object.__setattr__(inner, "how", how)
    object.__setattr__(inner, "limit", limit)
    return fedge.FedOVA(inner, classes=3)


class Far(Loopback):
    """The holder of the last class moves it far, within what is usual."""

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        for upload, _ in answer.get(2, []) if client == 2 else []:
            for leaf in upload["delta"].values():
                leaf.fill_(5.0)
        return wire.encode(answer)


WRAPPED = {
    "alone": lambda ova: ova,
    "averaged": lambda ova: fedge.Averaged(ova),
    "robust": lambda ova: fedge.Robust(ova, fedge.Mean()),
    "calibrated": lambda ova: fedge.Calibrated(ova, every=2),
}


@pytest.mark.parametrize("how", ["inf", "nan", "singular"])
@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_class_without_a_finite_state_stays_and_the_others_move_on(wrap: str, how: str) -> None:
    federation = one_holder()
    algorithm, plain = (WRAPPED[wrap](overflowing(how, limit)) for limit in (2.0, float("inf")))
    run = fedge.train(algorithm, federation, rounds=3, link=Far(algorithm, federation))
    same = fedge.train(plain, federation, rounds=3, link=Loopback(plain, federation))
    assert [record["unchanged_classes"] for record in run.history] == [[2]] * 3
    assert not any("skipped" in record or record["dropped"] for record in run.history)
    for name, leaf in run.params.items():
        assert torch.equal(leaf[:2], same.params[name][:2])
        assert torch.equal(leaf[2], dict(plain.model.named_parameters())[name])
    assert "unchanged_classes" not in same.history[0]


def test_what_a_flow_notes_comes_through_noise() -> None:
    algorithm = fedge.Private(overflowing("nan", 0.9), clip=1e6, noise=0.0, clients=5, expected=5)
    run = fedge.train(algorithm, one_holder(), rounds=1, link=Far(algorithm, one_holder()))
    assert run.history[0]["unchanged_classes"] == [2]


@pytest.mark.parametrize(("how", "reason"), [("inf", "not finite"), ("singular", "the matrix is singular")])
def test_a_round_in_which_no_class_has_a_finite_state_is_skipped(how: str, reason: str) -> None:
    algorithm = overflowing(how, limit=0.0)
    with pytest.raises(fedge.engine.TooFewReplies, match=f"round 5: .*{reason}"):
        fedge.train(algorithm, one_holder(), rounds=6)


def test_a_positive_weight_is_that_many_copies_of_the_class() -> None:
    """One step on all examples at once: weight 3 moves like three copies of every positive example, mean aside."""
    data = toy_data(classes=2)
    once = list(range(20))
    positives = [at for at in once if int(data.train_y[at]) == 1]
    model = toy_model(outputs=2)

    def moved(chosen: list[int], **options: float) -> dict[str, torch.Tensor]:
        inner = fedge.FedAvg(model, lr=0.1 * len(chosen), epochs=1, batch_size=None)
        algorithm = fedge.FedOVA(inner, classes=2, **options)
        copies = replace(data, train_x=data.train_x[chosen], train_y=data.train_y[chosen])
        run = fedge.train(algorithm, fedge.Federation(copies, [range(len(chosen))]), rounds=1)
        return {name: leaf[1] for name, leaf in run.params.items()}  # of the class that the copies are of

    weighted = moved(once, positive_weight=3.0)
    copied = moved(once + 2 * positives)
    assert close(weighted, copied) < 1e-12
    assert close(weighted, moved(once)) > 1e-4
    with pytest.raises(ValueError, match="positive_weight is 0"):
        fedge.FedOVA(fedge.FedAvg(model), classes=2, positive_weight=0)
