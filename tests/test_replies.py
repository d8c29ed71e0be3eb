"""Bad uploads are dropped and named; the round goes on with the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fedge
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.engine.links import wire
from fedge.engine.uploads import sizes
from fedge.engine.uploads.sizes import Losses
from fedge.engine.uploads.streaming import Sums
from tests.cases import algorithms, close, ragged, toy_data, toy_model
from tests.lossy import Lossy

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
    "negative": (edit(weight=-1.0), r"weight -1 is not in \(0, 8\], the most that this client may weigh"),
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
    with pytest.raises(TooFewReplies, match=r"good uploads of 6 clients, 7 needed \(client 2: .* is not finite"):
        with_faults({2: fault}, min_replies=7)
    with pytest.raises(TooFewReplies, match=r"good uploads of 0 clients, 1 needed.*lower the step size"):
        with_faults(dict.fromkeys(range(7), fault))


# Uploads that are finite and absurd


def huge(size: float):
    """A simulator and a loop-back link in which client 2 sends this number everywhere."""

    class Simulated(Simulator):
        def received(self, jobs, uploads):
            lies = (jobs.clients == 2).tolist()
            for upload, _ in uploads.values():
                for part in upload.values():
                    for leaf in part.values():
                        leaf[lies] = size
            return uploads

    class Sent(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client == 2:
                answer = {
                    row: [
                        ({p: {k: torch.full_like(v, size) for k, v in part.items()} for p, part in u.items()}, w)
                        for u, w in ups
                    ]
                    for row, ups in answer.items()
                }
            return wire.encode(answer)

    return Simulated, Sent


def large_model(outputs: int = 3) -> torch.nn.Module:
    return fedge.models.mlp(6, (12,), outputs, seed=1).double()


@pytest.mark.parametrize("size", [1e20, 1e30, 1e300])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_one_absurd_upload_costs_its_client_alone(size: float, chunk: int | None) -> None:
    simulated, sent = huge(size)
    algorithm, federation = fedge.FedAvg(large_model(), lr=0.1, epochs=1), ragged(toy_data())
    runs = [
        fedge.train(algorithm, federation, rounds=3, link=link)
        for link in (simulated(algorithm, federation, chunk=chunk), sent(algorithm, federation))
    ]
    for run in runs:
        assert [[d["client"] for d in record["dropped"]] for record in run.history] == [[2]] * 3
        assert "over 1000 times the usual" in run.history[0]["dropped"][0]["reason"]
    assert close(runs[0].params, runs[1].params) < 1e-10
    clean = fedge.Federation(federation.data, [federation.examples(k).numpy() for k in range(7)])
    without = fedge.train(
        algorithm, clean, rounds=3, link=Lossy(Simulator(algorithm, clean), {(r, "train", 2) for r in (1, 2, 3)})
    )
    assert close(runs[0].params, without.params) < 1e-10


def test_absurd_uploads_of_one_class_leave_the_other_classes_of_a_client_alone() -> None:
    class OneClass(Simulator):
        def received(self, jobs, uploads):
            lies = ((jobs.clients == 4) & (jobs.rows == 1)).tolist()
            for upload, _ in uploads.values():
                for leaf in upload["delta"].values():
                    leaf[lies] = 1e30
            return uploads

    algorithm = fedge.FedOVA(fedge.FedAvg(large_model(2), lr=0.1, epochs=1), classes=3)
    federation = ragged(toy_data())
    link = OneClass(algorithm, federation)
    run = fedge.train(algorithm, federation, rounds=1, link=link)
    jobs = len(link.directory.jobs(torch.arange(7), link.tasks["train"], None).clients)
    assert [d["client"] for d in run.history[0]["dropped"]] == [4]
    assert jobs > 8
    assert all(torch.isfinite(leaf).all() for leaf in run.params.values())


def test_the_limit_can_be_set_and_switched_off() -> None:
    simulated, _ = huge(1e30)
    algorithm, federation = fedge.FedAvg(large_model().float(), lr=0.1, epochs=1), ragged(toy_data())
    link = simulated(algorithm, federation, max_ratio=None)
    ruined = fedge.train(algorithm, federation, rounds=1, link=link)
    assert max(float(leaf.abs().max()) for leaf in ruined.params.values()) > 1e20
    done = fedge.train(algorithm, federation, rounds=1, link=simulated(algorithm, federation, max_ratio=1e38))
    assert done.history[0]["dropped"] == []
    with pytest.raises(ValueError, match="max_ratio is 0, it must be greater than 0"):
        Simulator(algorithm, federation, max_ratio=0)


def test_a_state_that_is_not_finite_is_never_kept(tmp_path: Path) -> None:
    """The server's own arithmetic fails in round 3: it is skipped, and the others go on from the state before it."""

    class Broken(fedge.FedAvg):
        def round(self, state):
            after = yield from super().round(state)
            rounds.append(state["params"])
            bad = len(rounds) == 3
            return {**after, "params": {k: v * float("nan") for k, v in after["params"].items()}} if bad else after

    rounds: list = []
    algorithm, federation = Broken(large_model(), lr=0.1, epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=4, out=tmp_path / "a", observe=fedge.Observe(checkpoint_every=1))
    assert ["skipped" in record for record in run.history] == [False, False, True, False]
    assert "the new state is not finite, although every upload was" in run.history[2]["skipped"]
    assert close(rounds[3], rounds[2]) == 0
    assert all(torch.isfinite(leaf).all() for leaf in run.params.values())


@pytest.mark.parametrize("rows", [None, 1])
def test_half_precision_is_summed_in_single(rows: int | None) -> None:
    sums = Sums(fedge.Mean(), rows)
    uploads = {"delta": {"w": torch.full((4, 3), 300.0, dtype=torch.float16)}}
    part = sums.part([uploads], [torch.full((4,), 500.0)], torch.zeros(4, dtype=torch.long))
    sums.merge(part)
    mean = sums.reply().mean["delta"]["w"]
    assert mean.dtype == torch.float16
    assert mean.flatten().tolist() == [300.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_jobs_one_by_one_add_up_to_the_stack_of_them(dtype: torch.dtype) -> None:
    """Each is added in one pass, and none is changed by it."""
    g = torch.Generator().manual_seed(0)
    delta, weights = (9 * torch.randn(5, 3, 2, generator=g)).to(dtype), torch.tensor([1.0, 2.0, 0.5, 7.0, 3.0])
    before, rows = delta.clone(), torch.zeros(5, dtype=torch.long)
    together, apart = Sums(fedge.Mean(), None), Sums(fedge.Mean(), None)
    together.merge(together.part([{"delta": {"w": delta}}], [weights], rows))
    for job in range(5):
        part = apart.part([{"delta": {"w": delta[job : job + 1]}}], [weights[job : job + 1]], rows[job : job + 1])
        assert bool(part.finite())
        apart.merge(part)
    (whole, single), clients = (one.reply().mean["delta"]["w"] for one in (together, apart)), apart.reply().clients
    torch.testing.assert_close(single, whole, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    assert int(clients) == 5
    assert torch.equal(delta, before)
    bad = torch.full((1, 3, 2), torch.nan)
    assert not bool(apart.part([{"delta": {"w": bad}}], [weights[:1]], rows[:1]).finite())


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_enough_replies_are_counted_by_clients_and_not_by_classes(link) -> None:
    algorithm = fedge.FedOVA(fedge.FedAvg(large_model(2), epochs=1), classes=3)
    federation = ragged(toy_data())
    for client in (0, 1, 2, 4, 6):
        federation.data.train_x[federation.examples(client)] = torch.nan
    with pytest.raises(TooFewReplies, match="good uploads of 2 clients, 3 needed"):
        fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation, min_replies=3))
    assert fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation, min_replies=2)).rounds == 1


def test_an_answer_larger_than_its_template_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb(Loopback):
        def client(self, client, at, ask, request):
            answer = super().client(client, at, ask, request)
            return answer + b"\0" * 50_000 if client == 3 else answer

    algorithm, federation = fedge.FedAvg(large_model(), epochs=1), ragged(toy_data())
    read = []
    monkeypatch.setattr(
        wire, "decode", lambda blob, *most, real=wire.decode: read.append(len(blob)) or real(blob, *most)
    )
    run = fedge.train(algorithm, federation, rounds=1, link=Bomb(algorithm, federation))
    (drop,) = run.history[0]["dropped"]
    assert drop["client"] == 3
    assert "at most" in drop["reason"]
    assert "it was not read" in drop["reason"]
    assert max(read) < 50_000
    assert run.ledger[0].wire_up > 50_000  # what came is counted all the same


@pytest.mark.parametrize("kind", [0, 1], ids=["simulator", "loop-back"])
def test_small_parts_beside_large_ones_are_compared_too(kind: int) -> None:
    """A counter of FedNova: 1e30 in it costs its client alone."""
    federation, algorithm = ragged(toy_data()), fedge.FedNova(large_model().float(), epochs=1)
    base = (Simulator, Loopback)[kind]

    def spoil(upload):
        for part, leaves in upload.items():
            if part != "delta":
                upload[part] = {name: torch.full_like(leaf, 1e30) for name, leaf in leaves.items()}
        return upload

    class Liar(base):
        def received(self, jobs, uploads):
            lies = (jobs.clients == 2).tolist()
            for upload, _ in uploads.values():
                for part, leaves in upload.items():
                    for leaf in leaves.values() if part != "delta" else ():
                        leaf[lies] = 1e30
            return uploads

        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client == 2:
                answer = {row: [(spoil(u), w) for u, w in ups] for row, ups in answer.items()}
            return wire.encode(answer)

    run = fedge.train(algorithm, federation, rounds=2, link=Liar(algorithm, federation))
    assert {drop["client"] for record in run.history for drop in record["dropped"]} == {2}
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1e3


def test_one_liar_of_two_does_not_move_the_median() -> None:
    federation = ragged(toy_data())
    algorithm = fedge.FedAvg(large_model().float(), epochs=1)
    link = huge(1e30)[0](algorithm, federation)
    run = fedge.train(algorithm, federation, rounds=12, cohort=2, link=link)
    assert any(2 in record["cohort"] for record in run.history)
    assert all((2 in record["cohort"]) == bool(record["dropped"]) for record in run.history)
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1e3


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_cannot_be_decoded_are_refused_as_those_of_a_wrong_shape_are(rows: int) -> None:
    """What is merged is what the record says: whether a codec or the check of shapes refuses, the model is the same."""

    def spoilt(decodable: bool):
        class Spoilt(Loopback):
            def client(self, client, at, ask, request):
                answer = wire.decode(super().client(client, at, ask, request))
                if client == 2:
                    for row in list(answer)[-rows:]:
                        answer[row] = [(change(u, decodable), w) for u, w in answer[row]]
                return wire.encode(answer)

        return Spoilt

    def change(upload, decodable):
        if not decodable:
            return {"nothing": {"at all": torch.zeros(1)}}
        wrong = {torch.int32: 2**30, torch.int64: 10**6, torch.int16: 2**14, torch.uint8: 255}
        return {
            part: {k: torch.full_like(v, wrong[v.dtype]) if v.dtype in wrong else v for k, v in leaves.items()}
            for part, leaves in upload.items()
        }

    federation = ragged(toy_data())
    found = []
    for decodable in (True, False):
        inner = fedge.Compressed(fedge.FedAvg(large_model(2), epochs=1), fedge.TopK(0.1))
        algorithm = fedge.FedOVA(inner, classes=3)
        run = fedge.train(algorithm, federation, rounds=1, link=spoilt(decodable)(algorithm, federation))
        assert {drop["client"] for drop in run.history[0]["dropped"]} == {2}
        found.append(run)
    assert "cannot be decoded" in found[0].history[0]["dropped"][0]["reason"]
    assert close(found[0].params, found[1].params) == 0


# Uploads of few numbers alone: tiny models, and losses at candidates


def tiny_model() -> torch.nn.Module:
    small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)).double()
    assert sum(p.numel() for p in small.parameters()) < 64
    return small


@pytest.mark.parametrize("kind", [0, 1], ids=["simulator", "loop-back"])
@pytest.mark.parametrize("make", [fedge.FedAvg, fedge.FedNova])
def test_a_tiny_model_is_compared_as_a_large_one_is(kind: int, make) -> None:
    federation, algorithm = ragged(toy_data()), make(tiny_model(), epochs=1)
    run = fedge.train(algorithm, federation, rounds=2, link=huge(1e30)[kind](algorithm, federation))
    assert [[d["client"] for d in record["dropped"]] for record in run.history] == [[2]] * 2
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1e3


def test_a_tiny_update_is_compared_with_updates_and_not_with_the_counter_beside_it() -> None:
    """FedNova's counter is 1 or more: an update of 900 would pass beside it."""
    federation, algorithm = ragged(toy_data()), fedge.FedNova(tiny_model(), lr=1e-3, epochs=1)
    link = Tampering(algorithm, federation)
    link.faults = {
        2: lambda u, w: (u | {"direction": {n: torch.full_like(v, 900.0) for n, v in u["direction"].items()}}, w)
    }
    run = fedge.train(algorithm, federation, rounds=1, link=link)
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [2]


class LossLiar(Loopback):
    """Client 2 says these losses, whatever the candidates are worth."""

    lie: tuple[float, ...] = ()

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        if client == 2 and ask.tasks == ("losses",):
            for uploads in answer.values():
                for upload, _ in uploads:
                    upload["losses"]["at"] = torch.tensor(self.lie, dtype=upload["losses"]["at"].dtype)
        return wire.encode(answer)


@pytest.mark.parametrize("lie", [(0.0, -1e38), (1e30, 0.0), (3e38, -3e38), (float("inf"), float("-inf"))])
def test_one_liar_does_not_choose_a_candidate_that_overflows(lie: tuple[float, float]) -> None:
    """A step of 1e38 overflows at everybody; one client says that it is the best, and the others' word counts."""
    federation = ragged(toy_data())
    algorithm = fedge.FisherLBFGS(toy_model(), source="gradient", candidates=(1.0, 1e38))
    link = LossLiar(algorithm, federation)
    link.lie = lie
    run = fedge.train(algorithm, federation, rounds=2, link=link)
    plain = fedge.train(algorithm, federation, rounds=2)
    assert all(record["dropped"] == [] for record in run.history)
    assert close(run.params, plain.params) < 1e-12


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_losses_that_overflow_at_some_clients_do_not_cost_them_their_say(chunk: int | None) -> None:
    """The limits are those of the whole cohort, whatever the order and the chunks."""
    data = toy_data()
    federation = ragged(data)
    data.train_x[federation.examples(3)] *= 1e6  # at this client alone a long step is absurd
    algorithm = fedge.FisherLBFGS(toy_model(), lr=1e-9, source="gradient", candidates=(1.0, 1e6))
    runs = [
        fedge.train(algorithm, federation, rounds=2, link=Simulator(algorithm, federation, chunk=chunk)),
        fedge.train(algorithm, federation, rounds=2, link=Loopback(algorithm, federation)),
    ]
    assert all(not [d for d in r["dropped"] if d["task"] == "losses"] for run in runs for r in run.history)
    assert close(runs[0].params, runs[1].params) < 1e-10


def test_liars_that_are_asked_first_do_not_set_what_is_usual() -> None:
    """Three of seven, and the first three in the order asked: the median is that of everybody."""

    class First(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            for uploads in answer.values() if client < 3 else ():
                for upload, _ in uploads:
                    upload["delta"] = {name: torch.full_like(leaf, 1e30) for name, leaf in upload["delta"].items()}
            return wire.encode(answer)

    algorithm, federation = fedge.FedAvg(large_model(), lr=0.1, epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=1, link=First(algorithm, federation))
    assert sorted(drop["client"] for drop in run.history[0]["dropped"]) == [0, 1, 2]
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1e3


def test_an_absurd_upload_among_zeros_is_found() -> None:
    """Most clients send nothing, so the median is 0: the others are compared with each other."""

    class Mostly(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            size = {1: 1e30, 2: 0.1, 3: 0.2}.get(client, 0.0)
            for uploads in answer.values():
                for upload, _ in uploads:
                    upload["delta"] = {name: torch.full_like(leaf, size) for name, leaf in upload["delta"].items()}
            return wire.encode(answer)

    algorithm, federation = fedge.FedAvg(large_model(), lr=0.1, epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=1, link=Mostly(algorithm, federation))
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [1]


@pytest.mark.parametrize("liars", [(1,), (1, 2, 3)])
def test_an_absurd_upload_is_found_where_all_others_are_zero(liars: tuple[int, ...]) -> None:
    """As when no gradient is left: it takes half of the clients, and not one, to say what is usual."""

    class Alone(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            for uploads in answer.values():
                for upload, _ in uploads:
                    size = 1e30 if client in liars else 0.0
                    upload["delta"] = {name: torch.full_like(leaf, size) for name, leaf in upload["delta"].items()}
            return wire.encode(answer)

    algorithm, federation = fedge.FedAvg(large_model(), lr=0.1, epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=1, link=Alone(algorithm, federation))
    assert tuple(drop["client"] for drop in run.history[0]["dropped"]) == liars


# Rounds without enough good uploads


@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_a_cohort_of_one_whose_upload_is_bad_skips_the_round(kind, tmp_path: Path) -> None:
    """The state stays as it was, the record says why, later rounds go on, and so does a resumed run."""
    federation = ragged(toy_data())
    federation.data.train_x[federation.examples(2)] = torch.nan
    algorithm = fedge.SCAFFOLD(large_model(), lr=0.1, epochs=1)

    def go(rounds: int, **options) -> fedge.Run:
        link = kind(algorithm, federation)
        return fedge.train(algorithm, federation, rounds=rounds, cohort=1, seed=1, link=link, **options)

    run = go(12)
    skipped = [record["round"] for record in run.history if "skipped" in record]
    assert skipped == [record["round"] for record in run.history if record["cohort"] == [2]] != []
    first = run.history[skipped[0] - 1]
    assert [drop["client"] for drop in first["dropped"]] == [2]
    assert "good uploads of 0 clients, 1 needed" in first["skipped"]
    assert first["down_bytes"] > 0
    before, after = go(skipped[0] - 1), go(skipped[0])
    assert close(before.params, after.params) == 0
    go(skipped[0], out=tmp_path / "run")
    assert close(go(12, out=tmp_path / "run", resume=True).params, run.params) == 0


def test_too_many_skipped_rounds_in_a_row_end_the_run(tmp_path: Path) -> None:
    federation = ragged(toy_data())
    federation.data.train_x[:] = torch.nan
    algorithm = fedge.FedAvg(large_model(), lr=0.1, epochs=1)
    with pytest.raises(TooFewReplies, match="round 5: task 'train' has good uploads of 0 clients, 1 needed"):
        fedge.train(algorithm, federation, rounds=20, cohort=1, out=tmp_path / "run")
    with pytest.raises(TooFewReplies, match="round 5: "):  # a resumed run knows of the rounds before
        fedge.train(algorithm, federation, rounds=20, cohort=1, out=tmp_path / "run", resume=True)


def test_what_clients_remember_of_a_skipped_round_is_forgotten() -> None:
    """Six good uploads of seven, and seven are needed: the round never was, for the six as well."""
    federation, algorithm = ragged(toy_data()), fedge.SCAFFOLD(large_model(), lr=0.1, epochs=1)

    class Second(Tampering):
        def client(self, client, at, ask, request):
            if at.round == 1:
                return Loopback.client(self, client, at, ask, request)
            return super().client(client, at, ask, request)

    link = Second(algorithm, federation, min_replies=7)
    link.faults = {2: lambda upload, weight: (upload, weight * torch.nan)}
    spoilt = fedge.train(algorithm, federation, rounds=2, link=link)
    plain = fedge.train(algorithm, federation, rounds=1, link=Loopback(algorithm, federation))
    assert "skipped" in spoilt.history[1]
    assert plain.memory.keys() == spoilt.memory.keys() != set()
    for part, table in plain.memory.items():
        assert close(table["leaves"], spoilt.memory[part]["leaves"]) == 0


@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_one_ask_of_two_without_a_good_upload_skips_the_round(kind) -> None:
    """FedPer judges and trains in one phase: a client that spoils its training alone must not end the run."""
    federation = ragged(toy_data())
    algorithm = fedge.FedPer(large_model(), lr=0.1, epochs=1)

    class Spoilt(kind):
        def received(self, jobs, uploads):
            for upload, _ in uploads.values():
                for leaf in upload.get("delta", {}).values():
                    leaf[(jobs.clients == 2).tolist()] = torch.nan
            return uploads

        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client == 2 and "train" in ask.tasks:
                answer = {row: [(u, w * torch.nan) for u, w in ups] for row, ups in answer.items()}
            return wire.encode(answer)

    run = fedge.train(algorithm, federation, rounds=6, cohort=1, seed=1, link=Spoilt(algorithm, federation))
    skipped = [record["round"] for record in run.history if "skipped" in record]
    assert skipped == [record["round"] for record in run.history if record["cohort"] == [2]] != []


@pytest.mark.parametrize("name", ["fedova_feddane", "fedova_lbfgs_product"])
def test_a_client_that_is_bad_in_one_of_its_classes_skips_the_round_and_does_not_end_the_run(name: str) -> None:
    """It counts for the first phase and is not asked in the second, which then has too few clients and no bad one."""

    class Halves(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            if client == 4 and at.round == 2:
                first = min(answer)
                answer[first] = [(upload, weight * torch.nan) for upload, weight in answer[first]]
            return wire.encode(answer)

    algorithm, federation = algorithms()[name], ragged(toy_data())
    link = Halves(algorithm, federation, min_replies=federation.clients)
    run = fedge.train(algorithm, federation, rounds=4, seed=3, link=link)
    assert ["skipped" in record for record in run.history] == [False, True, False, False]
    assert [[drop["client"] for drop in record["dropped"]] for record in run.history] == [[], [4], [], []]


def test_who_claims_many_rows_does_not_set_the_limits_of_losses() -> None:
    """Clients 0 and 1 have a row each, and client 2 three: the limits are those of the middle one of three clients."""
    losses, said = Losses(), torch.tensor([[2.0, 4.0], [3.0, 5.0], *[[-1e36, 1e36]] * 3])
    upload = {"losses": {"at": said}}
    assert losses.note("losses", upload, ("losses",), [0, 1, 2, 2, 2], 1000.0).tolist() == [False] * 2 + [True] * 3
    found = losses.limited("losses", upload, ("losses",), 1000.0)["losses"]["at"]
    assert found.tolist() == [[2.0, 4.0], [3.0, 5.0], *[[-2000.0, 5000.0]] * 3]


def test_limits_of_losses_are_worked_out_once_for_a_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand clients that each send a few, a median per client and all over again took two minutes."""
    sorts: list[int] = []
    middle = sizes._middle
    monkeypatch.setattr(sizes, "_middle", lambda numbers: (sorts.append(len(numbers)), middle(numbers))[1])
    algorithm = fedge.FisherLBFGS(toy_model(), candidates=(0.5, 1.0), epochs=1)
    federation = ragged(toy_data())
    fedge.train(algorithm, federation, rounds=1, link=Loopback(algorithm, federation))
    assert sorts == [federation.clients]


def test_who_claims_many_rows_does_not_set_what_is_usual() -> None:
    """One of three clients claims all classes, so most uploads are its own: it is still one client of three."""
    data = toy_data()
    chosen = [torch.nonzero(data.train_y == label).flatten()[:9].tolist() for label in (0, 1, 2)]
    federation = fedge.Federation(data, chosen)
    algorithm = fedge.FedOVA(fedge.FedAvg(large_model(2), lr=0.1, epochs=1), classes=3)

    class Greedy(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            for uploads in answer.values() if client == 2 else ():
                for upload, _ in uploads:
                    for part, leaves in upload.items():
                        upload[part] = {name: torch.full_like(leaf, 1e30) for name, leaf in leaves.items()}
            return wire.encode(answer)

    link = Greedy(algorithm, federation)
    link.directory.told(2, [0, 1, 2])
    run = fedge.train(algorithm, federation, rounds=1, link=link)
    assert {drop["client"] for drop in run.history[0]["dropped"]} == {2}
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1e3
