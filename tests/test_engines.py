"""Engines: every way to compute the same round, what they do when memory is short, and the batches they draw."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.bench.check import algorithms, problem
from fedge.core import At, Batch, Task
from fedge.engine import Loopback, Simulator, folding
from fedge.engine.clients.batches import Schedule, _draw, _draw_here, client_keys, one_client
from fedge.engine.clients.draws_in_c import MOST
from fedge.engine.clients.run_task import Stacked
from fedge.engine.hardware.budget import Budget, peak
from fedge.engine.hardware.thread_pool import ThreadPool
from fedge.engine.recording import cuda_graph as captured
from fedge.engine.recording.c_library import there_is_a_compiler
from fedge.engine.recording.graph_passes import split_updates
from fedge.engine.recording.recorder import Traced, check_same
from fedge.handle import written
from fedge.keys import fold_array, fold_tensor
from tests.cases import close, generator, ragged, toy_data, toy_model


def test_the_number_of_workers_changes_no_bit() -> None:
    federation = problem(True)
    algorithm = algorithms(True)["fedavg"]
    runs = [
        fedge.train(algorithm, federation, rounds=3, cohort=6, link=Simulator(algorithm, federation, workers=workers))
        for workers in (1, 2, 5)
    ]
    assert close(runs[0].params, runs[1].params) == close(runs[0].params, runs[2].params) == 0


def test_recording_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run records at other steps than the one that never stopped."""
    federation = ragged(toy_data())
    for image in (False, True):
        algorithm, shared = algorithms(image)["fedavg momentum"], problem(image)
        found = []
        for warm in (0, 10**9):
            monkeypatch.setitem(fedge.engine.recording.recorder.WARM, "cpu", warm)
            monkeypatch.setitem(fedge.engine.recording.recorder.WARM, "cuda", warm)
            found.append(fedge.train(algorithm, shared, rounds=3, cohort=6).params)
        assert close(*found) == 0
    assert federation.clients == 7


def test_a_thread_pool_keeps_the_order_and_passes_errors_on() -> None:
    pool = ThreadPool(3, lambda: {"mine": Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n))})
    assert [(job, done) for job, done in pool.map(lambda job, tasks: (job * job, list(tasks)), range(20))] == [
        (job, (job * job, ["mine"])) for job in range(20)
    ]

    def fail(job: int, tasks: object) -> int:
        if job == 7:
            raise ValueError("seven")
        return job

    results = pool.map(fail, range(20))
    assert [next(results)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)
    assert [job for job, _ in pool.map(fail, range(3))] == [0, 1, 2]  # it can be used again


def short_of_memory(link: Simulator, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let chunks of more than `most` jobs fail as a GPU would; returns the sizes that were tried."""
    tried: list[int] = []
    fold = link._fold

    def fail(at, ask, tasks, jobs, record=True):
        tried.append(len(jobs.clients))
        if len(jobs.clients) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return fold(at, ask, tasks, jobs, record)

    monkeypatch.setattr(link, "_fold", fail)
    return tried


def test_out_of_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    algorithm, federation = fedge.FedAvg(toy_model(), epochs=2, batch_size=4), ragged(toy_data(), (15,) * 6)
    expected = fedge.train(algorithm, federation, rounds=2, link=Loopback(algorithm, federation)).params
    link = Simulator(algorithm, federation)
    tried = short_of_memory(link, 4, monkeypatch)
    with caplog.at_level(logging.WARNING, "fedge"):
        found = fedge.train(algorithm, federation, rounds=2, link=link)
    assert tried == [6, 3, 3, 3, 3]
    assert [r.getMessage() for r in caplog.records] == ["out of memory with 6 clients at a time: going on with 3"]
    assert close(found.params, expected) < 1e-10
    assert link.settings()["chunk"] == 3  # a resumed run does not try the large chunk again


def test_chunks_are_halved_until_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a device that others fill at the same time."""
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data(), (15,) * 6)
    link = Simulator(algorithm, federation)
    short_of_memory(link, 1, monkeypatch)
    found = fedge.train(algorithm, federation, rounds=2, link=link)
    said = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert [text.split("going on with ")[1] for text in said] == ["3", "2", "1"]
    assert close(found.params, fedge.train(algorithm, federation, rounds=2).params) < 1e-11


def test_no_memory_for_a_single_client_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data(), (15,) * 6)
    link = Simulator(algorithm, federation)
    short_of_memory(link, 0, monkeypatch)
    with pytest.raises(MemoryError, match="for a single client: lower the batch size"):
        fedge.train(algorithm, federation, rounds=1, link=link)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    link = Simulator(algorithm, federation)

    def fail(*args: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(link, "_fold", fail)
    with pytest.raises(RuntimeError, match="something else"):
        fedge.train(algorithm, federation, rounds=1, link=link)
    assert link.chunk is None


def test_patches_are_part_of_what_a_convolution_needs() -> None:
    """The budget of a convolutional step covers what it holds: its largest tensors are the patches."""
    model = fedge.models.fmnist_cnn()
    link = Simulator(fedge.FedAvg(model), problem_of_images(), written=True)
    _, example, _ = Budget(link.handle, link.population.x[0], torch.device("cpu")).costs
    patches = 4 * (25 * 28 * 28 + 400 * 14 * 14)
    assert example > 3 * patches


def test_no_tensor_of_a_chunk_needs_indices_of_64_bits() -> None:
    """However much memory there is; and the limit is not in the way of batches of the usual size."""
    link = Simulator(fedge.FedAvg(fedge.models.fmnist_cnn()), problem_of_images(), written=True)
    budget = Budget(link.handle, link.population.x[0], torch.device("cpu"))
    budget.loop, budget.memory = False, 1 << 50
    patches = 600 * 400 * 14 * 14  # of one client with all its 600 images in a batch
    assert 20 < budget.jobs(600) < (1 << 31) // patches < 46
    assert budget.jobs(15) > 400
    assert budget.jobs(1 << 40) == 1
    weights = max(leaf.numel() for leaf in link.handle.module.parameters())
    assert budget.jobs(1) * weights < 1 << 31


def problem_of_images() -> fedge.Federation:
    x, y = torch.randn(20, 1, 28, 28, generator=generator()), torch.arange(20) % 10
    return fedge.Federation(fedge.data.Data(x, y, x, y, 10), [np.arange(10), np.arange(10, 20)])


def test_the_peak_of_memory_is_in_the_summary(tmp_path: Path) -> None:
    algorithm, federation = fedge.FedAvg(toy_model()), ragged(toy_data())
    fedge.train(algorithm, federation, rounds=1, out=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["peak_memory_bytes"]
    assert 10**7 < found <= peak(torch.device("cpu"))


def test_words_fold_alike_in_numpy_and_torch() -> None:
    keys = fold_tensor(5, torch.arange(50))
    words = torch.arange(50) * 3
    expected = fold_tensor(keys, 4, words, 17)
    found = fold_array(keys.numpy(), 4, words.numpy(), 17).view(np.int64)
    assert found.tolist() == expected.tolist()
    assert fold_array(-3, np.arange(9)).view(np.int64).tolist() == fold_tensor(-3, torch.arange(9)).tolist()


@pytest.mark.parametrize("batch_size", [4, 100, None])
def test_batches_drawn_by_numpy_are_those_drawn_on_a_device(batch_size: int | None) -> None:
    sizes, epochs = torch.tensor([9, 7, 7, 2]), 3
    clients = torch.tensor([8, 3, 5, 1])
    examples = torch.arange(25) * 11
    keys = client_keys(At(3, 2, 1), clients)
    assert torch.equal(_draw(examples, sizes, keys, epochs), _draw_here(examples, sizes, keys, epochs))
    task = Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), epochs, batch_size)
    schedule = Schedule(task, examples, sizes, keys)
    for first, last, active in schedule.segments():
        for one, other in zip(schedule._at(first, last, active), schedule._at_here(first, last, active), strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
@pytest.mark.parametrize("batch_size", [1, 10, 256, None])
@pytest.mark.parametrize("rows", [False, True])
def test_batches_drawn_in_c_are_those_drawn_by_numpy(batch_size: int | None, rows: bool) -> None:
    """Clients from one example to the most that are drawn in C, every step at every height of the stack."""
    sizes, clients = torch.tensor([MOST, 250, 31, 30, 1]), torch.tensor([80, 3, 5, 1, 9])
    examples = torch.arange(int(sizes.sum())) * 7
    task = Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), 3, batch_size)
    given = (task, examples, sizes, client_keys(At(3, 2, 1), clients))
    slots = torch.tensor([0, 0, 1, 2, 2, 3, 4]) if rows else None
    plain, found = Schedule(*given, slots), Schedule(*given, slots, in_c=True)
    assert found._native is not None
    assert torch.equal(plain.drawn, found.drawn)
    for first, last, active in [*plain.segments(), (0, max(plain.steps) + 2, len(plain.steps))]:
        for one, other in zip(plain._at_here(first, last, active), found._at_in_c(first, last, active), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
def test_large_clients_are_drawn_by_numpy() -> None:
    sizes, keys = torch.tensor([MOST + 1, 3]), client_keys(At(0, 1, 0), torch.tensor([4, 2]))
    task = Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), 1, 10)
    assert Schedule(task, torch.arange(MOST + 4), sizes, keys, in_c=True)._native is None


@pytest.mark.parametrize("draw", ["_at", "_at_here"])
def test_who_is_done_gets_the_last_batch_again(draw: str) -> None:
    sizes, clients = torch.tensor([9, 7, 2]), torch.tensor([8, 3, 1])
    examples = torch.arange(18)
    task = Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), 2, 4)
    schedule = Schedule(task, examples, sizes, client_keys(At(3, 2, 1), clients))
    assert schedule.steps == [6, 4, 2]
    indices, mask, keys = getattr(schedule, draw)(1, 6, 3)
    for job, (first, n) in enumerate(((0, 9), (9, 7), (16, 2))):
        own = examples[first : first + n]
        batches = list(one_client(task, own, own, client_keys(At(3, 2, 1), clients)[job].item()))
        for at, step in enumerate(range(1, 6)):
            wanted = batches[min(step, len(batches) - 1)]
            assert indices[at, job][mask[at, job]].tolist() == wanted.x.tolist()
            assert keys[at, job] == wanted.key


@pytest.mark.parametrize(
    ("name", "fine", "few"),
    [
        ("fedavg", {11, 10, 6, 2}, {11, 8, 2}),
        ("fedavg momentum", {11, 10, 6, 2}, {11, 8, 2}),
        ("feddane", {11, 10, 6, 2}, {11, 8, 2}),
        ("fedova", {33, 30, 18, 6}, {33, 32, 8}),
    ],
)
def test_a_coarse_stack_has_few_heights_and_the_same_results(
    name: str, fine: set[int], few: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; clients of eleven different sizes, with four different numbers of steps, leave the stack."""
    data = toy_data(187, inputs=12)
    federation = fedge.Federation(data, np.split(np.arange(187), np.cumsum(np.arange(12, 22))))
    algorithm = algorithms(False)[name]
    heights: dict[bool, set[int]] = {False: set(), True: set()}
    found = []
    for coarse in (False, True):

        class Seen(Stacked):
            def __init__(self, *args: Any, coarse: bool, now: bool = coarse) -> None:
                super().__init__(*args, coarse=now)
                fold = self.step.fold

                def noted(sent: Any, carry: Any, groups: Any, row: Tensor) -> Any:
                    heights[now].add(len(row))
                    return fold(sent, carry, groups, row)

                self.step.fold = noted  # type: ignore[assignment]

        monkeypatch.setattr(folding, "Stacked", Seen)
        found.append(fedge.train(algorithm, federation, rounds=2, link=Simulator(algorithm, federation, chunk=50)))
    plainly = fedge.train(algorithm, federation, rounds=2, link=Loopback(algorithm, federation))
    assert max(close(plainly.params, run.params) for run in found) < 1e-12
    assert heights == {False: fine, True: few}


def test_rare_shapes_are_recorded_and_not_compiled() -> None:
    """Until they are an eighth of all steps, or many: to compile takes longer than it saves."""
    made: list[tuple[int, bool]] = []

    class Fake(Traced):
        def _record(self, args: tuple[Any, ...], compile: bool) -> Any:
            made.append((len(args[1]["x"]), compile))
            return lambda *leaves: [leaves[0] + leaves[1]]  # sent and carry come first

    traced = Fake(lambda sent, carry, batch, row: {"x": carry["x"] + sent["a"]["x"]}, compile=True)

    def steps(height: int, count: int) -> None:
        x = torch.zeros(height)
        batch = Batch(x, x, torch.ones(height, dtype=torch.bool), torch.zeros(height, dtype=torch.long))
        *_, carry = traced.fold({"a": {"x": x + 1}}, {"x": x}, [[batch] * count], torch.zeros(height))
        assert carry is not None
        assert torch.equal(carry["x"], torch.full((height,), float(count)))

    steps(8, 700)
    assert made == [(8, True)]
    for _ in range(4):
        steps(2, 20)  # 80 of 780: less than an eighth
    assert made == [(8, True), (2, False)]
    steps(2, 40)
    steps(2, 20)  # 120 of 820 before this one
    assert made == [(8, True), (2, False), (2, True)]
    steps(8, 200_000)
    for _ in range(4):
        steps(3, 5000)
    assert made[3:] == [(3, False)]
    steps(3, 10)
    steps(3, 10)  # more than 20,000 before this one
    assert made[4:] == [(3, True)]


def test_forward_mode_is_safe_in_many_threads() -> None:
    """Products with the Gauss-Newton matrix by many workers at once; torch itself keeps one state for all threads."""
    federation = problem(True)
    algorithm = algorithms(True)["fisher l-bfgs, product"]
    link = Simulator(algorithm, federation, chunk=1, workers=8)
    found = fedge.train(algorithm, federation, rounds=3, link=link)
    expected = fedge.train(algorithm, federation, rounds=3, link=Simulator(algorithm, federation, chunk=100))
    assert close(found.params, expected.params) < 1e-10


def test_workers_do_not_wait_for_each_other_for_ever() -> None:
    """Garbage is collected while torch holds its generator's lock, and other threads run meanwhile."""
    hammer = """
import gc, threading, time
from fedge.engine.clients.run_task import drawn

kept = []
gc.callbacks.append(lambda phase, info: time.sleep(0.001))
gc.set_threshold(10)
threads = [threading.Thread(target=lambda: kept.extend(drawn() for _ in range(100)), daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(kept))
"""
    done = subprocess.run([sys.executable, "-c", hammer], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["400"]


def test_a_compiled_step_with_other_results_is_refused() -> None:
    before = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.tensor(1)]
    expected = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.tensor(2)]
    check_same(before, expected, [torch.full((3,), 1.0004), expected[1] + 1e-12, torch.tensor(2)])
    for place, wrong in (
        (0, torch.zeros(3)),
        (1, expected[1] + 1e-5),
        (2, torch.tensor(1)),
        (0, torch.full((3,), 1.4)),
    ):
        found = [*expected]
        found[place] = wrong
        with pytest.raises(RuntimeError, match="other results"):
            check_same(before, expected, found)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_step_parted_for_the_compiler_is_the_same_step(factor: float | None) -> None:
    """Products are added outside, step sizes are inputs; with a factor on the step as without."""
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, 5, generator=g), torch.randn(3, 4, generator=g)
    x, y = torch.randn(3, 6, 5, generator=g), torch.randn(3, 6, 4, generator=g)
    by = torch.tensor(1.0 if factor is None else factor)

    def step(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor, by: Tensor) -> list[Tensor]:
        gap = torch.bmm(x, weight.mT) + bias.unsqueeze(1) - y
        slopes = [torch.bmm(gap.mT, x), gap.sum(1)]
        slopes = slopes if factor is None else [by * slope for slope in slopes]
        return [torch.add(old, slope, alpha=-0.1) for old, slope in zip((weight, bias), slopes, strict=True)]

    expected = step(weight, bias, x, y, by)
    graph = make_fx(step)(weight, bias, x, y, by)
    rest = split_updates(graph, range(2))
    assert len(rest.updates) == 1
    assert rest.numbers == [-0.1]
    assert "0.1" not in graph.code
    found = [leaf.clone() for leaf in (weight, bias)]
    factors = graph(*found, x, y, by, torch.tensor(-0.1))
    (one,) = rest.updates
    found[one.which].baddbmm_(*factors, alpha=one.alpha)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-6
    assert float((found[1] - bias).abs().max()) > 0.1


def test_a_compiled_step_is_shared_by_runs_that_differ_in_their_step_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch, "compile", lambda graph, **_: made.append(graph) or graph)
    monkeypatch.setattr(captured, "_COMPILED", {})

    def graph(lr: float, constant: float) -> Any:
        held = torch.tensor([constant, 2.0])
        found = make_fx(lambda w, x: [torch.add(w, held * x, alpha=-lr)])(torch.ones(2), torch.ones(2))
        split_updates(found, range(1))
        return found

    leaves = [torch.ones(2), torch.ones(2)]
    first = captured.compiled(graph(0.1, 1.0), leaves)
    assert captured.compiled(graph(0.2, 1.0), leaves) is first
    assert captured.compiled(graph(0.2, 3.0), leaves) is not first, "another constant is another step"
    assert captured.compiled(graph(0.1, 1.0), [leaf.double() for leaf in leaves]) is not first
    assert len(made) == 3


class Skipping(nn.Module):
    """Not a chain: torch.fx looks into it whenever a handle is made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.conv(x)).flatten(1))


def test_modules_are_looked_into_before_the_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch.fx traces, every module of the process is patched: one that a worker calls would fail at random."""
    seen, looked = set(), written.read

    def look(module: nn.Module) -> Any:
        seen.add(threading.current_thread())
        return looked(module)

    monkeypatch.setattr(written, "read", look)
    federation = problem(True)
    algorithm = fedge.FedAvg(Skipping().double(), epochs=1, batch_size=4)
    link = Simulator(algorithm, federation, workers=3, way="single")
    fedge.train(algorithm, federation, rounds=2, link=link)
    assert len(link.pool._pool._threads) > 1
    assert seen == {threading.main_thread()}


def test_a_link_of_another_algorithm_is_refused() -> None:
    federation = problem(False)
    one, other = algorithms(False)["fedavg"], algorithms(False)["fedavg"]
    with pytest.raises(ValueError, match="the link was made for another FedAvg"):
        fedge.train(one, federation, rounds=1, link=Simulator(other, federation))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "tf32"}, "precision is 'tf32', which is for CUDA devices"),
        ({"device": "cuda:99"}, "device is 'cuda:99', torch has here: cpu"),
        ({"device": "gpu"}, "device is 'gpu', it must be"),
        ({"chunk": 0}, r'chunk is 0, it must be a whole number of at least 1, or None \("none" in a file\)$'),
    ],
)
def test_what_a_device_does_not_have_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.train(algorithms(False)["fedavg"], problem(False), rounds=1, engine=fedge.Engine(**options))


def test_convolutions_are_not_compiled_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="compile is for CUDA devices, and on a CPU for models without convolutions"):
        fedge.train(algorithms(True)["fedavg"], problem(True), rounds=1, engine=fedge.Engine(compile=True))


def test_the_engine_s_options_are_train_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    start = Simulator.__init__

    def noted(self: Simulator, *args: Any, **options: Any) -> None:
        made.append(options)
        start(self, *args, **options)

    monkeypatch.setattr(Simulator, "__init__", noted)
    fedge.train(
        algorithms(True)["fedavg"], problem(True), rounds=1, engine=fedge.Engine(chunk=2, workers=1, device="auto")
    )
    assert made[0]["chunk"] == 2
    assert made[0]["workers"] == 1
