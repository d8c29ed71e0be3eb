"""Convolutions as matrix products: the patches that a kernel sees, and their transpose, back to pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def output_size(x: Tensor, kernel: Sequence[int], padding: tuple[int, int]) -> tuple[int, int]:
    """The height and the width of what a convolution puts out."""
    return x.shape[-2] + 2 * padding[0] - kernel[0] + 1, x.shape[-1] + 2 * padding[1] - kernel[1] + 1


def padded(x: Tensor, by: tuple[int, int]) -> Tensor:
    return F.pad(x, (by[1], by[1], by[0], by[0])) if any(by) else x


def patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """[..., H, W] -> a view [..., kh, kw, H', W'] of what each element of the kernel sees."""
    return x.unfold(-2, kernel[0], 1).unfold(-2, kernel[1], 1).movedim((-2, -1), (-4, -3))


def put_back(found: Tensor, padding: tuple[int, int], fused: bool) -> Tensor:
    """The transpose of `patches`: every pixel's sum over the patches that saw it.

    Padded, the element (dh, dw) of the patches that saw pixel (h, w) lies at (h + kh-1-dh, w + kw-1-dw). A compiler
    makes one kernel of the sum of slices; without one, the same slices are a single strided view that is summed.
    """
    kh, kw, rows, columns = found.shape[-4:]
    extra = (kh - 1 - padding[0], kw - 1 - padding[1])
    found = padded(found, extra)
    height, width = rows + kh - 1 - 2 * padding[0], columns + kw - 1 - 2 * padding[1]
    if fused:
        total: Any = None
        for dh in range(kh):
            for dw in range(kw):
                part = found[..., dh, dw, kh - 1 - dh : kh - 1 - dh + height, kw - 1 - dw : kw - 1 - dw + width]
                total = part if total is None else total + part
        return torch.as_tensor(total)
    found = found.contiguous()
    *outer, down, right, row, one = found.stride()
    view = found.as_strided(
        (*found.shape[:-4], height, width, kh, kw),
        (*outer, row, one, down - row, right - one),
        (kh - 1) * row + (kw - 1) * one,
    )
    return torch.sum(view, (-2, -1))


def aligned(x: Tensor, dim: int) -> Tensor:
    """Zeros up to a multiple of 16 bytes: the fast products of a GPU want it."""
    missing = -x.shape[dim] % (16 // x.element_size()) if x.device.type == "cuda" else 0
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def cut(x: Tensor, depth: int) -> Tensor:
    """Without the zeros of `aligned`."""
    return x if x.shape[-1] == depth else x[..., :depth]
