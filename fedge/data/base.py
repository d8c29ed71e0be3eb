"""The one type that every data set becomes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples of one learning problem.

    `train_x` is [N, ...] and `train_y` is [N]: int64 labels in [0, classes), or floating-point
    targets [N] or [N, m] with `classes == 0` (regression). `names` are the class names, if known.

    >>> Data(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), torch.ones(1, 2), torch.tensor([1]), 2)
    Data(train=4, test=1, shape=(2,), classes=2)
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.classes < 0:
            raise ValueError(f"classes is {self.classes}, must be at least 0 (0 means regression)")
        self._check_one_device()
        for part, x, y in self._parts():
            _check_lengths(part, x, y)
            _check_finite(f"{part}_x", x)
            _check_targets(f"{part}_y", y, self.classes)
        self._check_parts_agree()
        if self.names and len(self.names) != self.classes:
            raise ValueError(f"{len(self.names)} names for {self.classes} classes: give one a class, or none")

    def __repr__(self) -> str:
        shape = tuple(self.train_x.shape[1:])
        sizes = f"train={len(self.train_x)}, test={len(self.test_x)}"
        return f"Data({sizes}, shape={shape}, classes={self.classes})"

    def _parts(self) -> tuple[tuple[str, Tensor, Tensor], ...]:
        return ("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)

    def _check_one_device(self) -> None:
        devices = {str(tensor.device) for _, x, y in self._parts() for tensor in (x, y)}
        if len(devices) > 1:
            raise ValueError(f"tensors are on {sorted(devices)}: move all four to one device")

    def _check_parts_agree(self) -> None:
        for name, train, test in (
            ("x", self.train_x, self.test_x),
            ("y", self.train_y, self.test_y),
        ):
            if train.shape[1:] != test.shape[1:]:
                raise ValueError(
                    f"an example of train_{name} has shape {tuple(train.shape[1:])}, "
                    f"of test_{name} {tuple(test.shape[1:])}: both parts need the same shape"
                )
            if train.dtype != test.dtype:
                raise ValueError(f"train_{name} is {train.dtype} and test_{name} is {test.dtype}: convert one")


def _check_lengths(part: str, x: Tensor, y: Tensor) -> None:
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError(f"{part}_x and {part}_y need a leading axis of examples, one is 0-d")
    if len(x) != len(y):
        raise ValueError(f"{part}_x has {len(x)} examples and {part}_y {len(y)}: give one y an x")
    if len(x) == 0:
        raise ValueError(f"{part}_x has 0 examples, at least 1 is needed")


def _check_finite(name: str, values: Tensor) -> None:
    if not values.is_floating_point():
        return
    finite = values.isfinite()
    if finite.all():
        return
    bad = (~finite).reshape(len(values), -1).any(dim=1).nonzero().flatten()
    raise ValueError(
        f"{name} has NaN or infinite values in {len(bad)} of {len(values)} rows, "
        f"the first is row {int(bad[0])}: remove or repair these rows"
    )


def _check_targets(name: str, y: Tensor, classes: int) -> None:
    if y.is_floating_point():
        if classes:
            raise ValueError(
                f"{name} is {y.dtype} but classes is {classes}: convert labels to int64, "
                "or set classes=0 for regression"
            )
        _check_finite(name, y)
    elif y.dtype != torch.int64:
        raise ValueError(f"{name} is {y.dtype}, labels must be int64: use from_arrays or y.long()")
    else:
        _check_labels(name, y, classes)


def _check_labels(name: str, y: Tensor, classes: int) -> None:
    if y.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(y.shape)}, labels must be [N]: flatten them")
    if classes == 0:
        raise ValueError(
            f"{name} holds integer labels but classes is 0: give the number of classes, "
            "or floating-point targets for regression"
        )
    bad = ((y < 0) | (y >= classes)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"{name}[{row}] is {int(y[row])}, labels must lie in [0, {classes}): "
            "renumber the labels from 0 or raise classes"
        )
