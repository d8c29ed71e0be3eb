"""Data from what a user already holds: arrays, tensors, lists or torch data sets."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from fedge.data.base import Data, Values
from fedge.data.labels import from_words, numbered
from fedge.inputs import Inputs, count, flatten, map_, take

Collate = Callable[[list[Any]], tuple[Inputs, Tensor]]


def from_arrays(
    train_x: ArrayLike | Inputs,
    train_y: ArrayLike | Tensor,
    test_x: ArrayLike | Inputs,
    test_y: ArrayLike | Tensor,
    classes: int | None = None,
    names: Sequence[str] = (),
) -> Data:
    """Make `Data` from numpy arrays, tensors or nested lists; x may be a dict, or a tuple of arrays, of several inputs.

    Float64 arrays and lists take torch's default dtype; tensors keep theirs, and integer inputs
    stay integers (nothing is scaled behind your back). Floating-point targets [N, ...] mean
    regression. Integer labels become int64; [N, T, ...] are several per example, -100 does not
    count. With `classes=None` labels [N] are the classes 0, 1, ... in ascending order: if they
    start elsewhere or have gaps, that is said, and predictions are given as your labels. Words are
    classes in alphabetical order, and become the `names`; predictions are those words.

    >>> from_arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1])
    Data(train=2, test=1, shape=(1,), classes=2)
    """
    values: Values = ()
    if _are_words(train_y) and _are_words(test_y):
        train_y, test_y, words = from_words(np.asarray(train_y), np.asarray(test_y))
        names, values = names or words, words if classes in (None, len(words)) else ()
    labels = as_labels("train_y", train_y), as_labels("test_y", test_y)
    x = _tensors("train_x", train_x), _tensors("test_x", test_x)
    if classes is None:
        *labels, classes, mapped = _classes(*labels, len(names))  # type: ignore[assignment]
        values = values or mapped
    return Data(x[0], labels[0], x[1], labels[1], classes, tuple(names), values)


def from_datasets(
    train: Dataset[Any], test: Dataset[Any], classes: int | None = None, collate: Collate | None = None
) -> Data:
    """Make `Data` from two map-style torch data sets whose items are (x, y); x may be a dict or a tuple.

    Every item is read once and stacked, so random transforms are frozen at what they gave. Items of different lengths
    need a `collate`: a function of the list of all items, of both parts, that returns their x and y as tensors, such
    as `fedge.data.pad`.

    >>> from torch.utils.data import TensorDataset
    >>> part = TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    >>> from_datasets(part, part)
    Data(train=3, test=3, shape=(2,), classes=3)
    """
    parts = [_items("train", train), _items("test", test)]
    if collate is None:
        (train_x, train_y), (test_x, test_y) = _stack("train", parts[0]), _stack("test", parts[1])
        return from_arrays(train_x, train_y, test_x, test_y, classes)
    x, y = _collated(collate, [*parts[0], *parts[1]])
    cut = len(parts[0])
    return from_arrays(take(x, slice(cut)), y[:cut], take(x, slice(cut, None)), y[cut:], classes)


def _collated(collate: Collate, items: list[Any]) -> tuple[Inputs, Tensor]:
    found = collate(items)
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"collate returned a {type(found).__name__}, it must return x and y of all items")
    x, y = found
    if count(x) != len(items) or len(y) != len(items):
        raise ValueError(
            f"collate returned {count(x)} x and {len(y)} y for {len(items)} items: it must return all of them"
        )
    return x, y


def _tensors(name: str, x: Any) -> Inputs:
    """One tensor, or several by name or in order."""
    if isinstance(x, dict):
        return {key: as_tensor(f"{name}[{key!r}]", one) for key, one in x.items()}
    several = isinstance(x, tuple) and any(isinstance(one, np.ndarray | Tensor) for one in x)
    return tuple(as_tensor(f"{name}[{at}]", one) for at, one in enumerate(x)) if several else as_tensor(name, x)


def as_tensor(name: str, values: ArrayLike | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_nested:
            raise ValueError(f"{name} is a sparse or nested tensor: give one with all its numbers, as by .to_dense()")
        return values.detach()
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} is a masked array, and some of its numbers are hidden: "
            "leave these examples out, or fill the gaps with .filled()"
        )
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


def as_labels(name: str, values: ArrayLike | Tensor) -> Tensor:
    labels = as_tensor(name, values)
    if labels.is_floating_point():
        return labels
    found = labels.long()
    if labels.dtype == torch.uint64 and bool((found < 0).any()):
        raise ValueError(f"{name} has labels of 2^63 and more: number the classes from 0")
    return found


def _are_words(y: Any) -> bool:
    if isinstance(y, Tensor):
        return False
    found = np.asarray(y)
    return found.dtype.kind in "US" or (found.dtype.kind == "O" and all(isinstance(one, str) for one in found.flat))


def _classes(train_y: Tensor, test_y: Tensor, names: int) -> tuple[Tensor, Tensor, int, tuple[int, ...]]:
    """The labels in [0, classes), how many classes there are, and what they were called before."""
    if train_y.is_floating_point():
        return train_y, test_y, 0, ()
    for name, y in (("train_y", train_y), ("test_y", test_y)):
        if not y.numel():
            raise ValueError(f"{name} has 0 labels, at least 1 is needed")
    if train_y.ndim == test_y.ndim == 1:
        return numbered(train_y, test_y, names)
    return train_y, test_y, max(0, int(train_y.max()), int(test_y.max())) + 1, ()  # the rest is Data's to refuse


def _items(part: str, dataset: Dataset[Any]) -> list[Any]:
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{part} has no length: give a map-style Dataset with __len__, or arrays")
    if len(dataset) == 0:
        raise ValueError(f"{part} has 0 examples, at least 1 is needed")
    return [dataset[i] for i in range(len(dataset))]


def _stack(part: str, items: list[Any]) -> tuple[Inputs, Tensor]:
    pairs = [_item(f"{part}[{i}]", item) for i, item in enumerate(items)]
    first = flatten(pairs[0][0])[0]
    for i, (x, _) in enumerate(pairs):
        for one, other in zip(flatten(x)[0], first, strict=True):
            if one.shape != other.shape:
                raise ValueError(
                    f"{part}[{i}] has shape {tuple(one.shape)}, {part}[0] has {tuple(other.shape)}: "
                    "resize or crop every example to one shape, or give a collate such as fedge.data.pad"
                )
    x = map_(lambda *parts: torch.stack(parts), *(x for x, _ in pairs))
    return x, torch.stack([y for _, y in pairs])


def _item(name: str, item: Any) -> tuple[Inputs, Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"{name} is {type(item).__name__}, must be a pair (x, y)")
    x, y = item
    wrong = [one for one in flatten(x)[0] if not isinstance(one, Tensor | np.ndarray)] if _is_nest(x) else [x]
    if wrong and not isinstance(wrong[0], Tensor | np.ndarray):
        raise TypeError(
            f"x of {name} is {type(wrong[0]).__name__}, must be a tensor or numpy array: "
            "add a ToTensor transform to the data set"
        )
    if not isinstance(y, int | float | np.number | Tensor | np.ndarray):
        raise TypeError(f"y of {name} is {y!r}, must be a number, a tensor or a numpy array")
    return _tensors(name, x), as_labels(name, y)


def _is_nest(x: Any) -> bool:
    return isinstance(x, dict | tuple) and len(x) > 0
