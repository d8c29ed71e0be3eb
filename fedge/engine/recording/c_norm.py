"""Group normalisation of images with the channels of a pixel side by side, in C: torch's own is slow on these.

    y = w n + b,   n = (x - m) r,   r = (v + eps)^-1/2,   m and v the mean and variance of a group of channels

    db = sum g        dw = sum g n        dx = r (w g - (sum_group w g + n sum_group w g n) / M)

(Wu and He, ECCV 2018; M is the number of values in a group.) An image of a client stays in a core's cache meanwhile.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedge.engine.recording.c_library import load, vector_bytes
from fedge.engine.recording.suited import is_transformed
from fedge.handle.stacked.operator import operator

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef {kind} real;
typedef real vec __attribute__((vector_size({bytes}), aligned(sizeof(real)), may_alias));
enum {{ L = {bytes} / sizeof(real) }};
#define EACH(body) do {{ int c = 0; \
  for (; c + (int)L <= C; c += L) {{ typedef vec some; body }} \
  for (; c < C; c++) {{ typedef real some; body }} }} while (0)
#define AT(p) (*(some *)((p) + c))
#define SEEN(p) (*(const some *)((p) + c))
/* The mean over the channels of each group, for every one of them. */
static void share(int C, int G, double values, real *a) {{
  int D = C / G;
  for (int k = 0; k < G; k++) {{
    double sum = 0;
    for (int d = 0; d < D; d++) sum += a[k * D + d];
    for (int d = 0; d < D; d++) a[k * D + d] = sum / values;
  }}
}}
static void forward(int64_t B, int64_t P, int C, int G, double eps, const real *x, const real *w, const real *b, real *y, real *m, real *r) {{
  for (int64_t e = 0; e < B; e++, x += P * C, y += P * C, m += C, r += C) {{
    memset(m, 0, sizeof(real) * C);
    memset(r, 0, sizeof(real) * C);
    EACH(some sum = {{0}}; for (int64_t p = 0; p < P; p++) sum += SEEN(x + p * C); AT(m) = sum;);
    share(C, G, (double)P * (C / G), m);
    EACH(some sum = {{0}}; some mean = AT(m);
      for (int64_t p = 0; p < P; p++) {{ some far = SEEN(x + p * C) - mean; sum += far * far; }} AT(r) = sum;);
    share(C, G, (double)P * (C / G), r);
    for (int c = 0; c < C; c++) r[c] = 1 / sqrt(r[c] + eps);
    EACH(some mean = AT(m); some scale = AT(r) * SEEN(w); some shift = SEEN(b);
      for (int64_t p = 0; p < P; p++) AT(y + p * C) = (SEEN(x + p * C) - mean) * scale + shift;);
  }}
}}
static int backward(int64_t B, int64_t P, int C, int G, const real *g, const real *x, const real *w, const real *m, const real *r, real *dx, real *dw, real *db) {{
  real *one = calloc(2 * C, sizeof(real)), *two = one + C;
  if (!one) return 1;
  memset(dw, 0, sizeof(real) * C);
  memset(db, 0, sizeof(real) * C);
  for (int64_t e = 0; e < B; e++, g += P * C, x += P * C, dx += P * C, m += C, r += C) {{
    EACH(some sum = {{0}}; some square = {{0}}; some mean = SEEN(m); some scale = SEEN(r);
      for (int64_t p = 0; p < P; p++) {{ some slope = SEEN(g + p * C); sum += slope; square += slope * (SEEN(x + p * C) - mean); }}
      square *= scale; AT(db) += sum; AT(dw) += square; AT(one) = sum * SEEN(w); AT(two) = square * SEEN(w););
    share(C, G, (double)P * (C / G), one);
    share(C, G, (double)P * (C / G), two);
    EACH(some mean = SEEN(m); some scale = SEEN(r); some own = scale * SEEN(w); some tilt = scale * scale * AT(two); some level = scale * AT(one);
      for (int64_t p = 0; p < P; p++)
        AT(dx + p * C) = own * SEEN(g + p * C) - level - tilt * (SEEN(x + p * C) - mean););
  }}
  free(one);
  return 0;
}}
/* `sizes` are examples, pixels, channels, groups; returns 1 if there is no memory. */
int run(int what, const int64_t *sizes, double eps, void **p) {{
  if (what) return backward(sizes[0], sizes[1], sizes[2], sizes[3], p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]);
  forward(sizes[0], sizes[1], sizes[2], sizes[3], eps, p[0], p[1], p[2], p[3], p[4], p[5]);
  return 0;
}}
"""  # noqa: E501

LAST = torch.channels_last


@lru_cache(maxsize=2)
def program(dtype: torch.dtype) -> Any:
    """Raises NoCompiler where it cannot be made."""
    return load(_SOURCE.format(kind="float" if dtype == torch.float32 else "double", bytes=vector_bytes()))[0]


def _run(what: int, sizes: list[int], eps: float, tensors: list[Tensor]) -> None:
    given = (ctypes.c_int64 * 4)(*sizes)
    pointers = (ctypes.c_void_p * len(tensors))(*[one.data_ptr() for one in tensors])
    if program(tensors[0].dtype)(what, given, ctypes.c_double(eps), pointers):
        raise MemoryError("no memory for a group norm: lower the batch size")


def _sizes(x: Tensor, groups: int) -> list[int]:
    examples, channels, height, width = x.shape
    return [examples, height * width, channels, groups]


def _forward(x: Tensor, w: Tensor, b: Tensor, numbers: list[float]) -> list[Tensor]:
    """x [B, C, H, W], w and b [C], the number of groups and eps: y, and m and r [B, C]."""
    x, found = x.contiguous(memory_format=LAST), _like(x)
    _run(0, _sizes(x, int(numbers[0])), numbers[1], [x, w.contiguous(), b.contiguous(), *found])
    return found


def _like(x: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=LAST), x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2])]


def _backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor, numbers: list[float]) -> list[Tensor]:
    """The gradients in x, w and b."""
    g, x = (one.contiguous(memory_format=LAST) for one in (g, x))
    found = _alike(g, x, w)
    _run(1, _sizes(x, int(numbers[0])), numbers[1], [g, x, w.contiguous(), m, r, *found])
    return found


def _alike(g: Tensor, x: Tensor, w: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=LAST), w.new_empty(w.shape), w.new_empty(w.shape)]


forward = operator("group_norm_in_c", _forward, 3, like=_like, numbers="float[]")
backward = operator("group_norm_in_c_backward", _backward, 5, like=_alike, numbers="float[]")


class GroupNorm(Function):
    """With scale and shift."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
        out, m, r = forward(x, w, b, [groups, eps])
        ctx.save_for_backward(x, w, b, m, r)
        ctx.numbers = [groups, eps]
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, m, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            out = F.group_norm(x, ctx.numbers[0], w, b, ctx.numbers[1])
            return *torch.autograd.grad(out, (x, w, b), grads[0], create_graph=True), None, None
        dx, dw, db = backward(grads[0], x, w, m, r, ctx.numbers)
        return dx, dw, db, None, None


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As torch's; images with the channels of a pixel side by side are normalised in C."""
    turned = x.dim() == 4 and x.is_contiguous(memory_format=LAST) and not x.is_contiguous()
    if not turned or weight is None or bias is None or is_transformed() or not _fits(x, groups, weight, bias):
        return F.group_norm(x, groups, weight, bias, eps)
    found: Tensor = GroupNorm.apply(x, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return found


def _fits(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> bool:
    """Whether the program may read all of it as it is; torch refuses or converts the rest."""
    known = x.dtype in (torch.float32, torch.float64) and x.dtype == weight.dtype == bias.dtype
    return known and groups > 0 and x.shape[1] % groups == 0 and weight.shape == bias.shape == x.shape[1:2]
