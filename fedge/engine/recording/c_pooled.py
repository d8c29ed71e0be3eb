"""A convolution and the max pool behind it, backwards in C: the pool lets one pixel of every window through.

    dW_o = sum_n g_no P(n, o)        db_o = sum_n g_no        dP(n, o) += g_no W_o

n runs over the windows of all examples, P(n, o) is the patch that made the largest output of window n in channel o. Of
2 x 2 windows these are a quarter of the products of a dense convolution, whose kernels do not know that the other
gradients are zero; windows whose gradient is zero, as behind a ReLU, are left out too. Images lie with the channels of
a pixel side by side, so that a row of a patch is one piece of memory. The sums for a channel stay in registers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fedge.engine.recording.c_library import load, vector_bytes
from fedge.handle.stacked.operator import operator

_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef {kind} real;
typedef {whole} whole;
typedef real vec __attribute__((vector_size({bytes}), aligned(sizeof(real)), may_alias));
enum {{ C = {channels}, O = {outputs}, H = {height}, W = {width}, KH = {kh}, KW = {kw}, A = {a}, B = {b},
  TOP = {top}, LEFT = {left}, HIGH = H + 2 * TOP, WIDE = W + 2 * LEFT, OW = WIDE - KW + 1, OH = HIGH - KH + 1,
  ROWS = OH / A, COLUMNS = OW / B, WINDOWS = ROWS * COLUMNS, ROW = {row}, PATCH = KH * ROW, FEW = {few}, IMAGE = HIGH * WIDE * C + ROW }};
#define LANES ({bytes} / (int)sizeof(real))
typedef whole places_of __attribute__((vector_size({bytes}), aligned(sizeof(real)), may_alias));
/* The largest of each window, and where its patch begins in the padded image; the first of equal ones, and NaN. */
static void forward(int64_t examples, const real *z, real *out, whole *at) {{
  for (int64_t e = 0; e < examples; e++, z += (size_t)OH * OW * O)
    for (int r = 0; r < ROWS; r++) for (int c = 0; c < COLUMNS; c++, out += O, at += O) {{
      const real *first = z + ((size_t)r * A * OW + c * B) * O;
      int o = 0;
      for (; o + LANES <= O; o += LANES) {{
        vec most = *(const vec *)(first + o);
        places_of place = (places_of){{0}} + (whole)((r * A * WIDE + c * B) * C);
        for (int i = 0; i < A; i++) for (int j = 0; j < B; j++) {{
          vec other = *(const vec *)(first + (i * OW + j) * O + o);
          places_of here = (places_of){{0}} + (whole)(((r * A + i) * WIDE + c * B + j) * C);
          places_of more = (other > most) | (other != other);
          most = (vec)((more & (places_of)other) | (~more & (places_of)most));
          place = (more & here) | (~more & place);
        }}
        *(vec *)(out + o) = most;
        *(places_of *)(at + o) = place;
      }}
      for (; o < O; o++) {{
        out[o] = first[o];
        at[o] = (r * A * WIDE + c * B) * C;
        for (int i = 0; i < A; i++) for (int j = 0; j < B; j++) {{
          real other = first[(i * OW + j) * O + o];
          if (other > out[o] || other != other) out[o] = other, at[o] = ((r * A + i) * WIDE + c * B + j) * C;
        }}
      }}
    }}
}}
static inline __attribute__((always_inline)) void weigh(int count, int step, const whole *at, const real *g, const real *x, real *sum) {{
{weigh}
}}
static inline __attribute__((always_inline)) void spread(int count, const whole *at, const real *g, const real *w, real *x) {{
{spread}
}}
/* Where the numbers in between lie must not be known here: compilers make slower code of it. */
static __attribute__((noinline, noclone)) void backward(int64_t examples, const real *g, const whole *at, const real *x, const real *w, real *dx, real *dw, real *restrict db,
  real *image, real *back, real *sum, real *own, real *slopes, whole *places) {{
  int counts[O];
  memset(sum, 0, sizeof(real) * O * PATCH);
  memset(db, 0, sizeof(real) * O);
  for (int o = 0; o < O; o++) for (int c = 0; c < C; c++) for (int i = 0; i < KH; i++) for (int j = 0; j < KW; j++)
    own[o * PATCH + i * ROW + j * C + c] = w[((o * C + c) * KH + i) * KW + j];
  for (int64_t e = 0; e < examples; e++, x += H * W * C, g += WINDOWS * O, at += WINDOWS * O) {{
    for (int h = 0; h < H; h++)
      memcpy(image + ((h + TOP) * WIDE + LEFT) * C, x + h * W * C, sizeof(real) * W * C);
    for (int n = 0; n < WINDOWS; n++) for (int o = 0; o < O; o++) db[o] += g[n * O + o];
    if (!dx && FEW) {{
      for (int o = 0; o < O; o++) weigh(WINDOWS, O, at + o, g + o, image, sum + o * PATCH);
      continue;
    }}
    memset(counts, 0, sizeof(counts));
    for (int n = 0; n < WINDOWS; n++) for (int o = 0; o < O; o++) {{
      int here = o * WINDOWS + counts[o];
      slopes[here] = g[n * O + o];
      places[here] = at[n * O + o];
      counts[o] += g[n * O + o] != 0;
    }}
    for (int o = 0; o < O; o++)
      weigh(counts[o], 1, places + o * WINDOWS, slopes + o * WINDOWS, image, sum + o * PATCH);
    if (!dx) continue;
    memset(back, 0, sizeof(real) * IMAGE);
    for (int o = 0; o < O; o++)
      spread(counts[o], places + o * WINDOWS, slopes + o * WINDOWS, own + o * PATCH, back);
    for (int h = 0; h < H; h++, dx += W * C)
      memcpy(dx, back + ((h + TOP) * WIDE + LEFT) * C, sizeof(real) * W * C);
  }}
  for (int o = 0; o < O; o++) for (int c = 0; c < C; c++) for (int i = 0; i < KH; i++) for (int j = 0; j < KW; j++)
    dw[((o * C + c) * KH + i) * KW + j] = sum[o * PATCH + i * ROW + j * C + c];
}}
/* A thread's own, and kept: the edges of images and of patches are zeros from the beginning, and stay so. */
static _Thread_local real kept[2 * IMAGE + 2 * O * PATCH + O * WINDOWS + 16] __attribute__((aligned(64)));
static _Thread_local whole places[O * WINDOWS + 16];
void run(int what, int64_t examples, void **p) {{
  real *sum = kept + 2 * IMAGE, *slopes = sum + 2 * O * PATCH;
  if (what) backward(examples, p[0], p[1], p[2], p[3], p[4], p[5], p[6], kept, kept + IMAGE, sum, sum + O * PATCH, slopes, places);
  else forward(examples, p[0], p[1], p[2]);
}}
"""  # noqa: E501


@dataclass(frozen=True)
class Geometry:
    """All sizes of a convolution of stride one and the pool behind it."""

    channels: int
    outputs: int
    height: int
    width: int
    kernel: tuple[int, int]
    padding: tuple[int, int]
    pool: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of a vector: the widest there are, or what a row of a patch needs."""
        row = self.kernel[1] * self.channels * self.dtype.itemsize
        return min(vector_bytes(), max(16, 1 << (row - 1).bit_length()))

    @property
    def lanes(self) -> int:
        return self.bytes // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Vectors in a row of a patch."""
        return -(-self.kernel[1] * self.channels // self.lanes)

    @cached_property
    def windows(self) -> tuple[int, int]:
        sizes = zip((self.height, self.width), self.kernel, self.padding, self.pool, strict=True)
        rows, columns = ((size + 2 * pad - kernel + 1) // pool for size, kernel, pad, pool in sizes)
        return rows, columns

    @cached_property
    def numbers(self) -> list[int]:
        sizes = (self.channels, self.outputs, self.height, self.width)
        return [*sizes, *self.kernel, *self.padding, *self.pool]

    @property
    def room(self) -> int:
        """Numbers that a thread keeps."""
        image = (self.height + 2 * self.padding[0]) * (self.width + 2 * self.padding[1]) * self.channels
        patches, windows = self.patch * self.lanes, self.windows[0] * self.windows[1]
        return 2 * (image + self.vectors * self.lanes + self.outputs * (patches + windows))

    @property
    def patch(self) -> int:
        """Vectors of a patch."""
        return self.kernel[0] * self.vectors

    def source(self) -> str:
        real, whole = ("float", "int32_t") if self.dtype == torch.float32 else ("double", "int64_t")
        sizes = {"channels": self.channels, "outputs": self.outputs, "height": self.height, "width": self.width}
        sizes |= {"kh": self.kernel[0], "kw": self.kernel[1], "a": self.pool[0], "b": self.pool[1]}
        sizes |= {"top": self.padding[0], "left": self.padding[1], "row": self.vectors * self.lanes}
        sizes["few"] = int(self.patch <= FEW)
        codes = {"weigh": self._passes(_weigh), "spread": self._passes(_spread)}
        return _SOURCE.format(kind=real, whole=whole, bytes=self.bytes, **sizes, **codes)

    def _passes(self, code: Any) -> str:
        """The vectors of a patch, as many at a time as there are registers for."""
        every = [(i, v) for i in range(self.kernel[0]) for v in range(self.vectors)]
        most = REGISTERS[self.bytes]
        return "\n".join(code(every[at : at + most], self) for at in range(0, len(every), most))


FEW = 8  # vectors of a patch: with so few, a list of the gradients that are not zero costs more than it saves
REGISTERS = {64: 26, 32: 12, 16: 24}  # of 32, 16 and 32, by bytes of a vector


def _weigh(some: list[tuple[int, int]], of: Geometry) -> str:
    """sum += g patch"""
    own = [f"(sum + {i} * ROW + {v * of.lanes})" for i, v in some]
    seen = [f"(here + {i} * WIDE * C + {v * of.lanes})" for i, v in some]
    lines = [f"  vec s{k} = *(const vec *){place};" for k, place in enumerate(own)]
    lines += [
        "  for (int n = 0; n < count; n++) {",
        "    const real *here = x + at[n * step]; real slope = g[n * step];",
    ]
    lines += [f"    s{k} += slope * *(const vec *){place};" for k, place in enumerate(seen)]
    lines += ["  }"] + [f"  *(vec *){place} = s{k};" for k, place in enumerate(own)]
    return "  {\n" + "\n".join(lines) + "\n  }"


def _spread(some: list[tuple[int, int]], of: Geometry) -> str:
    """patch += g w"""
    own = [f"(w + {i} * ROW + {v * of.lanes})" for i, v in some]
    seen = [f"(here + {i} * WIDE * C + {v * of.lanes})" for i, v in some]
    lines = [f"  vec s{k} = *(const vec *){place};" for k, place in enumerate(own)]
    lines += ["  for (int n = 0; n < count; n++) {", "    real *here = x + at[n]; real slope = g[n];"]
    lines += [f"    *(vec *){place} += slope * s{k};" for k, place in enumerate(seen)]
    return "  {\n" + "\n".join([*lines, "  }"]) + "\n  }"


@lru_cache(maxsize=64)
def program(of: Geometry) -> Any:
    """Raises NoCompiler where it cannot be made."""
    found = load(of.source())[0]
    found.restype = None
    return found


def _call(of: Geometry, what: int, examples: int, tensors: list[Tensor | None]) -> None:
    pointers = (ctypes.c_void_p * len(tensors))(*[None if one is None else one.data_ptr() for one in tensors])
    program(of)(what, ctypes.c_int64(examples), pointers)


def _pooled(z: Tensor, numbers: list[int]) -> list[Tensor]:
    """The output of the convolution [B, O, H, W] -> the largest of each window, and where they are."""
    out, at = found = _empty(z, numbers)
    _call(geometry(tuple(numbers), z.dtype), 0, len(z), [_pixels(z), out, at])
    return found


def _empty(z: Tensor, numbers: list[int]) -> list[Tensor]:
    of = geometry(tuple(numbers), z.dtype)
    shape, whole = (len(z), of.outputs, *of.windows), torch.int32 if z.dtype == torch.float32 else torch.int64
    return [torch.empty(shape, dtype=kind, device=z.device, memory_format=LAST) for kind in (z.dtype, whole)]


def _slopes(g: Tensor, at: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    """The gradients in weight, bias and, if the last number is not zero, in x."""
    slope, level, *into = found = _like(g, at, x, weight, numbers)
    of = geometry(tuple(numbers[:-1]), x.dtype)
    given = [_pixels(g), at, _pixels(x), weight.contiguous()]
    _call(of, 1, len(x), [*given, into[0] if into else None, slope, level])
    return found


def _like(g: Tensor, at: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    found = [weight.new_empty(weight.shape), weight.new_empty(len(weight))]
    return found + ([torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=LAST)] if numbers[-1] else [])


def _pixels(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=LAST)


@lru_cache(maxsize=64)
def geometry(numbers: tuple[int, ...], dtype: torch.dtype) -> Geometry:
    c, o, h, w, kh, kw, top, left, a, b = numbers
    return Geometry(c, o, h, w, (kh, kw), (top, left), (a, b), dtype)


LAST = torch.channels_last
pooled = operator("pooled_in_c", _pooled, 1, like=_empty, numbers="int[]")
slopes = operator("pooled_in_c_backward", _slopes, 4, like=_like, numbers="int[]")
