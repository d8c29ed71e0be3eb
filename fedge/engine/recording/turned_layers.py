"""Rules for one client of a model that is not a chain: images with the channels of a pixel side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from fedge.engine.recording import c_conv, c_norm
from fedge.engine.recording.c_library import NoCompiler
from fedge.handle import turned
from fedge.handle.module import parameters

log = logging.getLogger("fedge")


def turned_in_c(model: nn.Module) -> dict[Any, Callable[..., Any]]:
    """By torch's function what to call in its place; nothing where images had better stay as they are.

    Torch's own group norm loses on images in that order what convolutions gain.
    """
    if not turned.is_blind(model):
        return {}
    if not any(isinstance(layer, nn.GroupNorm) for layer in model.modules()):
        return turned.RULES | {F.conv2d: c_conv.conv2d}
    try:
        c_norm.program(next(iter(parameters(model).values())).dtype)
    except NoCompiler as reason:
        log.info("convolutions are computed by torch's operations: %s", reason)
        return {}
    return turned.RULES | {F.group_norm: c_norm.group_norm, F.conv2d: c_conv.conv2d}
