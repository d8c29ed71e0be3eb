"""LSTM layers of J clients in C: one client after another, whose numbers stay in a core's cache.

    z_t = W x_t + V h_{t-1} + b          i, f, o = sigmoid(z^i_t, z^f_t, z^o_t)          g = tanh(z^g_t)
    c_t = f c_{t-1} + i g                h_t = o tanh(c_t)

(Hochreiter and Schmidhuber, Neural Computation 1997.) A time step of few examples is a small product, which a library
computes at half the speed of `c_products`, and ten passes over the gates, which are one here. In single precision; what
is in another one is left to `fedge.handle.stacked.lstm`.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import _VF, Tensor
from torch.autograd import Function

from fedge.engine.recording.c_jobs import each, integers, pointers
from fedge.engine.recording.c_library import NoCompiler, load
from fedge.engine.recording.c_products import PRELUDE, VECTORS
from fedge.handle.stacked import lstm
from fedge.handle.stacked.operator import operator
from fedge.handle.stacked.recurrent import MANY

log = logging.getLogger("fedge")

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
static inline v16 logistic(v16 x) { return 1.f / (1.f + power(-x)); }
/* tanh(x): near zero the difference would lose its digits, and Cephes' odd polynomial does not. */
static inline v16 bend(v16 x) {
  v16 zero = {0}, z = x * x;
  v16 p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return choose((x < zero + .625f) & (x > zero - .625f), x + x * (z * p), 2.f / (1.f + power(-2.f * x)) - 1.f);
}
/* b = a with rows in whole vectors, or its transpose. */
static void pack(int rows, int columns, const float *a, float *b, int wide, int turned) {
  for (int r = 0; r < rows; r++) memset(b + (size_t)r * wide + columns, 0, sizeof(float) * (wide - columns));
  if (!turned) for (int r = 0; r < rows; r++) memcpy(b + (size_t)r * wide, a + (size_t)r * columns, sizeof(float) * columns);
  else if (rows % 4 == 0 && columns % 4 == 0)
    for (int r = 0; r < rows; r += 4) for (int c = 0; c < columns; c += 4)
      turn_f32(a + (size_t)c * rows + r, rows, b + (size_t)r * wide + c, wide);
  else for (int r = 0; r < rows; r++) for (int c = 0; c < columns; c++) b[(size_t)r * wide + c] = a[(size_t)c * rows + r];
}
static void product(int rows, int columns, int inner, const float *a, int am, int ak, const float *b, int bk, float *c, int cm) {
  product_f32(rows, columns, inner, a, am, ak, b, bk, c, cm);
}
static void forward(int T, int B, int D, int H, const float *x, const float *h, const float *c, const float *w,
    const float *v, const float *b, float *hs, float *cs, float *bents, float *z, float *wt, float *vt) {
  int G = 4 * H, wide = WHOLE(G);
  pack(D, G, w, wt, wide, 1);
  pack(H, G, v, vt, wide, 1);
  memcpy(hs, h, sizeof(float) * B * H);
  memcpy(cs, c, sizeof(float) * B * H);
  for (int r = 0; r < T * B; r++) memcpy(z + (size_t)r * G, b, sizeof(float) * G);
  product(T * B, G, D, x, D, 1, wt, wide, z, G);
  for (int t = 0; t < T; t++) {
    product(B, G, H, hs + (size_t)t * B * H, H, 1, vt, wide, z + (size_t)t * B * G, G);
    for (int r = 0; r < B; r++) {
      float *gate = z + ((size_t)t * B + r) * G;
      size_t at = ((size_t)t * B + r) * H, next = at + (size_t)B * H;
      for (int k = 0; k < H; k += 16) {
        int n = H - k < 16 ? H - k : 16;
        v16 i = logistic(some(gate + k, n)), f = logistic(some(gate + H + k, n));
        v16 g = bend(some(gate + 2 * H + k, n)), o = logistic(some(gate + 3 * H + k, n));
        v16 now = f * some(cs + at + k, n) + i * g, bent = bend(now);
        put(gate + k, i, n); put(gate + H + k, f, n); put(gate + 2 * H + k, g, n); put(gate + 3 * H + k, o, n);
        put(cs + next + k, now, n); put(bents + at + k, bent, n); put(hs + next + k, o * bent, n);
      }
    }
  }
}
static void backward(int T, int B, int D, int H, const float *dh, const float *dc, const float *x, const float *w,
    const float *v, const float *hs, const float *cs, const float *bents, const float *gates,
    float *dx, float *back, float *into, float *dw, float *dv, float *db, float *dz, float *wp, float *vp, float *xp, float *hp) {
  int G = 4 * H, R = T * B;
  if (H % 16) pack(G, H, v, vp, WHOLE(H), 0), v = vp;
  memset(back, 0, sizeof(float) * B * H);
  memcpy(into, dc, sizeof(float) * B * H);
  for (int t = T - 1; t >= 0; t--) {
    for (int r = 0; r < B; r++) {
      size_t row = (size_t)t * B + r, at = row * H;
      const float *gate = gates + row * G;
      float *slope = dz + row * G;
      for (int k = 0; k < H; k += 16) {
        int n = H - k < 16 ? H - k : 16;
        v16 i = some(gate + k, n), f = some(gate + H + k, n), g = some(gate + 2 * H + k, n), o = some(gate + 3 * H + k, n);
        v16 bent = some(bents + at + k, n), here = some(dh + at + k, n) + some(back + r * H + k, n);
        v16 cell = some(into + r * H + k, n) + here * o * (1.f - bent * bent);
        put(slope + k, cell * g * i * (1.f - i), n);
        put(slope + H + k, cell * some(cs + at + k, n) * f * (1.f - f), n);
        put(slope + 2 * H + k, cell * i * (1.f - g * g), n);
        put(slope + 3 * H + k, here * bent * o * (1.f - o), n);
        put(into + r * H + k, cell * f, n);
      }
    }
    memset(back, 0, sizeof(float) * B * H);
    product(B, H, G, dz + (size_t)t * B * G, G, 1, v, WHOLE(H), back, H);
  }
  if (D % 16) pack(G, D, w, wp, WHOLE(D), 0), pack(R, D, x, xp, WHOLE(D), 0), w = wp, x = xp;
  if (H % 16) pack(R, H, hs, hp, WHOLE(H), 0), hs = hp;
  memset(dx, 0, sizeof(float) * R * D);
  memset(dw, 0, sizeof(float) * G * D);
  memset(dv, 0, sizeof(float) * G * H);
  memset(db, 0, sizeof(float) * G);
  product(R, D, G, dz, G, 1, w, WHOLE(D), dx, D);
  product(G, D, R, dz, 1, G, x, WHOLE(D), dw, D);
  product(G, H, R, dz, 1, G, hs, WHOLE(H), dv, H);
  for (int r = 0; r < R; r++) for (int k = 0; k < G; k++) db[k] += dz[(size_t)r * G + k];
}
/* Jobs first to last - 1; `sizes` are T, B, D, H; returns 1 if there is no memory. */
int run(int what, int64_t first, int64_t last, const int64_t *sizes, float **p) {
  int T = sizes[0], B = sizes[1], D = sizes[2], H = sizes[3], G = 4 * H;
  size_t R = (size_t)T * B, s = (size_t)B * H, in = R * D, a = R * H, W = (size_t)G * D, V = (size_t)G * H;
  size_t room = what ? R * G + (size_t)G * (WHOLE(D) + WHOLE(H)) + R * (WHOLE(D) + WHOLE(H)) : (size_t)WHOLE(G) * (D + H);
  float *own = aligned_alloc(64, (room * sizeof(float) + 127) / 64 * 64);
  if (!own) return 1;
  for (int64_t j = first; j < last; j++) {
    if (!what)
      forward(T, B, D, H, p[0] + j * in, p[1] + j * s, p[2] + j * s, p[3] + j * W, p[4] + j * V, p[5] + j * G,
        p[6] + j * (a + s), p[7] + j * (a + s), p[8] + j * a, p[9] + j * R * G, own, own + (size_t)WHOLE(G) * D);
    else {
      float *wp = own + R * G, *vp = wp + (size_t)G * WHOLE(D), *xp = vp + (size_t)G * WHOLE(H), *hp = xp + R * WHOLE(D);
      backward(T, B, D, H, p[0] + j * a, p[1] + j * s, p[2] + j * in, p[3] + j * W, p[4] + j * V, p[5] + j * (a + s),
        p[6] + j * (a + s), p[7] + j * a, p[8] + j * R * G, p[9] + j * in, p[10] + j * s, p[11] + j * s, p[12] + j * W,
        p[13] + j * V, p[14] + j * G, own, wp, vp, xp, hp);
    }
  }
  free(own);
  return 0;
}
"""  # noqa: E501

Outputs = tuple[Tensor, ...]


@lru_cache(maxsize=1)
def library() -> Any:
    """The program; raises NoCompiler where it cannot be made."""
    return load(PRELUDE + VECTORS + _SOURCE)[0]


def _run(what: int, jobs: int, sizes: tuple[int, ...], tensors: list[Tensor]) -> None:
    given, places = integers(sizes), pointers(tensors)
    each(jobs, lambda first, last: library()(what, first, last, given, places), "an LSTM layer")


def _forward(*tensors: Tensor) -> list[Tensor]:
    """x [J, T, B, D], h and c [J, B, H], w [J, 4H, D], v [J, 4H, H], b [J, 4H]: all h, all c, tanh(c) and gates."""
    given = [tensor.contiguous() for tensor in tensors]
    (jobs, times, examples, inputs), width = given[0].shape, given[1].shape[-1]
    out = [given[0].new_empty(jobs, times + extra, examples, width) for extra in (1, 1, 0)]
    out.append(given[0].new_empty(jobs, times, examples, 4 * width))
    _run(0, jobs, (times, examples, inputs, width), given + out)
    return out


def _backward(*tensors: Tensor) -> list[Tensor]:
    """From the gradients in all h and in the last c, x, w, v and what `forward` gave to those in its arguments."""
    given = [tensor.contiguous() for tensor in tensors]
    (jobs, times, examples, inputs), width = given[2].shape, given[0].shape[-1]
    out = [torch.empty_like(one) for one in (given[2], given[1], given[1], given[3], given[4])]
    out.append(given[0].new_empty(jobs, 4 * width))
    _run(1, jobs, (times, examples, inputs, width), given + out)
    return out


forward = operator("lstm_in_c", _forward, 6, like=lstm._forward)
backward = operator("lstm_in_c_backward", _backward, 9, like=lstm._backward)


class Layer(Function):
    """One layer in one direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Outputs:
        hs, cs, bents, gates = forward(x, h, c, w, v, b)
        ctx.save_for_backward(x, w, v, hs, cs, bents, gates)
        return hs[:, 1:], cs[:, -1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Outputs:
        return tuple(backward(grads[0], grads[1], *ctx.saved_tensors))


def many(x: Tensor, h: Tensor, c: Tensor, w: Tensor, v: Tensor, *biases: Tensor) -> Outputs:
    """x [J, B, T, D] -> [J, B, T, H], and the last h and c."""
    if x.dtype != torch.float32:
        return MANY[_VF.lstm](x, h, c, w, v, *biases)
    b = biases[0] + biases[1] if biases else w.new_zeros(w.shape[:2])
    out, end = Layer.apply(x.transpose(1, 2).contiguous(), h, c, w, v, b)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), out[:, -1], end


def layers() -> dict[Any, Any]:
    """torch's functions that can be computed here; none without a compiler."""
    try:
        library()
    except NoCompiler as reason:
        log.info("LSTM layers are computed by torch's operations: %s", reason)
        return {}
    return {_VF.lstm: many}
