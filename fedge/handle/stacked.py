"""The gradient of a chain for J jobs at once, written down: every layer is a batched product or a pointwise map.

A convolution is weights times patches, with the weights as they are stored:

    out = W P + b        dW = dout P^T        db = dout 1        dP = W^T dout        dx = sum of dP over patches

A job is one product and its weights stay where they are: images lie as [J, C, B, H, W]. In a layer with few weights
that would be too few and too long sums for dW; there every example is a product of its own, on a copy of its job's
weights: images lie as [J, B, C, H, W]. Vectors lie as [J, B, F].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedge.core import Params
from fedge.handle.chain import Layer
from fedge.handle.tape import Tape
from fedge.keys import fold_tensor, keep_mask

TERMS = 128  # examples: compiled, 100 terms cost twice the time of 15 and 600 eight times


class StackedTape(Tape):
    """Everything has a leading job axis.

    `fused` says that a compiler joins pointwise operations: then they are spelt out, and nothing is done by halves.
    """

    def __init__(self, params: Params, key: Tensor, fused: bool) -> None:
        super().__init__(params, key)
        self.fused = fused
        self.channels_first = False  # images lie as [J, C, B, H, W]

    def forward(self, layers: list[Layer], x: Tensor) -> Tensor:
        return self._turn(super().forward(layers, x), False)

    def _turn(self, x: Tensor, channels_first: bool) -> Tensor:
        """Images in the wanted order, as a view."""
        if channels_first == self.channels_first:
            return x
        self.channels_first = channels_first
        return self.noted(x.transpose(1, 2), lambda g: g.transpose(1, 2))

    def keep(self, x: Tensor, p: float) -> Tensor:
        """The mask of one job is addressed by the element's place in [B, C, H, W], wherever it lies here."""
        shape = x.transpose(1, 2).shape[1:] if self.channels_first else x.shape[1:]
        key = fold_tensor(self.key, self.dropouts).view(-1, *[1] * len(shape))
        found = keep_mask(key, shape, p, x.device)
        return found.transpose(1, 2) if self.channels_first else found

    def flatten(self, layer: Layer, x: Tensor) -> Tensor:
        x = self._turn(x, False)
        shape = x.shape
        return self.noted(x.flatten(2), lambda g: g.view(shape))

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        assert layer.weight is not None
        x, first = self._turn(x, False), self.is_first()
        shape, flat, weight = x.shape, x.flatten(1, -2), self.params[layer.weight]
        bias = None if layer.bias is None else self.params[layer.bias].unsqueeze(1)
        out = self._product(bias, flat, weight.mT)

        def back(g: Tensor) -> Tensor:
            g = g.flatten(1, -2)
            self.grads[layer.weight] = g.mT @ flat  # type: ignore[index]
            if layer.bias is not None:
                self.grads[layer.bias] = g.sum(1)
            return g if first else (g @ weight).view(shape)

        return self.noted(out.view(*shape[:-1], -1), back)

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        assert layer.weight is not None
        if x.dim() != 5:
            raise ValueError(f"'{layer.name}' got examples of shape {list(x.shape[2:])}, expected [C, H, W]")
        weight, bias = self.params[layer.weight], self.params[layer.bias] if layer.bias else None
        jobs, outputs, channels, *kernel = weight.shape
        size = seen(x, kernel, layer["padding"])
        whole = jobs * tiles(outputs) * tiles(channels * kernel[0] * kernel[1]) >= enough(x)
        x, first = self._turn(x, whole), self.is_first()
        examples, depth = x.shape[2 if whole else 1], channels * kernel[0] * kernel[1]
        x = self._kept(padded(x, layer["padding"])) if any(layer["padding"]) else x
        found = patches(x, kernel)  # [J, B, C, kh, kw, H', W'], or C before B
        if whole:
            columns, rows = found.permute(0, 1, 3, 4, 2, 5, 6).reshape(jobs, depth, -1), weight.flatten(2)
        else:
            columns, rows = found.reshape(jobs * examples, depth, -1), _each(weight.flatten(2), examples)
            bias = None if bias is None else _each(bias, examples)
        columns, rows = self._kept(aligned(columns, 1)), self._kept(aligned(rows, 2))
        out = self._product(None if bias is None else bias.unsqueeze(2), rows, columns)

        def back(g: Tensor) -> Tensor:
            g = self._kept(g.reshape(out.shape))
            level = g.sum(2)
            if whole:
                slope = g @ columns.mT
            else:
                slope = self._total((columns @ g.mT).unflatten(0, (jobs, examples))).mT
                level = self._total(level.unflatten(0, (jobs, examples)))
            self.grads[layer.weight] = _cut(slope, depth).reshape(weight.shape)  # type: ignore[index]
            if layer.bias is not None:
                self.grads[layer.bias] = level
            if first:
                return g
            into = (_cut(rows, depth).mT @ g).unflatten(1, (channels, *kernel))
            into = into.unflatten(-1, (examples, *size) if whole else size)
            into = into.permute(0, 1, 4, 2, 3, 5, 6) if whole else into.unflatten(0, (jobs, examples))
            return put_back(into, layer["padding"], self.fused)

        lie = (outputs, examples) if whole else (examples, outputs)
        return self.noted(out.view(jobs, *lie, *size), back)

    def _kept(self, x: Tensor) -> Tensor:
        """Written to memory once: a compiler would compute it anew for every pixel of a window."""
        return x.as_strided(x.shape, x.stride()) if self.fused else x

    def _total(self, parts: Tensor) -> Tensor:
        """The sum over the examples of a job, [J, B, ...]; term by term it is one pass for a compiler.

        Of a large batch it is not spelt out: a compiler needs minutes for so many terms.
        """
        if self.fused and parts.shape[1] <= TERMS:
            return self._kept(sum(parts.unbind(1)[1:], parts[:, 0]))
        return self._kept(parts.sum(1))

    def _product(self, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        if bias is None:
            return a @ b
        return a @ b + bias if self.fused else torch.baddbmm(bias, a, b)

    def pool(self, layer: Layer, x: Tensor) -> Tensor:
        (a, b), (height, width) = layer["kernel"], x.shape[-2:]
        rows, columns = height // a, width // b
        whole = x if (rows * a, columns * b) == (height, width) else x[..., : rows * a, : columns * b]
        windows = whole.unflatten(-2, (rows, a)).unflatten(-1, (columns, b))
        out, where = windows[..., 0, :, 0], torch.zeros((), dtype=torch.int8, device=x.device)
        for place in range(1, a * b):  # the first of equal values wins, as in torch's own pool
            other = windows[..., place // b, :, place % b]
            where = torch.where(other > out, _byte(place, x.device), where)
            out = torch.maximum(out, other)
        where = self._kept(where)
        places = _bytes(a * b, x.device).view(a, 1, b)

        def back(g: Tensor) -> Tensor:
            g = self._kept(g)
            hit = where.unsqueeze(-1).unsqueeze(-3) == places
            spread = torch.where(hit, g.unsqueeze(-1).unsqueeze(-3), 0.0).flatten(-2).flatten(-3, -2)
            left = (0, width - columns * b, 0, height - rows * a)
            return F.pad(spread, left) if any(left) else spread

        return self.noted(torch.as_tensor(out), back)


def tiles(size: int) -> int:
    """How many tiles of 64 numbers."""
    return -(-size // 64)


def enough(x: Tensor) -> int:
    """Tiles of 64 x 64 that keep a GPU busy through a long sum; tensor cores are content with fewer."""
    return 200 if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else 100


def seen(x: Tensor, kernel: Sequence[int], padding: tuple[int, int]) -> tuple[int, int]:
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


def _each(x: Tensor, examples: int) -> Tensor:
    """What a job has, a copy for each of its examples: [J, ...] -> [J * B, ...]."""
    return x.unsqueeze(1).expand(-1, examples, *x.shape[1:]).flatten(0, 1)


def aligned(x: Tensor, dim: int) -> Tensor:
    """Zeros up to a multiple of 16 bytes: the fast products of a GPU want it."""
    missing = -x.shape[dim] % (16 // x.element_size()) if x.device.type == "cuda" else 0
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _cut(x: Tensor, depth: int) -> Tensor:
    """Without the zeros of `aligned`."""
    return x if x.shape[-1] == depth else x[..., :depth]


_CONSTANTS: dict[Any, Tensor] = {}


def _bytes(count: int, device: torch.device) -> Tensor:
    key = (count, device)
    if key not in _CONSTANTS:
        _CONSTANTS[key] = torch.arange(count, dtype=torch.int8, device=device)
    return _CONSTANTS[key]


def _byte(value: int, device: torch.device) -> Tensor:
    return _bytes(128, device)[value]
