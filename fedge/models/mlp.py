"""The multilayer perceptron."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedge.models.seeded import check_widths, seeded


def mlp(inputs: int = 64, hidden: Sequence[int] = (32,), outputs: int = 10, seed: int | None = None) -> nn.Sequential:
    """Linear layers with ReLU between them; inputs of any shape are flattened.

    >>> [name for name, _ in mlp(64, (32,), 10).named_children()]
    ['flatten', 'fc1', 'relu1', 'fc2']
    """
    check_widths(inputs=inputs, outputs=outputs)
    for i, width in enumerate(hidden):
        check_widths(**{f"hidden[{i}]": width})
    return seeded(lambda: _mlp((inputs, *hidden, outputs)), seed)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        if i > 1:
            layers[f"relu{i - 1}"] = nn.ReLU()
        layers[f"fc{i}"] = nn.Linear(before, after)
    return nn.Sequential(layers)
