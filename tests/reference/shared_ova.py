"""One trunk, one binary head per class, a client trains the heads of its own labels: a plain loop."""

import copy

import torch
from torch import nn

from .common import Client, Cohorts, Order, Params, rounds


def shared_ova(
    module: nn.Sequential,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
) -> Params:
    w = {name: param.detach().clone() for name, param in module.named_parameters()}
    weight, bias = list(w)[-2:]
    for t, phases in rounds(cohorts):
        trained = {k: _local(module, w, clients[k], order(t, 0, k, epochs, batch_size), lr) for k in phases[0]}
        sizes = {k: len(clients[k][1]) for k in phases[0]}
        new = {}
        for name, old in w.items():
            if name not in (weight, bias):
                new[name] = sum(sizes[k] * trained[k][name] for k in sizes) / sum(sizes.values())
                continue
            new[name] = old.clone()
            for row in range(len(old)):
                own = [k for k in sizes if row in clients[k][1].tolist()]
                if own:
                    total = sum(sizes[k] * trained[k][name][row] for k in own)
                    new[name][row] = total / sum(sizes[k] for k in own)
        w = new
    return w


def _local(module: nn.Sequential, w: Params, client: Client, batches: list[torch.Tensor], lr: float) -> Params:
    here = copy.deepcopy(module)
    here.load_state_dict(w)
    x, y = client
    for batch in batches:
        logits = here(x[batch])
        loss = torch.zeros((), dtype=logits.dtype)
        for label in sorted(set(y.tolist())):
            wanted = (y[batch] == label).to(logits)
            p = torch.sigmoid(logits[:, label])
            loss = loss - (wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()
        grads = torch.autograd.grad(loss, list(here.parameters()))
        with torch.no_grad():
            for param, grad in zip(here.parameters(), grads, strict=True):
                param -= lr * grad
    return {name: param.detach() for name, param in here.named_parameters()}
