"""Layer normalisation of J clients in C: one pass over a position, whose numbers stay in registers.

    y = w n + b,   n = (x - m) r,   r = (v + eps)^-1/2,   m and v the mean and variance of a position's D numbers

    db = sum g        dw = sum g n        dx = r (w g - (sum w g + n sum w g n) / D)

(Ba, Kiros and Hinton, 2016.) In torch the normalisation is one pass, each client's scale and shift are two more, and
there are six on the way back. In single precision and up to `WIDEST` numbers; the rest is left to
`fedge.handle.stacked.norms`.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedge.engine.recording.c_jobs import each, integers, pointers
from fedge.engine.recording.c_library import is_made, load
from fedge.engine.recording.c_products import PRELUDE, VECTORS
from fedge.handle.layer import arguments
from fedge.handle.stacked import norms
from fedge.handle.stacked.operator import operator
from fedge.handle.stacked.rule import stacked

_SOURCE = r"""
#include <string.h>
enum { BLOCKS = WHOLE(D) / 16 };
#define EACH for (int i = 0; i < BLOCKS; i++)
#define SIZE(i) (D - 16 * (i) < 16 ? D - 16 * (i) : 16)
#define GET(p, i) some((p) + 16 * (i), SIZE(i))
#define PUT(p, i, x) put((p) + 16 * (i), x, SIZE(i))
static void forward(int64_t R, float eps, const float *x, const float *w, const float *b, float *y, float *m, float *r) {
  for (int64_t p = 0; p < R; p++, x += D, y += D) {
    v16 far[BLOCKS], sum = {0}, square = {0};
    EACH sum += far[i] = GET(x, i);
    float mean = total(sum) / D;
    EACH {
      far[i] -= mean;
      if (SIZE(i) < 16) for (int l = SIZE(i); l < 16; l++) far[i][l] = 0;
      square += far[i] * far[i];
    }
    float scale = 1 / sqrtf(total(square) / D + eps);
    EACH PUT(y, i, far[i] * scale * GET(w, i) + GET(b, i));
    m[p] = mean;
    r[p] = scale;
  }
}
static void backward(int64_t R, const float *g, const float *x, const float *w, const float *m, const float *r, float *dx, float *dw, float *db) {
  memset(dw, 0, sizeof(float) * D);
  memset(db, 0, sizeof(float) * D);
  for (int64_t p = 0; p < R; p++, g += D, x += D, dx += D) {
    v16 own[BLOCKS], normal[BLOCKS], one = {0}, two = {0};
    EACH {
      v16 slope = GET(g, i);
      normal[i] = (GET(x, i) - m[p]) * r[p];
      PUT(dw, i, GET(dw, i) + slope * normal[i]);
      PUT(db, i, GET(db, i) + slope);
      own[i] = slope * GET(w, i);
      one += own[i];
      two += own[i] * normal[i];
    }
    float level = total(one) / D, tilt = total(two) / D;
    EACH PUT(dx, i, r[p] * (own[i] - level - normal[i] * tilt));
  }
}
/* Jobs first to last - 1; `n`: the positions of each. */
int run(int what, int64_t first, int64_t last, const int64_t *n, double eps, float **p) {
  int64_t R = *n;
  for (int64_t j = first; j < last; j++)
    if (what)
      backward(R, p[0] + j * R * D, p[1] + j * R * D, p[2] + j * D, p[3] + j * R, p[4] + j * R, p[5] + j * R * D, p[6] + j * D, p[7] + j * D);
    else
      forward(R, eps, p[0] + j * R * D, p[1] + j * D, p[2] + j * D, p[3] + j * R * D, p[4] + j * R, p[5] + j * R);
  return 0;
}
"""  # noqa: E501

WIDEST = 512  # numbers per position: more do not stay in registers


@lru_cache(maxsize=16)
def program(width: int) -> Any:
    """For positions of so many numbers; raises NoCompiler where it cannot be made."""
    return load(PRELUDE + VECTORS + f"enum {{ D = {width} }};" + _SOURCE)[0]


def _run(what: int, x: Tensor, width: int, eps: float, tensors: list[Tensor]) -> None:
    run, places = program(width), pointers(tensors)
    given, slack = integers([x[0].numel() // width]), ctypes.c_double(eps)
    each(len(x), lambda first, last: run(what, first, last, given, slack, places), "a layer norm")


def _forward(x: Tensor, w: Tensor, b: Tensor, numbers: list[float]) -> list[Tensor]:
    """x [J, ..., *shape], w and b [J, *shape], eps: y, and m and r [J, positions]."""
    x, w, b = (one.contiguous() for one in (x, w, b))
    found = _like(x, w)
    _run(0, x, w[0].numel(), numbers[0], [x, w, b, *found])
    return found


def _like(x: Tensor, w: Tensor, *rest: Any) -> list[Tensor]:
    positions = x.numel() // w.numel() if w.numel() else 0
    return [x.new_empty(x.shape), *(x.new_empty(len(x), positions) for _ in range(2))]


def _backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor) -> list[Tensor]:
    """The gradients in x, w and b."""
    g, x, w = (one.contiguous() for one in (g, x, w))
    found = _alike(g, x, w)
    _run(1, x, w[0].numel(), 0.0, [g, x, w, m, r, *found])
    return found


def _alike(g: Tensor, x: Tensor, w: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(w.shape)]


forward = operator("layer_norm_in_c", _forward, 3, like=_like, numbers="float[]")
backward = operator("layer_norm_in_c_backward", _backward, 5, like=_alike)


class LayerNorm(Function):
    """With scale and shift."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        out, m, r = forward(x, w, b, [eps])
        ctx.save_for_backward(x, w, m, r)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grads[0], *ctx.saved_tensors), None


def layer_norm(*args: Any, **options: Any) -> Any:
    """F.layer_norm with scale and shift; what the program does not take, by the rule in torch's operations."""
    x, shape, weight, bias, eps = arguments(args, options, norms.LAYER)
    if weight is None or bias is None or not _fits(x, weight, bias, math.prod(shape)):
        return norms.layer_norm(*args, **options)
    return stacked(
        lambda x, w, b: torch.nn.functional.layer_norm(x, shape, w, b, eps),
        lambda *tensors: LayerNorm.apply(*tensors, eps),  # type: ignore[no-untyped-call]
        x, weight, bias,
    )  # fmt: skip


def _fits(x: Tensor, weight: Tensor, bias: Tensor, width: int) -> bool:
    single = x.dtype == weight.dtype == bias.dtype == torch.float32
    fits = single and weight.shape == bias.shape and x.numel() > 0 and 0 < width <= WIDEST
    return fits and is_made(partial(program, width), "attention and layer norms")
