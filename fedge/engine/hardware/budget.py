"""How many jobs to compute at once."""

from __future__ import annotations

import sys
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedge import tree
from fedge.handle import Handle
from fedge.inputs import Inputs, map_, numel

MOST = 1 << 31  # scalars that all activations of a chunk may have together, and any one of its parameters


class Budget:
    """A chunk size from the model, the batch and the free memory.

    A job holds about six copies of the parameters (sent, carry, gradient, their successors, upload) and three of the
    activations of its batch, among which are the patches that convolutions are made of. However much memory there is,
    no tensor gets more than 2^31 elements: a device is busy long before, and beyond it indices need 64 bits. On a CPU,
    convolutions are better off one client at a time: at the batch sizes of clients they are slower batched than in a
    loop.
    """

    def __init__(self, handle: Handle, example: Inputs, device: torch.device) -> None:
        self.handle, self.example = handle, example
        self.memory = _free(device)
        self.loop = device.type == "cpu" and has_convolutions(handle.module)

    @cached_property
    def costs(self) -> tuple[int, int, int]:
        """Bytes per job; bytes and scalars per example of its batch."""
        params = parameters_of(self.handle)
        itemsize = next(iter(params.values())).element_size()
        scalars = _activations(self.handle, params, self.example) + numel(self.example)
        return 6 * tree.nbytes(params), 3 * itemsize * scalars, scalars

    @cached_property
    def largest(self) -> int:
        """Scalars of the largest parameter."""
        return max(leaf.numel() for leaf in parameters_of(self.handle).values())

    def jobs(self, width: int) -> int:
        """How many jobs with batches of this width fit, at least one."""
        job, example, scalars = self.costs
        return max(1, min(self.memory // (job + width * example), MOST // max(width * scalars, self.largest)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a computation failed for want of memory; on a CPU torch says so only in words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error)
        for words in ("can't allocate memory", "Cannot allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    )


def peak(device: torch.device) -> int:
    """Peak memory in bytes so far: by torch on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # not known there
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def useful_threads(handle: Handle) -> int:
    """One thread for a small model without convolutions: its operations are too short to be worth sharing."""
    small = tree.size(parameters_of(handle)) < 200_000 and not has_convolutions(handle.module)
    return 1 if small else torch.get_num_threads()


def parameters_of(handle: Handle) -> tree.Params:
    return {name: leaf.detach() for name, leaf in handle.module.named_parameters()}


def has_convolutions(module: nn.Module) -> bool:
    """False of what is no module, too: the handle says what is wrong with it."""
    return isinstance(module, nn.Module) and any(isinstance(layer, _ConvNd) for layer in module.modules())


def _activations(handle: Handle, params: tree.Params, example: Inputs) -> int:
    """Scalars that the layers put out for one example."""
    count = 0

    def note(module: nn.Module, args: object, out: object) -> None:
        nonlocal count
        count += out.numel() if isinstance(out, Tensor) else 0
        if isinstance(module, nn.Conv2d) and isinstance(out, Tensor):
            count += out[0, 0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(note) for m in handle.module.modules() if not [*m.children()]]
    try:
        handle.logits(params, map_(lambda part: part.unsqueeze(0), example))
    finally:
        for hook in hooks:
            hook.remove()
    return count


def _free(device: torch.device) -> int:
    """Bytes a chunk may take: half of what is free on a GPU; about a CPU's cache, and always the same there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return 1 << 25
