/* Vectors of W numbers, for native.c, across.c and fused.c. Macros: REAL and INT are float and int32_t, or double and
   int64_t; BYTES is at most how wide a vector is. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if BYTES == 64 && !defined(__AVX512F__)
#undef BYTES
#define BYTES 32
#endif
#if BYTES == 32 && !defined(__AVX__)
#undef BYTES
#define BYTES 16
#endif
#define W ((int)(BYTES / sizeof(REAL)))

typedef REAL vec __attribute__((vector_size(BYTES), may_alias));
typedef INT ivec __attribute__((vector_size(BYTES), may_alias));
typedef vec loose __attribute__((aligned(sizeof(REAL)))); /* a vector anywhere in memory */

static inline vec splat(REAL x) { return x - (vec){0}; }
static inline vec pick(ivec yes, vec a, vec b) { return (vec)((yes & (ivec)a) | (~yes & (ivec)b)); }

/* exp(x) for x <= 0: 2^n times the Taylor series of the rest, whose size is at most ln(2) / 2. NaN stays NaN. */
static inline vec exp_negative(vec x) {
    static const REAL factor[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
                                  1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
    const int single = sizeof(REAL) == 4, terms = single ? 7 : 13;
    const REAL rounder = single ? 12582912.0 : 6755399441055744.0; /* 1.5 * 2^mantissa bits: adding it rounds */
    vec n = (x * (REAL)1.4426950408889634 + rounder) - rounder;
    vec rest = x - n * (REAL)(single ? 0.693359375 : 0.693147180369123816490); /* ln(2) in two parts */
    rest -= n * (REAL)(single ? -2.12194440e-4 : 1.90821492927058770002e-10);
    vec series = splat(factor[terms]);
#pragma GCC unroll 16
    for (int k = terms - 1; k >= 0; k--) series = series * rest + factor[k];
    vec power = (vec)((__builtin_convertvector(n, ivec) + (single ? 127 : 1023)) << (single ? 23 : 52));
    return pick(x < (REAL)(single ? -87 : -708), splat(0), series * power);
}

static inline vec sigmoid(vec x) {
    vec small = exp_negative(pick(x > 0, -x, x)); /* exp(-|x|) */
    return pick(x > 0, splat(1), small) / (1 + small);
}
