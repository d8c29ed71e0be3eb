"""A function of torch that has no batched form, called client by client; everything around it stays batched."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedge.handle.stacked.rule import stacked
from fedge.once import is_new

log = logging.getLogger("fedge")

_REFUSED = "Batching rule not implemented for"
_SLOW = re.compile(r"batching rule for (\S+?)\. ")


def tell(name: str) -> None:
    """Once for every function: it costs time, and it is no error."""
    if is_new(("client by client", name)):
        log.warning("the model's function %s has no batched form and is called client by client", name)


def attempt(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The function by vmap's rule or, if there is none, client by client."""
    try:
        return func(*args, **options)
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
    tell(getattr(func, "__name__", str(func)))
    return by_client(func, args, options)


def by_client(func: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, dict(options)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    shape: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        for i, tensor in zip(where, tensors, strict=True):
            leaves[i] = tensor
        again, more = pytree.tree_unflatten(leaves, spec)
        found, out = pytree.tree_flatten(func(*again, **more))
        shape[:] = [out]
        return tuple(found)

    def many(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = [one(*client) for client in zip(*(tensor.unbind() for tensor in tensors), strict=True)]
        return tuple(torch.stack(same) for same in zip(*found, strict=True))

    found = stacked(one, many, *(leaves[i] for i in where))
    return pytree.tree_unflatten(list(found), shape[0])


@contextmanager
def naming() -> Iterator[None]:
    """Within it, functions that vmap takes apart client by client are named once, in place of torch's warning."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for one in heard:
        if (found := _SLOW.search(str(one.message))) is not None:
            tell(found.group(1))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
