"""Ways to compute clients: measured where they are not known, remembered, and the same numbers in each."""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.engine import Loopback, Simulator, choosing
from fedge.engine.ways import LOOKS, STEPS, TIMED, WAYS, NotStackable, Trial, Way, fastest
from fedge.runs import checkpoint
from tests.cases import close, ragged, toy_data, toy_model
from tests.networks import CLASSES, NETWORKS, TIMES, WORDS, federation, words

NETWORK = NETWORKS["gru"]


def algorithm() -> fedge.FedAvg:
    return fedge.FedAvg(NETWORK.module(), epochs=2, batch_size=4, lr=0.2)


def told(monkeypatch: pytest.MonkeyPatch, way: Way) -> list[list[str]]:
    """Let this way be the fastest; returns the ways that were measured, each time."""
    seen: list[list[str]] = []

    def choose(trials: dict[Way, Trial], *limits: object) -> Way:
        for trial in trials.values():
            trial.warm()
            trial.once()
        seen.append(list(trials))
        return way

    monkeypatch.setattr(choosing, "fastest", choose)
    return seen


def test_the_fastest_way_is_taken_and_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    spent = {"stacked": 10_000, "single": 100, "plain": 3000}
    trials = {way: Trial(lambda n=n: sum(range(200 * n)), lambda: True, 2) for way, n in spent.items()}
    with caplog.at_level(logging.INFO, "fedge"):
        assert fastest(trials) == "single"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "clients are computed in the way 'single' (per client and up to 2 steps: stacked"
    )


def test_a_way_that_is_hardly_faster_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "once", lambda self: self.jobs)
    trials = {way: Trial(lambda: None, lambda: True, jobs) for way, jobs in zip(WAYS, (1.0, 0.95, 0.91), strict=True)}
    assert fastest(trials) == "stacked"


def test_a_trial_waits_for_the_recording() -> None:
    runs: list[int] = []
    Trial(lambda: runs.append(1), lambda: len(runs) == 3, 1).warm()
    assert len(runs) == 3


def taking(seconds: dict[Way, float], runs: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[Way, Trial]:
    """Trials that take so long, as they believe; `runs` are those that were timed."""
    monkeypatch.setattr(Trial, "once", lambda self: (self.run(), self.jobs)[1])
    return {way: Trial(lambda way=way: runs.append(way), lambda: True, spent) for way, spent in seconds.items()}


def test_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow while that is as long as all trials of one way decides nothing."""
    runs: list[str] = []
    fastest(taking({"stacked": 1.0, "single": 1.1, "plain": 1.2}, runs, monkeypatch))
    assert runs == [*["plain", "stacked"] * (1 + LOOKS), *[*WAYS] * (1 + TIMED)]


def test_a_way_that_is_far_behind_has_no_further_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    assert fastest(taking({"stacked": 3.0, "single": 1.0, "plain": 1.2}, runs, monkeypatch)) == "single"
    assert runs == [*["plain", "stacked"] * 2, *[*WAYS] * 2, *["single", "plain"] * (TIMED - 1)]


def test_what_is_clear_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    assert fastest(taking({"single": 1.0, "stacked": 0.4, "plain": 1.0}, runs, monkeypatch), 0.6) == "stacked"
    assert runs == ["plain", "stacked"] * 2


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"stacked": 0.9, "single": 0.1, "plain": 1.0}, "stacked"),
        ({"stacked": 1.1, "single": 0.1, "plain": 1.0}, "single"),
        ({"single": 1.0, "stacked": 0.7, "plain": 1.0}, "single"),
    ],
)
def test_recordings_that_would_take_too_long_are_not_made(
    seconds: dict[Way, float], chosen: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best that is known without them."""
    runs, asked = list[str](), list[float]()
    trials = taking(seconds, runs, monkeypatch)
    assert fastest(trials, 0.6, lambda spent: (asked.append(spent), 1.0)[1]) == chosen
    assert runs == ["plain", "stacked"] * (1 + LOOKS)
    assert asked == [1.0]
    assert fastest(trials, 0.6, lambda spent: 1e3) == min(seconds, key=lambda way: seconds[way])


def test_a_choice_may_cost_one_round_or_a_share_of_the_run() -> None:
    shared, own = federation(NETWORK), algorithm()
    for rounds, expected in ((1, 1.0), (20, 1.0), (100, 5.0), (None, math.inf)):
        link = Simulator(own, shared, rounds=rounds)
        tasks, jobs = link.jobs_of(fedge.Ask("train", {}), torch.arange(4))
        plainly = sum(tasks[0].steps(n) for n in (9, 9, 9, 5)) / STEPS  # of trials, each a second long
        assert link._allowed(1.0, tasks, jobs) == pytest.approx(expected * plainly)
    with pytest.raises(ValueError, match="rounds is 0"):
        Simulator(own, shared, rounds=0)


def test_work_in_other_threads_is_seen() -> None:
    def run() -> None:
        busy = threading.Thread(target=time.sleep, args=(0.05,))
        busy.start()
        busy.join()

    assert Trial(run, lambda: True, 2).once() >= 0.025


def test_other_work_on_the_machine_does_not_count_for_one_thread() -> None:
    """It is timed by what it computed, and not by how long it waited for a core."""
    before = torch.get_num_threads()
    own, shared = algorithm(), federation(NETWORK)
    try:
        for threads, workers, clock in (
            (1, 1, time.process_time),
            (1, 2, time.perf_counter),
            (2, 1, time.perf_counter),
        ):
            torch.set_num_threads(threads)
            assert Simulator(own, shared, workers=workers)._clock is clock
    finally:
        torch.set_num_threads(before)
    assert Trial(lambda: time.sleep(0.05), lambda: True, 1, time.process_time).once() < 0.025


def failing(text: str) -> Trial:
    def run() -> None:
        raise RuntimeError(text)

    return Trial(run, lambda: True, 1)


def test_a_way_that_fails_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    trials = {"stacked": failing("vmap: no\nmore of it"), "single": failing("no"), "plain": Trial(int, lambda: True, 1)}
    with caplog.at_level(logging.WARNING, "fedge"):
        assert fastest(trials) == "plain"
    assert [record.getMessage() for record in caplog.records] == [
        "the way 'stacked' fails for this model and is left out: RuntimeError: vmap: no",
        "the way 'single' fails for this model and is left out: RuntimeError: no",
    ]


def test_if_all_ways_fail_the_first_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="first"):
        fastest({"stacked": failing("first"), "single": failing("second"), "plain": failing("third")})


@pytest.mark.parametrize(("workers", "at_once"), [(1, 1), (2, 4), (3, 4), (4, 4), (16, 1)])
def test_workers_are_measured_as_they_will_work(workers: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients: what so many workers do at once is run; more workers than clients share nothing."""
    shared, own = federation(NETWORK), algorithm()
    link = Simulator(own, shared, workers=workers)
    fold, folded, jobs = link._fold, [], {}

    def choose(trials: dict[Way, Trial], *limits: object) -> Way:
        for way in ("single", "plain"):
            trials[way].warm()
            folded.clear()
            trials[way].run()
            jobs[way] = (trials[way].jobs, len(folded))
        return "stacked"

    monkeypatch.setattr(choosing, "fastest", choose)
    monkeypatch.setattr(link, "_fold", lambda *args, **more: (folded.append(1), fold(*args, **more))[1])
    assert shared.clients == 4
    fedge.train(own, shared, rounds=1, link=link)
    assert jobs == {"single": (at_once, at_once), "plain": (at_once, at_once)}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_plain_way_replays_no_recording_of_another(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, "plain")
    shared, own = federation(NETWORK), algorithm()
    link = Simulator(own, shared, workers=workers)
    fedge.train(own, shared, rounds=1, link=link)
    assert not any(step.recorded for step in link._steps.values())


class Branch(nn.Module):
    """What a loop over clients can do, and many clients at once cannot."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.out = kind, nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.kind == "branch" and torch.isnan(h).any():
            raise ValueError("not a number")
        if self.kind == "size":
            h = h[:, : int((x >= 0).sum(1).max())]
        if self.kind == "mask":
            h = h[x >= 0].view(h.shape)
        if self.kind == "fill":
            found, h = h, torch.zeros(len(x), TIMES, 4, dtype=h.dtype)
            h[:, :2] = found[:, :2]
        return self.out(h.mean(1))


@pytest.mark.filterwarnings("ignore:a step could not be recorded", "ignore:a step depends on values")
@pytest.mark.parametrize("kind", ["branch", "size", "mask", "fill"])
def test_a_model_that_cannot_be_stacked_is_trained_all_the_same(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    network = words(lambda: Branch(kind))
    shared, own = federation(network), fedge.FedAvg(network.module(), epochs=2, batch_size=4, lr=0.2)
    expected = fedge.train(own, shared, rounds=2, link=Loopback(own, shared)).params
    with caplog.at_level(logging.WARNING, "fedge"):
        found = fedge.train(own, shared, rounds=2).params
    assert close(found, expected) < 1e-10
    said = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("the way 'stacked' fails for this model and is left out: RuntimeError")
    assert ("(an `if` on a tensor" in said[0]) == (kind != "fill")
    assert "pytorch/issues" not in said[0]
    with pytest.raises(NotStackable, match='way="single" computes one client after another'):
        fedge.train(own, shared, rounds=1, link=Simulator(own, shared, way="stacked"))


@pytest.mark.parametrize("way", WAYS)
def test_measuring_changes_no_bit(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = federation(NETWORK), algorithm()
    asked = fedge.train(own, shared, rounds=2, engine=fedge.Engine(way=way, workers=2)).params
    seen = told(monkeypatch, way)
    link = Simulator(own, shared, workers=2)
    assert link.way is None
    found = fedge.train(own, shared, rounds=2, link=link).params
    assert seen == [["stacked", "single", "plain"]], "once"
    assert link.way == way
    assert close(asked, found) == 0


def test_a_run_that_goes_on_takes_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = federation(NETWORK), algorithm()
    told(monkeypatch, "plain")
    fedge.train(own, shared, rounds=1, out=tmp_path / "run", observe=fedge.Observe(checkpoint_every=100))
    seen = told(monkeypatch, "stacked")
    link = Simulator(own, shared)
    fedge.train(own, shared, rounds=2, out=tmp_path / "run", resume=True, link=link)
    assert (seen, link.way) == ([], "plain")


def test_the_way_is_saved_as_soon_as_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = federation(NETWORK), algorithm()
    told(monkeypatch, "single")
    settings = {"out": tmp_path / "run", "observe": fedge.Observe(checkpoint_every=100)}

    def die(record: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedge.train(own, shared, rounds=5, on_round=die, **settings)
    content = checkpoint.load(tmp_path / "run" / "checkpoint.pt")
    assert (content["round"], content["engine"]["way"]) == (1, "single")


def test_what_is_known_is_not_measured() -> None:
    chain = fedge.FedAvg(toy_model())
    assert Simulator(chain, ragged(toy_data())).way == "stacked"
    assert Simulator(chain, ragged(toy_data()), chunk=1).way == "single"
    own, shared = algorithm(), federation(NETWORK)
    assert Simulator(own, shared, chunk=3).way == "stacked"
    assert Simulator(own, shared, way="plain").way == "plain"


def test_impossible_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="way is 'fast', it must be one of"):
        Simulator(algorithm(), federation(NETWORK), way="fast")
    with pytest.raises(ValueError, match="way is 'plain', which is one client at a time, but chunk is 5"):
        Simulator(algorithm(), federation(NETWORK), way="plain", chunk=5)
