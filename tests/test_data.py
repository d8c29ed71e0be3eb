"""Data sets: checks at the border, conversion of what users hold, the embedded digits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedge.data import Data, from_arrays, from_datasets, load


class Items(Dataset[tuple[Any, Any]]):
    """A data set over a list of items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def make(**changes: Any) -> Data:
    """Build valid data, with some fields replaced."""
    fields: dict[str, Any] = {
        "train_x": torch.zeros(4, 2),
        "train_y": torch.tensor([0, 1, 2, 1]),
        "test_x": torch.zeros(2, 2),
        "test_y": torch.tensor([2, 0]),
        "classes": 3,
    }
    return Data(**(fields | changes))


def nan_at(row: int) -> Tensor:
    x = torch.zeros(4, 2)
    x[row, 1] = torch.nan
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": torch.tensor([0, 1, 2])}, "train_x has 4 examples and train_y 3"),
        ({"test_x": torch.zeros(0, 2), "test_y": torch.tensor([]).long()}, "test_x has 0 examples"),
        ({"train_y": torch.tensor([0, 1, 3, 1])}, r"train_y\[2\] is 3, .* \[0, 3\)"),
        ({"test_y": torch.tensor([2, -1])}, r"test_y\[1\] is -1"),
        ({"train_x": nan_at(2)}, "NaN or infinite values in 1 of 4 rows, the first is row 2"),
        ({"test_x": torch.full((2, 2), torch.inf)}, "test_x .* 2 of 2 rows, the first is row 0"),
        ({"test_x": torch.zeros(2, 3)}, r"train_x has shape \(2,\), of test_x \(3,\)"),
        ({"test_x": torch.zeros(2, 2).double()}, "test_x is torch.float64"),
        ({"train_y": torch.zeros(4)}, "train_y is torch.float32 but classes is 3"),
        ({"train_y": torch.zeros(4, dtype=torch.int32)}, "labels must be int64"),
        ({"train_y": torch.zeros(4, 1).long()}, r"shape \(4, 1\), labels must be \[N\]"),
        ({"classes": 0}, "integer labels but classes is 0"),
        ({"classes": -1}, "classes is -1, must be at least 0"),
        ({"names": ("a", "b")}, "2 names for 3 classes"),
        ({"train_x": torch.tensor(0.0)}, "0-d"),
        ({"test_x": torch.zeros(2, 2, device="meta")}, r"tensors are on \['cpu', 'meta'\]: move all"),
    ],
)
def test_bad_data_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_good_data_is_kept() -> None:
    data = make(names=("a", "b", "c"))
    assert repr(data) == "Data(train=4, test=2, shape=(2,), classes=3)"
    assert data.names == ("a", "b", "c")
    assert data == data
    assert data != make()


def test_regression_has_float_targets_and_no_classes() -> None:
    data = make(train_y=torch.zeros(4, 2), test_y=torch.ones(2, 2), classes=0)
    assert data.classes == 0
    with pytest.raises(ValueError, match=r"train_y has NaN .* row 3"):
        make(train_y=nan_at(3), test_y=torch.ones(2, 2), classes=0)


def test_lists_and_arrays_become_tensors() -> None:
    x = np.arange(6.0).reshape(3, 2)
    data = from_arrays(x, np.array([0, 1, 4], np.uint8), [[1.5, 2.0]], [2])
    assert data.train_x.dtype == data.test_x.dtype == torch.float32
    assert data.train_y.dtype == torch.int64
    assert data.train_x.tolist() == x.tolist()
    assert data.classes == 4
    assert data.values == (0, 1, 2, 4)


def test_classes_are_counted_over_both_parts() -> None:
    assert from_arrays([[0.0]], [0], [[0.0]], [7]).classes == 2
    assert from_arrays([[0.0]], [0], [[0.0]], [7], classes=10).classes == 10
    assert from_arrays([[0.0]], [0.5], [[0.0]], [1.5]).classes == 0


def test_dtypes_are_not_changed_silently() -> None:
    pixels = torch.full((1, 2), 255, dtype=torch.uint8)
    assert from_arrays(pixels, [0], pixels, [0]).train_x.dtype == torch.uint8
    assert from_arrays(pixels.numpy(), [0], pixels.numpy(), [0]).train_x.max() == 255
    double = torch.zeros(1, 2, dtype=torch.float64)
    assert from_arrays(double, [0], double, [0]).train_x.dtype == torch.float64


def test_odd_arrays_are_taken_without_warnings() -> None:
    fixed = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    fixed.setflags(write=False)
    swapped = fixed.astype(">f4")[::-1]
    data = from_arrays(fixed, [0, 1], swapped, [1, 0])
    assert data.test_x.tolist() == [[3.0, 4.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0], [1.0, 2.0]], [0, 1], "train_x is ragged"),
        ([[1.0], [2.0]], ["cat", "dog"], "train_y has dtype .* encode it as integers"),
        ([[1.0], [2.0]], [[0, 1], [0, -2]], r"train_y\[1, 1\] is -2"),
    ],
)
def test_bad_arrays_are_refused(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_arrays(x, y, [[1.0]], [[0, 1]] if np.ndim(y) == 2 else [0])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ma.masked_array([[1.0], [2.0]], [[True], [False]]), [0, 1], "train_x is a masked array"),
        (torch.eye(2).to_sparse(), [0, 1], "train_x is a sparse or nested tensor"),
        ([[1.0], [2.0]], np.array([0, 2**63 + 5], np.uint64), r"train_y has labels of 2\^63 and more"),
        ([[1.0], [2.0]], [], "train_y has 0 labels"),
    ],
    ids=range(4),
)
def test_arrays_that_would_be_read_as_something_else_are_refused(x: Any, y: Any, message: str) -> None:
    y = torch.tensor(y, dtype=torch.long) if isinstance(y, list) else y
    with pytest.raises(ValueError, match=message):
        from_arrays(x, y, [[1.0]], [0])


def test_a_masked_array_that_hides_nothing_is_an_array() -> None:
    assert from_arrays(np.ma.masked_array([[1.0], [2.0]]), [0, 1], [[1.0]], [0]).train_x.tolist() == [[1.0], [2.0]]


def test_datasets_are_stacked() -> None:
    train = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 2, 1]))
    test = Items((np.ones(2), 1), (np.zeros(2), np.int64(0)))
    data = from_datasets(train, test)
    assert data.train_x.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert data.train_y.tolist() == [0, 2, 1]
    assert data.test_y.tolist() == [1, 0]
    assert (data.classes, data.test_x.dtype) == (3, torch.float32)
    assert from_datasets(train, test, classes=9).classes == 9


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Items(("picture", 0)), TypeError, r"x of train\[0\] is str, .* ToTensor"),
        (Items((torch.zeros(2), "cat")), TypeError, r"y of train\[0\] is 'cat'"),
        (Items((torch.zeros(2), {"a": 1})), TypeError, "must be a number, a tensor or a numpy array"),
        (Items(torch.zeros(2)), TypeError, r"train\[0\] is Tensor, must be a pair"),
        (Items(), ValueError, "train has 0 examples"),
        (Dataset(), TypeError, "train has no length"),
        (
            Items((torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)),
            ValueError,
            r"train\[2\] has shape \(3,\), train\[0\] has \(2,\)",
        ),
    ],
)
def test_bad_datasets_are_refused(dataset: Dataset[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_datasets(dataset, Items((torch.zeros(2), 0)))


def test_digits_are_the_uci_digits() -> None:
    data = load("digits")
    assert repr(data) == "Data(train=1437, test=360, shape=(1, 8, 8), classes=10)"
    assert data.names == tuple("0123456789")
    assert data.train_x.dtype == torch.float32
    assert (data.train_x.min().item(), data.train_x.max().item()) == (0, 1)
    counts = torch.cat([data.train_y, data.test_y]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    pixels = torch.cat([data.train_x, data.test_x]).double() * 16
    assert int(pixels.sum()) == 561_718


def test_digits_split_is_stratified() -> None:
    data = load("digits")
    share = data.test_y.bincount() / (data.test_y.bincount() + data.train_y.bincount())
    assert torch.allclose(share, torch.tensor(360 / 1797), atol=0.005)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown data set 'digit' \(did you mean 'digits'\?\)"):
        load("digit")


def test_a_name_like_no_other_gets_the_list_and_no_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown data set 'kws' \(did you mean 'speech_commands'\?\)"):
        load("kws")
    with pytest.raises(ValueError, match="unknown data set 'mnist'; known: digits"):
        load("mnist")
