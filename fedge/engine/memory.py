"""How many jobs to compute at once."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedge import tree
from fedge.handle import Handle


class Budget:
    """A chunk size from the model, the batch and the free memory.

    A job holds about six copies of the parameters (sent, carry, gradient, their successors, upload) and three of the
    activations of its batch. On a CPU, convolutions are better off one client at a time: at the batch sizes of clients
    the grouped convolution that vmap makes of them is slower than a loop.
    """

    def __init__(self, handle: Handle, example: Tensor, device: torch.device) -> None:
        self.handle, self.example = handle, example
        self.memory = _free(device)
        self.loop = device.type == "cpu" and has_convolutions(handle.module)

    @cached_property
    def costs(self) -> tuple[int, int]:
        """Bytes a job, and bytes an example of its batch."""
        params = parameters_of(self.handle)
        itemsize = next(iter(params.values())).element_size()
        scalars = _activations(self.handle, params, self.example) + self.example.numel()
        return 6 * tree.nbytes(params), 3 * itemsize * scalars

    def jobs(self, width: int) -> int:
        """How many jobs with batches of this width fit, at least one."""
        if self.loop:
            return 1
        job, example = self.costs
        return max(1, self.memory // (job + width * example))


def useful_threads(handle: Handle) -> int:
    """One thread for a small model without convolutions: its operations are too short to be worth sharing."""
    small = tree.size(parameters_of(handle)) < 200_000 and not has_convolutions(handle.module)
    return 1 if small else torch.get_num_threads()


def parameters_of(handle: Handle) -> tree.Params:
    return {name: leaf.detach() for name, leaf in handle.module.named_parameters()}


def has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(layer, _ConvNd) for layer in module.modules())


def _activations(handle: Handle, params: tree.Params, example: Tensor) -> int:
    """Scalars that the layers put out for one example."""
    count = 0

    def note(module: nn.Module, args: object, out: object) -> None:
        nonlocal count
        count += out.numel() if isinstance(out, Tensor) else 0

    hooks = [m.register_forward_hook(note) for m in handle.module.modules() if not [*m.children()]]
    try:
        handle.logits(params, example.unsqueeze(0))
    finally:
        for hook in hooks:
            hook.remove()
    return count


def _free(device: torch.device) -> int:
    """Bytes a chunk may take: half of what is free on a GPU; a fixed gibibyte on a CPU, so that chunks do not vary."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return 1 << 30
