"""FedAvg and FedCM with step sizes that shrink, momentum that is carried on, and spectral steps: one plain loop."""

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
    flatten,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)
from .kronecker import Server
from .spectral import LocalSpectral, server_step, turned, turned_in_three


class Torch:
    """SGD or Adam of torch.optim with a factor on the step size, and SGD's momentum from elsewhere."""

    def __init__(self, kind: str, params: list[nn.Parameter], lr: float, **options: float) -> None:
        self.lr, self.factor, self.params = lr, 1.0, params
        self.rule = (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(params, lr=lr, **options)

    @property
    def buffers(self) -> list[Tensor]:
        return [self.rule.state[param]["momentum_buffer"] for param in self.params]

    @buffers.setter
    def buffers(self, values: list[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            self.rule.state[param]["momentum_buffer"] = value.clone()

    def zero_grad(self) -> None:
        self.rule.zero_grad()

    def step(self) -> None:
        self.rule.param_groups[0]["lr"] = self.factor * self.lr
        self.rule.step()


def train(
    module: nn.Module,
    client: Client,
    batches: list[Tensor],
    start: Params | None,
    *,
    lr: float,
    factor: float,
    inner_decay: float,
    optimiser: str,
    mixed: tuple[float, Tensor] | None,
    **options: float,
) -> tuple[Tensor, Tensor | None, float]:
    """w_k - w, the last momentum, and the sum of the step sizes."""
    local = copy.deepcopy(module)
    params = list(local.parameters())
    if optimiser.startswith("spectral"):
        turn = turned if optimiser == "spectral" else turned_in_three
        rule = LocalSpectral(params, lr, turn=turn, **options)
    else:
        rule = Torch(optimiser, params, lr, **options)
    if start is not None:
        rule.buffers = [start[name] for name, _ in local.named_parameters()]
    (x, y), length = client, 0.0
    for i, batch in enumerate(batches):
        rule.zero_grad()
        mean_loss(local, x[batch], y[batch]).backward()
        if mixed is not None:
            alpha, direction = mixed
            for param, piece in zip(params, named(module, direction).values(), strict=True):
                param.grad = alpha * param.grad + (1 - alpha) * piece
        rule.factor = factor * (1 - (1 - inner_decay) * i / max(1, len(batches) - 1))
        length += lr * rule.factor
        rule.step()
    momentum = None if start is None else torch.cat([one.reshape(-1) for one in rule.buffers])
    return flat(local) - flat(module), momentum, length


def scheduled(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
    lr_decay: float = 1.0,
    inner_decay: float = 1.0,
    optimiser: str = "sgd",
    carry_momentum: bool = False,
    server_optimiser: str = "sgd",
    server_momentum: float = 0.0,
    server_lr: float = 1.0,
    server_betas: tuple[float, float] = (0.9, 0.99),
    server_lr_decay: float = 1.0,
    server_warmup: int = 0,
    alpha: float | None = None,
    weight: Weight = by_examples,
    **options: float,
) -> Params:
    """With `alpha` FedCM, else FedAvg."""
    w = flat(module)
    factored = Server(server_optimiser, server_momentum, server_betas[1])
    m, direction, carried = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
    for t, phases in rounds(cohorts):
        model = with_params(module, w)
        found = [
            train(
                model,
                clients[k],
                order(t, 0, k, epochs, batch_size),
                named(module, carried) if carry_momentum else None,
                lr=lr,
                factor=lr_decay**t,
                inner_decay=inner_decay,
                optimiser=optimiser,
                mixed=None if alpha is None else (alpha, direction),
                **options,
            )
            for k in phases[0]
        ]
        weights = [weight(len(clients[k][1])) for k in phases[0]]
        delta = weighted_mean([one[0] for one in found], weights)
        if carry_momentum:
            carried = weighted_mean([one[1] for one in found], weights)
        length = sum(n * one[2] for n, one in zip(weights, found, strict=True)) / sum(weights)
        direction = -delta / length
        m = server_momentum * m - delta
        size = server_lr * server_lr_decay**t * min(1, (t + 1) / (server_warmup + 1))
        step = size * m
        if server_optimiser != "sgd":
            pieces = named(module, m)
            if server_optimiser == "spectral":
                moved = server_step(list(pieces.values()), server_momentum, size)
            else:
                moved = factored.step(list(named(module, -delta).values()), size)
            step = flatten(module, dict(zip(pieces, moved, strict=True)))
        w = w - step
    return named(module, w)
