"""What layers in C do not take: calls that torch would stretch or refuse, and calls that are transformed as a whole."""

from __future__ import annotations

import torch
from torch import Tensor


def is_one_per_output(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether a bias is as the program reads it; torch would stretch or convert another one, or refuse it."""
    return bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)


def is_transformed() -> bool:
    """Whether torch.func transforms the call, or autocast chooses its type: the program is for plain calls."""
    return torch._C._functorch.maybe_current_level() is not None or torch.is_autocast_enabled("cpu")
