"""What every reference loop needs: flat vectors, mean losses and gradients, weighted means.

A client is `(x, y)`; `cohorts[t][p]` lists the client ids of round t, phase p, both from 0;
`order(t, p, k, epochs, batch_size)` lists the batches (indices) of client k over all its epochs.
`loss(output, target)` is the loss of ONE example; None is cross-entropy.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

Client = tuple[Tensor, Tensor]
Cohorts = Sequence[Sequence[Sequence[int]]]
Loss = Callable[[Tensor, Tensor], Tensor]
Order = Callable[[int, int, int, int, int | None], list[Tensor]]
Params = dict[str, Tensor]
Weight = Callable[[int], float]


def by_examples(n: int) -> float:
    """A client's weight in a mean over clients: its number of examples."""
    return n


def rounds(cohorts: Cohorts) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """The rounds that take place: one with an empty cohort in any phase is left out."""
    for t, phases in enumerate(cohorts):
        if len(phases) > 0 and all(len(cohort) > 0 for cohort in phases):
            yield t, phases


def mean_loss(module: nn.Module, x: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
    outputs = module(x)
    if loss is None:
        return nn.functional.cross_entropy(outputs, y)
    return sum(loss(outputs[i], y[i]) for i in range(len(y))) / len(y)


def gradient(module: nn.Module, x: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
    """The flat gradient of the mean loss over (x, y)."""
    grads = torch.autograd.grad(mean_loss(module, x, y, loss), list(module.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def example_gradients(module: nn.Module, x: Tensor, y: Tensor, loss: Loss | None = None) -> list[Tensor]:
    """The flat gradient of every example's own loss, one backward pass an example."""
    return [gradient(module, x[i : i + 1], y[i : i + 1], loss) for i in range(len(y))]


def weighted_mean(values: list[Tensor], weights: list[float]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value
    return total / sum(weights)


def flat(module: nn.Module) -> Tensor:
    """A copy of all parameters in one vector, in the module's own order."""
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()]).clone()


def with_params(module: nn.Module, vector: Tensor) -> nn.Module:
    """A copy of the module whose parameters are the pieces of the flat vector."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in named(module, vector).items():
            module.get_parameter(name).copy_(value)
    return module


def named(module: nn.Module, vector: Tensor) -> Params:
    """The pieces of a flat vector by the module's parameter names."""
    pieces, start = {}, 0
    for name, param in module.named_parameters():
        pieces[name] = vector[start : start + param.numel()].reshape(param.shape).clone()
        start += param.numel()
    assert start == len(vector)
    return pieces


def flatten(module: nn.Module, pieces: Params) -> Tensor:
    """The inverse of `named`."""
    return torch.cat([pieces[name].reshape(-1) for name, _ in module.named_parameters()])
