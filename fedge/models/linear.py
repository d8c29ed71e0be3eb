"""Multinomial logistic regression, the strongly convex case (with weight decay)."""

from collections import OrderedDict

from torch import nn

from fedge.models.seeded import check_widths, seeded


def logistic(inputs: int = 64, outputs: int = 10, seed: int | None = None) -> nn.Sequential:
    """One linear layer; inputs of any shape are flattened.

    >>> logistic(64, 10)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (fc1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    check_widths(inputs=inputs, outputs=outputs)
    return seeded(lambda: _logistic(inputs, outputs), seed)


def _logistic(inputs: int, outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(inputs, outputs))
    return nn.Sequential(layers)
