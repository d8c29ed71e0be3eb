"""Several runs at a time: the same results as one after another, whatever ends it.

Most of it is tried with a thread in the place of the processes, which take seconds to start; what is about processes
(their results, signals, their death, errors that have to be sent) is tried with real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.paper.places import entries
from fedge.cli.app import app
from fedge.cli.errors import one_line
from fedge.experiment import ExperimentError
from fedge.sweep import Choices, Entry, Runner, Stopped, Store
from fedge.sweep.halving import TRIALS
from fedge.sweep.processes import LostWorker, _worse, run_in_processes, work_for
from fedge.sweep.store import hold

from . import paper


def reproduce(out: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["reproduce", *options, "--dataset", "fmnist", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output


def thread(processes: int, *about: Any) -> ThreadPoolExecutor:
    """Does what so many processes would do, one unit after another."""
    return ThreadPoolExecutor(1, initializer=work_for, initargs=(processes, *about))


in_a_thread = partial(run_in_processes, start=thread)


def test_several_at_a_time_give_what_one_after_another_gives(tiny: Path, tmp_path: Path) -> None:
    what = ("tune", "noniid", "clients", "--rounds", "2", "--seeds", "1", "--method", "FedAvg", "--method", "FedOVA")
    reproduce(tmp_path / "one", "noniid", "clients", "tune", *what[3:])  # tuning comes first wherever it stands
    said = reproduce(tmp_path / "two", *what, "--jobs", "2")
    for name in ("results.jsonl", TRIALS):
        assert paper.untimed(tmp_path / "two" / name) == paper.untimed(tmp_path / "one" / name)
    for name in ("noniid-fmnist.md", "clients-fmnist.md"):
        pages = [(tmp_path / folder / name).read_text("utf-8") for folder in ("one", "two")]
        assert len({page.split("| cell |")[0] for page in pages}) == 1
    assert said.count("noniid fmnist-l2, FedOVA, seed 0") == 1
    assert "chosen for fmnist, FedOVA" in said
    assert not list((tmp_path / "two" / "runs").iterdir())
    assert "was done" not in reproduce(tmp_path / "two", *what, "--jobs", "2"), "nothing is left to say"


def test_what_diverges_gives_way_to_the_next_best(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.cli.reproduce.run_in_processes", in_a_thread)
    store = Store(tmp_path / TRIALS)
    trials = [{"setting": {"lr": lr}, "rounds": 60, "validation": v} for lr, v in ((1e30, 0.8), (0.1, 0.7))]
    choice = {"kind": "choice", "key": "a", "dataset": "fmnist", "method": "FedAvg", "setting": {"lr": 1e30}}
    store.add({**choice, "trials": trials})
    assert len(Choices([store.path])("fmnist", "FedAvg")) == 2
    reproduce(tmp_path, "noniid", "--rounds", "2", "--seeds", "2", "--method", "FedAvg", "--jobs", "2")
    assert "choice 2" in (tmp_path / "noniid-fmnist.md").read_text("utf-8")


def test_a_wish_to_stop_reaches_all_and_it_goes_on(tiny: Path, tmp_path: Path) -> None:
    wanted, seen = entries("noniid", "fmnist", [0], 40), list[Entry]()
    runner = Runner(tmp_path / "some", "cpu", stop=lambda: bool(seen))
    with pytest.raises(Stopped):
        in_a_thread(runner, wanted, 2, lambda entry, line: seen.append(entry))
    assert seen
    assert len(runner.store.lines) < len(wanted)
    runner.stop = lambda: False
    in_a_thread(runner, [entry for entry in wanted if runner.store.find(entry.key) is None], 2)
    whole = Runner(tmp_path / "whole", "cpu")
    in_a_thread(whole, wanted, 2)
    assert len(whole.store.lines) == len(wanted)
    assert paper.untimed(tmp_path / "some" / "results.jsonl") == paper.untimed(tmp_path / "whole" / "results.jsonl")


def test_one_that_fails_stops_the_others_and_says_why(tiny: Path, tmp_path: Path) -> None:
    first, *others = entries("noniid", "fmnist", [0], 10_000)
    wrong = Entry(**vars(first) | {"config": first.config | {"partition": {**first.config["partition"], "labels": 11}}})
    with pytest.raises(ExperimentError, match="11"):
        in_a_thread(Runner(tmp_path, "cpu"), [wrong, *others], 2)


def test_a_process_that_was_killed_is_named(tiny: Path, tmp_path: Path) -> None:
    def kill(*_: object) -> None:
        os.kill(active_children()[0].pid or 0, signal.SIGKILL)

    wanted = [*entries("noniid", "fmnist", [0], 1)[:1], *entries("noniid", "fmnist", [0], 10_000)]
    with pytest.raises(LostWorker, match="ended without a message"):
        run_in_processes(Runner(tmp_path, "cpu"), wanted, 2, kill)


def test_processes_end_with_the_one_that_began_them(at_work: subprocess.Popen[bytes]) -> None:
    begun = children(at_work)
    assert len(begun) >= 2
    at_work.kill()
    _until(lambda: not any(Path(f"/proc/{child}").exists() for child in begun))


class Sleeper(Entry):
    """A run that does not ask whether to stop."""

    @property
    def key(self) -> str:
        time.sleep(40)
        return "too late"


def test_a_second_interrupt_ends_all_at_once(tiny: Path, tmp_path: Path) -> None:
    asked = iter([False] * 10)

    def second() -> bool:
        if next(asked, None) is None:
            raise KeyboardInterrupt
        return False

    first, other, *_ = (Sleeper(**vars(entry)) for entry in entries("noniid", "fmnist", [0], 1))
    mine = get_context("spawn").Process(target=time.sleep, args=(40,))
    mine.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(Runner(tmp_path, "cpu", stop=second), [first, other], 2)
    assert time.monotonic() - begin < 30
    assert active_children() == [mine], "the processes of others are left alone"
    mine.kill()
    mine.join()


class Odd(Exception):
    """Cannot be sent to another process: it is made of two words."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Failing(Entry):
    @property
    def key(self) -> str:
        raise Odd("no", "luck")


def test_an_error_that_cannot_be_sent_is_told_in_words(tiny: Path, tmp_path: Path) -> None:
    first, *_ = entries("noniid", "fmnist", [0], 1)
    with pytest.raises(RuntimeError, match="Odd: no luck"):
        run_in_processes(Runner(tmp_path, "cpu"), [Failing(**vars(first))], 2)


class Cramped(Entry):
    """A run that finds no memory while a file says that there is company; the file says how often that was."""

    @property
    def key(self) -> str:
        mark = Path(os.environ["COMPANY"])
        with mark.open("a") as file:
            file.write(self.label + "\n")
        if mark.read_text().count(self.label) <= int(os.environ["TIMES"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return super().key


class Once(Entry):
    """A run that finds no memory the first time."""

    @property
    def key(self) -> str:
        mark = Path(os.environ["COMPANY"]).with_name(f"{self.cell} {self.label} {self.seed}")
        if not mark.exists():
            mark.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return super().key


@pytest.fixture
def cramped(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Entry]]:
    """Three runs, the first of which finds no memory so many times."""

    def runs(times: int) -> list[Entry]:
        monkeypatch.setenv("COMPANY", str(tmp_path / "company"))
        monkeypatch.setenv("TIMES", str(times))
        first, *others = entries("noniid", "fmnist", [0], 1)
        return [Cramped(**vars(first)), *others[:2]]

    return runs


def test_what_found_no_memory_beside_others_is_done_afterwards(
    cramped: Callable[[int], list[Entry]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, done = Runner(tmp_path / "out", "cpu"), list[Entry]()
    wanted = cramped(1)
    in_a_thread(runner, wanted, 2, lambda entry, _: done.append(entry))
    assert [entry.label for entry in done][-1] == wanted[0].label
    assert len(done) == len(runner.store.lines) == 3
    assert "1 of 3 had no memory beside others: again, 1 at a time" in caplog.text


def test_what_finds_no_memory_alone_is_an_error_once_all_others_are_done(
    cramped: Callable[[int], list[Entry]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(tmp_path / "out", "cpu")
    never, other, third = cramped(10_000)
    once = Once(**vars(other))
    with pytest.raises(MemoryError, match=f"{never} ran out of memory, with no other run beside it"):
        in_a_thread(runner, [never, once, third], 4)
    assert len(runner.store.lines) == 2, "also what did not fit at first"
    assert "2 of 3 had no memory beside others: again, 1 at a time" in caplog.text
    assert [line["at_a_time"] for line in runner.store.lines] == [3, 1]


def test_half_as_many_at_a_time_where_memory_was_short(
    cramped: Callable[[int], list[Entry]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(tmp_path / "out", "cpu")
    wanted = [Once(**vars(entry)) for entry in entries("noniid", "fmnist", [0, 1], 1)]
    assert len(wanted) >= 4
    cramped(0)
    in_a_thread(runner, wanted[:4], 4)
    assert "4 of 4 had no memory beside others: again, 2 at a time" in caplog.text
    assert [line["at_a_time"] for line in runner.store.lines] == [2] * 4


def test_a_lack_of_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_line():
        raise MemoryError("ran out of memory")
    assert "Error: ran out of memory" in capsys.readouterr().err


def test_what_went_wrong_counts_more_than_a_wish_to_stop() -> None:
    stopped, wrong = Stopped(), ValueError("wrong")
    assert _worse(None, stopped) is stopped
    assert _worse(stopped, wrong) is wrong
    assert _worse(wrong, stopped) is wrong
    assert _worse(wrong, ValueError("too")) is wrong


def test_nothing_is_begun_when_it_is_to_stop_already(tiny: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(Stopped):
        run_in_processes(Runner(tmp_path, "cpu", stop=lambda: True), entries("noniid", "fmnist", [0], 1), 2)
    assert time.monotonic() - begin < 5


def test_an_interrupt_while_processes_begin_is_a_wish_to_stop(tiny: Path, tmp_path: Path) -> None:
    with command(tmp_path / "out", start_new_session=True) as process:
        try:
            _until(lambda: len(children(process)) > 2)  # one of them keeps count of resources
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            said, wrong = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"the same command goes on from here" in said
    assert b"Traceback" not in wrong


def test_a_store_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "some.jsonl")
    store.add({"key": "a"})
    with open(store.path, "rb+") as file:
        hold(file)
        thread = threading.Thread(target=store.add, args=({"key": "b"},))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(store.path.read_text().splitlines()) == 1
    thread.join()
    assert len(Store(store.path).lines) == 2


def test_a_line_after_half_a_line_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "some.jsonl")
    store.add({"key": "a"})
    with open(store.path, "ab") as file:
        file.write(b'{"key": "ha')
    store.add({"key": "b"})
    assert [line["key"] for line in Store(store.path).lines] == ["a", "b"]


def test_one_interrupt_stops_all_with_a_checkpoint(at_work: subprocess.Popen[bytes], tmp_path: Path) -> None:
    at_work.send_signal(signal.SIGINT)
    assert at_work.wait(60) == 130
    assert at_work.stdout is not None
    assert b"the same command goes on from here" in at_work.stdout.read()
    assert len(list(tmp_path.glob("out/runs/*/checkpoint*"))) == 2


@pytest.fixture
def at_work(tiny: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command with two runs that would take hours, both begun."""
    out = tmp_path / "out"
    with command(out) as process:
        try:
            _until(lambda: len(list(out.glob("runs/*/rounds.jsonl"))) == 2)
            yield process
        finally:
            process.kill()


def command(out: Path, **options: Any) -> subprocess.Popen[bytes]:
    what = ["reproduce", "noniid", "--rounds", "100000", "--seeds", "1", "--device", "cpu", "--jobs", "2"]
    words = [sys.executable, "-m", "fedge", *what, "--out", str(out)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def children(process: subprocess.Popen[bytes]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def _until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
