"""Layers of a module, replaced wherever they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn


class Replaced(NamedTuple):
    name: str
    old: nn.Module
    new: nn.Module


def replace_layers(
    module: nn.Module, make: Callable[[nn.Module], nn.Module | None]
) -> tuple[nn.Module, list[Replaced]]:
    """Put `make(layer)` in place of every layer for which it is not None, inside the given module, and list them.

    A layer with several names is one layer afterwards too. The module itself may be such a layer.
    """
    whole = nn.ModuleDict({"all": module})
    made: dict[nn.Module, nn.Module | None] = {}
    found: list[Replaced] = []
    for name, part in list(whole.named_modules()):
        for child, layer in list(part._modules.items()):  # named_children leaves out second names
            if layer is None:
                continue
            if layer not in made:
                made[layer] = make(layer)
            if (new := made[layer]) is not None:
                setattr(part, child, new)
                where = f"{name}.{child}".removeprefix(".all").removeprefix("all").removeprefix(".")
                found.append(Replaced(where, layer, new))
    return whole["all"], found
