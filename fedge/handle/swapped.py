"""A module called with other parameters: torch's `functional_call`, which looks for their places at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fedge.core import Params

Place = tuple[dict[str, Any], str]  # a layer's parameters, and the name of one


class Swapped:
    """One module, whose places are known: looking for them takes as long as the work of a small model.

    Tied weights have several places. A scripted module has none that could be written to: torch's own way is taken.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: dict[int, list[Place]] = {}
        for layer in module.modules():
            for name, leaf in layer._parameters.items():
                found.setdefault(id(leaf), []).append((layer._parameters, name))
        self.places = {name: found[id(leaf)] for name, leaf in module.named_parameters()}
        self.scripted = any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules())

    def __call__(self, params: Params, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.scripted or not params.keys() <= self.places.keys():
            return functional_call(self.module, params, args, options)
        before = []
        try:
            for name, leaf in params.items():
                for parameters, own in self.places[name]:
                    before.append((parameters, own, parameters[own]))
                    parameters[own] = leaf
            return self.module(*args, **options)
        finally:
            for parameters, own, leaf in reversed(before):
                parameters[own] = leaf
