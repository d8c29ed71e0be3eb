"""A step is pure: what it is given belongs to others, or to the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedge.engine.recording import pytree


@contextmanager
def untouched(**given: Any) -> Iterator[None]:
    """Refuse writing in place into what was given, by its name: other clients and later steps see the same."""
    leaves = {name: pytree.leaves(nest) for name, nest in given.items()}
    before = {name: _versions(found) for name, found in leaves.items()}
    yield
    for name, found in leaves.items():
        if _versions(found) != before[name]:
            raise RuntimeError(
                f"a step wrote in place into its argument '{name}', which it shares with other clients or steps: "
                "return new tensors (a + b in place of a += b, torch.where in place of a[mask] = b)"
            )


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
