"""Data from what a user already holds: arrays, tensors, lists or torch data sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from fedge.data.base import Data


def from_arrays(
    train_x: ArrayLike | Tensor,
    train_y: ArrayLike | Tensor,
    test_x: ArrayLike | Tensor,
    test_y: ArrayLike | Tensor,
    classes: int | None = None,
    names: Sequence[str] = (),
) -> Data:
    """Make `Data` from numpy arrays, tensors or nested lists.

    Float64 arrays and lists take torch's default dtype; tensors keep theirs, and integer inputs
    stay integers (nothing is scaled behind your back). Integer labels become int64; floating-point
    ones mean regression. `classes=None` counts up to the largest label of both parts.

    >>> from_arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1])
    Data(train=2, test=1, shape=(1,), classes=2)
    """
    labels = _labels("train_y", train_y), _labels("test_y", test_y)
    return Data(
        train_x=_tensor("train_x", train_x),
        train_y=labels[0],
        test_x=_tensor("test_x", test_x),
        test_y=labels[1],
        classes=_count_classes(*labels) if classes is None else classes,
        names=tuple(names),
    )


def from_datasets(train: Dataset[Any], test: Dataset[Any], classes: int | None = None) -> Data:
    """Make `Data` from two map-style torch data sets whose items are (x, y).

    Every item is read once and stacked, so random transforms are frozen at what they gave.

    >>> from torch.utils.data import TensorDataset
    >>> part = TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    >>> from_datasets(part, part)
    Data(train=3, test=3, shape=(2,), classes=3)
    """
    train_x, train_y = _stack("train", train)
    test_x, test_y = _stack("test", test)
    return from_arrays(train_x, train_y, test_x, test_y, classes)


def _tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is ragged: every row needs the same shape ({error})") from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {array.dtype}, must be numbers: encode it as integers")
    # torch wants native byte order and warns about read-only memory.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    tensor = torch.from_numpy(np.require(native, requirements=["C", "W"]))
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _labels(name: str, values: ArrayLike | Tensor) -> Tensor:
    labels = _tensor(name, values)
    return labels if labels.is_floating_point() else labels.long()


def _count_classes(train_y: Tensor, test_y: Tensor) -> int:
    if train_y.is_floating_point():
        return 0
    largest = [int(y.max()) for y in (train_y, test_y) if y.numel()]
    return max([0, *largest]) + 1


def _stack(part: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{part} has no length: give a map-style Dataset with __len__, or arrays")
    if len(dataset) == 0:
        raise ValueError(f"{part} has 0 examples, at least 1 is needed")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i in range(len(dataset)):
        x, y = _item(f"{part}[{i}]", dataset[i])
        if xs and x.shape != xs[0].shape:
            raise ValueError(
                f"{part}[{i}] has shape {tuple(x.shape)}, {part}[0] has {tuple(xs[0].shape)}: "
                "resize or crop every example to one shape"
            )
        xs.append(x)
        ys.append(y)
    return torch.stack(xs), torch.stack(ys)


def _item(name: str, item: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"{name} is {type(item).__name__}, must be a pair (x, y)")
    x, y = item
    if not isinstance(x, Tensor | np.ndarray):
        raise TypeError(
            f"x of {name} is {type(x).__name__}, must be a tensor or numpy array: "
            "add a ToTensor transform to the data set"
        )
    if not isinstance(y, int | float | np.number | Tensor | np.ndarray) or np.ndim(y):
        raise TypeError(f"y of {name} is {y!r}, must be a number or a 0-d tensor")
    return _tensor(name, x), _labels(name, y)
