"""Operations of fedge's own that a recorder sees as one: a loop over time inside is not written out.

A recording of a recurrent layer would have thousands of lines, and take longer to make than many rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fedge", "DEF")
DIRECT: dict[Any, Callable[..., list[Tensor]]] = {}  # by operation: the function itself, for those who need no gradient


def operator(
    name: str,
    function: Callable[..., list[Tensor]],
    tensors: int,
    like: Callable[..., list[Tensor]] | None = None,
    numbers: str | None = None,
) -> Any:
    """torch.ops.fedge.NAME, from so many tensors to a list of new ones; autograd does not look inside.

    `like` makes tensors of the same shapes out of torch's own operations, where the function itself does not. With
    `numbers`, "int[]" or "float[]", a list of them comes after the tensors.
    """
    inputs = ", ".join([f"Tensor x{i}" for i in range(tensors)] + ([] if numbers is None else [f"{numbers} numbers"]))
    _LIBRARY.define(f"{name}({inputs}) -> Tensor[]")

    @torch.no_grad()
    def run(*args: Any) -> list[Tensor]:
        return function(*args)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fedge::{name}", like or run, lib=_LIBRARY)
    found = getattr(torch.ops.fedge, name).default
    DIRECT[found] = function
    return found
