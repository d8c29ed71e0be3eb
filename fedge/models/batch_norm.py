"""Batch norm, replaced: it averages over whoever is in the batch, which means nothing across clients."""

from __future__ import annotations

import copy
import logging
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

log = logging.getLogger("fedge")


def without_batch_norm(module: nn.Module, groups: int = 8) -> nn.Module:
    """A copy in which every batch norm is a group norm of at most so many groups, with its scale and shift.

    The running statistics are dropped, so a trained model has to be trained further. Says in the log what it replaced.

    >>> without_batch_norm(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)))[1]
    GroupNorm(4, 12, eps=1e-05, affine=True)

    (Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, ICML 2020, take group norm too.)
    """
    if groups < 1:
        raise ValueError(f"groups is {groups}, must be at least 1")
    whole = nn.ModuleDict({"all": copy.deepcopy(module)})  # so that the module itself may be a batch norm
    found: list[str] = []
    for name, part in list(whole.named_modules()):
        for child, layer in part.named_children():
            if isinstance(layer, _BatchNorm):
                setattr(part, child, norm := _group_norm(layer, groups))
                where = f"{name}.{child}".removeprefix(".all").removeprefix("all").removeprefix(".")
                found.append(f"'{where}' ({norm.num_groups} groups)")
    log.info("batch norm replaced by group norm: %s", ", ".join(found) or "there was none")
    result: nn.Module = whole["all"]
    return result


def _group_norm(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    """The largest number of groups that divides the channels."""
    channels = layer.num_features
    count = max(n for n in range(1, groups + 1) if math.gcd(n, channels) == n)
    found = nn.GroupNorm(count, channels, layer.eps, layer.affine)
    if layer.affine:
        found = found.to(layer.weight)
        with torch.no_grad():
            found.weight.copy_(layer.weight)
            found.bias.copy_(layer.bias)
        found.weight.requires_grad_(layer.weight.requires_grad)
        found.bias.requires_grad_(layer.bias.requires_grad)
    return found.train(layer.training)
