"""What many tests need: small ragged federations, small models, and one table of every algorithm."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import fedge
from fedge.core import Algorithm


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy_data(examples: int = 90, inputs: int = 6, classes: int = 3, seed: int = 0) -> fedge.data.Data:
    """Gaussian clusters in float64: easy enough to learn, noisy enough to have real gradients."""
    g = generator(seed)
    centres = 2 * torch.randn(classes, inputs, generator=g, dtype=torch.float64)
    y = torch.arange(examples + 30) % classes
    x = centres[y] + torch.randn(examples + 30, inputs, generator=g, dtype=torch.float64)
    return fedge.data.Data(x[:examples], y[:examples], x[examples:], y[examples:], classes)


def ragged(data: fedge.data.Data, sizes: tuple[int, ...] = (3, 17, 8, 1, 24, 9, 28)) -> fedge.Federation:
    """Clients of very different sizes, the labels dealt unevenly: most hold two of the classes, one holds one."""
    order = torch.argsort(data.train_y, stable=True)
    order = torch.roll(order, 11)
    cuts = [0, *itertools.accumulate(sizes)]
    assert cuts[-1] == len(order)
    return fedge.Federation(data, [order[a:b].numpy() for a, b in itertools.pairwise(cuts)])


def toy_model(inputs: int = 6, outputs: int = 3, seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    return fedge.models.mlp(inputs, (5,), outputs, seed=seed).to(dtype)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two sets of parameters."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def algorithms() -> dict[str, Algorithm]:
    """Every algorithm in the forms that take different paths, on the toy problem; common tests run over all."""
    model = toy_model()
    return {
        "fedavg": fedge.FedAvg(model, lr=0.2, epochs=2, batch_size=4),
        "fedavg_full_batch": fedge.FedAvg(model, lr=0.2, epochs=3, batch_size=None),
        "fedavg_momentum": fedge.FedAvg(model, lr=0.05, epochs=2, batch_size=5, momentum=0.9, weight_decay=0.01),
        "fedavg_adam": fedge.FedAvg(model, lr=0.01, epochs=2, batch_size=4, optimiser="adam", weight_decay=0.01),
        "fedavg_server_momentum": fedge.FedAvg(model, epochs=1, batch_size=7, server_momentum=0.5, server_lr=0.7),
        "fedavg_server_adam": fedge.FedAvg(model, epochs=1, batch_size=7, server_optimiser="adam", server_lr=0.05),
    }
