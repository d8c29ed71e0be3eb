"""The federation: a flat index with offsets, counts against a plain loop, clear errors."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedge.data import Data
from fedge.federation import Federation
from fedge.partition import by_group

TRAIN = 20


def make_data(train: int = TRAIN, classes: int = 3) -> Data:
    y = torch.arange(train) % classes
    return Data(torch.zeros(train, 2), y, torch.zeros(1, 2), torch.tensor([0]), classes)


ragged = st.lists(st.lists(st.integers(0, TRAIN - 1), min_size=1, max_size=9, unique=True), min_size=1)


@settings(max_examples=60, deadline=None)
@given(ragged)
def test_every_client_gets_its_examples(clients: list[list[int]]) -> None:
    federation = Federation(make_data(), clients)
    assert federation.clients == len(federation) == len(clients)
    assert [federation.examples(k).tolist() for k in range(len(clients))] == clients
    assert federation.sizes.tolist() == [len(client) for client in clients]
    assert federation.offsets[0] == 0
    assert federation.offsets[-1] == len(federation.index)
    assert federation.index.dtype == federation.offsets.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(ragged)
def test_label_counts_equal_a_plain_loop(clients: list[list[int]]) -> None:
    data = make_data(classes=4)
    counts = [[sum(i % 4 == c for i in client) for c in range(4)] for client in clients]
    result = Federation(data, clients).label_counts()
    assert result.tolist() == counts
    assert result.dtype == torch.int64


def test_lists_arrays_and_tensors_are_equal() -> None:
    rows = np.arange(8, dtype=np.uint8).reshape(4, 2)
    as_array = Federation(make_data(), rows)  # type: ignore[arg-type]
    mixed = Federation(make_data(), [[0, 1], (2, 3), rows[2], torch.tensor([6, 7])])
    assert torch.equal(as_array.index, mixed.index)
    assert torch.equal(as_array.offsets, mixed.offsets)


def test_the_index_is_a_copy() -> None:
    mine = np.array([0, 1])
    federation = Federation(make_data(), [mine])
    mine[0] = 9
    assert federation.examples(0).tolist() == [0, 1]


def test_repr_shows_the_spread() -> None:
    federation = Federation(make_data(), [[0], [1, 2], [3, 4, 5, 6]])
    assert repr(federation) == "Federation(clients=3, examples=7, sizes: min 1, median 2, max 4)"


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], ValueError, "0 clients, at least 1"),
        ([[], []], ValueError, "all 2 clients have no examples, at least 1 needs some"),
        ([[0, 1], [2, 20]], IndexError, r"client 1 has index 20, .* below 20 \(the size of the tr"),
        ([[0], [1], [2, -1]], IndexError, "client 2 has index -1, must be at least 0"),
        ([[0], [0.5]], TypeError, "client 1 has indices of dtype float64"),
        ([[0], [True, False]], TypeError, "client 1 .* bool, .*flatnonzero"),
        ([["a"]], TypeError, "client 0 .* must be integers"),
        ([[[0, 1]]], ValueError, r"client 0 has indices of shape \(1, 2\)"),
        ([0, 1], ValueError, r"shape \(\), must be one-dimensional"),
    ],
)
def test_bad_clients_are_refused(clients: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Federation(make_data(), clients)


@pytest.mark.parametrize("client", [-1, 2])
def test_unknown_client_is_refused(client: int) -> None:
    with pytest.raises(IndexError, match=f"client is {client}, must be at least 0 and below 2"):
        Federation(make_data(), [[0], [1]]).examples(client)


def test_regression_has_no_label_counts() -> None:
    y = torch.zeros(2)
    data = Data(torch.zeros(2, 1), y, torch.zeros(2, 1), y, classes=0)
    with pytest.raises(ValueError, match="classes is 0"):
        Federation(data, [[0], [1]]).label_counts()


def test_a_million_clients() -> None:
    clients = 1_000_000
    indices = list(np.arange(4 * clients).reshape(clients, 4))
    data = make_data(train=4 * clients)
    start = time.perf_counter()
    federation = Federation(data, indices)
    seconds = time.perf_counter() - start
    assert federation.label_counts().sum() == 4 * clients
    assert federation.examples(clients - 1).tolist() == indices[-1].tolist()
    assert set(vars(federation)) == {"data", "index", "offsets", "names", "groups", "left_out", "test"}
    assert not federation.names
    assert not federation.groups
    assert seconds < 10  # well under a second is usual; a quadratic set-up would take hours


def test_clients_without_examples_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(make_data(), [[0], [], [1, 2]] + [[]] * 6, groups=["a", "b", "c"] * 3)
    assert federation.sizes.tolist() == [1, 2]
    assert federation.names == ("0", "2")
    assert federation.groups == ("a", "c")
    assert federation.left_out == ("1", "3", "4", "5", "6", "7", "8")
    assert "7 of 9 clients have no examples and are left out (1, 3, 4, 5, 6, ...)" in caplog.text


def test_owners_name_the_clients_and_must_be_as_many_as_the_examples() -> None:
    owner = ["eve", "ann"] * 10
    federation = Federation(make_data(), by_group(owner))
    assert federation.names == ("ann", "eve")
    assert federation.name(1) == "eve"
    with pytest.raises(ValueError, match="by_group was given 19 owners, the train set has 20 examples"):
        Federation(make_data(), by_group(owner[:19]))
    with pytest.raises(ValueError, match="1 names for 2 clients"):
        Federation(make_data(), [[0], [1]], names=["ann"])
    with pytest.raises(ValueError, match="two clients are called 'ann'"):
        Federation(make_data(), [[0], [1]], names=["ann", "ann"])


def test_test_examples_are_found_by_name() -> None:
    y = torch.arange(TRAIN) % 3
    data = Data(torch.zeros(TRAIN, 2), y, torch.zeros(4, 2), y[:4], 3)
    mine = by_group(["eve", "zoe", "eve", "ann"])
    federation = Federation(data, by_group(["eve", "ann", "bob", "bob"] * 5), test=mine)
    assert federation.test is not None
    assert [one.tolist() for one in federation.test] == [[3], [], [0, 2]]
    with pytest.raises(ValueError, match="by_group was given 4 owners, the test set has 1 examples"):
        Federation(make_data(), [[0]], test=mine)
    with pytest.raises(IndexError, match="test has index 4, must be at least 0 and below 4"):
        Federation(data, [[0]], test=[[4]])
    with pytest.raises(ValueError, match="test has 1 index arrays for 2 clients"):
        Federation(data, [[0], [1]], test=[[0]])


def test_test_arrays_are_as_many_as_the_clients() -> None:
    """Also where the last clients are empty, and left out."""
    data = Data(torch.zeros(TRAIN, 2), torch.arange(TRAIN) % 3, torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="test has 3 index arrays for 2 clients: give one per client"):
        Federation(data, [[0], [1]], test=[[0], [1], [2]])
    with pytest.raises(ValueError, match="test has 2 index arrays for 3 clients"):
        Federation(data, [[0], [1], []], test=[[0], [1]])
    assert Federation(data, [[0], [], [1]], test=[[0], [1], [2]]).test is not None


def test_owners_of_test_examples_alone_are_said(caplog: pytest.LogCaptureFixture) -> None:
    y = torch.arange(TRAIN) % 3
    data = Data(torch.zeros(TRAIN, 2), y, torch.zeros(4, 2), y[:4], 3)
    Federation(data, by_group(["eve", "ann"] * 10), test=by_group(["eve", "zoe", "eve", "ann"]))
    assert "1 owners of test examples have none to train on and are not judged (zoe)" in caplog.text
    caplog.clear()
    Federation(data, by_group(["eve", "ann"] * 10), test=by_group(["eve", "eve", "eve", "ann"]))
    assert not caplog.text
