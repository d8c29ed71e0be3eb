"""What a few forward passes tell of a module that its layers do not: whether it is a function of one example."""

from __future__ import annotations

import torch
from torch import Tensor

from fedge.core import Params
from fedge.handle.plain import Handle
from fedge.inputs import Inputs, leading, take

EXAMPLES = 4
TF32 = 0.01  # of the largest output: what rounding may change on a GPU


@torch.no_grad()
def changing_buffer(handle: Handle, params: Params, x: Inputs) -> str | None:
    """The name of a buffer that a second training step changes; what the first one fills in may be a cache."""
    key = torch.zeros((), dtype=torch.long, device=leading(x).device)
    before = {name: leaf.clone() for name, leaf in handle.module.named_buffers()}
    handle.logits(params, take(x, slice(2)), key)
    first = {name: leaf.clone() for name, leaf in handle.module.named_buffers()}
    handle.logits(params, take(x, slice(1, 3)), key)
    found = next((name for name, leaf in handle.module.named_buffers() if not _equal(leaf, first.get(name))), None)
    for name, leaf in before.items():
        handle.module.get_buffer(name).data = leaf
    return found


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is None or (one.shape == other.shape and torch.equal(one, other))


@torch.no_grad()
def mixes(handle: Handle, params: Params, x: Inputs) -> bool:
    """Whether the output for an example depends on what else is in the batch; False if the module cannot be asked."""
    few = [take(x, slice(i, i + 1)) for i in range(min(EXAMPLES, len(leading(x))))]
    try:
        together, again = (
            handle.logits(params, take(x, slice(len(few)))),
            handle.logits(params, take(x, slice(len(few)))),
        )
        alone = torch.cat([handle.logits(params, one) for one in few])
    except Exception:  # of any kind: whether the model takes the examples is asked elsewhere, and said there
        return False
    if together.shape != alone.shape or not bool(together.isfinite().all()) or not torch.equal(together, again):
        return False
    rounding = max(torch.finfo(together.dtype).eps ** 0.5, TF32 if together.is_cuda else 0.0)
    return bool((together - alone).abs().max() > rounding * together.abs().max())
