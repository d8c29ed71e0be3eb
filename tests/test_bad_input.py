"""What people and files can get wrong ends in one line: the value, the limit, the remedy; never in a traceback."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import tracemalloc
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedge
from fedge import toml
from fedge.checks import at_least_one, brief, positive
from fedge.cli.app import app
from fedge.data import DataError, cifar10
from fedge.data.files import members
from fedge.data.mfcc import RATE, samples
from fedge.engine import Loopback
from fedge.engine.links import wire
from fedge.experiment.values import convert
from tests.cases import ragged, toy_data, toy_model

CALLS = {
    ("--set", "algorithm.lr=1e39"): "lr is 1e+39, it must be a finite number of at most 3e+38",
    ("--set", "algorithm.lr=nan"): "lr is nan, it must be a finite number",
    ("--set", f"algorithm.lr={10**400}"): "it must be a finite number of at most 3e+38",
    ("--set", f"algorithm.batch_size={2**63}"): "batch_size is 9223372036854775808, it must be at most 2147483647",
    ("--set", f"train.rounds={2**63}"): "it must be at most 2147483647",
    ("--set", "algorithm.².lr=1"): "--set algorithm: unknown key '²'",
    ("--set", f"algorithm.{'9' * 5000}.lr=1"): "--set algorithm: unknown key",
    ("--set", "a" + ".a" * 3000 + "=1"): "expected key=value",
    ("--set", 'model.name="m\\u0000.py:Net"'): "name is 'm\\x00.py:Net', it must be one of",
    ("--set", "train.rounds=" + "[" * 3000 + "]" * 3000): "it is nested too deep",
    ("--set", "train.rounds=" + "[" * 60 + "]" * 60): "it is nested more than 50 deep",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", CALLS, ids=lambda words: words[1][:30])
def test_settings_that_cannot_be(here: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["run", "--no-report", "--set", "train.rounds=1", *words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert CALLS[words] in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert not (here / "runs").exists()


def test_whole_numbers_that_no_tensor_takes_are_numbers_all_the_same(here: Path) -> None:
    """The run ends as one with 1e23 would; it was an OverflowError."""
    assert type(convert(10**23, float)) is float
    assert type(convert(3, float)) is int
    words = ["run", "--no-report", "--set", "train.rounds=1", "--set", f"algorithm.weight_decay={10**23}"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "is not finite" in result.output


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 3000 + "]" * 3000,
        "a" + ".a" * 3000 + " = 1",
        "[a" + ".a" * 3000 + "]",
        "a = " + "{a = " * 300 + "1" + "}" * 300,
    ],
    ids=["lists", "keys", "tables", "inline"],
)
def test_files_nested_without_end(here: Path, text: str) -> None:
    Path("deep.toml").write_text(f"{text}\n")
    result = CliRunner().invoke(app, ["run", "deep.toml"])
    assert result.exit_code == 2
    assert "deep.toml is not TOML: it is nested" in result.stderr


@pytest.mark.parametrize("word", ["nan", "inf", "1e300"])
def test_times_without_end(here: Path, word: str) -> None:
    for words in (
        ["run", "--rank-timeout", word],
        ["deploy", "local", "--deadline", word],
        ["reproduce", "noniid", "--minutes", word],
    ):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 2
        assert "is not a number of at most 1e+08" in " ".join(result.stderr.replace("│", " ").split())


def test_toml_reads_what_it_should() -> None:
    assert toml.loads("a.b = [[1], [2]]") == {"a": {"b": [[1], [2]]}}


def test_numbers_are_checked_and_named_briefly() -> None:
    for value in (10**400, -(10**400), float("inf"), 4e38, torch.tensor(float("nan")), "1", None, True):
        with pytest.raises(ValueError, match=r"^x is .{1,110}, it must be"):
            positive("x", value)
    with pytest.raises(ValueError, match=r"^x is a number of 66439 bits, it must be at most"):
        at_least_one("x", 10**20000)
    assert brief("a" * 10**6) == "'" + "a" * 99 + "..."
    positive("x", 10**30)


# Damaged files


def clip() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.arange(RATE, dtype="<i2").tobytes())
    return buffer.getvalue()


def test_a_damaged_wav_is_one_line() -> None:
    """Every byte of the header, and pieces of all lengths."""
    good, draw = clip(), random.Random(0)
    assert samples("x.wav", good) is not None
    refused = 0
    for at in range(44):
        for value in (0, 1, 127, 128, 255, draw.randrange(256)):
            damaged = bytearray(good)
            damaged[at] = value
            refused += _reads(bytes(damaged))
    for end in [*range(60), 1000, len(good) - 1]:
        refused += _reads(good[:end])
    for _ in range(300):
        refused += _reads(good[:12] + draw.randbytes(draw.randrange(60)))
    assert refused > 400


def _reads(content: bytes) -> bool:
    try:
        samples("x.wav", content)
    except DataError as error:
        return "x.wav" in str(error)
    return False


def archive(path: Path, files: list[tuple[str, int]], pax: dict[str, str] | None = None) -> Path:
    """Zeros under these names, in a tar file of few bytes."""
    with gzip.open(path, "wb", 9) as zipped, tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, size in files:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = size, pax or {}
            tar.addfile(member, _Zeros(size))  # type: ignore[arg-type]
    return path


class _Zeros:
    def __init__(self, left: int) -> None:
        self.left = left

    def read(self, size: int) -> bytes:
        size = min(size, self.left)
        self.left -= size
        return bytes(size)


NAMES = {f"data_batch_{number}.bin": "" for number in range(1, 6)} | {"test_batch.bin": ""}
BOMBS = {
    "unknown files": ([(f"more-{number}", 3 << 20) for number in range(6)], "holds more than 8 MiB"),
    "one name again and again": ([("test_batch.bin", 1 << 20)] * 12, "holds more than 8 MiB"),
    "one large file": ([("cifar-10-batches-bin/test_batch.bin", 2 << 20)], "test_batch.bin has more than 1 MiB"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_archive_that_unpacks_to_gigabytes_is_refused_in_little_memory(
    tmp_path: Path, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "BATCH", 1 << 20)  # the real limits are 32 and 256 times that
    monkeypatch.setattr(cifar10, "ALL", 8 << 20)
    files, words = BOMBS[bomb]
    path = archive(tmp_path / "cifar-10-binary.tar.gz", files)
    assert path.stat().st_size < 1 << 15
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words):
            cifar10.parse(path, NAMES, {})
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", [("x", 1)], {"comment": "a" * (3 << 20)})
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="a header of it asks for"):
        list(members(path, most=1 << 20))
    assert [name for name, _ in members(path)] == ["x"]


# Partitions and drops


def test_an_example_belongs_to_a_client_once() -> None:
    data = toy_data()
    fedge.Federation(data, [[0, 1, 2], [2, 3]])  # two clients may have the same example
    with pytest.raises(ValueError, match=r"client 1 has index 5 more than once \(2 such indices in all\).*np\.unique"):
        fedge.Federation(data, [[0, 1, 5], [5, 3, 5, 5]])


def test_the_reason_of_a_drop_is_short(tmp_path: Path) -> None:
    """A client may answer for as many rows as its message can hold."""

    class Talker(Loopback):
        def client(self, client, at, ask, request):
            answer = wire.decode(super().client(client, at, ask, request))
            return wire.encode({10**9 + row: [] for row in range(100)} if client == 2 else answer)

    algorithm, federation = fedge.FedAvg(fedge.models.mlp(6, (2000,), 3), epochs=1), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=1, link=Talker(algorithm, federation))
    (drop,) = run.history[0]["dropped"]
    assert drop["client"] == 2
    assert drop["reason"].startswith("answered rows [1000000000,")
    assert len(drop["reason"]) == 500


def test_a_model_that_no_memory_holds_is_one_line() -> None:
    done = CliRunner().invoke(app, ["run", "--set", "model.hidden=[2147483648]", "--set", "train.rounds=1"])
    assert done.exit_code == 2
    assert done.output == "Error: model: there is no memory for mlp of this size: make it smaller\n"


def test_names_in_files_do_not_steer_the_terminal(tmp_path: Path) -> None:
    """Words of a file of devices are no mark-up, and no escape sequences."""
    file = tmp_path / "devices.csv"
    file.write_text("kind,flops,down,up\n[/red]\x1b[2J,1e9,1e6,1e6\n[bold]b,2e9,1e6,1e6\n")
    done = CliRunner().invoke(app, ["edge", "show", "--set", f"edge.file={file}"])
    assert done.exit_code == 0, done.output
    assert "[/red]" in done.output
    assert "\x1b[2J" not in done.output


# Run folders that somebody changed

FILES = {
    "rounds.jsonl": ["[" * 100_000, '{"round": "<script>", "test_accuracy": 1}', '{"round": 1, "test_accuracy": "x"}'],
    "ledger.jsonl": ["[" * 100_000 + "\n{}", '{"round": [], "up": {}}', '{"round": 1, "up": "x", "down": 3}'],
    "clients.json": ["[" * 100_000, '{"labels": [["<script>"]]}', '{"clients": "x", "labels": [[1, 2]]}', "[]"],
    "summary.json": ["[" * 100_000, '{"final_rounds": {}, "algorithm": []}', '{"seconds": "x"}', "7"],
    "config.toml": ["a = " + "[" * 3000, "data = 3", "\0"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FILES.items() for text in texts])
def test_a_report_on_a_crafted_folder_is_a_page_or_one_line(here: Path, name: str, text: str) -> None:
    algorithm = fedge.FedAvg(toy_model(), epochs=1)
    fedge.train(algorithm, ragged(toy_data()), rounds=2, out="run")
    Path("run", name).write_text(f"{text}\n")
    result = CliRunner().invoke(app, ["report", "run"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2)
    if result.exit_code:
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1


def test_a_number_that_no_float_holds_is_no_result(here: Path) -> None:
    """Python's whole numbers have no end, and a crafted record may hold one of hundreds of digits."""
    fedge.train(fedge.FedAvg(toy_model(), epochs=1), ragged(toy_data()), rounds=2, out="run")
    lines = Path("run", "rounds.jsonl").read_text().splitlines()
    changed = json.loads(lines[1]) | {"test_accuracy": 10**400, "test_own": 10**400}
    Path("run", "rounds.jsonl").write_text(f"{lines[0]}\n{json.dumps(changed)}\n")
    assert len(fedge.results("run")) == 1


def _changed(path: Path, **more: object) -> str:
    return json.dumps(
        json.loads(path.read_text().splitlines()[-1] if path.suffix == ".jsonl" else path.read_text()) | more
    )


LIES: list[tuple[str, dict[str, object]]] = [
    *[("summary.json", {"final_rounds": one}) for one in ("x", [], [1], "\ud800", 1e308, 10**400, {}, True, -3)],
    *[("summary.json", {"algorithm": one}) for one in ("a\x1b[2J\x9b", "\ud800x", ["\ud800"], 7)],
    *[("summary.json", {"diverged": one}) for one in ("\x1b[2J", "\ud800x")],
    *[("summary.json", {name: 1e308}) for name in ("final_accuracy", "final_loss", "up_bytes", "seconds")],
    *[("rounds.jsonl", {name: 1e308}) for name in ("test_accuracy", "test_loss", "up_bytes", "seconds", "joules")],
    ("rounds.jsonl", {"test_\x1b[2J\ud800": 0.5}),
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "s"
    settings = ["train.rounds=2", "train.seeds=[0, 1]", "algorithm=[{name='fedavg'}]"]
    done = CliRunner().invoke(
        app, ["run", "--no-report", "--quiet", "--out", str(folder), *(f"--set={one}" for one in settings)]
    )
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("number", range(len(LIES)))
def test_a_look_at_a_crafted_sweep_is_a_table_or_one_line(number: int, sweep: Path) -> None:
    """Its words do not steer the terminal either."""
    name, lie = LIES[number]
    files = [run / name for run in sorted(sweep.iterdir()) if run.is_dir()]
    before = {file: file.read_text() for file in files}
    try:
        for file in files:
            kept = before[file].splitlines()[:-1] if file.suffix == ".jsonl" else []
            file.write_text("\n".join([*kept, _changed(file, **lie)]) + "\n")
        for more in ([], ["--json"]):
            found = CliRunner().invoke(app, ["sweep", "show", str(sweep), *more])
            assert found.exit_code == 0, (found.output, found.exception)
            assert "\x1b[2J" not in found.output
    finally:
        for file, text in before.items():
            file.write_text(text)
