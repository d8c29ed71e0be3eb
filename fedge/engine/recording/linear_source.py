"""The C program of a linear layer of one client: products with few rows, which torch's library is slow at.

    y = x W^T + b        dx = g W        dW = g^T x        db = sum_b g_b

x [B, I] and g [B, O] have a row per example, W [O, I] is much larger than both: what counts is to read it once, and to
do something with every number of it that is read. Tiles of sums stay in registers, and the next rows are asked for
while these are at work. Sizes are not known to the program: one serves all layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedge.engine.recording.c_library import vector_bytes

EXAMPLES, ROWS, DEEP, ACROSS = 5, 4, 8, 6  # of a tile: examples, rows of W, rows of W in dx, vectors of dW
NARROW = (3, 2, 8, 3)  # the same with 16 registers

_SOURCE = r"""
#include <stdint.h>
typedef {kind} real;
typedef real vec __attribute__((vector_size({bytes}), aligned(sizeof(real)), may_alias));
#define L ({bytes} / (int)sizeof(real))
static inline real total(vec s) {{
  real sum = 0;
  for (int k = 0; k < L; k++) sum += s[k];
  return sum;
}}
{functions}
static void forward(int64_t B, int64_t I, int64_t O, const real *x, const real *w, const real *bias, real *y) {{
  for (int64_t o = 0, rows; o < O; o += rows) {{
    rows = o + {rows} <= O ? {rows} : 1;
    for (int64_t b = 0, examples; b < B; b += examples) {{
      examples = B - b < {examples} ? B - b : {examples};
      const real *from = x + b * I, *own = w + o * I, *shift = bias ? bias + o : 0;
      real *to = y + b * O + o;
      switch (examples * 2 + (rows > 1)) {{ {dots} }}
    }}
  }}
}}
static void into(int64_t B, int64_t I, int64_t O, const real *g, const real *w, real *dx) {{
  for (int64_t o = 0, rows; o < O; o += rows) {{
    rows = o + {deep} <= O ? {deep} : 1;
    for (int64_t b = 0, examples; b < B; b += examples) {{
      examples = B - b < {examples} ? B - b : {examples};
      const real *from = g + b * O + o, *own = w + o * I;
      real *to = dx + b * I;
      switch (examples * 2 + (rows > 1)) {{ {spreads} }}
    }}
  }}
}}
static void weigh(int64_t B, int64_t I, int64_t O, const real *g, const real *x, real *dw) {{
  for (int64_t o = 0, rows; o < O; o += rows) {{
    int64_t i = 0;
    rows = o + {rows} <= O ? {rows} : 1;
    for (int64_t wide; i + L <= I; i += wide * L) {{
      wide = i + {across} * L <= I ? {across} : 1;
      switch ((rows > 1) * 2 + (wide > 1)) {{ {outers} }}
    }}
    for (; i < I; i++) for (int64_t k = o; k < o + rows; k++) {{
      real sum = 0;
      for (int64_t b = 0; b < B; b++) sum += g[b * O + k] * x[b * I + i];
      dw[k * I + i] = sum;
    }}
  }}
}}
int run(int what, int64_t B, int64_t I, int64_t O, void **p) {{
  if (!what) {{
    forward(B, I, O, p[0], p[1], p[2], p[3]);
    return 0;
  }}
  real *db = p[5];
  for (int64_t o = 0; o < O; o++) db[o] = 0;
  for (int64_t b = 0; b < B; b++) for (int64_t o = 0; o < O; o++) db[o] += ((const real *)p[0])[b * O + o];
  if (p[3]) into(B, I, O, p[0], p[2], p[3]);
  weigh(B, I, O, p[0], p[1], p[4]);
  return 0;
}}
"""


def source(dtype: torch.dtype) -> str:
    bytes_ = vector_bytes()
    examples, rows, deep, across = NARROW if bytes_ == 32 else (EXAMPLES, ROWS, DEEP, ACROSS)
    counts = range(1, examples + 1)
    dots = {(b, o): f"dot_{b}_{o}" for b in counts for o in (1, rows)}
    spreads = {(b, o): f"spread_{b}_{o}" for b in counts for o in (1, deep)}
    outers = {(o, k): f"outer_{o}_{k}" for o in (1, rows) for k in (1, across)}
    functions = (
        [_dot(*tile) for tile in dots] + [_spread(*tile) for tile in spreads] + [_outer(*tile) for tile in outers]
    )
    cases = {
        "dots": _cases({b * 2 + (o > 1): f"{name}(I, O, from, own, shift, to)" for (b, o), name in dots.items()}),
        "spreads": _cases({b * 2 + (o > 1): f"{name}(I, O, from, own, to, !o)" for (b, o), name in spreads.items()}),
        "outers": _cases({
            (o > 1) * 2 + (k > 1): f"{name}(B, I, O, g + o, x + i, dw + o * I + i)" for (o, k), name in outers.items()
        }),
    }  # fmt: skip
    kind, sizes = "float" if dtype == torch.float32 else "double", {"examples": examples, "rows": rows}
    sizes |= {"deep": deep, "across": across, "bytes": bytes_}
    return _SOURCE.format(kind=kind, functions="\n".join(functions), **sizes, **cases)


def _cases(calls: dict[int, str]) -> str:
    return " ".join(f"case {number}: {call}; break;" for number, call in calls.items())


def _each(lines: Iterable[str]) -> str:
    return " ".join(lines)


def _dot(examples: int, rows: int) -> str:
    """y of so many examples and rows of W: sums along both."""
    every, bs, os = [(b, o) for b in range(examples) for o in range(rows)], range(examples), range(rows)
    ask = _each(f"vec v{o} = *(const vec *)(w{o} + i); __builtin_prefetch(w{o} + i + {rows} * I);" for o in os)
    add = _each(f"{{ vec a = *(const vec *)(x{b} + i); {_each(f's{b}_{o} += a * v{o};' for o in os)} }}" for b in bs)
    return f"""
static void dot_{examples}_{rows}(int64_t I, int64_t O, const real *x, const real *w, const real *bias, real *y) {{
  {_each(f"const real *x{b} = x + {b} * I;" for b in bs)}
  {_each(f"const real *w{o} = w + {o} * I;" for o in os)}
  {_each(f"vec s{b}_{o} = {{0}};" for b, o in every)}
  int64_t i = 0;
  for (; i + L <= I; i += L) {{
    {ask}
    {add}
  }}
  {_each(f"real t{b}_{o} = total(s{b}_{o}) + (bias ? bias[{o}] : 0);" for b, o in every)}
  for (; i < I; i++) {{ {_each(f"t{b}_{o} += x{b}[i] * w{o}[i];" for b, o in every)} }}
  {_each(f"y[{b} * O + {o}] = t{b}_{o};" for b, o in every)}
}}"""


def _spread(examples: int, rows: int) -> str:
    """dx of so many examples, to which so many rows of W are added; `first`: nothing is there yet."""
    bs, os = range(examples), range(rows)
    ask = _each(f"vec v{o} = *(const vec *)(w + {o} * I + i); __builtin_prefetch(w + {o + rows} * I + i);" for o in os)
    many = (_each(f"s += g[{b} * O + {o}] * v{o};" for o in os) for b in bs)
    one = (_each(f"s += g[{b} * O + {o}] * w[{o} * I + i];" for o in os) for b in bs)
    vectors = (
        f"{{ vec *at = (vec *)(dx + {b} * I + i); vec s = first ? (vec){{0}} : *at; {add} *at = s; }}"
        for b, add in enumerate(many)
    )
    numbers = (
        f"{{ real *at = dx + {b} * I + i; real s = first ? 0 : *at; {add} *at = s; }}" for b, add in enumerate(one)
    )
    return f"""
static void spread_{examples}_{rows}(int64_t I, int64_t O, const real *g, const real *w, real *dx, int first) {{
  int64_t i = 0;
  for (; i + L <= I; i += L) {{
    {ask}
    {_each(vectors)}
  }}
  for (; i < I; i++) {{ {_each(numbers)} }}
}}"""


def _outer(rows: int, across: int) -> str:
    """So many rows and vectors of dW, summed over all examples."""
    every, os, ks = [(o, k) for o in range(rows) for k in range(across)], range(rows), range(across)
    return f"""
static void outer_{rows}_{across}(int64_t B, int64_t I, int64_t O, const real *g, const real *x, real *dw) {{
  {_each(f"vec s{o}_{k} = {{0}};" for o, k in every)}
  for (int64_t b = 0; b < B; b++, g += O, x += I) {{
    {_each(f"vec v{k} = *(const vec *)(x + {k} * L);" for k in ks)}
    {_each(f"{{ real a = g[{o}]; {_each(f's{o}_{k} += a * v{k};' for k in ks)} }}" for o in os)}
  }}
  {_each(f"*(vec *)(dw + {o} * I + {k} * L) = s{o}_{k};" for o, k in every)}
}}"""
