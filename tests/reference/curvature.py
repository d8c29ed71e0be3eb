"""Empirical Fisher and Gauss-Newton matrices (Eq. 7-9), one example at a time.

Vectors go in and come out as dicts by the module's parameter names.
"""

import torch
from torch import Tensor, nn

from .common import Client, Loss, Params, example_gradients, flatten, gradient, named, weighted_mean


def fisher_diagonal(module: nn.Module, x: Tensor, y: Tensor, loss: Loss | None = None) -> Params:
    """(1/n) sum_i g_i * g_i, elementwise, g_i the gradient of example i's own loss."""
    total = sum(g * g for g in example_gradients(module, x, y, loss))
    return named(module, total / len(y))


def fisher_product(module: nn.Module, x: Tensor, y: Tensor, v: Params, loss: Loss | None = None) -> Params:
    """(1/n) sum_i g_i (g_i . v)."""
    direction = flatten(module, v)
    total = sum(g * (g @ direction) for g in example_gradients(module, x, y, loss))
    return named(module, total / len(y))


def gauss_newton_product(module: nn.Module, x: Tensor, y: Tensor, v: Params, loss: Loss | None = None) -> Params:
    """(1/n) sum_i J_i^T H_i J_i v, J_i of the outputs, H_i of the loss in the outputs."""
    direction = flatten(module, v)
    total = torch.zeros_like(direction)
    for i in range(len(y)):
        output, jacobian = output_jacobian(module, x[i])
        hessian = output_hessian(output, y[i], loss)
        total = total + jacobian.T @ (hessian @ (jacobian @ direction))
    return named(module, total / len(y))


def squared_slope_product(module: nn.Module, x: Tensor, y: Tensor, v: Params, loss: Loss | None = None) -> Params:
    """(1/n) sum_i J_i^T diag(r_i^2) J_i v, J_i of the outputs, r_i the slopes of the loss in the outputs."""
    direction = flatten(module, v)
    total = torch.zeros_like(direction)
    for i in range(len(y)):
        output, jacobian = output_jacobian(module, x[i])
        slopes = output_slopes(output, y[i], loss)
        total = total + jacobian.T @ (slopes**2 * (jacobian @ direction))
    return named(module, total / len(y))


def output_slopes(output: Tensor, target: Tensor, loss: Loss | None) -> Tensor:
    """p - e_y for softmax cross-entropy; any other loss is differentiated."""
    if loss is None:
        return torch.softmax(output, dim=0) - nn.functional.one_hot(target, len(output))
    return torch.autograd.functional.jacobian(lambda z: loss(z, target), output)


def output_jacobian(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """One example's outputs (o,) and their derivatives (o, d), row by row."""
    output = module(x[None])[0]
    params = list(module.parameters())
    rows = []
    for value in output:
        grads = torch.autograd.grad(value, params, retain_graph=True)
        rows.append(torch.cat([grad.reshape(-1) for grad in grads]))
    return output.detach(), torch.stack(rows)


def output_hessian(output: Tensor, target: Tensor, loss: Loss | None) -> Tensor:
    """diag(p) - p p^T for softmax cross-entropy; any other loss is differentiated twice."""
    if loss is None:
        p = torch.softmax(output, dim=0)
        return torch.diag(p) - torch.outer(p, p)
    return torch.autograd.functional.hessian(lambda z: loss(z, target), output)


def batch_square(module: nn.Module, batches: list[Client], loss: Loss | None = None) -> Params:
    """The mean of squared mini-batch gradients, every batch weighted by its examples."""
    squares = [gradient(module, x, y, loss) ** 2 for x, y in batches]
    return named(module, weighted_mean(squares, [len(y) for _, y in batches]))
