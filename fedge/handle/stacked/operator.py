"""Operations of fedge's own that a recorder sees as one: a loop over time inside is not written out.

A recording of a recurrent layer would have thousands of lines, and take longer to make than many rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fedge", "DEF")


def operator(
    name: str, function: Callable[..., list[Tensor]], tensors: int, like: Callable[..., list[Tensor]] | None = None
) -> Any:
    """torch.ops.fedge.NAME, from so many tensors to a list of new ones; autograd does not look inside.

    `like` makes tensors of the same shapes out of torch's own operations, where the function itself does not.
    """
    inputs = ", ".join(f"Tensor x{i}" for i in range(tensors))
    _LIBRARY.define(f"{name}({inputs}) -> Tensor[]")

    @torch.no_grad()
    def run(*args: Tensor) -> list[Tensor]:
        return function(*args)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fedge::{name}", like or run, lib=_LIBRARY)
    return getattr(torch.ops.fedge, name).default
