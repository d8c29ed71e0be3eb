"""Examples that a user gives to a finished run: read, and compared with those that it was trained on."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedge.inputs import Inputs, count, described, flatten, rebuild


def read(x: Inputs | ArrayLike, example: Inputs) -> Inputs:
    """As tensors with the examples first, in the form of `example` [1, ...]; refuses what cannot be that.

    Other shapes are left to the model: one that flattens or pools takes several.
    """
    given = _nest(x, example) if isinstance(example, dict | tuple) else _tensor("x", x)
    if count(given) == 0:
        raise ValueError("x has 0 examples, at least 1 is needed")
    return given


def misfit(given: Inputs, example: Inputs) -> str | None:
    """How examples that a model did not take differ from those it was trained on; None: they do not."""
    if example is None or described(given) == described(example):
        return None
    if _is_one_example(given, example):
        return f"x is a single example of {described(example)}, expected [N, ...]: give x[None]"
    return (
        f"x has examples of {described(given)}, the model was trained on examples of "
        f"{described(example)}: bring x to that shape, with the examples along its first axis"
    )


def _nest(x: Inputs | ArrayLike, example: Inputs) -> Inputs:
    parts, spec = flatten(example)
    names = list(spec) if isinstance(spec, tuple) else None
    if not isinstance(x, dict | tuple | list) or (names is None) == isinstance(x, dict):
        wanted = f"a dict with {names}" if names else f"a tuple of {len(parts)}"
        raise ValueError(f"x is a {type(x).__name__}, the model was trained on several inputs: give {wanted}")
    if isinstance(x, dict) and set(x) != set(names or ()):
        raise ValueError(f"x has {sorted(x)}, the model was trained on {names}: give these")
    if len(x) != len(parts):
        raise ValueError(f"x has {len(x)} parts, the model was trained on {len(parts)}: give as many")
    values = [x[name] for name in names] if isinstance(x, dict) and names else list(x)
    keys = names or range(len(parts))
    return rebuild([_tensor(f"x[{key!r}]", one) for key, one in zip(keys, values, strict=True)], spec)


def _tensor(name: str, x: ArrayLike) -> Tensor:
    try:
        found = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read as an array of numbers ({words}): give an array [N, ...]") from error
    if found.dim() == 0:
        raise ValueError(f"{name} is a single number, expected [N, ...]: one row per example")
    return found


def _is_one_example(given: Inputs, example: Inputs) -> bool:
    """Whether the axis of the examples is missing."""
    pairs = zip(flatten(given)[0], flatten(example)[0], strict=True)
    return all(one.shape == like.shape[1:] and like.dim() > 1 for one, like in pairs)
