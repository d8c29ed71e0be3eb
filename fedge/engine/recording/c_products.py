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

# Vectors of sixteen floats: loaded and stored in part, summed up, and their exponential.
VECTORS = """
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
#define WHOLE(n) (((n) + 15) / 16 * 16)
static inline v16 some(const float *p, int n) {
  if (n == 16) return *(const v16 *)p;
  v16 found = {0};
  for (int l = 0; l < n; l++) found[l] = p[l];
  return found;
}
static inline void put(float *p, v16 x, int n) {
  if (n == 16) *(v16 *)p = x;
  else for (int l = 0; l < n; l++) p[l] = x[l];
}
static inline v16 choose(i16 where, v16 a, v16 b) { return (v16)((where & (i16)a) | (~where & (i16)b)); }
/* exp(x) = 2^n exp(r), |r| <= log(2) / 2, by the polynomial of Cephes; NaN stays NaN. */
static inline v16 power(v16 x) {
  v16 zero = {0};
  x = choose(x > 88.f, zero + 88.f, x);
  x = choose(x < -87.f, zero - 87.f, x);
  v16 scaled = x * 1.44269504088896341f;
  i16 n = __builtin_convertvector(scaled + choose(scaled < 0.f, zero - .5f, zero + .5f), i16);
  v16 whole = __builtin_convertvector(n, v16), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return (p * r * r + r + 1.f) * (v16)((n + 127) << 23);
}
#define HALVES(x, step) \
  step(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)) \
  step(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)) \
  step(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)) \
  step(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#define PLUS(x, y) x += y;
#define LARGER(x, y) { v16 other = y; x = choose(other > x, other, x); }
static inline float total(v16 x) { HALVES(x, PLUS) return x[0]; }
static inline float largest(v16 x) { HALVES(x, LARGER) return x[0]; }
"""
