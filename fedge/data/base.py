"""The one type that every data set becomes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedge.inputs import Inputs, flatten, map_

Values = tuple[int, ...] | tuple[str, ...]
IGNORED = -100  # torch's own: a label that does not count, such as that of padding


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples of one learning problem.

    `train_x` is [N, ...], or a dict or tuple of such tensors, which become the arguments of the
    model's `forward`. `train_y` is [N]: int64 labels in [0, classes); or [N, T, ...]: several of
    them per example, where -100 does not count; or floating-point targets [N, ...] with
    `classes == 0` (regression). `names` are the class names, if known, and `values` the labels as
    they were before they were numbered from 0, in which predictions are given. `owners` says whose each
    training example is, such as who spoke it, for `by_group`; the owners of the test set are not kept.

    >>> Data(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), torch.ones(1, 2), torch.tensor([1]), 2)
    Data(train=4, test=1, shape=(2,), classes=2)
    """

    train_x: Inputs
    train_y: Tensor
    test_x: Inputs
    test_y: Tensor
    classes: int
    names: tuple[str, ...] = ()
    values: Values = ()
    owners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.classes < 0:
            raise ValueError(f"classes is {self.classes}, must be at least 0 (0 means regression)")
        self._check_one_device()
        for part, x, y in self._parts():
            for name, one in _inputs(f"{part}_x", x):
                _check_lengths(part, name, one, y)
                _check_finite(name, one)
            _check_targets(f"{part}_y", y, self.classes)
        self._check_parts_agree()
        if self.names and len(self.names) != self.classes:
            raise ValueError(f"{len(self.names)} names for {self.classes} classes: give one per class, or none")
        if self.owners and len(self.owners) != len(self.train_y):
            raise ValueError(f"{len(self.owners)} owners for {len(self.train_y)} examples: give one each, or none")
        if self.values and len(self.values) != self.classes:
            raise ValueError(f"{len(self.values)} values for {self.classes} classes: give one per class, or none")

    @property
    def labelled(self) -> bool:
        """Whether every example has one label: neither a regression nor several labels per example."""
        return self.classes > 0 and self.train_y.ndim == 1

    @property
    def called(self) -> tuple[str, ...]:
        """What the classes are called: their names, or the labels as they were; nothing if neither is known."""
        return self.names or tuple(map(str, self.values))

    def __repr__(self) -> str:
        shape = map_(lambda part: tuple(part.shape[1:]), self.train_x)
        sizes = f"train={len(self.train_y)}, test={len(self.test_y)}"
        return f"Data({sizes}, shape={shape}, classes={self.classes})"

    def _parts(self) -> tuple[tuple[str, Inputs, Tensor], ...]:
        return ("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)

    def _check_one_device(self) -> None:
        devices = {str(tensor.device) for _, x, y in self._parts() for tensor in (*flatten(x)[0], y)}
        if len(devices) > 1:
            raise ValueError(f"tensors are on {sorted(devices)}: move all of them to one device")

    def _check_parts_agree(self) -> None:
        mine, others = _inputs("x", self.train_x), _inputs("x", self.test_x)
        if [name for name, _ in mine] != [name for name, _ in others]:
            names = [[name for name, _ in part] for part in (mine, others)]
            raise ValueError(f"train_x has {names[0]} and test_x {names[1]}: both parts need the same inputs")
        pairs = [(name, x, other) for (name, x), (_, other) in zip(mine, others, strict=True)]
        for name, train, test in (*pairs, ("y", self.train_y, self.test_y)):
            if train.shape[1:] != test.shape[1:]:
                raise ValueError(
                    f"an example of train_{name} has shape {tuple(train.shape[1:])}, "
                    f"of test_{name} {tuple(test.shape[1:])}: both parts need the same shape"
                )
            if train.dtype != test.dtype:
                raise ValueError(f"train_{name} is {train.dtype} and test_{name} is {test.dtype}: convert one")


def _inputs(name: str, x: Inputs) -> list[tuple[str, Tensor]]:
    """Every input by its name, as errors call it: train_x, or train_x['image']."""
    if not isinstance(x, Tensor | dict | tuple) or (not isinstance(x, Tensor) and not x):
        what = "empty" if isinstance(x, dict | tuple) else f"a {type(x).__name__}"
        raise TypeError(f"{name} is {what}, it must be a tensor, or a dict or tuple of tensors")
    parts, spec = flatten(x)
    if wrong := [one for one in parts if not isinstance(one, Tensor)]:
        raise TypeError(f"{name} holds a {type(wrong[0]).__name__}, it must hold tensors: see fedge.data.from_arrays")
    keys = spec if isinstance(spec, tuple) else range(len(parts))
    return [(name if spec is None else f"{name}[{key!r}]", part) for key, part in zip(keys, parts, strict=True)]


def _check_lengths(part: str, name: str, x: Tensor, y: Tensor) -> None:
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError(f"{name} and {part}_y need a leading axis of examples, one is 0-d")
    if len(x) != len(y):
        raise ValueError(f"{name} has {len(x)} examples and {part}_y {len(y)}: give one y per x")
    if len(x) == 0:
        raise ValueError(f"{name} has 0 examples, at least 1 is needed")


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
    if y.ndim > 1 and y[0].numel() == 1:
        raise ValueError(f"{name} has shape {tuple(y.shape)}, labels must be [N]: flatten them")
    if classes == 0:
        raise ValueError(
            f"{name} holds integer labels but classes is 0: give the number of classes, "
            "or floating-point targets for regression"
        )
    counts = (y != IGNORED) | torch.tensor(y.ndim == 1, device=y.device)
    bad = (((y < 0) | (y >= classes)) & counts).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        remedy = "renumber the labels from 0, raise classes, or leave out classes= of from_arrays, which numbers them"
        raise ValueError(
            f"{name}[{', '.join(map(str, at))}] is {int(y[at])}, labels must lie in [0, {classes}): "
            f"{remedy if y.ndim == 1 else f'labels that do not count are {IGNORED}, others are counted from 0'}"
        )
