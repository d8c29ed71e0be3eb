"""What clients remember: where it lies, when it becomes final, and that it survives everything a run survives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedge
from fedge import tree
from fedge.core import Algorithm, Ask, At, Task
from fedge.engine import Loopback, Simulator
from fedge.engine.clients.memory import ClientMemory
from fedge.handle import cross_entropy
from tests.cases import close, ragged, toy_data, toy_model

CPU = torch.device("cpu")


def part(*values: float) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(values)}


def get(memory: ClientMemory, *clients: int) -> list[float]:
    return memory.get("mine", [(client, 0) for client in clients])["a"].tolist()


def test_a_round_is_final_when_the_next_begins_and_can_be_done_again_before() -> None:
    memory = ClientMemory(CPU)
    memory.begin(At(0, 1, 0))
    memory.put(At(0, 1, 0), [(4, 0), (2, 0)], {"mine": part(1.0, 2.0)})
    assert get(memory, 2, 4) == [2.0, 1.0]
    memory.begin(At(0, 1, 1))  # a later phase sees it
    memory.put(At(0, 1, 1), [(4, 0)], {"mine": part(5.0)})
    assert get(memory, 4, 2) == [5.0, 2.0]
    memory.begin(At(0, 1, 0))  # the round is done again
    assert memory.knows("mine", [(4, 0), (2, 0)]) == [False, False]
    memory.put(At(0, 1, 0), [(4, 0)], {"mine": part(7.0)})
    memory.begin(At(0, 2, 0))  # final
    memory.put(At(0, 2, 0), [(4, 0), (9, 0)], {"mine": part(8.0, 9.0)})
    memory.begin(At(0, 2, 0))
    assert get(memory, 4, 9) == [7.0, 0.0]
    assert memory.knows("mine", [(4, 0), (9, 0)]) == [True, False]


def test_settling_keeps_finished_rounds_alone() -> None:
    memory = ClientMemory(CPU)
    memory.put(At(0, 3, 0), [(1, 0)], {"mine": part(1.0)})
    memory.settle(3)
    memory.put(At(0, 4, 0), [(1, 0)], {"mine": part(2.0)})
    memory.settle(3)
    assert get(memory, 1) == [1.0]


def test_space_follows_the_jobs_that_were_seen() -> None:
    memory = ClientMemory(CPU)
    for round, jobs in enumerate(([(10**6, 0), (3, 1)], [(3, 0)], [(10**6, 0), (5, 2)]), 1):
        memory.begin(At(0, round, 0))
        memory.put(At(0, round, 0), jobs, {"mine": {"a": torch.full((2, 10), float(round))[: len(jobs)]}})
    memory.settle(3)
    assert memory.nbytes == 4 * 10 * 4
    again = ClientMemory(CPU)
    again.load(memory.state())
    wanted = [(3, 0), (10**6, 0), (5, 2), (3, 1)]
    assert torch.equal(again.get("mine", wanted)["a"], memory.get("mine", wanted)["a"])
    assert again.get("mine", wanted)["a"][:, 0].tolist() == [2.0, 3.0, 3.0, 1.0]


@dataclass(frozen=True, eq=False)
class Counting(Algorithm[dict]):
    """Clients count how often they were asked, in two tasks of one ask, and step less far every time."""

    model: torch.nn.Module
    loss: object = cross_entropy
    noise: float = 0.0

    def tasks(self, model):
        def first(sent):
            return {"count": {"n": torch.zeros_like(next(iter(sent["params"].values())).flatten()[0])}}

        def counted(sent, carry, examples):
            return {"count": {"n": sent["count"]["n"] + 1}}, examples.float()

        def step(sent, params, batch):
            return tree.axpy(-0.1 / (1 + sent["count"]["n"]), model.grad(params, batch), params)

        def finish(sent, params, examples, key):
            drawn = tree.map_(lambda leaf: self.noise * fedge.keys.normal(key, leaf), sent["params"])
            delta = tree.add(drawn, tree.sub(params, sent["params"]))
            return {"delta": delta, "asked": dict(sent["count"])}, examples.float()

        def nothing(sent, carry, batch):
            return carry

        remember = {"remembers": ("count",), "first": first}
        return {
            "count": Task(lambda sent: sent["params"], nothing, counted, private=True, batches=1, **remember),
            "train": Task(
                lambda sent: sent["params"],
                step,
                lambda *args: (finish(*args)[0] | {"count": args[0]["count"]}, args[2].float()),
                batch_size=4,
                draws=True,
                **remember,
            ),
        }

    def init(self, params):
        return {"params": params, "asked": 0.0}

    def round(self, state):
        trained = yield Ask(("count", "train"), {"params": state["params"]})
        return {
            "params": tree.add(state["params"], trained.mean["delta"]),
            "asked": float(trained.mean["asked"]["n"]),
        }

    def notes(self, state):
        return {"asked": state["asked"]}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_links_agree_on_memory_draws_and_counts(noise: float) -> None:
    algorithm, federation = Counting(toy_model(), noise=noise), ragged(toy_data())
    runs = [
        fedge.train(algorithm, federation, rounds=5, cohort=4, seed=3, link=link)
        for link in (
            Simulator(algorithm, federation),
            Simulator(algorithm, federation, chunk=1),
            Simulator(algorithm, federation, chunk=3),
            Loopback(algorithm, federation),
        )
    ]
    for run in runs[1:]:
        assert close(runs[0].params, run.params) < 1e-10
        assert [r["asked"] for r in run.history] == pytest.approx([r["asked"] for r in runs[0].history])
        assert run.memory_bytes == runs[0].memory_bytes
        assert run.ledger.rows == runs[0].ledger.rows
    seen: dict[int, int] = {}
    for record in runs[0].history:  # what each client counted, by hand
        for client in record["cohort"]:
            seen[client] = seen.get(client, 0) + 1
        sizes = {client: len(federation.examples(client)) for client in record["cohort"]}
        asked = sum(sizes[c] * seen[c] for c in sizes) / sum(sizes.values())
        assert record["asked"] == pytest.approx(asked)
    assert runs[0].memory_bytes == len(seen) * 8
    d = sum(leaf.numel() for leaf in runs[0].params.values())
    assert runs[0].history[0]["up_bytes"] == 4 * (d * 8 + 8 + 4)  # neither memory nor the private task travels


def test_a_run_that_was_stopped_in_the_middle_of_a_round_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    algorithm, federation = Counting(toy_model(), noise=0.01), ragged(toy_data())
    settings = {"cohort": 4, "seed": 3, "observe": fedge.Observe(checkpoint_every=2)}
    whole = fedge.train(algorithm, federation, rounds=7, **settings)
    phases = 0

    def stop() -> bool:
        nonlocal phases
        phases += 1
        return phases == 5

    half = fedge.train(algorithm, federation, rounds=7, out=tmp_path / "a", stop=stop, **settings)
    assert half.stopped
    rest = fedge.train(algorithm, federation, rounds=7, out=tmp_path / "a", resume=True, **settings)
    assert close(whole.params, rest.params) == 0
    assert [r["asked"] for r in whole.history] == [r["asked"] for r in rest.history]
    started = fedge.train(algorithm, federation, rounds=3, **settings)
    started = fedge.train(algorithm, federation, rounds=4, start=started, **settings)
    assert close(whole.params, started.params) == 0
    summary = (tmp_path / "a/summary.json").read_text()
    assert f'"client_memory_bytes": {whole.memory_bytes}' in summary


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_what_belongs_to_an_upload_that_did_not_count_is_forgotten(link) -> None:
    """Two clients have more examples than a weight may say: the server drops them, and their controls stay at zero."""
    federation = ragged(toy_data())
    algorithm = fedge.SCAFFOLD(toy_model(), lr=0.1, epochs=2, batch_size=4, weighted=True)
    run = fedge.train(algorithm, federation, rounds=4, seed=9, link=link(algorithm, federation, max_weight=20))
    assert {drop["client"] for record in run.history for drop in record["dropped"]} == {4, 6}
    assert set(run.memory["own_control"]["jobs"][:, 0].tolist()) == {0, 1, 2, 3, 5}


@dataclass(frozen=True, eq=False)
class Sour(Algorithm[dict]):
    """A client's memory turns to NaN while its upload stays finite: from its third visit on nothing may change."""

    model: torch.nn.Module
    loss: object = cross_entropy

    def tasks(self, model):
        def first(sent):
            return {"n": {"n": torch.zeros(1, dtype=torch.float64)}}

        def finish(sent, carry, examples):
            visits = sent["n"]["n"] + 1
            sour = torch.where(visits > 2, torch.nan, visits)
            return {"seen": {"n": visits}, "n": {"n": sour}}, examples.float()

        def again(sent, carry, examples):
            return {"after": {"n": sent["n"]["n"]}, "n": dict(sent["n"])}, examples.float()

        pure = {"remembers": ("n",), "first": first, "batches": 1}
        start = lambda sent: sent["params"]  # noqa: E731
        step = lambda sent, carry, batch: carry  # noqa: E731
        return {"visit": Task(start, step, finish, **pure), "again": Task(start, step, again, **pure)}

    def init(self, params):
        return {"params": params, "seen": 0.0, "after": 0.0}

    def round(self, state):
        got = yield Ask(("visit", "again"), {"params": state["params"]})
        return {**state, "seen": float(got.mean["seen"]["n"]), "after": float(got.mean["after"]["n"])}

    def notes(self, state):
        return {"seen": state["seen"], "after": state["after"]}


@pytest.mark.parametrize("make", [Simulator, lambda a, f: Simulator(a, f, chunk=1), Loopback])
def test_what_is_not_finite_is_not_remembered_although_the_upload_counts(make) -> None:
    algorithm, federation = Sour(toy_model()), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=5, link=make(algorithm, federation))
    assert [r["seen"] for r in run.history] == pytest.approx([1, 2, 3, 3, 3])
    assert [r["after"] for r in run.history] == pytest.approx([1, 2, 2, 2, 2])
    assert all(not record["dropped"] for record in run.history)


@dataclass(frozen=True, eq=False)
class Visited(Counting):
    """Counts in its setup as well."""

    def setup(self, state):
        yield Ask("count", {"params": state["params"]})
        return state


@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_setup_that_clients_remember_is_not_counted_twice_by_a_run_that_goes_on(link, tmp_path: Path) -> None:
    algorithm, federation = Visited(toy_model()), ragged(toy_data())

    def go(rounds: int, **options):
        return fedge.train(algorithm, federation, rounds=rounds, link=link(algorithm, federation), **options)

    whole = [record["asked"] for record in go(4).history]
    assert whole == pytest.approx([2, 3, 4, 5])
    go(2, out=tmp_path / "a")
    assert [r["asked"] for r in go(4, out=tmp_path / "a", resume=True).history] == pytest.approx(whole)
    assert [r["asked"] for r in go(2, start=go(2)).history] == pytest.approx(whole)


def test_a_checkpoint_holds_no_more_than_what_is_remembered() -> None:
    memory = ClientMemory(CPU)
    memory.put(At(0, 1, 0), [(k, 0) for k in range(33)], {"mine": {"a": torch.zeros(33, 10)}})
    memory.settle(1)
    assert memory.state()["mine"]["leaves"]["a"].untyped_storage().nbytes() == 33 * 10 * 4


def test_rows_that_counted_are_kept_beside_one_that_did_not() -> None:
    memory = ClientMemory(CPU)
    memory.put(At(0, 1, 0), [(4, 0), (4, 2), (5, 0)], {"mine": part(1.0, 2.0, 3.0)})
    memory.void(At(0, 1, 1), [(4, 0)])  # of another phase
    memory.void(At(0, 1, 0), [(4, 2)])
    memory.settle(1)
    assert memory.knows("mine", [(4, 0), (4, 2), (5, 0)]) == [True, False, True]


def test_what_a_task_remembers_must_be_said_and_returned() -> None:
    with pytest.raises(ValueError, match=r"a task remembers \['mine'\]: `first` must say"):
        Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), remembers=("mine",))

    class Forgetful(Counting):
        def tasks(self, model):
            found = super().tasks(model)
            train = found["count"]
            found["count"] = fedge.Task(
                train.start, train.step, lambda s, c, n: ({}, n.float()), remembers=("count",), first=train.first
            )
            return found

    federation = ragged(toy_data())
    with pytest.raises(Exception, match="the task remembers 'count', but finish returned"):
        fedge.train(Forgetful(toy_model()), federation, rounds=1)


def test_a_link_serves_a_second_run_from_its_beginning() -> None:
    algorithm, federation = Counting(toy_model()), ragged(toy_data())
    link = Simulator(algorithm, federation)
    first, second = (fedge.train(algorithm, federation, rounds=3, cohort=4, link=link) for _ in range(2))
    assert close(first.params, second.params) == 0


@dataclass(frozen=True, eq=False)
class TwoVisits(Algorithm[dict]):
    """Two phases with one cohort: a client counts in each of them how often it was visited there."""

    model: torch.nn.Module
    loss: object = cross_entropy

    def tasks(self, model):
        def task(name):
            def first(sent):
                return {name: {"n": torch.zeros(1, dtype=torch.float64)}}

            def finish(sent, carry, examples):
                upload = {"up": {"x": sent["x"]["x"]}, name: {"n": sent[name]["n"] + 1}}
                return upload, examples.float()

            start = lambda sent: sent["x"]  # noqa: E731
            step = lambda sent, carry, batch: {"x": carry["x"] + batch.x.sum()}  # noqa: E731
            send = lambda sent, carry, examples: finish({**sent, "x": carry}, carry, examples)  # noqa: E731
            return Task(start, step, send, remembers=(name,), first=first, batches=1)

        return {"early": task("early"), "late": task("late")}

    def init(self, params):
        return {"params": params}

    def round(self, state):
        for name in ("early", "late"):
            yield Ask((name,), {"x": {"x": torch.zeros((), dtype=torch.float64)}})
        return state


def spoilt(link, round: int, task: str, clients: int):
    """A link whose first clients answer NaN in a phase; the others do their work."""

    class Spoilt(link):
        def ask(self, at, asks, cohort):
            self.now = at.round == round and asks[0].tasks[0] == task
            return super().ask(at, asks, cohort)

        def received(self, jobs, uploads):
            if self.now:
                uploads["late"][0]["up"]["x"][jobs.clients < clients] = torch.nan
            return uploads

        def client(self, client, at, ask, request):
            answer = super().client(client, at, ask, request)
            return b"bad" if self.now and client < clients else answer

    return Spoilt


def table(run, name: str) -> list[tuple[int, float]]:
    part = run.memory[name]
    counts = part["leaves"]["n"].flatten().tolist()
    return sorted(zip(part["jobs"][:, 0].tolist(), counts, strict=True))


@pytest.mark.parametrize("bad", [3, 7])
@pytest.mark.parametrize("link", [Simulator, Loopback])
def test_a_private_phase_is_forgotten_by_those_whose_answers_did_not_count(link, bad: int) -> None:
    """Nothing of theirs is in what is released. The phase before it in the same round did count."""
    federation = ragged(toy_data())
    algorithm = fedge.Private(TwoVisits(toy_model()), noise=0.0, clients=7, expected=7)
    wrong = spoilt(link, 2, "late", bad)(algorithm, federation)
    run = fedge.train(algorithm, federation, rounds=3, link=wrong)
    assert all("skipped" not in record for record in run.history)
    assert table(run, "early") == [(client, 3.0) for client in range(7)]
    assert table(run, "late") == [(client, 2.0 if client < bad else 3.0) for client in range(7)]


def test_rounds_and_phases_are_abandoned_apart() -> None:
    memory = ClientMemory(CPU)
    for phase in range(3):
        memory.put(At(0, 1, phase), [(phase, 0)], {"mine": part(float(phase))})
    memory.abandon(1, 1)
    assert memory.knows("mine", [(0, 0), (1, 0), (2, 0)]) == [True, False, True]
    memory.abandon(2)
    memory.abandon(1)
    assert memory.knows("mine", [(0, 0), (1, 0), (2, 0)]) == [False] * 3
