"""The driver: records, bytes by hand, evaluation, refusals."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest
import torch
from torch import nn

import fedge
from fedge import tree
from fedge.core import Ask, Batch, Task
from fedge.engine import Loopback, Simulator
from tests.cases import close, ragged, toy_data, toy_model

DIGITS = fedge.data.load("digits")


def digits(clients: int = 100) -> fedge.Federation:
    return fedge.Federation(DIGITS, fedge.partition.labels_per_client(DIGITS.train_y, clients, labels=2, seed=0))


def test_bytes_by_hand() -> None:
    run = fedge.train(fedge.FedAvg(fedge.models.mlp(seed=0), epochs=1), digits(), rounds=2, cohort=20, seed=0)
    d = 64 * 32 + 32 + 32 * 10 + 10
    for record in run.history:
        assert record["down_bytes"] == 20 * d * 4
        assert record["up_bytes"] == 20 * (d * 4 + 4)  # the update, and its weight
    assert [(r.round, r.phase, r.task, r.clients, r.broadcast) for r in run.ledger] == [
        (1, 0, "train", 20, d * 4),
        (2, 0, "train", 20, d * 4),
    ]
    assert run.ledger.total() == {"down": 2 * 20 * d * 4, "broadcast": 2 * d * 4, "up": 2 * 20 * (d * 4 + 4)}


def test_the_record_of_a_round() -> None:
    run = fedge.train(
        fedge.FedAvg(fedge.models.mlp(seed=0)),
        digits(),
        rounds=5,
        cohort=20,
        observe=fedge.Observe(evaluate_every=2, evaluate_train=True),
    )
    assert [record["round"] for record in run.history] == [1, 2, 3, 4, 5]
    assert ["test_accuracy" in record for record in run.history] == [False, True, False, True, True]
    last = run.history[-1]
    assert len(last["cohort"]) == 20
    assert last["dropped"] == []
    assert last["seconds"] > 0
    predicted = run.predict(DIGITS.test_x)
    assert last["test_accuracy"] == float((predicted == DIGITS.test_y).double().mean())
    loss = nn.functional.cross_entropy(run.scores(DIGITS.test_x).double(), DIGITS.test_y)
    assert last["test_loss"] == pytest.approx(float(loss), rel=1e-5)
    by_class = [float((predicted[DIGITS.test_y == c] == c).double().mean()) for c in range(10)]
    assert last["test_class_accuracy"] == pytest.approx(by_class)
    trained = float((run.predict(DIGITS.train_x) == DIGITS.train_y).double().mean())
    assert last["train_accuracy"] == trained


def test_one_client_with_all_data_is_centralised_training() -> None:
    data, model = toy_data(), toy_model()
    federation = fedge.Federation(data, [range(len(data.train_y))])
    run = fedge.train(fedge.FedAvg(model, lr=0.3, epochs=4, batch_size=None), federation, rounds=3)
    plain = toy_model()
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(12):
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(data.train_x), data.train_y).backward()
        optimiser.step()
    assert close(run.params, {n: p.detach() for n, p in plain.named_parameters()}) < 1e-12


def test_a_single_precision_model_stays_single_and_a_double_one_double() -> None:
    for dtype in (torch.float32, torch.float64):
        run = fedge.train(fedge.FedAvg(toy_model(dtype=dtype)), ragged(toy_data()), rounds=1, cohort=3)
        assert {leaf.dtype for leaf in run.params.values()} == {dtype}


def test_the_users_module_is_left_alone_and_frozen_layers_are_not_sent() -> None:
    model = toy_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    first, *trained = before
    model.get_parameter(first).requires_grad_(False)
    run = fedge.train(fedge.FedAvg(model), ragged(toy_data()), rounds=1)
    assert list(run.params) == trained
    assert run.history[0]["down_bytes"] == 7 * 8 * sum(before[n].numel() for n in trained)
    assert close(before, {n: p.detach() for n, p in model.named_parameters()}) == 0
    assert [p.requires_grad for p in model.parameters()] == [False, *[True] * len(trained)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0, it must be a whole number of at least 1"),
        ({"rounds": 1, "cohort": 8}, "cohort is 8, but there are only 7 clients: lower it to at most 7"),
        ({"rounds": 1, "cohort": 0}, "cohort is 0"),
    ],
)
def test_impossible_training_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.train(fedge.FedAvg(toy_model()), ragged(toy_data()), **options)


def test_a_link_that_served_another_run_in_between_counts_the_right_bytes() -> None:
    algorithm, federation = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=1), classes=3), ragged(toy_data())
    link = Simulator(algorithm, federation)
    first = fedge.train(algorithm, federation, rounds=2, link=link)
    fedge.train(algorithm, federation, rounds=2, seed=5, link=link)
    both = fedge.train(algorithm, federation, rounds=2, link=link, start=first)
    assert both.ledger.rows == fedge.train(algorithm, federation, rounds=4).ledger.rows


def test_impossible_observations_and_a_device_said_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluate_every is 0"):
        fedge.Observe(evaluate_every=0)
    with pytest.raises(ValueError, match=r"there is an engine as well: write Engine\(device='cpu'\)"):
        fedge.train(fedge.FedAvg(toy_model()), ragged(toy_data()), rounds=1, device="cpu", engine=fedge.Engine(chunk=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr is 0, it must be greater than 0"),
        ({"lr": float("nan")}, "lr is nan, it must be a finite number"),
        ({"lr": "0.1"}, "lr is '0.1', it must be a finite number"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": -3}, "batch_size is -3.*None"),
        ({"momentum": 1.0}, "momentum is 1.0, it must be at least 0 and below 1"),
        ({"weight_decay": -1e-3}, "weight_decay is -0.001, it must be 0 or more"),
        ({"optimiser": "adamm"}, r"optimiser is 'adamm' \(did you mean 'adam'\?\)"),
        ({"optimiser": "adam", "momentum": 0.5}, "local Adam has its own"),
        ({"server_optimiser": "adam", "server_momentum": 0.5}, "server Adam has its own"),
    ],
)
def test_impossible_hyper_parameters_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.FedAvg(toy_model(), **options)


def test_batch_norm_is_refused_by_the_name_of_the_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*nn.GroupNorm"):
        fedge.train(fedge.FedAvg(model), ragged(toy_data()), rounds=1)


def test_a_lazy_module_and_one_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        fedge.train(fedge.FedAvg(nn.Sequential(nn.LazyLinear(3))), ragged(toy_data()), rounds=1)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fedge.train(fedge.FedAvg(nn.Flatten()), ragged(toy_data()), rounds=1)


def test_a_model_that_does_not_fit_the_data_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="the model has 2 outputs, but there is a label 2"):
        fedge.train(fedge.FedAvg(toy_model(outputs=2)), ragged(toy_data()), rounds=1)
    with pytest.raises(ValueError, match=r"cannot take an example of shape \[6\] and type torch.float64: mat1"):
        fedge.train(fedge.FedAvg(toy_model(inputs=5)), ragged(toy_data()), rounds=1)


def test_whole_numbers_of_numpy_are_whole_numbers_and_arrays_are_predicted() -> None:
    import numpy as np

    data = toy_data()
    run = fedge.train(fedge.FedAvg(toy_model()), ragged(data), rounds=np.int64(1), cohort=np.int64(3))
    assert torch.equal(run.predict(data.test_x.numpy()), run.predict(data.test_x))


def test_a_loss_that_is_not_per_example_is_refused_before_any_work() -> None:
    algorithm = fedge.FedAvg(toy_model(), loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"the loss returned shape \[\] for 2 examples; it must return one value"):
        fedge.train(algorithm, ragged(toy_data()), rounds=1)


def test_float_labels_with_cross_entropy_are_refused() -> None:
    data = toy_data()
    floats = fedge.data.Data(data.train_x, data.train_y.double(), data.test_x, data.test_y.double(), classes=0)
    federation = fedge.Federation(floats, [range(90)])
    with pytest.raises(ValueError, match=r"the labels are torch.float64 and the loss is cross-entropy.*int64"):
        fedge.train(fedge.FedAvg(toy_model(), loss=fedge.cross_entropy), federation, rounds=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda a, f: (a.model, f), r"the first argument is a Sequential, it must be an algorithm"),
        (lambda a, f: (fedge.FedAvg, f), "the first argument is the class FedAvg"),
        (lambda a, f: (a, f.data), r"the second argument is a Data, it must be a Federation"),
        (lambda a, f: (fedge.FedAvg(toy_model), f), "the model is a function, it must be an nn.Module"),
    ],
)
def test_swapped_and_half_made_arguments_are_named(arguments, message: str) -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    with pytest.raises(TypeError, match=message):
        fedge.train(*arguments(algorithm, federation), rounds=1)


def test_a_seed_that_is_no_number_and_a_device_that_is_not_there() -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    with pytest.raises(TypeError, match="seed is None, it must be a whole number"):
        fedge.train(algorithm, federation, rounds=1, seed=None)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda', torch has here: cpu"):
            fedge.train(algorithm, federation, rounds=1, device="cuda")


def test_a_run_reads_well() -> None:
    run = fedge.train(fedge.FedAvg(toy_model()), ragged(toy_data()), rounds=2)
    assert repr(run).startswith("Run(FedAvg, 2 rounds, test accuracy 0.")
    assert len(repr(run)) < 120


def test_regression_has_a_loss_and_no_accuracy() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=g)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    data = fedge.data.Data(x[:50], y[:50], x[50:], y[50:], classes=0)
    federation = fedge.Federation(data, [range(20), range(20, 50)])
    model = fedge.models.logistic(4, 1, seed=0)
    algorithm = fedge.FedAvg(model, lr=0.05, batch_size=5, loss=lambda out, y: (out[:, 0] - y) ** 2)
    run = fedge.train(algorithm, federation, rounds=20)
    assert run.history[-1]["test_loss"] < 1e-3
    assert "test_accuracy" not in run.history[-1]


class TwoPhases(fedge.Algorithm):
    """Keeps, reuses, private work and a new cohort, all in one flow: each client reports what it was left with."""

    loss = staticmethod(fedge.cross_entropy)

    def __init__(self, model: nn.Module, reuse: tuple[str, ...] = ("params", "own"), cohort: str = "same") -> None:
        self.model, self.reuse, self.cohort = model, reuse, cohort

    def tasks(self, model):
        def start(sent):
            return tree.zeros_like(sent["params"])

        def step(sent, carry, batch: Batch):
            return tree.axpy(batch.examples.to(torch.float64), model.grad(sent["params"], batch), carry)

        def finish(sent, carry, examples):
            return {"own": tree.scale(1 / examples, carry)}, examples.float()

        def report(sent, carry, examples):
            gap = tree.sub(sent["mean"], sent["own"])
            return {"gap": {"norm": tree.dot(gap, gap)}}, examples.float()

        def nothing(sent, carry, batch):
            return carry

        return {
            "gradient": Task(start, step, finish, batch_size=4, keeps=("own",)),
            "anchor": Task(start, step, finish, batch_size=4, keeps=("own",), private=True),
            "report": Task(start, nothing, report),
        }

    def init(self, params):
        return {"params": params, "gap": torch.zeros(())}

    def round(self, state):
        first = yield Ask("gradient", {"params": state["params"]})
        send = {"mean": first.mean["own"]}
        if self.cohort == "new":
            ask = Ask(("anchor", "report"), {**send, "params": state["params"]}, cohort="new")
        else:
            ask = Ask("report", send, reuse=self.reuse)
        second = yield ask
        return {"params": tree.axpy(-0.1, first.mean["own"], state["params"]), "gap": second.mean["gap"]["norm"]}


@pytest.mark.parametrize("cohort", ["same", "new"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_clients_keep_what_a_later_phase_reuses(cohort: str, chunk: int | None) -> None:
    federation, data = ragged(toy_data()), toy_data()
    algorithm = TwoPhases(toy_model(), cohort=cohort)
    runs = [
        fedge.train(algorithm, federation, rounds=2, cohort=4, seed=1, link=link)
        for link in (Simulator(algorithm, federation, chunk=chunk), Loopback(algorithm, federation))
    ]
    assert runs[0].ledger.rows == runs[1].ledger.rows
    assert float(runs[0].state["gap"]) == pytest.approx(float(runs[1].state["gap"]), rel=1e-12)
    assert float(runs[0].state["gap"]) > 1e-3
    assert close(runs[0].params, runs[1].params) < 1e-12
    d = tree.size(runs[0].params)
    sent = 2 * d if cohort == "new" else d
    assert [(r.task, r.down, r.up) for r in runs[0].ledger][1] == (
        "anchor+report" if cohort == "new" else "report",
        4 * 8 * sent,
        4 * (8 + 4),  # one number and its weight; what is private or kept is not sent
    )
    if cohort == "new":
        assert len(runs[0].history[0]["cohort"]) > 4
    assert len(data.train_y) == 90


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_reusing_what_nobody_holds_is_an_error(link) -> None:
    federation = ragged(toy_data())
    algorithm = TwoPhases(toy_model(), reuse=("params", "other"))
    with pytest.raises(ValueError, match=r"reuses 'other', which this cohort does not hold.*held: \['mean', 'own'"):
        fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))


class Slips(TwoPhases):
    """An algorithm with one mistake at a time."""

    slip = ""

    def tasks(self, model):
        tasks = dict(super().tasks(model))
        gradient = tasks["gradient"]
        results = {
            "flat": lambda sent, carry, n: ({"own": carry["fc1.bias"]}, n.float()),
            "no weight": lambda sent, carry, n: {"own": carry},
            "int weight": lambda sent, carry, n: ({"own": carry}, 3),
        }
        if self.slip in results:
            tasks["gradient"] = dataclasses.replace(gradient, finish=results[self.slip])
        return tasks

    def round(self, state):
        if self.slip == "no generator":
            return state
        return self.flow(state)

    def flow(self, state):
        if self.slip == "name":
            yield Ask("gradiant", {"params": state["params"]})
        if self.slip == "yield":
            yield "gradient"
        if self.slip == "part":
            yield Ask("gradient", {"weights": state["params"]})
        return (yield from super().round(state))


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (
            "name",
            r"asks for a task 'gradiant' \(did you mean 'gradient'\?\); it has \['gradient', 'anchor', 'report'\]",
        ),
        ("yield", "a round yielded 'gradient'; it must yield an Ask"),
        ("no generator", "must be generators that yield Asks; one returned a dict"),
        ("flat", r"finish must return .*; it returned \(\{'own': Tensor\}, Tensor\)"),
        ("no weight", "finish must return .*the weight a tensor such as examples.float"),
        ("int weight", r"finish must return .*\}, int\)"),
    ],
)
@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_slips_in_an_algorithm_are_explained(slip: str, message: str, link) -> None:
    algorithm, federation = Slips(toy_model()), ragged(toy_data())
    algorithm.slip = slip
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))


def test_the_loopback_names_the_task_that_misses_a_part() -> None:
    algorithm, federation = Slips(toy_model()), ragged(toy_data())
    algorithm.slip = "part"
    with pytest.raises(
        RuntimeError, match=r"task 'gradient' fails on the parts it gets, \['weights'\]: KeyError: 'params'"
    ):
        fedge.train(algorithm, federation, rounds=1, link=Loopback(algorithm, federation))


def test_a_link_may_serve_several_runs() -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    link = Simulator(algorithm, federation)
    first = fedge.train(algorithm, federation, rounds=2, link=link)
    second = fedge.train(algorithm, federation, rounds=2, link=link)
    assert first.ledger.rows == second.ledger.rows
    assert first.ledger.total()["up"] == sum(record["up_bytes"] for record in first.history)


@pytest.mark.parametrize(("wish", "rounds", "phases"), [(1, 0, 1), (2, 1, 2), (3, 1, 3), (4, 2, 4)])
def test_a_wish_to_stop_loses_no_round_that_is_complete(wish: int, rounds: int, phases: int) -> None:
    """Rounds of two phases. Whoever wants an end during the second one gets it after the round."""
    federation = ragged(toy_data())
    algorithm = fedge.FedDANE(toy_model(), epochs=1, batch_size=4)
    begun = 0

    class Counted(Simulator):
        def ask(self, *args):
            nonlocal begun
            begun += 1
            return super().ask(*args)

    link = Counted(algorithm, federation)
    run = fedge.train(algorithm, federation, rounds=3, link=link, stop=lambda: begun >= wish)
    assert run.stopped
    assert (run.rounds, len(run.history), begun) == (rounds, rounds, phases)


def test_start_must_be_of_this_algorithm_and_model() -> None:
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedAvg(toy_model()), federation, rounds=1)
    with pytest.raises(ValueError, match="another algorithm: its state has no 'pairs'"):
        fedge.train(fedge.FisherLBFGS(toy_model()), federation, rounds=1, start=run)
    with pytest.raises(ValueError, match="another algorithm: its state has no 'v'"):
        fedge.train(fedge.FedAvg(toy_model(), server_momentum=0.5), federation, rounds=1, start=run)
    wider = fedge.models.mlp(6, (9,), 3, seed=0).double()
    with pytest.raises(ValueError, match=r"another model: .* shape \[5, 6\], here it is \[9, 6\]"):
        fedge.train(fedge.FedAvg(wider), federation, rounds=1, start=run)


def test_small_clients_are_not_padded_to_a_giant() -> None:
    data = toy_data(examples=90)
    federation = fedge.Federation(data, [range(80), *([k] for k in range(80, 90))])
    algorithm = fedge.FedAvg(toy_model(), epochs=1, batch_size=None)
    link = Simulator(algorithm, federation)
    jobs = link.directory.jobs(torch.arange(11), link.tasks["train"], None)
    assert [len(piece.clients) for piece in link._chunks([link.tasks["train"]], jobs)] == [1, 10]


def test_the_loopback_is_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="the loop-back link is for the CPU"):
        Loopback(fedge.FedAvg(toy_model()), ragged(toy_data()), device="cuda")


def test_runs_are_judged_with_all_threads_and_trained_by_workers_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that swallows the order of a picture in memory (`view`) is judged as well."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 2, 3), nn.Linear(72, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(x).view(len(x), -1))

    seen = []
    real = sys.modules["fedge.evaluate"].evaluate

    def watched(*args: object) -> dict:
        seen.append(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(sys.modules["fedge.evaluate"], "evaluate", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))
        for module in (chain, Own()):
            algorithm = fedge.FedAvg(module, epochs=1)
            link = Simulator(algorithm, digits(), workers=2, way="single")
            assert link.runtime.threads == 1
            fedge.train(algorithm, digits(), rounds=1, cohort=3, link=link)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [3, 3]


def test_scores_computed_in_batches_are_the_module_s_own() -> None:
    x = torch.randn(601, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    run = fedge.train(fedge.FedAvg(module, epochs=1), digits(), rounds=1, cohort=3)
    module.load_state_dict(run.params)
    with torch.no_grad():
        assert (run.scores(x) - module(x)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([0.5, float("nan")], "of round 2 is nan"),
        ([0.5, float("inf")], "of round 2 is inf"),
        ([0.5, None], "of round 2 is not finite"),  # as it reads back from a file
        ([0.5, 2e21], "of round 2 is 2e\\+21"),
        ([float("nan"), 0.5], None),
        ([0.5, 900.0], None),
        ([], None),
    ],
)
def test_a_run_says_whether_it_diverged(losses: list[float | None], ends: str | None) -> None:
    algorithm = fedge.FedAvg(toy_model())
    history = [{"round": number, "test_loss": loss} for number, loss in enumerate(losses, 1)]
    run = fedge.Run(algorithm, {"params": {}}, None, [*history, {"round": 3}])  # type: ignore[arg-type]
    assert (run.diverged is None) == (ends is None)
    if ends is not None:
        assert re.search(f"it diverged: the test loss {ends}; lower the step size", str(run.diverged))
    other = fedge.FedAvg(toy_model(), loss=lambda logits, y: 1e9 * fedge.cross_entropy(logits, y))
    assert fedge.Run(other, {"params": {}}, None, [{"round": 1, "test_loss": 1e10}]).diverged is None  # type: ignore[arg-type]
