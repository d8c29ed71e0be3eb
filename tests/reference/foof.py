"""FOOF by dense inverses of outer products, one example and one position after another (Benzing 2022)."""

import copy

import torch
from torch import Tensor, nn

from .common import (
    Client,
    Cohorts,
    Order,
    Params,
    Weight,
    by_examples,
    flat,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def inputs_of(layer: nn.Module, a: Tensor) -> Tensor:
    """What the weight is multiplied with, [positions, in], for one example."""
    if isinstance(layer, nn.Linear):
        return a.reshape(-1, a.shape[-1])
    if isinstance(layer, nn.Conv1d):
        a = torch.nn.functional.pad(a, (layer.padding[0],) * 2)
        return torch.stack([a[0, :, i : i + layer.kernel_size[0]].reshape(-1)
                            for i in range(0, a.shape[-1] - layer.kernel_size[0] + 1, layer.stride[0])])  # fmt: skip
    (high, wide), (down, right), (top, left) = layer.kernel_size, layer.stride, layer.padding
    a = torch.nn.functional.pad(a, (left, left, top, top))
    places = [(i, j) for i in range(0, a.shape[2] - high + 1, down) for j in range(0, a.shape[3] - wide + 1, right)]
    return torch.stack([a[0, :, i : i + high, j : j + wide].reshape(-1) for i, j in places])


def preconditioners(module: nn.Module, x: Tensor, damping: float, largest: int) -> dict[str, Tensor]:
    """P by the name of the layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def see(name: str, layer: nn.Module):
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            for row in inputs_of(layer, args[0]):
                one = torch.cat([row, row.new_ones(1)]) if layer.bias is not None else row
                sums[name] = sums.get(name, 0) + torch.outer(one, one)
                counts[name] = counts.get(name, 0) + 1

        return hook

    module = copy.deepcopy(module).eval()
    for name, layer in module.named_modules():
        if isinstance(layer, LAYERS) and layer.weight[0].numel() + 1 <= largest:
            layer.register_forward_pre_hook(see(name, layer))
    with torch.no_grad():
        for i in range(len(x)):
            module(x[i : i + 1])
    found = {}
    for name, total in sums.items():
        mean = total / counts[name]
        c = torch.trace(mean) / len(mean)
        found[name] = (1 + damping) * torch.linalg.inv(mean / c + damping * torch.eye(len(mean), dtype=mean.dtype))
    return found


def foof(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
    damping: float,
    largest_side: int = 1024,
    momentum: float = 0.0,
    clip: float | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    weight: Weight = by_examples,
) -> Params:
    """Local SGD on gradients times P, and torch.optim.SGD along the mean update."""
    w = nn.Parameter(flat(module))
    server = torch.optim.SGD([w], lr=server_lr, momentum=server_momentum)
    for t, phases in rounds(cohorts):
        model = with_params(module, w.detach())
        deltas, weights = [], []
        for k in phases[0]:
            x, y = clients[k]
            local = copy.deepcopy(model)
            rule = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            bend = preconditioners(model, x, damping, largest_side)
            for batch in order(t, 0, k, epochs, batch_size):
                rule.zero_grad()
                mean_loss(local, x[batch], y[batch]).backward()
                for name, p in bend.items():
                    layer = local.get_submodule(name)
                    whole = layer.weight.grad.reshape(len(layer.weight), -1)
                    if layer.bias is not None:
                        whole = torch.cat([whole, layer.bias.grad[:, None]], 1)
                    whole = whole @ p
                    if layer.bias is not None:
                        layer.bias.grad = whole[:, -1].clone()
                        whole = whole[:, :-1]
                    layer.weight.grad = whole.reshape(layer.weight.shape).clone()
                if clip is not None:
                    nn.utils.clip_grad_norm_(local.parameters(), clip)
                rule.step()
            deltas.append(flat(local) - flat(model))
            weights.append(weight(len(y)))
        w.grad = -weighted_mean(deltas, weights)
        server.step()
    return named(module, w.detach())
