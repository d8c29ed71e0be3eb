"""Where a run is computed: device, precision, threads, processes, the model's handle, the examples at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedge.checks import choice
from fedge.core import Algorithm
from fedge.engine.hardware.budget import useful_threads
from fedge.engine.hardware.device import place
from fedge.engine.ranks.process_group import Group
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.inputs import Inputs, cast, map_, to

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def check_precision(precision: str, device: torch.device) -> None:
    choice("precision", precision, PRECISIONS)
    if precision != "fp32" and device.type != "cuda":
        raise ValueError(f"precision is {precision!r}, which is for CUDA devices: use 'fp32' on {device}")


@dataclass
class Runtime:
    """What the server of a run computes with. `x` and `y` are the training examples that it has, on the device."""

    handle: Handle
    device: torch.device
    x: Inputs
    y: Tensor
    precision: str = "fp32"
    group: Group = field(default_factory=Group)
    dtype: torch.dtype = torch.float32  # of the parameters, which examples follow

    def __post_init__(self) -> None:
        self.threads = self.judges = 1 if self.device.type == "cuda" else useful_threads(self.handle)

    @property
    def example(self) -> Inputs:
        """One input of the model, [1, ...], all zeros, on the CPU."""
        return map_(lambda part: torch.zeros(1, *part.shape[1:], dtype=part.dtype), self.x)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it torch uses the threads that suit the model, and fp32 means fp32: no TF32 unless asked for.

        Attention is computed by its formula: the fused kernels cannot be vectorised over clients.
        """
        threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn.allow_tf32
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = self.precision != "fp32"
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = cudnn

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within it the model is evaluated: with all threads that suit it, because no worker runs meanwhile."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.judges)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def plain_runtime(algorithm: Algorithm[Any], federation: Federation, device: torch.device | str = "cpu") -> Runtime:
    """The server of a fleet, or of the loop-back link: the user's module by autograd, in the module's own precision."""
    found, data = place(device), federation.data
    dtype = next(iter(parameters(algorithm.model).values())).dtype
    handle = Handle(algorithm.model, algorithm.loss, found)
    x, y = (to(cast(part, dtype), found) for part in (data.train_x, data.train_y))
    return Runtime(handle, found, x, y, dtype=dtype)
