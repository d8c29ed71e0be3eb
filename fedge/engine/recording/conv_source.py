"""The C program of a convolution of very sizes: a tile of sums in registers, and every number read serves a vector.

    y_p = b + sum_ij W_ij x_(sp + ij)        dW_ij = sum_p g_p x_(sp + ij)^T        dx_q = sum_(sp + ij = q) W_ij^T g_p

p and q are pixels, s is the stride, ij runs over the kernel. Images lie with the channels of a pixel side by side, so
that a row of a patch is one piece of memory. The pixels q that have the same place between two strides see the same
part of the kernel: each of these s^2 classes is a convolution of stride one, from the slopes g to dx.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fedge.engine.recording.c_library import vector_bytes

REGISTERS = {64: 24, 32: 12, 16: 24}  # for sums, of 32, 16 and 32, by the bytes of the widest vectors

_SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef {kind} real;
{vectors}
enum {{ C = {channels}, O = {outputs}, H = {height}, W = {width}, KH = {kh}, KW = {kw}, OH = {oh}, OW = {ow},
  TOP = {top}, LEFT = {left}, WIDE = W + 2 * LEFT, IMAGE = (H + 2 * TOP) * WIDE * C, WEIGHTS = O * C * KH * KW,
  ABOVE = {above}, BEFORE = {before}, BROAD = BEFORE + OW + {behind}, SLOPES = (ABOVE + OH + {below}) * BROAD * O }};
/* A thread's own, and kept: the edges of images and slopes are zeros from the beginning, and stay so. */
static _Thread_local real image[IMAGE] __attribute__((aligned(64))), slopes[SLOPES] __attribute__((aligned(64)));
static _Thread_local real own[WEIGHTS] __attribute__((aligned(64))), sum[WEIGHTS] __attribute__((aligned(64)));
{functions}
static const real *padded(const real *x) {{
  if (!TOP && !LEFT) return x;
  for (int h = 0; h < H; h++) memcpy(image + ((h + TOP) * WIDE + LEFT) * C, x + h * W * C, sizeof(real) * W * C);
  return image;
}}
static void forward(int64_t examples, const real *x, const real *w, const real *b, real *y) {{
  for (int o = 0; o < O; o++) for (int c = 0; c < C; c++) for (int k = 0; k < KH * KW; k++)
    own[(k * C + c) * O + o] = w[(o * C + c) * KH * KW + k];
  for (int64_t e = 0; e < examples; e++, x += H * W * C, y += OH * OW * O) convolve(padded(x), own, b, y);
}}
static void backward(int64_t examples, const real *g, const real *x, const real *w, real *dx, real *dw, real *db) {{
  if (db) memset(db, 0, sizeof(real) * O);
  memset(sum, 0, sizeof(sum));
  if (dx) for (int o = 0; o < O; o++) for (int c = 0; c < C; c++) {{
    const real *from = w + (o * C + c) * KH * KW;
    real *to = own + o * C + c;
{turned}
  }}
  for (int64_t e = 0; e < examples; e++, x += H * W * C, g += OH * OW * O) {{
    weigh(padded(x), g, sum);
    if (db) for (int v = 0; v < O; v += {lanes}) {{
      vec{lanes} s = *(const vec{lanes} *)(db + v);
      for (int p = 0; p < OH * OW; p++) s += *(const vec{lanes} *)(g + p * O + v);
      *(vec{lanes} *)(db + v) = s;
    }}
    if (!dx) continue;
    for (int h = 0; h < OH; h++)
      memcpy(slopes + ((h + ABOVE) * BROAD + BEFORE) * O, g + h * OW * O, sizeof(real) * OW * O);
{spread}
    dx += H * W * C;
  }}
  for (int o = 0; o < O; o++) for (int c = 0; c < C; c++) for (int k = 0; k < KH * KW; k++)
    dw[(o * C + c) * KH * KW + k] = sum[(k * C + c) * O + o];
}}
void run(int what, int64_t examples, void **p) {{
  if (what) backward(examples, p[0], p[1], p[2], p[3], p[4], p[5]);
  else forward(examples, p[0], p[1], p[2], p[3]);
}}
"""


class Seen(NamedTuple):
    """In one direction, the taps that the pixels offset, offset + s, ... of dx see, the last of the kernel first.

    The first of so many `pixels` sees slope `start` through the first tap, the next slope through the next, and so on.
    """

    offset: int
    pixels: int
    taps: list[int]
    start: int


@dataclass(frozen=True)
class Geometry:
    """All sizes of a convolution; `into`: whether the gradient in its images is wanted."""

    channels: int
    outputs: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    into: bool
    dtype: torch.dtype

    @cached_property
    def size(self) -> tuple[int, int]:
        """Of the images that come out."""
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, strict=True)
        rows, columns = ((side + 2 * pad - kernel) // stride + 1 for side, kernel, stride, pad in sides)
        return rows, columns

    @cached_property
    def numbers(self) -> list[int]:
        sizes = (self.channels, self.outputs, self.height, self.width)
        return [*sizes, *self.kernel, *self.stride, *self.padding, int(self.into)]

    @property
    def room(self) -> int:
        """Numbers that a thread keeps."""
        (above, below), (before, behind) = self.margins(0), self.margins(1)
        image = (self.height + 2 * self.padding[0]) * (self.width + 2 * self.padding[1]) * self.channels
        slopes = (above + self.size[0] + below) * (before + self.size[1] + behind) * self.outputs
        return image + slopes + 2 * self.outputs * self.channels * self.kernel[0] * self.kernel[1]

    def lanes(self, channels: int) -> int:
        """Numbers of the widest vectors that so many channels are made of; 0 if they are made of none."""
        sizes = (size // self.dtype.itemsize for size in (64, 32, 16) if size <= vector_bytes())
        return next((lanes for lanes in sizes if channels % lanes == 0), 0)

    def fills(self, channels: int) -> bool:
        """Whether so many channels leave no lane of the widest vectors idle, or are no more than half of one."""
        lanes = self.lanes(channels)
        return lanes > 0 and (lanes * self.dtype.itemsize == vector_bytes() or lanes == channels)

    def seen(self, axis: int) -> list[Seen]:
        """Pixel q and tap i meet slope p where s p + i = q + padding."""
        side, stride, padding = (self.height, self.width)[axis], self.stride[axis], self.padding[axis]
        found = []
        for offset in range(min(stride, side)):
            taps = [i for i in reversed(range(self.kernel[axis])) if (offset + padding - i) % stride == 0]
            start = (offset + padding - taps[0]) // stride if taps else 0
            found.append(Seen(offset, -(-(side - offset) // stride), taps, start))
        return found

    def margins(self, axis: int) -> tuple[int, int]:
        """How many zeros before and behind the slopes are seen."""
        some = [one for one in self.seen(axis) if one.taps]
        ends = [one.start + one.pixels - 1 + len(one.taps) - self.size[axis] for one in some]
        return max([0, *(-one.start for one in some)]), max([0, *ends])

    def source(self) -> str:
        (oh, ow), (above, below), (before, behind) = self.size, self.margins(0), self.margins(1)
        sizes: dict[str, int] = {
            "channels": self.channels,
            "outputs": self.outputs,
            "height": self.height,
            "width": self.width,
        }
        sizes |= {"kh": self.kernel[0], "kw": self.kernel[1], "top": self.padding[0], "left": self.padding[1]}
        sizes |= {
            "lanes": self.lanes(self.outputs),
            "oh": oh,
            "ow": ow,
            "above": above,
            "below": below,
            "before": before,
            "behind": behind,
        }
        spread = _Spread(self)
        codes = {"turned": spread.turned(), "spread": spread.calls(), "vectors": _vectors(self.dtype.itemsize)}
        codes["functions"] = "\n".join([self._convolve(), self._weigh(), *spread.functions()])
        kind = "float" if self.dtype == torch.float32 else "double"
        return _SOURCE.format(kind=kind, **sizes, **codes)

    def _convolve(self) -> str:
        ends = ("OW * O", self.outputs)
        return correlation("convolve", self._taps, self.outputs, self.lanes(self.outputs), self.size, self._step, ends)

    def _weigh(self) -> str:
        return outer("weigh", self._taps, self.outputs, self.lanes(self.outputs), self.size, self._step)

    @property
    def _taps(self) -> Taps:
        return Taps(self.kernel[0], self.kernel[1] * self.channels, "WIDE * C")

    @property
    def _step(self) -> Step:
        return f"{self.stride[0]} * WIDE * C", self.stride[1] * self.channels


class _Spread:
    """dx: one function per class of pixels, each with the weights that it sees, turned round."""

    def __init__(self, of: Geometry) -> None:
        self.of, self.at = of, 0
        pairs = [(a, b) for a in of.seen(0) for b in of.seen(1)] if of.into else []
        self.pairs = [(rows, columns, self._place(rows, columns)) for rows, columns in pairs]

    def _place(self, rows: Seen, columns: Seen) -> int:
        """Where the weights of a class begin, in matrices of O x C."""
        at, self.at = self.at, self.at + len(rows.taps) * len(columns.taps)
        return at

    def turned(self) -> str:
        lines = []
        for rows, columns, at in self.pairs:
            taps = [i * self.of.kernel[1] + j for i in rows.taps for j in columns.taps]
            lines += [f"    to[{at + place} * O * C] = from[{tap}];" for place, tap in enumerate(taps)]
        return "\n".join(lines)

    def calls(self) -> str:
        lines = []
        for number, (rows, columns, at) in enumerate(self.pairs):
            seen = f"slopes + ((ABOVE + {rows.start}) * BROAD + BEFORE + {columns.start}) * O"
            place = f"dx + ({rows.offset} * W + {columns.offset}) * C"
            lines.append(f"    spread{number}({seen}, own + {at} * O * C, 0, {place});")
        return "\n".join(lines)

    def functions(self) -> Iterable[str]:
        of, (down, right) = self.of, self.of.stride
        for number, (rows, columns, _) in enumerate(self.pairs):
            taps = Taps(len(rows.taps), len(columns.taps) * of.outputs, "BROAD * O")
            sizes, step = (rows.pixels, columns.pixels), ("BROAD * O", of.outputs)
            ends = (f"{down} * W * C", right * of.channels)
            yield correlation(f"spread{number}", taps, of.channels, of.lanes(of.channels), sizes, step, ends)


class Taps(NamedTuple):
    """What one sum runs over: so many rows, each of so many numbers in a piece, and the way from row to row."""

    rows: int
    long: int
    way: str


Step = tuple[str, int]  # from a row of pixels to the next, and from a pixel to the next


def _tile(size: int, vectors: int) -> tuple[int, int, int]:
    """Of `size` places times `vectors`, a tile for the registers: vectors, places, and how many tiles of places."""
    wide = 2 if vectors % 2 == 0 else 1
    tiles = -(-size * wide // REGISTERS[vector_bytes()])
    return wide, -(-size // tiles), tiles


def correlation(name: str, taps: Taps, outputs: int, lanes: int, size: tuple[int, int], step: Step, ends: Step) -> str:
    """y[r, c] = b + sum_iq w[i, q] x[r, c, i, q], a tile of pixels of one row at a time; the last tile may overlap."""
    wide, places, tiles = _tile(size[1], outputs // lanes)
    every = [(p, o) for p in range(places) for o in range(wide)]
    own = "\n".join(
        f"    vec{lanes} s{p}_{o} = b ? *(const vec{lanes} *)(b + v + {o * lanes}) : (vec{lanes}){{0}};"
        for p, o in every
    )
    read = "\n".join(f"        vec{lanes} w{o} = *(const vec{lanes} *)(own + {o * lanes});" for o in range(wide))
    add = "\n".join(
        f"        {{ real a = row[q + {p * step[1]}]; " + " ".join(f"s{p}_{o} += a * w{o};" for o in range(wide)) + " }"
        for p in range(places)
    )
    put = "\n".join(f"    *(vec{lanes} *)(out + {p * ends[1] + o * lanes}) = s{p}_{o};" for p, o in every)
    return f"""
static __attribute__((noinline, noclone)) void {name}(const real *x, const real *w, const real *b, real *y) {{
  for (int v = 0; v < {outputs}; v += {wide * lanes})
  for (int r = 0; r < {size[0]}; r++) for (int t = 0; t < {tiles}; t++) {{
    int c = t * {places} < {size[1] - places} ? t * {places} : {size[1] - places};
    const real *in = x + r * {step[0]} + c * {step[1]}, *own = w + v;
    real *out = y + r * {ends[0]} + c * {ends[1]} + v;
{own}
    for (int i = 0; i < {taps.rows}; i++) {{
      const real *row = in + i * {taps.way};
      for (int q = 0; q < {taps.long}; q++, own += {outputs}) {{
{read}
{add}
      }}
    }}
{put}
  }}
}}"""


def outer(name: str, taps: Taps, outputs: int, lanes: int, size: tuple[int, int], step: Step) -> str:
    """sum[i, q] += sum_rc g[r, c] x[r, c, i, q], a tile of q at a time; of the last one, what is not yet done."""
    wide, places, tiles = _tile(taps.long, outputs // lanes)
    every = [(p, o) for p in range(places) for o in range(wide)]
    own = "\n".join(f"    vec{lanes} s{p}_{o} = {{0}};" for p, o in every)
    read = "\n".join(f"      vec{lanes} g{o} = *(const vec{lanes} *)(slope + {o * lanes});" for o in range(wide))
    add = "\n".join(
        f"      {{ real a = in[{p}]; " + " ".join(f"s{p}_{o} += a * g{o};" for o in range(wide)) + " }"
        for p in range(places)
    )
    put = "\n".join(
        f"    if (q + {p} >= t * {places}) *(vec{lanes} *)(out + {p * outputs + o * lanes}) += s{p}_{o};"
        for p, o in every
    )
    return f"""
static __attribute__((noinline, noclone)) void {name}(const real *x, const real *g, real *sum) {{
  for (int v = 0; v < {outputs}; v += {wide * lanes})
  for (int i = 0; i < {taps.rows}; i++) for (int t = 0; t < {tiles}; t++) {{
    int q = t * {places} < {taps.long - places} ? t * {places} : {taps.long - places};
    const real *slope = g + v;
    real *out = sum + (i * {taps.long} + q) * {outputs} + v;
{own}
    for (int r = 0; r < {size[0]}; r++) {{
      const real *in = x + i * {taps.way} + q + r * {step[0]};
      for (int c = 0; c < {size[1]}; c++, slope += {outputs}, in += {step[1]}) {{
{read}
{add}
      }}
    }}
{put}
  }}
}}"""


def _vectors(item: int) -> str:
    """Vector types by their number of lanes; a vector may begin at any number."""
    return "\n".join(
        f"typedef real vec{size // item} __attribute__((vector_size({size}), aligned(sizeof(real)), may_alias));"
        for size in (64, 32, 16)
    )
