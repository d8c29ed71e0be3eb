"""Bad uploads are dropped and named; the round goes on with the others."""

from __future__ import annotations

import re

import pytest
import torch

import fedge
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.engine.links import wire
from tests.cases import close, ragged, toy_data, toy_model

ALGORITHM = fedge.FedAvg(toy_model(), lr=0.2, epochs=1, batch_size=4)


class Tampering(Loopback):
    """A fleet in which some clients answer something else."""

    faults: dict

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        if client in self.faults:
            for row, uploads in answer.items():
                answer[row] = [self.faults[client](upload, weight) for upload, weight in uploads]
        return wire.encode(answer)


def with_faults(faults: dict, **options) -> fedge.Run:
    federation = ragged(toy_data())
    link = Tampering(ALGORITHM, federation, **options)
    link.faults = faults
    return fedge.train(ALGORITHM, federation, rounds=1, seed=0, link=link)


FIRST = next(iter(dict(ALGORITHM.model.named_parameters())))


def edit(to=None, weight=None, drop=False):
    """A fault in the first tensor of the upload, or in its weight."""

    def fault(upload, w):
        leaves = dict(upload["delta"])
        if drop:
            del leaves[FIRST]
        elif to is not None:
            leaves[FIRST] = to(leaves[FIRST])
        return {"delta": leaves}, w if weight is None else torch.tensor(weight)

    return fault


CASES = {
    "nan": (edit(to=lambda t: t * float("nan")), "is not finite"),
    "inf": (edit(to=lambda t: t + float("inf")), "is not finite"),
    "shape": (edit(to=lambda t: t[:1]), r"has shape \[1, 6\], not \[5, 6\]"),
    "scalar": (edit(to=lambda t: t.sum().view(1)), r"has shape \[1\], not \[5, 6\]"),
    "dtype": (edit(to=lambda t: t.float()), "torch.float32, not torch.float64"),
    "key": (edit(drop=True), "too many or too few"),
    "negative": (edit(weight=-1.0), r"weight -1 is not in \(0, 1e\+06\]"),
    "zero": (edit(weight=0.0), r"weight 0 is not in"),
    "huge": (edit(weight=1e7), r"weight 1e\+07 is not in"),
    "nan_weight": (edit(weight=float("nan")), r"weight nan is not in"),
    "weights": (edit(weight=[1.0, 1.0]), r"the weight has shape \[2\]"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_upload_is_dropped_and_named(case: str) -> None:
    fault, reason = CASES[case]
    run = with_faults({2: fault})
    (dropped,) = run.history[0]["dropped"]
    assert (dropped["client"], dropped["task"]) == (2, "train")
    assert re.search(reason, dropped["reason"]), dropped["reason"]
    assert close(run.params, without_client(2).params) < 1e-12


def without_client(client: int) -> fedge.Run:
    """The same round in which that client is never asked."""
    federation = ragged(toy_data())
    link = Loopback(ALGORITHM, federation)
    jobs = link.directory.jobs
    link.directory.jobs = lambda clients, *rest: jobs(clients[clients != client], *rest)
    return fedge.train(ALGORITHM, federation, rounds=1, seed=0, link=link)


def test_an_answer_for_other_rows_is_dropped() -> None:
    federation = ragged(toy_data())

    class WrongRows(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            return wire.encode({1: answer[0]} if client == 2 else answer)

    run = fedge.train(ALGORITHM, federation, rounds=1, seed=0, link=WrongRows(ALGORITHM, federation))
    assert run.history[0]["dropped"][0]["reason"] == "answered rows [1], asked were [0]"


def test_the_simulator_drops_and_names_a_client_whose_loss_is_not_a_number() -> None:
    data = toy_data()
    federation = ragged(data)
    poisoned = data.train_x.clone()
    poisoned[federation.examples(4)[0]] = 1e200  # finite data, infinite loss
    data = fedge.data.Data(poisoned, data.train_y, data.test_x, data.test_y, 3)
    federation = fedge.Federation(data, [federation.examples(k).numpy() for k in range(7)])
    algorithm = fedge.FedAvg(toy_model(), lr=0.1, epochs=2, batch_size=4, loss=_exploding)
    for chunk in (None, 1, 3):
        link = Simulator(algorithm, federation, chunk=chunk)
        run = fedge.train(algorithm, federation, rounds=2, seed=0, link=link)
        for record in run.history:
            assert [d["client"] for d in record["dropped"]] == [4]
            assert "is not finite" in record["dropped"][0]["reason"]
        assert all(bool(torch.isfinite(leaf).all()) for leaf in run.params.values())


def _exploding(logits, y):
    return fedge.cross_entropy(logits * logits.abs(), y)


def test_too_few_good_uploads_is_an_error_that_says_why() -> None:
    fault = CASES["nan"][0]
    with pytest.raises(TooFewReplies, match=r"6 good uploads, 7 needed \(client 2: .* is not finite"):
        with_faults({2: fault}, min_replies=7)
    with pytest.raises(TooFewReplies, match=r"0 good uploads, 1 needed.*lower the step size"):
        with_faults(dict.fromkeys(range(7), fault))
