"""Batch norm, replaced: it averages over whoever is in the batch, which means nothing across clients."""

from __future__ import annotations

import copy
import logging

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedge.models.replace import Replaced, replace_layers

log = logging.getLogger("fedge")
CHANNELS = 4  # of a group at least: one or two numbers, normalised, are only a sign


def without_batch_norm(module: nn.Module, groups: int = 8) -> nn.Module:
    """A copy in which every batch norm is a group norm of at most so many groups, with its scale and shift.

    A group has at least four channels where there are so many. `BatchNorm1d` becomes one group of all channels: its
    inputs may be [B, C], where this is a layer norm over C. The running statistics are dropped, so a trained model has
    to be trained further. Says in the log what it replaced.

    >>> without_batch_norm(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)))[1]
    GroupNorm(3, 12, eps=1e-05, affine=True, bias=True)

    (Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, ICML 2020, take group norm too.)
    """
    if groups < 1:
        raise ValueError(f"groups is {groups}, must be at least 1")
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not layer.num_features:
            raise ValueError(f"layer '{name}' has no channels yet: run the lazy module on one batch first")
    result, found = replace_layers(
        copy.deepcopy(module), lambda layer: _group_norm(layer, groups) if isinstance(layer, _BatchNorm) else None
    )
    log.info("batch norm replaced by group norm: %s", ", ".join(map(_told, found)) or "there was none")
    few = [f"'{one.name}'" for one in found if isinstance(one.old, nn.BatchNorm1d) and one.old.num_features < CHANNELS]
    if few:
        log.warning(
            "%s: fewer than %d channels; on inputs [B, C] so few numbers lose their size when they are normalised: "
            "leave the layer out there (nn.Identity)",
            ", ".join(few),
            CHANNELS,
        )
    return result


def _told(one: Replaced) -> str:
    count = one.new.num_groups
    return f"'{one.name}' ({count} group{'s' if count != 1 else ''} of {one.old.num_features // count})"  # type: ignore[operator]


def _count(layer: _BatchNorm, groups: int) -> int:
    """The largest number of groups that divides the channels and leaves enough in each."""
    most = 1 if isinstance(layer, nn.BatchNorm1d) else min(groups, layer.num_features // CHANNELS)
    return max([n for n in range(1, most + 1) if layer.num_features % n == 0], default=1)


def _group_norm(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    found = nn.GroupNorm(_count(layer, groups), layer.num_features, layer.eps, layer.affine)
    if layer.affine:
        found = found.to(layer.weight)
        with torch.no_grad():
            found.weight.copy_(layer.weight)
            found.bias.copy_(layer.bias)
        found.weight.requires_grad_(layer.weight.requires_grad)
        found.bias.requires_grad_(layer.bias.requires_grad)
    return found.train(layer.training)
