"""The loaders on small files in the official formats: what is right loads, what is not is refused with the reason."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedge
from fedge.data import DataError, cifar10, fashion_mnist, hold_out
from fedge.data.idx import parse_idx
from fedge.data.pickles import load_arrays
from fedge.data.places import home
from fedge.data.split import stratified

from . import official

# Fashion-MNIST


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_loads_zipped_and_plain(tmp_path: Path, zipped: bool) -> None:
    checksums = official.fashion(tmp_path / "fashion_mnist", zipped)
    data = fashion_mnist.parse(fashion_mnist.files(fashion_mnist.find(tmp_path)), checksums)
    assert (len(data.train_x), len(data.test_x), data.classes) == (30, 10, 10)
    assert data.train_x.shape[1:] == (1, 28, 28)
    assert data.train_y[:12].tolist() == [*range(10), 0, 1]
    first = np.random.default_rng(0).integers(0, 256, (30, 28, 28))[0]
    assert torch.allclose(data.train_x[0, 0] * 255, torch.from_numpy(first).float(), atol=1e-4)


def test_fashion_in_a_folder_of_small_files_is_not_the_official_one(tmp_path: Path) -> None:
    official.fashion(tmp_path)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz is not the official file.*md5 \w+, expected f4a87"
    ):
        fedge.data.load("fashion_mnist", str(tmp_path))


def test_fashion_cut_anywhere_is_refused(tmp_path: Path) -> None:
    checksums = official.fashion(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="t10k-images"):
            fashion_mnist.parse(fashion_mnist.files(tmp_path), checksums)


def test_fashion_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    checksums = official.fashion(tmp_path, zipped=False)
    path = tmp_path / "train-labels-idx1-ubyte"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is not the official file"):
        fashion_mnist.parse(fashion_mnist.files(tmp_path), checksums)


def test_fashion_with_a_file_missing_is_refused(tmp_path: Path) -> None:
    official.fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"):
        fedge.data.load("fashion_mnist", str(tmp_path))


@given(st.binary(max_size=40))
def test_idx_never_takes_arbitrary_bytes(content: bytes) -> None:
    try:
        found = parse_idx("x", content, axes=1)
    except DataError:
        return
    assert content[:4] == b"\0\0\x08\x01"
    assert len(found) == len(content) - 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "2 bytes, fewer than an idx header"),
        (b"\0\0\x0d\x01" + bytes(8), "no idx file of bytes with 1 axes: it starts with 00000d01"),
        (b"\0\0\x08\x01\0\0\0\x03ab", "2 values, its header says 3"),
    ],
)
def test_idx_says_what_is_wrong(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        parse_idx("x", content, axes=1)


# CIFAR-10


def _cifar(place: Path) -> fedge.data.Data:
    binary = {name: official.md5(content) for name, content in official.cifar_binary().items()}
    pickled = {name: official.md5(content) for name, content in official.cifar_pickled().items()}
    return cifar10.parse(place, binary, pickled)


def _cifar_places(folder: Path) -> list[Path]:
    """The four forms of the same images."""
    places = []
    for sub, contents in (("bin", official.cifar_binary()), ("py", official.cifar_pickled())):
        (folder / sub).mkdir()
        for name, content in contents.items():
            (folder / sub / name).write_bytes(content)
        kind = {"bin": "binary", "py": "python"}[sub]
        inside = {f"cifar-10-batches-{sub}/{name}": content for name, content in contents.items()}
        places += [folder / sub, official.archive(folder / f"cifar-10-{kind}.tar.gz", inside)]
    return places


def test_all_forms_of_cifar_hold_the_same(tmp_path: Path) -> None:
    batches = official.cifar_rows()
    for place in _cifar_places(tmp_path):
        assert cifar10.find(place) == place
        data = _cifar(place)
        assert (len(data.train_x), len(data.test_x)) == (15, 3)
        assert data.train_x.shape[1:] == (3, 32, 32)
        assert data.test_y.tolist() == batches[5][:, 0].tolist()
        red = torch.from_numpy(batches[0][0, 1:1025].reshape(32, 32)).float()
        assert torch.allclose(data.train_x[0, 0] * 255, red, atol=1e-4)


def test_damaged_cifar_is_refused(tmp_path: Path) -> None:
    folder, packed, *_ = _cifar_places(tmp_path)
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="truncated or damaged"):
        _cifar(packed)
    batch = folder / "data_batch_3.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin is not the official file"):
        _cifar(folder)
    batch.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        _cifar(folder)


def test_an_archive_without_a_batch_is_refused(tmp_path: Path) -> None:
    contents = official.cifar_binary()
    del contents["test_batch.bin"]
    with pytest.raises(DataError, match=r"has no test_batch\.bin"):
        _cifar(official.archive(tmp_path / "cifar-10-binary.tar.gz", contents))


class _Evil:
    def __reduce__(self) -> tuple:
        return print, ("this must never be printed",)


def test_a_pickle_cannot_run_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"it wants to load (builtins|__builtin__)\.print"):
        load_arrays("x", pickle.dumps({"data": _Evil()}))
    assert capsys.readouterr().out == ""


@settings(deadline=5000)  # ms
@given(st.binary(max_size=60))
def test_a_damaged_pickle_is_an_error_of_ours(content: bytes) -> None:
    with contextlib.suppress(DataError):
        load_arrays("x", content)


@pytest.mark.parametrize(
    "content", [{"data": np.zeros((2, 9), np.uint8), "labels": [0, 1]}, {"labels": [1]}, [1], {"data": 1, "labels": 5}]
)
def test_a_pickle_of_something_else_is_refused(content: object) -> None:
    with pytest.raises(DataError, match="x "):
        cifar10.parse_pickle("x", pickle.dumps(content, protocol=2))


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="3074 bytes, no whole number of rows of 3073"):
        cifar10.parse_rows("x", bytes(3074))


# Places


def test_a_folder_that_is_not_there_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a folder does not want the system's copy instead."""
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"FEDGE_DATA is .*nowhere, which is no folder: fill it .*name the folder"):
        fedge.data.load("fashion_mnist")
    (tmp_path / "nowhere").write_text("a file")
    with pytest.raises(DataError, match=r"FEDGE_DATA is .*nowhere, which is no folder: name the folder"):
        fedge.data.load("fashion_mnist")


def test_a_data_set_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"looked in .*fedge data get cifar10.*FEDGE_DATA=FOLDER.*--from PATH"):
        fedge.data.load("cifar10")
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        fedge.data.load("cifar10", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="has no files of cifar10"):
        fedge.data.load("cifar10", str(tmp_path))
    other = tmp_path / "other.zip"
    other.write_bytes(b"")
    with pytest.raises(DataError, match=r"other\.zip is no file of cifar10"):
        fedge.data.load("cifar10", str(other))
    with pytest.raises(ValueError, match="digits is part of the library"):
        fedge.data.load("digits", str(tmp_path))


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDGE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "fedge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "fedge"
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "mine"))
    assert home() == tmp_path / "mine"


# Parts


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.data())
def test_stratified_parts_have_the_shares_of_the_whole(labels: list[int], draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, len(labels) - 1))
    y = np.array(labels)
    marked = stratified(y, count, seed=1)
    assert marked.sum() == count
    for label in set(labels):
        share = count * (y == label).mean()
        assert abs((marked & (y == label)).sum() - share) < 1
    assert np.array_equal(marked, stratified(y, count, seed=1))


def test_validation_comes_from_the_training_set_alone() -> None:
    whole, part = fedge.data.load("digits"), fedge.data.load("digits", validation=0.2)
    assert len(part.train_x) + len(part.test_x) == len(whole.train_x)
    rows = {row.numpy().tobytes() for row in whole.train_x}
    assert {row.numpy().tobytes() for row in torch.cat([part.train_x, part.test_x])} == rows
    tested = {row.numpy().tobytes() for row in whole.test_x} - rows
    assert tested
    assert not tested & {row.numpy().tobytes() for row in part.test_x}


def test_impossible_validation_parts_are_refused() -> None:
    data = fedge.data.load("digits")
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"validation is {share}"):
            hold_out(data, share)
    numbers = fedge.data.from_arrays([[0.0]] * 4, [0.1] * 4, [[0.0]], [0.1])
    halves = hold_out(numbers, 0.5)
    assert (len(halves.train_y), len(halves.test_y)) == (2, 2), "of a regression, a share of all examples"


def test_standardised_inputs_have_mean_0_and_deviation_1_per_channel_of_the_training_set() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50, 3, 4, 4, generator=generator) * torch.tensor([1.0, 5.0, 0.0]).view(3, 1, 1) + 2
    y = torch.arange(50) % 2
    data = fedge.data.standardise(fedge.data.Data(x, y, x[:10] + 1, y[:10], 2))
    mean, deviation = x.double().mean((0, 2, 3)), x.double().std((0, 2, 3), correction=0)
    wanted = (x[:10].double() + 1 - mean.view(3, 1, 1)) / torch.where(deviation > 0, deviation, 1.0).view(3, 1, 1)
    torch.testing.assert_close(data.test_x, wanted.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(data.train_x.std((0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]))
    tokens = fedge.data.Data({"t": torch.arange(8).view(4, 2)}, y[:4], {"t": torch.arange(4).view(2, 2)}, y[:2], 2)
    assert torch.equal(fedge.data.standardise(tokens).train_x["t"], torch.arange(8).view(4, 2))


def test_standardised_is_a_field_of_the_data_table() -> None:
    plain, scaled = fedge.data.load("digits"), fedge.data.load("digits", validation=0.2, standardised=True)
    assert len(scaled.test_y) == 287
    assert abs(scaled.train_x.mean()) < 1e-5 < plain.train_x.mean()
