"""Attention of J clients in C: one head of one example after another, whose scores stay in a core's cache.

    P = softmax(s Q K^T + M)        O = (P * D) V

    dV = (P * D)^T dO      dP = D * dO V^T      dZ = P * (dP - rowsum(P * dP))      dQ = s dZ K      dK = s dZ^T Q

(Vaswani et al., NeurIPS 2017; M is a mask that is added, s the scale, D what dropout multiplies with.) torch computes
a stack of heads as a dozen small products and passes over all scores, with copies between. Here queries, keys and
values are read where the projection left them. In single precision and up to `LONGEST` positions; the rest is left to
`fedge.handle.attention`.
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
from fedge.handle import attention
from fedge.handle.stacked.operator import operator
from fedge.handle.stacked.rule import stacked

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { int64_t job, batch, head, time; } place;
static const i16 LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static inline float *at(float *p, place by, int64_t j, int64_t b, int64_t h) {
  return p + j * by.job + b * by.batch + h * by.head;
}
static void product(int rows, int columns, int inner, const float *a, int am, int ak, const float *b, int bk, float *c, int cm) {
  product_f32(rows, columns, inner, a, am, ak, b, bk, c, cm);
}
/* Rows of D numbers into whole vectors, with zeros behind; and as columns, times a scale. */
static void rows(int n, int D, const float *a, int64_t by, float *b) {
  for (int r = 0; r < n; r++)
    for (int c = 0; c < D; c += 16) *(v16 *)(b + (size_t)r * WHOLE(D) + c) = some(a + r * by + c, D - c < 16 ? D - c : 16);
}
static void columns(int n, int D, const float *a, int64_t by, float scale, float *b) {
  int wide = WHOLE(n), r = 0;
  if (D % 4 == 0 && scale == 1.f) for (; r + 4 <= n; r += 4) for (int c = 0; c < D; c += 4) turn_f32(a + r * by + c, by, b + (size_t)c * wide + r, wide);
  for (; r < n; r++) for (int c = 0; c < D; c++) b[(size_t)c * wide + r] = scale * a[r * by + c];
  for (int c = 0; c < D; c++) for (int l = n; l < wide; l++) b[(size_t)c * wide + l] = 0;
}
static void back(int n, int D, const float *b, float scale, float *a, int64_t by) {
  for (int r = 0; r < n; r++)
    for (int c = 0; c < D; c += 16) put(a + r * by + c, scale * *(const v16 *)(b + (size_t)r * WHOLE(D) + c), D - c < 16 ? D - c : 16);
}
static void softmax(int T, int S, float scale, float *P) {
  int last = (S - 1) / 16 * 16;
  i16 inside = LANES < S - last;
  v16 zero = {0}, none = zero - INFINITY;
  for (int t = 0; t < T; t++, P += WHOLE(S)) {
    v16 most = none, sum = zero;
    *(v16 *)(P + last) = choose(inside, *(v16 *)(P + last), none);
    for (int s = 0; s <= last; s += 16) { v16 x = *(v16 *)(P + s); most = choose(x > most, x, most); }
    most = zero + largest(most);
    for (int s = 0; s <= last; s += 16) {
      v16 x = *(v16 *)(P + s) - most, e = choose(x < -87.f, zero, power(x));
      *(v16 *)(P + s) = e;
      sum += e;
    }
    sum = zero + 1.f / total(sum);
    for (int s = 0; s <= last; s += 16) *(v16 *)(P + s) *= sum;
    *(v16 *)(P + last) = choose(inside, *(v16 *)(P + last), zero);
  }
}
/* a * drop, in b; a itself where nothing is dropped. */
static const float *kept(int T, int S, const float *a, const float *drop, float *b) {
  int W = WHOLE(S);
  if (!drop) return a;
  for (int t = 0; t < T; t++) for (int s = 0; s < S; s += 16)
    *(v16 *)(b + (size_t)t * W + s) = *(const v16 *)(a + (size_t)t * W + s) * some(drop + (size_t)t * S + s, S - s < 16 ? S - s : 16);
  return b;
}
static void forward(int T, int S, float scale, const float *q, int64_t qt, const float *k, int64_t kt, const float *v, int64_t vt,
    const float *mask, int64_t mt, int64_t ms, const float *drop, float *o, int64_t ot, float *P, float *own) {
  int W = WHOLE(S), V = WHOLE(D);
  float *turned = own, *values = turned + D * W, *sums = values + S * V, *left = sums + T * V;
  columns(S, D, k, kt, scale, turned);
  rows(S, D, v, vt, values);
  memset(P, 0, sizeof(float) * T * W);
  if (mask) for (int t = 0; t < T; t++) for (int s = 0; s < S; s++) P[(size_t)t * W + s] = mask[t * mt + s * ms];
  product(T, W, D, q, qt, 1, turned, W, P, W);
  softmax(T, S, scale, P);
  memset(sums, 0, sizeof(float) * T * V);
  product(T, V, S, kept(T, S, P, drop, left), W, 1, values, V, sums, V);
  back(T, D, sums, 1, o, ot);
}
static void backward(int T, int S, float scale, const float *g, int64_t gt, const float *q, int64_t qt, const float *k, int64_t kt,
    const float *v, int64_t vt, const float *P, const float *drop, float *dq, int64_t dqt, float *dk, int64_t dkt, float *dv, int64_t dvt, float *own) {
  int W = WHOLE(S), V = WHOLE(D);
  float *slopes = own, *keys = slopes + T * V, *queries = keys + S * V, *turned = queries + T * V;
  float *dZ = turned + D * W, *sums = dZ + T * W, *left = sums + (T + 2 * S) * V;
  rows(T, D, g, gt, slopes);
  rows(S, D, k, kt, keys);
  rows(T, D, q, qt, queries);
  columns(S, D, v, vt, 1, turned);
  memset(dZ, 0, sizeof(float) * T * W);
  product(T, W, D, slopes, V, 1, turned, W, dZ, W);
  kept(T, S, dZ, drop, dZ);
  for (int t = 0; t < T; t++) {
    v16 sum = {0};
    float *z = dZ + (size_t)t * W;
    const float *p = P + (size_t)t * W;
    for (int s = 0; s < W; s += 16) sum += *(v16 *)(z + s) * *(const v16 *)(p + s);
    sum = (v16){0} + total(sum);
    for (int s = 0; s < W; s += 16) *(v16 *)(z + s) = (*(v16 *)(z + s) - sum) * *(const v16 *)(p + s);
  }
  memset(sums, 0, sizeof(float) * (T + 2 * S) * V);
  product(T, V, S, dZ, W, 1, keys, V, sums, V);
  back(T, D, sums, scale, dq, dqt);
  product(S, V, T, dZ, 1, W, queries, V, sums + T * V, V);
  back(S, D, sums + T * V, scale, dk, dkt);
  product(S, V, T, kept(T, S, P, drop, left), 1, W, slopes, V, sums + (T + S) * V, V);
  back(S, D, sums + (T + S) * V, 1, dv, dvt);
}
/* Jobs first to last - 1; `n` are B, H, T, S, whether there is a mask and its five strides, then the strides of the tensors;
   the last pointer is what dropout multiplies with, or null. */
int run(int what, int64_t first, int64_t last, const int64_t *n, double scale, float **p) {
  int T = n[2], S = n[3], W = WHOLE(S), V = WHOLE(D);
  const place *by = (const place *)(n + 10);
  size_t room = what ? (size_t)V * (3 * T + 3 * S) + (size_t)W * (D + 2 * T) : (size_t)D * W + (size_t)V * (S + T) + (size_t)T * W;
  float *own = aligned_alloc(64, (room * sizeof(float) + 127) / 64 * 64);
  if (!own) return 1;
  for (int64_t j = first; j < last; j++) for (int64_t b = 0; b < n[0]; b++) for (int64_t h = 0; h < n[1]; h++) {
    float *q = at(p[0], by[0], j, b, h), *k = at(p[1], by[1], j, b, h), *v = at(p[2], by[2], j, b, h);
    size_t head = (size_t)(j * n[0] + b) * n[1] + h;
    float *P = p[3] + head * T * W, *drop = p[what ? 8 : 6], *o = at(p[4], by[3], j, b, h);
    if (drop) drop += head * T * S;
    if (!what) {
      float *mask = n[4] ? p[5] + j * n[5] + b * n[6] + h * n[7] : 0;
      forward(T, S, scale, q, by[0].time, k, by[1].time, v, by[2].time, mask, n[8], n[9], drop, o, by[3].time, P, own);
    } else
      backward(T, S, scale, o, by[3].time, q, by[0].time, k, by[1].time, v, by[2].time, P, drop,
        at(p[5], by[4], j, b, h), by[4].time, at(p[6], by[5], j, b, h), by[5].time, at(p[7], by[6], j, b, h), by[6].time, own);
  }
  free(own);
  return 0;
}
"""  # noqa: E501

LONGEST, WIDEST = 512, 128  # positions, and numbers per head
BYTES = 4


@lru_cache(maxsize=16)
def program(width: int) -> Any:
    """For heads of so many numbers; raises NoCompiler where it cannot be made."""
    return load(PRELUDE + VECTORS + f"enum {{ D = {width} }};" + _SOURCE)[0]


def _run(what: int, width: int, jobs: int, numbers: list[int], scale: float, places: Any) -> None:
    run, given, factor = program(width), integers(numbers), ctypes.c_double(scale)
    each(jobs, lambda first, last: run(what, first, last, given, factor, places), "attention")


def _whole(n: int) -> int:
    return -(-n // 16) * 16


# -- attention of a sequence to itself: x holds queries, keys and values of all heads side by side


class _Layout:
    """How x [J, B, T, 3 H d] lies in memory, or [J, T, B, 3 H d] where time is `first`."""

    def __init__(self, x: Tensor, numbers: list[float]) -> None:
        self.heads, self.scale, first = int(numbers[0]), numbers[1], bool(numbers[2])
        self.jobs, one, two, total = x.shape
        self.batch, self.times = (two, one) if first else (one, two)
        self.all, self.masked, self.drops = total // 3, bool(numbers[3]), bool(numbers[4])
        self.width = self.all // self.heads
        self.first = first

    def strides(self, wide: int) -> list[int]:
        """Of a job, an example, a head and a time in such a tensor of `wide` numbers per position."""
        outer = wide * (self.batch if self.first else self.times)
        example, time = (wide, outer) if self.first else (outer, wide)
        return [wide * self.batch * self.times, example, self.width, time]

    def sizes(self, mask: Tensor | None = None) -> list[int]:
        steps = [0] * 5 if mask is None else list(mask.stride())
        return [self.batch, self.heads, self.times, self.times, mask is not None, *steps]

    def run(self, what: int, numbers: list[int], places: Any) -> None:
        _run(what, self.width, self.jobs, numbers, self.scale, places)


def _forward(x: Tensor, mask: Tensor, drop: Tensor, numbers: list[float]) -> list[Tensor]:
    """The outcome of every position, in the order of x, and P [J, B, H, T, T] with rows in whole vectors."""
    x, drop, found = x.contiguous(), drop.contiguous(), _like(x, mask, drop, numbers)
    it = _Layout(x, numbers)
    three, one = it.strides(3 * it.all), it.strides(it.all)
    out, p = found
    parts = [0, BYTES * it.all, 2 * BYTES * it.all]
    places = pointers([x, x, x, p, out, mask, drop if it.drops else None], parts)
    it.run(0, it.sizes(mask if it.masked else None) + 3 * three + one, places)
    return found


def _like(x: Tensor, mask: Tensor, drop: Tensor, numbers: list[float]) -> list[Tensor]:
    it = _Layout(x, numbers)
    p = x.new_empty(it.jobs, it.batch, it.heads, it.times, _whole(it.times))
    return [x.new_empty(*x.shape[:3], it.all), p]


def _backward(g: Tensor, x: Tensor, p: Tensor, drop: Tensor, numbers: list[float]) -> list[Tensor]:
    """The gradient in x."""
    g, x, drop, into = g.contiguous(), x.contiguous(), drop.contiguous(), x.new_empty(x.shape)
    it = _Layout(x, numbers)
    three, one = it.strides(3 * it.all), it.strides(it.all)
    parts = [0, BYTES * it.all, 2 * BYTES * it.all]
    tensors = [x, x, x, p, g, into, into, into, drop if it.drops else None]
    it.run(1, it.sizes() + 3 * three + one + 3 * three, pointers(tensors, [*parts, 0, 0, *parts]))
    return [into]


def _into(g: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape)]


forward = operator("self_attention_in_c", _forward, 3, like=_like, numbers="float[]")
backward = operator("self_attention_in_c_backward", _backward, 4, like=_into, numbers="float[]")


class ToItself(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, drop: Tensor | None, numbers: list[float]) -> Tensor:
        drops = x if drop is None else drop
        out, p = forward(x, x if mask is None else mask, drops, numbers)
        ctx.save_for_backward(x, p, drops)
        ctx.numbers = numbers
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return backward(grads[0], *ctx.saved_tensors, ctx.numbers)[0], None, None, None


def to_itself(x: Tensor, heads: int, mask: Tensor | None, drop: Tensor | None, first: bool) -> Tensor:
    """x [B, T, 3 E] of one client, or [T, B, 3 E] where time is `first`.

    `mask` [B, H, T, T] is added to the scores, and what comes of them multiplied with `drop`.
    """

    def parts(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        return None if mask is None else rest[0], None if drop is None else rest[-1]

    def one(x: Tensor, *rest: Tensor) -> Tensor:
        return attention.to_itself(x, heads, *parts(rest), first)

    def many(x: Tensor, *rest: Tensor) -> Tensor:
        added, dropped = parts(rest)
        width, times = x.shape[-1] // 3 // heads, x.shape[1 if first else 2]
        if not _fits(x.dtype, width, times) or not _may_be_added(added, x):
            return one(x, *rest)
        numbers = [heads, 1 / math.sqrt(width), first, added is not None, dropped is not None]
        found: Tensor = ToItself.apply(x, added, dropped, numbers)  # type: ignore[no-untyped-call]
        return found

    found: Tensor = stacked(one, many, x, *(part for part in (mask, drop) if part is not None))
    return found


# -- queries [B, H, T, d], keys and values [B, H, S, d], wherever they lie


def _last_in_a_row(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _about(q: Tensor, k: Tensor, mask: Tensor | None) -> list[int]:
    steps = [0] * 5 if mask is None else list(mask.stride())
    return [*q.shape[1:4], k.shape[3], mask is not None, *steps]


def _forward_apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, numbers: list[float]) -> list[Tensor]:
    """The outcome [J, B, H, T, d], and P [J, B, H, T, S] with rows in whole vectors."""
    q, k, v = (_last_in_a_row(one) for one in (q, k, v))
    out, p = _like_apart(q, k, v, mask, numbers)
    strides = [step for one in (q, k, v, out) for step in one.stride()[:4]]
    sizes = _about(q, k, mask if numbers[1] else None)
    _run(0, q.shape[4], len(q), sizes + strides, numbers[0], pointers([q, k, v, p, out, mask, None]))
    return [out, p]


def _like_apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, numbers: list[float]) -> list[Tensor]:
    return [q.new_empty(q.shape), q.new_empty(*q.shape[:4], _whole(k.shape[3]))]


def _backward_apart(g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, numbers: list[float]) -> list[Tensor]:
    """The gradients in q, k and v."""
    g, q, k, v = (_last_in_a_row(one) for one in (g, q, k, v))
    found = [one.new_empty(one.shape) for one in (q, k, v)]
    strides = [step for one in (q, k, v, g, *found) for step in one.stride()[:4]]
    _run(1, q.shape[4], len(q), _about(q, k, None) + strides, numbers[0], pointers([q, k, v, p, g, *found, None]))
    return found


forward_apart = operator("attention_in_c", _forward_apart, 4, like=_like_apart, numbers="float[]")
backward_apart = operator(
    "attention_in_c_backward",
    _backward_apart,
    5,
    like=lambda g, q, k, v, p, numbers: [one.new_empty(one.shape) for one in (q, k, v)],
    numbers="float[]",
)


class Apart(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        out, p = forward_apart(q, k, v, q if mask is None else mask, [scale, mask is not None])
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_apart(grads[0], *ctx.saved_tensors, [ctx.scale]), None, None


def product_attention(*args: Any, **options: Any) -> Any:
    """F.scaled_dot_product_attention without dropout, of queries, keys and values with four axes."""
    given = attention.usual(*args, **options)
    if given is None:
        return NotImplemented
    q, k, v, mask, scale = given

    def one(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return attention.attended(q, k, v, masks[0] if masks else None, scale, 0.0)[0]

    def many(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        mask = masks[0] if masks else None
        if not _fits(q.dtype, q.shape[4], q.shape[3], k.shape[3]) or not _may_be_added(mask, q):
            return one(q, k, v, *masks)
        found: Tensor = Apart.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
        return found

    whole = () if mask is None else (mask.expand(*q.shape[:3], k.shape[2]),)
    return stacked(one, many, q, k, v, *whole)


def _may_be_added(mask: Tensor | None, x: Tensor) -> bool:
    """Whether a mask is none that is learned, and of the same type."""
    return mask is None or (mask.dtype == x.dtype and not mask.requires_grad)


def _fits(dtype: torch.dtype, width: int, *times: int) -> bool:
    small = dtype == torch.float32 and 0 < width <= WIDEST and min(times) > 0 and max(times) <= LONGEST
    return small and is_made(partial(program, width), "attention and layer norms")
