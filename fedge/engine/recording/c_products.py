"""Products of small matrices in C: up to five rows and four vectors of columns at a time, sums in registers."""

from __future__ import annotations

_KERNEL = """
typedef {kind} {v} __attribute__((vector_size(64), aligned({size}), may_alias));
static inline __attribute__((always_inline)) void tile_{name}(int rows, int vectors, int last, int inner,
    const {kind} *a, int am, int ak, const {kind} *b, int bk, {kind} *c, int cm) {{
  {v} sum[5][4];
  for (int r = 0; r < rows; r++) for (int w = 0; w < vectors; w++) sum[r][w] = ({v}){{0}};
  for (int k = 0; k < inner; k++)
    for (int w = 0; w < vectors; w++) {{
      {v} right = *(const {v} *)(b + k * bk + w * {lanes});
      for (int r = 0; r < rows; r++) sum[r][w] += a[r * am + k * ak] * right;
    }}
  for (int r = 0; r < rows; r++)
    for (int w = 0; w < vectors; w++) {{
      int here = w == vectors - 1 ? last : {lanes};
      if (here == {lanes}) *({v} *)(c + r * cm + w * {lanes}) += sum[r][w];
      else for (int l = 0; l < here; l++) c[r * cm + w * {lanes} + l] += sum[r][w][l];
    }}
}}
static inline __attribute__((always_inline)) void band_{name}(int rows, int columns, int inner,
    const {kind} *a, int am, int ak, const {kind} *b, int bk, {kind} *c, int cm) {{
  int n = 0;
  for (; n + 4 * {lanes} <= columns; n += 4 * {lanes})
    tile_{name}(rows, 4, {lanes}, inner, a, am, ak, b + n, bk, c + n, cm);
  for (; n + 2 * {lanes} <= columns; n += 2 * {lanes})
    tile_{name}(rows, 2, {lanes}, inner, a, am, ak, b + n, bk, c + n, cm);
  for (; n + {lanes} <= columns; n += {lanes}) tile_{name}(rows, 1, {lanes}, inner, a, am, ak, b + n, bk, c + n, cm);
  if (n < columns) tile_{name}(rows, 1, columns - n, inner, a, am, ak, b + n, bk, c + n, cm);
}}
typedef {kind} q_{name} __attribute__((vector_size({quad}), aligned({size}), may_alias));
/* Four rows and columns of a become columns and rows of b. */
static inline __attribute__((always_inline)) void turn_{name}(const {kind} *a, int am, {kind} *b, int bm) {{
  q_{name} r0 = *(const q_{name} *)a, r1 = *(const q_{name} *)(a + am);
  q_{name} r2 = *(const q_{name} *)(a + 2 * am), r3 = *(const q_{name} *)(a + 3 * am);
  q_{name} s0 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), s1 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
  q_{name} s2 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5), s3 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
  *(q_{name} *)b = __builtin_shufflevector(s0, s2, 0, 1, 4, 5);
  *(q_{name} *)(b + bm) = __builtin_shufflevector(s0, s2, 2, 3, 6, 7);
  *(q_{name} *)(b + 2 * bm) = __builtin_shufflevector(s1, s3, 0, 1, 4, 5);
  *(q_{name} *)(b + 3 * bm) = __builtin_shufflevector(s1, s3, 2, 3, 6, 7);
}}
/* c += a b; rows of b and c lie one after another, those of b in whole vectors. */
static inline __attribute__((always_inline)) void product_{name}(int rows, int columns, int inner,
    const {kind} *a, int am, int ak, const {kind} *b, int bk, {kind} *c, int cm) {{
  int m = 0;
  for (; rows % 5 == 0 && m < rows; m += 5) band_{name}(5, columns, inner, a + m * am, am, ak, b, bk, c + m * cm, cm);
  for (; m + 4 <= rows; m += 4) band_{name}(4, columns, inner, a + m * am, am, ak, b, bk, c + m * cm, cm);
  for (; m + 2 <= rows; m += 2) band_{name}(2, columns, inner, a + m * am, am, ak, b, bk, c + m * cm, cm);
  for (; m < rows; m++) band_{name}(1, columns, inner, a + m * am, am, ak, b, bk, c + m * cm, cm);
}}
"""

PRELUDE = (
    "#include <math.h>\n#include <stdint.h>\n"
    + _KERNEL.format(name="f32", kind="float", v="v16", lanes=16, size=4, quad=16)
    + _KERNEL.format(name="f64", kind="double", v="v8", lanes=8, size=8, quad=32)
)
